"""
Search-key score of StepSearch: how well the queries of a rollout covered the expected sub-questions.

Shapes: `Q` queries of a rollout in order, `P` expected sub-questions.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_dimensions


def search_key_score(matches: torch.Tensor, *, repeated: Literal["best", "last"] = "best") -> torch.Tensor:
    """
    Mean over sub-questions of the match of the query assigned to each.

    Every query is assigned to the sub-question that it matches best (the earlier one on a tie), and to none if it
    matches nothing. A sub-question without a query scores 0. StepSearch (arXiv 2505.15107).

    Args:
        matches (`torch.Tensor` of shape `(Q, P)`):
            Similarity of every query to every sub-question, such as the best token F1 over its wordings; not negative.
        repeated (`str`, *optional*, defaults to `"best"`):
            Score of a sub-question with several queries: that of the `"best"`, or of the `"last"` one, even if it is
            worse, as in the released code.

    Returns:
        `torch.Tensor` of shape `()`: Score between 0 and 1; 0 without queries or sub-questions.

    Raises:
        `ValueError`: If `matches` is no matrix or an option is unknown.

    Example:

    ```python
    >>> matches = torch.tensor([[0.75, 0.0], [0.5, 0.25]])
    >>> search_key_score(matches), search_key_score(matches, repeated="last")
    (tensor(0.3750), tensor(0.2500))

    ```
    """
    check_choice("repeated", repeated, ("best", "last"))
    check_dimensions("matches", matches, "Q", "P")
    num_queries, num_keys = matches.shape
    scores = matches.new_zeros(num_keys)
    if num_queries == 0 or num_keys == 0:
        return scores.sum()
    for row in matches:
        key = int(row.argmax())
        if row[key] > 0:
            scores[key] = row[key] if repeated == "last" else torch.maximum(scores[key], row[key])
    return scores.mean()

"""Evaluation: rollouts of a policy on a set of questions, resumable."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grounded_rl.data.rows import Question
from grounded_rl.errors import ConfigurationError, RolloutError
from grounded_rl.rollouts.io import iterate_rollouts, save_rollouts
from grounded_rl.rollouts.types import Rollout
from grounded_rl.sampling.engine import Engine
from grounded_rl.sampling.scheduler import RolloutSampler

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial"


def evaluate_policy(
    engine: Engine,
    sampler: RolloutSampler,
    questions: Sequence[Question],
    *,
    samples: int = 1,
    path: str | os.PathLike | None = None,
    chunk_size: int = 256,
    on_progress: Callable[[int], None] | None = None,
    extras: Mapping[str, object] | None = None,
) -> list[Rollout]:
    """
    Roll out a policy on every question.

    Args:
        engine ([`~sampling.Engine`]):
            The policy; its decoding settings decide whether evaluation is greedy.
        sampler ([`~sampling.RolloutSampler`]):
            The same rollout loop training uses.
        questions (`Sequence[Question]`):
            Questions, each rolled out `samples` times.
        samples (`int`, *optional*, defaults to `1`):
            Rollouts per question.
        path (`str` or `PathLike`, *optional*):
            File the rollouts are written to. Finished chunks are kept beside it under the suffix `.partial` until all
            are done, and an interrupted evaluation of the same questions goes on from there.
        chunk_size (`int`, *optional*, defaults to `256`):
            Questions rolled out together.
        on_progress (`Callable[[int], None]`, *optional*):
            Called with the number of questions that were just finished, kept ones included.
        extras (`Mapping[str, object]`, *optional*):
            Provenance written into every rollout, JSON-serialisable: policy, index, decoding. A kept part with other
            provenance is refused.

    Returns:
        `list[Rollout]`: Rollouts in the order of the questions.

    Raises:
        `ConfigurationError`: If `samples` or `chunk_size` is below 1, or the kept part belongs to another evaluation.
        `RetrievalError`: If a search fails; what was finished before stays on disk.
    """
    if samples < 1 or chunk_size < 1:
        raise ConfigurationError(
            f"`samples` and `chunk_size` must be at least 1: got {samples} and {chunk_size}. Raise them."
        )
    extras = dict(extras or {})
    partial = None if path is None else Path(f"{os.fspath(path)}{PARTIAL_SUFFIX}")
    done = [] if partial is None else _kept(partial, questions, samples, extras)
    finished = len(done) // samples
    if on_progress is not None and finished:
        on_progress(finished)
    for start in range(finished, len(questions), chunk_size):
        chunk = questions[start : start + chunk_size]
        rollouts = [
            replace(rollout, extras={**rollout.extras, **extras})
            for rollout in sampler.sample(engine, sampler.requests(chunk, samples=samples))
        ]
        if partial is not None:
            save_rollouts(partial, rollouts, append=True)
        done += rollouts
        if on_progress is not None:
            on_progress(len(chunk))
    if path is not None and partial is not None:
        save_rollouts(path, done)
        partial.unlink(missing_ok=True)
    return done


def _kept(partial: Path, questions: Sequence[Question], samples: int, extras: Mapping[str, object]) -> list[Rollout]:
    """Rollouts an interrupted evaluation left behind, whole questions only."""
    if not partial.is_file():
        return []
    kept: list[Rollout] = []
    try:
        kept.extend(iterate_rollouts(partial))
    except (RolloutError, UnicodeDecodeError):
        # The last line of a killed process may be incomplete; everything before it is sound.
        logger.warning("%s ends in an incomplete line, which is rolled out again", partial)
    kept = kept[: len(kept) // samples * samples]
    expected = [(question.id, question.question) for question in questions for _ in range(samples)]
    found = [(rollout.question_id, rollout.question) for rollout in kept]
    if found != expected[: len(kept)] or any(dict(rollout.extras) != extras for rollout in kept):
        raise ConfigurationError(
            f"`{partial}` must hold rollouts of the same questions, samples and policy: got others. Remove it to "
            "start anew, or evaluate into another folder."
        )
    save_rollouts(partial, kept)
    return kept

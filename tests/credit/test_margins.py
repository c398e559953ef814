import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import entropy_from_topk, margin_from_topk, token_margin, topk_entropy
from tests.credit import reference
from tests.credit.batches import assert_equal, batches, quick

MARGINS = ["lse", "mean", "max"]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_margins_of_the_worked_distributions():
    # p = 0.5 against 0.3, 0.1, 0.05; the two remaining tokens are the tail
    logps = tensor(0.3, 0.5, 0.05, 0.1, 0.03, 0.02).log()
    one = torch.tensor(1)
    assert_equal(token_margin(logps, one), 0.105361, rtol=1e-5)  # log(0.5 / 0.45)
    assert_equal(token_margin(logps, one, margin="mean"), 1.474283, rtol=1e-6)  # log 0.5 - log(0.0015) / 3
    assert_equal(token_margin(logps, one, margin="max"), 0.510826, rtol=1e-5)  # log(0.5 / 0.3)
    # p = 0.08 against 0.6, 0.2, 0.05
    logps = tensor(0.6, 0.2, 0.08, 0.05, 0.04, 0.03).log()
    two = torch.tensor(2)
    assert_equal(token_margin(logps, two), -2.363210, rtol=1e-6)  # log(0.08 / 0.85)
    assert_equal(token_margin(logps, two, margin="mean"), -0.820397, rtol=1e-5)
    assert_equal(token_margin(logps, two, margin="max"), -2.014903, rtol=1e-6)
    # p = 0.97 against 0.02, 0.005, 0.001
    logps = tensor(0.97, 0.02, 0.005, 0.001, 0.004).log()[[0, 1, 2, 3]]
    assert_equal(token_margin(logps, torch.tensor(0)), 3.619200, rtol=1e-6)  # log(0.97 / 0.026)


def test_a_token_outside_the_candidates_is_compared_with_the_first_of_them():
    logits = tensor(5.0, 4.0, 3.0, 2.0, 1.0)
    # Token 4 is not among the four largest, so 5, 4 and 3 are its competitors and 2 is left out.
    expected = 1.0 - torch.logsumexp(tensor(5.0, 4.0, 3.0), 0)
    assert_equal(token_margin(logits, torch.tensor(4)), expected)
    # Token 3 is the last candidate and is left out itself.
    assert_equal(token_margin(logits, torch.tensor(3)), expected + 1.0)


def test_a_small_vocabulary_gives_the_competitors_it_has():
    assert_equal(token_margin(tensor(1.0, 3.0, 2.0), torch.tensor(0), margin="mean"), -1.5)  # 1 - (3 + 2) / 2
    assert_equal(token_margin(tensor(1.0, 3.0), torch.tensor(0)), -2.0)
    for margin in MARGINS:
        assert token_margin(tensor(1.0), torch.tensor(0), margin=margin).item() == 50.0


def test_margins_are_clamped_to_fifty_nats():
    logits = tensor(0.0, -200.0, -torch.inf, -torch.inf, -torch.inf)
    for margin in MARGINS:
        assert token_margin(logits, torch.tensor(0), margin=margin).item() == 50.0
        assert token_margin(logits, torch.tensor(1), margin="max").item() == -50.0
    assert_equal(token_margin(tensor(49.0, 0.0), torch.tensor(0)), 49.0)


@quick
@given(batches(4, 3), st.integers(1, 12), st.integers(1, 5), st.sampled_from(MARGINS))
def test_margins_equal_the_loop_and_do_not_depend_on_the_scale_of_logits(batch, vocabulary, competitors, margin):
    logits = 3 * batch.normal(batch.rows, batch.columns, vocabulary)
    ids = batch.integers(0, vocabulary)
    options = {"num_competitors": competitors, "margin": margin}
    actual = token_margin(logits, ids, **options)
    expected = [
        [reference.token_margin(row, token, competitors, margin) for row, token in zip(*rows, strict=True)]
        for rows in zip(logits.tolist(), ids.tolist(), strict=True)
    ]
    assert_equal(actual, expected)
    assert_equal(token_margin(logits.log_softmax(-1), ids, **options), actual, rtol=1e-11)
    # A longer list of candidates, as a tiled pass over the vocabulary yields, changes nothing.
    top = logits.topk(min(vocabulary, competitors + 4), dim=-1)
    own = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert_equal(margin_from_topk(own, top.values, top.indices, ids, **options), actual)


def test_entropies_of_the_worked_distributions():
    assert_equal(topk_entropy(tensor(0.5, 0.3, 0.1, 0.1).log()), 0.842738, rtol=1e-6)  # 1.168282 / log 4
    # The four largest of seven, renormalised to 0.631579, 0.210526, 0.105263, 0.052632
    logits = tensor(0.02, 0.6, 0.05, 0.2, 0.01, 0.1, 0.02).log()
    assert_equal(topk_entropy(logits, top_m=4), 0.728712, rtol=1e-6)
    assert_equal(topk_entropy(torch.zeros(40, dtype=torch.float64)), 1.0)
    assert topk_entropy(tensor(0.0, -torch.inf, -torch.inf)).item() == 0.0
    assert_equal(topk_entropy(tensor(0.0, 0.0, -torch.inf)), 0.6309297535714575)  # log 2 / log 3
    assert topk_entropy(torch.zeros(2, 1)).tolist() == [0.0, 0.0]
    assert topk_entropy(torch.zeros(2, 5), top_m=1).tolist() == [0.0, 0.0]


@quick
@given(batches(4, 3), st.integers(1, 40), st.sampled_from([1, 2, 5, 32]))
def test_entropies_equal_the_loop_and_stay_in_the_unit_interval(batch, vocabulary, top_m):
    logits = 5 * batch.normal(batch.rows, batch.columns, vocabulary)
    actual = topk_entropy(logits, top_m=top_m)
    assert_equal(actual, [[reference.topk_entropy(row, top_m) for row in rows] for rows in logits.tolist()])
    assert ((actual >= 0) & (actual <= 1)).all()
    top = logits.topk(min(vocabulary, top_m)).values
    assert_equal(entropy_from_topk(top.flip(-1) - 7.0), actual)


def test_the_default_entropy_reads_thirty_two_tokens():
    logits = torch.cat([torch.zeros(32), torch.full((10,), -1.0)])
    assert topk_entropy(logits).item() == pytest.approx(1.0)
    assert topk_entropy(logits, top_m=33).item() < 0.999


def test_rounding_never_lifts_an_entropy_above_one():
    for size in range(2, 60):
        assert entropy_from_topk(torch.full((size,), 0.1)).item() <= 1.0


def test_half_precision_logits_are_promoted():
    logits = torch.zeros(2, 8, dtype=torch.bfloat16)
    # Four equal tokens: log(1 / 3)
    assert token_margin(logits, torch.tensor([0, 1])).tolist() == pytest.approx([-1.0986122886681098] * 2)
    assert topk_entropy(logits).dtype == torch.float32
    assert entropy_from_topk(logits).tolist() == pytest.approx([1.0, 1.0])


def test_margins_and_entropies_have_exact_gradients():
    logits = tensor(0.3, -0.2, 1.0, 0.1, -2.0).requires_grad_()
    for margin in MARGINS:
        assert torch.autograd.gradcheck(lambda x, name=margin: token_margin(x, torch.tensor(1), margin=name), logits)
    assert torch.autograd.gradcheck(lambda x: topk_entropy(x, top_m=4), logits)


ROW = torch.zeros(1, 2)


IDS = torch.zeros(1, 2, dtype=torch.long)


TOP = torch.zeros(1, 2, 4)


TOP_IDS = torch.zeros(1, 2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: token_margin(TOP, IDS[0]),
            ValueError,
            "`token_ids` must have the shape of `logits_or_logps` without its last dimension, (1, 2): got (2,). "
            "Pass one sampled token per position.",
        ),
        (
            lambda: token_margin(TOP, IDS, num_competitors=0),
            ValueError,
            "`num_competitors` must be finite and at least 1: got 0. Choose a larger finite value.",
        ),
        (
            lambda: token_margin(TOP, IDS, margin="min"),
            ValueError,
            "`margin` must be one of 'lse', 'mean', 'max': got 'min'. Pick one of them.",
        ),
        (
            lambda: margin_from_topk(ROW, TOP, TOP_IDS, IDS, num_competitors=0),
            ValueError,
            "`num_competitors` must be finite and at least 1: got 0. Choose a larger finite value.",
        ),
        (
            lambda: margin_from_topk(ROW, TOP, TOP_IDS, IDS[0]),
            ValueError,
            "`token_ids` must have the shape of `token_logits`, (1, 2): got (2,). "
            "Pass one entry of `token_ids` per entry of `token_logits`.",
        ),
        (
            lambda: margin_from_topk(ROW, TOP, TOP_IDS[0], IDS),
            ValueError,
            "`top_ids` must have the shape of `top_values`, (1, 2, 4): got (2, 4). "
            "Pass one entry of `top_ids` per entry of `top_values`.",
        ),
        (
            lambda: margin_from_topk(ROW, TOP[0], TOP_IDS[0], IDS),
            ValueError,
            "`top_values` must have the shape of `token_logits`, (1, 2), plus one dimension: got (2, 4). "
            "Pass the candidates of every position.",
        ),
        (
            lambda: topk_entropy(TOP, top_m=0),
            ValueError,
            "`top_m` must be finite and at least 1: got 0. Choose a larger finite value.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()


def test_margins_pool_three_competitors_by_log_sum_exp_unless_told_otherwise():
    token, values, ids = tensor(1.0), tensor(2.0, 1.5, 1.0, 0.5, 0.0), torch.arange(1, 6)
    zero = torch.tensor(0)
    expected = 1.0 - tensor(2.0, 1.5, 1.0).logsumexp(0)
    assert_equal(margin_from_topk(token[0], values, ids, zero), expected)


def test_a_margin_against_nobody_is_refused():
    with pytest.raises(ValueError, match="`num_competitors` must be finite and at least 1: got 0"):
        token_margin(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), num_competitors=0)

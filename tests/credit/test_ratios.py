import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    clipped_surrogate,
    contiguous_segments,
    equivalent_old_logps,
    importance_ratio,
    masked,
    segment_importance_ratio,
    seq_mean_token_mean,
)
from tests.credit import reference
from tests.credit.batches import assert_equal, batches, quick

# The recorded vectors were computed in float32 and printed with nine digits.
ORACLE_RTOL = 1e-5
LEVELS = ["token", "sequence", "sequence_token", "turn"]

OLD = torch.tensor([[-1.0, -0.5, -0.2, float("nan"), -2.0, -0.1]], dtype=torch.float64)
NEW = torch.tensor([[-0.99, -0.51, -0.19, float("nan"), -2.03, -0.1]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0, 1, 1]])


def logps_of(batch):
    """Current and old log-probabilities, garbage outside the mask, a few ratios beyond the cap."""
    old = -batch.uniform() * 3
    shift = batch.normal() * 0.3 + torch.where(batch.uniform() < 0.1, 14.0, 0.0)
    return batch.garbage(old + shift), batch.garbage(old)


def test_two_turns_give_the_worked_ratios_objective_and_gradient():
    new = NEW.clone().requires_grad_()
    ratio = importance_ratio(new, OLD, mask=MASK, level="turn")
    # Turn means (0.01 - 0.01 + 0.01) / 3 and (-0.03 + 0) / 2
    first, second = torch.tensor([0.01 / 3, -0.015], dtype=torch.float64).exp().tolist()
    assert_equal(ratio, [[first, first, first, 1.0, second, second]])
    assert_equal(ratio, [[1.003339] * 3 + [1.0] + [0.985112] * 2], rtol=1e-6)
    advantages = torch.tensor([[0.8, 0.8, 0.8, 0.0, -1.1, -1.1]], dtype=torch.float64)
    objective = clipped_surrogate(ratio, advantages, clip_low=0.003, clip_high=0.004)
    # 0.8 r, unclipped, on three tokens; 0.997 * -1.1, clipped, on two
    assert_equal(objective, [[0.802671] * 3 + [0.0] + [-1.0967] * 2], rtol=1e-6)
    seq_mean_token_mean(objective, MASK).backward()
    # Every token of the first turn moves the mean over five tokens by 0.8 r / 5.
    assert_equal(new.grad, [[0.8 * first / 5] * 3 + [0.0, 0.0, 0.0]])
    assert_equal(seq_mean_token_mean(objective, MASK), 0.042923, rtol=1e-4)
    assert_equal(new.grad[0, 0], 0.160534, rtol=1e-5)


def test_one_ratio_per_segment_is_a_geometric_mean():
    logps = torch.tensor([[-0.5, -1.0, float("nan"), -3.0]], dtype=torch.float64)
    old_logps = torch.tensor([[-1.0, -1.7, float("nan"), -3.0]], dtype=torch.float64)
    ratio = segment_importance_ratio(logps, old_logps, torch.tensor([[0, 0, -1, 2]]), num_segments=4)
    # exp((0.5 + 0.7) / 2) = exp(0.6); segments 1 and 3 have no token
    assert_equal(ratio, [[1.8221188003905089, 1.0, 1.0, 1.0]])


@quick
@given(batches(), st.sampled_from(LEVELS))
def test_ratios_equal_the_loops(batch, level):
    new, old = logps_of(batch)
    turns = contiguous_segments(batch.mask)
    expected = [
        reference.log_ratios(*row, level, own)
        for *row, own in zip(new.tolist(), old.tolist(), batch.mask.tolist(), turns.tolist(), strict=True)
    ]
    ratio = importance_ratio(new, old, mask=batch.mask, level=level)
    assert_equal(ratio, torch.tensor(expected, dtype=torch.float64).exp())
    assert (ratio[~batch.mask] == 1).all()


@quick
@given(batches(), st.integers(1, 4))
def test_segment_ratios_equal_the_loops_and_spread_to_turn_ratios(batch, num_segments):
    new, old = logps_of(batch)
    ids = torch.where(batch.mask, batch.integers(0, num_segments), -1)
    ratio = segment_importance_ratio(new, old, ids, num_segments)
    expected = [
        reference.per_segment(reference.mean, row, own, num_segments)
        for row, own in zip((new - old).tolist(), ids.tolist(), strict=True)
    ]
    assert_equal(ratio, torch.tensor(expected, dtype=torch.float64).exp())
    spread = torch.where(batch.mask, ratio.gather(1, ids.clamp(min=0)), 1.0)
    turn = importance_ratio(new, old, mask=batch.mask, turn_ids=ids, level="turn", max_log_ratio=100.0)
    assert_equal(turn, spread)


@quick
@given(batches())
def test_levels_reduce_to_each_other(batch):
    new, old = logps_of(batch)
    own = torch.arange(batch.columns).expand(batch.rows, -1)
    options = {"mask": batch.mask, "max_log_ratio": 100.0}
    token = importance_ratio(new, old, **options)
    assert_equal(importance_ratio(new, old, turn_ids=own, level="turn", **options), token)
    assert_equal(segment_importance_ratio(new, old, torch.where(batch.mask, own, -1), batch.columns), token)
    whole = importance_ratio(new, old, level="sequence_token", **options)
    assert_equal(importance_ratio(new, old, turn_ids=0 * own, level="turn", **options), whole)
    assert_equal(importance_ratio(new, old, level="sequence", **options), whole)
    # Ids outside the mask are never read, and gaps between ids are harmless.
    turns = contiguous_segments(batch.mask)
    sparse = torch.where(batch.mask, 3 * turns, -7)
    by_runs = importance_ratio(new, old, level="turn", **options)
    assert_equal(
        importance_ratio(new, old, turn_ids=torch.where(batch.mask, sparse, -1), level="turn", **options), by_runs
    )
    assert (importance_ratio(old, old, level="turn", **options) == 1).all()


def row_gradient(ratio, logps, advantages):
    """Gradient of the summed objective with respect to the log-probabilities."""
    return torch.autograd.grad((ratio * advantages).sum(), logps)[0]


@quick
@given(batches(), st.sampled_from(["token", "sequence_token", "turn"]))
def test_every_token_keeps_a_gradient_of_its_own(batch, level):
    new, old = logps_of(batch)
    new = torch.where(new - old > 5, old + 0.1, new).requires_grad_()
    advantages = batch.normal()
    ratio = importance_ratio(new, old, mask=batch.mask, level=level)
    gradient = row_gradient(ratio, new, advantages)
    assert_equal(gradient, torch.where(batch.mask, ratio.detach() * advantages, 0.0))


@quick
@given(batches())
def test_the_sequence_ratio_spreads_the_mean_advantage_over_its_tokens(batch):
    new, old = logps_of(batch)
    new = torch.where(new - old > 5, old + 0.1, new).requires_grad_()
    advantages = torch.where(batch.mask, batch.normal(), 0.0)
    ratio = importance_ratio(new, old, mask=batch.mask, level="sequence")
    gradient = row_gradient(ratio, new, advantages)
    mean = advantages.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1)
    assert_equal(gradient, torch.where(batch.mask, ratio.detach() * mean, 0.0))


@pytest.mark.parametrize("level", LEVELS)
def test_a_capped_ratio_is_the_cap_and_has_no_gradient(level):
    new = torch.tensor([[12.0, 13.0]], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, 2, dtype=torch.float64)
    ratio = importance_ratio(new, old, mask=torch.ones(1, 2), level=level)
    assert_equal(ratio, [[22026.465794806718] * 2])  # exp(10)
    assert torch.autograd.grad(ratio.sum(), new)[0].tolist() == [[0.0, 0.0]]
    lower = importance_ratio(new, old, mask=torch.ones(1, 2), level=level, max_log_ratio=2.0)
    assert_equal(lower, [[7.38905609893065] * 2])  # exp(2)
    # Only large ratios are capped.
    assert (importance_ratio(-new, old, mask=torch.ones(1, 2), level=level) < 1e-5).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_plain_ratios_have_the_gradient_of_finite_differences(level):
    old = torch.nan_to_num(OLD)
    new = torch.nan_to_num(NEW).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: importance_ratio(x, old, mask=MASK, level=level), new)
    ids = torch.tensor([[0, 0, 0, -1, 1, 1]])
    assert torch.autograd.gradcheck(lambda x: segment_importance_ratio(x, old, ids, 3), new)


@pytest.mark.parametrize("level", LEVELS)
def test_no_gradient_reaches_old_log_probabilities_or_masked_tokens(level):
    new, old = NEW.clone().requires_grad_(), OLD.clone().requires_grad_()
    importance_ratio(new, old, mask=MASK, level=level).sum().backward()
    segment_importance_ratio(new, old, torch.where(MASK == 1, 0, -1), 1).sum().backward()
    assert old.grad is None
    assert new.grad[0, 3].item() == 0.0
    assert (new.grad[MASK == 1] > 0).all()


@quick
@given(batches(), st.sampled_from(["token", "sequence_token", "turn"]))
def test_the_token_ratio_against_the_equivalent_reference_is_the_ratio_of_the_level(batch, level):
    new, old = logps_of(batch)
    new.requires_grad_()
    moved = equivalent_old_logps(new, old, mask=batch.mask, level=level, max_log_ratio=100.0)
    assert not moved.requires_grad
    assert torch.equal(moved[~batch.mask].isnan(), old[~batch.mask].isnan())
    advantages = batch.normal()
    wanted = importance_ratio(new, old, mask=batch.mask, level=level, max_log_ratio=100.0)
    actual = importance_ratio(new, moved, mask=batch.mask, max_log_ratio=100.0)
    # The reference is rounded at the size of a log-probability.
    assert_equal(actual, wanted, rtol=1e-11)
    assert_equal(row_gradient(actual, new, advantages), row_gradient(wanted, new, advantages), rtol=1e-11)
    by_turn = {"turn_ids": contiguous_segments(batch.mask)} if level == "turn" else {}
    again = equivalent_old_logps(new, old, mask=batch.mask, level=level, max_log_ratio=100.0, **by_turn)
    assert_equal(again[batch.mask], moved[batch.mask])


def test_the_equivalent_reference_caps_its_log_ratio_and_shares_turns_by_default():
    new = torch.tensor([[12.0, 14.0, 0.0]], dtype=torch.float64)
    old = torch.tensor([[0.0, 0.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    assert_equal(equivalent_old_logps(new, old, mask=mask), [[2.0, 4.0, 5.0]])  # 13 capped at 10
    assert_equal(equivalent_old_logps(new, old, mask=mask, level="token", max_log_ratio=13.0), [[0.0, 1.0, 5.0]])
    assert_equal(equivalent_old_logps(new, old, mask=mask, level="turn", max_log_ratio=20.0), [[-1.0, 1.0, 5.0]])


@quick
@given(batches(), st.sampled_from(LEVELS), st.integers(1, 20))
def test_padding_row_order_and_chunks_change_nothing(batch, level, elements):
    new, old = logps_of(batch)
    ratio = importance_ratio(new, old, mask=batch.mask, level=level)
    wide = [torch.nn.functional.pad(x, (0, 3), value=value) for x, value in ((new, float("nan")), (old, 7.0))]
    padded = importance_ratio(*wide, mask=torch.nn.functional.pad(batch.mask, (0, 3)), level=level)
    assert_equal(padded[:, : batch.columns], ratio)
    assert_equal(importance_ratio(new.flip(0), old.flip(0), mask=batch.mask.flip(0), level=level), ratio.flip(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "CHUNK_ELEMENTS", elements)
        assert torch.equal(importance_ratio(new, old, mask=batch.mask, level=level), ratio)


def test_rows_and_columns_may_be_missing():
    for shape in ((0, 3), (2, 0)):
        nothing = torch.zeros(shape)
        for level in LEVELS:
            assert importance_ratio(nothing, nothing, mask=nothing, level=level).shape == shape
    quiet = torch.full((1, 2), float("nan"))
    assert importance_ratio(quiet, quiet, mask=torch.zeros(1, 2), level="turn").tolist() == [[1.0, 1.0]]


def test_half_precision_log_probabilities_are_promoted():
    half = torch.zeros(1, 2, dtype=torch.bfloat16)
    assert importance_ratio(half, half, mask=torch.ones(1, 2)).dtype == torch.float32
    assert segment_importance_ratio(half, half, torch.zeros(1, 2, dtype=torch.long), 1).dtype == torch.float32
    assert equivalent_old_logps(half, half, mask=torch.ones(1, 2), level="token").dtype == torch.float32


def test_recorded_losses_of_the_sequence_and_turn_levels_are_reproduced(shared_dir):
    cases = json.loads((shared_dir / "oracles" / "policy_losses.json").read_text())["cases"]
    compared = 0
    for case in cases:
        old, advantages, mask = (
            torch.tensor(case[name], dtype=torch.float64) for name in ("old_logp", "advantages", "response_mask")
        )
        for name, expected in case["out"].items():
            if not name.startswith("gspo"):
                continue
            new = torch.tensor(case["new_logp"], dtype=torch.float64, requires_grad=True)
            ratio = importance_ratio(new, old, mask=mask, level="turn" if "turn" in name else "sequence_token")
            clips = {"clip_low": expected["clip_low"], "clip_high": expected["clip_high"]}
            loss = -seq_mean_token_mean(clipped_surrogate(ratio, advantages, **clips), mask)
            loss.backward()
            assert_equal(loss.detach(), expected["loss"], rtol=ORACLE_RTOL)
            assert_equal(new.grad, expected["grad"], rtol=ORACLE_RTOL)
            compared += 1
    assert compared == 36


ROW = torch.zeros(1, 2)


@pytest.mark.parametrize("function", [importance_ratio, equivalent_old_logps])
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"logps": ROW[0], "old_logps": ROW[0], "mask": ROW[0]},
            ValueError,
            "`logps` must have the shape (B, T): got (2,). Reshape it to 2 dimension(s).",
        ),
        (
            {"logps": ROW, "old_logps": ROW[:, :1], "mask": ROW},
            ValueError,
            "`old_logps` must have the shape of `logps`, (1, 2): got (1, 1). "
            "Pass one entry of `old_logps` per entry of `logps`.",
        ),
        (
            {"logps": ROW, "old_logps": ROW, "mask": ROW[:, :1]},
            ValueError,
            "`mask` must have the shape of `logps`, (1, 2): got (1, 1). "
            "Pass one entry of `mask` per entry of `logps`.",
        ),
        (
            {"logps": ROW, "old_logps": ROW, "mask": ROW, "level": "word"},
            ValueError,
            "`level` must be one of 'token', 'sequence', 'sequence_token', 'turn': got 'word'. Pick one of them.",
        ),
        (
            {"logps": ROW, "old_logps": ROW, "mask": ROW, "max_log_ratio": 0.0},
            ValueError,
            "`max_log_ratio` must be finite and greater than 0.0: got 0.0. Choose a larger finite value.",
        ),
        (
            {"logps": ROW, "old_logps": ROW, "mask": ROW, "level": "turn", "turn_ids": torch.tensor([[0]])},
            ValueError,
            "`turn_ids` must have the shape of `logps`, (1, 2): got (1, 1). "
            "Pass one entry of `turn_ids` per entry of `logps`.",
        ),
        (
            {"logps": ROW, "old_logps": ROW, "mask": ROW, "level": "turn", "turn_ids": ROW},
            TypeError,
            "`turn_ids` must hold integers: got torch.float32. Convert it with `.long()`.",
        ),
        (
            {"logps": ROW, "old_logps": ROW, "mask": ROW, "level": "turn", "turn_ids": torch.tensor([[0, -2]])},
            ValueError,
            "`turn_ids` must be at least -1: got a minimum of -2. Use `-1` for tokens that belong to no segment.",
        ),
        (
            {"logps": ROW, "old_logps": ROW, "mask": ROW + 1, "level": "turn", "turn_ids": torch.tensor([[0, -1]])},
            ValueError,
            "`turn_ids` must be at least 0 at every sampled token: got -1 inside the mask. "
            "Give the token a turn, or take it out of `mask`.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(function, arguments, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        function(**arguments)


def test_the_plain_sequence_level_has_no_equivalent_reference():
    message = (
        "`level` must be one of 'token', 'sequence_token', 'turn': got 'sequence'. "
        "Use `importance_ratio`, whose gradient covers the whole rollout."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        equivalent_old_logps(ROW, ROW, mask=ROW, level="sequence")


def test_segment_ratios_refuse_other_shapes():
    ids = torch.tensor([[0, 0]])
    with pytest.raises(ValueError, match=re.escape("`old_logps` must have the shape of `logps`, (1, 2): got (1, 1).")):
        segment_importance_ratio(ROW, ROW[:, :1], ids, 1)
    with pytest.raises(ValueError, match=re.escape("`segment_ids` must have the shape of `logps`, (1, 2)")):
        segment_importance_ratio(ROW, ROW, ids[:, :1], 1)
    with pytest.raises(ValueError, match=re.escape("[-1, num_segments) = [-1, 1): got a range of [0, 1]")):
        segment_importance_ratio(ROW, ROW, torch.tensor([[0, 1]]), 1)

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    approximate_kl,
    clipped_surrogate,
    importance_ratio,
    masked_mean,
    masked_std,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
    token_sum_norm,
)
from tests.credit import reference
from tests.credit.batches import assert_equal, batches, quick

# The recorded vectors were computed in float32 and printed with nine digits.
ORACLE_RTOL = 1e-5
NAN = float("nan")
REDUCTIONS = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "token_sum_norm": lambda values, mask: token_sum_norm(values, mask, max_tokens=7),
}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.0045, 1, 1.004), (1.0045, -1, -1.0045), (0.9965, 1, 0.9965), (0.9965, -1, -0.997)],
)
def test_the_worked_clip_table(ratio, advantage, expected):
    objective = clipped_surrogate(tensor(ratio), tensor(advantage), clip_low=0.003, clip_high=0.004)
    assert_equal(objective, [expected])


def test_the_default_bounds_are_one_fifth_on_both_sides():
    objective = clipped_surrogate(tensor(1.5, 0.5, 1.5, 0.5), tensor(1, 1, -1, -1))
    assert_equal(objective, [1.2, 0.5, -1.5, -0.8])


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only():
    objective = clipped_surrogate(tensor(5.0, 2.0, 5.0), tensor(-2, -2, 2), dual_clip=3.0)
    # -10 is raised to 3 * -2; -4 stays; the positive side is clipped at 1.2 * 2
    assert_equal(objective, [-6.0, -4.0, 2.4])


def test_a_kept_gradient_is_scaled_to_the_upper_bound():
    ratio = tensor(2.0, 2.0, 0.5, 0.5, 1.1).requires_grad_()
    advantages = tensor(1, -1, 1, -1, 1)
    plain = clipped_surrogate(ratio, advantages, clip_high=0.28)
    kept = clipped_surrogate(ratio, advantages, clip_high=0.28, keep_clipped_gradient=True)
    assert_equal(plain, kept.detach())
    assert_equal(kept, [1.28, -2.0, 0.5, -0.8, 1.1])
    # d/dr of 1.28 r / sg(r) at r = 2 is 0.64; the other four as without
    assert_equal(torch.autograd.grad(plain.sum(), ratio)[0], [0.0, -1.0, 1.0, 0.0, 1.0])
    assert_equal(torch.autograd.grad(kept.sum(), ratio)[0], [0.64, -1.0, 1.0, 0.0, 1.0])


@pytest.mark.parametrize("options", [{}, {"keep_clipped_gradient": True}])
def test_a_ratio_exactly_at_a_bound_keeps_its_gradient(options):
    ratio, advantages = tensor(0.5, 1.5, 2.0).requires_grad_(), tensor(-1, 1, -1)
    value = clipped_surrogate(ratio, advantages, clip_low=0.5, clip_high=0.5, dual_clip=2.0, **options)
    assert_equal(value, [-0.5, 1.5, -2.0])
    assert_equal(torch.autograd.grad(value.sum(), ratio)[0], [-1.0, 1.0, -1.0])


def test_a_kept_gradient_survives_a_ratio_that_underflowed_to_zero():
    ratio = tensor(0.0, 0.0, 2.0).requires_grad_()
    kept = clipped_surrogate(ratio, tensor(1, -1, 1), clip_high=0.28, keep_clipped_gradient=True)
    assert_equal(kept, [0.0, -0.8, 1.28])
    assert_equal(torch.autograd.grad(kept.sum(), ratio)[0], [1.0, 0.0, 0.64])


@quick
@given(batches(), st.sampled_from([None, 1.5]), st.booleans())
def test_the_surrogate_equals_the_loop_and_stays_below_the_unclipped_objective(batch, dual_clip, keep):
    ratio, advantages = batch.normal().exp(), batch.normal()
    objective = clipped_surrogate(
        batch.garbage(ratio),
        batch.garbage(advantages),
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=dual_clip,
        keep_clipped_gradient=keep,
        mask=batch.mask,
    )
    expected = [
        [reference.surrogate(r, a, 0.1, 0.3, dual_clip) if m else 0.0 for r, a, m in zip(*rows, strict=True)]
        for rows in zip(ratio.tolist(), advantages.tolist(), batch.mask.tolist(), strict=True)
    ]
    assert_equal(objective, expected)
    if dual_clip is None:
        assert (objective <= ratio * advantages + 1e-12)[batch.mask].all()


def test_gradients_follow_the_ratio_alone_and_never_leave_the_mask():
    ratio = tensor(1.1, 0.7, 1.5, 0.9).requires_grad_()
    advantages = tensor(1.0, -2.0, -1.0, 3.0).requires_grad_()
    for dual_clip in (None, 1.2):
        assert torch.autograd.gradcheck(
            lambda x, dual=dual_clip: clipped_surrogate(x, advantages, dual_clip=dual), ratio
        )
    clipped_surrogate(ratio, advantages).sum().backward()
    assert advantages.grad is None
    logps = tensor(0.1, NAN).unsqueeze(0).requires_grad_()
    mask = torch.tensor([[1, 0]])
    masked = importance_ratio(logps, torch.zeros(1, 2), mask=mask)
    clipped_surrogate(masked, tensor(1.0, NAN), mask=mask).sum().backward()
    assert logps.grad[0, 0] > 0
    assert logps.grad[0, 1].item() == 0.0


def test_one_advantage_per_rollout_is_spread_over_its_tokens():
    objective = clipped_surrogate(torch.ones(2, 3), torch.tensor([[2.0], [-1.0]]))
    assert objective.tolist() == [[2.0] * 3, [-1.0] * 3]


@quick
@given(batches(), st.floats(-0.9, 0.9))
def test_rescaling_an_advantage_without_a_flip_multiplies_objective_and_gradient(batch, change):
    ratio, advantages = batch.normal().exp().requires_grad_(), batch.normal()
    for options in ({}, {"dual_clip": 1.5}, {"keep_clipped_gradient": True}):
        plain = clipped_surrogate(ratio, advantages, **options)
        scaled = clipped_surrogate(ratio, advantages * (1 + change), **options)
        assert_equal(scaled, plain.detach() * (1 + change))
        gradients = [torch.autograd.grad(value.sum(), ratio)[0] for value in (plain, scaled)]
        assert_equal(gradients[1], gradients[0] * (1 + change))


def test_two_estimates_of_the_divergence_from_a_reference():
    logps, ref_logps = tensor(-1.0, -2.0, NAN).requires_grad_(), tensor(-2.0, -1.5, NAN)
    mask = torch.tensor([1, 1, 0])
    assert_equal(approximate_kl(logps, ref_logps, mask=mask, estimator="k1"), [1.0, -0.5, 0.0])
    # x = -1: e^-1 + 1 - 1; x = 0.5: e^0.5 - 0.5 - 1
    expected = [0.36787944117144233, 0.1487212707001282, 0.0]
    assert_equal(approximate_kl(logps, ref_logps, mask=mask), expected)
    assert_equal(approximate_kl(logps, ref_logps, mask=mask, estimator="k3"), expected)
    approximate_kl(logps, ref_logps, mask=mask).sum().backward()
    # d/dlogp = 1 - e^x
    assert_equal(logps.grad, [0.6321205588285577, -0.6487212707001282, 0.0])


@quick
@given(batches())
def test_the_low_variance_estimate_is_never_negative_and_both_have_exact_gradients(batch):
    logps, ref_logps = -batch.uniform(), -batch.uniform().requires_grad_()
    k3 = approximate_kl(batch.garbage(logps), batch.garbage(ref_logps), mask=batch.mask)
    assert (k3 >= 0).all()
    assert (k3[~batch.mask] == 0).all()
    logps.requires_grad_()
    for estimator in ("k1", "k3"):
        assert torch.autograd.gradcheck(
            lambda x, name=estimator: approximate_kl(x, ref_logps.detach(), mask=batch.mask, estimator=name), logps
        )
        value = approximate_kl(logps, ref_logps, mask=batch.mask, estimator=estimator).sum()
        assert torch.autograd.grad(value, ref_logps, allow_unused=True) == (None,)


def test_tiny_divergences_do_not_vanish_in_rounding():
    logps, ref_logps = torch.tensor([-1.0]), torch.tensor([-1.0 + 2e-4])
    # x^2 / 2 = 2e-8, less than the resolution of exp(x) - 1 in single precision
    assert approximate_kl(logps, ref_logps, mask=torch.ones(1)).item() == pytest.approx(2e-8, rel=1e-2)


def test_reductions_of_a_small_matrix():
    values = torch.tensor([[1.0, NAN, NAN], [4.0, 4.0, NAN], [NAN, NAN, NAN]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    assert_equal(token_mean(values, mask), 3.0)  # 9 / 3
    assert_equal(seq_mean_token_mean(values, mask), 2.5)  # (1 + 4) / 2, the empty rollout left out
    assert_equal(seq_mean_token_sum(values, mask), 4.5)  # (1 + 8) / 2
    assert_equal(token_sum_norm(values, mask, max_tokens=6), 0.5)  # 9 / (3 * 6)


@quick
@given(batches(), st.sampled_from(sorted(REDUCTIONS)))
def test_reductions_equal_the_loops_and_ignore_padding(batch, how):
    values = batch.normal()
    garbage = batch.garbage(values)
    reduced = REDUCTIONS[how](garbage, batch.mask)
    assert_equal(reduced, reference.reduce_tokens(values.tolist(), batch.mask.tolist(), how, max_tokens=7))
    wide = torch.nn.functional.pad(garbage, (0, 2), value=NAN)
    assert_equal(REDUCTIONS[how](wide, torch.nn.functional.pad(batch.mask, (0, 2))), reduced)


@pytest.mark.parametrize("how", sorted(REDUCTIONS))
def test_a_batch_without_trained_tokens_has_zero_loss_and_zero_gradient(how):
    values = torch.full((2, 3), NAN, requires_grad=True)
    loss = REDUCTIONS[how](values, torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [[0.0] * 3] * 2
    assert REDUCTIONS[how](torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0.0


@pytest.mark.parametrize("how", sorted(REDUCTIONS))
def test_reductions_have_exact_gradients(how):
    values = torch.arange(6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert torch.autograd.gradcheck(lambda x: REDUCTIONS[how](x, mask), values)


def test_a_rollout_of_many_turns_weighs_as_much_as_a_short_one_only_under_sequence_means():
    values = torch.tensor([[1.0] + [0.0] * 6, [-1.0] * 7], dtype=torch.float64)
    mask = torch.tensor([[1] + [0] * 6, [1] * 7])
    assert_equal(seq_mean_token_mean(values, mask), 0.0)
    assert_equal(token_mean(values, mask), -0.75)  # (1 - 7) / 8


def oracle(shared_dir, name):
    cases = json.loads((shared_dir / "oracles" / name).read_text())["cases"]
    return [
        (
            {key: torch.tensor(value, dtype=torch.float64) for key, value in case.items() if isinstance(value, list)},
            case,
        )
        for case in cases
    ]


def assert_loss(loss, logps, expected):
    loss.backward()
    assert_equal(loss.detach(), expected["loss"], rtol=ORACLE_RTOL)
    assert_equal(logps.grad, expected["grad"], rtol=ORACLE_RTOL)


def test_recorded_dual_clip_losses_are_reproduced_under_three_reductions(shared_dir):
    compared = 0
    for tensors, case in oracle(shared_dir, "policy_losses.json"):
        for name, expected in case["out"].items():
            if not name.startswith("ppo_dual_"):
                continue
            logps = tensors["new_logp"].clone().requires_grad_()
            ratio = importance_ratio(logps, tensors["old_logp"], mask=tensors["response_mask"])
            clips = {"clip_low": expected["clip_low"], "clip_high": expected["clip_high"]}
            objective = clipped_surrogate(ratio, tensors["advantages"], dual_clip=expected["clip_c"], **clips)
            reduce = REDUCTIONS[name.removeprefix("ppo_dual_").replace("-", "_")]
            assert_loss(-reduce(objective, tensors["response_mask"]), logps, expected)
            compared += 1
    assert compared == 36


def test_recorded_losses_with_a_kept_gradient_are_reproduced(shared_dir):
    compared = 0
    for tensors, case in oracle(shared_dir, "aepo_loss.json"):
        for name, expected in case["out"].items():
            mask, advantages = tensors["response_mask"], tensors["advantages"]
            if name.endswith("adv1"):
                spread = masked_std(tensors["entropy"], mask)
                z = (tensors["entropy"] - masked_mean(tensors["entropy"], mask)) / torch.where(spread > 0, spread, 1.0)
                advantages = advantages * (1 + 0.2 * z)
            logps = tensors["new_logp"].clone().requires_grad_()
            objective = clipped_surrogate(
                importance_ratio(logps, tensors["old_logp"], mask=mask),
                advantages,
                clip_high=0.28,
                dual_clip=case["clip_c"],
                keep_clipped_gradient=name.startswith("clip1"),
            )
            assert_loss(-token_mean(objective, mask), logps, expected)
            compared += 1
    assert compared == 32


ROW = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: clipped_surrogate(ROW, ROW, clip_low=-0.1),
            "`clip_low` must be finite and at least 0.0: got -0.1. Choose a larger finite value.",
        ),
        (
            lambda: clipped_surrogate(ROW, ROW, clip_high=NAN),
            "`clip_high` must be finite and at least 0.0: got nan. Choose a larger finite value.",
        ),
        (
            lambda: clipped_surrogate(ROW, ROW, dual_clip=1.0),
            "`dual_clip` must be finite and greater than 1.0: got 1.0. Choose a larger finite value.",
        ),
        (
            lambda: clipped_surrogate(ROW, ROW, mask=torch.ones(1, 3)),
            "`mask` must have the shape of `ratio`, (1, 2): got (1, 3). "
            "Pass one entry of `mask` per entry of `ratio`.",
        ),
        (
            lambda: approximate_kl(ROW, ROW[0], mask=ROW),
            "`ref_logps` must have the shape of `logps`, (1, 2): got (2,). "
            "Pass one entry of `ref_logps` per entry of `logps`.",
        ),
        (
            lambda: approximate_kl(ROW, ROW, mask=ROW[0]),
            "`mask` must have the shape of `logps`, (1, 2): got (2,). Pass one entry of `mask` per entry of `logps`.",
        ),
        (
            lambda: approximate_kl(ROW, ROW, mask=ROW, estimator="k2"),
            "`estimator` must be one of 'k1', 'k3': got 'k2'. Pick one of them.",
        ),
        (
            lambda: token_mean(ROW, ROW[0]),
            "`mask` must have the shape of `values`, (1, 2): got (2,). "
            "Pass one entry of `mask` per entry of `values`.",
        ),
        (
            lambda: seq_mean_token_mean(ROW[0], ROW[0]),
            "`values` must have the shape (B, T): got (2,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: seq_mean_token_sum(ROW[0], ROW[0]),
            "`values` must have the shape (B, T): got (2,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: token_sum_norm(ROW[0], ROW[0], max_tokens=2),
            "`values` must have the shape (B, T): got (2,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: token_sum_norm(ROW, ROW, max_tokens=0),
            "`max_tokens` must be finite and at least 1: got 0. Choose a larger finite value.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_single_token_bounds_are_accepted():
    assert token_sum_norm(ROW, ROW, max_tokens=1).item() == 2.0
    assert clipped_surrogate(2 * ROW, ROW, clip_low=0.0, clip_high=0.0).tolist() == [[1.0, 1.0]]

import copy
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import ConstrainedRouter, RouterSchedule, Routing, lambda_table, project_to_budget
from tests.credit.batches import Batch, assert_equal, quick

WEIGHTS = torch.tensor([[0.5, 0.2, 0.3]] * 4, dtype=torch.float64)


ACTIVE = lambda_table() > 0


def router_of(**schedule):
    return ConstrainedRouter(lambda_table(), WEIGHTS, RouterSchedule(**schedule))


def test_the_router_is_the_table_until_its_first_step_and_moves_every_fifth_actor_step_after():
    router, moved = router_of(), []
    gains = torch.ones(4, 3, dtype=torch.float64)
    for step in range(1, 41):
        before = router.magnitudes
        assert router.is_due() == (step in (25, 30, 35, 40))
        if router.update(gains):
            moved.append(step)
            assert not torch.equal(router.magnitudes, before)
        else:
            assert router.magnitudes is before
        if step < 25:
            assert torch.equal(router.magnitudes, lambda_table())
    assert moved == [25, 30, 35, 40]
    assert router.num_actor_steps == 40


def test_a_router_that_starts_at_once_moves_in_its_first_step():
    router = router_of(num_frozen_steps=0, interval=1)
    assert router.is_due()
    assert router.update(torch.ones(4, 3))


@quick
@given(st.integers(0, 2**20))
def test_magnitudes_keep_the_budget_of_every_type_and_closed_cells_stay_closed(seed):
    router = router_of(num_frozen_steps=0, interval=1, learning_rate=0.5)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        router.update(torch.randn(4, 3, generator=generator, dtype=torch.float64))
        assert ((router.magnitudes >= 0) & (router.magnitudes <= 1)).all()
        assert (router.magnitudes[~ACTIVE] == 0).all()
        assert_equal((WEIGHTS * router.magnitudes).sum(1), (WEIGHTS * lambda_table()).sum(1), rtol=1e-9)
        assert Routing(router.magnitudes).bound <= 0.1


def test_magnitudes_move_towards_larger_gains():
    router = router_of(num_frozen_steps=0, interval=1, learning_rate=0.1)
    gains = torch.zeros(4, 3, dtype=torch.float64)
    gains[0, 2], gains[1, 0] = 1.0, -1.0
    for _ in range(3):
        router.update(gains)
    before = lambda_table()
    assert router.magnitudes[0, 2] > before[0, 2] + 0.01
    assert router.magnitudes[0, 0] < before[0, 0]
    assert router.magnitudes[1, 0] < before[1, 0] - 0.01
    assert router.magnitudes[1, 1] > before[1, 1]


def adamw(gains, steps, *, rate, total, decay=1e-4, norm=1.0):
    """Logits after some steps of AdamW on `-sum(gains * logistic(logits))`, by hand."""
    logits = lambda_table().clamp(1e-3, 1 - 1e-3).logit()
    first, second = torch.zeros_like(logits), torch.zeros_like(logits)
    for step in range(1, steps + 1):
        share = logits.sigmoid()
        gradient = -torch.where(ACTIVE, gains, 0.0) * share * (1 - share)
        gradient = gradient * min(1.0, norm / (gradient.norm().item() + 1e-6))
        step_size = rate * 0.5 * (1 + math.cos(math.pi * (step - 1) / total))
        logits = logits * (1 - step_size * decay)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        scaled = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        logits = logits - step_size * scaled
    return logits


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5, "learning_rate": 0.2}, {"max_grad_norm": 1e-9}])
def test_three_steps_equal_adamw_by_hand(options):
    router = router_of(num_actor_steps=40, **options)
    gains = Batch(4, 3, seed=2).normal() * 40
    for _ in range(35):
        router.update(gains)
    logits = adamw(
        gains,
        3,
        rate=options.get("learning_rate", 5e-5),
        decay=options.get("weight_decay", 1e-4),
        norm=options.get("max_grad_norm", 1.0),
        total=4,
    )
    proposed = torch.where(ACTIVE, logits.sigmoid(), 0.0)
    costs = torch.where(ACTIVE, WEIGHTS, 0.0)
    assert_equal(router.magnitudes, project_to_budget(proposed, costs, (costs * lambda_table()).sum(1)), rtol=1e-9)


def test_the_rate_is_zero_beyond_the_planned_run():
    router = router_of(num_actor_steps=2, num_frozen_steps=0, interval=1, learning_rate=0.5)
    gains = Batch(4, 3, seed=4).normal()
    router.update(gains)
    router.update(gains)
    settled = router.magnitudes
    for _ in range(3):
        router.update(gains)
        assert_equal(router.magnitudes, settled)


def test_a_resumed_router_equals_an_uninterrupted_one():
    options = {"num_frozen_steps": 1, "interval": 2, "learning_rate": 0.1}
    gains = [Batch(4, 3, seed).normal() for seed in range(9)]
    straight, first, second = router_of(**options), router_of(**options), router_of(**options)
    for step in range(9):
        straight.update(gains[step])
    for step in range(4):
        first.update(gains[step])
    state = copy.deepcopy(first.state_dict())
    first.update(gains[4])  # the saved state does not follow the router it came from
    second.load_state_dict(state)
    assert second.num_actor_steps == 4
    for step in range(4, 9):
        second.update(gains[step])
    assert torch.equal(second.magnitudes, straight.magnitudes)
    assert not torch.equal(second.magnitudes, lambda_table())


def test_a_saved_state_is_a_copy():
    router = router_of(num_frozen_steps=0, interval=1, learning_rate=0.1)
    router.update(torch.ones(4, 3))
    state = router.state_dict()
    saved = state["magnitudes"].clone(), state["logits"].clone()
    router.update(torch.ones(4, 3))
    assert torch.equal(state["magnitudes"], saved[0])
    assert torch.equal(state["logits"], saved[1])
    other = router_of(num_frozen_steps=0, interval=1, learning_rate=0.1)
    other.load_state_dict(state)
    other.magnitudes.zero_()
    assert torch.equal(state["magnitudes"], saved[0])


def test_the_caller_keeps_its_tables():
    lambdas, weights = lambda_table(), WEIGHTS.clone()
    router = ConstrainedRouter(lambdas, weights, RouterSchedule(num_frozen_steps=0, interval=1, learning_rate=0.5))
    router.update(torch.ones(4, 3))
    assert torch.equal(lambdas, lambda_table())
    assert torch.equal(weights, WEIGHTS)
    router.magnitudes.zero_()
    assert torch.equal(lambdas, lambda_table())


def test_the_number_of_router_steps_of_a_run():
    assert RouterSchedule().num_router_steps == 197  # (1005 - 20) / 5
    assert RouterSchedule(num_actor_steps=29).num_router_steps == 1


def test_default_schedule_is_the_one_of_the_paper():
    schedule = RouterSchedule()
    assert (schedule.num_frozen_steps, schedule.interval, schedule.learning_rate) == (20, 5, 5e-5)
    assert (schedule.weight_decay, schedule.max_grad_norm, schedule.num_actor_steps) == (1e-4, 1.0, 1005)
    assert ConstrainedRouter(lambda_table(), WEIGHTS).schedule == schedule


NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ConstrainedRouter(torch.zeros(3, 4), WEIGHTS),
            "`lambdas` must have the shape (4, 3): got (3, 4). "
            "Pass one row per type A to D and one column per segment.",
        ),
        (
            lambda: ConstrainedRouter(lambda_table(), WEIGHTS[:3]),
            "`weights` must have the shape (4, 3): got (3, 3). "
            "Pass one row per type A to D and one column per segment.",
        ),
        (
            lambda: ConstrainedRouter(2 * lambda_table(), WEIGHTS),
            "`lambdas` must lie in [0, 1]: got a range of [0.0, 2.0]. Clip the table, or lower its scale.",
        ),
        (
            lambda: ConstrainedRouter(lambda_table() - 0.25, WEIGHTS),
            "`lambdas` must lie in [0, 1]: got a range of [-0.25, 0.75]. Clip the table, or lower its scale.",
        ),
        (
            lambda: ConstrainedRouter(lambda_table(), -WEIGHTS),
            "`weights` must not be negative: got a minimum of -0.5. Clip them at zero.",
        ),
        (
            lambda: RouterSchedule(num_frozen_steps=-1),
            "`num_frozen_steps` must be finite and at least 0: got -1. Choose a larger finite value.",
        ),
        (
            lambda: RouterSchedule(interval=0),
            "`interval` must be finite and at least 1: got 0. Choose a larger finite value.",
        ),
        (
            lambda: RouterSchedule(num_actor_steps=24),
            "`num_actor_steps` must be finite and at least 25: got 24. Choose a larger finite value.",
        ),
        (
            lambda: RouterSchedule(learning_rate=-0.1),
            "`learning_rate` must be finite and at least 0.0: got -0.1. Choose a larger finite value.",
        ),
        (
            lambda: RouterSchedule(weight_decay=-0.1),
            "`weight_decay` must be finite and at least 0.0: got -0.1. Choose a larger finite value.",
        ),
        (
            lambda: RouterSchedule(max_grad_norm=0.0),
            "`max_grad_norm` must be finite and greater than 0.0: got 0.0. Choose a larger finite value.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("gains", [None, torch.ones(3, 3), torch.full((4, 3), NAN)])
def test_a_step_that_is_due_needs_usable_gains_and_others_need_none(gains):
    router = router_of(num_frozen_steps=1, interval=1)
    assert not router.update(None)
    message = "`gains` must be finite and of shape (4, 3) when a router step is due: got "
    with pytest.raises(ValueError, match=f"(?s)^{re.escape(message)}.*" + re.escape("whenever `is_due()` is true.")):
        router.update(gains)
    # A refused call is not counted.
    assert router.num_actor_steps == 1
    assert router.update(torch.ones(4, 3))


def test_a_state_of_another_schedule_is_refused():
    state = router_of(interval=3).state_dict()
    with pytest.raises(ValueError, match=r"^`schedule` must be the one the state was saved under, .*'interval': 3"):
        router_of(interval=4).load_state_dict(state)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_budget_is_refused_beyond_a_millionth_of_the_weights(scale):
    values, weights = torch.full((1, 3), 0.5, dtype=torch.float64), scale * WEIGHTS[:1]
    capacity = weights.sum(1)
    assert_equal(project_to_budget(values, weights, capacity * (1 + 5e-7)), torch.ones(1, 3, dtype=torch.float64))
    for budget in (capacity * (1 + 1.5e-6), -capacity * 1.5e-6):
        with pytest.raises(ValueError, match="`budgets` must lie between 0 and the sum of the weights"):
            project_to_budget(values, weights, budget)


def test_one_budget_out_of_reach_is_refused_among_others_within():
    values, weights = torch.full((2, 3), 0.5), WEIGHTS[:2].float()
    with pytest.raises(ValueError, match="`budgets` must lie between"):
        project_to_budget(values, weights, torch.tensor([0.5, 2.0]))


def test_the_first_step_moves_the_logits_by_the_learning_rate():
    gains = torch.ones(4, 3, dtype=torch.float64)
    for rate in (0.01, 0.02):
        router = router_of(num_frozen_steps=0, interval=1, learning_rate=rate, weight_decay=0.0)
        before = router._logits.detach().clone()
        assert router.update(gains) is True
        moved = (router._logits.detach() - before)[ACTIVE]
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=0.0)


def test_a_step_that_is_not_due_returns_false_and_one_bad_gain_is_refused_when_due():
    router = router_of(num_frozen_steps=1, interval=1)
    assert router.update(None) is False
    gains = torch.ones(4, 3, dtype=torch.float64)
    gains[0, 0] = torch.nan
    with pytest.raises(ValueError, match="`gains` must be finite"):
        router.update(gains)


def test_tables_with_gradient_are_taken_as_numbers():
    lambdas, weights = lambda_table().requires_grad_(), WEIGHTS.clone().requires_grad_()
    router = ConstrainedRouter(lambdas, weights, RouterSchedule(num_frozen_steps=0, interval=1))
    assert router.update(torch.ones(4, 3, dtype=torch.float64, requires_grad=True)) is True
    assert not router.magnitudes.requires_grad
    assert lambdas.grad is None
    assert weights.grad is None

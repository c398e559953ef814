import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    POLARITY,
    Routing,
    gca_token_advantages,
    lambda_table,
    magnitude_gains,
    project_to_budget,
)
from tests.credit.batches import Batch, assert_equal, batches, quick

WEIGHTS = torch.tensor([[0.5, 0.2, 0.3]] * 4, dtype=torch.float64)


ACTIVE = lambda_table() > 0


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def bisected(values, weights, budget):
    """The projection of one row by plain bisection on its multiplier."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        total = sum(w * min(1.0, max(0.0, v - middle * w)) for v, w in zip(values, weights, strict=True))
        low, high = (middle, high) if total > budget else (low, middle)
    return [min(1.0, max(0.0, v - low * w)) for v, w in zip(values, weights, strict=True)]


def test_the_worked_projection():
    projected = project_to_budget(tensor(1.1, 0.7, 0.3).unsqueeze(0), WEIGHTS[:1], tensor(0.75))
    # nu = -0.153846: 1.1 stays capped, 0.7 + 0.2 * 0.153846, 0.3 + 0.3 * 0.153846
    assert_equal(projected, [[1.0, 0.730769, 0.346154]], rtol=1e-6)
    assert_equal(projected, [[1.0, 0.7 + 0.2 * 2 / 13, 0.3 + 0.3 * 2 / 13]])


@quick
@given(batches(4, 5), st.integers(0, 2**20))
def test_projections_keep_the_budget_the_box_and_the_shape_of_the_solution(batch, seed):
    other = Batch(batch.rows, batch.columns, seed)
    values, weights = 2 * batch.normal(), batch.uniform() + 0.05
    budgets = (weights * other.uniform()).sum(1)
    projected = project_to_budget(values, weights, budgets)
    assert ((projected >= 0) & (projected <= 1)).all()
    assert_equal((weights * projected).sum(1), budgets)
    expected = [bisected(*row) for row in zip(values.tolist(), weights.tolist(), budgets.tolist(), strict=True)]
    assert_equal(projected, expected, rtol=1e-9)  # bisection ends at the resolution of its bracket
    # Projecting again changes nothing, and no feasible point is nearer.
    assert_equal(project_to_budget(projected, weights, budgets), projected, rtol=1e-11)
    feasible = project_to_budget(2 * other.normal(), weights, budgets)
    assert ((projected - values).norm(dim=1) <= (feasible - values).norm(dim=1) + 1e-9).all()


@quick
@given(batches(4, 5))
def test_budgets_at_both_ends_force_all_zeros_and_all_ones(batch):
    values, weights = 2 * batch.normal(), batch.uniform() + 0.05
    assert_equal(project_to_budget(values, weights, torch.zeros(batch.rows)), torch.zeros_like(values), rtol=1e-11)
    full = project_to_budget(values, weights, weights.sum(1))
    assert_equal(full, torch.ones_like(values), rtol=1e-11)


def test_entries_without_weight_are_only_clipped():
    values, weights = tensor(1.4, -0.3, 0.6, 0.2).unsqueeze(0), tensor(0.0, 0.0, 0.0, 2.0).unsqueeze(0)
    assert_equal(project_to_budget(values, weights, tensor(1.0)), [[1.0, 0.0, 0.6, 0.5]])
    assert_equal(project_to_budget(values, 0 * weights, tensor(0.0)), [[1.0, 0.0, 0.6, 0.2]])


def test_equal_entries_share_a_budget_equally():
    same = torch.full((1, 4), 0.9, dtype=torch.float64)
    assert_equal(project_to_budget(same, 0 * same + 0.25, tensor(0.3)), [[0.3] * 4])


def gains_by_loops(sensitivities, advantages, salience, cells, eta, rate):
    gains = [[0.0] * 3 for _ in range(4)]
    for row, advantage in enumerate(advantages):
        for token, cell in enumerate(cells[row]):
            if cell >= 0:
                kind, segment = divmod(cell, 3)
                share = eta * abs(advantage) * POLARITY[kind][segment] * salience[row][token]
                gains[kind][segment] += rate * share * sensitivities[row][token]
    return gains


@quick
@given(batches(4, 8))
def test_gains_equal_the_loops(batch):
    cells = torch.where(batch.mask, batch.integers(0, 12), -1)
    sensitivities, advantages, c = (
        batch.garbage(batch.normal()),
        batch.normal(batch.rows),
        batch.garbage(batch.uniform()),
    )
    polarity = torch.tensor(POLARITY)
    lists = [part.tolist() for part in (sensitivities, advantages, c, cells)]
    gains = magnitude_gains(sensitivities, advantages, c, cells, 5 * polarity, eta=0.3, learning_rate=0.7)
    assert_equal(gains, gains_by_loops(*lists, 0.3, 0.7))
    assert_equal(magnitude_gains(sensitivities, advantages, c, cells, polarity), gains_by_loops(*lists, 0.2, 1.0))


def test_gains_are_the_derivative_of_the_objective_through_one_actor_step():
    # One linear actor: log pi of every token is features . theta; the objective is linear, so first order is exact.
    batch = Batch(5, 6, seed=11)
    features, direction = batch.normal(5, 6, 3), tensor(0.3, -1.0, 0.5)
    types, segments = torch.tensor([0, 1, 3, 0, 1]), batch.integers(0, 3)
    advantages, gate_open = tensor(1.0, -0.5, 1.5, -2.0, 0.7), torch.ones(5)
    margins, entropies = batch.normal(), batch.uniform()

    def objective(lambdas):
        credit = gca_token_advantages(
            advantages, types, segments, margins, entropies,
            eligible=torch.ones(5, 6), gate_open=gate_open, routing=Routing(lambdas),
        )  # fmt: skip
        step = 0.1 * (credit.advantages.unsqueeze(2) * features).sum((0, 1))
        return (direction * step).sum(), credit

    table = lambda_table("flat")
    start, credit = objective(table)
    gains = magnitude_gains(
        features @ direction, advantages, credit.salience, credit.cells, torch.tensor(POLARITY), learning_rate=0.1
    )
    for kind, segment in ACTIVE.nonzero().tolist():
        moved = table.clone()
        moved[kind, segment] += 0.25
        assert_equal((objective(moved)[0] - start) / 0.25, gains[kind, segment], rtol=1e-10)
    assert (gains[~ACTIVE] == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: project_to_budget(tensor(1), tensor(1), tensor(1)),
            "`values` must have the shape (R, S): got (1,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: project_to_budget(WEIGHTS, WEIGHTS[:1], torch.zeros(4)),
            "`weights` must have the shape of `values`, (4, 3): got (1, 3). "
            "Pass one entry of `weights` per entry of `values`.",
        ),
        (
            lambda: project_to_budget(WEIGHTS, WEIGHTS, torch.zeros(3)),
            "`budgets` must have the shape (4,): got (3,). Pass one entry per row of `values`.",
        ),
        (
            lambda: project_to_budget(WEIGHTS, WEIGHTS - 0.5, torch.zeros(4)),
            "`weights` must not be negative: got a minimum of -0.3. Clip them at zero.",
        ),
        (
            lambda: project_to_budget(tensor(1, 1).unsqueeze(0), tensor(0.5, 0.25).unsqueeze(0), tensor(0.76)),
            "`budgets` must lie between 0 and the sum of the weights, [0.75]: got [0.76]. "
            "Compute them from magnitudes in [0, 1] and the same weights.",
        ),
        (
            lambda: project_to_budget(tensor(1, 1).unsqueeze(0), tensor(0.5, 0.25).unsqueeze(0), tensor(-0.01)),
            "`budgets` must lie between 0 and the sum of the weights, [0.75]: got [-0.01]. "
            "Compute them from magnitudes in [0, 1] and the same weights.",
        ),
        (
            lambda: magnitude_gains(WEIGHTS, tensor(1), WEIGHTS, torch.zeros(4, 3).long(), torch.ones(4, 3)),
            "`advantages` must have the shape (4,): got (1,). Pass one entry per rollout.",
        ),
        (
            lambda: magnitude_gains(WEIGHTS, torch.ones(4), WEIGHTS[:1], torch.zeros(4, 3).long(), torch.ones(4, 3)),
            "`salience` must have the shape of `sensitivities`, (4, 3): got (1, 3). "
            "Pass one entry of `salience` per entry of `sensitivities`.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()

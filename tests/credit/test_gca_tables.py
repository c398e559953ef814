import re

import pytest
import torch
from hypothesis import given

from grounded_rl.credit import (
    ANSWER,
    LAMBDA_TABLES,
    NO_SEGMENT,
    NO_TYPE,
    POLARITY,
    R_SEARCH,
    TYPE_A,
    TYPE_B,
    TYPE_C,
    TYPE_D,
    V_SEARCH,
    Routing,
    SalienceWeights,
    cell_counts,
    cell_means,
    lambda_table,
    merge_search_segments,
    merged_search_table,
)
from tests.credit import reference
from tests.credit.batches import assert_equal, quick
from tests.credit.gca_cases import DEFAULT, cases


def test_the_tables_are_the_documented_ones():
    for kind, name in enumerate(reference.TYPES):
        for segment, segment_name in enumerate(reference.SEGMENTS):
            polarity, magnitude = DEFAULT[name][segment_name]
            assert POLARITY[kind][segment] == polarity
            assert LAMBDA_TABLES["default"][kind][segment] == magnitude
            assert LAMBDA_TABLES["flat"][kind][segment] == (0.5 if polarity else 0.0)
    assert LAMBDA_TABLES["ans_first"][TYPE_A] == (0.5, 0.5, 1.0)
    assert LAMBDA_TABLES["ans_first"][1:] == LAMBDA_TABLES["default"][1:]
    assert set(LAMBDA_TABLES) == {"default", "ans_first", "flat"}
    assert (TYPE_A, TYPE_B, TYPE_C, TYPE_D, NO_TYPE) == (0, 1, 2, 3, -1)
    assert (V_SEARCH, R_SEARCH, ANSWER, NO_SEGMENT) == (0, 1, 2, -1)


def test_the_bottleneck_of_every_row_has_the_largest_magnitude():
    table = lambda_table()
    assert table[TYPE_A].argmax() == V_SEARCH
    assert table[TYPE_B].argmax() == ANSWER
    assert table[TYPE_D].argmax() == R_SEARCH
    assert table.max() == 1.0


def test_a_scaled_table_is_capped_at_one():
    assert_equal(lambda_table("default", 1.5)[TYPE_B], [0.75, 0.375, 1.0])
    assert_equal(lambda_table("flat", 0.3)[TYPE_D], [0.0, 0.15, 0.15])
    assert_equal(lambda_table(scale=100.0)[TYPE_A], [1.0, 1.0, 1.0])
    assert (lambda_table("default", 0.0) == 0).all()
    assert lambda_table()[TYPE_A].tolist() == [1.0, 0.5, 0.5]


def test_cell_statistics_of_a_small_sample():
    cells = torch.tensor([[0, 0, -1, 5], [11, 5, -1, 5]], dtype=torch.int8)
    values = torch.tensor([[0.5, 0.3, float("nan"), 0.2], [0.4, 0.5, float("nan"), 0.2]], dtype=torch.float64)
    assert cell_counts(cells).tolist() == [[2, 0, 0], [0, 0, 3], [0, 0, 0], [0, 0, 1]]
    # (0.5 + 0.3) / 2; (0.2 + 0.5 + 0.2) / 3; 0.4
    assert_equal(cell_means(values, cells), [[0.4, 0, 0], [0, 0, 0.3], [0, 0, 0], [0, 0, 0.4]])


@quick
@given(cases())
def test_replacing_salience_by_its_cell_mean_keeps_the_budget_of_every_cell(case):
    credit = case.credit()
    means = cell_means(credit.salience, credit.cells)
    flat = case.credit(Routing(mean_salience=means))
    assert torch.equal(flat.cells, credit.cells)
    counts = cell_counts(credit.cells)
    assert_equal(cell_means(flat.salience, flat.cells) * counts, means * counts)
    expected = case.baseline() + 0.2 * case.baseline().abs() * flat.polarity * flat.magnitude * flat.salience
    assert_equal(flat.advantages, expected)
    # Two halves of the sample are combined with the weights of their counts.
    halves = [(credit.salience[rows], credit.cells[rows]) for rows in (slice(0, 1), slice(1, None))]
    totals = sum(cell_means(*half) * cell_counts(half[1]) for half in halves)
    assert_equal(totals / counts.clamp(min=1), means)


def test_merged_search_segments_give_the_worked_coefficients():
    masses = torch.tensor([300, 300, 0, 0]), torch.tensor([100, 100, 50, 40])
    polarity, signed = merged_search_table(*masses)
    # A: (300 * 1 - 100 * 0.5) / 400; B: (300 * 0.5 - 100 * 0.25) / 400; D has only redundant searches.
    assert_equal(signed, [[0.625, 0.625, 0.5], [0.3125, 0.3125, 1.0], [0, 0, 0], [0.5, 0.5, 0.25]])
    assert polarity.tolist() == [[1, 1, 1], [1, 1, -1], [0, 0, 0], [-1, -1, -1]]
    polarity, absolute = merged_search_table(*masses, mode="absolute")
    # A: (300 * 1 + 100 * 0.5) / 400; B: (300 * 0.5 + 100 * 0.25) / 400
    assert_equal(absolute, [[0.875, 0.875, 0.5], [0.4375, 0.4375, 1.0], [0, 0, 0], [0.5, 0.5, 0.25]])
    assert polarity.tolist() == [[1, 1, 1], [1, 1, -1], [0, 0, 0], [-1, -1, -1]]


def test_a_merged_segment_is_closed_where_its_residuals_cancel_and_negative_where_redundant_search_prevails():
    # A: 100 * 1 - 200 * 0.5 = 0; B: (10 * 0.5 - 40 * 0.25) / 50 = -0.1, absolute (5 + 10) / 50 = 0.3
    masses = torch.tensor([100, 10, 0, 0]), torch.tensor([200, 40, 0, 0])
    for mode, magnitude in (("signed", 0.1), ("absolute", 0.3)):
        polarity, lambdas = merged_search_table(*masses, mode=mode)
        assert polarity[TYPE_A].tolist() == [0, 0, 1]
        assert_equal(lambdas[TYPE_A], [0.0, 0.0, 0.5])
        assert polarity[TYPE_B].tolist() == [-1, -1, -1]
        assert_equal(lambdas[TYPE_B], [magnitude, magnitude, 1.0])
        # No search token of type D was seen.
        assert_equal(lambdas[TYPE_D], [0.0, 0.0, 0.25])


def test_another_table_can_be_merged_and_is_left_as_it_was():
    flat = lambda_table("flat")
    lambdas = merged_search_table(torch.tensor([3, 0, 0, 0]), torch.tensor([1, 0, 0, 0]), lambdas=flat)[1]
    assert_equal(lambdas[TYPE_A], [0.25, 0.25, 0.5])  # (3 * 0.5 - 1 * 0.5) / 4
    assert torch.equal(flat, lambda_table("flat"))


@quick
@given(cases())
def test_the_signed_merge_preserves_the_summed_residual_when_salience_is_constant(case):
    counts = cell_counts(case.credit().cells)
    polarity, lambdas = merged_search_table(counts[:, V_SEARCH], counts[:, R_SEARCH])
    ones = torch.full((4, 3), 0.5, dtype=torch.float64)
    types, search = case.types, (case.segments == V_SEARCH) | (case.segments == R_SEARCH)
    split = case.credit(Routing(mean_salience=ones), advantages=torch.ones_like(case.advantages))
    merged = case.credit(
        Routing(lambdas, polarity, mean_salience=ones),
        advantages=torch.ones_like(case.advantages),
        segments=merge_search_segments(case.segments),
    )
    for kind in (TYPE_A, TYPE_B):
        tokens = search & (types == kind).unsqueeze(1)
        assert_equal((merged.advantages - 1)[tokens].sum(), (split.advantages - 1)[tokens].sum())
    assert torch.equal(merged.advantages[~search], split.advantages[~search])


def test_merging_moves_redundant_searches_only():
    segments = torch.tensor([[V_SEARCH, R_SEARCH, ANSWER, NO_SEGMENT]])
    assert merge_search_segments(segments).tolist() == [[V_SEARCH, V_SEARCH, ANSWER, NO_SEGMENT]]


def test_the_bound_is_eta_times_the_largest_magnitude_times_the_cap():
    assert Routing().bound == pytest.approx(0.1)
    assert Routing(lambda_table("flat"), eta=0.3, weights=SalienceWeights(c_max=0.4)).bound == pytest.approx(0.06)
    assert Routing(mean_salience=torch.full((4, 3), 0.3)).bound == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: lambda_table("learned"),
            ValueError,
            "`name` must be one of 'default', 'ans_first', 'flat': got 'learned'. Pick one of them.",
        ),
        (
            lambda: lambda_table("flat", -1.0),
            ValueError,
            "`scale` must be finite and at least 0.0: got -1.0. Choose a larger finite value.",
        ),
        *(
            (
                lambda name=name: Routing(**{name: torch.zeros(3, 4)}),
                ValueError,
                f"`{name}` must have the shape (4, 3): got (3, 4). "
                "Pass one row per type A to D and one column per segment.",
            )
            for name in ("lambdas", "polarity", "mean_salience")
        ),
        (
            lambda: Routing(2 * lambda_table()),
            ValueError,
            "`lambdas` must lie in [0, 1]: got a range of [0.0, 2.0]. Clip the table, or lower its scale.",
        ),
        (
            lambda: Routing(lambda_table() - 0.25),
            ValueError,
            "`lambdas` must lie in [0, 1]: got a range of [-0.25, 0.75]. Clip the table, or lower its scale.",
        ),
        (
            lambda: Routing(mean_salience=torch.full((4, 3), -0.5)),
            ValueError,
            "`mean_salience` must be finite and at least 0.0: got -0.5. Choose a larger finite value.",
        ),
        (
            lambda: Routing(eta=-0.2),
            ValueError,
            "`eta` must be finite and at least 0.0: got -0.2. Choose a larger finite value.",
        ),
        (
            lambda: Routing(eta=2.0),
            ValueError,
            "`eta` times the largest magnitude times `c_max` must be below 1: got 1.0. "
            "Credit could flip the sign of an advantage. Lower `eta` or `c_max`.",
        ),
        (
            lambda: merged_search_table(torch.zeros(3), torch.zeros(4)),
            ValueError,
            "`num_valid` must have the shape (4,): got (3,). Pass one entry per type A to D.",
        ),
        (
            lambda: merged_search_table(torch.zeros(4), torch.zeros(3)),
            ValueError,
            "`num_redundant` must have the shape (4,): got (3,). Pass one entry per type A to D.",
        ),
        (
            lambda: merged_search_table(torch.zeros(4), torch.zeros(4), mode="both"),
            ValueError,
            "`mode` must be one of 'signed', 'absolute': got 'both'. Pick one of them.",
        ),
        (
            lambda: cell_means(torch.zeros(2), torch.zeros(3, dtype=torch.long)),
            ValueError,
            "`cells` must have the shape of `salience`, (2,): got (3,). "
            "Pass one entry of `cells` per entry of `salience`.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()


def test_the_bound_follows_the_largest_mean_salience_and_a_negative_one_is_refused():
    means = torch.full((4, 3), 0.1, dtype=torch.float64)
    means[1, 2] = 0.4
    assert Routing(mean_salience=means).bound == pytest.approx(0.2 * float(Routing().lambdas.max()) * 0.4, rel=1e-12)
    means[0, 0] = -1e-3
    with pytest.raises(ValueError, match="`mean_salience` must"):
        Routing(mean_salience=means)

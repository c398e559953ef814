import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    clipped_surrogate,
    gca_token_advantages,
    group_advantages,
    has_reward_variance,
    lambda_table,
    masked,
    merge_search_segments,
    merged_search_table,
    salience,
)
from tests.credit import reference
from tests.credit.batches import Batch, assert_equal, batches, quick

NAN = float("nan")

# The tables once more, typed from the specification: polarity and magnitude of every cell.
DEFAULT = {
    "A": {"V_SEARCH": (1, 1.0), "R_SEARCH": (-1, 0.5), "ANSWER": (1, 0.5)},
    "B": {"V_SEARCH": (1, 0.5), "R_SEARCH": (-1, 0.25), "ANSWER": (-1, 1.0)},
    "C": {"V_SEARCH": (0, 0.0), "R_SEARCH": (0, 0.0), "ANSWER": (0, 0.0)},
    "D": {"V_SEARCH": (0, 0.0), "R_SEARCH": (-1, 0.5), "ANSWER": (-1, 0.25)},
}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


class Case:
    """A batch of rollouts with every type, garbage margins at tokens that are not eligible, some closed gates."""

    def __init__(self, batch):
        self.batch = batch
        rows = batch.rows
        self.advantages = torch.where(batch.uniform(rows) < 0.2, 0.0, batch.normal(rows))
        self.types = batch.integers(-1, 4, rows)
        self.segments = batch.integers(-1, 3)
        self.eligible = batch.mask
        self.margins = batch.garbage(2 * batch.normal())
        self.entropies = batch.garbage(batch.uniform())
        self.gate_open = batch.uniform(rows) < 0.8

    def arguments(self):
        return {
            "advantages": self.advantages,
            "types": self.types,
            "segments": self.segments,
            "margins": self.margins,
            "entropies": self.entropies,
            "eligible": self.eligible,
            "gate_open": self.gate_open,
        }

    def credit(self, routing=None, **changes):
        return gca_token_advantages(**{**self.arguments(), **changes}, routing=routing)

    def baseline(self):
        return self.advantages.unsqueeze(1).expand(self.segments.shape)

    def is_open(self):
        """The gate of every token, from the definition."""
        rows = zip(self.types.tolist(), self.gate_open.tolist(), self.segments.tolist(), strict=True)
        cells = [
            [
                gate and kind >= 0 and segment >= 0
                and DEFAULT[reference.TYPES[kind]][reference.SEGMENTS[segment]][0] != 0
                for segment in segments
            ]
            for kind, gate, segments in rows
        ]  # fmt: skip
        return torch.tensor(cells) & self.eligible


def cases():
    return batches(5, 10).map(Case)


def one_token(advantage, kind, segment, *, margin=0.0, entropy=0.0, routing=None):
    """Token advantage of a rollout of a single token."""
    credit = gca_token_advantages(
        tensor(advantage),
        torch.tensor([kind]),
        torch.tensor([[segment]]),
        tensor(margin).unsqueeze(0),
        tensor(entropy).unsqueeze(0),
        eligible=torch.ones(1, 1, dtype=torch.bool),
        gate_open=torch.ones(1, dtype=torch.bool),
        routing=routing,
    )
    return credit.advantages[0, 0]


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


WIN, LOSS = 1.0954431, -0.7302954  # sample-sigma advantages of rewards (1, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "segment", "advantage", "capped", "plain"),
    [
        (TYPE_A, V_SEARCH, WIN, 1.204987, 1.161170),
        (TYPE_A, R_SEARCH, WIN, 1.040671, 1.062580),
        (TYPE_A, ANSWER, WIN, 1.150215, 1.128306),
        (TYPE_B, V_SEARCH, LOSS, -0.693781, -0.708387),
        (TYPE_B, R_SEARCH, LOSS, -0.748553, -0.741250),
        (TYPE_B, ANSWER, LOSS, -0.803325, -0.774113),
        (TYPE_D, R_SEARCH, WIN, 1.040671, 1.062580),
        (TYPE_D, ANSWER, WIN, 1.068057, 1.079011),
        (TYPE_C, R_SEARCH, LOSS, LOSS, LOSS),
        (TYPE_C, ANSWER, LOSS, LOSS, LOSS),
        (TYPE_D, V_SEARCH, WIN, WIN, WIN),
        (NO_TYPE, ANSWER, WIN, WIN, WIN),
        (TYPE_A, NO_SEGMENT, WIN, WIN, WIN),
    ],
)
def test_every_cell_gives_the_worked_token_advantage(kind, segment, advantage, capped, plain):
    # A lone token has d = 0.5: with beta = gamma = 0 its salience is alpha / 2, capped at 0.5.
    for alpha, expected in ((1.0, capped), (0.6, plain)):
        routing = Routing(weights=SalienceWeights(alpha=alpha, beta=0.0, gamma=0.0))
        assert_equal(one_token(advantage, kind, segment, routing=routing), expected, rtol=1e-6)


def test_a_rollout_of_mixed_turns_gets_one_residual_per_segment():
    # Type A: a search that hits, a malformed call, a search after the hit, the answer; a tool and a structural token.
    segments = torch.tensor([[V_SEARCH, V_SEARCH, R_SEARCH, NO_SEGMENT, R_SEARCH, ANSWER, V_SEARCH]])
    margins = tensor(0.0, 2.0, 1.0, NAN, 1.0, 5.0, NAN).unsqueeze(0)
    eligible = torch.tensor([[True, True, True, False, True, True, False]])
    credit = gca_token_advantages(
        tensor(-2.0), torch.tensor([TYPE_A]), segments, margins, torch.where(eligible, 0.0, NAN).double(),
        eligible=eligible, gate_open=torch.tensor([True]),
    )  # fmt: skip
    # vSearch: median 1, d+ = logistic(2), logistic(-2), c = min(0.5, 0.6 d). rSearch: d- = 0.5, c = 0.3 + 0.3 + 0.05,
    # capped. Answer: c = 0.3. Residual 0.2 * 2 * P * lambda * c.
    c = [0.5, 0.6 * 0.11920292202211755, 0.5, 0.0, 0.5, 0.3, 0.0]
    assert_equal(credit.salience, [c])
    residual = [0.4 * c[0], 0.4 * c[1], -0.2 * 0.5, 0.0, -0.2 * 0.5, 0.2 * 0.3, 0.0]
    assert_equal(credit.advantages, [[-2.0 + change for change in residual]])
    assert credit.cells.tolist() == [[0, 0, 1, -1, 1, 2, -1]]
    assert credit.polarity.tolist() == [[1.0, 1.0, -1.0, 0.0, -1.0, 1.0, 0.0]]
    assert credit.magnitude.tolist() == [[1.0, 1.0, 0.5, 0.0, 0.5, 0.5, 0.0]]


@quick
@given(cases(), st.sampled_from([0.2, 0.7]))
def test_credit_equals_the_loops(case, eta):
    weights = {"alpha": 0.5, "beta": 0.4, "gamma": 0.2, "tau": 0.7, "c_max": 0.6}
    credit = case.credit(Routing(eta=eta, weights=SalienceWeights(**weights)))
    rows = zip(*(part.tolist() for part in case.arguments().values()), strict=True)
    expected = [reference.gca_row(*row, DEFAULT, eta, **weights) for row in rows]
    assert_equal(credit.advantages, [advantages for advantages, _ in expected])
    assert_equal(credit.salience, [saliences for _, saliences in expected])


@quick
@given(cases())
def test_the_defaults_are_those_of_the_paper(case):
    rows = zip(*(part.tolist() for part in case.arguments().values()), strict=True)
    assert_equal(case.credit().advantages, [reference.gca_row(*row, DEFAULT)[0] for row in rows])


@quick
@given(cases(), st.sampled_from(sorted(LAMBDA_TABLES)), st.floats(0.0, 3.0))
def test_no_advantage_flips_its_sign_or_moves_by_more_than_the_bound(case, table, scale):
    routing = Routing(lambda_table(table, scale))
    credit, baseline = case.credit(routing).advantages, case.baseline()
    assert torch.equal(credit.sign(), baseline.sign())
    assert routing.bound <= 0.1
    share = torch.where(baseline == 0, 0.0, (credit / baseline - 1).abs())
    assert (share <= routing.bound + 1e-15).all()
    assert (credit[baseline == 0] == 0).all()


@quick
@given(cases())
def test_without_a_scale_or_with_closed_gates_credit_is_exactly_the_baseline(case):
    baseline = case.baseline()
    assert torch.equal(case.credit(Routing(eta=0.0)).advantages, baseline)
    assert torch.equal(case.credit(Routing(lambda_table(scale=0.0))).advantages, baseline)
    for name, closed in (
        ("gate_open", torch.zeros_like(case.gate_open)),
        ("eligible", torch.zeros_like(case.eligible)),
        ("types", torch.full_like(case.types, TYPE_C)),
        ("types", torch.full_like(case.types, NO_TYPE)),
        ("segments", torch.full_like(case.segments, NO_SEGMENT)),
    ):
        credit = case.credit(**{name: closed})
        assert torch.equal(credit.advantages, baseline)
        assert (credit.salience == 0).all()
        assert (credit.cells == -1).all()
    is_open = case.is_open()
    assert torch.equal(case.credit().advantages[~is_open], baseline[~is_open])
    assert torch.equal(case.credit().cells >= 0, is_open)


@quick
@given(cases())
def test_salience_is_that_of_the_eligible_tokens_of_the_segment(case):
    credit, is_open = case.credit(), case.is_open()
    ids = torch.where(is_open, case.segments, -1)
    assert_equal(credit.salience, salience(case.margins, case.entropies, ids, credit.polarity))
    assert ((credit.salience >= 0) & (credit.salience <= 0.5)).all()
    kinds = case.types.unsqueeze(1).expand(ids.shape)
    assert torch.equal(credit.cells.long(), torch.where(is_open, 3 * kinds + ids, -1))
    residual = 0.2 * case.baseline().abs() * credit.polarity * credit.magnitude * credit.salience
    assert_equal(credit.advantages, case.baseline() + residual)


@quick
@given(cases(), st.floats(-5, 5))
def test_a_constant_on_all_margins_of_a_segment_changes_nothing(case, constant):
    shifted = torch.where(case.segments == ANSWER, case.margins + constant, case.margins)
    assert_equal(case.credit(margins=shifted).advantages, case.credit().advantages, rtol=1e-11)


@quick
@given(cases(), st.integers(1, 20), st.randoms())
def test_credit_follows_permutations_and_ignores_padding_and_chunks(case, elements, random):
    credit, order = case.credit().advantages, list(range(case.batch.rows))
    random.shuffle(order)
    permuted = case.credit(**{name: part[order] for name, part in case.arguments().items()})
    assert torch.equal(permuted.advantages, credit[order])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "CHUNK_ELEMENTS", elements)
        assert torch.equal(case.credit().advantages, credit)
    pad = torch.nn.functional.pad
    wide = case.credit(
        segments=pad(case.segments, (0, 2), value=ANSWER),
        margins=pad(case.margins, (0, 2), value=NAN),
        entropies=pad(case.entropies, (0, 2), value=NAN),
        eligible=pad(case.eligible, (0, 2)),
    )
    assert torch.equal(wide.advantages[:, : case.batch.columns], credit)


@quick
@given(cases())
def test_gca_and_the_baseline_share_every_clip_decision(case):
    ratio = (0.4 * case.batch.normal()).exp().requires_grad_()
    credit, baseline = case.credit().advantages, case.baseline()
    gradients = [torch.autograd.grad(clipped_surrogate(ratio, part).sum(), ratio)[0] for part in (credit, baseline)]
    assert torch.equal(gradients[0] == 0, gradients[1] == 0)
    # Each token's gradient is multiplied by the relative change of its advantage.
    assert_equal(gradients[0] * baseline, gradients[1] * credit)


@quick
@given(cases())
def test_masking_a_rollout_leaves_the_statistics_of_its_group(case):
    rewards = case.batch.integers(0, 2, case.batch.rows).double()
    advantages, variance = group_advantages(rewards), has_reward_variance(rewards)
    masked_out = case.types == TYPE_D
    credit = case.credit(advantages=advantages, gate_open=variance & ~masked_out)
    rows = advantages.unsqueeze(1).expand(case.segments.shape)
    assert torch.equal(credit.advantages[masked_out], rows[masked_out])
    if not variance.any():
        assert (credit.advantages == 0).all()
    elsewhere = case.credit(advantages=advantages, gate_open=variance)
    assert torch.equal(credit.advantages[~masked_out], elsewhere.advantages[~masked_out])


def test_credit_carries_no_gradient_and_takes_masks_and_ids_of_any_type():
    case = Case(Batch(3, 5, seed=7))
    credit = case.credit()
    plain = case.credit(
        eligible=case.eligible.long(),
        gate_open=case.gate_open.long(),
        segments=case.segments.to(torch.int8),
        types=case.types.to(torch.int32),
    )
    assert torch.equal(plain.advantages, credit.advantages)
    free = case.credit(advantages=case.advantages.clone().requires_grad_(), margins=case.margins.requires_grad_())
    assert not free.advantages.requires_grad
    assert not free.salience.requires_grad


def test_the_result_has_the_wider_of_the_two_precisions():
    arguments = {
        "types": torch.tensor([TYPE_A]),
        "segments": torch.tensor([[ANSWER]]),
        "entropies": torch.zeros(1, 1),
        "eligible": torch.ones(1, 1),
        "gate_open": torch.ones(1),
    }
    for advantages, margins, expected in (
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
    ):
        credit = gca_token_advantages(
            torch.ones(1, dtype=advantages), margins=torch.zeros(1, 1, dtype=margins), **arguments
        )
        assert credit.advantages.dtype == credit.salience.dtype == expected
        # 1 + 0.2 * 0.5 * 0.3
        assert credit.advantages.item() == pytest.approx(1.03)
        assert credit.polarity.dtype == expected


def test_the_caller_keeps_its_tensors():
    case = Case(Batch(4, 6, seed=3))
    before = [part.clone() for part in case.arguments().values()]
    case.credit()
    for part, copy in zip(case.arguments().values(), before, strict=True):
        assert torch.equal(torch.nan_to_num(part), torch.nan_to_num(copy))


def test_rows_and_columns_may_be_missing():
    for rows, columns in ((0, 3), (2, 0)):
        empty = torch.zeros(rows, columns)
        credit = gca_token_advantages(
            torch.zeros(rows), torch.zeros(rows, dtype=torch.long), empty.long(), empty, empty,
            eligible=empty, gate_open=torch.ones(rows),
        )  # fmt: skip
        assert credit.advantages.shape == (rows, columns)


def test_cell_statistics_of_a_small_sample():
    cells = torch.tensor([[0, 0, -1, 5], [11, 5, -1, 5]], dtype=torch.int8)
    values = torch.tensor([[0.5, 0.3, NAN, 0.2], [0.4, 0.5, NAN, 0.2]], dtype=torch.float64)
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


def test_only_the_sign_of_a_polarity_counts():
    routing = Routing(polarity=3 * torch.tensor(POLARITY))
    assert_equal(one_token(1.0, TYPE_A, R_SEARCH, routing=routing), one_token(1.0, TYPE_A, R_SEARCH))
    credit = gca_token_advantages(
        torch.ones(1), torch.tensor([TYPE_A]), torch.tensor([[R_SEARCH]]), torch.zeros(1, 1), torch.zeros(1, 1),
        eligible=torch.ones(1, 1), gate_open=torch.ones(1), routing=routing,
    )  # fmt: skip
    assert credit.polarity.tolist() == [[-1.0]]


def test_the_bound_is_eta_times_the_largest_magnitude_times_the_cap():
    assert Routing().bound == pytest.approx(0.1)
    assert Routing(lambda_table("flat"), eta=0.3, weights=SalienceWeights(c_max=0.4)).bound == pytest.approx(0.06)
    assert Routing(mean_salience=torch.full((4, 3), 0.3)).bound == pytest.approx(0.06)


def refused(**changes):
    batch = {
        "advantages": torch.zeros(2),
        "types": torch.zeros(2, dtype=torch.long),
        "segments": torch.zeros(2, 3, dtype=torch.long),
        "margins": torch.zeros(2, 3),
        "entropies": torch.zeros(2, 3),
        "eligible": torch.ones(2, 3),
        "gate_open": torch.ones(2),
    }
    return gca_token_advantages(**{**batch, **changes})


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: refused(segments=torch.zeros(3, dtype=torch.long)),
            ValueError,
            "`segments` must have the shape (B, T): got (3,). Reshape it to 2 dimension(s).",
        ),
        *(
            (
                lambda name=name: refused(**{name: torch.zeros(2, 2)}),
                ValueError,
                f"`{name}` must have the shape of `segments`, (2, 3): got (2, 2). "
                f"Pass one entry of `{name}` per entry of `segments`.",
            )
            for name in ("margins", "entropies", "eligible")
        ),
        *(
            (
                lambda name=name: refused(**{name: torch.zeros(2, 1)}),
                ValueError,
                f"`{name}` must have the shape (2,): got (2, 1). Pass one entry per rollout.",
            )
            for name in ("advantages", "types", "gate_open")
        ),
        (
            lambda: refused(types=torch.tensor([0, 4])),
            ValueError,
            "`types` must lie in [-1, 4): got a range of [0, 4]. Use 0 to 3 for types A to D, or `-1` for none.",
        ),
        (
            lambda: refused(segments=torch.tensor([[0, 1, 3]] * 2)),
            ValueError,
            "`segments` must lie in [-1, 3): got a range of [0, 3]. "
            "Use `V_SEARCH`, `R_SEARCH` or `ANSWER`, or `-1` for none.",
        ),
        (
            lambda: refused(segments=torch.tensor([[0, 1, -2]] * 2)),
            ValueError,
            "`segments` must lie in [-1, 3): got a range of [-2, 1]. "
            "Use `V_SEARCH`, `R_SEARCH` or `ANSWER`, or `-1` for none.",
        ),
        (
            lambda: refused(types=torch.zeros(2)),
            TypeError,
            "`types` must hold integers: got torch.float32. Convert it with `.long()`.",
        ),
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

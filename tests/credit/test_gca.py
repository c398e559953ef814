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
    clipped_surrogate,
    gca_token_advantages,
    group_advantages,
    has_reward_variance,
    lambda_table,
    masked,
    salience,
)
from tests.credit import reference
from tests.credit.batches import Batch, assert_equal, quick
from tests.credit.gca_cases import DEFAULT, Case, cases, tensor

NAN = float("nan")


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
        types=case.types.to(torch.int8),
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


def test_only_the_sign_of_a_polarity_counts():
    routing = Routing(polarity=3 * torch.tensor(POLARITY))
    assert_equal(one_token(1.0, TYPE_A, R_SEARCH, routing=routing), one_token(1.0, TYPE_A, R_SEARCH))
    credit = gca_token_advantages(
        torch.ones(1), torch.tensor([TYPE_A]), torch.tensor([[R_SEARCH]]), torch.zeros(1, 1), torch.zeros(1, 1),
        eligible=torch.ones(1, 1), gate_open=torch.ones(1), routing=routing,
    )  # fmt: skip
    assert credit.polarity.tolist() == [[-1.0]]


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
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()

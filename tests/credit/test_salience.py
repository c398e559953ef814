import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import SalienceWeights, masked, salience, token_margin
from grounded_rl.credit.salience import salience_of_centred
from tests.credit import reference
from tests.credit.batches import assert_equal, batches, quick

NAN = float("nan")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


SEGMENT_MARGINS = torch.tensor([[4.0, 0.10536051565782635, -2.3632102450017765, 3.6192, 2.0]], dtype=torch.float64)


SEGMENT_ENTROPIES = torch.tensor([[0.05, 0.60, 0.70, 0.01, 0.20]], dtype=torch.float64)


ZEROS = torch.zeros(1, 5, dtype=torch.long)


def test_a_segment_of_five_tokens_gives_the_worked_salience():
    # Median 2.0; centred (2, -1.894639, -4.363210, 1.6192, 0)
    # d+ = (0.017986, 0.977888, 0.999838, 0.037746, 0.5)
    # raw c+ = (0.025882, 0.825406, 0.879891, 0.025685, 0.370)
    # raw c- = (0.967500, 0.134152, 0.090102, 0.969616, 0.580)
    positive = salience(SEGMENT_MARGINS, SEGMENT_ENTROPIES, ZEROS, ZEROS + 1)
    assert_equal(positive, [[0.025882, 0.5, 0.5, 0.025685, 0.370]], rtol=4e-5)
    negative = salience(SEGMENT_MARGINS, SEGMENT_ENTROPIES, ZEROS, ZEROS - 1)
    assert_equal(negative, [[0.5, 0.134152, 0.090102, 0.5, 0.5]], rtol=4e-5)
    uncapped = salience(SEGMENT_MARGINS, SEGMENT_ENTROPIES, ZEROS, ZEROS + 1, c_max=2.0)
    assert_equal(uncapped, [[0.025882, 0.825406, 0.879891, 0.025685, 0.370]], rtol=4e-5)
    uncapped = salience(SEGMENT_MARGINS, SEGMENT_ENTROPIES, ZEROS, ZEROS - 1, c_max=2.0)
    assert_equal(uncapped, [[0.967500, 0.134152, 0.090102, 0.969616, 0.580]], rtol=4e-5)
    assert (salience(SEGMENT_MARGINS, SEGMENT_ENTROPIES, ZEROS, ZEROS) == 0).all()


def test_one_nat_is_two_temperatures():
    margins = tensor(1.0, 0.0, -1.0).unsqueeze(0)
    only_margin = {"beta": 0.0, "gamma": 0.0, "alpha": 1.0, "c_max": 1.0}
    ids = torch.zeros(1, 3, dtype=torch.long)
    # logistic(-2), 1/2, logistic(2)
    assert_equal(
        salience(margins, 0 * margins, ids, ids + 1, **only_margin),
        [[0.11920292202211755, 0.5, 0.8807970779778823]],
    )
    assert_equal(
        salience(margins, 0 * margins, ids, ids + 1, tau=1.0, **only_margin)[0, :1], [0.2689414213699951]
    )  # logistic(-1)


def test_a_single_token_sits_at_its_own_median():
    one = torch.tensor([[1]])
    # 0.6 / 2 + 0.3 * 0.2 + 0.1 * 0.2 / 2 = 0.37; 0.3 + 0.3 * 0.8 + 0.05 * 0.8 = 0.58, capped
    assert_equal(salience(tensor(7.0).unsqueeze(0), tensor(0.2).unsqueeze(0), 0 * one, one), [[0.37]])
    assert_equal(salience(tensor(7.0).unsqueeze(0), tensor(0.2).unsqueeze(0), 0 * one, -one), [[0.5]])
    assert_equal(salience(tensor(7.0).unsqueeze(0), tensor(0.2).unsqueeze(0), 0 * one, -one, c_max=1.0), [[0.58]])


def test_the_median_of_an_even_segment_is_the_mean_of_its_middle_values():
    margins, ids = tensor(0.0, 1.0, 3.0, 8.0).unsqueeze(0), torch.zeros(1, 4, dtype=torch.long)
    entropies = torch.zeros(1, 4, dtype=torch.float64)
    # Centre 2, not 1: d+ of the second token is logistic(1 / 0.5).
    assert_equal(salience(margins, entropies, ids, ids + 1, c_max=1.0)[0, 1], 0.6 * 0.8807970779778823)


def test_where_the_cap_is_reached():
    centred = tensor(-0.4582, -0.4580, -0.8048, -0.8046, 0.4580, 0.4582)
    entropies, signs = tensor(0, 0, 0, 0, 1, 1), torch.tensor([-1, -1, 1, 1, 1, 1])
    capped = salience_of_centred(centred, entropies, signs, SalienceWeights()) == 0.5
    # c- without entropy: 0.7 d + 0.3 = 0.5 at d = 0.2857, that is -0.4581; c+: 0.6 d = 0.5 at d = 0.8333, that is
    # -0.8047; c+ at full entropy: 0.7 d + 0.3 = 0.5, the mirror image of the first.
    assert capped.tolist() == [False, True, True, False, True, False]


def salience_case(batch, num_segments=3):
    ids = torch.where(batch.mask, batch.integers(0, num_segments), -1)
    return batch.garbage(2 * batch.normal()), batch.garbage(batch.uniform()), ids, batch.integers(-1, 2)


@quick
@given(batches(4, 12), st.sampled_from([{}, {"alpha": 0.2, "beta": 0.5, "gamma": 0.4, "tau": 2.0, "c_max": 0.6}]))
def test_salience_equals_the_loop(batch, weights):
    case = salience_case(batch)
    rows = zip(*(part.tolist() for part in case), strict=True)
    assert_equal(salience(*case, **weights), [reference.row_salience(*row, **weights) for row in rows])


@quick
@given(batches(4, 12), st.integers(1, 30))
def test_salience_does_not_depend_on_chunks_padding_order_or_the_type_of_ids(batch, elements):
    margins, entropies, ids, polarity = case = salience_case(batch)
    whole = salience(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "CHUNK_ELEMENTS", elements)
        assert torch.equal(salience(*case), whole)
    pad = torch.nn.functional.pad
    wide = pad(margins, (0, 2), value=NAN), pad(entropies, (0, 2), value=NAN), pad(ids, (0, 2), value=-1)
    assert torch.equal(salience(*wide, pad(polarity, (0, 2), value=1))[:, : batch.columns], whole)
    assert torch.equal(salience(*(part.flip(0) for part in case)), whole.flip(0))
    assert_equal(salience(*(part.flip(1) for part in case)), whole.flip(1))
    assert torch.equal(salience(margins, entropies, ids.to(torch.int8), 2.5 * polarity), whole)


@quick
@given(batches(4, 12))
def test_salience_is_bounded_and_zero_outside_segments_and_polarity(batch):
    case = salience_case(batch)
    actual = salience(*case)
    assert ((actual >= 0) & (actual <= 0.5)).all()
    assert (actual[(case[2] < 0) | (case[3] == 0)] == 0).all()
    # Entropies beyond their range (raw nats, say) cannot break the bound.
    extreme = salience(case[0], case[1] * 20, *case[2:])
    assert ((extreme >= 0) & (extreme <= 0.5)).all()


@quick
@given(batches(4, 12))
def test_before_the_cap_negative_salience_mirrors_positive_salience(batch):
    margins, entropies, ids, polarity = salience_case(batch)
    mirrored = salience(-margins, 1 - entropies, ids, -polarity, c_max=2.0)
    assert_equal(salience(margins, entropies, ids, polarity, c_max=2.0), mirrored)


@quick
@given(batches(4, 12), st.floats(-5, 5))
def test_a_constant_on_all_margins_of_a_segment_changes_nothing(batch, constant):
    margins, entropies, ids, polarity = salience_case(batch)
    shifted = torch.where(ids == 1, margins + constant, margins)
    assert_equal(salience(shifted, entropies, ids, polarity), salience(margins, entropies, ids, polarity), rtol=1e-11)


@quick
@given(batches(3, 6))
def test_the_sum_and_the_mean_of_competitors_agree_after_centring(batch):
    logits, ids = batch.normal(batch.rows, batch.columns, 9), batch.integers(0, 9)
    by_sum = token_margin(logits, ids)
    by_mean = by_sum + torch.tensor(3.0, dtype=torch.float64).log()  # log-mean-exp of three competitors
    segments, entropies = torch.where(batch.mask, 0, -1), batch.uniform()
    expected = salience(by_sum, entropies, segments, torch.ones_like(segments))
    assert_equal(salience(by_mean, entropies, segments, torch.ones_like(segments)), expected)


def test_equal_margins_are_neither_hesitant_nor_confident():
    entropies, ids = tensor(0.0, 0.1, 0.2).unsqueeze(0), torch.zeros(1, 3, dtype=torch.long)
    # 0.3 + (0.3 + 0.05) H
    assert_equal(salience(torch.full_like(entropies, 3.0), entropies, ids, ids + 1), 0.3 + 0.35 * entropies)


def test_salience_carries_no_gradient_and_keeps_precision():
    margins = torch.zeros(1, 2, requires_grad=True)
    ids = torch.zeros(1, 2, dtype=torch.long)
    assert not salience(margins, margins, ids, ids + 1).requires_grad
    assert salience(margins.bfloat16(), margins.bfloat16(), ids, ids + 1).dtype == torch.float32
    assert salience(margins.double(), margins.double(), ids, ids + 1).dtype == torch.float64


def test_rows_and_columns_may_be_missing():
    for shape in ((0, 3), (2, 0)):
        nothing = torch.zeros(shape)
        assert salience(nothing, nothing, nothing.long(), nothing).shape == shape
    assert token_margin(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)).tolist() == []


ROW = torch.zeros(1, 2)


IDS = torch.zeros(1, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: salience(ROW[0], ROW[0], IDS[0], IDS[0]),
            ValueError,
            "`margins` must have the shape (B, T): got (2,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: salience(ROW, ROW, IDS[:, :1], IDS),
            ValueError,
            "`segment_ids` must have the shape of `margins`, (1, 2): got (1, 1). "
            "Pass one entry of `segment_ids` per entry of `margins`.",
        ),
        (
            lambda: salience(ROW, ROW[:, :1], IDS, IDS),
            ValueError,
            "`entropies` must have the shape of `margins`, (1, 2): got (1, 1). "
            "Pass one entry of `entropies` per entry of `margins`.",
        ),
        (
            lambda: salience(ROW, ROW, IDS, IDS[:, :1]),
            ValueError,
            "`polarity` must have the shape of `margins`, (1, 2): got (1, 1). "
            "Pass one entry of `polarity` per entry of `margins`.",
        ),
        (
            lambda: salience(ROW, ROW, ROW, IDS),
            TypeError,
            "`segment_ids` must hold integers: got torch.float32. Convert it with `.long()`.",
        ),
        (
            lambda: salience(ROW, ROW, IDS - 2, IDS),
            ValueError,
            "`segment_ids` must be at least -1: got a minimum of -2. Use `-1` for tokens that belong to no segment.",
        ),
        (
            lambda: SalienceWeights(alpha=-0.1),
            ValueError,
            "`alpha` must be finite and at least 0.0: got -0.1. Choose a larger finite value.",
        ),
        (
            lambda: SalienceWeights(beta=-0.1),
            ValueError,
            "`beta` must be finite and at least 0.0: got -0.1. Choose a larger finite value.",
        ),
        (
            lambda: SalienceWeights(gamma=-0.1),
            ValueError,
            "`gamma` must be finite and at least 0.0: got -0.1. Choose a larger finite value.",
        ),
        (
            lambda: salience(ROW, ROW, IDS, IDS, tau=0.0),
            ValueError,
            "`tau` must be finite and greater than 0.0: got 0.0. Choose a larger finite value.",
        ),
        (
            lambda: salience(ROW, ROW, IDS, IDS, c_max=0.0),
            ValueError,
            "`c_max` must be finite and greater than 0.0: got 0.0. Choose a larger finite value.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()


def test_a_misspelt_weight_is_refused():
    with pytest.raises(TypeError, match="temperature"):
        salience(ROW, ROW, IDS, IDS, temperature=1.0)


def test_the_smallest_allowed_settings_work():
    assert token_margin(tensor(1.0, 3.0, 2.0), torch.tensor(2), num_competitors=1).item() == -1.0
    weights = {"alpha": 0.0, "beta": 0.0, "gamma": 0.0}
    assert salience(ROW, ROW, IDS, IDS + 1, **weights).tolist() == [[0.0, 0.0]]

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    contiguous_segments,
    masked,
    masked_mean,
    masked_median,
    masked_std,
    masked_sum,
    segment_counts,
    segment_means,
    segment_medians,
    segment_sums,
    spread_segments,
)
from tests.credit import reference
from tests.credit.batches import assert_equal, batches, quick

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, NAN, 6.0], [NAN, NAN, NAN, NAN], [5.0, NAN, 7.0, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
SEGMENT_FUNCTIONS = [
    (segment_sums, sum),
    (segment_means, reference.mean),
    (segment_medians, reference.median),
]


def columns_of(batch, dim, values):
    """The vectors a reduction runs over, each with its mask."""
    if dim is None:
        return [(values.flatten().tolist(), batch.mask.flatten().tolist())]
    pairs = zip(values.unbind(1 - dim), batch.mask.unbind(1 - dim), strict=True)
    return [(vector.tolist(), mask.tolist()) for vector, mask in pairs]


def test_masked_statistics_of_a_small_matrix():
    # Row 0: 1 + 2 + 6 = 9, mean 3, squares 4 + 1 + 9 = 14. Row 1 is empty. Row 2: 12, mean 6, squares 1 + 1 = 2.
    assert_equal(masked_sum(VALUES, MASK, 1), [9.0, 0.0, 12.0])
    assert_equal(masked_mean(VALUES, MASK, 1), [3.0, 0.0, 6.0])
    assert_equal(masked_std(VALUES, MASK, 1), [7.0**0.5, 0.0, 2.0**0.5])
    assert_equal(masked_std(VALUES, MASK, 1, ddof=0), [(14 / 3) ** 0.5, 0.0, 1.0])
    # All five: 21, mean 4.2, squares 10.24 + 4.84 + 3.24 + 0.64 + 7.84 = 26.8, divided by 4.
    assert_equal(masked_sum(VALUES, MASK), 21.0)
    assert_equal(masked_mean(VALUES, MASK), 4.2)
    assert_equal(masked_std(VALUES, MASK), 6.7**0.5)


def test_the_median_averages_the_two_middle_values_of_an_even_count():
    values = torch.tensor([8.0, 1.0, 3.0, 100.0], dtype=torch.float64)
    assert_equal(masked_median(values, torch.tensor([1, 1, 1, 1])), 5.5)  # (3 + 8) / 2; torch.median gives 3
    assert_equal(masked_median(values, torch.tensor([1, 1, 1, 0])), 3.0)
    assert_equal(masked_median(values, torch.tensor([0, 0, 0, 1])), 100.0)
    assert_equal(masked_median(values, torch.tensor([0, 0, 0, 0])), 0.0)


def test_the_median_of_equal_infinities_is_infinite():
    values = torch.tensor([float("inf"), float("inf"), -1.0, float("inf")], dtype=torch.float64)
    assert masked_median(values, torch.ones(4)).item() == float("inf")


@quick
@given(batches(), st.sampled_from([None, 0, 1]), st.booleans())
def test_masked_statistics_equal_the_loops(batch, dim, keepdim):
    values = batch.normal()
    vectors = [reference.masked_values(*pair) for pair in columns_of(batch, dim, values)]
    garbage = batch.garbage(values)
    cases = [
        (masked_sum, {}, sum),
        (masked_mean, {}, reference.mean),
        (masked_std, {}, lambda vector: reference.std(vector, 1)),
        (masked_std, {"ddof": 0}, lambda vector: reference.std(vector, 0)),
    ]
    for function, options, statistic in cases:
        expected = torch.tensor([float(statistic(vector)) for vector in vectors], dtype=torch.float64)
        if dim is None:
            expected = expected[0]
        elif keepdim:
            expected = expected.unsqueeze(dim)
        assert_equal(function(garbage, batch.mask, dim, keepdim=keepdim, **options), expected)


@quick
@given(batches())
def test_medians_over_a_mask_equal_the_loop_for_any_leading_shape(batch):
    values = batch.normal()
    expected = [reference.median(reference.masked_values(*pair)) for pair in columns_of(batch, 1, values)]
    garbage = batch.garbage(values)
    assert_equal(masked_median(garbage, batch.mask), expected)
    assert_equal(masked_median(garbage.unsqueeze(1), batch.mask.unsqueeze(1)), [[value] for value in expected])
    assert_equal(masked_median(garbage[0], batch.mask[0]), expected[0])


@quick
@given(batches(), st.integers(1, 4))
def test_segment_statistics_equal_the_loops(batch, num_segments):
    values = batch.normal()
    ids = torch.where(batch.mask, batch.integers(0, num_segments), -1)
    garbage = batch.garbage(values)
    for function, statistic in SEGMENT_FUNCTIONS:
        expected = [
            reference.per_segment(statistic, row, own, num_segments)
            for row, own in zip(values.tolist(), ids.tolist(), strict=True)
        ]
        assert_equal(function(garbage, ids, num_segments), expected)
        # Narrow integer ids do the same.
        assert_equal(function(garbage, ids.to(torch.int8), num_segments), expected)
    counts = [reference.per_segment(len, own, own, num_segments) for own in ids.tolist()]
    assert segment_counts(ids, num_segments).tolist() == counts
    assert segment_counts(ids.to(torch.int8), num_segments).tolist() == counts


@quick
@given(batches(), st.integers(1, 7))
def test_results_do_not_depend_on_how_rows_are_cut_into_chunks(batch, elements):
    values, ids = batch.garbage(batch.normal()), torch.where(batch.mask, batch.integers(0, 2), -1)
    whole = segment_medians(values, ids, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "CHUNK_ELEMENTS", elements)
        assert torch.equal(segment_medians(values, ids, 2), whole)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (0, 5, []),
        (3, 0, [(0, 3)]),
        (5, 2**15, [(0, 2), (2, 4), (4, 5)]),
        (2, 2**16 - 1, [(0, 1), (1, 2)]),
        (2, 2**20, [(0, 1), (1, 2)]),
        (4, 2**14, [(0, 4)]),
    ],
)
def test_chunks_cover_every_row_once_and_stay_small(rows, columns, expected):
    assert [(chunk.start, chunk.stop) for chunk in masked.row_chunks(rows, columns)] == expected


@quick
@given(batches())
def test_runs_of_a_mask_are_numbered_like_the_loop(batch):
    expected = [reference.runs(row) for row in batch.mask.tolist()]
    assert contiguous_segments(batch.mask).tolist() == expected
    assert contiguous_segments(batch.mask.double()).tolist() == expected
    padded = torch.cat([batch.mask, torch.zeros(batch.rows, 2, dtype=torch.bool)], dim=1)
    assert contiguous_segments(padded)[:, : batch.columns].tolist() == expected


def test_more_runs_than_any_fixed_limit_are_told_apart():
    mask = torch.tensor([[1, 0] * 40])
    assert contiguous_segments(mask)[0, ::2].tolist() == list(range(40))


@quick
@given(batches(), st.integers(1, 4))
def test_spreading_is_undone_by_the_mean_of_every_segment(batch, num_segments):
    values = batch.normal(batch.rows, num_segments)
    ids = torch.where(batch.mask, batch.integers(0, num_segments), -1)
    spread = spread_segments(values, ids, fill=NAN)
    assert torch.equal(spread.isnan(), ids < 0)
    present = segment_counts(ids, num_segments) > 0
    assert_equal(segment_means(spread, ids, num_segments)[present], values[present])
    assert (spread_segments(values, ids)[ids < 0] == 0).all()


def test_no_segments_and_no_tokens_give_empty_or_neutral_results():
    nothing = torch.full((2, 3), -1)
    for function, _ in SEGMENT_FUNCTIONS:
        assert function(torch.full((2, 3), NAN), nothing, 0).tolist() == [[], []]
        assert function(torch.zeros(2, 0), nothing[:, :0], 1).tolist() == [[0.0], [0.0]]
    assert segment_counts(nothing, 0).tolist() == [[], []]
    assert spread_segments(torch.zeros(2, 0), nothing, fill=3.0).tolist() == [[3.0] * 3] * 2


def test_half_precision_and_integers_are_summed_in_full_precision():
    # In bfloat16 1 + 1/256 rounds to 1, so a running sum would never move.
    small = torch.full((1, 256), 1 / 256, dtype=torch.bfloat16)
    ids = torch.zeros(1, 256, dtype=torch.long)
    assert segment_sums(small, ids, 1).item() == 1.0
    assert segment_medians(small, ids, 1).dtype == torch.float32
    assert masked_mean(torch.tensor([1, 2]), torch.tensor([1, 1])).item() == 1.5
    assert masked_sum(VALUES, MASK).dtype == torch.float64


def test_gradients_are_exact_and_never_reach_masked_positions():
    values = torch.where(MASK.bool(), VALUES, 0.0).requires_grad_()
    ids = torch.tensor([[0, 1, -1, 0], [-1, -1, -1, -1], [1, -1, 1, -1]])
    assert torch.autograd.gradcheck(lambda x: masked_sum(x, MASK, 1), values)
    assert torch.autograd.gradcheck(lambda x: masked_mean(x, MASK), values)
    assert torch.autograd.gradcheck(lambda x: masked_std(x, MASK), values)
    assert torch.autograd.gradcheck(lambda x: segment_means(x, ids, 2), values)
    assert torch.autograd.gradcheck(lambda x: spread_segments(x[:, :2], ids), values)
    garbage = VALUES.clone().requires_grad_()
    (masked_mean(garbage, MASK, 1).sum() + segment_means(garbage, ids, 2).sum()).backward()
    assert garbage.grad.isfinite().all()
    assert (garbage.grad[MASK == 0] == 0).all()
    assert (garbage.grad[MASK == 1] != 0).all()


def test_medians_carry_no_gradient():
    values = torch.ones(1, 3, requires_grad=True)
    assert not segment_medians(values, torch.zeros(1, 3, dtype=torch.long), 1).requires_grad


IDS = torch.tensor([[0, 1, -1]])
ROW = torch.zeros(1, 3)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: masked_sum(ROW, torch.ones(3)),
            ValueError,
            "`mask` must have the shape of `values`, (1, 3): got (3,). "
            "Pass one entry of `mask` per entry of `values`.",
        ),
        (
            lambda: masked_median(ROW, torch.ones(3)),
            ValueError,
            "`mask` must have the shape of `values`, (1, 3): got (3,). "
            "Pass one entry of `mask` per entry of `values`.",
        ),
        (
            lambda: segment_sums(ROW, IDS[:, :2], 2),
            ValueError,
            "`segment_ids` must have the shape of `values`, (1, 3): got (1, 2). "
            "Pass one entry of `segment_ids` per entry of `values`.",
        ),
        (
            lambda: segment_medians(ROW, IDS[:, :2], 2),
            ValueError,
            "`segment_ids` must have the shape of `values`, (1, 3): got (1, 2). "
            "Pass one entry of `segment_ids` per entry of `values`.",
        ),
        (
            lambda: segment_sums(ROW[0], IDS[0], 2),
            ValueError,
            "`values` must have the shape (B, T): got (3,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: segment_medians(ROW[0], IDS[0], 2),
            ValueError,
            "`values` must have the shape (B, T): got (3,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: segment_counts(IDS[0], 2),
            ValueError,
            "`segment_ids` must have the shape (B, T): got (3,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: contiguous_segments(ROW[0]),
            ValueError,
            "`mask` must have the shape (B, T): got (3,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: spread_segments(ROW[0], IDS),
            ValueError,
            "`segment_values` must have the shape (B, S): got (3,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: spread_segments(ROW, IDS[0]),
            ValueError,
            "`segment_ids` must have the shape (B, T): got (3,). Reshape it to 2 dimension(s).",
        ),
        (
            lambda: spread_segments(torch.zeros(2, 2), IDS),
            ValueError,
            "`segment_ids` must have as many rows as `segment_values`, 2: got 1. Pass one row per rollout.",
        ),
        (
            lambda: spread_segments(torch.zeros(1, 1), IDS),
            ValueError,
            "`segment_ids` must lie in [-1, segment_values.shape[1]) = [-1, 1): got a range of [-1, 1]. "
            "Pass a larger `segment_values.shape[1]`, or use `-1` for tokens that belong to no segment.",
        ),
        (
            lambda: segment_sums(ROW, IDS.double(), 2),
            TypeError,
            "`segment_ids` must hold integers: got torch.float64. Convert it with `.long()`.",
        ),
        (
            lambda: segment_counts(IDS >= 0, 2),
            TypeError,
            "`segment_ids` must hold integers: got torch.bool. Convert it with `.long()`.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(call, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("function", [segment_sums, segment_means, segment_medians])
@pytest.mark.parametrize("ids", [[0, 1, 2], [-2, 0, 1]])
def test_segment_ids_out_of_range_are_refused(function, ids):
    message = (
        f"`segment_ids` must lie in [-1, num_segments) = [-1, 2): got a range of [{min(ids)}, {max(ids)}]. "
        "Pass a larger `num_segments`, or use `-1` for tokens that belong to no segment."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        function(ROW, torch.tensor([ids]), 2)
    with pytest.raises(ValueError, match=re.escape("[-1, num_segments) = [-1, 2)")):
        segment_counts(torch.tensor([ids]), 2)


def test_medians_of_more_segments_than_announced_are_refused():
    with pytest.raises(ValueError, match="`segment_ids`"):
        segment_medians(torch.zeros(1, 3), torch.tensor([[0, 1, 2]]), num_segments=2)

"""Choosing branches, recording the choice, and finding the choice that a leaf inherits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from grounded_rl.credit import (
    candidate_mask,
    candidate_ranks,
    record_selections,
    select_candidates,
    sfc_scores,
    sibling_counts,
)
from grounded_rl.credit.selection import standardized_scores
from tests.credit.batches import assert_equal, quick
from tests.credit.misfits import assert_misfits_refused
from tests.credit.tree_reference import Batch, tree_batches

NAN = math.nan
RULES = ("recent", "deepest", "release")


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def longs(entries):
    return torch.tensor(entries, dtype=torch.long)


# --- candidates


def test_siblings_are_the_other_children_of_the_parent():
    #   root: 1, 2, 3;  1: 4;  2: 5, 6
    parents = longs([-1, 0, 0, 0, 1, 2, 2])
    assert sibling_counts(parents).tolist() == [2, 2, 2, 2, 0, 1, 1]


def test_siblings_of_no_forest_are_refused():
    with pytest.raises(ValueError, match="`parents` must hold -1 for a root"):
        sibling_counts(longs([-1, 1]))


def test_a_root_without_children_has_no_siblings():
    assert sibling_counts(longs([-1, -1, 1])).tolist() == [0, 0, 0]


def test_candidates_are_turns_that_were_continued():
    parents = longs([-1, 0, 0, 1, 3])
    has_tokens = torch.tensor([False, True, True, True, True])
    assert candidate_mask(parents, has_tokens).tolist() == [False, True, False, True, False]
    assert candidate_mask(parents, has_tokens, root_candidate="always").tolist() == [True, True, False, True, False]


def test_a_turn_without_generated_tokens_is_never_a_candidate():
    parents = longs([-1, 0, 1, 2])
    has_tokens = torch.tensor([False, True, False, True])
    assert candidate_mask(parents, has_tokens).tolist() == [False, True, False, False]


def test_token_marks_may_be_counts():
    candidates = candidate_mask(longs([-1, 0, 1, 2]), longs([0, 2, 0, 2]))
    assert candidates.dtype == torch.bool
    assert candidates.tolist() == [False, True, False, False]


def test_the_root_is_the_fallback_of_a_tree_without_any_search_and_of_no_other():
    parents = longs([-1, 0, 0, -1, 3, 4])  # the first tree only has direct answers
    has_tokens = torch.tensor([False, True, True, False, True, True])
    assert candidate_mask(parents, has_tokens).tolist() == [True, False, False, False, True, False]
    always = candidate_mask(parents, has_tokens, root_candidate="always")
    assert always.tolist() == [True, False, False, True, True, False]


def test_a_lone_root_is_its_own_fallback_but_not_a_candidate_of_the_release():
    assert candidate_mask(longs([-1]), torch.tensor([False])).tolist() == [True]
    assert candidate_mask(longs([-1]), torch.tensor([False]), root_candidate="always").tolist() == [False]


def test_unknown_root_rules_are_refused():
    with pytest.raises(ValueError, match="`root_candidate` must be one of 'fallback_only', 'always': got 'never'"):
        candidate_mask(longs([-1]), torch.tensor([True]), root_candidate="never")
    with pytest.raises(ValueError, match="`has_tokens` must hold one entry per node"):
        candidate_mask(longs([-1]), torch.tensor([True, True]))


@quick
@given(tree_batches())
def test_candidates_and_siblings_match_the_nodes(batch: Batch):
    parents = batch.expanded.parents
    has_tokens = torch.tensor([node.parent is not None for node in batch.nodes])
    mask, counts = candidate_mask(parents, has_tokens).tolist(), sibling_counts(parents).tolist()
    for node, is_candidate, count in zip(batch.nodes, mask, counts, strict=True):
        tree = node.path()[-1]
        others = any(child.children for child in tree.children)
        expected = bool(node.children) if node.parent else not others
        assert is_candidate == expected
        assert count == (len(node.parent.children) - 1 if node.parent else max(0, len(node.children) - 1))


# --- scores

S = [0.42, 0.35, 0.55, 0.30, 0.48]
B = [9, 9, 9, 0, 1]


def order(scores: torch.Tensor) -> str:
    """Names a to e (r for a root in front) from best to worst."""
    names = "abcde" if len(scores) == 5 else "rabcde"
    return "".join(names[entry] for entry in select_candidates(scores, len(scores)))


def test_host_scores_charge_nats_per_sibling():
    # .42 - .05*9 = -.03; .35 - .45 = -.10; .55 - .45 = .10; .30; .48 - .05 = .43.
    scores = sfc_scores(double(S), longs(B), standardize=False)
    assert_equal(scores, [-0.03, -0.10, 0.10, 0.30, 0.43])
    assert order(scores) == "edcab"


def test_scale_free_scores_charge_standard_deviations():
    # mean .42, population sd sqrt((0 + .0049 + .0169 + .0144 + .0036) / 5) = .089219;
    # z = (0, -.784588, 1.457091, -1.345008, .672504); minus .45, .45, .45, 0, .05.
    scores = sfc_scores(double(S), longs(B))
    assert_equal(scores, [-0.45, -1.234588, 1.007091, -1.345008, 0.622504], rtol=1e-6)
    assert order(scores) == "ceabd"


def test_a_root_among_the_candidates_changes_the_winner():
    # With s = 0, b = 9 in front: mean .35, sd .176446; root (0 - .35)/.176446 - .45 = -2.433605.
    scores = sfc_scores(double([0, *S]), longs([9, *B]))
    assert_equal(scores, [-2.433605, -0.053279, -0.45, 0.683489, -0.283372, 0.686768], rtol=1e-5)
    assert order(scores) == "ecadbr"[0:3] + order(scores)[3:]
    assert order(scores)[0] == "e"
    assert order(scores).replace("r", "") == "ecadb"


def test_penalty_per_sibling_in_nats():
    # Adding the sd times .05 to a surprisal buys one sibling: .05 * .089219 = .00446, with the root .05 * .176446 =
    # .00882.
    assert_equal(0.05 * double(S).std(correction=0), 0.00446, rtol=1e-3)
    assert_equal(0.05 * double([0, *S]).std(correction=0), 0.00882, rtol=1e-3)
    scores = sfc_scores(double([0.42 + 0.089219 * 0.05, 0.42]), longs([1, 0]), penalty=0.0)
    assert scores[0] > scores[1]


def test_without_spread_only_the_penalty_ranks():
    # s = (.4, .4, .4), b = (2, 0, 1): q = (-.10, 0, -.05) exactly, also where the mean of equal numbers is rounded.
    scores = sfc_scores(double([0.4, 0.4, 0.4]), longs([2, 0, 1]))
    assert scores.tolist() == [-0.1, 0.0, -0.05]
    assert select_candidates(scores, 3).tolist() == [1, 2, 0]
    single = sfc_scores(torch.full((7,), 0.1), longs([0] * 7))
    assert single.tolist() == [0.0] * 7


def test_a_single_candidate_has_score_zero_less_its_penalty():
    assert sfc_scores(double([0.7]), longs([3])).tolist() == [-0.15000000000000002]


def test_the_floor_bounds_the_scale_of_nearly_equal_surprisals():
    # Spread 1e-7 < 1e-6: z = +-1e-7 / 1e-6 = +-.1 instead of +-1.
    scores = sfc_scores(double([0.4 + 1e-7, 0.4 - 1e-7]), longs([0, 0]))
    assert_equal(scores, [0.1, -0.1], rtol=1e-8)  # 0.4 +- 1e-7 carries seven digits of the difference
    wider = sfc_scores(double([0.4 + 1e-7, 0.4 - 1e-7]), longs([0, 0]), epsilon=1e-8)
    assert_equal(wider, [1.0, -1.0])


def test_the_release_falls_back_to_plain_surprisal_without_spread():
    flat = sfc_scores(double([0.4, 0.4]), longs([2, 0]), spread="absolute")
    assert_equal(flat, [0.4 - 0.1, 0.4])
    single = sfc_scores(double([0.7]), longs([3]), spread="absolute")
    assert_equal(single, [0.55])
    # With spread it standardises, without a floor: sd 1e-7 is above its threshold of 1e-9.
    assert_equal(sfc_scores(double([0.4 + 1e-7, 0.4 - 1e-7]), longs([0, 0]), spread="absolute"), [1.0, -1.0])
    assert_equal(sfc_scores(double(S), longs(B), spread="absolute"), sfc_scores(double(S), longs(B)))


def test_the_threshold_of_the_release_lies_at_1e_9():
    # Around 0 the spread is exact: 1.5e-9 is standardised, 0.9e-9 is not.
    assert_equal(sfc_scores(double([1.5e-9, -1.5e-9]), longs([0, 0]), spread="absolute"), [1.0, -1.0])
    flat = sfc_scores(double([0.9e-9, -0.9e-9]), longs([0, 0]), spread="absolute")
    assert flat.tolist() == [0.9e-9, -0.9e-9]


def test_scores_are_standardised_with_a_floor_of_1e_6():
    assert_equal(standardized_scores(double([1e-7, -1e-7])), [0.1, -0.1])
    assert_equal(standardized_scores(double([1e-5, -1e-5])), [1.0, -1.0])


def test_sets_are_scored_on_their_own():
    surprisals, siblings = double([*S, 1.0, 3.0]), longs([*B, 0, 0])
    sets = longs([5] * 5 + [2] * 2)
    joined = sfc_scores(surprisals, siblings, sets)
    assert_equal(joined[:5], sfc_scores(double(S), longs(B)))
    assert_equal(joined[5:], [-1.0, 1.0])
    absolute = sfc_scores(double([*S, 1.0, 1.0]), siblings, sets, spread="absolute")
    assert_equal(absolute[5:], [1.0, 1.0])
    assert_equal(absolute[:5], joined[:5])


surprisal_lists = st.lists(st.integers(0, 2000).map(lambda k: k / 1000), min_size=2, max_size=12)


@quick
@given(surprisal_lists, st.floats(0.01, 50), st.floats(-3, 3), st.data())
def test_ranking_ignores_positive_affine_maps_of_surprisal(entries, scale, shift, data):
    surprisals = double(entries)
    assume(surprisals.std(correction=0) * min(1, scale) > 1e-3)
    siblings = longs([data.draw(st.integers(0, 9)) for _ in entries])
    scores = sfc_scores(surprisals, siblings)
    mapped = sfc_scores(scale * surprisals + shift, siblings)
    assert_equal(mapped, scores, rtol=1e-9)  # an affine map rounds each surprisal at 1e-16 of a shift up to 3
    # Scores closer than rounding are ties that an inexact map may break.
    gaps = scores.sort().values.diff()
    assume((gaps > 1e-9).all())
    assert candidate_ranks(mapped).tolist() == candidate_ranks(scores).tolist()


@quick
@given(surprisal_lists, st.integers(0, 9))
def test_equal_sibling_counts_keep_the_order_of_surprisal(entries, count):
    surprisals = double(entries)
    scores = sfc_scores(surprisals, longs([count] * len(entries)))
    assert candidate_ranks(scores).tolist() == candidate_ranks(surprisals).tolist()


@quick
@given(surprisal_lists)
def test_standardised_scores_have_mean_zero_and_deviation_one(entries):
    scores = double(entries)
    z = standardized_scores(scores)
    if len(set(entries)) == 1:
        assert z.tolist() == [0.0] * len(entries)
    else:
        assert_equal(z.mean(), 0.0)
        assert_equal(z.std(correction=0), 1.0)


def test_scores_of_misfit_or_unfinished_input_are_refused():
    with pytest.raises(ValueError, match="`num_siblings` must have the shape of `surprisals`"):
        sfc_scores(double(S), longs([1]))
    with pytest.raises(ValueError, match="`set_ids` must have the shape of `scores`"):
        sfc_scores(double(S), longs(B), longs([0]))
    with pytest.raises(ValueError, match=r"`surprisals` must have the shape \(C\)"):
        sfc_scores(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="`surprisals` must be finite: got 2 entries that are not"):
        sfc_scores(double([NAN, 0.1, math.inf]), longs([0, 0, 0]))
    with pytest.raises(ValueError, match="`spread` must be one of 'floor', 'absolute': got 'none'"):
        sfc_scores(double(S), longs(B), spread="none")


# --- ranks and choices


def test_ties_go_to_the_earlier_candidate():
    scores = double([0.5, 0.9, 0.5, 0.9])
    assert candidate_ranks(scores).tolist() == [3, 1, 4, 2]
    assert select_candidates(scores, 4).tolist() == [1, 3, 0, 2]


def test_ties_of_large_sets_keep_their_order_too():
    scores = torch.zeros(300, dtype=torch.float64)
    assert candidate_ranks(scores).tolist() == list(range(1, 301))
    assert select_candidates(scores, 300).tolist() == list(range(300))


def test_ranks_restart_in_every_set_whatever_the_order_of_sets():
    scores, sets = double([0.1, 0.9, 0.3, 0.2, 0.8]), longs([7, 3, 7, 7, 3])
    assert candidate_ranks(scores, sets).tolist() == [3, 1, 1, 2, 2]


def test_too_few_candidates_are_chosen_again_from_the_best():
    assert select_candidates(double([0.1, 0.9]), 5).tolist() == [1, 0, 1, 0, 1]
    assert select_candidates(double([0.1]), 3).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="`scores` must hold at least one candidate: got none"):
        select_candidates(double([]), 3)


@quick
@given(tree_batches())
def test_the_best_ranks_are_the_chosen_ones(batch: Batch):
    row = 0
    for tree in batch.trees:
        for group in tree.sets:
            size = len(group.nodes)
            rows = slice(row, row + size)
            assert batch.records.ranks[rows].tolist() == [group.rank(node) for node in group.nodes]
            assert batch.records.set_sizes[rows].tolist() == [size] * size
            chosen = batch.records.ranks[rows][batch.records.chosen[rows]]
            assert sorted(chosen.tolist()) == list(range(1, len(chosen) + 1))
            row += size


def test_records_keep_ranks_of_the_full_set_when_filtered():
    records = record_selections(
        longs([1, 2, 3]), longs([0, 0, 0]), longs([0, 0, 0]), scores=double([0.1, 0.9, 0.5]), chosen=longs([0, 1, 0])
    )
    kept = records.where(torch.tensor([True, False, True]))
    assert kept.ranks.tolist() == [3, 2]
    assert kept.set_sizes.tolist() == [3, 3]
    assert kept.nodes.tolist() == [1, 3]
    assert records.chosen.dtype == torch.bool
    assert torch.isnan(records.surprisals).all()


def test_records_that_do_not_fit_are_refused():
    nodes = longs([1, 2])
    fields = {"scores": double([0.1, 0.2]), "chosen": torch.tensor([True, False])}
    with pytest.raises(ValueError, match="`set_ids` must separate rounds: got set 4 in several rounds"):
        record_selections(nodes, longs([4, 4]), longs([0, 1]), **fields)
    with pytest.raises(ValueError, match="`rounds` must have the shape of `nodes`"):
        record_selections(nodes, longs([4, 4]), longs([0]), **fields)
    with pytest.raises(ValueError, match=r"`nodes` must have the shape \(C\)"):
        record_selections(nodes[None], longs([4, 4]), longs([0, 0]), **fields)


def test_every_candidate_column_is_checked():
    entries, ids = double([0.1, 0.2]), longs([0, 0])
    assert_misfits_refused(
        record_selections,
        "set_ids",
        "rounds",
        "scores",
        "chosen",
        "surprisals",
        nodes=ids,
        set_ids=ids,
        rounds=ids,
        scores=entries,
        chosen=ids,
        surprisals=entries,
    )

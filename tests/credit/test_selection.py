"""Choosing branches, recording the choice, and finding the choice that a leaf inherits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from grounded_rl.credit import (
    birth_rounds,
    candidate_mask,
    candidate_outcomes,
    candidate_ranks,
    leaf_events,
    leaf_mask,
    record_selections,
    select_candidates,
    sfc_scores,
    sibling_counts,
)
from grounded_rl.credit.selection import standardized_scores
from tests.credit.batches import assert_equal, quick
from tests.credit.tree_reference import Batch, reference_event, reference_leaf_values, tree_batches

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


# --- which selection a leaf inherits


def events_of(parents, selections, *, fresh=(), ranked=()):
    """
    Events under every rule, as (node, rank) of every leaf.

    `selections` lists (round, node); each is the best of five candidates in a set of its own, of which `ranked` adds
    losers as (round, node). `fresh` maps nodes to the round that drew them. Rounds count from 1 as in the examples.
    """
    parents = longs(parents)
    fresh_rounds = longs([dict(fresh).get(node, -1) for node in range(len(parents))])
    rows = [(turn, node, True) for turn, node in selections] + [(turn, node, False) for turn, node in ranked]
    records = record_selections(
        longs([node for _, node, _ in rows]),
        longs(list(range(len(rows)))),
        longs([turn for turn, _, _ in rows]),
        scores=torch.zeros(len(rows)),
        chosen=torch.tensor([won for _, _, won in rows], dtype=torch.bool),
    )
    leaves = leaf_mask(parents).nonzero().squeeze(1).tolist()
    found = {}
    for rule in RULES:
        events = leaf_events(parents, fresh_rounds, records, rule=rule)
        found[rule] = {leaf: (int(events.nodes[leaf]), int(events.rounds[leaf])) for leaf in leaves}
    return found


NONE = (-1, -1)


def test_example_1_a_fresh_sibling_does_not_inherit_the_incumbents_event():
    # root - v(1) - leaf 3;  root - f(2) - leaf 4, f fresh from round 1.
    found = events_of([-1, 0, 0, 1, 2], [(1, 1)], fresh={2: 1}.items())
    for rule in RULES:
        assert found[rule] == {3: (1, 1), 4: NONE}


def test_example_2_a_later_selection_of_a_fresh_branch_counts_except_in_the_release():
    # v(1) - 4 selected in round 1; f(2) - 5 fresh from 1, selected in 2; g(3) - 6 fresh from 2.
    found = events_of([-1, 0, 0, 0, 1, 2, 3], [(1, 1), (2, 2)], fresh={2: 1, 3: 2}.items())
    assert found["recent"] == {4: (1, 1), 5: (2, 2), 6: NONE}
    assert found["deepest"] == {4: (1, 1), 5: (2, 2), 6: NONE}
    assert found["release"] == {4: (1, 1), 5: NONE, 6: NONE}


def test_example_3_the_later_or_the_deeper_of_two_selections_on_the_path():
    # root - a(1) - b(2) - leaf 3; b selected in round 1, a in round 2.
    found = events_of([-1, 0, 1, 2], [(1, 2), (2, 1)])
    assert found["recent"] == {3: (1, 2)}
    assert found["deepest"] == {3: (2, 1)}
    assert found["release"] == {3: (2, 1)}


def test_example_4_a_selection_above_a_fresh_branch_that_it_contained():
    # root - a(1) - f(2, fresh from 1) - leaf 3, and a's old child 4; a selected in round 2.
    found = events_of([-1, 0, 1, 2, 1], [(2, 1)], fresh={2: 1}.items())
    assert found["recent"] == {3: (1, 2), 4: (1, 2)}
    assert found["deepest"] == {3: NONE, 4: (1, 2)}
    assert found["release"] == {3: NONE, 4: (1, 2)}


def test_example_5_the_deeper_of_two_selections_of_one_round():
    found = events_of([-1, 0, 1, 2], [(2, 1), (2, 2)])
    for rule in RULES:
        assert found[rule] == {3: (2, 2)}


def test_example_6_the_later_of_two_selections_of_one_node():
    for selections in ([(1, 1), (2, 1)], [(2, 1), (1, 1)]):
        found = events_of([-1, 0, 1], selections)
        for rule in RULES:
            assert found[rule] == {2: (1, 2)}


def test_example_7_a_direct_answer_has_no_event():
    # root - v(1) - 3;  root - 2 answers at once and is never a candidate.
    found = events_of([-1, 0, 0, 1], [(1, 1)])
    for rule in RULES:
        assert found[rule] == {3: (1, 1), 2: NONE}


def test_an_event_of_the_round_that_drew_a_fresh_branch_is_blocked():
    # a(1) selected in round 1 and f(2) below it fresh from round 1 (b's sibling): a's event says nothing about f.
    found = events_of([-1, 0, 1, 1, 2, 3], [(1, 1), (1, 3)], fresh={2: 1}.items())
    for rule in RULES:
        assert found[rule] == {4: NONE, 5: (3, 1)}


def test_a_selection_below_a_fresh_branch_counts():
    # f(1) fresh from 1; its old child w(2) selected in round 2: w's leaf 3 and the fresh sibling g(4) of w.
    found = events_of([-1, 0, 1, 2, 1], [(2, 2)], fresh={1: 1, 4: 2}.items())
    for rule in RULES:
        assert found[rule] == {3: (2, 2), 4: NONE}


def test_a_fresh_branch_of_a_later_round_blocks_what_an_earlier_one_let_through():
    # a(1) selected in round 2, f(2) fresh from 1 below it, g(3) fresh from 2 below f.
    found = events_of([-1, 0, 1, 2, 2], [(2, 1)], fresh={2: 1, 3: 2}.items())
    assert found["recent"] == {3: NONE, 4: (1, 2)}
    assert found["deepest"] == {3: NONE, 4: NONE}


def test_choosing_the_root_is_no_event_but_the_release_ranks_it():
    found = events_of([-1, 0, 0], [(1, 0)], fresh={2: 1}.items())
    assert found["recent"] == {1: NONE, 2: NONE}
    assert found["deepest"] == {1: NONE, 2: NONE}
    assert found["release"] == {1: (0, 1), 2: NONE}


def test_losers_carry_an_event_only_when_every_candidate_does():
    # v(1) - 3 loses rank 2 of 2 in round 0; w(2) - 4 wins.
    parents, never_fresh = longs([-1, 0, 0, 1, 2]), longs([-1] * 5)
    records = record_selections(
        longs([1, 2]), longs([0, 0]), longs([0, 0]), scores=double([0.1, 0.9]), chosen=torch.tensor([False, True])
    )
    chosen = leaf_events(parents, never_fresh, records)
    assert chosen.ranks.tolist() == [0, 0, 0, 0, 1]
    assert chosen.set_sizes.tolist() == [0, 0, 0, 0, 2]
    assert chosen.found.tolist() == [False, False, False, False, True]
    everyone = leaf_events(parents, never_fresh, records, ranked="candidates")
    assert everyone.ranks.tolist() == [0, 0, 0, 2, 1]
    assert everyone.nodes.tolist() == [-1, -1, -1, 1, 2]


@pytest.mark.parametrize("ranked", ["chosen", "candidates"])
@pytest.mark.parametrize("rule", RULES)
@quick
@given(batch=tree_batches())
def test_events_match_the_definition_of_their_rule(rule: str, ranked: str, batch: Batch):
    events = leaf_events(batch.expanded.parents, batch.expanded.fresh_rounds, batch.records, rule=rule, ranked=ranked)
    tree_of = {id(tree.root): tree for tree in batch.trees}
    for index, node in enumerate(batch.nodes):
        mine = (int(events.rounds[index]), int(events.ranks[index]), int(events.set_sizes[index]))
        expected = None if node.children else reference_event(tree_of[id(node.path()[-1])], node, rule, ranked)
        if expected is None:
            assert mine == (-1, 0, 0)
            assert events.nodes[index] == -1
        else:
            assert mine == expected[1:]
            assert batch.nodes[int(events.nodes[index])] is expected[0]


@quick
@given(tree_batches())
def test_leaves_of_a_fresh_branch_are_uncorrected_unless_it_was_chosen_later(batch: Batch):
    events = leaf_events(batch.expanded.parents, batch.expanded.fresh_rounds, batch.records)
    for index, node in enumerate(batch.nodes):
        if not node.children and node.birth() >= 0 and events.rounds[index] >= 0:
            assert events.rounds[index] > node.birth()


def test_a_forest_without_any_selection_has_no_events():
    empty = record_selections(longs([]), longs([]), longs([]), scores=double([]), chosen=torch.zeros(0).bool())
    for rule in RULES:
        events = leaf_events(longs([-1, 0]), longs([-1, -1]), empty, rule=rule)
        assert events.nodes.tolist() == [-1, -1]
        assert events.rounds.tolist() == [-1, -1]
        assert events.ranks.tolist() == [0, 0]
        assert events.set_sizes.tolist() == [0, 0]
        assert not events.found.any()


def test_unknown_event_options_are_refused():
    empty = record_selections(longs([]), longs([]), longs([]), scores=double([]), chosen=torch.zeros(0).bool())
    with pytest.raises(ValueError, match="`rule` must be one of 'recent', 'deepest', 'release': got 'first'"):
        leaf_events(longs([-1]), longs([-1]), empty, rule="first")
    with pytest.raises(ValueError, match="`ranked` must be one of 'chosen', 'candidates': got 'all'"):
        leaf_events(longs([-1]), longs([-1]), empty, ranked="all")
    with pytest.raises(ValueError, match="`fresh_rounds` must hold one entry per node"):
        leaf_events(longs([-1]), longs([-1, -1]), empty)


# --- what a candidate was worth


def test_births_are_the_latest_fresh_branch_on_the_path():
    parents, fresh = longs([-1, 0, 0, 1, 2, 4]), longs([-1, -1, 0, -1, -1, 2])
    assert birth_rounds(parents, fresh).tolist() == [-1, -1, 0, -1, 0, 2]


def test_outcomes_are_means_over_the_leaves_that_existed():
    # v(1): leaves 3, 4 from the start, 5 fresh from round 0 and 6 fresh from round 1.
    parents = longs([-1, 0, 0, 1, 1, 1, 1])
    fresh = longs([-1, -1, -1, -1, -1, 0, 1])
    values = double([NAN, NAN, 9.0, 1.0, 3.0, 8.0, 20.0])
    records = record_selections(
        longs([1, 1, 1]), longs([0, 1, 2]), longs([0, 1, 2]), scores=torch.zeros(3), chosen=torch.zeros(3).bool()
    )
    # (1+3)/2 = 2, (1+3+8)/3 = 4, (1+3+8+20)/4 = 8.
    assert_equal(candidate_outcomes(parents, fresh, values, records), [2.0, 4.0, 8.0])
    assert_equal(candidate_outcomes(parents, fresh, values, records, leaves="final"), [8.0, 8.0, 8.0])


def test_outcomes_skip_leaves_that_do_not_count():
    parents, fresh = longs([-1, 0, 1, 1]), longs([-1] * 4)
    records = record_selections(longs([1]), longs([0]), longs([0]), scores=torch.zeros(1), chosen=torch.ones(1).bool())
    valid = torch.tensor([True, True, True, False])
    assert_equal(candidate_outcomes(parents, fresh, double([0, 0, 2.0, NAN]), records, valid=valid), [2.0])
    assert candidate_outcomes(parents, fresh, double([0, 0, NAN, NAN]), records, valid=~valid & valid).isnan().all()
    final = candidate_outcomes(parents, fresh, double([0, 0, 2.0, NAN]), records, valid=valid, leaves="final")
    assert_equal(final, [2.0])


def test_unknown_leaves_are_refused():
    records = record_selections(longs([1]), longs([0]), longs([0]), scores=torch.zeros(1), chosen=torch.ones(1).bool())
    with pytest.raises(ValueError, match="`leaves` must be one of 'selection', 'final': got 'all'"):
        candidate_outcomes(longs([-1, 0]), longs([-1, -1]), torch.zeros(2), records, leaves="all")


@quick
@given(tree_batches())
def test_outcomes_match_the_leaves_recorded_at_selection(batch: Batch):
    values, expected, final = {}, [], []
    for tree in batch.trees:
        values.update(reference_leaf_values(tree))
        for group in tree.sets:
            expected += [sum(values[leaf] for leaf in leaves) / len(leaves) for leaves in group.leaves]
            below = [node.leaves() for node in group.nodes]
            final += [sum(values[leaf] for leaf in leaves) / len(leaves) for leaves in below]
    by_node = double([values.get(node, NAN) for node in batch.nodes])
    arguments = (batch.expanded.parents, batch.expanded.fresh_rounds, by_node, batch.records)
    assert_equal(candidate_outcomes(*arguments), double(expected))
    assert_equal(candidate_outcomes(*arguments, leaves="final"), double(final))

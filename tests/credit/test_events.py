"""Which selection a leaf inherits, and what a candidate was worth when it was selected."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from grounded_rl.credit import (
    birth_rounds,
    candidate_outcomes,
    leaf_events,
    leaf_mask,
    record_selections,
)
from tests.credit.batches import assert_equal, quick
from tests.credit.misfits import assert_misfits_refused
from tests.credit.tree_reference import Batch, reference_event, reference_leaf_values, tree_batches

NAN = math.nan
RULES = ("recent", "deepest", "release")


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def longs(entries):
    return torch.tensor(entries, dtype=torch.long)


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
    for selections in ([(1, 2), (2, 1)], [(2, 1), (1, 2)]):
        found = events_of([-1, 0, 1, 2], selections)
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


def test_a_node_cannot_have_been_chosen_in_the_round_that_drew_it():
    found = events_of([-1, 0, 1], [(1, 1)], fresh={1: 1}.items())
    for rule in RULES:
        assert found[rule] == {2: NONE}


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


def test_every_node_column_is_checked():
    parents, fresh = longs([-1, 0, 0]), longs([-1, -1, 0])
    records = record_selections(longs([1]), longs([0]), longs([0]), scores=torch.zeros(1), chosen=torch.ones(1).bool())
    valid = torch.tensor([False, True, True])
    assert_misfits_refused(
        candidate_outcomes,
        "fresh_rounds",
        "leaf_values",
        "valid",
        parents=parents,
        fresh_rounds=fresh,
        leaf_values=double([0.0, 1.0, 2.0]),
        records=records,
        valid=valid,
    )
    assert_misfits_refused(birth_rounds, "fresh_rounds", parents=parents, fresh_rounds=fresh)

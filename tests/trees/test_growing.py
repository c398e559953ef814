"""Growing trees: shape, forks on token ids, selection records, and everything that can go wrong on the way."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.rollouts import StopReason
from grounded_rl.rollouts.tree import NOT_FRESH, ROOT
from grounded_rl.sampling import BranchRule, TreeSampler, TreeShape
from tests.trees.token_world import (
    ANSWER,
    BROKEN,
    CALL,
    FIRST_WORD,
    OBSERVATION,
    PROMPT,
    FunctionEngine,
    make_requests,
    make_sampler,
)

FAILING = 99


def random_policy(seed: int, *, ends=(CALL, CALL, CALL, ANSWER, BROKEN), failing=0.0, cut=0.05, logps=True):
    """Turns of one to four random words, some of them cut off."""
    generator = random.Random(seed)

    def policy(context, rollout):
        words = [generator.randrange(FIRST_WORD, 90) for _ in range(generator.randint(1, 4))]
        if generator.random() < failing:
            words.append(FAILING)
        ids = words if generator.random() < cut else [*words, generator.choice(ends)]
        return ids, [-generator.expovariate(1.0) for _ in ids] if logps else None

    return policy


def grow(policy, *, shape=None, rule=None, trees=1, score=None, sampler=None, **options):
    engine = FunctionEngine(policy)
    sampler = sampler or make_sampler(**options)
    grower = TreeSampler(sampler, shape or TreeShape(4, 2, 2, 1), rule or BranchRule(), score)
    return grower.sample(engine, make_requests(trees), step=7), engine


def children(tree, node):
    return [number for number, other in enumerate(tree.nodes) if other.parent == node]


def scripted(*scripts):
    """A policy that plays a script per rollout: `(ids, surprisal)` for every turn it is asked for."""
    played = [iter(script) for script in scripts]

    def policy(context, rollout):
        ids, surprisal = next(played[rollout])
        return list(ids), [-surprisal] * len(ids)

    return policy


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 2)),
    max_turns=st.integers(1, 4),
    budget=st.integers(3, 30),
    ends=st.sampled_from([(CALL,), (ANSWER,), (BROKEN,), (CALL, CALL, ANSWER, BROKEN)]),
    failing=st.sampled_from([0.0, 0.3, 1.0]),
    root=st.sampled_from(["fallback_only", "always"]),
)
def test_a_tree_has_exactly_its_leaves_and_every_path_is_what_the_model_saw(
    seed, shape, max_turns, budget, ends, failing, root
):
    trees, engine = grow(
        random_policy(seed, ends=ends, failing=failing),
        shape=TreeShape(*shape),
        rule=BranchRule(root_candidate=root),
        trees=2,
        max_turns=max_turns,
        failing=[FAILING],
        max_completion_tokens=budget,
    )
    count = TreeShape(*shape).num_leaves
    for number, tree in enumerate(trees):
        assert len(tree.leaves) == count == len(tree.rollouts())
        for leaf, rollout in enumerate(tree.rollouts()):
            assert len(rollout.turns) <= max_turns
            assert len(rollout.completion_ids) <= budget
            assert (rollout.stop is StopReason.FAILED) == (rollout.error is not None)
            # The last context the engine was given for this leaf, and the turn it sampled from there.
            context = engine.seen[number * count + leaf][-1]
            assert [*rollout.prompt_ids, *rollout.completion_ids] == [*context, *rollout.turns[-1].ids]


def test_root_to_leaf_paths_share_their_nodes_and_every_token_is_stored_once():
    (tree,), engine = grow(random_policy(3))
    sampled = sum(len(turn.ids) for turn in (node.turn for node in tree.nodes) if turn is not None)
    # Every generate call of the run is one node.
    assert sum(len(contexts) for contexts in engine.seen.values()) == len(tree.nodes) - 1
    assert tree.num_sampled_tokens == sampled
    assert tree.num_path_tokens == sum(rollout.num_sampled_tokens for rollout in tree.rollouts())
    assert tree.num_sampled_tokens < tree.num_path_tokens


def test_all_trees_advance_together_and_their_searches_form_one_batch():
    sampler = make_sampler()
    (first, second), engine = grow(random_policy(1, ends=(CALL,), cut=0.0), trees=2, sampler=sampler)
    # Four turns of the 8 initial rollouts, then two rounds of 4 fresh branches.
    assert engine.batches[0] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert {len(batch) for batch in engine.batches[:4]} == {8}
    assert len(sampler.retriever.batches[0]) == 8
    assert len(first.leaves) == len(second.leaves) == 8


def test_a_fork_keeps_the_tokens_before_its_turn_and_the_turns_that_are_left():
    # Rollout 0 searches twice and answers; its second search (surprisal 2) is chosen and drawn again.
    policy = scripted(
        [((11, CALL), 0.1), ((12, 13, CALL), 2.0), ((14, ANSWER), 0.3)],
        [((15, CALL), 0.2), ((16, ANSWER), 0.4)],
        [((17, CALL), 0.5), ((18, CALL), 0.6)],
    )
    (tree,), engine = grow(policy, shape=TreeShape(2, 1, 1, 1), max_turns=3)
    assert engine.seen[2][0] == [PROMPT, 11, CALL, OBSERVATION]
    fresh = tree.rollout(2)
    # Three turns in all: the shared one and two of its own, the last of which may not search any more.
    assert [turn.ids for turn in fresh.turns] == [(11, CALL), (17, CALL), (18, CALL)]
    assert fresh.stop is StopReason.TURN_LIMIT
    (selection,) = tree.selections
    assert (selection.parent, selection.incumbent, selection.boundary) == (1, 3, 4)
    assert tree.nodes[selection.fresh[0]].turn.ids == (17, CALL)
    assert [node.turn.observation for node in tree.nodes[1:] if node.turn.ids[-1] == CALL] == [
        "2 left",
        "2 left",
        "1 left",
        "1 left",
        "",
    ]


def test_a_search_repeated_after_the_fork_is_served_from_the_shared_path_only():
    policy = scripted(
        [((11, CALL), 0.1), ((12, CALL), 2.0), ((14, ANSWER), 0.3)],
        [((15, ANSWER), 0.4)],
        [((12, CALL), 0.5), ((11, CALL), 0.6), ((14, ANSWER), 0.1)],
    )
    (tree,), _ = grow(policy, shape=TreeShape(2, 1, 1, 1))
    cached = [call.cached for turn in tree.rollout(2).turns for call in turn.calls]
    # `12` was searched by the incumbent after the boundary, `11` before it.
    assert cached == [False, False, True]


def test_records_hold_the_frozen_candidates_with_ranks_sibling_counts_and_leaves_of_that_moment():
    policy = scripted(
        [((11, CALL), 0.9), ((12, ANSWER), 0.1)],
        [((13, CALL), 0.5), ((14, CALL), 0.6), ((15, ANSWER), 0.1)],
        [((16, ANSWER), 3.0)],
        *([((17 + 2 * number, CALL), 0.2), ((18 + 2 * number, ANSWER), 0.1)] for number in range(4)),
    )
    (tree,), _ = grow(policy, shape=TreeShape(3, 2, 1, 2), rule=BranchRule(standardize=False))
    first, second = tree.selections
    # Breadth-first: 1 (0.9, two siblings), 2 (0.5, two siblings), 5 (0.6, none); leaves are no candidates.
    assert [(c.node, c.num_siblings, c.rank, c.leaves) for c in first.candidates] == [
        (1, 2, 1, (4,)),
        (5, 0, 2, (6,)),
        (2, 2, 3, (6,)),
    ]
    assert [c.score for c in first.candidates] == pytest.approx([0.9 - 0.1, 0.6, 0.5 - 0.1])
    assert [c.surprisal for c in first.candidates] == pytest.approx([0.9, 0.6, 0.5])
    assert (first.step, first.tree, first.round, first.parent, first.incumbent) == (7, 0, 0, ROOT, 1)
    assert first.fresh == (7, 8)
    assert [tree.nodes[node].created_round for node in first.fresh] == [0, 0]
    # Round 1: siblings of the root's children grew by two, and the old set is unchanged.
    assert {c.node: c.num_siblings for c in second.candidates} == {1: 4, 2: 4, 5: 0, 7: 4, 8: 4}
    # 0.9 less four penalties is still the largest.
    assert (second.incumbent, second.chosen.rank) == (1, 1)
    assert tree.boundaries == [*first.fresh, *second.fresh]
    assert [node.created_round for node in tree.nodes].count(NOT_FRESH) == len(tree.nodes) - 4


def test_ties_keep_breadth_first_order():
    policy = scripted(
        *[[((11 + number, CALL), 0.5), ((20 + number, CALL), 0.5), ((30, ANSWER), 0.1)] for number in range(3)],
        *[[((40, ANSWER), 0.1)] for _ in range(2)],
    )
    (tree,), _ = grow(policy, shape=TreeShape(3, 1, 2, 1), rule=BranchRule(penalty=0.0))
    assert [c.node for c in tree.selections[0].candidates] == [1, 2, 3, 4, 5, 6]
    assert [selection.incumbent for selection in tree.selections] == [1, 2]


def test_with_fewer_candidates_than_slots_the_ranking_is_repeated_in_one_record():
    policy = scripted(
        [((11, CALL), 0.9), ((12, CALL), 0.4), ((13, ANSWER), 0.1)],
        *[[((20 + number, ANSWER), 0.1)] for number in range(6)],
    )
    (tree,), _ = grow(policy, shape=TreeShape(1, 1, 3, 2), rule=BranchRule(penalty=0.0))
    twice, once = tree.selections
    assert (twice.incumbent, once.incumbent) == (1, 2)
    # Slots 0 and 2 are the first candidate's: its fresh siblings are branches 1, 2, 5 and 6.
    assert [tree.nodes[node].turn.ids[0] for node in twice.fresh] == [20, 21, 24, 25]
    assert [tree.nodes[node].turn.ids[0] for node in once.fresh] == [22, 23]
    assert twice.candidates == once.candidates


def test_without_a_candidate_the_prompt_is_rolled_out_again_and_no_event_is_recorded(caplog):
    from grounded_rl.sampling.tree import _warn_once

    _warn_once.cache_clear()
    with caplog.at_level("WARNING"):
        (tree,), engine = grow(random_policy(5, ends=(ANSWER,)), trees=1)
    assert len(tree.leaves) == 8
    assert all(node.parent in (-1, ROOT) for node in tree.nodes)
    assert all(contexts == [[PROMPT]] for contexts in engine.seen.values())
    assert [selection.is_event for selection in tree.selections] == [False, False]
    assert [len(selection.fresh) for selection in tree.selections] == [2, 2]
    assert len([record for record in caplog.records if "rollouts from the prompt" in record.message]) == 1


def test_a_root_that_always_competes_has_surprisal_zero_and_can_be_chosen():
    policy = scripted(
        [((11, CALL), -0.4), ((12, ANSWER), 0.1)],
        [((13, ANSWER), 0.1)],
        [((14, ANSWER), 0.1)],
    )
    rule = BranchRule(root_candidate="always", standardize=False)
    (tree,), _ = grow(policy, shape=TreeShape(2, 1, 1, 1), rule=rule)
    (selection,) = tree.selections
    assert (selection.incumbent, selection.parent, selection.is_event) == (ROOT, ROOT, False)
    assert [(c.node, c.surprisal) for c in selection.candidates] == [(ROOT, 0.0), (1, pytest.approx(-0.4))]


def test_a_failed_search_marks_its_leaf_and_the_tree_goes_on():
    policy = scripted(
        [((11, CALL), 0.5), ((12, ANSWER), 0.1)],
        [((FAILING, CALL), 0.9)],
        [((13, ANSWER), 0.1)],
    )
    (tree,), _ = grow(policy, shape=TreeShape(2, 1, 1, 1), failing=[FAILING])
    assert [leaf.stop for leaf in tree.leaves] == [StopReason.ANSWER, StopReason.FAILED, StopReason.ANSWER]
    assert tree.leaves[1].error == "the index is down"
    # The failed turn was not continued, so it is no candidate although its surprisal is the largest.
    assert tree.selections[0].incumbent == 1


def test_a_failed_search_stops_the_run_where_it_should():
    with pytest.raises(RetrievalError, match="the index is down"):
        grow(random_policy(1, failing=1.0), failing=[FAILING], on_search_failure="raise")


def test_an_engine_without_log_probabilities_is_scored_once_per_round():
    calls = []

    def score(prompts, completions):
        calls.append((list(prompts), [list(row) for row in completions]))
        return [[-float(token) for token in row] for row in completions]

    (tree,), _ = grow(random_policy(2, logps=False), score=score, shape=TreeShape(2, 2, 1, 1))
    assert [len(prompts) for prompts, _ in calls] == [2, 1, 1]
    assert calls[0][1] == [tree.rollout(0).completion_ids, tree.rollout(1).completion_ids]
    for node in tree.nodes[1:]:
        assert node.turn.logps is None
        assert node.surprisal == pytest.approx(sum(node.turn.ids) / len(node.turn.ids))


def test_an_engine_without_log_probabilities_and_without_a_scorer_is_refused():
    with pytest.raises(ConfigurationError, match="`score` must be given"):
        grow(random_policy(2, logps=False))
    (tree,), _ = grow(random_policy(2, logps=False), shape=TreeShape(3, 0, 1, 1))
    assert [node.surprisal for node in tree.nodes] == [None] * len(tree.nodes)


def test_unscored_tokens_are_dropped_and_a_turn_without_a_scored_token_is_no_candidate():
    def policy(context, rollout):
        if rollout == 0 and len(context) == 1:
            return [11, 12, CALL], [-1.0, math.nan, -2.0]
        if rollout == 1 and len(context) == 1:
            return [13, CALL], [-math.inf, math.nan]
        return [14, ANSWER], [-0.1, -0.1]

    (tree,), _ = grow(policy, shape=TreeShape(2, 1, 1, 1))
    assert [node.surprisal for node in tree.nodes[1:3]] == [1.5, None]
    assert [c.node for c in tree.selections[0].candidates] == [1]


def test_the_penalty_can_be_charged_per_expansion():
    shape = TreeShape(2, 1, 1, 2)
    policy = [[((11 + number, CALL), 0.5), ((12, ANSWER), 0.1)] for number in range(4)]
    (plain,), _ = grow(scripted(*policy), shape=shape, rule=BranchRule(penalty=0.2))
    (split,), _ = grow(scripted(*policy), shape=shape, rule=BranchRule(penalty=0.2, penalty_per_branch=True))
    assert plain.selections[0].chosen.score == pytest.approx(-0.2)
    assert split.selections[0].chosen.score == pytest.approx(-0.1)


def test_without_rounds_a_tree_is_as_many_linear_rollouts():
    policy = random_policy(11)
    (tree,), engine = grow(policy, shape=TreeShape(6, 0, 3, 2))
    linear_engine = FunctionEngine(random_policy(11))
    sampler = make_sampler()
    requests = [request for request in make_requests() for _ in range(6)]
    linear = sampler.sample(linear_engine, requests)
    assert engine.seen == linear_engine.seen
    assert [rollout.turns for rollout in tree.rollouts()] == [rollout.turns for rollout in linear]
    assert [rollout.answer for rollout in tree.rollouts()] == [rollout.answer for rollout in linear]


@pytest.mark.parametrize(("values", "name"), [((0, 1, 1, 1), "num_initial"), ((1, -1, 1, 1), "num_rounds")])
def test_a_shape_that_cannot_be_grown_is_refused(values, name):
    with pytest.raises(ConfigurationError, match=f"`{name}` must be at least"):
        TreeShape(*values)

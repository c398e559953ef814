"""Trees as records: invariants, paths, and files that hold trees, rollouts or both."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from grounded_rl.errors import RolloutError
from grounded_rl.rollouts import (
    Leaf,
    Node,
    Selection,
    StopReason,
    load_rollouts,
    load_trees,
    save_rollouts,
    save_trees,
)
from tests.builders import make_rollout
from tests.trees.records import FIRST, make_tree


def test_a_path_is_a_rollout_whose_ids_are_those_of_its_nodes():
    tree = make_tree()
    rollout = tree.rollout(0)
    assert tree.leaf_path(0) == [1, 3, 4]
    assert rollout.completion_ids == [1, 2, 90, 91, 3, 90, 91, 7]
    assert rollout.sampled_mask == [1, 1, 0, 0, 1, 0, 0, 1]
    assert (rollout.sample, rollout.answer, rollout.rewards) == (0, "Paris", {"em": 1.0})
    assert rollout.extras == {"slope": -0.1, "step": 7, "tree": 2, "path": [1, 3, 4]}
    assert tree.rollout(1).extras["masked"] is True
    assert (tree.rollout(2).stop, tree.rollout(2).error) == (StopReason.FAILED, "no index")


def test_a_turn_has_its_nodes_advantage_unless_it_has_its_own():
    first, second, last = make_tree().rollout(0).turns
    assert (first.advantages, second.advantages, last.advantages) == ((0.5, 0.5), (0.5,), (0.75,))
    # A node that was never scored leaves its tokens unscored.
    assert make_tree().rollout(2).turns[-1].advantages is None


def test_tokens_are_counted_once_in_the_tree_and_once_per_path():
    tree = make_tree()
    assert tree.num_sampled_tokens == 2 + 3 + 1 + 1 + 2
    assert tree.num_path_tokens == (2 + 1 + 1) + 3 + (2 + 2)
    assert tree.num_path_tokens == sum(rollout.num_sampled_tokens for rollout in tree.rollouts())
    assert tree.boundaries == [5]
    assert tree.parents == [-1, 0, 0, 1, 3, 1]


def test_a_selection_knows_its_incumbents_entry_and_whether_it_has_one():
    (selection,) = make_tree().selections
    assert selection.is_event
    assert (selection.chosen.node, selection.chosen.rank) == (3, 2)
    assert not replace(selection, incumbent=0, parent=0).is_event


def test_a_file_of_trees_gives_the_trees_back_and_their_leaves_as_rollouts(tmp_path):
    trees = [make_tree(), make_tree(number=3, question_id="q2")]
    path = tmp_path / "run" / "rollouts.jsonl"
    assert save_trees(path, trees) == 2
    assert load_trees(path) == trees
    assert load_rollouts(path) == [rollout for tree in trees for rollout in tree.rollouts()]


def test_a_candidate_set_is_written_once_for_all_choices_of_its_round(tmp_path):
    (selection,) = make_tree().selections
    tree = make_tree(selections=(selection, replace(selection, incumbent=1, parent=0)))
    path = tmp_path / "trees.jsonl"
    save_trees(path, [tree])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["schema"] == "tree/1"
    assert list(record["candidates"]) == ["0"]
    assert all("candidates" not in choice for choice in record["selections"])
    assert load_trees(path) == [tree]


def test_trees_and_single_rollouts_may_share_a_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [make_rollout("hit right")])
    save_trees(path, [make_tree()], append=True)
    save_rollouts(path, [make_rollout("wrong")], append=True)
    assert [rollout.sample for rollout in load_rollouts(path)] == [0, 0, 1, 2, 0]
    assert load_trees(path) == [make_tree()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": ()}, "`nodes` must begin with the root"),
        ({"nodes": (Node(-1, FIRST),)}, "`nodes` must begin with the root"),
        ({"nodes": (Node(-1, None), Node(1, FIRST))}, "an earlier parent each: got parent 1"),
        ({"nodes": (Node(-1, None), Node(0, None))}, "got parent 0 and no turn at node 1"),
        ({"leaves": (Leaf(2, StopReason.ANSWER),)}, "`leaves` must name every node without children once"),
        ({"leaves": (Leaf(1, StopReason.ANSWER),) * 3}, "`leaves` must name every node without children once"),
        (
            {"selections": (Selection(0, 0, 0, 1, 3, (), fresh=(9,), boundary=0),)},
            r"`selections` must name nodes of the tree, 0 to 5: got a range of \[1, 9\]",
        ),
    ],
)
def test_a_tree_that_does_not_hold_together_is_refused(change, message):
    with pytest.raises(RolloutError, match=message):
        make_tree(**change)


def test_a_bad_tree_record_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "trees.jsonl"
    save_trees(path, [make_tree()])
    record = json.loads(path.read_text(encoding="utf-8"))
    for broken, message in [
        ({**record, "nodes": []}, "must begin with the root"),
        ({name: value for name, value in record.items() if name != "candidates"}, "and `candidates`: got KeyError"),
        ({**record, "answers": "Paris"}, "`answers` must be a list"),
        ({**record, "surprise": 1}, "fields of `RolloutTree`"),
    ]:
        path.write_text("\n" + json.dumps(broken) + "\n", encoding="utf-8")
        for load in (load_trees, load_rollouts):
            with pytest.raises(RolloutError, match=f"trees.jsonl, line 2: .*{message}"):
                load(path)


def test_another_schema_is_not_read_as_a_tree():
    from grounded_rl.rollouts.io import tree_from_record

    with pytest.raises(RolloutError, match="`schema` must be 'tree/1': got 1"):
        tree_from_record({"schema": 1})

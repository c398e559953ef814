"""
Faults between a training run and a real search server.

The strongest statement there is: rollouts, rewards, losses and weights of a run whose searches were refused, cut,
delayed, or whose server died and came back, equal those of the run that nothing disturbed; or the run stops, once,
with a checkpoint from which it goes on to the same end.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import pytest
import torch

from grounded_rl.errors import RetrievalError
from grounded_rl.retrieval.elasticsearch import (
    ElasticsearchClient,
    ElasticsearchRetriever,
    ElasticsearchSettings,
    ElasticsearchWriter,
    IndexSpec,
)
from grounded_rl.rollouts import CallStatus, load_rollouts
from grounded_rl.rollouts.io import rollout_to_record
from grounded_rl.trainers import GCATrainer, SearchAgentTrainer
from tests.retrieval.es_indices import build_index, call
from tests.retrieval.fault_proxy import FaultProxy, random_faults, storms
from tests.sampling.world import PASSAGES, SCRIPTS, Player
from tests.trainers.runs import TOKENIZER, losses, make_trainer, rows

pytestmark = pytest.mark.elasticsearch

SLOW = pytest.mark.slow
NAMES = ("A", "A_late", "A_malformed", "B", "C", "D_search", "D")
NUM_STEPS = 6


def random_plan(country, sample):
    """A script by the run's own random state, so that a run that draws once too often is another run."""
    return SCRIPTS[NAMES[int(torch.randint(len(NAMES), (1,)))]](country)


def run_of(folder, retriever, *, trainer_class=GCATrainer, **options):
    """Six updates on three generation batches, every search of which goes to the server."""
    return make_trainer(
        trainer_class,
        folder,
        plan=random_plan,
        dataset=rows("Peru", "Chile", "Norway", "Kenya"),
        retriever=retriever,
        **{
            "max_steps": NUM_STEPS,
            "rollout_log_groups": -1,
            "retrieval_cache": "off",
            "retrieval_max_in_flight": 2,
            "retrieval_patience": 60.0,
            **options,
        },
    )


def records(folder):
    return [rollout_to_record(rollout) for rollout in load_rollouts(folder / "rollouts.jsonl")]


def outcome(trainer, folder):
    """What two equal runs have in common: everything but times and counts of requests."""
    return records(folder), losses(trainer), [parameter.detach().clone() for parameter in trainer.model.parameters()]


def assert_same(mine, other):
    assert mine[0] == other[0]
    assert mine[1] == other[1]
    assert all(torch.equal(*pair) for pair in zip(mine[2], other[2], strict=True))


@pytest.fixture(scope="module")
def alias(es_node):
    """An index of the world's passages."""
    name = "fault-injection"
    build_index(es_node.url, name, PASSAGES)
    yield name
    call(es_node.url, "DELETE", f"/{name}-*")


@pytest.fixture(scope="module")
def undisturbed(es_node, alias, tmp_path_factory):
    """Outcome of the run whose searches never fail."""
    folder = tmp_path_factory.mktemp("undisturbed")
    retriever = ElasticsearchRetriever.connect(es_node.url, alias)
    trainer = run_of(folder, retriever)
    trainer.train()
    retriever.close()
    calls = [
        one for rollout in load_rollouts(folder / "rollouts.jsonl") for turn in rollout.turns for one in turn.calls
    ]
    statuses = {one.status for one in calls}
    assert {CallStatus.OK, CallStatus.EMPTY} <= statuses, "the run must hold searches that find and that do not"
    assert len(set(losses(trainer))) > 1
    return outcome(trainer, folder)


ALL_FAULTS = ("refuse", "reset", "overload", "unavailable", "gateway", "slow", "truncate", "truncate_json")
SCENARIOS = {
    "30 % of requests refused": random_faults(["refuse"], share=0.3),
    "30 % of connections reset after the search": random_faults(["reset"], share=0.3),
    "storms of 429": storms("overload", length=4, every=10),
    "storms of 503": storms("unavailable", length=4, every=9),
    "a balancer without a server": storms("gateway", length=3, every=8),
    "slow answers": random_faults(["slow"], share=0.5),
    "bodies that end too early": random_faults(["truncate"], share=0.3),
    "bodies cut by a proxy that calls them whole": random_faults(["truncate_json"], share=0.3),
    "everything at once": random_faults(
        ["refuse", "reset", "overload", "unavailable", "gateway", "slow", "truncate", "truncate_json"],
        share=0.4,
        seed=3,
    ),
}


IN_EVERY_RUN = ("everything at once",)
"""The other scenarios are left to the slow tier."""


@pytest.mark.parametrize(
    "scenario", [name if name in IN_EVERY_RUN else pytest.param(name, marks=SLOW) for name in SCENARIOS]
)
def test_faults_on_the_way_change_nothing(tmp_path, es_node, alias, undisturbed, scenario):
    with FaultProxy(es_node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, alias, patience=10.0)
        proxy.faults = SCENARIOS[scenario]
        trainer = run_of(tmp_path, retriever)
        trainer.train()
        retriever.close()
        assert proxy.num_faults >= 5
    assert_same(outcome(trainer, tmp_path), undisturbed)


@SLOW
def test_faults_that_outlast_every_attempt_are_waited_for(tmp_path, es_node, alias, undisturbed, caplog):
    with FaultProxy(es_node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, alias, patience=0.05)
        proxy.faults = storms("refuse", length=5, every=12)
        trainer = run_of(tmp_path, retriever, retrieval_attempts=1)
        trainer.train()
        retriever.close()
    assert_same(outcome(trainer, tmp_path), undisturbed)
    outages = sum(entry.get("search/outages", 0) for entry in trainer.state.log_history)
    assert outages >= 2
    assert sum("does not answer" in record.message for record in caplog.records) == outages


@SLOW
def test_a_page_of_html_is_never_an_answer(tmp_path, es_node, alias, undisturbed):
    with FaultProxy(es_node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, alias, patience=1.0)
        proxy.faults = lambda number, path: "page" if number > 12 else None
        trainer = run_of(tmp_path, retriever, retrieval_patience=0.5)
        stops_and_resumes(trainer, tmp_path, es_node.url, alias, undisturbed)
        retriever.close()


def stops_and_resumes(trainer, folder, url, alias, undisturbed, *, message="Training stopped after step"):
    """The run stops with one line and a checkpoint, has written nothing false, and goes on to the same end."""
    with pytest.raises(RetrievalError, match=message) as caught:
        trainer.train()
    text = str(caught.value)
    found = re.fullmatch(r"Training stopped after step (\d+): .*`resume_from_checkpoint: (.*)`\.", text)
    assert found, text
    whole = undisturbed[0]
    written = records(folder) if (folder / "rollouts.jsonl").is_file() else []
    assert written == whole[: len(written)]
    assert all(record["stop"] != "failed" for record in written)
    again = ElasticsearchRetriever.connect(url, alias)
    resumed = run_of(folder, again)
    resumed.train(resume_from_checkpoint=found.group(2))
    again.close()
    assert_same(outcome(resumed, folder), undisturbed)
    return int(found.group(1))


def changed_index(es_node, name, change):
    """An index of its own that `change(url, index)` harms once a run has begun; the retriever and its trigger."""
    build_index(es_node.url, name, PASSAGES)
    retriever = ElasticsearchRetriever.connect(es_node.url, name)
    search, count = retriever.search, iter(range(10**6))

    def harmed(queries, k):
        if next(count) == 9:
            change(es_node.url, retriever.index_name)
        return search(queries, k)

    retriever.search = harmed
    return retriever


def _delete(url, index):
    call(url, "DELETE", f"/{index}")


def _unlock(url, index):
    """A finished index refuses writes; whoever may change its settings can lift that."""
    call(url, "PUT", f"/{index}/_settings", {"index.blocks.write": False})


def _empty(url, index):
    _unlock(url, index)
    for number in range(len(PASSAGES)):
        call(url, "DELETE", f"/{index}/_doc/p{number:02}")
    call(url, "POST", f"/{index}/_refresh")


def _shrink(url, index):
    _unlock(url, index)
    call(url, "DELETE", f"/{index}/_doc/p07?refresh=true")


def _replace(url, index):
    """The same name, the same description of itself, other texts."""
    facts = call(url, "GET", f"/{index}/_mapping")[index]["mappings"]["_meta"]
    call(url, "DELETE", f"/{index}")
    client = ElasticsearchClient(ElasticsearchSettings(url))
    writer = ElasticsearchWriter(client, index, IndexSpec())
    writer.create()
    writer.write((place, replace(passage, text="Nothing."), None) for place, passage in enumerate(PASSAGES))
    client.close()
    call(url, "PUT", f"/{index}/_mapping", {"_meta": facts})
    call(url, "POST", f"/{index}/_refresh")


def _close(url, index):
    call(url, "POST", f"/{index}/_close")


CHANGES = {
    "the index is deleted": _delete,
    "the index is emptied": _empty,
    "one passage is deleted": _shrink,
    "another index takes its name": _replace,
    "the index is closed": _close,
}


@pytest.mark.parametrize(
    "change", [name if name == "another index takes its name" else pytest.param(name, marks=SLOW) for name in CHANGES]
)
def test_an_index_that_changes_under_a_run_stops_it(tmp_path, es_node, alias, es_index, undisturbed, change):
    retriever = changed_index(es_node, es_index, CHANGES[change])
    trainer = run_of(tmp_path, retriever, retrieval_patience=0.5)
    stops_and_resumes(trainer, tmp_path, es_node.url, alias, undisturbed)
    retriever.close()


@SLOW
def test_an_alias_that_is_switched_under_a_run_changes_nothing(tmp_path, es_node, alias, es_index, undisturbed):
    other = [passage for passage in PASSAGES if passage.title != "Peru"]
    retriever = changed_index(es_node, es_index, lambda url, index: build_index(url, es_index, other))
    trainer = run_of(tmp_path, retriever)
    trainer.train()
    retriever.close()
    assert_same(outcome(trainer, tmp_path), undisturbed)


class Killer:
    """Kills a node in the middle of its n-th search through a proxy, and starts it again after a while."""

    def __init__(self, node, numbers, *, restart=True):
        self.node = node
        self.numbers = list(numbers)
        self.restart = restart
        self.threads = []
        self._num_searches = 0
        self._lock = threading.Lock()

    def __call__(self, number, path):
        with self._lock:
            is_starting = any(thread.is_alive() for thread in self.threads)
            if is_starting or not self.numbers or not path.endswith("_msearch"):
                return
            self._num_searches += 1
            if self._num_searches < self.numbers[0]:
                return
            self.numbers.pop(0)
            self.node.kill()
            if self.restart:
                self.threads.append(threading.Thread(target=self._start))
                self.threads[-1].start()

    def _start(self):
        threading.Event().wait(0.5)
        self.node.restart()


def test_a_server_that_is_killed_and_started_again_in_mid_step_changes_nothing(
    tmp_path, make_es_node, alias, undisturbed, caplog
):
    node = make_es_node()
    build_index(node.url, alias, PASSAGES)
    killer = Killer(node, [5, 11])
    with FaultProxy(node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, alias, patience=0.2)
        proxy.faults = killer
        # A start takes seconds, and minutes on a machine that has much else to do.
        trainer = run_of(tmp_path, retriever, retrieval_attempts=2, retrieval_patience=600.0)
        try:
            trainer.train()
        finally:
            for thread in killer.threads:
                thread.join()
        retriever.close()
    assert len(killer.threads) == 2
    assert_same(outcome(trainer, tmp_path), undisturbed)
    outages = sum(entry.get("search/outages", 0) for entry in trainer.state.log_history)
    seconds = sum(entry.get("search/outage_s", 0) for entry in trainer.state.log_history)
    assert outages >= 2
    assert seconds > 1.0
    assert any("answered again after" in record.message for record in caplog.records)


@SLOW
def test_a_server_that_does_not_come_back_stops_the_run_and_nothing_is_lost(
    tmp_path, make_es_node, es_node, alias, undisturbed
):
    node = make_es_node()
    build_index(node.url, alias, PASSAGES)
    killer = Killer(node, [7], restart=False)
    with FaultProxy(node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, alias, patience=0.2)
        proxy.faults = killer
        trainer = run_of(tmp_path, retriever, retrieval_attempts=2, retrieval_patience=2.0)
        message = "did not come back within `retrieval_patience`, 2 s; last: .* could not be reached"
        stops_and_resumes(trainer, tmp_path, es_node.url, alias, undisturbed, message=message)
        retriever.close()


class LossyPlayer(Player):
    """Plays on where some rollouts were lost: those that go on are known by their contexts."""

    def __init__(self, tokenizer, plan):
        super().__init__(tokenizer, plan)
        self._heads: list[list[int]] = []

    def __call__(self, prompt_ids, *arguments, **options):
        kept, place = [], 0
        for ids in prompt_ids:
            while place < len(self._heads) and list(ids[: len(self._heads[place])]) != self._heads[place]:
                place += 1
            kept.append(place)
            place += 1
        # Contexts that continue none of the last round begin a batch.
        goes_on = bool(kept) and kept[-1] < len(self._heads)
        self._waiting = [self._waiting[each] for each in kept] if goes_on else self._new_batch(prompt_ids)
        waiting = self._waiting
        turns, logps = super().__call__(prompt_ids)
        self._heads = [[*ids, *turn] for ids, turn, left in zip(prompt_ids, turns, waiting, strict=True) if left]
        return turns, logps


@SLOW
def test_masking_leaves_out_what_failed_and_alters_nothing_else(tmp_path, es_node, alias, undisturbed):
    with FaultProxy(es_node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, alias, patience=0.01)
        proxy.faults = random_faults(["refuse"], share=0.35, seed=1)
        trainer = run_of(
            tmp_path,
            retriever,
            trainer_class=SearchAgentTrainer,
            retrieval_on_failure="mask",
            retrieval_attempts=1,
            rollout_max_failed_share=0.9,
        )
        trainer._generate_single_turn = LossyPlayer(TOKENIZER, random_plan)
        trainer.train()
        retriever.close()
    mine, whole = records(tmp_path), undisturbed[0]
    failed = [record for record in mine if record["stop"] == "failed"]
    assert 0 < len(failed) < len(mine)
    assert all(value is None for record in failed for value in record["rewards"].values())
    masked = sum(entry.get("search/masked_rollouts", 0) for entry in trainer.state.log_history)
    assert masked == len(failed)
    for record, other in zip(mine, whole, strict=True):
        if record["stop"] != "failed":
            assert [turn["observation"] for turn in record["turns"]] == [
                turn["observation"] for turn in other["turns"]
            ]
            assert record["rewards"] == other["rewards"]

"""The packaged policy, sampling for real, trains on a server that fails in every way and dies twice."""

from __future__ import annotations

import threading

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from grounded_rl.cli.models import ATLAS_POLICY, resolve_model
from grounded_rl.data.atlas import prepare_atlas
from grounded_rl.data.rows import load_questions
from grounded_rl.errors import RetrievalError
from grounded_rl.retrieval.corpus import read_corpus
from grounded_rl.retrieval.elasticsearch import ElasticsearchRetriever
from grounded_rl.rollouts import load_rollouts
from grounded_rl.rollouts.io import rollout_to_record
from grounded_rl.trainers import GCAConfig, GCATrainer
from tests.retrieval.es_indices import build_index
from tests.retrieval.fault_proxy import FaultProxy, random_faults

pytestmark = [pytest.mark.elasticsearch, pytest.mark.slow]

ALIAS = "atlas"
NUM_STEPS = 4
FAULTS = ("refuse", "reset", "overload", "unavailable", "gateway", "slow", "truncate", "truncate_json")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folder of the atlas."""
    folder = tmp_path_factory.mktemp("atlas")
    prepare_atlas(folder, counts={"train": 40, "dev": 10, "test": 10})
    return folder


@pytest.fixture
def node(make_es_node, world):
    """A node of the test's own with the passages of the atlas."""
    node = make_es_node()
    build_index(node.url, ALIAS, list(read_corpus(world / "corpus.jsonl")))
    return node


def trainer_of(folder, world, retriever, **options):
    """Four updates on two generation batches of sixteen rollouts, with every search at the server."""
    questions = load_questions(world / "train.jsonl", limit=16)
    config = GCAConfig(
        output_dir=str(folder),
        **{
            "prompt_style": "plain",
            "rollout_max_turn_tokens": 64,
            "max_completion_length": 1024,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "steps_per_generation": 2,
            "max_steps": NUM_STEPS,
            "learning_rate": 1e-4,
            "beta": 0.0,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "rollout_log_groups": -1,
            "retrieval_cache": "off",
            "retrieval_max_in_flight": 2,
            "retrieval_attempts": 2,
            "retrieval_patience": 60.0,
            **options,
        },
    )
    model = resolve_model(ATLAS_POLICY)
    columns = ("id", "question", "answers", "kind")
    return GCATrainer(
        model,
        retriever,
        args=config,
        train_dataset=Dataset.from_list([{name: getattr(row, name) for name in columns} for row in questions]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def outcome(trainer, folder):
    """What two equal runs have in common."""
    records = [rollout_to_record(rollout) for rollout in load_rollouts(folder / "rollouts.jsonl")]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return records, losses, [parameter.detach().clone() for parameter in trainer.model.parameters()]


def assert_same(mine, other):
    assert mine[0] == other[0]
    assert mine[1] == other[1]
    assert all(torch.equal(*pair) for pair in zip(mine[2], other[2], strict=True))


def test_a_policy_learns_the_same_from_a_server_that_fails(tmp_path, node, world):
    calm = ElasticsearchRetriever.connect(node.url, ALIAS)
    whole = trainer_of(tmp_path / "whole", world, calm)
    whole.train()
    expected = outcome(whole, tmp_path / "whole")
    calls = [len(turn["calls"]) for record in expected[0] for turn in record["turns"]]
    assert sum(calls) > len(expected[0]), "the policy must search for failures to matter"
    harm, kills = random_faults(FAULTS, share=0.3, seed=5), [10, 24]
    threads: list[threading.Thread] = []
    lock = threading.Lock()

    def fault(number, path):
        with lock:
            is_starting = any(thread.is_alive() for thread in threads)
            if kills and not is_starting and number >= kills[0] and path.endswith("_msearch"):
                kills.pop(0)
                node.kill()
                threads.append(threading.Thread(target=node.restart))
                threads[-1].start()
                return None
        return harm(number, path)

    with FaultProxy(node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, ALIAS, patience=0.5)
        proxy.faults = fault
        disturbed = trainer_of(tmp_path / "disturbed", world, retriever, retrieval_patience=600.0)
        try:
            disturbed.train()
        finally:
            for thread in threads:
                thread.join()
        retriever.close()
    assert len(threads) == 2
    assert proxy.num_faults >= 8
    assert_same(outcome(disturbed, tmp_path / "disturbed"), expected)
    # A server that is gone for good: the second batch stops, and goes on from the checkpoint to the same end.
    with FaultProxy(node.url) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, ALIAS, patience=0.5)
        stopped = trainer_of(tmp_path / "stopped", world, retriever, retrieval_patience=1.0)
        proxy.faults = lambda number, path: "refuse" if stopped.state.global_step == 2 else None
        with pytest.raises(RetrievalError, match="Training stopped after step 2: "):
            stopped.train()
        retriever.close()
    resumed = trainer_of(tmp_path / "stopped", world, calm)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-2"))
    calm.close()
    assert_same(outcome(resumed, tmp_path / "stopped"), expected)

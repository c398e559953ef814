"""What the log, the recipe and the alarm say about searching."""

from __future__ import annotations

import math

import pytest

from grounded_rl.cli.recipes import parse_recipe
from grounded_rl.errors import BackendUnavailableError, ConfigurationError
from grounded_rl.rollouts import load_rollouts
from grounded_rl.trainers import GCAConfig, SearchAgentConfig, SearchAgentTrainer
from tests.sampling.world import MALFORMED, NOTHING, SCRIPTS, TinyRetriever, answer, call
from tests.trainers.runs import agent_options, generation_batch, make_trainer


class FailsOnce(TinyRetriever):
    """The second search fails in passing."""

    def search(self, queries, k):
        found = super().search(queries, k)
        if len(self.batches) == 2:
            raise BackendUnavailableError("connection refused")
        return found


def test_masked_rollouts_are_counted(tmp_path):
    trainer = make_trainer(
        SearchAgentTrainer,
        tmp_path,
        plan=lambda country, sample: [call("broken")] if sample == 1 else SCRIPTS["A"](country),
        retriever=TinyRetriever(failing=["broken"]),
        retrieval_on_failure="mask",
        rollout_max_failed_share=0.5,
    )
    generation_batch(trainer, "Peru", "Chile")
    assert trainer._metrics["train"]["search/masked_rollouts"] == [2.0]
    # The batch of three queries failed; then each was asked by itself.
    assert trainer._metrics["train"]["search/requests"] == [4.0]
    assert trainer._metrics["train"]["search/failures"] == [2.0]


def test_the_log_says_what_searching_was_like(tmp_path):
    plan = lambda country, sample: [call(f"capital of {country}"), call(NOTHING), answer("Nowhere")]  # noqa: E731
    trainer = make_trainer(
        SearchAgentTrainer, tmp_path, plan=plan, rollout_observation_tokens=8, retriever=FailsOnce()
    )
    generation_batch(trainer, "Peru", "Chile")
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("search/")}
    # Both first queries in one request; "nothing" once, and once more after the failure.
    assert metrics["search/requests"] == 3
    assert metrics["search/queries"] == 4
    assert metrics["search/retries"] == 1
    assert metrics["search/failures"] == 1
    assert metrics["search/empty_share"] == pytest.approx(1 / 3)
    assert metrics["search/cache_hit_share"] == 0
    assert metrics["search/masked_rollouts"] == 0
    assert 0 < metrics["search/latency_p50_ms"] <= metrics["search/latency_p95_ms"]
    shown = [
        (passage.num_tokens_full, passage.num_tokens)
        for rollout in load_rollouts(tmp_path / "rollouts.jsonl")
        for turn in rollout.turns
        for one in turn.calls
        for passage in one.passages
    ]
    assert trainer.args.rollout_log_groups == 2
    assert metrics["search/truncated_tokens"] == sum(full - kept for full, kept in shown) > 0
    # The next batch asks for the same: nothing is left to request.
    generation_batch(trainer, "Peru", "Chile")
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("search/")}
    assert metrics["search/requests"] == 0
    assert metrics["search/cache_hit_share"] == 1
    assert math.isnan(metrics["search/latency_p95_ms"])


def test_batches_that_never_search_raise_an_alarm_that_becomes_rare(tmp_path, caplog):
    trainer = make_trainer(SearchAgentTrainer, tmp_path, plan=lambda country, sample: [MALFORMED, answer("Nowhere")])
    for _ in range(5):
        generation_batch(trainer, "Peru", "Chile")
    alarms = [record.getMessage() for record in caplog.records if "No search was executed" in record.message]
    assert [text.split("; ")[1].split()[0] for text in alarms] == ["1", "2", "4"]
    assert "(8 rollouts, 8 calls that could not be read; 1 such batches so far)" in alarms[0]
    assert "check `tool_format`" in alarms[0]


def test_a_batch_with_one_search_raises_none(tmp_path, caplog):
    plan = lambda country, sample: SCRIPTS["A" if (country, sample) == ("Peru", 3) else "D"](country)  # noqa: E731
    generation_batch(make_trainer(SearchAgentTrainer, tmp_path, plan=plan), "Peru", "Chile")
    assert not [record for record in caplog.records if "No search" in record.message]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrieval_on_failure": "raise"}, r"`retrieval_on_failure` must be one of \('abort_step', 'mask'\): got"),
        ({"retrieval_patience": -1.0}, "`retrieval_patience` must be a number of at least 0: got -1.0"),
        ({"retrieval_patience": math.nan}, "`retrieval_patience` must be a number of at least 0: got nan"),
        ({"retrieval_timeout": math.inf}, "`retrieval_timeout` must be a number of at least 0: got inf"),
        ({"retrieval_attempts": 0}, "`retrieval_attempts` must be at least 1: got 0"),
        ({"retrieval_max_in_flight": 0}, "`retrieval_max_in_flight` must be at least 1: got 0"),
        ({"retrieval_cache": ""}, "`retrieval_cache` must be 'off', 'memory' or a path: got ''"),
    ],
)
def test_values_out_of_range_are_named(tmp_path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        SearchAgentConfig(**agent_options(tmp_path, **options))


def test_other_processes_must_outwait_the_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(SearchAgentConfig, "world_size", 2)
    with pytest.raises(ConfigurationError, match=r"must be below `ddp_timeout` \(1800 s\), .*: got 2120 s"):
        SearchAgentConfig(**agent_options(tmp_path, retrieval_patience=2000.0))
    SearchAgentConfig(**agent_options(tmp_path, retrieval_patience=2000.0, ddp_timeout=2400))


@pytest.mark.parametrize(
    ("line", "expected"),
    [("retrieval_cache: off", "off"), ("retrieval_cache: runs/cache.sqlite", "runs/cache.sqlite"), ("", "memory")],
)
def test_a_recipe_names_the_cache(tmp_path, line, expected):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}\nnum_generations: 4\nuse_cpu: true\nbf16: false\n{line}\n", encoding="utf-8"
    )
    (config,) = parse_recipe(recipe, [], (GCAConfig,))
    assert config.retrieval_cache == expected
    (config,) = parse_recipe(recipe, ["--retrieval_cache", "off"], (GCAConfig,))
    assert config.retrieval_cache == "off"

"""A search backend that goes away: what is waited for, what is saved, what the log says."""

from __future__ import annotations

import math
import time

import pytest
import torch

from grounded_rl.cli import main
from grounded_rl.errors import BackendUnavailableError, BadResponseError, IndexMismatchError, RetrievalError
from grounded_rl.retrieval.outage import PatientRetriever
from grounded_rl.rollouts import load_rollouts
from grounded_rl.rollouts.io import rollout_to_record
from grounded_rl.trainers import GCATrainer, SearchAgentTrainer
from tests.sampling.world import SCRIPTS, TinyRetriever, call
from tests.trainers.runs import generation_batch, losses, make_trainer, rows
from tests.trees.tree_runs import METHODS, make_tree_trainer

NAMES = ("A", "A_late", "A_malformed", "B", "C", "D_search")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """Time passes at once for the wrappers the trainer makes."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def random_plan(country, sample):
    """A script by the run's own random state, so that a run that draws once too often is another run."""
    return SCRIPTS[NAMES[int(torch.randint(len(NAMES), (1,)))]](country)


class Failing(TinyRetriever):
    """Fails at the search calls with these numbers, counted from 0, or at all from a number on."""

    def __init__(self, failures=None, ready_failures=0, lasting=None):
        super().__init__()
        self.failures = dict(failures or {})
        self.first_lasting, self.lasting = lasting or (math.inf, None)
        self.ready_failures = ready_failures
        self.num_calls = 0

    def ready(self, timeout=5.0):
        if self.ready_failures:
            self.ready_failures -= 1
            raise BackendUnavailableError("not ready")

    def search(self, queries, k):
        failure = self.lasting if self.num_calls >= self.first_lasting else self.failures.get(self.num_calls)
        self.num_calls += 1
        if failure is not None:
            raise failure
        return super().search(queries, k)


def away(number=0):
    return BackendUnavailableError(f"connection {number} refused")


def run_of(trainer_class, folder, retriever=None, **options):
    """A run of six updates on three generation batches; an epoch holds two of them."""
    return make_trainer(
        trainer_class,
        folder,
        plan=random_plan,
        dataset=rows("Peru", "Chile", "Norway", "Kenya"),
        retriever=retriever or TinyRetriever(),
        **{
            "max_steps": 6,
            "rollout_log_groups": -1,
            "retrieval_cache": "off",
            "retrieval_attempts": 1,
            **options,
        },
    )


def outcome(trainer, folder):
    """What two equal runs have in common: everything but times and counts of requests."""
    records = [rollout_to_record(rollout) for rollout in load_rollouts(folder / "rollouts.jsonl")]
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return records, losses(trainer), weights


def assert_same(mine, other):
    assert mine[0] == other[0]
    assert mine[1] == other[1]
    assert all(torch.equal(*pair) for pair in zip(mine[2], other[2], strict=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Outcomes of runs whose searches never fail."""
    found = {}

    def outcome_of(trainer_class, **options):
        key = (trainer_class, *sorted(options.items()))
        if key not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            trainer = run_of(trainer_class, folder, **options)
            trainer.train()
            found[key] = outcome(trainer, folder)
        return found[key]

    return outcome_of


@pytest.mark.parametrize("trainer_class", [SearchAgentTrainer, pytest.param(GCATrainer, marks=pytest.mark.slow)])
def test_a_run_that_outlives_outages_is_the_run_without_them(tmp_path, undisturbed, trainer_class, caplog):
    retriever = Failing({0: away(), 3: away(), 4: away(), 6: away()}, ready_failures=3)
    trainer = run_of(trainer_class, tmp_path, retriever)
    trainer.train()
    assert_same(outcome(trainer, tmp_path), undisturbed(trainer_class))
    totals = totals_of(trainer)
    assert totals["search/failures"] == 4
    # The fourth failure met the search that repeated the third.
    assert totals["search/outages"] == 3
    assert sum("does not answer" in record.message for record in caplog.records) == 3


def totals_of(trainer):
    names = ("requests", "failures", "outages", "retries", "queries", "masked_rollouts")
    return {
        f"search/{name}": sum(entry.get(f"search/{name}", 0) for entry in trainer.state.log_history) for name in names
    }


@pytest.fixture(scope="module")
def first_calls(tmp_path_factory):
    """Number of the first search call of every generation batch."""
    folder = tmp_path_factory.mktemp("calls")
    retriever = Failing()
    trainer = run_of(SearchAgentTrainer, folder, retriever)
    firsts = []
    sample = trainer.sample
    trainer.sample = lambda batch_rows: firsts.append(retriever.num_calls) or sample(batch_rows)
    trainer.train()
    assert len(firsts) == 3
    return firsts


@pytest.mark.parametrize("batch", [0, 1, 2], ids=["at the start", "in mid-epoch", "at the start of an epoch"])
@pytest.mark.parametrize(
    "failure", [away(), pytest.param(BadResponseError("half an answer"), marks=pytest.mark.slow)], ids=["away", "bad"]
)
def test_a_run_that_stops_goes_on_from_its_checkpoint_as_if_nothing_had_happened(
    tmp_path, undisturbed, first_calls, batch, failure
):
    # The second search of the batch: by then its rollouts have drawn random numbers.
    failing = Failing(lasting=(first_calls[batch] + 1, failure))
    stopped = run_of(SearchAgentTrainer, tmp_path, failing, retrieval_patience=0.5)
    checkpoint = tmp_path / f"checkpoint-{2 * batch}"
    message = rf"^Training stopped after step {2 * batch}: .*`resume_from_checkpoint: {checkpoint}`\.$"
    with pytest.raises(RetrievalError, match=message) as caught:
        stopped.train()
    assert str(failure) in str(caught.value)
    assert "\n" not in str(caught.value)
    resumed = run_of(SearchAgentTrainer, tmp_path)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(outcome(resumed, tmp_path), undisturbed(SearchAgentTrainer))


@pytest.mark.slow
def test_a_batch_that_is_accumulated_is_resumed_from_its_beginning(tmp_path, undisturbed):
    options = {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
    }
    retriever = Failing()
    counting = run_of(SearchAgentTrainer, tmp_path / "count", retriever, **options)
    firsts = []
    sample = counting.sample
    counting.sample = lambda batch_rows: firsts.append(retriever.num_calls) or sample(batch_rows)
    counting.train()
    # The second generation batch of the second update: half of the gradient was there.
    failing = Failing(lasting=(firsts[3], away()))
    stopped = run_of(SearchAgentTrainer, tmp_path / "run", failing, retrieval_patience=0.0, **options)
    with pytest.raises(RetrievalError, match="Training stopped after step 1: connection 0 refused"):
        stopped.train()
    resumed = run_of(SearchAgentTrainer, tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert_same(outcome(resumed, tmp_path / "run"), undisturbed(SearchAgentTrainer, **options))


@pytest.mark.slow
def test_a_checkpoint_is_whole_even_where_the_recipe_saves_none_or_the_model_only(tmp_path, undisturbed):
    options = {"save_strategy": "no", "save_only_model": True}
    stopped = run_of(SearchAgentTrainer, tmp_path, Failing({2: BadResponseError("half")}), **options)
    with pytest.raises(RetrievalError):
        stopped.train()
    assert stopped.args.save_only_model
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    resumed = run_of(SearchAgentTrainer, tmp_path)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(outcome(resumed, tmp_path), undisturbed(SearchAgentTrainer))


def test_the_searches_of_credit_are_waited_for_and_stop_a_run_like_others(tmp_path):
    plan = lambda country, sample: SCRIPTS[("D", "C_short")[sample % 2]](country)  # noqa: E731
    options = {"plan": plan, "dataset": rows("Peru", "Chile"), "retrieval_attempts": 1, "retrieval_cache": "off"}
    whole = make_trainer(GCATrainer, tmp_path / "whole", **options)
    expected = generation_batch(whole, "Peru", "Chile")
    waiting = make_trainer(GCATrainer, tmp_path / "waiting", retriever=Failing({0: away()}), **options)
    output = generation_batch(waiting, "Peru", "Chile")
    assert torch.equal(output["advantages"], expected["advantages"])
    failing = Failing({0: BadResponseError("half")})
    stopping = make_trainer(GCATrainer, tmp_path / "stopping", retriever=failing, **options)
    with pytest.raises(RetrievalError, match=r"Training stopped after step 0: half"):
        stopping.train()
    assert (tmp_path / "stopping" / "checkpoint-0" / "optimizer.pt").is_file()


@pytest.mark.parametrize("method", ["sipo", pytest.param("gca_sipo", marks=pytest.mark.slow)])
def test_trees_wait_and_stop_like_linear_rollouts(tmp_path, method):
    def run(name, retriever=None, **options):
        trainer = make_tree_trainer(
            method, tmp_path / name, max_steps=2, retrieval_attempts=1, retrieval_cache="off", **options
        )
        trainer_class, _ = METHODS[method]
        again = trainer_class(
            trainer.model,
            retriever or Failing(),
            args=trainer.args,
            train_dataset=trainer.train_dataset,
            processing_class=trainer.processing_class,
        )
        again._generate_single_turn = trainer._generate_single_turn
        return again

    whole = run("whole")
    whole.train()
    disturbed = run("disturbed", Failing({1: away(), 3: away(), 5: away()}))
    disturbed.train()
    assert totals_of(disturbed)["search/failures"] == 3
    assert losses(disturbed) == losses(whole)
    texts = [(tmp_path / name / "rollouts.jsonl").read_text(encoding="utf-8") for name in ("whole", "disturbed")]
    assert texts[0] == texts[1]
    stopped = run("stopped", Failing(lasting=(1, away())), retrieval_patience=0.1)
    with pytest.raises(RetrievalError, match="Training stopped after step 0: .*did not come back within"):
        stopped.train()


def test_an_evaluation_stops_rather_than_leave_questions_out(tmp_path):
    trainer = make_trainer(
        SearchAgentTrainer,
        tmp_path,
        plan=lambda country, sample: SCRIPTS["A"](country),
        retriever=Failing({0: away(), 2: BadResponseError("half")}),
        trainer_options={"eval_dataset": rows("Peru")},
        retrieval_on_failure="mask",
        retrieval_attempts=1,
        retrieval_cache="off",
        per_device_eval_batch_size=4,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == 1.0
    with pytest.raises(BadResponseError, match="half"):
        trainer.evaluate()


def test_too_many_masked_rollouts_stop_the_run_with_a_checkpoint(tmp_path):
    trainer = make_trainer(
        SearchAgentTrainer,
        tmp_path,
        plan=lambda country, sample: [call("broken")],
        retriever=TinyRetriever(failing=["broken"]),
        retrieval_on_failure="mask",
    )
    with pytest.raises(RetrievalError, match=r"Training stopped after step 0: `rollout_max_failed_share` must not be"):
        trainer.train()
    assert (tmp_path / "checkpoint-0" / "trainer_state.json").is_file()


class Unready(TinyRetriever):
    """Answers every search, but fails from a question on whether it is ready; they are counted from 0."""

    def __init__(self, first, failure):
        super().__init__()
        self.first, self.failure, self.num_asked = first, failure, 0

    def ready(self, timeout=5.0):
        self.num_asked += 1
        if self.num_asked > self.first:
            raise self.failure


@pytest.mark.parametrize("moment", [0, 1], ids=["after the rollouts", "after their diagnosis"])
def test_masking_trusts_an_index_that_went_away_but_not_another_one(tmp_path, undisturbed, moment):
    retriever = Unready(moment, away())
    trainer = run_of(GCATrainer, tmp_path / "away", retriever, retrieval_on_failure="mask")
    trainer.train()
    assert retriever.num_asked == 6
    assert_same(outcome(trainer, tmp_path / "away"), undisturbed(GCATrainer))
    retriever = Unready(moment, IndexMismatchError("another index"))
    trainer = run_of(GCATrainer, tmp_path / "other", retriever, retrieval_on_failure="mask")
    with pytest.raises(RetrievalError, match="Training stopped after step 0: another index"):
        trainer.train()


@pytest.mark.parametrize("is_main", [True, False])
def test_the_command_says_one_line_and_returns_a_code(tmp_path, monkeypatch, capsys, is_main):
    trainer = run_of(SearchAgentTrainer, tmp_path, Failing({1: BadResponseError("half an answer")}))
    monkeypatch.setattr("grounded_rl.cli.recipes.recipe_dataclasses", lambda *arguments: ())
    monkeypatch.setattr("grounded_rl.cli.recipes.parse_recipe", lambda *arguments: (None, trainer.args, None))
    monkeypatch.setattr("grounded_rl.cli.train.build_trainer", lambda *arguments: trainer)
    monkeypatch.setattr(type(trainer.accelerator), "is_main_process", is_main)
    assert main(["train", "--config", "recipe.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == (
        [
            "error: Training stopped after step 0: half an answer Nothing is lost: once the search works, run again "
            f"with `resume_from_checkpoint: {tmp_path}/checkpoint-0`."
        ]
        if is_main
        else []
    )
    assert "Traceback" not in "".join(lines)


def test_patience_is_the_outermost_wrapper_and_masking_has_none(tmp_path):
    waiting = run_of(SearchAgentTrainer, tmp_path)
    assert isinstance(waiting.retriever, PatientRetriever)
    masking = run_of(SearchAgentTrainer, tmp_path, retrieval_on_failure="mask")
    assert not isinstance(masking.retriever, PatientRetriever)
    assert isinstance(masking.evaluation_sampler.retriever, PatientRetriever)

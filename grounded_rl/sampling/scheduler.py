"""The one rollout loop: turns of all rollouts advance together, so that generation and retrieval stay batched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from grounded_rl.data.rows import Question
from grounded_rl.environments.parsing import TurnReading
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.errors import BadResponseError, ConfigurationError, RetrievalError
from grounded_rl.retrieval.base import Hit, Retriever
from grounded_rl.retrieval.outage import index_failure
from grounded_rl.rollouts.types import Call, CallStatus, FinishReason, Rollout, StopReason, Turn, TurnKind
from grounded_rl.sampling.engine import Completion, Engine

logger = logging.getLogger(__name__)


def raise_failure(failure: RetrievalError | None) -> None:
    """
    What a single process does at the end of a run: raise its failure, if it had one.

    Args:
        failure (`RetrievalError`, *optional*):
            The failure that ended the run.
    """
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to sample."""

    question: Question
    prompt_ids: tuple[int, ...]
    sample: int = 0
    """Index within its group."""


@dataclass
class Episode:
    """A rollout in the making; `RolloutSampler.run` plays it to its end."""

    request: RolloutRequest
    turns: list[Turn] = field(default_factory=list)
    seen: dict[str, list[Hit]] = field(default_factory=dict)
    """Hits by query, for calls the policy repeats."""
    num_tokens: int = 0
    """Completion tokens so far, observations included."""
    context: list[int] = field(default_factory=list)
    stop: StopReason | None = None
    error: str | None = None

    @classmethod
    def start(cls, request: RolloutRequest) -> Episode:
        """An episode that has only its prompt."""
        return cls(request, context=list(request.prompt_ids))

    def fork(self, num_turns: int, *, sample: int) -> Episode:
        """A new episode with the first `num_turns` turns of this one and what was found in them."""
        turns = self.turns[:num_turns]
        answered = (CallStatus.OK, CallStatus.EMPTY)
        queries = {call.query for turn in turns for call in turn.calls if call.status in answered}
        shared = [token for turn in turns for token in (*turn.ids, *turn.observation_ids)]
        return Episode(
            replace(self.request, sample=sample),
            turns=turns,
            seen={query: hits for query, hits in self.seen.items() if query in queries},
            num_tokens=len(shared),
            context=[*self.request.prompt_ids, *shared],
        )


@dataclass(frozen=True)
class RolloutSampler:
    """
    Samples rollouts from an engine in a search environment.

    Args:
        environment ([`SearchEnvironment`]):
            Reads turns and writes observations.
        retriever ([`Retriever`]):
            Answers the searches; called once per round of turns with the queries of all rollouts.
        max_completion_tokens (`int`, *optional*, defaults to `7168`):
            Budget of a whole completion, observations included.
        on_search_failure (`str`, *optional*, defaults to `"raise"`):
            What an infrastructural failure does: `"raise"` passes it on, `"mask"` marks the rollouts that needed the
            failed queries as failed.
        is_anyone_active (`Callable[[bool], bool]`, *optional*, defaults to `bool`):
            Tells whether any process still has active rollouts, given whether this one has. The engine is called, with
            no contexts if need be, until none has; collective engines need this.
        share_failure (`Callable[[RetrievalError | None], None]`, *optional*):
            Called once at the end of every run with what stopped this process, if anything did; raises where any
            process was stopped, so that none waits for another that is gone.
    """

    environment: SearchEnvironment
    retriever: Retriever
    max_completion_tokens: int = 7168
    on_search_failure: str = "raise"
    is_anyone_active: Callable[[bool], bool] = bool
    share_failure: Callable[[RetrievalError | None], None] = raise_failure

    def __post_init__(self):
        if self.on_search_failure not in ("raise", "mask"):
            raise ConfigurationError(
                f"`on_search_failure` must be 'raise' or 'mask': got {self.on_search_failure!r}. Choose one of them."
            )
        if self.max_completion_tokens < 1:
            raise ConfigurationError(
                f"`max_completion_tokens` must be at least 1: got {self.max_completion_tokens}. Raise it."
            )

    def requests(self, questions: Sequence[Question], *, samples: int = 1) -> list[RolloutRequest]:
        """`samples` requests per question, consecutive, with the environment's own prompt."""
        rendered = [(question, tuple(self.environment.prompt_ids(question.question))) for question in questions]
        return [RolloutRequest(question, ids, sample) for question, ids in rendered for sample in range(samples)]

    def sample(
        self,
        engine: Engine,
        requests: Sequence[RolloutRequest],
        *,
        on_turn: Callable[[int, int], None] | None = None,
    ) -> list[Rollout]:
        """
        Sample every requested rollout to its end.

        Args:
            engine ([`Engine`]):
                Samples the turns.
            requests (`Sequence[RolloutRequest]`):
                Rollouts wanted.
            on_turn (`Callable[[int, int], None]`, *optional*):
                Called after every round with the numbers of finished and of all rollouts.

        Returns:
            `list[Rollout]`: One per request, in order.

        Raises:
            `RetrievalError`: If a search fails and `on_search_failure` is `"raise"`.
        """
        episodes = [Episode.start(request) for request in requests]
        self.run(engine, episodes, on_turn=on_turn)
        return [self.finished(episode) for episode in episodes]

    def run(
        self,
        engine: Engine,
        episodes: Sequence[Episode],
        *,
        numbers: Sequence[int] | None = None,
        on_turn: Callable[[int, int], None] | None = None,
    ) -> None:
        """
        Play episodes to their end, all of them together.

        Args:
            engine ([`Engine`]):
                Samples the turns.
            episodes (`Sequence[Episode]`):
                Episodes, with any number of turns played already. Changed in place.
            numbers (`Sequence[int]`, *optional*):
                What the engine calls each of them; counted from 0 if omitted.
            on_turn (`Callable[[int, int], None]`, *optional*):
                Called after every round with the numbers of finished and of all episodes.

        Raises:
            `RetrievalError`: If a search fails and `on_search_failure` is `"raise"`, or if the index is another one
                by the end.
        """
        numbers = range(len(episodes)) if numbers is None else numbers
        active = list(range(len(episodes)))
        failure: RetrievalError | None = None
        while self.is_anyone_active(bool(active)):
            completions = engine.generate([episodes[i].context for i in active], [numbers[i] for i in active])
            try:
                self._advance([episodes[i] for i in active], completions)
            except RetrievalError as error:
                # Others may need this process in their collective calls: it goes on, empty-handed, until all end.
                failure, active = error, []
                continue
            active = [i for i in active if episodes[i].stop is None]
            if on_turn is not None:
                on_turn(len(episodes) - len(active), len(episodes))
        self.share_failure(failure or self._unconfirmed(episodes))

    def _unconfirmed(self, episodes: Sequence[Episode]) -> RetrievalError | None:
        """What keeps the answers of a run from being trusted, if anything does."""
        if not any(episode.seen for episode in episodes):
            return None
        return index_failure(self.retriever, may_be_away=self.on_search_failure == "mask")

    def _advance(self, episodes: list[Episode], completions: list[Completion]) -> None:
        readings = [self._read(episode, completion) for episode, completion in zip(episodes, completions, strict=True)]
        waiting = [
            (episode, *reading) for episode, reading in zip(episodes, readings, strict=True) if reading is not None
        ]
        found = self._search(
            [query for episode, *_, queries in waiting for query in queries if query not in episode.seen]
        )
        for episode, completion, reading, queries in waiting:
            self._observe(episode, completion, reading, queries, found)

    def _read(self, episode: Episode, completion: Completion) -> tuple[Completion, TurnReading, list[str]] | None:
        """Completion, reading and queries to run; `None` when the turn ended the rollout."""
        room = self.max_completion_tokens - episode.num_tokens
        if len(completion.ids) > room:
            logps = None if completion.logps is None else completion.logps[:room]
            completion = Completion(completion.ids[:room], FinishReason.LENGTH, logps)
        reading = self.environment.read(completion.ids, finish=completion.finish)
        is_last = len(episode.turns) + 1 >= self.environment.max_turns
        if completion.finish is FinishReason.LENGTH:
            self._end(episode, completion, reading, StopReason.LENGTH)
        elif reading.kind is TurnKind.ANSWER:
            self._end(episode, completion, reading, StopReason.ANSWER)
        elif is_last:
            self._end(episode, completion, reading, StopReason.TURN_LIMIT)
        else:
            return completion, reading, self.environment.executable_queries(reading)
        return None

    def _end(self, episode: Episode, completion: Completion, reading: TurnReading, stop: StopReason) -> None:
        self._append(episode, completion, reading, calls=self.environment.unanswered_calls(reading))
        episode.stop = stop

    def _append(
        self,
        episode: Episode,
        completion: Completion,
        reading: TurnReading,
        *,
        calls: tuple[Call, ...],
        observation_ids: Sequence[int] = (),
        observation: str = "",
    ) -> None:
        turn = Turn(
            ids=tuple(completion.ids),
            text=reading.text,
            kind=reading.kind,
            finish=completion.finish,
            calls=calls,
            logps=None if completion.logps is None else tuple(completion.logps),
            observation_ids=tuple(observation_ids),
            observation=observation,
        )
        episode.turns.append(turn)
        episode.context += [*turn.ids, *turn.observation_ids]
        episode.num_tokens += len(turn.ids) + len(turn.observation_ids)

    def _search(self, queries: list[str]) -> dict[str, list[Hit] | RetrievalError]:
        """Hits of every distinct query, or the error that kept it from being answered."""
        distinct = list(dict.fromkeys(queries))
        if not distinct:
            return {}
        top_k = self.environment.top_k
        try:
            results = self.retriever.search(distinct, top_k)
            if len(results) != len(distinct):
                raise BadResponseError(
                    f"The search backend answered {len(results)} of {len(distinct)} queries, without saying which."
                )
            return dict(zip(distinct, results, strict=True))
        except RetrievalError:
            if self.on_search_failure == "raise":
                raise
        # One at a time, so that only the rollouts whose own query fails are lost.
        found: dict[str, list[Hit] | RetrievalError] = {}
        for query in distinct:
            try:
                found[query] = self.retriever.search([query], top_k)[0]
            except RetrievalError as error:
                found[query] = error
        return found

    def _observe(
        self,
        episode: Episode,
        completion: Completion,
        reading: TurnReading,
        queries: list[str],
        found: dict[str, list[Hit] | RetrievalError],
    ) -> None:
        responses: list[list[Hit]] = []
        cached: list[bool] = []
        for query in queries:
            cached.append(query in episode.seen)
            hits = episode.seen[query] if query in episode.seen else found[query]
            if isinstance(hits, RetrievalError):
                self._end(episode, completion, reading, StopReason.FAILED)
                episode.error = str(hits)
                return
            episode.seen[query] = hits
            responses.append(hits)
        turns_left = self.environment.max_turns - len(episode.turns) - 1
        observation = self.environment.observe(reading, responses, turns_left=turns_left, cached=cached)
        # A completion without room for the observation and one more token cannot go on.
        if episode.num_tokens + len(completion.ids) + len(observation.ids) >= self.max_completion_tokens:
            self._end(episode, completion, reading, StopReason.LENGTH)
            return
        self._append(
            episode,
            completion,
            reading,
            calls=observation.calls,
            observation_ids=observation.ids,
            observation=observation.text,
        )

    def finished(self, episode: Episode) -> Rollout:
        """The rollout of a finished episode."""
        question = episode.request.question
        stop = episode.stop or StopReason.LENGTH
        return Rollout(
            question_id=question.id,
            question=question.question,
            answers=question.answers,
            prompt_ids=episode.request.prompt_ids,
            turns=tuple(episode.turns),
            stop=stop,
            answer=None if stop is StopReason.FAILED else self.environment.answer(episode.turns),
            question_kind=question.kind,
            sample=episode.request.sample,
            error=episode.error,
        )

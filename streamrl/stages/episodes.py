"""Trajectories in flight: each is one coroutine from its launch to its outcome.

``launch.sampling`` makes ``Episodes`` in the controller, where control launches, pauses and cancels trajectories with
it; ``cli.trained_models.model_evaluation`` makes it in the process of the evaluation command. An episode samples a
trajectory, then it is recorded and scored. A trajectory whose episode fails counts like one whose reward fails.

A request that the engine interrupts (a pause that aborts, a drained engine) continues from its tokens with another
seed. A trajectory that control has paused waits, outside of the engine, until it is resumed. A trajectory ends as
``TrajectoryLost`` only where it was cancelled, the engine refused it, or its episode sampled nothing. Where deferred
completions are verified, the tokens of cancelled trajectories are stored until one with the same seed is launched
(``engines/resumption.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from math import inf

from anyio import CancelScope, Event, Semaphore, create_task_group, current_time
from anyio.abc import TaskGroup
from msgspec.structs import asdict, replace

from streamrl.base.errors import RequestRefused
from streamrl.base.messages import EpisodeEnd, Generate, ReturnedCall
from streamrl.base.seeds import derive_seed
from streamrl.base.stage_messages import (
    LaunchTrajectory,
    RolloutStatistics,
    SampledSoFar,
    Scored,
    TrajectoryLost,
    TrajectoryPaused,
    TurnSoFar,
)
from streamrl.base.types import (
    Completion,
    EnvironmentResult,
    FinishReason,
    RewardFailure,
    Segment,
    Texts,
    TokenArray,
    Trajectory,
    TrajectoryId,
    Turn,
    token_array,
)
from streamrl.contracts import Journal, Sampler, Scorer, TakeOutcome
from streamrl.engines.resumption import (
    CancelledCompletions,
    accepted_prefix,
    join_completions,
    part_id,
    resumed_request,
    with_unverified_tokens,
    without_unverified_tokens,
)
from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.recipe.sections import Sampling

_NOTHING = token_array()


class EpisodeCancelled(Exception):
    """Raised in an episode when control has cancelled its trajectory: engines do not sample it any more."""


class _Turn:
    """One turn, whose completion is sampled in several parts where it is interrupted.

    ``request``: request for the next part.
    ``unverified_tokens``: tokens of an earlier attempt, which the engine verifies.
    ``appended``, ``after``, ``stop``: arguments of the episode's request for the turn: tokens that are put before it
        and not trained; number of the turn that it follows (None: the newest; -1: none, it follows the prompt); texts
        that end it.
    ``is_capped``: whether the episode's request had a lower limit of tokens than the run.
    ``is_dropped``: whether nobody waits for it any more.
    ``first_part``: number of the turn's first part among the parts of the trajectory, which the ids of requests have.
    ``completion``: the sampled tokens; its finish reason is abort until the turn is complete.
    ``own_seed_tokens``: number of tokens that were sampled with the turn's original seed.
    ``seconds``: time of the turn in the engines.
    ``outside_s``: time before the turn in which the episode sampled nothing."""

    def __init__(
        self,
        identity: TrajectoryId,
        request: Generate,
        unverified_tokens: TokenArray,
        sampled: SampledSoFar | None,
        first_part: int,
        appended: TokenArray,
        after: int | None,
        stop: Texts,
    ) -> None:
        self._identity = identity
        self._seed = request.seed
        self._first_part = first_part
        self.appended = appended
        self.after = after
        self.stop = stop
        self.request = request
        if unverified_tokens:
            self.request = with_unverified_tokens(request, unverified_tokens)
        self.unverified_tokens = unverified_tokens
        self.is_capped = False
        self.is_dropped = False
        self.own_seed_tokens = 0
        self.completion: Completion | None = None
        self.parts = 0
        self.seconds = 0.0
        self.outside_s = 0.0
        if sampled is not None:
            self.restore(sampled.completion, sampled.parts, sampled.seconds)

    @property
    def tokens(self) -> int:
        return 0 if self.completion is None else len(self.completion.token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason as the run sees it: a turn that its episode limited has ended by itself."""
        if self.completion is None:
            return FinishReason.ABORT
        reason = self.completion.finish_reason
        return FinishReason.STOP if self.is_capped and reason is FinishReason.LENGTH else reason

    @property
    def is_complete(self) -> bool:
        return self.finish_reason is not FinishReason.ABORT

    def add(self, part: Completion, seconds: float) -> None:
        """Add a part that the engine returned, and make the request for the next part, with another id and seed. The
        seed stays where the part has no tokens, as when the request was moved to another engine."""
        self.seconds += seconds
        if self.request.seed == self._seed:
            self.own_seed_tokens += len(part.token_ids)
        self._append(part, 1)

    def restore(self, completion: Completion, parts: int, seconds: float) -> None:
        """Restore the tokens that were sampled before the controller restarted."""
        self.seconds = seconds
        self._append(completion, parts)

    def _append(self, part: Completion, parts: int) -> None:
        self.completion = part if self.completion is None else join_completions(self.completion, part)
        self.parts += parts
        self.request = resumed_request(
            self.request,
            part,
            seed=derive_seed(self._seed, self.parts) if part.token_ids else self.request.seed,
            request_id=part_id(str(self._identity), self._first_part + self.parts),
        )


class OpenTrajectory:
    """A trajectory that is sampled: its turns, which its episode requests, and the orders of control for it. The tokens
    that are sampled and appended become the trajectory.

    ``order``: order that launched the trajectory.
    ``sample_turn``: coroutine that samples a turn until it is complete.
    ``note``: function that records a call of a tool that has returned.
    ``abort``: function that has the engine abort the turn of trajectories.
    ``unverified_tokens``: tokens of an earlier attempt at its first turn.
    ``take``: coroutine that gets its outcome, and each pause.
    ``segments``: complete turns, and the tokens between them.
    ``ends``: index in ``segments`` of each complete turn.
    ``requested_turns``: number of turns that the episode has requested; 0 again when it begins again.
    ``cancel_reason``: reason of the cancellation; empty: it is not cancelled.
    ``is_sampling``: whether a turn was requested and is not complete.
    ``has_left_engine``: whether this turn is paused and no request for it is open."""

    def __init__(
        self,
        order: LaunchTrajectory,
        request: Generate,
        unverified_tokens: TokenArray,
        take: TakeOutcome,
        sample_turn: Callable[[OpenTrajectory, _Turn], Awaitable[None]],
        note: Callable[[TrajectoryId, ReturnedCall], None],
        abort: Callable[[Collection[OpenTrajectory]], None],
    ) -> None:
        self.order = order
        self._sample_turn = sample_turn
        self.note = note
        self._abort = abort
        self.unverified_tokens = unverified_tokens
        self.take = take
        self.first_request = request
        self.turns: list[_Turn] = []
        self.segments: list[Segment] = []
        self.ends: list[int] = []
        self.requested_turns = 0
        self._dropped = Counter[str]()
        self._parts = 0
        self.cancel_reason = ""
        self.paused = False
        self.is_sampling = False
        self.has_left_engine = False
        self.outside_since = current_time()
        self.resumed = Event()
        self.scope = CancelScope()
        if order.episode_so_far is not None:
            for complete_turn in order.episode_so_far.turns:
                turn = self.next_turn(complete_turn.appended, complete_turn.after, stop=complete_turn.stop)
                turn.restore(complete_turn.completion, 1, complete_turn.seconds)
                turn.is_capped = complete_turn.is_capped
                self.add(turn)
        self.requested_turns = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that were sampled until now."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Number of tokens of its newest turn and of all that it follows."""
        if not self.turns:
            return 0
        newest = self.turns[-1]
        if newest.is_complete:
            return len(newest.request.token_ids) + newest.tokens
        return len(newest.request.token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the trajectory: ``length`` where a limit of the run cut a turn that no other one follows,
        else that of the newest turn."""
        turns = self.turns[: len(self.ends)]
        followed_turns = {number - 1 if turn.after is None else turn.after for number, turn in enumerate(turns)}
        reasons = [FinishReason.ABORT]
        reasons += [turn.finish_reason for number, turn in enumerate(turns) if number not in followed_turns]
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else reasons[-1]

    async def sample(self, appended: TokenArray = _NOTHING, *, after: int | None = None) -> Turn | None:
        """Sample a turn, as ``TurnSampler`` says: ``next_turn``, then ``complete``."""
        return await self.complete(self.next_turn(appended, after))

    async def complete(self, turn: _Turn) -> Turn | None:
        """Sample the turn that ``next_turn`` returned; None: it was dropped meanwhile. Raises ``EpisodeCancelled``, and
        ``RequestRefused`` where no engine serves it."""
        number = self.requested_turns - 1
        if len(self.ends) < len(self.turns) or turn.completion is None:
            await self._sample_turn(self, turn)
        if turn.is_dropped:
            return None
        completion = turn.completion  # of an episode that has begun again: the completion that the turn had before
        assert completion is not None
        return Turn(
            number=number,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            logprobs=completion.behavior_logprobs,
        )

    def begin_again(self) -> None:
        """Note that the episode runs from its start again. A request with the same tokens as before returns the same
        turn; from the first other request on, turns are sampled."""
        self.requested_turns = 0

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.resumed = Event()

    def resume(self) -> None:
        self.paused = False
        self.resumed.set()

    def cancel(self, reason: str) -> None:
        self.cancel_reason = self.cancel_reason or reason
        self.resumed.set()
        if not self.is_sampling:  # it is in its environment
            self.scope.cancel()

    def next_turn(
        self, appended: TokenArray, after: int | None, max_tokens: int = 0, stop: Texts = (), room: int = 0
    ) -> _Turn:
        """Begin a turn; arguments as in ``TurnSampler``. ``room``: limit of the turn's tokens by the recipe, besides
        that of any completion; 0: none. An episode that has begun again gets the turn that it had, if its request is
        the same. Raises ``ValueError`` for a turn that cannot be sampled."""
        order = self.order
        number = self.requested_turns
        if self.is_sampling:
            raise ValueError("an episode samples a turn while another one is sampled: await one after the other")
        if after is not None and not -1 <= after < number:
            raise ValueError(f"an episode samples after turn {after}, and has {number} turns")
        if number < len(self.turns):  # the episode has begun again
            earlier_turn = self.turns[number]
            if (earlier_turn.appended, earlier_turn.after, earlier_turn.stop) == (appended, after, stop):
                self.requested_turns += 1
                return earlier_turn
            self.drop_turns(number)
        follows_newest = after is None or after == number - 1
        if follows_newest and number and not appended:
            raise ValueError("an episode samples another turn, and has appended nothing to the one before")
        request = self.first_request
        if follows_newest and number:
            request = without_unverified_tokens(self.turns[-1].request)  # it ends with the newest turn's tokens
        elif not follows_newest:
            request = replace(request, token_ids=request.token_ids + self._tokens_until(after))
        if number:
            seed = derive_seed(order.seed, "turn", number)
            # prefix_length 0: the earlier turns are context, no part of this completion.
            request = replace(request, prefix_length=0, seed=seed)
        if not request.token_ids and not appended:
            raise ValueError("an episode samples from an empty prompt: append tokens to it")
        limit = min(filter(None, (self.first_request.max_tokens, room)))
        request = replace(
            request,
            request_id=part_id(str(order.id), self._parts),
            token_ids=request.token_ids + appended,
            max_tokens=min(max_tokens or limit, limit),
            stop=self.first_request.stop + stop,
        )
        follows: int | None = None
        if after is not None and not follows_newest:
            follows = -1 if after == -1 else self.ends[after]
        if appended:
            self.segments.append(Segment(token_ids=appended, trained=False, follows=follows))
            follows = None
        self.follows = follows
        unverified_tokens = _NOTHING
        sampled = None
        if number == 0 and not self._parts:
            unverified_tokens = self.unverified_tokens
            sampled = order.completion_so_far
        turn = _Turn(order.id, request, unverified_tokens, sampled, self._parts, appended, after, stop)
        turn.is_capped = 0 < max_tokens < limit
        turn.outside_s = current_time() - self.outside_since
        self.turns.append(turn)
        self.requested_turns += 1
        return turn

    def drop(self, number: int) -> None:
        """Drop turn ``number`` and all later ones, for which nobody waits. One that is being sampled is aborted."""
        if number < len(self.turns) and len(self.ends) < len(self.turns):
            self.turns[-1].is_dropped = True
            self._abort([self])
        elif number < len(self.turns):
            self.remove(number)

    def remove(self, number: int) -> None:
        """Remove and count turn ``number`` and all later ones, none of which is being sampled."""
        turns = self.turns[number:]
        self._dropped.update(abandoned_turns=len(turns), abandoned_tokens=sum(turn.tokens for turn in turns))
        self._parts += turns[-1].parts
        self.drop_turns(number)
        self.requested_turns = number

    def drop_turns(self, number: int) -> None:
        """Drop turn ``number`` and all later ones: a restarted episode requested another one."""
        start = [*self.ends, len(self.segments)][number]
        if self.turns[number].appended:
            start -= 1
        del self.turns[number:], self.ends[number:], self.segments[start:]

    def _tokens_until(self, after: int | None) -> TokenArray:
        """Tokens between the prompt and the end of turn ``after``."""
        tokens = token_array()
        index = -1 if after in (None, -1) else self.ends[after or 0]
        while index >= 0:
            segment = self.segments[index]
            tokens = segment.token_ids + tokens
            index = index - 1 if segment.follows is None else segment.follows
        return tokens

    def add(self, turn: _Turn) -> None:
        """Add a complete turn to the segments."""
        completion = turn.completion
        assert completion is not None
        self._parts += turn.parts
        self.ends.append(len(self.segments))
        self.segments.append(
            Segment(
                token_ids=completion.token_ids,
                trained=True,
                behavior_logprobs=completion.behavior_logprobs,
                version_spans=completion.version_spans,
                follows=self.follows,
                routed=completion.routed,
                kept_sets=completion.kept_sets,
            )
        )
        self.outside_since = current_time()

    def with_turns(self, result: EnvironmentResult) -> EnvironmentResult:
        """Return ``result`` with the figures of the turns."""
        turns = [
            (len(turn.appended), round(turn.outside_s, 4), turn.tokens, round(turn.seconds, 4)) for turn in self.turns
        ]
        last_s = round(current_time() - self.outside_since, 4)
        return replace(result, turns=(*turns, (0, last_s, 0, 0.0)), notes=result.notes | self._dropped)


Episode = Callable[[OpenTrajectory], Awaitable[EpisodeEnd | None]]
"""Makes a trajectory: it samples the turns, and returns when the trajectory is complete."""


async def one_completion(trajectory: OpenTrajectory) -> None:
    """Sample one completion: the episode of a run without an environment."""
    await trajectory.sample()


def completion_or(episode: Episode) -> Episode:
    """Return an episode that samples one completion of a prompt with tokens, and runs ``episode`` for a prompt that its
    environment writes."""

    async def either(trajectory: OpenTrajectory) -> EpisodeEnd | None:
        if trajectory.order.prompt.token_ids:
            await one_completion(trajectory)
            return None
        return await episode(trajectory)

    return either


class Episodes:
    """Runs ``episode`` for each trajectory on ``engine`` (an engine or a pool); ``journal`` records the trajectory, and
    ``scorer`` scores it.

    ``verifies_deferred``: whether tokens of cancelled trajectories are verified when their seed is launched again.
    ``one_at_a_time``: whether the engine never has two requests at once.
    ``capacity``: number of requests that count as a full engine.
    ``on_end``: function that is called with the id of each trajectory once its sampling has ended."""

    def __init__(
        self,
        engine: Sampler,
        sampling: Sampling,
        scorer: Scorer,
        journal: Journal,
        *,
        episode: Episode = one_completion,
        verifies_deferred: bool = False,
        one_at_a_time: bool = False,
        capacity: float = inf,
        on_end: Callable[[str], object] = lambda trajectory: None,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._journal = journal
        self._episode = episode
        self._capacity = capacity
        self._on_end = on_end
        self._has_environment = episode is not one_completion
        self._engine_lock = Semaphore(1) if one_at_a_time else nullcontext()
        self._cancelled_completions = CancelledCompletions() if verifies_deferred else None
        self._sampling = asdict(sampling)
        self._open = dict[TrajectoryId, OpenTrajectory]()
        self._sampling_now = 0
        self._in_turns = 0  # with paused ones, which ``_sampling_now`` leaves out
        self._engines_paused = False
        self._launched = 0
        self._generated_tokens = 0
        self._verified_tokens = 0
        self._accepted_tokens = 0
        self._busy_seconds = 0.0
        self._working_seconds = 0.0
        self._environment_seconds = 0.0
        self._counted_at = 0.0
        self._tasks: TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that runs launched trajectories. It ends when every trajectory has its outcome. Trajectories
        that are paused at its end are lost."""
        self._counted_at = current_time()
        async with create_task_group() as self._tasks:
            yield
            for trajectory in self._open.values():
                if trajectory.paused:
                    trajectory.cancel("paused when the run ended")

    def launch(self, order: LaunchTrajectory, take: TakeOutcome) -> None:
        """Begin a trajectory. ``take``: coroutine that gets its outcome, and each pause before."""
        self._count()
        self._launched += 1
        unverified_tokens = self._unverified_tokens_of(order)
        trajectory = OpenTrajectory(
            order, self._request(order), unverified_tokens, take, self._sample, self._journal.on_call, self._abort
        )
        self._open[order.id] = trajectory
        self._tasks.start_soon(self._live, trajectory)

    def pause(self, ids: Collection[TrajectoryId]) -> None:
        """Pause trajectories: they stop, and keep their tokens until they are resumed or cancelled."""
        trajectories = self._still_open(ids)
        for trajectory in trajectories:
            trajectory.pause()
        self._abort(trajectories)

    def resume(self, ids: Collection[TrajectoryId]) -> None:
        """Resume paused trajectories from their tokens. Other ids are ignored."""
        for trajectory in self._still_open(ids):
            trajectory.resume()

    def cancel(self, ids: Collection[TrajectoryId]) -> None:
        """Cancel trajectories: the outcome of each is ``TrajectoryLost``."""
        trajectories = self._still_open(ids)
        for trajectory in trajectories:
            trajectory.cancel("cancelled")
        if self._cancelled_completions is not None:
            # Trajectories that were sampled to their end are kept, too: their groups are cancelled.
            self._cancelled_completions.cancel_complete(ids)
        self._abort(trajectories)

    def statistics(self) -> RolloutStatistics:
        """Counters since the start. Trajectories that are paused, or in their environment, do not count as running."""
        self._count()
        return RolloutStatistics(
            launched=self._launched,
            finished=self._launched - len(self._open),
            running=self._sampling_now,
            busy_seconds=self._busy_seconds,
            environment_seconds=self._environment_seconds,
            generated_tokens=self._generated_tokens,
            verified_tokens=self._verified_tokens,
            accepted_tokens=self._accepted_tokens,
            working_seconds=self._working_seconds,
            environment=len(self._open) - self._in_turns if self._has_environment else 0,
        )

    def contexts(self) -> dict[int, int]:
        """Tokens of the contexts of open trajectories that train, by group id. Siblings share their prompt; tokens that
        engines sample now are not known."""
        tokens: dict[int, int] = {}
        for identity, trajectory in self._open.items():
            if trajectory.order.evaluation:
                continue
            prompt_tokens = len(trajectory.order.prompt.token_ids)
            tokens.setdefault(identity.group_id, prompt_tokens)
            tokens[identity.group_id] += max(trajectory.context_tokens - prompt_tokens, 0)
        return tokens

    def engines_paused(self, paused: bool) -> None:
        """Note that all engines are paused, or serve again. Requests add no busy time while engines are paused."""
        self._count()
        self._engines_paused = paused

    def _still_open(self, ids: Collection[TrajectoryId]) -> list[OpenTrajectory]:
        return [self._open[identity] for identity in ids if identity in self._open]

    def _abort(self, trajectories: Collection[OpenTrajectory]) -> None:
        """Let the engine abort the requests of trajectories, without waiting for it: control has more to order."""
        in_engine = [
            trajectory for trajectory in trajectories if trajectory.is_sampling and not trajectory.has_left_engine
        ]
        if in_engine:
            request_ids = [trajectory.turns[-1].request.request_id for trajectory in in_engine]
            self._tasks.start_soon(self._engine.abort, request_ids)

    async def _live(self, trajectory: OpenTrajectory) -> None:
        """Sample one trajectory, record it, and score it."""
        order = trajectory.order
        refusal = ""
        end = None
        if order.sampled_trajectory is None:
            try:
                with trajectory.scope:
                    end = await self._episode(trajectory)
            except RequestRefused as error:
                refusal = str(error)
            except EpisodeCancelled:
                pass  # ``cancel_reason`` has the reason, also where the episode itself catches the error
        self._count()
        del self._open[order.id]
        self._on_end(str(order.id))
        self._store_tokens(trajectory)
        sampled = order.sampled_trajectory
        if sampled is None:
            end = end or EpisodeEnd()
            sampled = self._complete(trajectory, end)
        is_empty = not sampled.segments and end is not None and end.kind is None
        if trajectory.cancel_reason or refusal or is_empty:
            lost = TrajectoryLost(
                id=order.id,
                cancelled=bool(trajectory.cancel_reason),
                reason=refusal or trajectory.cancel_reason or "its episode sampled nothing",
                tokens=trajectory.tokens,
            )
            await trajectory.take(lost)
            await self._scorer.lost(order.id, order.group_size)  # rewards of its group do not wait for it
        elif end is not None and end.kind is not None:
            # ``end.policy``: what control does about the failure, such as "drop_sample".
            failure = RewardFailure(
                trajectory=sampled, function=ENVIRONMENT_REWARD, kind=end.kind, message=end.message, policy=end.policy
            )
            await trajectory.take(Scored(outcome=failure))
            await self._scorer.lost(order.id, order.group_size)
        else:
            await self._journal.on_sampled(sampled)
            await trajectory.take(await self._scorer.score(sampled, order.group_size))

    def _complete(self, trajectory: OpenTrajectory, end: EpisodeEnd) -> Trajectory:
        """Make the sampled trajectory."""
        order = trajectory.order
        segments = trajectory.segments
        if segments and not segments[-1].trained:
            segments.pop()  # nothing was sampled after it
        return Trajectory(
            id=order.id,
            prompt=order.prompt,
            segments=tuple(segments),
            finish_reason=end.finish or trajectory.finish_reason,
            rollout_seconds=sum(turn.seconds for turn in trajectory.turns),
            evaluation=order.evaluation,
            environment=end.result and trajectory.with_turns(end.result),
        )

    async def _sample(self, trajectory: OpenTrajectory, turn: _Turn) -> None:
        """Sample ``turn`` until it is complete or cancelled. A turn that an engine or a pause interrupts is
        continued."""
        trajectory.is_sampling = True
        self._count_sampling(1)
        self._in_turns += 1
        try:
            while not (trajectory.cancel_reason or turn.is_dropped or turn.is_complete):
                if trajectory.paused:
                    await self._until_resumed(trajectory, turn)
                    continue
                async with self._engine_lock:
                    # It may have waited for the engine.
                    if trajectory.cancel_reason or trajectory.paused or turn.is_dropped:
                        continue
                    started = current_time()
                    part = await self._engine.generate(turn.request)
                self._generated_tokens += len(part.token_ids) - self._accepted(turn, part)
                turn.add(part, current_time() - started)
        finally:
            self._count_sampling(-1)
            self._in_turns -= 1
            trajectory.is_sampling = False
        if turn.is_dropped and not trajectory.cancel_reason:
            trajectory.remove(len(trajectory.ends))
            return
        if trajectory.cancel_reason or turn.completion is None:
            raise EpisodeCancelled(trajectory.cancel_reason)
        trajectory.add(turn)
        if self._has_environment and not trajectory.order.evaluation:
            complete_turn = TurnSoFar(
                appended=turn.appended,
                after=turn.after,
                completion=turn.completion,
                seconds=turn.seconds,
                stop=turn.stop,
                is_capped=turn.is_capped,
            )
            await self._journal.on_turn(trajectory.order.id, len(trajectory.ends) - 1, complete_turn)

    async def _until_resumed(self, trajectory: OpenTrajectory, turn: _Turn) -> None:
        identity = trajectory.order.id
        resumed = trajectory.resumed
        # With an environment the journal has only complete turns: a restarted controller samples a paused turn again.
        if turn.completion is not None and not self._has_environment:
            sampled = SampledSoFar(completion=turn.completion, parts=turn.parts, seconds=turn.seconds)
            await self._journal.on_paused(identity, sampled)
        await trajectory.take(TrajectoryPaused(id=identity, tokens=trajectory.tokens))
        trajectory.has_left_engine = True
        self._count_sampling(-1)
        await resumed.wait()
        self._count_sampling(1)
        trajectory.has_left_engine = False

    def _count_sampling(self, change: int) -> None:
        """Count the trajectories of which a turn is sampled."""
        self._count()
        self._sampling_now += change

    def _unverified_tokens_of(self, order: LaunchTrajectory) -> TokenArray:
        """Return the tokens that a cancelled trajectory sampled with the seed of ``order``; empty where deferred
        completions are not verified."""
        if self._cancelled_completions is None or order.evaluation:
            return token_array()
        self._cancelled_completions.note_open(len(self._open) + 1)  # bounds the number of kept completions
        return self._cancelled_completions.take(order.seed) or token_array()

    def _accepted(self, turn: _Turn, part: Completion) -> int:
        """Count the unverified tokens that ``part`` begins with: the engine did not have to decode them."""
        if not turn.request.unverified_tokens or not part.token_ids:
            return 0
        accepted = accepted_prefix(turn.unverified_tokens, part.token_ids)
        self._verified_tokens += len(turn.unverified_tokens)
        self._accepted_tokens += accepted
        return accepted

    def _store_tokens(self, trajectory: OpenTrajectory) -> None:
        """Store the tokens of a trajectory that has ended. It may be launched again, if it was cancelled or its group
        is still deferred."""
        order = trajectory.order
        if self._cancelled_completions is None or order.evaluation or len(trajectory.turns) != 1:
            return
        turn = trajectory.turns[0]
        if turn.completion is None:
            return
        tokens = turn.completion.token_ids[: turn.own_seed_tokens]
        if turn.is_complete and len(tokens) == turn.tokens:
            tokens = tokens[:-1]  # the engine has to sample the end again
        if trajectory.cancel_reason:
            self._cancelled_completions.add_cancelled(order.seed, tokens)
        else:
            self._cancelled_completions.add_complete(order.id, order.seed, tokens)

    def _request(self, order: LaunchTrajectory) -> Generate:
        sampling = self._sampling | order.sampling
        sampling["max_tokens"] = order.prompt.token_limit(sampling["max_tokens"])
        return Generate(
            request_id=part_id(str(order.id), 0),
            token_ids=order.prompt.token_ids,
            seed=order.seed,
            # A later turn goes before the first turns of later launches: groups end in the order of their launches.
            priority=self._launched if self._has_environment else 0,
            routed_tokens=None if order.evaluation else 0,  # 0: with the experts of all tokens; None: without experts
            **sampling,
        )

    def _count(self) -> None:
        now = current_time()
        if not self._engines_paused and (running := self._sampling_now):
            self._busy_seconds += min(running, self._capacity) * (now - self._counted_at)
            self._working_seconds += now - self._counted_at
        if self._has_environment:
            # Requests that the engines could serve besides, if trajectories were not in their environment.
            free_capacity = self._capacity - min(self._sampling_now, self._capacity)
            in_environment = min(len(self._open) - self._in_turns, free_capacity)
            self._environment_seconds += in_environment * (now - self._counted_at)
        self._counted_at = now

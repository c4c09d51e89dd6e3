"""Trajectories under way: each is one coroutine from its launch to its outcome. An episode samples it, then it is
recorded and scored; one whose episode failed is a failure as a failed reward is.

A request that the engine cut (a pause that aborts, a drained engine) goes on from its tokens with a seed of its own. A
trajectory that control paused waits, outside of the engine, until it is resumed; only one that was cancelled, that the
engine refused, or whose episode sampled nothing ends as ``TrajectoryLost``. Where deferred completions are verified,
the tokens of what was cancelled are kept until the same draw is launched again (``engines/resumption.py``)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import structs

from streamrl.base.errors import RequestRefused
from streamrl.base.messages import Generate, ReturnedCall
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
    RewardFailureKind,
    Segment,
    TokenArray,
    Trajectory,
    TrajectoryId,
    token_array,
)
from streamrl.contracts import Journal, Sampler, Scorer, TakeOutcome
from streamrl.engines.resumption import (
    CancelledCompletions,
    accepted_prefix,
    join_completions,
    part_id,
    resumed_request,
    with_kept,
    without_kept,
)
from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.recipe.rewards import FailurePolicy
from streamrl.recipe.sections import Sampling

_NOTHING = token_array()


class EpisodeCancelled(Exception):
    """Control has cancelled the trajectory: the engines sample nothing of it any more."""


class _Turn:
    """One completion, sampled in as many parts as it is cut into. ``kept``: tokens of an earlier attempt that are
    verified; ``own_seed_tokens``: tokens that were sampled with its own seed; ``first_part``: its place in the ids of
    the trajectory's requests; ``asked``: what stands before it and the turn that it goes on from."""

    def __init__(
        self,
        identity: TrajectoryId,
        request: Generate,
        kept: TokenArray,
        done: SampledSoFar | None = None,
        first_part: int = 0,
        asked: tuple[TokenArray, int | None] = (_NOTHING, None),
    ) -> None:
        self._identity = identity
        self._seed = request.seed
        self._first_part = first_part
        self.asked = asked
        self.request = request if not kept else with_kept(request, kept)
        self.kept = kept
        self.own_seed_tokens = 0
        self.done: Completion | None = None
        self.parts = 0
        self.seconds = 0.0
        self.outside_s = 0.0
        if done is not None:
            self.restore(done.completion, done.parts, done.seconds)

    @property
    def tokens(self) -> int:
        return 0 if self.done is None else len(self.done.token_ids)

    @property
    def whole(self) -> bool:
        return self.done is not None and self.done.finish_reason is not FinishReason.ABORT

    def add(self, piece: Completion, seconds: float) -> None:
        """Take what the engine returned, and ask for the rest of it under an id and a seed of its own. A request that
        was moved before it sampled anything keeps its seed."""
        self.seconds += seconds
        if self.request.seed == self._seed:
            self.own_seed_tokens += len(piece.token_ids)
        self._take(piece, 1)

    def restore(self, completion: Completion, parts: int, seconds: float) -> None:
        """Restore what was sampled before the controller restarted."""
        self.seconds = seconds
        self._take(completion, parts)

    def _take(self, piece: Completion, parts: int) -> None:
        self.done = piece if self.done is None else join_completions(self.done, piece)
        self.parts += parts
        self.request = resumed_request(
            self.request,
            piece,
            seed=derive_seed(self._seed, self.parts) if piece.token_ids else self.request.seed,
            request_id=part_id(str(self._identity), self._first_part + self.parts),
        )


class _OpenTrajectory:
    """A trajectory that is sampled: what it has, and what control wants of it. ``kept``: tokens of an earlier attempt
    at its first turn; ``segments``: turns that are whole, and what stands between them; ``ends``: the place of each
    turn in them; ``asked_for``: turns that the episode, which may have begun again, has asked for. ``samples``: a turn
    was asked for and is not whole yet; ``waits``: that turn is paused and has left the engine."""

    def __init__(self, order: LaunchTrajectory, request: Generate, kept: TokenArray, take: TakeOutcome) -> None:
        self.order = order
        self.kept = kept
        self.take = take
        self.first_request = request
        self.turns: list[_Turn] = []
        self.segments: list[Segment] = []
        self.ends: list[int] = []
        self.asked_for = 0
        self._parts = 0
        self.finish: FinishReason | None = None
        self.cancelled = ""
        self.paused = False
        self.samples = False
        self.waits = False
        self.outside_since = anyio.current_time()
        self.resumed = anyio.Event()
        self.scope = anyio.CancelScope()
        for known in order.so_far.turns if order.so_far else ():
            turn = self.next_turn(known.appended, known.after, 0)
            turn.restore(known.completion, 1, known.seconds)
            self.add(turn)
        self.asked_for = 0

    @property
    def tokens(self) -> int:
        """Tokens that were sampled so far."""
        return sum(turn.tokens for turn in self.turns)

    def begin_again(self) -> None:
        self.asked_for = 0

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.resumed = anyio.Event()

    def resume(self) -> None:
        self.paused = False
        self.resumed.set()

    def cancel(self, reason: str) -> None:
        self.cancelled = self.cancelled or reason
        self.resumed.set()
        if not self.samples:  # it is in its environment
            self.scope.cancel()

    def next_turn(self, appended: TokenArray, after: int | None, most_tokens: int) -> _Turn:
        """Begin a turn after ``appended``. Raises ``ValueError`` for one that cannot be sampled."""
        order = self.order
        number = self.asked_for
        if self.samples:
            raise ValueError("an episode samples a turn while another one is sampled: await one after the other")
        if after is not None and not -1 <= after < number:
            raise ValueError(f"an episode samples after turn {after}, and has {number} turns")
        if number < len(self.turns):  # of an episode that has begun again
            if self.turns[number].asked == (appended, after):
                self.asked_for += 1
                return self.turns[number]
            self.drop_turns(number)
        newest = after is None or after == number - 1
        if newest and number and not appended:
            raise ValueError("an episode samples another turn, and has appended nothing to the one before")
        request = self.first_request
        if newest and number:
            request = without_kept(self.turns[-1].request)  # with all that was sampled
        elif not newest:
            request = structs.replace(request, token_ids=request.token_ids + self._context(after))
        if number:
            seed = derive_seed(order.seed, "turn", number)
            request = structs.replace(request, prefix_length=0, seed=seed)
        if not request.token_ids and not appended:
            raise ValueError("an episode samples from an empty prompt: append tokens to it")
        most = min(most_tokens or self.first_request.max_tokens, self.first_request.max_tokens)
        identity = part_id(str(order.id), self._parts)
        request = structs.replace(request, request_id=identity, token_ids=request.token_ids + appended, max_tokens=most)
        follows = None if newest else -1 if after == -1 else self.ends[after or 0]
        if appended:
            self.segments.append(Segment(token_ids=appended, trained=False, follows=follows))
            follows = None
        self.follows = follows
        first = number == 0 and not self._parts
        kept, done = (self.kept, order.done) if first else (_NOTHING, None)
        turn = _Turn(order.id, request, kept, done, first_part=self._parts, asked=(appended, after))
        turn.outside_s = anyio.current_time() - self.outside_since
        self.turns.append(turn)
        self.asked_for += 1
        return turn

    def drop_turns(self, number: int) -> None:
        """Drop turn ``number`` and all later ones: a restarted episode requested another one, or ended before."""
        start = self.ends[number] - bool(self.turns[number].asked[0])
        del self.turns[number:], self.ends[number:], self.segments[start:]

    def _context(self, after: int | None) -> TokenArray:
        """Tokens between the prompt and the end of turn ``after``."""
        tokens = token_array()
        place = -1 if after in (None, -1) else self.ends[after or 0]
        while place >= 0:
            segment = self.segments[place]
            tokens = segment.token_ids + tokens
            place = place - 1 if segment.follows is None else segment.follows
        return tokens

    def add(self, turn: _Turn) -> None:
        """Keep a turn that is whole."""
        done = turn.done
        assert done is not None
        self._parts += turn.parts
        self.ends.append(len(self.segments))
        self.segments.append(
            Segment(
                token_ids=done.token_ids,
                trained=True,
                behavior_logprobs=done.behavior_logprobs,
                version_spans=done.version_spans,
                follows=self.follows,
                routed=done.routed,
            )
        )
        self.finish = done.finish_reason
        self.outside_since = anyio.current_time()

    def result(self, ended: EnvironmentResult) -> EnvironmentResult:
        """Return ``ended`` with the turns."""
        turns = [(len(one.asked[0]), round(one.outside_s, 4), one.tokens, round(one.seconds, 4)) for one in self.turns]
        last_s = round(anyio.current_time() - self.outside_since, 4)
        return structs.replace(ended, turns=(*turns, (0, last_s, 0, 0.0)))


class EpisodeEnd(msgspec.Struct, frozen=True):
    """The end of an episode. ``result``: of its environment, where there is one; ``kind``: it failed, and ``message``
    says why; ``finish``: the finish reason of the trajectory, where that is not the one of its last turn; ``turns``:
    that the episode has taken (None: all): others are not trained; ``policy``: of the recipe for a failure."""

    result: EnvironmentResult | None = None
    kind: RewardFailureKind | None = None
    message: str = ""
    finish: FinishReason | None = None
    turns: int | None = None
    policy: FailurePolicy = FailurePolicy.DROP_SAMPLE

    def failure(self, trajectory: Trajectory) -> RewardFailure | None:
        """Return the failed reward of ``trajectory``; None: the episode has not failed."""
        if self.kind is None:
            return None
        return RewardFailure(
            trajectory=trajectory, function=ENVIRONMENT_REWARD, kind=self.kind, message=self.message, policy=self.policy
        )


class SampleTurns(Protocol):
    """Access of an episode to the policy."""

    async def __call__(
        self, appended: TokenArray = ..., *, after: int | None = None, most_tokens: int = 0
    ) -> Completion:
        """Sample a turn after ``appended``, token ids that are not trained. ``after``: number of the turn that it goes
        on from (None: the newest; -1: the prompt); ``most_tokens``: of the turn (0: of the recipe). Asks again for what
        an engine aborted. Raises ``EpisodeCancelled``, ``RequestRefused`` where no engine serves it, and ``ValueError``
        for a turn that cannot be."""
        ...


class EpisodeModel:
    """The model of one episode: ``order``, its launch, and ``sample``. What is sampled and appended becomes the
    trajectory. ``begin_again``: is called before the episode is run from its start again: a turn that it asks for with
    the same tokens as before is answered as before; from the first other one on, turns are sampled. ``note``: records a
    call of a tool that has returned. ``paused``: whether control has paused the trajectory."""

    def __init__(
        self,
        order: LaunchTrajectory,
        sample: SampleTurns,
        trajectory: _OpenTrajectory,
        note: Callable[[TrajectoryId, ReturnedCall], None],
    ) -> None:
        self.order = order
        self.sample = sample
        self.begin_again = trajectory.begin_again
        self.note = note
        self.paused: Callable[[], bool] = lambda: trajectory.paused


Episode = Callable[[EpisodeModel], Awaitable[EpisodeEnd | None]]
"""How a trajectory comes about: samples with the model that it is given, and returns when the trajectory is whole."""


async def one_completion(model: EpisodeModel) -> None:
    """The episode of a run without an environment: a prompt and its completion."""
    await model.sample()


class Episodes:
    """Runs ``episode`` for each trajectory on ``engine`` (one or a pool), and has ``journal`` record and ``scorer``
    score what it sampled. ``one_at_a_time``: the engine never has two requests of it; ``capacity``: requests that count
    as a full engine; ``ended`` is called with the id of each trajectory of which nothing further is sampled."""

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
        capacity: float = math.inf,
        ended: Callable[[str], object] = lambda trajectory: None,
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._journal = journal
        self._episode = episode
        self._capacity = capacity
        self._ended = ended
        self._has_environment = episode is not one_completion
        self._alone = anyio.Semaphore(1) if one_at_a_time else nullcontext()
        self._kept = CancelledCompletions() if verifies_deferred else None
        self._sampling = structs.asdict(sampling)
        self._open = dict[TrajectoryId, _OpenTrajectory]()
        self._sampling_now = 0
        self._in_turns = 0
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
        """Run what is launched in the block, which ends when every trajectory has its outcome. What is paused at its
        end is lost."""
        self._counted_at = anyio.current_time()
        async with anyio.create_task_group() as self._tasks:
            yield
            for trajectory in self._open.values():
                if trajectory.paused:
                    trajectory.cancel("paused when the run ended")

    def launch(self, order: LaunchTrajectory, take: TakeOutcome) -> None:
        """Begin a trajectory; ``take`` is called with its outcome, and with each pause before."""
        self._count()
        self._launched += 1
        self._open[order.id] = trajectory = _OpenTrajectory(order, self._request(order), self._kept_of(order), take)
        self._tasks.start_soon(self._live, trajectory)

    def pause(self, ids: Collection[TrajectoryId]) -> None:
        """Stop trajectories that are sampled, and keep their tokens until they are resumed or cancelled."""
        for trajectory in (stopped := self._still_open(ids)):
            trajectory.pause()
        self._abort(stopped)

    def resume(self, ids: Collection[TrajectoryId]) -> None:
        """Go on with paused trajectories, from their tokens. Other ids are ignored."""
        for trajectory in self._still_open(ids):
            trajectory.resume()

    def cancel(self, ids: Collection[TrajectoryId]) -> None:
        """Stop trajectories that are sampled: the outcome of each is ``TrajectoryLost``."""
        for trajectory in (stopped := self._still_open(ids)):
            trajectory.cancel("cancelled")
        if self._kept is not None:
            self._kept.cancelled(ids)
        self._abort(stopped)

    def statistics(self) -> RolloutStatistics:
        """Counters since the start. Trajectories that are paused, or in their environment, do not run."""
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

    def engines_paused(self, paused: bool) -> None:
        """Note that all engines were paused, or that it has ended: requests submitted meanwhile keep no engine busy."""
        self._count()
        self._engines_paused = paused

    def _still_open(self, ids: Collection[TrajectoryId]) -> list[_OpenTrajectory]:
        return [self._open[identity] for identity in ids if identity in self._open]

    def _abort(self, stopped: Collection[_OpenTrajectory]) -> None:
        """Have the engine stop what it samples of them, without waiting for it: control has more to order."""
        if running := [one.turns[-1].request.request_id for one in stopped if one.samples and not one.waits]:
            self._tasks.start_soon(self._engine.abort, running)

    async def _live(self, trajectory: _OpenTrajectory) -> None:
        """The life of one trajectory: sampled, recorded, scored."""
        order = trajectory.order
        refused = ""
        end = None
        if order.sampled is None:
            try:
                with trajectory.scope:
                    sample = partial(self._sample, trajectory)
                    note = self._journal.returned
                    end = await self._episode(EpisodeModel(order, sample, trajectory, note))
            except RequestRefused as error:
                refused = str(error)
            except EpisodeCancelled:
                pass  # ``cancelled`` says why, also where an episode catches it
        self._count()
        del self._open[order.id]
        self._ended(str(order.id))
        self._keep(trajectory)
        sampled = order.sampled or self._whole(trajectory, end := end or EpisodeEnd())
        if trajectory.cancelled or refused or (not sampled.segments and end is not None and end.kind is None):
            reason = refused or trajectory.cancelled or "its episode sampled nothing"
            tokens = trajectory.tokens
            lost = TrajectoryLost(id=order.id, cancelled=bool(trajectory.cancelled), reason=reason, tokens=tokens)
            await trajectory.take(lost)
            await self._scorer.lost(order.id, order.group_size)
        elif end is not None and (failure := end.failure(sampled)) is not None:
            await trajectory.take(Scored(outcome=failure))
            await self._scorer.lost(order.id, order.group_size)
        else:
            await self._journal.sampled(sampled)
            await trajectory.take(await self._scorer.score(sampled, order.group_size))

    def _whole(self, trajectory: _OpenTrajectory, end: EpisodeEnd) -> Trajectory:
        if end.turns is not None and end.turns < len(trajectory.ends):
            trajectory.drop_turns(end.turns)
        order = trajectory.order
        segments = trajectory.segments
        if segments and not segments[-1].trained:
            segments.pop()  # nothing was sampled after it
        return Trajectory(
            id=order.id,
            prompt=order.prompt,
            segments=tuple(segments),
            finish_reason=end.finish or trajectory.finish or FinishReason.ABORT,
            rollout_seconds=sum(turn.seconds for turn in trajectory.turns),
            evaluation=order.evaluation,
            environment=end.result and trajectory.result(end.result),
        )

    async def _sample(
        self,
        trajectory: _OpenTrajectory,
        appended: TokenArray = _NOTHING,
        *,
        after: int | None = None,
        most_tokens: int = 0,
    ) -> Completion:
        """Sample until the turn ends by itself or was cancelled, going on after every other cut."""
        turn = trajectory.next_turn(appended, after, most_tokens)
        if len(trajectory.ends) == len(trajectory.turns) and turn.done is not None:
            return turn.done  # of an episode that has begun again
        trajectory.samples = True
        self._changed_sampling(1)
        self._in_turns += 1
        try:
            while not trajectory.cancelled and not turn.whole:
                if trajectory.paused:
                    await self._until_resumed(trajectory, turn)
                    continue
                async with self._alone:
                    if trajectory.cancelled or trajectory.paused:  # while it waited for its turn
                        continue
                    started = anyio.current_time()
                    piece = await self._engine.generate(turn.request)
                self._generated_tokens += len(piece.token_ids) - self._accepted(turn, piece)
                turn.add(piece, anyio.current_time() - started)
        finally:
            self._changed_sampling(-1)
            self._in_turns -= 1
            trajectory.samples = False
        if trajectory.cancelled or turn.done is None:
            raise EpisodeCancelled(trajectory.cancelled)
        trajectory.add(turn)
        if self._has_environment and not trajectory.order.evaluation:
            so_far = TurnSoFar(appended=appended, after=after, completion=turn.done, seconds=turn.seconds)
            await self._journal.turn(trajectory.order.id, len(trajectory.ends) - 1, so_far)
        return turn.done

    async def _until_resumed(self, trajectory: _OpenTrajectory, turn: _Turn) -> None:
        identity = trajectory.order.id
        resumed = trajectory.resumed
        # With an environment the journal has each turn that is whole; a later life samples the paused one anew.
        if turn.done is not None and not self._has_environment:
            done = SampledSoFar(completion=turn.done, parts=turn.parts, seconds=turn.seconds)
            await self._journal.paused(identity, done)
        await trajectory.take(TrajectoryPaused(id=identity, tokens=trajectory.tokens))
        trajectory.waits = True
        self._changed_sampling(-1)
        await resumed.wait()
        self._changed_sampling(1)
        trajectory.waits = False

    def _changed_sampling(self, by: int) -> None:
        """Count trajectories of which a turn is sampled."""
        self._count()
        self._sampling_now += by

    def _kept_of(self, order: LaunchTrajectory) -> TokenArray:
        """Return what was sampled of this draw before it was cancelled; empty where deferred completions are not
        verified."""
        if self._kept is None or order.evaluation:
            return token_array()
        self._kept.open(len(self._open) + 1)
        return self._kept.take(order.seed) or token_array()

    def _accepted(self, turn: _Turn, piece: Completion) -> int:
        """Count the kept tokens that ``piece`` begins with: those need not be decoded."""
        if not turn.request.kept or not piece.token_ids:
            return 0
        accepted = accepted_prefix(turn.kept, piece.token_ids)
        self._verified_tokens += len(turn.kept)
        self._accepted_tokens += accepted
        return accepted

    def _keep(self, trajectory: _OpenTrajectory) -> None:
        """Keep the tokens of a trajectory that ended. It may be launched again, if it was cancelled or its group still
        loses."""
        order = trajectory.order
        if self._kept is None or order.evaluation or len(trajectory.turns) != 1:
            return
        turn = trajectory.turns[0]
        if turn.done is None:
            return
        tokens = turn.done.token_ids[: turn.own_seed_tokens]
        if turn.whole and len(tokens) == turn.tokens:
            tokens = tokens[:-1]  # the engine is to come to its end by itself
        if trajectory.cancelled:
            self._kept.lost(order.seed, tokens)
        else:
            self._kept.ended(order.id, order.seed, tokens)

    def _request(self, order: LaunchTrajectory) -> Generate:
        return Generate(
            request_id=part_id(str(order.id), 0),
            token_ids=order.prompt.token_ids,
            seed=order.seed,
            # A later turn before the first turns of what was launched after it: groups end in the order of launches.
            priority=self._launched if self._has_environment else 0,
            routed=None if order.evaluation else 0,
            **self._sampling | order.sampling,
        )

    def _count(self) -> None:
        now = anyio.current_time()
        if not self._engines_paused and (running := self._sampling_now):
            self._busy_seconds += min(running, self._capacity) * (now - self._counted_at)
            self._working_seconds += now - self._counted_at
        away = min(len(self._open) - self._in_turns, self._capacity - min(self._sampling_now, self._capacity))
        self._environment_seconds += away * (now - self._counted_at) * self._has_environment
        self._counted_at = now

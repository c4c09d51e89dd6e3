"""Trajectories under way: each is one coroutine from its launch to its outcome. An episode samples it, then it is
recorded and scored.

A request that the engine cut (a pause that aborts, a drained engine) goes on from its tokens with a seed of its own. A
trajectory that control paused waits, outside of the engine, until it is resumed; only one that was cancelled, that the
engine refused, or whose episode sampled nothing ends as ``TrajectoryLost``. Where deferred completions are verified,
the tokens of what was cancelled are kept until the same draw is launched again (``engines/resumption.py``)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, nullcontext
from functools import partial

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from streamrl.base.errors import RequestRefused
from streamrl.base.messages import Generate
from streamrl.base.seeds import derive_seed
from streamrl.base.stage_messages import (
    LaunchTrajectory,
    RolloutStatistics,
    SampledSoFar,
    TrajectoryLost,
    TrajectoryPaused,
)
from streamrl.base.types import Completion, FinishReason, Segment, TokenArray, Trajectory, TrajectoryId, token_array
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
from streamrl.recipe.sections import Sampling


class EpisodeCancelled(Exception):
    """Control has cancelled the trajectory: the engines sample nothing of it any more."""


class _Turn:
    """One completion, sampled in as many parts as it is cut into. ``kept``: tokens of an earlier attempt that are
    verified; ``own_seed_tokens``: tokens that were sampled with its own seed; ``first_part``: its place in the ids of
    the trajectory's requests."""

    def __init__(
        self,
        identity: TrajectoryId,
        request: Generate,
        kept: TokenArray,
        done: SampledSoFar | None = None,
        first_part: int = 0,
    ) -> None:
        self._identity, self._seed, self._first_part = identity, request.seed, first_part
        self.request = request if not kept else with_kept(request, kept)
        self.kept = kept
        self.own_seed_tokens = 0
        self.done: Completion | None = None
        self.parts = 0
        self.seconds = 0.0
        if done is not None:
            self.seconds = done.seconds
            self._take(done.completion, done.parts)

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
    """A trajectory that is sampled: what it has, and what control wants of it. ``turns``: the last one is sampled, or
    is to be; ``segments``: turns that are whole, and what stands between them. ``waits``: it is paused and has left the
    engine."""

    def __init__(self, order: LaunchTrajectory, turn: _Turn, take: TakeOutcome) -> None:
        self.order, self.take = order, take
        self.turns = [turn]
        self.segments: list[Segment] = []
        self.finish: FinishReason | None = None
        self.cancelled = ""
        self.paused = False
        self.waits = False
        self.resumed = anyio.Event()

    @property
    def turn(self) -> _Turn:
        return self.turns[-1]

    @property
    def tokens(self) -> int:
        """Tokens that were sampled so far."""
        return sum(turn.tokens for turn in self.turns)

    def pause(self) -> None:
        if not self.paused:
            self.paused, self.resumed = True, anyio.Event()

    def resume(self) -> None:
        self.paused = False
        self.resumed.set()

    def cancel(self, reason: str) -> None:
        self.cancelled = self.cancelled or reason
        self.resumed.set()


class EpisodeModel:
    """Access of an episode to the policy. What is sampled and appended through it becomes the trajectory.

    ``sample`` gives the next turn, a completion of the prompt and all that came after; it asks again for what an engine
    aborted, and raises ``EpisodeCancelled``, or ``RequestRefused`` where no engine serves it. ``append`` adds token ids
    after a turn that are not trained; the next turn goes on from them."""

    def __init__(self, sample: Callable[[], Awaitable[Completion]], append: Callable[[TokenArray], None]) -> None:
        self.sample, self.append = sample, append


Episode = Callable[[EpisodeModel], Awaitable[object]]
"""How a trajectory comes about: samples with the model that it is given, and returns when the trajectory is whole."""


async def one_completion(model: EpisodeModel) -> None:
    """The episode of a run without an environment: a prompt and its completion."""
    await model.sample()


class Episodes:
    """Runs ``episode`` for each trajectory on ``engine`` (one or a pool), and has ``journal`` record and ``scorer``
    score what it sampled. ``one_at_a_time``: the engine never has two requests of it; ``capacity``: requests that count
    as a full engine."""

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
    ) -> None:
        self._engine, self._scorer, self._journal, self._episode = engine, scorer, journal, episode
        self._capacity = capacity
        self._alone = anyio.Semaphore(1) if one_at_a_time else nullcontext()
        self._kept = CancelledCompletions() if verifies_deferred else None
        self._sampling = structs.asdict(sampling)
        self._open: dict[TrajectoryId, _OpenTrajectory] = {}
        self._waiting, self._engines_paused = 0, False
        self._launched = self._generated_tokens = 0
        self._verified_tokens = self._accepted_tokens = 0
        self._busy_seconds = self._working_seconds = self._counted_at = 0.0
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
        turn = _Turn(order.id, self._request(order), self._kept_of(order), order.done)
        trajectory = self._open[order.id] = _OpenTrajectory(order, turn, take)
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
        """Counters since the start. Paused trajectories do not run."""
        self._count()
        return RolloutStatistics(
            launched=self._launched,
            finished=self._launched - len(self._open),
            running=len(self._open) - self._waiting,
            busy_seconds=self._busy_seconds,
            generated_tokens=self._generated_tokens,
            verified_tokens=self._verified_tokens,
            accepted_tokens=self._accepted_tokens,
            working_seconds=self._working_seconds,
        )

    def engines_paused(self, paused: bool) -> None:
        """Note that all engines were paused, or that it has ended: requests submitted meanwhile keep no engine busy."""
        self._count()
        self._engines_paused = paused

    def _still_open(self, ids: Collection[TrajectoryId]) -> list[_OpenTrajectory]:
        return [self._open[identity] for identity in ids if identity in self._open]

    def _abort(self, stopped: Collection[_OpenTrajectory]) -> None:
        """Have the engine stop what it samples of them, without waiting for it: control has more to order."""
        if running := [one.turn.request.request_id for one in stopped if not one.waits]:
            self._tasks.start_soon(self._engine.abort, running)

    async def _live(self, trajectory: _OpenTrajectory) -> None:
        """The life of one trajectory: sampled, recorded, scored."""
        order, refused = trajectory.order, ""
        try:
            await self._episode(EpisodeModel(partial(self._complete, trajectory), partial(self._append, trajectory)))
        except RequestRefused as error:
            refused = str(error)
        except EpisodeCancelled:
            pass  # ``cancelled`` says why, also where an episode catches it
        self._count()
        del self._open[order.id]
        self._keep(trajectory)
        if (finish := trajectory.finish) is None or trajectory.cancelled or refused:
            reason, tokens = refused or trajectory.cancelled or "its episode sampled nothing", trajectory.tokens
            lost = TrajectoryLost(id=order.id, cancelled=bool(trajectory.cancelled), reason=reason, tokens=tokens)
            await trajectory.take(lost)
            await self._scorer.lost(order.id, order.group_size)
            return
        if not trajectory.segments[-1].trained:
            trajectory.segments.pop()  # nothing was sampled behind it
        sampled = Trajectory(
            id=order.id,
            prompt=order.prompt,
            segments=tuple(trajectory.segments),
            finish_reason=finish,
            rollout_seconds=sum(turn.seconds for turn in trajectory.turns),
            evaluation=order.evaluation,
        )
        await self._journal.sampled(sampled)
        await trajectory.take(await self._scorer.score(sampled, order.group_size))

    async def _complete(self, trajectory: _OpenTrajectory) -> Completion:
        """Sample until the turn ends by itself or was cancelled, going on after every other cut. Raises ``ValueError``
        where the turn before was not answered."""
        turn = trajectory.turn
        if trajectory.segments and trajectory.segments[-1].trained:
            raise ValueError("an episode samples another turn, and has appended nothing to the one before")
        while not trajectory.cancelled and not turn.whole:
            if trajectory.paused:
                await self._until_resumed(trajectory)
                continue
            async with self._alone:
                if trajectory.cancelled or trajectory.paused:  # while it waited for its turn
                    continue
                started = anyio.current_time()
                piece = await self._engine.generate(turn.request)
            self._generated_tokens += len(piece.token_ids) - self._accepted(turn, piece)
            turn.add(piece, anyio.current_time() - started)
        if trajectory.cancelled or turn.done is None:
            raise EpisodeCancelled(trajectory.cancelled)
        done, tokens, logprobs = turn.done, turn.done.token_ids, turn.done.behavior_logprobs
        segment = Segment(token_ids=tokens, trained=True, behavior_logprobs=logprobs, version_spans=done.version_spans)
        trajectory.segments.append(segment)
        trajectory.finish = done.finish_reason
        return done

    def _append(self, trajectory: _OpenTrajectory, token_ids: TokenArray) -> None:
        """Put untrained tokens behind a turn. Raises ``ValueError`` where there is none."""
        if not trajectory.segments or not trajectory.segments[-1].trained:
            raise ValueError("an episode appends tokens, and has sampled no turn before them")
        order, before = trajectory.order, without_kept(trajectory.turn.request)  # with all that was sampled
        trajectory.segments.append(Segment(token_ids=token_ids, trained=False))
        first_part = sum(turn.parts for turn in trajectory.turns)
        request = structs.replace(
            before,
            request_id=part_id(str(order.id), first_part),
            token_ids=before.token_ids + token_ids,
            prefix_length=0,
            seed=derive_seed(order.seed, "turn", len(trajectory.turns)),
        )
        trajectory.turns.append(_Turn(order.id, request, token_array(), first_part=first_part))

    async def _until_resumed(self, trajectory: _OpenTrajectory) -> None:
        identity, turn, resumed = trajectory.order.id, trajectory.turn, trajectory.resumed
        if turn.done is not None and len(trajectory.turns) == 1:  # of several turns a later life samples all again
            done = SampledSoFar(completion=turn.done, parts=turn.parts, seconds=turn.seconds)
            await self._journal.paused(identity, done)
        await trajectory.take(TrajectoryPaused(id=identity, tokens=trajectory.tokens))
        self._count()
        trajectory.waits = True
        self._waiting += 1
        await resumed.wait()
        self._count()
        trajectory.waits = False
        self._waiting -= 1

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
        order, turn = trajectory.order, trajectory.turn
        if self._kept is None or turn.done is None or order.evaluation or len(trajectory.turns) > 1:
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
            **self._sampling | order.sampling,
        )

    def _count(self) -> None:
        now = anyio.current_time()
        if not self._engines_paused and (running := len(self._open) - self._waiting):
            self._busy_seconds += min(running, self._capacity) * (now - self._counted_at)
            self._working_seconds += now - self._counted_at
        self._counted_at = now

"""The rollout stage: orders in, one outcome out for every trajectory that was launched.

A request that the engine cut (a pause that aborts, a drained engine) goes on from its tokens with a seed of its own. A
trajectory that control paused waits, outside of the engine, until it is resumed; only one that was cancelled, or that
the engine refused, ends as ``TrajectoryLost``. Where deferred completions are verified, the tokens of what was
cancelled are kept until the same draw is launched again (``engines/resumption.py``)."""

from __future__ import annotations

import math
from contextlib import nullcontext

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from streamrl.base.errors import RequestRefused
from streamrl.base.messages import Generate
from streamrl.base.seeds import derive_seed
from streamrl.base.stage_messages import (
    CancelTrajectories,
    FinishedTrajectory,
    LaunchTrajectory,
    PauseTrajectories,
    ResumeTrajectories,
    RolloutOrder,
    RolloutOutcome,
    RolloutStatistics,
    SampledSoFar,
    TrajectoryLost,
    TrajectoryPaused,
)
from streamrl.base.types import Completion, FinishReason, Segment, TokenArray, Trajectory, TrajectoryId, token_array
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.contracts import Sampler
from streamrl.engines.resumption import (
    CancelledCompletions,
    accepted_prefix,
    join_completions,
    part_id,
    resumed_request,
    with_kept,
)
from streamrl.recipe.sections import Sampling


class _Attempt:
    """One launched trajectory: what it has, what it asks the engine for, and what control wants of it.

    ``unanswered``: pauses that it has not answered yet. ``waits``: it is paused and has left the engine. ``kept``:
    tokens of an earlier attempt that are verified; ``own_seed_tokens``: tokens that were sampled with its own seed."""

    def __init__(self, order: LaunchTrajectory, request: Generate, kept: TokenArray) -> None:
        self.order = order
        self.request = request if not kept else with_kept(request, kept)
        self.kept = kept
        self.own_seed_tokens = 0
        self.done: Completion | None = None
        self.parts = 0
        self.cancelled = ""
        self.paused = False
        self.unanswered = 0
        self.waits = False
        self.resumed = anyio.Event()
        self.seconds = 0.0
        if order.done is not None:
            self.seconds = order.done.seconds
            self._take(order.done.completion, order.done.parts)

    @property
    def tokens(self) -> int:
        return 0 if self.done is None else len(self.done.token_ids)

    @property
    def whole(self) -> bool:
        return self.done is not None and self.done.finish_reason is not FinishReason.ABORT

    @property
    def sampled(self) -> SampledSoFar | None:
        return None if self.done is None else SampledSoFar(completion=self.done, parts=self.parts, seconds=self.seconds)

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.unanswered += 1
            self.resumed = anyio.Event()

    def resume(self) -> None:
        self.paused = False
        self.resumed.set()

    def cancel(self, reason: str) -> None:
        self.cancelled = self.cancelled or reason
        self.resumed.set()

    def add(self, piece: Completion) -> None:
        """Take what the engine returned, and ask for the rest of it under an id and a seed of its own. A request that
        was moved before it sampled anything keeps its seed."""
        if self.request.seed == self.order.seed:
            self.own_seed_tokens += len(piece.token_ids)
        self._take(piece, 1)

    def _take(self, piece: Completion, parts: int) -> None:
        self.done = piece if self.done is None else join_completions(self.done, piece)
        self.parts += parts
        self.request = resumed_request(
            self.request,
            piece,
            seed=derive_seed(self.order.seed, self.parts) if piece.token_ids else self.request.seed,
            request_id=part_id(str(self.order.id), self.parts),
        )


class RolloutStage:
    """Samples trajectories on ``engine`` (one or a pool). ``run`` once, as a child of the nursery. ``one_at_a_time``:
    the engine never has two requests of this stage; ``capacity``: requests that count as a full engine."""

    def __init__(
        self,
        engine: Sampler,
        sampling: Sampling,
        *,
        verifies_deferred: bool = False,
        one_at_a_time: bool = False,
        capacity: float = math.inf,
    ) -> None:
        self._engine = engine
        self._capacity = capacity
        self._turn = anyio.Semaphore(1) if one_at_a_time else nullcontext()
        self._kept = CancelledCompletions() if verifies_deferred else None
        self._sampling = structs.asdict(sampling)
        self._open: dict[TrajectoryId, _Attempt] = {}
        self._waiting = 0
        self._engines_paused = False
        self._launched = self._finished = self._generated_tokens = 0
        self._verified_tokens = self._accepted_tokens = 0
        self._busy_seconds = self._working_seconds = 0.0
        self._counted_at = 0.0

    async def run(self, orders: ReceiveStream[RolloutOrder], outcomes: SendStream[RolloutOutcome]) -> None:
        """Launch until ``orders`` ends and every launched trajectory had its outcome; then end ``outcomes``.
        Trajectories that are paused then are lost."""
        self._counted_at = anyio.current_time()
        async with anyio.create_task_group() as trajectories:
            async for order in orders:
                await self._handle(order, trajectories, outcomes)
            for attempt in self._open.values():
                if attempt.paused:
                    attempt.cancel("paused when the orders ended")
        await outcomes.aclose()

    def statistics(self) -> RolloutStatistics:
        """Counters since the start. Paused trajectories do not run."""
        self._count()
        return RolloutStatistics(
            launched=self._launched,
            finished=self._finished,
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

    async def _handle(self, order: RolloutOrder, trajectories: TaskGroup, outcomes: SendStream[RolloutOutcome]) -> None:
        if isinstance(order, LaunchTrajectory):
            self._count()
            self._launched += 1
            attempt = self._open[order.id] = _Attempt(order, self._request(order), self._kept_of(order))
            trajectories.start_soon(self._sample, attempt, outcomes)
            return
        attempts = [self._open[i] for i in order.ids if i in self._open]
        if isinstance(order, ResumeTrajectories):
            for attempt in attempts:
                attempt.resume()
            return
        for attempt in attempts:
            if isinstance(order, PauseTrajectories):
                attempt.pause()
            else:
                attempt.cancel("cancelled")
        if self._kept is not None and isinstance(order, CancelTrajectories):
            self._kept.cancelled(order.ids)
        running = [attempt.request.request_id for attempt in attempts if not attempt.waits]
        if running:
            await self._engine.abort(running)

    async def _sample(self, attempt: _Attempt, outcomes: SendStream[RolloutOutcome]) -> None:
        order, refused = attempt.order, ""
        try:
            await self._complete(attempt, outcomes)
        except RequestRefused as error:
            refused = str(error)
        self._count()
        del self._open[order.id]
        self._finished += 1
        self._keep(attempt)
        if attempt.done is None or attempt.cancelled or refused:
            await outcomes.send(
                TrajectoryLost(
                    id=order.id,
                    group_size=order.group_size,
                    cancelled=bool(attempt.cancelled),
                    reason=refused or attempt.cancelled,
                    tokens=attempt.tokens,
                    evaluation=order.evaluation,
                )
            )
            return
        trajectory = _single_segment(order, attempt.done, attempt.seconds)
        await outcomes.send(FinishedTrajectory(trajectory=trajectory, group_size=order.group_size))

    async def _complete(self, attempt: _Attempt, outcomes: SendStream[RolloutOutcome]) -> None:
        """Sample until the completion ends by itself or was cancelled, going on after every other cut."""
        while not attempt.cancelled and not attempt.whole:
            if not attempt.paused:  # control may have paused it before it ever started
                async with self._turn:
                    if attempt.cancelled or attempt.paused:  # while it waited for its turn
                        continue
                    started = anyio.current_time()
                    piece = await self._engine.generate(attempt.request)
                attempt.seconds += anyio.current_time() - started
                self._generated_tokens += len(piece.token_ids) - self._accepted(attempt, piece)
                attempt.add(piece)
            if not attempt.cancelled and not attempt.whole:
                await self._answer_pauses(attempt, outcomes)

    async def _answer_pauses(self, attempt: _Attempt, outcomes: SendStream[RolloutOutcome]) -> None:
        """Say that it is paused and wait until it is resumed. A pause that was taken back is answered too."""
        while attempt.unanswered:
            attempt.unanswered -= 1
            await outcomes.send(TrajectoryPaused(id=attempt.order.id, tokens=attempt.tokens, done=attempt.sampled))
        if not attempt.paused or attempt.cancelled:
            return
        self._count()
        attempt.waits = True
        self._waiting += 1
        await attempt.resumed.wait()
        self._count()
        attempt.waits = False
        self._waiting -= 1

    def _kept_of(self, order: LaunchTrajectory) -> TokenArray:
        """Return what was sampled of this draw before it was cancelled; empty where deferred completions are not
        verified."""
        if self._kept is None or order.evaluation:
            return token_array()
        self._kept.open(len(self._open) + 1)
        return self._kept.take(order.seed) or token_array()

    def _accepted(self, attempt: _Attempt, piece: Completion) -> int:
        """Count the kept tokens that ``piece`` begins with: those need not be decoded."""
        if not attempt.request.kept or not piece.token_ids:
            return 0
        accepted = accepted_prefix(attempt.kept, piece.token_ids)
        self._verified_tokens += len(attempt.kept)
        self._accepted_tokens += accepted
        return accepted

    def _keep(self, attempt: _Attempt) -> None:
        """Keep the tokens of an attempt that ended. It may be launched again, if it was cancelled or its group still
        loses."""
        order, done = attempt.order, attempt.done
        if self._kept is None or done is None or order.evaluation:
            return
        tokens = done.token_ids[: attempt.own_seed_tokens]
        if done.finish_reason is not FinishReason.ABORT and len(tokens) == len(done.token_ids):
            tokens = tokens[:-1]  # the engine is to come to its end by itself
        if attempt.cancelled:
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


def _single_segment(order: LaunchTrajectory, completion: Completion, seconds: float) -> Trajectory:
    segment = Segment(
        token_ids=completion.token_ids,
        trained=True,
        behavior_logprobs=completion.behavior_logprobs,
        version_spans=completion.version_spans,
    )
    return Trajectory(
        id=order.id,
        prompt=order.prompt,
        segments=(segment,),
        finish_reason=completion.finish_reason,
        rollout_seconds=seconds,
        evaluation=order.evaluation,
    )

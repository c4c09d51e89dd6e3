"""The rollout stage: orders in, one outcome out for every trajectory that was launched.

A request that the engine cut (a pause that aborts) goes on from its tokens with a seed of its own; only a
trajectory that control cancelled ends as ``TrajectoryLost``.
"""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup

from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.engines.engine import Engine
from streamrl.engines.resumption import join_completions, resumed_request
from streamrl.errors import RequestRefused
from streamrl.messages import Generate
from streamrl.seeds import derive_seed
from streamrl.stage_messages import (
    CancelTrajectories,
    FinishedTrajectory,
    LaunchTrajectory,
    RolloutOrder,
    RolloutOutcome,
    RolloutStatistics,
    TrajectoryLost,
)
from streamrl.types import Completion, FinishReason, Segment, Trajectory, TrajectoryId


class RolloutStage:
    """Samples trajectories on ``engine`` (one or a pool). ``run`` once, as a child of the nursery."""

    def __init__(self, engine: Engine, *, max_tokens: int, temperature: float, top_p: float) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._requests: dict[TrajectoryId, str] = {}
        self._cancelled: set[TrajectoryId] = set()
        self._launched = self._finished = self._generated_tokens = 0
        self._busy_seconds = 0.0
        self._counted_at = 0.0

    async def run(self, orders: ReceiveStream[RolloutOrder], outcomes: SendStream[RolloutOutcome]) -> None:
        """Until ``orders`` ends and every launched trajectory had its outcome; then ends ``outcomes``."""
        self._counted_at = anyio.current_time()
        async with anyio.create_task_group() as trajectories:
            async for order in orders:
                await self._obey(order, trajectories, outcomes)
        await outcomes.aclose()

    def statistics(self) -> RolloutStatistics:
        """Counters since the start."""
        self._count()
        return RolloutStatistics(
            launched=self._launched,
            finished=self._finished,
            running=len(self._requests),
            busy_seconds=self._busy_seconds,
            generated_tokens=self._generated_tokens,
        )

    async def _obey(self, order: RolloutOrder, trajectories: TaskGroup, outcomes: SendStream[RolloutOutcome]) -> None:
        if isinstance(order, CancelTrajectories):
            running = [i for i in order.ids if i in self._requests]
            self._cancelled.update(running)
            if running:
                await self._engine.abort([self._requests[i] for i in running])
            return
        self._count()
        self._launched += 1
        self._requests[order.id] = f"{order.id}/0"
        trajectories.start_soon(self._sample, order, outcomes)

    async def _sample(self, order: LaunchTrajectory, outcomes: SendStream[RolloutOutcome]) -> None:
        started = anyio.current_time()
        try:
            completion, refused = await self._complete(order), ""
        except RequestRefused as error:
            completion, refused = None, str(error)
        self._count()
        del self._requests[order.id]
        cancelled = order.id in self._cancelled
        self._cancelled.discard(order.id)
        self._finished += 1
        tokens = 0 if completion is None else len(completion.token_ids)
        self._generated_tokens += tokens
        if completion is None or cancelled:
            await outcomes.send(
                TrajectoryLost(
                    id=order.id,
                    group_size=order.group_size,
                    cancelled=cancelled,
                    reason=refused or "cancelled",
                    tokens=tokens,
                    evaluation=order.evaluation,
                )
            )
            return
        trajectory = _single_segment(order, completion, anyio.current_time() - started)
        await outcomes.send(FinishedTrajectory(trajectory=trajectory, group_size=order.group_size))

    async def _complete(self, order: LaunchTrajectory) -> Completion:
        """Sample until the completion ends by itself, going on after every cut that control did not ask for."""
        request = Generate(
            request_id=self._requests[order.id],
            token_ids=order.prompt.token_ids,
            max_tokens=self._max_tokens,
            seed=order.seed,
            temperature=self._temperature if order.temperature is None else order.temperature,
            top_p=self._top_p,
        )
        done: Completion | None = None
        part = 0
        while True:
            piece = await self._engine.generate(request)
            done = piece if done is None else join_completions(done, piece)
            if piece.finish_reason is not FinishReason.ABORT or order.id in self._cancelled:
                return done
            part += 1
            self._requests[order.id] = f"{order.id}/{part}"
            request = resumed_request(
                request, piece, seed=derive_seed(order.seed, part), request_id=self._requests[order.id]
            )

    def _count(self) -> None:
        now = anyio.current_time()
        self._busy_seconds += len(self._requests) * (now - self._counted_at)
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

"""Held-out evaluation: completions of prompts that are never trained on, scored by the same rewards.

It shares the engines with the rollout of the next batch. At most ``in_flight`` of its requests are open at once, so
that a rollout request waits behind one filling of the engines, not behind the whole evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio
import msgspec

from streamrl.base.seeds import derive_seed
from streamrl.base.stage_messages import (
    CancelTrajectories,
    EndedOutcome,
    LaunchTrajectory,
    RolloutOrder,
    TrajectoryLost,
)
from streamrl.base.types import Prompt, TrajectoryId
from streamrl.comm.stream import SendStream
from streamrl.evaluate.evaluation_metrics import SUCCESS_REWARD, evaluation_metrics


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out prompts and how they are evaluated. ``temperature`` None: the rollout's. ``reward``: whose value is
    the score (empty: the total). ``in_flight``: requests of an evaluation that are open at once: what the engines can
    run (``EngineReady.max_num_seqs`` of the pool)."""

    prompts: Sequence[Prompt] = ()
    samples: int = 1
    temperature: float | None = None
    success_reward: float = SUCCESS_REWARD
    reward: str = ""
    in_flight: int = 256


class Evaluation:
    """One evaluation of one policy version, on the first ``limit`` prompts (0: all). ``run`` once; outcomes arrive
    through ``take``. Held-out groups have negative ids: they belong to no group of the run."""

    def __init__(self, held_out: HeldOut, policy_version: int, *, limit: int, seed: int) -> None:
        self.policy_version = policy_version
        self.limit = limit
        self.cancelled = False
        self.outcomes: list[EndedOutcome] = []
        self._held_out = held_out
        self._prompts = held_out.prompts[:limit] if limit else held_out.prompts
        self._seed = seed
        self._open: set[TrajectoryId] = set()
        self._room = anyio.Semaphore(held_out.in_flight)
        self._settled = anyio.Event()

    @property
    def wanted(self) -> int:
        """Completions of this evaluation."""
        return len(self._prompts) * self._held_out.samples

    async def run(self, orders: SendStream[RolloutOrder]) -> dict[str, float]:
        """Launch everything and wait for every outcome; figures are named ``eval/held_out/*``."""
        started = anyio.current_time()
        for launch in self._launches():
            await self._room.acquire()
            if self.cancelled:
                break
            self._open.add(launch.id)
            await orders.send(launch)
        while self._open:
            self._settled = anyio.Event()
            await self._settled.wait()
        held_out = self._held_out
        success, reward = held_out.success_reward, held_out.reward
        figures = evaluation_metrics(self.outcomes, held_out.samples, success, reward=reward)
        return figures | {"time/eval_s": anyio.current_time() - started}

    def take(self, outcome: EndedOutcome) -> None:
        """One outcome of this evaluation."""
        self.outcomes.append(outcome)
        self._open.discard(identity(outcome))
        self._room.release()
        if not self._open:
            self._settled.set()

    async def cancel(self, orders: SendStream[RolloutOrder]) -> None:
        """Launch no more and stop what runs; ``run`` returns when all that was launched has ended."""
        self.cancelled = True
        await orders.send(CancelTrajectories(ids=tuple(self._open)))

    def _launches(self) -> Iterator[LaunchTrajectory]:
        for index, prompt in enumerate(self._prompts):
            for sample in range(self._held_out.samples):
                yield LaunchTrajectory(
                    id=TrajectoryId(
                        prompt_id=prompt.prompt_id, group_id=-1 - index, sample=sample, attempt=self.policy_version
                    ),
                    prompt=prompt,
                    group_size=1,  # each is scored alone, also by a reward that sees whole groups
                    seed=derive_seed(self._seed, "evaluation", prompt.prompt_id, self.policy_version, sample),
                    evaluation=True,
                    temperature=self._held_out.temperature,
                )


def identity(outcome: EndedOutcome) -> TrajectoryId:
    """Whose outcome it is."""
    return outcome.id if isinstance(outcome, TrajectoryLost) else outcome.outcome.trajectory.id

"""Held-out evaluation: one trajectory for each prompt, scored by the same rewards, never trained."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from streamrl.comm.stream import SendStream
from streamrl.control.step_metrics import accuracy_metrics
from streamrl.seeds import derive_seed
from streamrl.stage_messages import LaunchTrajectory, RewardOutcome, RolloutOrder, Scored
from streamrl.types import Prompt, ScoredTrajectory, TrajectoryId

EVALUATION_GROUP = -1
"""Group id of held-out trajectories: they belong to no group of the run."""


class Evaluation:
    """One evaluation of one policy version. Outcomes arrive through ``take``."""

    def __init__(self, prompts: Sequence[Prompt], policy_version: int, *, seed: int, temperature: float | None) -> None:
        self.policy_version = policy_version
        self._launches = [
            LaunchTrajectory(
                id=TrajectoryId(prompt_id=p.prompt_id, group_id=EVALUATION_GROUP, sample=i, attempt=policy_version),
                prompt=p,
                group_size=1,
                seed=derive_seed(seed, "evaluation", p.prompt_id, policy_version),
                evaluation=True,
                temperature=temperature,
            )
            for i, p in enumerate(prompts)
        ]
        self._scored: list[ScoredTrajectory] = []
        self._failed = 0
        self._done = anyio.Event()

    @property
    def wanted(self) -> int:
        """Prompts of this evaluation."""
        return len(self._launches)

    @property
    def ended(self) -> int:
        """Prompts whose outcome is known."""
        return len(self._scored) + self._failed

    async def run(self, orders: SendStream[RolloutOrder]) -> dict[str, float]:
        """Launch everything and wait for every outcome; figures are named ``eval/held_out/*``."""
        started = anyio.current_time()
        for launch in self._launches:
            await orders.send(launch)
        if self._launches:
            await self._done.wait()
        return accuracy_metrics(self._scored, self._failed) | {"time/eval_s": anyio.current_time() - started}

    def take(self, outcome: RewardOutcome) -> None:
        """One outcome of this evaluation."""
        if isinstance(outcome, Scored) and isinstance(outcome.outcome, ScoredTrajectory):
            self._scored.append(outcome.outcome)
        else:
            self._failed += 1
        if self.ended == self.wanted:
            self._done.set()

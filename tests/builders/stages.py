"""Trajectories on an engine, without rewards and without a journal."""

from __future__ import annotations

from typing import Any

from streamrl.base.stage_messages import Scored
from streamrl.base.types import ScoredTrajectory, Trajectory, TrajectoryId
from streamrl.contracts import Journal, Sampler, Scorer
from streamrl.recipe.sections import Sampling
from streamrl.stages.episodes import Episodes


class ZeroRewards:
    """A ``Scorer`` by which every reward is 0."""

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        return Scored(outcome=ScoredTrajectory(trajectory=trajectory, reward=0.0))

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None: ...


def episodes_on(
    engine: Sampler, max_tokens: int = 300, scorer: Scorer | None = None, journal: Journal | None = None, **options: Any
) -> Episodes:
    """Trajectories on ``engine``, scored with 0 where there is no ``scorer``, and not recorded without ``journal``."""
    return Episodes(engine, Sampling(max_tokens=max_tokens), scorer or ZeroRewards(), journal or Journal(), **options)

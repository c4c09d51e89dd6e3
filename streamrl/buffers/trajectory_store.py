"""Prompts and what was sampled for them: the only place of the controller that has tokens. Others pass ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set

from msgspec import structs

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import ReturnedCall
from streamrl.base.stage_messages import EpisodeSoFar, SampledSoFar, TurnSoFar
from streamrl.base.types import (
    Completion,
    Prompt,
    ScoredTrajectory,
    TrainingGroup,
    Trajectory,
    TrajectoryId,
    to_training_sample,
)

FEW_PROMPTS = 256
"""Unneeded prompts that may stay: a search for them costs more."""

Content = SampledSoFar | EpisodeSoFar | Trajectory | ScoredTrajectory
"""What there is of a trajectory: a part, turns, the whole, the whole with its reward."""


class TrajectoryStore:
    """``prompts``: those that control may launch (again), and at most as many others. ``trajectories``: the newest
    content of each that was sampled and is neither trained nor dropped."""

    def __init__(self) -> None:
        self.prompts: dict[str, Prompt] = {}
        self.trajectories: dict[TrajectoryId, Content] = {}
        self._newest: tuple[str, ...] = ()
        self._full = FEW_PROMPTS

    def add_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Store ``prompts`` of one draw. Draws do not overlap."""
        drawn = {prompt.prompt_id: prompt for prompt in prompts}
        self.prompts |= drawn
        self._newest = tuple(drawn)

    def forget_other_prompts(self, needed: Callable[[], Set[str]]) -> None:
        """Remove prompts that are not ``needed``. That is called only when there are twice as many prompts as were
        needed before, so that its cost is proportional to the draws since. Prompts of the last draw stay: control may
        not have taken their event yet."""
        if len(self.prompts) > self._full:
            kept = needed() | set(self._newest)
            self.prompts = {name: prompt for name, prompt in self.prompts.items() if name in kept}
            self._full = max(2 * len(self.prompts), FEW_PROMPTS)

    def add(self, trajectory: Trajectory | ScoredTrajectory) -> None:
        """Store a whole trajectory, or the same with its reward, in place of what was stored of it."""
        whole = trajectory.trajectory if isinstance(trajectory, ScoredTrajectory) else trajectory
        self.trajectories[whole.id] = trajectory

    def add_part(self, trajectory: TrajectoryId, done: SampledSoFar) -> None:
        """Store what was sampled of a cut trajectory; does nothing where the whole one is stored."""
        if isinstance(self.trajectories.get(trajectory, done), SampledSoFar):
            self.trajectories[trajectory] = done

    def add_turn(self, trajectory: TrajectoryId, number: int, turn: TurnSoFar) -> None:
        """Store turn ``number`` of an episode, in place of it and of all after it; does nothing where the whole
        trajectory is stored."""
        if (known := self.so_far(trajectory)) is not None:
            self.trajectories[trajectory] = structs.replace(known, turns=(*known.turns[:number], turn))

    def add_call(self, trajectory: TrajectoryId, call: ReturnedCall) -> None:
        """Store a call of a tool that has returned; does nothing where the whole trajectory is stored."""
        if (known := self.so_far(trajectory)) is not None:
            self.trajectories[trajectory] = structs.replace(known, returned=(*known.returned, call))

    def so_far(self, trajectory: TrajectoryId) -> EpisodeSoFar | None:
        """Return the turns of an episode, none where nothing is stored of it; None: another thing is."""
        content = self.trajectories.get(trajectory, EpisodeSoFar())
        return content if isinstance(content, EpisodeSoFar) else None

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """Remove trajectories that were trained or will not be. Unknown ids are ignored."""
        for trajectory in ids:
            self.trajectories.pop(trajectory, None)

    def done(self, trajectory: TrajectoryId) -> SampledSoFar | None:
        """Return what was sampled of a trajectory of one turn before the controller restarted, or None."""
        content = self.trajectories.get(trajectory)
        if content is None or isinstance(content, SampledSoFar):
            return content
        if isinstance(content, EpisodeSoFar):
            return None
        whole = content.trajectory if isinstance(content, ScoredTrajectory) else content
        segment, *more = whole.segments
        if more or whole.environment is not None:
            return None
        completion = Completion(
            token_ids=segment.token_ids,
            behavior_logprobs=segment.behavior_logprobs,
            finish_reason=whole.finish_reason,
            version_spans=segment.version_spans,
            routed=segment.routed,
        )
        return SampledSoFar(completion=completion, parts=1, seconds=whole.rollout_seconds)

    def whole(self, trajectory: TrajectoryId) -> Trajectory | None:
        """Return a trajectory that was sampled with an environment before the controller restarted, or None."""
        content = self.trajectories.get(trajectory)
        whole = content.trajectory if isinstance(content, ScoredTrajectory) else content
        return whole if isinstance(whole, Trajectory) and whole.environment is not None else None

    def scored(self, ids: Iterable[TrajectoryId]) -> list[ScoredTrajectory]:
        """Return the trajectories among ``ids`` that have a reward."""
        found = (self.trajectories.get(trajectory) for trajectory in ids)
        return [content for content in found if isinstance(content, ScoredTrajectory)]

    def training_group(
        self, group_id: int, batch_id: int, ids: Collection[TrajectoryId], temperature: float | None = None
    ) -> TrainingGroup:
        """A whole group, as the trainer gets it. ``temperature``: that sampled it (None: the recipe's). Raises
        ``StreamRLError`` where one of ``ids`` has no reward here."""
        samples = tuple(to_training_sample(member, temperature) for member in self.scored(ids))
        if len(samples) < len(ids):
            raise StreamRLError(
                f"the journal lacks samples of group {group_id} of batch {batch_id}: it cannot be trained again; "
                "start from a checkpoint (checkpoint.resume_from)"
            )
        return TrainingGroup(group_id=group_id, batch_id=batch_id, samples=samples)

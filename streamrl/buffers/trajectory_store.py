"""Store of prompts and of the trajectories that were sampled for them, the only place of the controller with tokens;
all other parts of the controller pass ids. The journal fills it again after a restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set

from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import ReturnedCall
from streamrl.base.stage_messages import EpisodeSoFar, SampledSoFar, TurnSoFar
from streamrl.base.types import (
    Baseline,
    Completion,
    Prompt,
    ScoredTrajectory,
    Texts,
    TrainingGroup,
    Trajectory,
    TrajectoryId,
    to_training_sample,
)

FEW_PROMPTS = 256
"""Number of prompts below which a search for unneeded ones costs more than it saves."""

Content = SampledSoFar | EpisodeSoFar | Trajectory | ScoredTrajectory
"""Content of a trajectory: tokens of a part of its turn, its complete turns, all of it, or all with the reward."""


class TrajectoryStore:
    """Prompts and trajectories by id.

    ``imitates_observations``: whether the trainer imitates what environments wrote;
    ``prompts``: prompts that control may launch, and at most as many others;
    ``trajectories``: newest content of each trajectory that was sampled and is neither trained nor dropped."""

    def __init__(self) -> None:
        self.imitates_observations = False
        self.prompts: dict[str, Prompt] = {}
        self.trajectories: dict[TrajectoryId, Content] = {}
        self._last_draw: Texts = ()
        self._search_above = FEW_PROMPTS

    def add_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Store the prompts of one draw. Draws do not overlap."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        self.prompts |= by_id
        self._last_draw = tuple(by_id)

    def forget_other_prompts(self, needed: Callable[[], Set[str]]) -> None:
        """Remove the prompts whose ids are not in ``needed()``. This function is called only where there are twice as
        many prompts as were needed the last time, so that its cost is in proportion to the draws since. Prompts of the
        last draw stay: control may not have handled their event yet."""
        if len(self.prompts) <= self._search_above:
            return
        needed_ids = needed() | set(self._last_draw)
        self.prompts = {prompt_id: prompt for prompt_id, prompt in self.prompts.items() if prompt_id in needed_ids}
        self._search_above = max(2 * len(self.prompts), FEW_PROMPTS)

    def add(self, trajectory: Trajectory | ScoredTrajectory) -> None:
        """Store a complete trajectory, with or without its reward, in place of its earlier content."""
        identity = trajectory.trajectory.id if isinstance(trajectory, ScoredTrajectory) else trajectory.id
        self.trajectories[identity] = trajectory

    def add_part(self, trajectory: TrajectoryId, completion: SampledSoFar) -> None:
        """Store the tokens of a paused trajectory; does nothing where the complete trajectory is stored."""
        if isinstance(self.trajectories.get(trajectory, completion), SampledSoFar):
            self.trajectories[trajectory] = completion

    def add_turn(self, trajectory: TrajectoryId, number: int, turn: TurnSoFar) -> None:
        """Store turn ``number`` of an episode, in place of the stored turns from this number on; does nothing where the
        complete trajectory is stored."""
        episode = self.episode_so_far(trajectory)
        if episode is not None:
            self.trajectories[trajectory] = replace(episode, turns=(*episode.turns[:number], turn))

    def add_call(self, trajectory: TrajectoryId, call: ReturnedCall) -> None:
        """Store a tool call that has returned; does nothing where the complete trajectory is stored."""
        episode = self.episode_so_far(trajectory)
        if episode is not None:
            self.trajectories[trajectory] = replace(episode, returned=(*episode.returned, call))

    def episode_so_far(self, trajectory: TrajectoryId) -> EpisodeSoFar | None:
        """Return the turns and calls of an episode, without any where nothing is stored; None where other content is
        stored."""
        content = self.trajectories.get(trajectory, EpisodeSoFar())
        return content if isinstance(content, EpisodeSoFar) else None

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """Remove trajectories that were trained or dropped. Unknown ids are ignored."""
        for trajectory in ids:
            self.trajectories.pop(trajectory, None)

    def completion_so_far(self, trajectory: TrajectoryId) -> SampledSoFar | None:
        """Return the tokens of a trajectory of one turn that were sampled before the controller restarted, or None."""
        content = self.trajectories.get(trajectory)
        if content is None or isinstance(content, SampledSoFar):
            return content
        if isinstance(content, EpisodeSoFar):
            return None
        sampled = content.trajectory if isinstance(content, ScoredTrajectory) else content
        segment, *further_segments = sampled.segments
        if further_segments or sampled.environment is not None:
            return None
        completion = Completion(
            token_ids=segment.token_ids,
            behavior_logprobs=segment.behavior_logprobs,
            finish_reason=sampled.finish_reason,
            version_spans=segment.version_spans,
            routed=segment.routed,
            kept_sets=segment.kept_sets,
        )
        return SampledSoFar(completion=completion, parts=1, seconds=sampled.rollout_seconds)

    def sampled_trajectory(self, trajectory: TrajectoryId) -> Trajectory | None:
        """Return a trajectory that was sampled with an environment before the controller restarted, or None."""
        content = self.trajectories.get(trajectory)
        sampled = content.trajectory if isinstance(content, ScoredTrajectory) else content
        return sampled if isinstance(sampled, Trajectory) and sampled.environment is not None else None

    def scored(self, ids: Iterable[TrajectoryId]) -> list[ScoredTrajectory]:
        """Return the trajectories among ``ids`` that have a reward."""
        contents = (self.trajectories.get(trajectory) for trajectory in ids)
        return [content for content in contents if isinstance(content, ScoredTrajectory)]

    def training_group(
        self,
        group_id: int,
        batch_id: int,
        ids: Collection[TrajectoryId],
        temperature: float | None,
        baseline: Baseline | None,
    ) -> TrainingGroup:
        """Return a group as the trainer gets it.

        ``ids``: trajectories of the group
        ``temperature``: sampling temperature (None: the recipe's)
        ``baseline``: earlier rewards of the prompt

        Raises ``StreamRLError`` where one of ``ids`` has no reward in the store."""
        samples = tuple(
            to_training_sample(member, temperature, imitates_observations=self.imitates_observations)
            for member in self.scored(ids)
        )
        if len(samples) < len(ids):
            raise StreamRLError(
                f"the journal lacks samples of group {group_id} of batch {batch_id}: it cannot be trained again; "
                "start from a checkpoint (checkpoint.resume_from)"
            )
        return TrainingGroup(group_id=group_id, batch_id=batch_id, samples=samples, baseline=baseline)

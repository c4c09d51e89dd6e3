"""Settings of control, made from the recipe: by the controller, by the simulator for each candidate, and by commands
that replay a journal."""

from __future__ import annotations

from msgspec import Struct

from streamrl.recipe.environment import Credit
from streamrl.recipe.objectives.spo import TrackedBaseline
from streamrl.recipe.scheduling import (
    AdmissionOptions,
    GroupSizing,
    LengthSorted,
    RoundKind,
    StalePolicy,
    TailBatching,
    largest_batch,
)
from streamrl.recipe.sections import Pool, Recipe


class ControlSettings(Struct, frozen=True, kw_only=True):
    """Settings of control. Fields have the meaning of the recipe's keys of the same name, except these:

    ``prompts``: prompts after which the run ends, in place of ``steps`` (0: ``steps``);
    ``batch_groups``: ``rollout.prompts_per_batch``;
    ``policy``: class of ``rounds = "custom"``;
    ``shares``: share of each training set, which together are 1 (empty: a single source);
    ``pools``: pools by difficulty, which skip prompts (``prompts.gates``);
    ``failure_window``, ``max_failed_share``: limits of failed trajectories (``reward_limits``);
    ``seed``: seed of random group sizes;
    ``evaluate_every``, ``evaluate_limit``: steps between evaluations, and prompts of each;
    ``deterministic``: whether decisions do not depend on the order of answers (``control.policies.deterministic``);
    ``in_turns``: whether nothing is sampled from the order of an optimizer step until its version is live
    (``engines.gpu_sharing``);
    ``compares_siblings``: whether a sample alone in its group has no advantage;
    ``compares_turns``: whether turns have advantages of their own (``environment.credit``);
    ``tracked``: rule of the baselines of prompts, where the objective tracks them (None: it does not);
    ``admission``: options of the admission of trajectories (None: as many as there are slots);
    ``learning_rate``, ``sampling``: values changed by a user since the start."""

    steps: int
    batch_groups: int
    group_size: int
    rounds: RoundKind
    max_staleness: int
    when_stale: StalePolicy
    dynamic_sampling: bool
    max_failed_share: float
    failure_window: int
    presubmit: bool = False
    policy: str = ""
    tail_batching: TailBatching = TailBatching()
    length_sorted: LengthSorted = LengthSorted()
    group_sizing: GroupSizing = GroupSizing()
    seed: int = 0
    prompts: int = 0
    shares: dict[str, float] = {}
    pools: dict[str, Pool] = {}
    evaluate_every: int = 0
    evaluate_limit: int = 0
    evaluate_at_start: bool = False
    evaluate_at_end: bool = False
    checkpoint_every: int = 0
    checkpoint_at_end: bool = False
    deterministic: bool = False
    in_turns: bool = False
    compares_siblings: bool = True
    compares_turns: bool = False
    tracked: TrackedBaseline | None = None
    admission: AdmissionOptions = None
    learning_rate: float | None = None
    sampling: dict[str, int | float] = {}

    @property
    def reads_environment(self) -> bool:
        """Return whether the rounds use the number of trajectories that are in their environments, which depends on the
        clock."""
        bounded = self.rounds is RoundKind.LENGTH_SORTED and self.length_sorted.oversubscription > 0
        return bounded and not self.deterministic

    @property
    def reads_load(self) -> bool:
        """Return whether every measurement of the engines is reported to control."""
        return self.rounds is RoundKind.CUSTOM or self.admission is not None

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """(number of groups, group size) of a batch, for each size that groups may have."""
        return self.group_sizing.batches(self.batch_groups, self.group_size)

    @property
    def batch_trajectories(self) -> int:
        """Trajectories that one optimizer step consumes; where batches count prompts, with the largest groups."""
        return largest_batch(self.batches)

    @property
    def batch_weight(self) -> int:
        """Weight that fills a batch: its trajectories, or its groups where batches count prompts."""
        return self.batch_groups if self.group_sizing.keeps_prompts else self.batch_trajectories

    def weight_of(self, size: int) -> int:
        """Weight of a group that keeps ``size`` trajectories: ``size``, or 1 where batches count prompts. Control
        counts batches in this unit; policies see trajectories (``launch.view``)."""
        return 1 if self.group_sizing.keeps_prompts else size

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes that groups may have."""
        return tuple(size for _, size in self.batches)


def control_settings(recipe: Recipe) -> ControlSettings:
    """Take the settings of control from the recipe."""
    has_held_out = bool(recipe.evaluation.prompts)
    objective = recipe.objective_settings
    return ControlSettings(
        steps=recipe.run.steps,
        prompts=recipe.run.prompts,
        shares=recipe.prompts.shares,
        pools=recipe.prompts.gates,
        batch_groups=recipe.rollout.prompts_per_batch,
        group_size=recipe.rollout.group_size,
        rounds=recipe.rollout.rounds,
        max_staleness=recipe.rollout.max_staleness,
        when_stale=recipe.rollout.when_stale,
        dynamic_sampling=recipe.dynamic_sampling,
        presubmit=recipe.rollout.presubmit,
        policy=recipe.rollout.policy,
        tail_batching=recipe.tail_batching,
        length_sorted=recipe.length_sorted,
        group_sizing=recipe.group_sizing,
        seed=recipe.run.seed,
        max_failed_share=recipe.reward_limits.max_failed_share,
        failure_window=recipe.reward_limits.window,
        evaluate_every=recipe.evaluation.regular[0],
        evaluate_limit=recipe.evaluation.regular[1],
        evaluate_at_start=has_held_out and recipe.evaluation.at_start,
        evaluate_at_end=has_held_out and recipe.evaluation.at_end,
        checkpoint_every=recipe.checkpoint_every,
        checkpoint_at_end=recipe.checkpoint.at_end,
        deterministic=recipe.run.deterministic,
        in_turns=recipe.in_turns,
        compares_siblings=objective.estimator.compares_siblings,
        tracked=objective.tracked if objective.estimator.tracks_prompts else None,
        admission=recipe.admission,
        compares_turns=recipe.environment.credit is not Credit.TRAJECTORY,
    )

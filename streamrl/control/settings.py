"""What of the recipe decides. Written into the event log, so that a log replays without the recipe."""

from __future__ import annotations

import msgspec

from streamrl.config.scheduling import GroupSizing, LengthSorted, Order, RoundKind, StalePolicy, TailBatching


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fields mean what they mean in the recipe; ``batch_groups`` is ``rollout.prompts_per_batch``. ``policy``: the
    class of rounds = "custom". ``seed``: of the random group sizes."""

    steps: int
    batch_groups: int
    group_size: int
    rounds: RoundKind
    max_staleness: int
    when_stale: StalePolicy
    dynamic_sampling: bool
    max_failed_share: float
    failure_window: int
    order: Order = Order.FIFO
    presubmit: bool = False
    policy: str = ""
    tail_batching: TailBatching = TailBatching()
    length_sorted: LengthSorted = LengthSorted()
    group_sizing: GroupSizing = GroupSizing()
    seed: int = 0
    evaluate_every: int = 0
    evaluate_limit: int = 0
    evaluate_at_start: bool = False
    evaluate_at_end: bool = False
    checkpoint_every: int = 0
    checkpoint_at_end: bool = False

    @property
    def batch_trajectories(self) -> int:
        """What one optimizer step consumes, whatever the group size."""
        return self.batch_groups * self.group_size

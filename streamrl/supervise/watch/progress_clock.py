"""What changes whenever a run gets on, whatever it is doing: compared, never interpreted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.control.state import ControlState


class ProgressClock(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: of control; ``rollout``, ``load``: what was sampled; ``scoring``: trajectories without a reward;
    ``trainer``: answers of the ranks; ``checkpoints``: where they are written."""

    state: ControlState
    rollout: Callable[[], RolloutStatistics]
    load: Callable[[], EngineLoad]
    scoring: Callable[[], int]
    trainer: Callable[[], int]
    checkpoints: Path

    def read(self) -> dict[str, int | None]:
        """By name, for people who look at a run that stands still. That engines are busy is no progress, nor that
        somebody measures them."""
        state, rollout = self.state, self.rollout()
        counts = state.accounting()
        return {
            "tokens": rollout.generated_tokens,
            "engine_tokens": self.load().generated_tokens,
            "sampled": rollout.finished,
            "scoring": self.scoring(),
            "issued": counts.issued,
            "trained": counts.trained,
            "dropped": sum(counts.dropped.values()),
            "in_batch": state.batch.samples,
            "prompts": state.supply.drawn_prompts,
            "trainer_answers": self.trainer(),
            "trainer_version": state.trainer_version,
            "live_version": state.live_version,
            "pushing": state.publishing,
            "evaluating": state.due.evaluating,
            "checkpointing": state.due.checkpointing,
            "checkpoint_bytes": bytes_below(self.checkpoints) if state.due.checkpointing is not None else 0,
        }


def groups_under_way(state: ControlState, most: int = 10) -> list[str]:
    """The groups that were launched first and are not in a closed batch, a line each, for people."""
    groups = list(state.buffer.groups.values())
    lines = [
        f"group {g.group_id} of prompt {g.prompt_id!r}, launched at version {g.launch_version}: "
        + (f"in batch {g.batch_id}" if g.batch_id is not None else f"{g.open} of {len(g.members)} without a reward")
        for g in groups[:most]
    ]
    return lines + ([f"and {len(groups) - most} more groups"] if len(groups) > most else [])


def bytes_below(folder: Path) -> int:
    """Bytes of all files in ``folder`` and below; what vanishes meanwhile does not count."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total

"""Every decoder of streamrl, as targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from campaigns.fuzz import (
    targets_files,
    targets_journal,
    targets_rewards,
    targets_streams,
    targets_user_files,
    targets_weights,
)
from campaigns.fuzz.execution import Target


def every_target(scratch: Path) -> dict[str, Target]:
    """By name. ``scratch``: an empty directory for the files that are read."""
    families: list[Callable[[], list[Target]]] = [
        targets_streams.targets,
        targets_weights.targets,
        targets_rewards.targets,
        targets_files.targets,
        targets_journal.targets,
        lambda: targets_user_files.targets(scratch),
    ]
    return {target.name: target for family in families for target in family()}

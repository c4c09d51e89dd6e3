"""Which faults a seed plants: component, kind, phase of the run, and when in it.

A fault waits for the ``nth`` time that its phase begins, then for ``delay_s``, then fires. ``CELLS`` is everything that
must have fired at least once in a campaign; a run in which nothing fired is vacuous.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec


class Phase(StrEnum):
    """What the run is doing. Several may be on at once."""

    START = "start"
    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"
    STAGE = "stage"
    COMMIT = "commit"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    DRAIN = "drain"
    RECOVERY = "recovery"


PROCESS_FAULTS = ("crash", "hang", "slow")
MESSAGE_FAULTS = ("partition", "disconnect", "duplicate", "reorder", "corrupt")
DISK_FAULTS = ("disk_full", "slow_flush", "write_error", "torn_write")

KINDS: dict[str, tuple[str, ...]] = {
    "controller": (*PROCESS_FAULTS, "clock_jump", "stop"),
    "engine": (*PROCESS_FAULTS, *MESSAGE_FAULTS, "refuse_delta", "corrupt_delta", "slow_fetch", "refuse_request"),
    "trainer": (*PROCESS_FAULTS, *MESSAGE_FAULTS),
    "reward": (*PROCESS_FAULTS, *MESSAGE_FAULTS, "raise", "late", "nan", "wrong_type", "restart"),
    "network": ("latency",),
    "disk": DISK_FAULTS,
    "tree": ("crash",),
}
"""What can happen to what."""

OFTEN = (Phase.ROLLOUT, Phase.REWARD, Phase.TRAIN, Phase.STAGE, Phase.COMMIT)
PHASES_OF: dict[str, tuple[Phase, ...]] = {
    "controller": tuple(Phase),
    "engine": tuple(Phase),
    "trainer": tuple(Phase),
    "reward": tuple(Phase),
    "network": tuple(Phase),
    "disk": tuple(Phase),
    "tree": tuple(Phase),
}
NEEDS: dict[str, tuple[Phase, ...]] = {
    "refuse_delta": (Phase.ROLLOUT, Phase.TRAIN),
    "corrupt_delta": (Phase.ROLLOUT, Phase.TRAIN),
    "slow_fetch": (Phase.ROLLOUT, Phase.TRAIN),
    "refuse_request": (Phase.ROLLOUT, Phase.TRAIN, Phase.COMMIT),
    "raise": (Phase.ROLLOUT, Phase.TRAIN),
    "late": (Phase.ROLLOUT, Phase.TRAIN),
    "nan": (Phase.ROLLOUT, Phase.TRAIN),
    "wrong_type": (Phase.ROLLOUT, Phase.TRAIN),
    "restart": (Phase.ROLLOUT, Phase.REWARD, Phase.TRAIN),
    "stop": (Phase.ROLLOUT, Phase.REWARD, Phase.TRAIN, Phase.STAGE, Phase.COMMIT, Phase.EVALUATION, Phase.CHECKPOINT),
}
"""Kinds that mean nothing in other phases."""

MAY_END_A_RUN = {
    *("crash", "disconnect", "duplicate", "reorder", "corrupt", "stop"),
    *("disk_full", "write_error", "torn_write"),
}
"""Kinds that end a run in which nothing is started again."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds``: how long it lasts, where it lasts; ``seed``: of what else is drawn when it fires."""

    component: str
    kind: str
    phase: Phase
    nth: int
    delay_s: float
    seconds: float = 0.0
    seed: int = 0

    @property
    def cell(self) -> str:
        return f"{self.component}/{self.kind}/{self.phase}"

    @property
    def ends_runs(self) -> bool:
        return self.kind in MAY_END_A_RUN


def cells() -> list[tuple[str, str, Phase]]:
    """Component, kind and phase of everything that can happen."""
    return [
        (component, kind, phase)
        for component, kinds in KINDS.items()
        for kind in kinds
        for phase in PHASES_OF[component]
        if phase in NEEDS.get(kind, tuple(Phase))
    ]


def draw_plan(random: Random, count: int, steps: int, *, ending: int, phases: Sequence[Phase]) -> list[Fault]:
    """``count`` faults in a run of ``steps`` steps, ``ending`` of them of a kind that may end it."""
    possible = [cell for cell in cells() if cell[2] in phases]
    lasting = [cell for cell in possible if cell[1] not in MAY_END_A_RUN]
    ending_cells = [cell for cell in possible if cell[1] in MAY_END_A_RUN]
    chosen = [random.choice(lasting) for _ in range(count - ending)] + random.choices(ending_cells, k=ending)
    return [_draw(random, component, kind, phase, steps) for component, kind, phase in chosen]


def _draw(random: Random, component: str, kind: str, phase: Phase, steps: int) -> Fault:
    once = phase in (Phase.START, Phase.DRAIN)
    rare = phase in (Phase.EVALUATION, Phase.CHECKPOINT, Phase.RECOVERY)
    return Fault(
        component=component,
        kind=kind,
        phase=phase,
        nth=1 if once else random.randint(1, max(1, steps // (3 if rare else 1))),
        delay_s=0.0 if random.random() < 0.3 else random.expovariate(1 / 1.0),
        seconds=random.choice([0.05, 0.5, 2.0, 5.0]) * random.uniform(0.5, 1.5),
        seed=random.getrandbits(32),
    )

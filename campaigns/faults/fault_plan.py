"""Which faults a seed plants: component, kind, phase of the run, and when in it.

A fault waits for the ``nth`` time that something of its phase begins, then for ``delay_s``, then fires; where the phase
is over by then, or what it is to hit is not there, it waits for the next time. ``cells`` is everything that must have
fired at least once in a campaign; a run in which nothing fired is vacuous."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

ENDS_PROCESSES = {"crash", "disconnect", "duplicate", "reorder", "corrupt", "torn_write", "restart"}
"""Kinds that end a process, which is started again where the restart policy allows it."""

ENDS_RUNS = {"stop", "disk_full", "write_error"}
"""Kinds that end the whole run, on purpose or because its disk cannot be trusted; so does ``tree/crash``, and every
death where no restart is allowed. The operator then calls ``streamrl resume``, and the run must reach its end."""

ENDING_SHARE = 0.25
"""Of the faults of a plan. A death costs a world ten times what a fault costs that only takes time."""

MOST_STOPS = 2
"""Of one plan: each ends a life of the run, and a fault of the drain needs one."""

CANDIDATES = 4
"""Cells that are drawn for one fault: the one that has fired least is taken."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """``nth``: the so-many-th time that something of ``phase`` begins; ``seconds``: how long it lasts, where it lasts;
    ``seed``: of what else is drawn when it fires."""

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
    def ends_something(self) -> bool:
        return self.kind in ENDS_PROCESSES | ENDS_RUNS


Cell = tuple[str, str, Phase]


def cells() -> list[Cell]:
    """Component, kind and phase of everything that can happen."""
    return [
        (component, kind, phase)
        for component, kinds in KINDS.items()
        for kind in kinds
        for phase in NEEDS.get(kind, tuple(Phase))
    ]


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan must know of a run. ``begins``: how often something of each phase will begin (0: never)."""

    steps: int
    pace: float
    begins: dict[Phase, int]


def draw_plan(random: Random, count: int, course: Course, fired: Mapping[str, int]) -> list[Fault]:
    """``count`` faults. ``fired``: how often each cell has so far; those that have not are likelier."""
    possible = [cell for cell in cells() if course.begins[cell[2]] or cell[2] in (Phase.DRAIN, Phase.RECOVERY)]
    ending = [cell for cell in possible if cell[1] in ENDS_PROCESSES | ENDS_RUNS]
    lasting = [cell for cell in possible if cell[1] not in ENDS_PROCESSES | ENDS_RUNS]
    chosen = [
        min(random.sample(ending if random.random() < ENDING_SHARE else lasting, CANDIDATES), key=_times(fired))
        for _ in range(count)
    ]
    drains = sum(phase is Phase.DRAIN for _, _, phase in chosen)
    stops = [("controller", "stop", random.choice(NEEDS["stop"][:3])) for _ in range(min(drains, MOST_STOPS))]
    chosen += stops
    deaths = sum(kind in ("crash", "torn_write", "stop") for _, kind, _ in chosen)
    if not deaths and any(phase is Phase.RECOVERY for _, _, phase in chosen):
        chosen.append(("controller", "crash", Phase.TRAIN))
    begins = course.begins | {Phase.DRAIN: len(stops), Phase.RECOVERY: max(1, deaths // 2)}
    return [_draw(random, cell, begins[cell[2]], course.pace) for cell in chosen]


def _times(fired: Mapping[str, int]) -> Callable[[Cell], int]:
    return lambda cell: fired.get(f"{cell[0]}/{cell[1]}/{cell[2]}", 0)


def _draw(random: Random, cell: Cell, begins: int, pace: float) -> Fault:
    component, kind, phase = cell
    return Fault(
        component=component,
        kind=kind,
        phase=phase,
        nth=random.randint(1, begins),
        delay_s=0.0 if random.random() < 0.5 else random.expovariate(1 / (0.3 * pace)),
        seconds=random.choice([0.05, 0.5, 2.0, 5.0]) * random.uniform(0.5, 1.5),
        seed=random.getrandbits(32),
    )

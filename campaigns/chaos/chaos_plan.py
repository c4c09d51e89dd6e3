"""The plan of a campaign: which process is killed when, in which run. The same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec

TREE = "tree"
"""All processes of the run, the supervisor too."""

MUST_RESUME = frozenset({"supervisor", TREE})
"""If one of these dies, the run ends: it is resumed by hand, with ``streamrl resume``."""


class Phase(StrEnum):
    """When the signal comes: so long after what is named here was seen."""

    START = "start"
    ANY = "any"
    SAMPLING = "sampling"
    TRAINING = "training"
    PUSH = "push"
    COMMIT = "commit"
    CHECKPOINT = "checkpoint"
    SHUTDOWN = "shutdown"
    RECOVERY = "recovery"


SEEN_BY = {
    Phase.SAMPLING: "generate done",
    Phase.TRAINING: "close_batch",
    Phase.PUSH: "stage",
    Phase.COMMIT: "stage done",
    Phase.CHECKPOINT: "save_checkpoint",
}
"""The line of the tap that a phase is aimed at."""

LONGEST_DELAY_S = {
    Phase.START: 5.0,
    Phase.ANY: 1.5,
    Phase.SAMPLING: 0.1,
    Phase.TRAINING: 0.03,
    Phase.PUSH: 0.03,
    Phase.COMMIT: 0.01,
    Phase.CHECKPOINT: 0.15,
    Phase.SHUTDOWN: 0.6,
    Phase.RECOVERY: 3.0,
}


class Method(StrEnum):
    """``kill``: SIGKILL. ``stop_kill``: SIGSTOP, and SIGKILL seconds later. ``stop_resume``: SIGSTOP, then SIGCONT:
    nothing died, and nothing may be taken for dead. ``withdraw`` and ``pause``: an engine whose host needs its GPU, and
    gives it back seconds later."""

    KILL = "kill"
    STOP_KILL = "stop_kill"
    STOP_RESUME = "stop_resume"
    WITHDRAW = "withdraw_engine"
    PAUSE = "pause_engine"


GUEST_METHODS = (Method.WITHDRAW, Method.PAUSE)
KILLS = (Method.KILL, Method.STOP_KILL, Method.STOP_RESUME)


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. ``victims``: labels (see ``chaos_processes.labelled``), or ``tree``."""

    victims: tuple[str, ...]
    phase: Phase
    method: Method
    delay_s: float
    stopped_s: float = 0.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run and the faults it gets, one after the other."""

    number: int
    engines: str
    seed: int
    rounds: str
    engine_count: int
    ranks: int
    shots: tuple[Shot, ...]
    talks: bool = False
    teacher: bool = False


def plan(
    engines: str,
    kills: int,
    seed: int,
    shots_per_run: int = 3,
    *,
    talks: bool = False,
    teacher: bool = False,
    guests: bool = False,
) -> list[Cell]:
    """Cells with ``kills`` shots in all, ``shots_per_run`` in each. ``engines``: ``simulated`` or ``vllm``; ``talks``:
    trajectories have several turns, and an environment worker is shot, too; ``teacher``: the run serves a teacher on
    vLLM, and nothing but its processes is shot; ``guests``: two engines, which their hosts take back now and then."""
    cells: list[Cell] = []
    left = kills
    while left > 0:
        number = len(cells)
        source = random.Random(f"{engines} {seed} {number}")
        ranks = 2 if engines == "simulated" and source.random() < 0.25 else 1
        count = 2 if guests or engines == "simulated" or source.random() < 0.3 else 1
        shots = tuple(
            _withdrawal(source) if guests else _shot(source, targets(engines, count, ranks, talks, teacher), place)
            for place in range(min(shots_per_run, left))
        )
        left -= len(shots)
        cells.append(
            Cell(
                number=number,
                engines=engines,
                seed=source.randrange(1 << 20),
                rounds=source.choices(["synchronous", "tail_batching", "continuous"], [3, 1, 1])[0],
                engine_count=count,
                ranks=ranks,
                shots=shots,
                talks=talks,
                teacher=teacher,
            )
        )
    return cells


def targets(engines: str, engine_count: int, ranks: int, talks: bool = False, teacher: bool = False) -> list[str]:
    """Everything that can be killed in such a run; of one with a teacher, the teacher alone."""
    if teacher:
        return ["teacher-0", "teacher-0/EngineCore"]
    found = ["controller", "reward-0", "reward-0/python", "supervisor", TREE]
    found += ["environment-0"] * 2 if talks else []
    found += [f"engine-{index}" for index in range(engine_count)]
    found += [f"trainer-{index}" for index in range(ranks)]
    if engines == "vllm":
        found += [f"engine-{index}/EngineCore" for index in range(engine_count)]
    return found


def _shot(source: random.Random, known: Sequence[str], place: int) -> Shot:
    weights = [1.0 if name in MUST_RESUME else 2.0 for name in known]
    first = source.choices(known, weights)[0]
    victims = [first]
    if first not in MUST_RESUME and source.random() < 0.2 and "teacher-0" not in known:
        victims.append(source.choice([name for name in known if name not in (first, TREE)]))
    method = source.choices(KILLS, [8, 1, 1])[0]
    if not MUST_RESUME.isdisjoint(victims):
        method = Method.KILL
    phases: list[Phase] = [phase for phase in Phase if phase not in (Phase.START, Phase.RECOVERY)]
    phases.append(Phase.RECOVERY if place else Phase.START)
    phase = source.choice([Phase.ANY, *phases])
    return Shot(
        victims=tuple(victims),
        phase=phase,
        method=method,
        delay_s=round(source.uniform(0.0, LONGEST_DELAY_S[phase]), 4),
        stopped_s=0.0 if method is Method.KILL else round(source.uniform(0.5, 3.0), 2),
    )


def _withdrawal(source: random.Random) -> Shot:
    """An engine is taken back by its host, and given back."""
    phases = [Phase.ANY, Phase.SAMPLING, Phase.TRAINING, Phase.PUSH, Phase.COMMIT, Phase.CHECKPOINT]
    phase = source.choice(phases)
    return Shot(
        victims=(source.choice(["engine-0", "engine-1"]),),
        phase=phase,
        method=source.choice(GUEST_METHODS),
        delay_s=round(source.uniform(0.0, LONGEST_DELAY_S[phase]), 4),
        stopped_s=round(source.choice([0.0, source.uniform(0.0, 3.0)]), 2),
    )

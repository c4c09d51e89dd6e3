"""The trace of a run as columns: 57 bytes a trajectory, on slots of engines, and its steps, loads and events."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from threading import RLock
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.base.errors import UNDECODABLE
from streamrl.base.types import TurnTimes
from streamrl.observe.follow.followed_lines import FollowedLines
from streamrl.observe.follow.run_files import RunFiles
from streamrl.observe.report.trajectory_trace import (
    TRACE_SCHEMA,
    EnginesLine,
    EventLine,
    StepLine,
    TraceHeader,
    TraceLine,
    TrajectoryLine,
)

COLUMNS = {
    "launched": "f4", "begun": "f4", "rollout_end": "f4", "reward_end": "f4", "ended": "f4",
    "paused": "f4",
    "slot": "u2", "outcome": "u1", "group": "u4", "prompt": "u4", "sample": "u2", "tokens": "u4", "reward": "f4",
    "oldest": "u4", "newest": "u4", "turns": "u4",
}  # fmt: skip
"""Names and types of the columns of a trajectory; times in seconds since the run began, no reward as nan. ``turns``:
where, among the moments, the number of those of the trajectory stands, with them behind it; 0: none. Moments: seconds
from the launch to the begin and the end of each turn, and to the end of the environment."""

MOST_PROMPTS = 200_000
MOST_SLOTS = 0xFFFF
MOST_OUTCOMES = 0xFF
MOST_POINTS = 20_000
"""Of the load of engines, and of events, in one answer."""
_CODES = {"f4": "f", "u4": "I", "u2": "H", "u1": "B"}
_CHUNK = 100_000


class EngineSlots:
    """Slots of engines, on which trajectories lie one after the other. ``blocks``: numbers of slots in a row, each of
    one engine; a slot that is added later is a block behind all others, so that no number changes its meaning."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, int]] = []
        self._count = 0
        self._free: dict[str, list[int]] = {}

    def add(self, engine: str, count: int) -> None:
        """Add free slots to ``engine``, at least as many as it needs at once."""
        count = min(count, MOST_SLOTS - self._count)
        if count > 0:
            before = self.blocks.pop()[1] if self.blocks and self.blocks[-1][0] == engine else 0
            self.blocks.append((engine, before + count))
            self._free[engine] = [*range(self._count, self._count + count), *self._free.get(engine, ())]
            self._count += count

    def __contains__(self, engine: str) -> bool:
        return engine in self._free

    def place(self, engine: str, launched: int, left: int) -> int:
        """Return the slot that was free for the shortest time when a trajectory was launched, and take it until the
        trajectory ``left`` the engine. The last 16 bits of both times are 0."""
        free = self._free.setdefault(engine, [])
        if not (at := bisect_right(free, launched | MOST_SLOTS)):
            self.add(engine, 1)
            free = self._free[engine]
            if not free:
                return MOST_SLOTS - 1
        slot = free.pop(max(at - 1, 0)) & MOST_SLOTS
        insort(free, left | slot)
        return slot


class TimelineColumns:
    """The trace of ``files``, up to the last ``refresh``. May be used from several threads."""

    def __init__(self, files: RunFiles) -> None:
        self._lines = FollowedLines(files.trace)
        self._decode = msgspec.json.Decoder(TraceHeader | TraceLine).decode
        self._columns: dict[str, array[Any]] = {name: array(_CODES[kind]) for name, kind in COLUMNS.items()}
        self._engine = array("H")
        self._moments = array("f", [0.0])
        self._names: dict[str, dict[str, int]] = {"outcome": {}, "prompt": {}, "engine": {}}
        self._placed = 0
        self._slots = EngineSlots()
        self.lock = RLock()
        self.header: TraceHeader | None = None
        self.steps: list[StepLine] = []
        self.load: dict[str, array[Any]] = {name: array("f") for name in ("time_s", "running", "waiting", "kv_usage")}
        self.events: list[EventLine] = []
        self.unread = 0
        """Lines that are none of a trace that this version reads."""

    @property
    def count(self) -> int:
        """The number of trajectories that have a slot."""
        return self._placed

    def refresh(self) -> None:
        """Read what the run has appended."""
        with self.lock:
            while lines := self._lines.read():
                self._append([found for line in lines if (found := self._take(line)) is not None])
            self._place()

    def head(self) -> dict[str, Any]:
        """All but the columns, with ``count``."""
        every = max(len(self.load["time_s"]) // MOST_POINTS, 1)
        return {
            "count": self._placed,
            "moments": len(self._moments),
            "columns": [{"name": name, "type": kind} for name, kind in COLUMNS.items()],
            "max_tokens": self.header.max_tokens if self.header else 0,
            "steps": list(map(step_row, self.steps)),
            "engines": {name: values[::every].tolist() for name, values in self.load.items()},
            "events": list(map(event_row, self.events[-MOST_POINTS:])),
            **self.names(),
        }

    def names(self, first_prompt: int = 0) -> dict[str, Any]:
        """The meaning of numbers in columns; prompts from ``first_prompt`` on."""
        return {
            "outcomes": list(self._names["outcome"]),
            "prompts": list(self._names["prompt"])[first_prompt:],
            "slots": [{"engine": engine, "lanes": count} for engine, count in self._slots.blocks],
        }

    def column(self, name: str, first: int = 0) -> NDArray[Any]:
        """A copy of one column of the trajectories from ``first`` on, in the order of their ends."""
        with self.lock:
            return np.frombuffer(self._columns[name], dtype=COLUMNS[name])[first : self._placed].copy()

    def number_of_outcome(self, outcome: str) -> int:
        """The number that stands for it in the column; one that none has where no trajectory has ended so."""
        return self._names["outcome"].get(outcome, MOST_OUTCOMES)

    def block(self) -> tuple[int, Iterator[bytes]]:
        """The binary block of the contract: its length in bytes, and its parts. Columns are sorted by launch, and made
        one by one, so that no second copy of all of them is ever there."""
        with self.lock:
            count = self._placed
            head = msgspec.json.encode(self.head())
            order = np.argsort(self.column("launched"), kind="stable")
            moments = self._moments.tobytes()
        head += b" " * (-(len(head) + 4) % 8)
        start = len(head).to_bytes(4, "little") + head
        length = len(start) + sum(_padded(count * int(kind[1])) for kind in COLUMNS.values()) + _padded(len(moments))

        def parts() -> Iterator[bytes]:
            yield start
            for part in chain((self.column(name)[:count][order].tobytes() for name in COLUMNS), [moments]):
                yield part + bytes(_padded(len(part)) - len(part))

        return length, parts()

    def rows(self, first: int, last: int) -> list[list[float | int | None]]:
        """Trajectories from ``first`` to before ``last``, each with the values of ``COLUMNS``, for ``turns``
        the moments; no reward is None."""
        with self.lock:
            *columns, places = [self._columns[name][first:last].tolist() for name in COLUMNS]
            columns.append([self._moments[at + 1 : at + 1 + int(self._moments[at])].tolist() for at in places])
        return [[None if value != value else value for value in row] for row in zip(*columns, strict=True)]

    # ---- lines ---------------------------------------------------------------------------------------

    def _take(self, line: bytes) -> TrajectoryLine | None:
        """Take in a line, but for a trajectory, which is returned."""
        try:
            found = self._decode(line)
        except UNDECODABLE:
            self.unread += 1
            return None
        if isinstance(found, TrajectoryLine):
            return found
        if isinstance(found, StepLine):
            while self.steps and self.steps[-1].policy_version >= found.policy_version:
                self.steps.pop()  # the run went back, and made these steps again
            self.steps.append(found)
        elif isinstance(found, EnginesLine):
            for name, values in self.load.items():
                values.append(getattr(found, name))
        elif isinstance(found, EventLine):
            self.events.append(found)
        else:
            self.header = found
            self.unread += found.schema != TRACE_SCHEMA
        return None

    def _append(self, lines: list[TrajectoryLine]) -> None:
        """Append a row each, whole columns at once."""
        if not lines:
            return
        launched = np.array([line.launched_s for line in lines])
        ended = np.array([line.ended_s for line in lines])
        paused = np.array([line.paused_s for line in lines])
        rollout_end = launched + [line.rollout_s for line in lines] + paused
        returned = np.array([line.returned_s for line in lines])
        returned = np.where(returned > 0, returned, np.minimum(rollout_end + [line.reward_s for line in lines], ended))
        rollout_end = np.minimum(rollout_end, returned)
        columns: dict[str, Any] = {
            "launched": launched,
            "begun": np.minimum(launched + [line.queued_s for line in lines], rollout_end),
            "rollout_end": rollout_end,
            "reward_end": returned,
            "ended": ended,
            "paused": paused,
            "slot": np.zeros(len(lines)),
            "outcome": self._numbers("outcome", [line.outcome for line in lines], MOST_OUTCOMES),
            "group": [line.group for line in lines],
            "prompt": self._numbers("prompt", [line.prompt_id for line in lines], MOST_PROMPTS),
            "sample": [line.sample for line in lines],
            "tokens": [line.tokens for line in lines],
            "reward": np.array([line.reward for line in lines], dtype=float),
            "oldest": [line.oldest_version for line in lines],
            "newest": [line.newest_version for line in lines],
            "turns": [self._keep(line.turns) for line in lines],
        }
        for name, column in columns.items():
            self._columns[name].frombytes(np.asarray(column).astype(COLUMNS[name]).tobytes())
        self._engine.extend(self._numbers("engine", [line.engine for line in lines], MOST_SLOTS))

    def _keep(self, turns: Sequence[TurnTimes]) -> int:
        moments = [*accumulate(s for _, outside, _, inside in turns for s in (outside, inside))]
        place = len(self._moments)
        self._moments.extend((len(moments) - 1, *moments[:-1]) if turns else ())
        return place if turns else 0

    def _numbers(self, kind: str, names: Sequence[str], most: int) -> list[int]:
        """The number of each name; ``most`` for those that do not fit, which have none."""
        numbers = self._names[kind]
        for name in dict.fromkeys(names):
            if name not in numbers and len(numbers) < most:
                numbers[name] = len(numbers)
        return [numbers.get(name, most) for name in names]

    # ---- slots ---------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Put trajectories that were read since the last time on slots of their engines, in the order of launches."""
        first = self._placed
        self._placed = len(self._engine)
        # The bits of floats that are not negative are in their order: whole numbers, with room for that of a slot.
        times = (self.column(name, first) for name in ("launched", "rollout_end"))
        launched, left = (np.maximum(time, 0).view("u4").astype("u8") << 16 for time in times)
        engine = np.frombuffer(self._engine, dtype="u2")[first:].copy()
        names = list(self._names["engine"])
        each = 0
        header = self.header
        if header is not None:
            each = min(header.capacity, header.prompts_per_batch * header.group_size * 3 // 2) // max(header.engines, 1)
        for number in sorted(set(engine.tolist()), key=lambda number: natural(names[number])):
            if names[number] not in self._slots:
                needed = most_at_once(launched[engine == number], left[engine == number])
                self._slots.add(names[number], max(needed, each))
        order = np.argsort(launched, kind="stable")
        slots = self._columns["slot"]
        for begin in range(0, len(order), _CHUNK):
            chunk = order[begin : begin + _CHUNK]
            parts = (chunk.tolist(), engine[chunk].tolist(), launched[chunk].tolist(), left[chunk].tolist())
            for row, number, since, until in zip(*parts, strict=True):
                slots[first + row] = self._slots.place(names[number], since, until)


def most_at_once(begins: NDArray[Any], ends: NDArray[Any]) -> int:
    """The largest number of spans that overlap; one that ends when another begins does not."""
    changes = np.concatenate([np.ones(len(begins), int), np.full(len(ends), -1)])
    order = np.lexsort((changes, np.concatenate([begins, ends])))
    return int(np.cumsum(changes[order]).max(initial=0))


def natural(name: str) -> tuple[str, int]:
    """A key that sorts ``engine-10`` behind ``engine-9``."""
    word, _, number = name.rpartition("-")
    return (word, int(number)) if number.isdecimal() else (name, 0)


def step_row(step: StepLine) -> dict[str, Any]:
    """A step as the page gets it."""
    return {"step": step.policy_version} | msgspec.structs.asdict(step)


def event_row(event: EventLine) -> dict[str, Any]:
    """An event as the page gets it; ``end_s`` where it lasted."""
    row: dict[str, Any] = {"time_s": event.time_s, "kind": event.kind, "text": event.text, "step": event.step}
    return row | ({"end_s": event.time_s + event.seconds} if event.seconds else {})


def _padded(length: int) -> int:
    return -(-length // 8) * 8

"""The trace of a run as columns (57 bytes for each trajectory), with a slot of an engine for each trajectory, and its
steps, loads and events. ``RunView`` keeps them for the page, in the process of ``streamrl dashboard`` or ``streamrl
report``; ``streamrl trace`` reads them once."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from threading import RLock
from typing import Any

import numpy as np
from msgspec import json
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from streamrl.base.errors import UNDECODABLE
from streamrl.base.types import JsonObject, TurnTimes
from streamrl.observe.report.trajectory_trace import (
    TRACE_SCHEMA,
    EnginesLine,
    EventLine,
    StepLine,
    TraceHeader,
    TraceLine,
    TrajectoryLine,
)
from streamrl.observe.run_files.followed_lines import FollowedLines
from streamrl.observe.run_files.run_reader import RunFiles

COLUMNS = {
    "launched": "f4", "begun": "f4", "rollout_end": "f4", "reward_end": "f4", "ended": "f4",
    "paused": "f4",
    "slot": "u2", "outcome": "u1", "group": "u4", "prompt": "u4", "sample": "u2", "tokens": "u4", "reward": "f4",
    "oldest": "u4", "newest": "u4", "turns": "u4",
}  # fmt: skip
"""Names and types of the columns of a trajectory. Times are in seconds since the run began, and a missing reward is
nan. ``turns``: index into the array of moments (0: the trajectory has none). The number of the trajectory's moments is
at this index, and the moments follow: seconds from its launch to the start and the end of each turn, and to the end of
its environment."""

MOST_PROMPTS = 200_000
"""Prompts with a number. Further prompts share the number ``MOST_PROMPTS``."""
MOST_SLOTS = 0xFFFF
MOST_OUTCOMES = 0xFF
MOST_POINTS = 20_000
"""Loads of engines, and events, in one answer."""
_CODES = {"f4": "f", "u4": "I", "u2": "H", "u1": "B"}
_CHUNK = 100_000
"""Trajectories that get their slots at once: it bounds the memory of Python objects."""


class EngineSlots:
    """Slots of engines, which trajectories occupy one after the other.

    ``blocks``: engine and number of slots of each block of consecutive slots. A slot that is added later is a block
    behind all others, so that the numbers of earlier slots do not change."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, int]] = []
        self._count = 0
        self._free: dict[str, list[int]] = {}  # by engine, ascending: time since when it is free | slot

    def add(self, engine: str, count: int) -> None:
        """Add ``count`` free slots to ``engine``, fewer where ``MOST_SLOTS`` would be exceeded."""
        count = min(count, MOST_SLOTS - self._count)
        if count > 0:
            block_size = count
            if self.blocks and self.blocks[-1][0] == engine:
                block_size += self.blocks.pop()[1]
            self.blocks.append((engine, block_size))
            self._free[engine] = [*range(self._count, self._count + count), *self._free.get(engine, ())]
            self._count += count

    def __contains__(self, engine: str) -> bool:
        return engine in self._free

    def place(self, engine: str, launched: int, left_engine: int) -> int:
        """Return the slot that was free for the shortest time when a trajectory was launched, and occupy it until the
        trajectory leaves the engine. The last 16 bits of both times are 0: they have room for the number of a slot."""
        free = self._free.setdefault(engine, [])
        count = bisect_right(free, launched | MOST_SLOTS)
        if not count:
            self.add(engine, 1)
            free = self._free[engine]
            if not free:
                return MOST_SLOTS - 1
        slot = free.pop(max(count - 1, 0)) & MOST_SLOTS
        insort(free, left_engine | slot)
        return slot


class TimelineColumns:
    """The trace of a run, as of the last ``refresh``, without secrets in the texts of events. Several threads may use
    it."""

    def __init__(self, files: RunFiles) -> None:
        self._redaction = files.redaction()
        self._lines = FollowedLines(files.trace)
        self._decode = json.Decoder(TraceHeader | TraceLine).decode
        self._columns: dict[str, array[Any]] = {name: array(_CODES[kind]) for name, kind in COLUMNS.items()}
        self._engine = array("H")
        self._moments = array("f", [0.0])
        self._names: dict[str, dict[str, int]] = {"outcome": {}, "prompt": {}, "engine": {}}
        self.count = 0
        """Number of trajectories that have a slot."""
        self._slots = EngineSlots()
        self.lock = RLock()
        self.header: TraceHeader | None = None
        self.steps: list[StepLine] = []
        self.load: dict[str, array[Any]] = {name: array("f") for name in ("time_s", "running", "waiting", "kv_usage")}
        self.events: list[EventLine] = []
        self.unread = 0
        """Number of lines that this version of streamrl cannot read."""

    def refresh(self) -> None:
        """Read the lines that the run has appended."""
        with self.lock:
            while lines := self._lines.read():
                trajectories = [self._take(line) for line in lines]
                self._append([trajectory for trajectory in trajectories if trajectory is not None])
            self._place()

    def head(self) -> JsonObject:
        """Return everything but the values of the columns."""
        every = max(len(self.load["time_s"]) // MOST_POINTS, 1)
        load = {name: block_means(values, every) for name, values in self.load.items()}
        load["time_s"] = self.load["time_s"][::every].tolist()
        return {
            "count": self.count,
            "moments": len(self._moments),
            "columns": [{"name": name, "type": kind} for name, kind in COLUMNS.items()],
            "max_tokens": self.header.max_tokens if self.header else 0,
            "steps": list(map(step_row, self.steps)),
            "engines": load,
            "events": list(map(event_row, self.events[-MOST_POINTS:])),
            **self.names(),
        }

    def names(self, first_prompt: int = 0) -> JsonObject:
        """Return the meaning of the numbers in columns. ``first_prompt``: number of the first prompt to return."""
        return {
            "outcomes": list(self._names["outcome"]),
            "prompts": list(self._names["prompt"])[first_prompt:],
            "slots": [{"engine": engine, "lanes": count} for engine, count in self._slots.blocks],
        }

    def column(self, name: str, first: int = 0) -> NDArray[Any]:
        """Return a copy of a column from trajectory ``first`` on, in the order in which trajectories ended."""
        with self.lock:
            return np.frombuffer(self._columns[name], dtype=COLUMNS[name])[first : self.count].copy()

    def number_of_outcome(self, outcome: str) -> int:
        """Return the number of ``outcome`` in its column; an unused number where no trajectory ended with it."""
        return self._names["outcome"].get(outcome, MOST_OUTCOMES)

    def block(self) -> tuple[int, Iterator[bytes]]:
        """Return the length in bytes and the parts of the binary block that the page reads. Columns are sorted by
        launch. They are made one by one, so that there is never a second copy of all columns."""
        with self.lock:
            count = self.count
            head = json.encode(self.head())
            order = np.argsort(self.column("launched"), kind="stable")
            moments = self._moments.tobytes()
        head += b" " * (-(len(head) + 4) % 8)
        start = len(head).to_bytes(4, "little") + head
        length = len(start) + sum(_padded(count * int(kind[1])) for kind in COLUMNS.values()) + _padded(len(moments))

        def parts() -> Iterator[bytes]:
            yield start
            columns = (self.column(name)[:count][order].tobytes() for name in COLUMNS)
            for part in chain(columns, [moments]):
                yield part + bytes(_padded(len(part)) - len(part))

        return length, parts()

    def rows(self, first: int, last: int) -> list[list[float | int | None]]:
        """Return the rows of the trajectories from ``first`` to before ``last``, with the values of ``COLUMNS``. The
        value of ``turns`` is a list of moments, and a missing reward is None."""
        with self.lock:
            *columns, places = [self._columns[name][first:last].tolist() for name in COLUMNS]
            columns.append([self._moments[at + 1 : at + 1 + int(self._moments[at])].tolist() for at in places])
        # Only nan differs from itself.
        return [[None if value != value else value for value in row] for row in zip(*columns, strict=True)]

    # ---- lines ---------------------------------------------------------------------------------------

    def _take(self, line: bytes) -> TrajectoryLine | None:
        """Decode a line. The line of a trajectory is returned, any other line is stored."""
        try:
            decoded = self._decode(line)
        except UNDECODABLE:
            self.unread += 1
            return None
        if isinstance(decoded, TrajectoryLine):
            return decoded
        if isinstance(decoded, StepLine):
            while self.steps and self.steps[-1].policy_version >= decoded.policy_version:
                self.steps.pop()  # the run resumed from an earlier version, and made these steps again
            self.steps.append(decoded)
        elif isinstance(decoded, EnginesLine):
            for name, values in self.load.items():
                values.append(getattr(decoded, name))
        elif isinstance(decoded, EventLine):
            self.events.append(replace(decoded, text=self._redaction.text(decoded.text)))
        else:
            self.header = decoded
            self.unread += decoded.schema != TRACE_SCHEMA
        return None

    def _append(self, lines: list[TrajectoryLine]) -> None:
        """Append a row for each trajectory, column by column."""
        if not lines:
            return
        launched_s = np.array([line.launched_s for line in lines])
        ended_s = np.array([line.ended_s for line in lines])
        paused_s = np.array([line.paused_s for line in lines])
        rollout_end = launched_s + [line.rollout_s for line in lines] + paused_s
        # An older streamrl did not write the moment of the return: it is estimated.
        expected_s = np.minimum(rollout_end + [line.reward_s for line in lines], ended_s)
        returned_s = np.array([line.returned_s for line in lines])
        returned_s = np.where(returned_s > 0, returned_s, expected_s)
        rollout_end = np.minimum(rollout_end, returned_s)
        columns: dict[str, Any] = {
            "launched": launched_s,
            "begun": np.minimum(launched_s + [line.queued_s for line in lines], rollout_end),
            "rollout_end": rollout_end,
            "reward_end": returned_s,
            "ended": ended_s,
            "paused": paused_s,
            "slot": np.zeros(len(lines)),
            "outcome": self._numbers("outcome", [line.outcome for line in lines], MOST_OUTCOMES),
            "group": [line.group for line in lines],
            "prompt": self._numbers("prompt", [line.prompt_id for line in lines], MOST_PROMPTS),
            "sample": [line.sample for line in lines],
            "tokens": [line.tokens for line in lines],
            "reward": np.array([line.reward for line in lines], dtype=float),
            "oldest": [line.oldest_version for line in lines],
            "newest": [line.newest_version for line in lines],
            "turns": [self._append_moments(line.turns) for line in lines],
        }
        for name, column in columns.items():
            self._columns[name].frombytes(np.asarray(column).astype(COLUMNS[name]).tobytes())
        self._engine.extend(self._numbers("engine", [line.engine for line in lines], MOST_SLOTS))

    def _append_moments(self, turns: Sequence[TurnTimes]) -> int:
        """Append the moments of a trajectory, and return their index; 0 where it has no turns."""
        if not turns:
            return 0
        place = len(self._moments)
        seconds = [part for _, environment_s, _, sampling_s in turns for part in (environment_s, sampling_s)]
        moments = list(accumulate(seconds))
        self._moments.extend((len(moments) - 1, *moments[:-1]))  # nothing is sampled after the last environment
        return place

    def _numbers(self, kind: str, names: Sequence[str], limit: int) -> list[int]:
        """Return the number of each name; ``limit`` for the names after the first ``limit`` names."""
        numbers = self._names[kind]
        for name in dict.fromkeys(names):
            if name not in numbers and len(numbers) < limit:
                numbers[name] = len(numbers)
        return [numbers.get(name, limit) for name in names]

    # ---- slots ---------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Give the trajectories that were read since the last call slots of their engines, in the order of launches."""
        first = self.count
        self.count = len(self._engine)
        # The bits of floats that are not negative sort like the floats. Shifted, they have room for a slot's number.
        times = (self.column(name, first) for name in ("launched", "rollout_end"))
        launched, left_engine = (np.maximum(time, 0).view("u4").astype("u8") << 16 for time in times)
        engine = np.frombuffer(self._engine, dtype="u2")[first:].copy()
        names = list(self._names["engine"])
        expected_slots = 0
        header = self.header
        if header is not None:
            requests = min(header.capacity, header.prompts_per_batch * header.group_size * 3 // 2)
            expected_slots = requests // max(header.engines, 1)
        for number in sorted(set(engine.tolist()), key=lambda number: natural(names[number])):
            if names[number] not in self._slots:
                needed = most_at_once(launched[engine == number], left_engine[engine == number])
                self._slots.add(names[number], max(needed, expected_slots))
        order = np.argsort(launched, kind="stable")
        slots = self._columns["slot"]
        for begin in range(0, len(order), _CHUNK):
            chunk = order[begin : begin + _CHUNK]
            parts = (chunk.tolist(), engine[chunk].tolist(), launched[chunk].tolist(), left_engine[chunk].tolist())
            for row, number, since, until in zip(*parts, strict=True):
                slots[first + row] = self._slots.place(names[number], since, until)


def block_means(values: array[Any], every: int) -> list[float]:
    """Return the mean of each ``every`` values, the last of what is left. One value of so many, in a run of equal
    steps, would show a rhythm that the run does not have."""
    starts = np.arange(0, len(values), every)
    if not len(starts):
        return []
    sums = np.add.reduceat(np.frombuffer(values, dtype=np.float32), starts, dtype=np.float64)
    means: list[float] = (sums / np.diff(starts, append=len(values))).tolist()
    return means


def most_at_once(begins: NDArray[Any], ends: NDArray[Any]) -> int:
    """Return the largest number of spans that overlap. A span that ends when another begins does not overlap it."""
    changes = np.concatenate([np.ones(len(begins), int), np.full(len(ends), -1)])
    order = np.lexsort((changes, np.concatenate([begins, ends])))
    return int(np.cumsum(changes[order]).max(initial=0))


def natural(name: str) -> tuple[str, int]:
    """Return a key that sorts ``engine-10`` behind ``engine-9``."""
    word, _, number = name.rpartition("-")
    return (word, int(number)) if number.isdecimal() else (name, 0)


def step_row(step: StepLine) -> JsonObject:
    """Return a step as the page gets it."""
    return {"step": step.policy_version} | asdict(step)


def event_row(event: EventLine) -> JsonObject:
    """Return an event as the page gets it, with ``end_s`` where it has a duration."""
    row: JsonObject = {"time_s": event.time_s, "kind": event.kind, "text": event.text, "step": event.step}
    if event.seconds:
        row["end_s"] = event.time_s + event.seconds
    return row


def _padded(length: int) -> int:
    return -(-length // 8) * 8

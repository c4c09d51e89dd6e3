"""Runs and simulations as Chrome trace events: the file opens in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from streamrl.observe.dashboard.timeline_columns import TimelineColumns

MOST_REQUESTS = 200_000
"""Of one run or simulation, or no viewer opens the file."""
STEPS, TRAINING, PUSH = range(3)


class ChromeTrace:
    """Collects what runs did: of each, a process with its steps and one for each engine, with its requests."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._first_process = 0
        self._lanes: dict[int, list[float]] = {}
        self._left = 0

    def begin(self, name: str, engines: Sequence[str]) -> None:
        """Begin with another run, of these engines."""
        self._first_process += 1 + len(self._lanes)
        self._lanes = {index: [] for index in range(len(engines))}
        self._left = MOST_REQUESTS
        for process, title in enumerate(["steps", *engines]):
            self._add("process_name", process, 0, "M", args={"name": f"{name}: {title}"})

    def request(
        self, name: str, engine: int, launched_s: float, left_s: float, moments: Sequence[float], **arguments: Any
    ) -> None:
        """A request was at ``engine`` (a place in those of ``begin``) and left it, because it ended or was stopped. Its
        turns, by ``moments`` as in ``TimelineColumns``, and the times between them are bars below it."""
        if self._left <= 0:
            return
        self._left -= 1
        lanes = self._lanes[engine]
        lane = next((at for at, busy_until in enumerate(lanes) if busy_until <= launched_s), len(lanes))
        lanes[lane : lane + 1] = [left_s]
        self.span(name, 1 + engine, lane, launched_s, left_s - launched_s, arguments)
        for place, (since, until) in enumerate(pairwise((0.0, *moments))):
            part = f"turn {place // 2}" if place % 2 else "environment"
            self.span(part, 1 + engine, lane, launched_s + since, until - since, {})

    def step(self, step: Any, began_s: float, **arguments: Any) -> None:
        """Add a step with its parts: a ``StepLine``, or a row of the simulator, which has the same fields."""
        full = began_s + step.rollout_s
        ended = began_s + step.step_s
        arguments |= {"version": step.policy_version, "tokens": step.trained_tokens}
        self.span(f"{step.round_kind} rollout", 0, STEPS, began_s, step.rollout_s, arguments)
        self.span("training", 0, TRAINING, full, step.training_s, arguments)
        self.span("push", 0, PUSH, ended - step.push_s, step.push_s, arguments)

    def span(self, name: str, process: int, row: int, at_s: float, seconds: float, arguments: dict[str, Any]) -> None:
        """Add a bar to a row of a process of this run: 0 is that of its steps."""
        self._add(name, process, row, "X", ts=1e6 * at_s, dur=1e6 * seconds, args=arguments)

    def counter(self, name: str, at_s: float, values: dict[str, float]) -> None:
        """Add values to a curve of the run."""
        self._add(name, 0, 0, "C", ts=1e6 * at_s, args=values)

    def encoded(self) -> bytes:
        """Return the file."""
        return msgspec.json.encode({"traceEvents": self._events, "displayTimeUnit": "ms"})

    def _add(self, name: str, process: int, row: int, phase: str, **more: Any) -> None:
        self._events.append({"name": name, "ph": phase, "pid": self._first_process + process, "tid": row, **more})


def trace_run(name: str, timeline: TimelineColumns) -> tuple[ChromeTrace, int]:
    """The trace of a run, and how many of its first trajectories it leaves out: a viewer opens so many at most."""
    trace = ChromeTrace()
    head = timeline.head()
    count = timeline.count
    prompts = dict(enumerate(head["prompts"]))
    first = max(count - MOST_REQUESTS * count // max(count + head["moments"] - 1, 1), 0)  # turns are bars as well
    engines = list(dict.fromkeys(slot["engine"] for slot in head["slots"])) or [""]
    trace.begin(name, [engine or "engines" for engine in engines])
    of_slot = [engines.index(slot["engine"]) for slot in head["slots"] for _ in range(slot["lanes"])]
    rows = timeline.rows(first, count)
    names = [column["name"] for column in head["columns"]]
    order = np.argsort(timeline.column("launched", first), kind="stable").tolist()
    for row in (dict(zip(names, rows[at], strict=True)) for at in order):
        arguments = {key: row[key] for key in ("tokens", "reward", "oldest", "newest", "paused")}
        arguments |= {"outcome": head["outcomes"][row["outcome"]], "prompt": prompts.get(row["prompt"], "")}
        arguments |= {"queued": row["begun"] - row["launched"], "ended": row["ended"]}
        identity = f"{row['group']}.{row['sample']}"
        trace.request(identity, of_slot[row["slot"]], row["launched"], row["rollout_end"], row["turns"], **arguments)
    for step in timeline.steps:
        trace.step(step, step.time_s - step.step_s, samples=step.samples)
    kinds = list(dict.fromkeys(event.kind for event in timeline.events))
    for event in timeline.events:
        arguments = {"text": event.text, "step": event.step}
        trace.span(event.kind, 0, 3 + kinds.index(event.kind), event.time_s, event.seconds, arguments)
    load = head["engines"]
    for at, running, waiting in zip(load["time_s"], load["running"], load["waiting"], strict=True):
        trace.counter("requests", at, {"running": running, "waiting": waiting})
    return trace, first

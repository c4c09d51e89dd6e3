"""Runs and simulations as Chrome trace events, which https://ui.perfetto.dev and chrome://tracing open. ``streamrl
trace`` calls ``trace_run``, and ``streamrl simulate --timeline`` fills a ``ChromeTrace``, both in the process of the
command."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import json

from streamrl.base.types import JsonObject, Metrics
from streamrl.observe.dashboard.timeline_columns import TimelineColumns

MOST_REQUESTS = 200_000
"""Requests of one run or simulation: no viewer opens a larger file."""
STEPS, TRAINING, PUSH = range(3)
"""Rows of the process that shows the steps of a run."""


class ChromeTrace:
    """Collects the events of runs. The viewer shows a process with the steps of each run, and a process with the
    requests of each engine."""

    def __init__(self) -> None:
        self._events: list[JsonObject] = []
        self._first_process = 0
        self._lanes: dict[int, list[float]] = {}  # by engine, the time until which each of its rows is busy
        self._remaining_requests = 0

    def begin(self, name: str, engines: Sequence[str]) -> None:
        """Begin another run. ``engines``: names of its engines."""
        self._first_process += 1 + len(self._lanes)
        self._lanes = {index: [] for index in range(len(engines))}
        self._remaining_requests = MOST_REQUESTS
        for process, title in enumerate(["steps", *engines]):
            self._add("process_name", process, 0, "M", args={"name": f"{name}: {title}"})

    def request(
        self, name: str, engine: int, launched_s: float, left_s: float, moments: Sequence[float], **arguments: Any
    ) -> None:
        """Add a request that was on ``engine`` (an index into the engines of ``begin``) until it ended or was stopped.

        ``moments``: begin and end of each turn as in ``TimelineColumns``. The turns and the times between them are bars
        below the request."""
        if self._remaining_requests <= 0:
            return
        self._remaining_requests -= 1
        lanes = self._lanes[engine]
        lane = next((index for index, busy_until in enumerate(lanes) if busy_until <= launched_s), len(lanes))
        lanes[lane : lane + 1] = [left_s]
        self.span(name, 1 + engine, lane, launched_s, left_s - launched_s, arguments)
        for place, (since, until) in enumerate(pairwise((0.0, *moments))):
            part = f"turn {place // 2}" if place % 2 else "environment"
            self.span(part, 1 + engine, lane, launched_s + since, until - since, {})

    def step(self, step: Any, began_s: float, **arguments: Any) -> None:
        """Add a step with its parts. ``step``: a ``StepLine``, or a row of the simulator, which has the same fields."""
        batch_full_s = began_s + step.rollout_s
        end_s = began_s + step.step_s
        arguments |= {"version": step.policy_version, "tokens": step.trained_tokens}
        self.span(f"{step.round_kind} rollout", 0, STEPS, began_s, step.rollout_s, arguments)
        self.span("training", 0, TRAINING, batch_full_s, step.training_s, arguments)
        self.span("push", 0, PUSH, end_s - step.push_s, step.push_s, arguments)

    def span(self, name: str, process: int, row: int, at_s: float, seconds: float, arguments: JsonObject) -> None:
        """Add a bar to a row of a process of this run. ``process``: 0 for the steps, 1 and above for the engines."""
        self._add(name, process, row, "X", ts=1e6 * at_s, dur=1e6 * seconds, args=arguments)

    def counter(self, name: str, at_s: float, values: Metrics) -> None:
        """Add values to a curve of the run."""
        self._add(name, 0, 0, "C", ts=1e6 * at_s, args=values)

    def encoded(self) -> bytes:
        """Return the content of the file."""
        return json.encode({"traceEvents": self._events, "displayTimeUnit": "ms"})

    def _add(self, name: str, process: int, row: int, phase: str, **fields: Any) -> None:
        self._events.append({"name": name, "ph": phase, "pid": self._first_process + process, "tid": row, **fields})


def trace_run(name: str, timeline: TimelineColumns) -> tuple[ChromeTrace, int]:
    """Return the trace of a run, and the number of its first trajectories that are left out: a viewer opens at most
    ``MOST_REQUESTS``."""
    trace = ChromeTrace()
    head = timeline.head()
    count = timeline.count
    prompts = dict(enumerate(head["prompts"]))
    first = max(count - MOST_REQUESTS * count // max(count + head["moments"] - 1, 1), 0)  # turns are bars, too
    engines = list(dict.fromkeys(slot["engine"] for slot in head["slots"])) or [""]
    trace.begin(name, [engine_name or "engines" for engine_name in engines])
    engine_of_slot = [engines.index(slot["engine"]) for slot in head["slots"] for _ in range(slot["lanes"])]
    rows = timeline.rows(first, count)
    names = [column["name"] for column in head["columns"]]
    order = np.argsort(timeline.column("launched", first), kind="stable").tolist()
    for index in order:
        row = dict(zip(names, rows[index], strict=True))
        arguments = {key: row[key] for key in ("tokens", "reward", "oldest", "newest", "paused")}
        arguments |= {"outcome": head["outcomes"][row["outcome"]], "prompt": prompts.get(row["prompt"], "")}
        arguments |= {"queued": row["begun"] - row["launched"], "ended": row["ended"]}
        title = f"{row['group']}.{row['sample']}"
        engine = engine_of_slot[row["slot"]]
        trace.request(title, engine, row["launched"], row["rollout_end"], row["turns"], **arguments)
    for step in timeline.steps:
        trace.step(step, step.time_s - step.step_s, samples=step.samples)
    kinds = list(dict.fromkeys(event.kind for event in timeline.events))
    for event in timeline.events:
        arguments = {"text": event.text, "step": event.step}
        trace.span(event.kind, 0, 3 + kinds.index(event.kind), event.time_s, event.seconds, arguments)
    load = head["engines"]
    for time_s, running, waiting in zip(load["time_s"], load["running"], load["waiting"], strict=True):
        trace.counter("requests", time_s, {"running": running, "waiting": waiting})
    return trace, first

"""A simulation as Chrome trace events: the file opens in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.simulate.engines import Request
from streamrl.simulate.report import StepRow

MOST_REQUESTS = 200_000
"""Of one simulation; later ones are left out, or no viewer opens the file."""


class ChromeTrace:
    """Collects what simulations did: of each, a process with its steps and one for each engine, with its requests."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._first_process = 0
        self._lanes: dict[int, list[float]] = {}
        self._left = 0

    def begin(self, name: str, engines: int) -> None:
        """Begin with another simulation."""
        self._first_process += 1 + len(self._lanes)
        self._lanes = {index: [] for index in range(engines)}
        self._left = MOST_REQUESTS
        for process, title in enumerate(["steps", *(f"engine {index}" for index in range(engines))]):
            arguments = {"name": f"{name}: {title}"}
            self._add("process_name", process, 0, "M", args=arguments)

    def request(self, request: Request, engine: int, now: float) -> None:
        """A request left an engine, because it ended or was stopped."""
        if self._left <= 0:
            return
        self._left -= 1
        lanes = self._lanes[engine]
        lane = next((at for at, busy_until in enumerate(lanes) if busy_until <= request.launched_s), len(lanes))
        lanes[lane : lane + 1] = [now]
        arguments = {"tokens": int(request.sampled), "version": request.first_version, "stopped": request.stopped}
        self._span(request.request_id, 1 + engine, lane, request.launched_s, now - request.launched_s, arguments)

    def steps(self, rows: Sequence[StepRow]) -> None:
        """Add the steps of the simulation."""
        for row in rows:
            full, ended = row.began_s + row.rollout_s, row.began_s + row.step_s
            arguments = {"version": row.policy_version, "groups": row.groups, "tokens": row.trained_tokens}
            self._span(f"{row.round_kind} rollout", 0, 0, row.began_s, row.rollout_s, arguments)
            self._span("training", 0, 1, full, row.training_s, arguments)
            self._span("push", 0, 2, ended - row.push_s, row.push_s, arguments)

    def encoded(self) -> bytes:
        """Return the file."""
        return msgspec.json.encode({"traceEvents": self._events, "displayTimeUnit": "ms"})

    def _span(self, name: str, process: int, row: int, at_s: float, seconds: float, arguments: dict[str, Any]) -> None:
        self._add(name, process, row, "X", ts=1e6 * at_s, dur=1e6 * seconds, args=arguments)

    def _add(self, name: str, process: int, row: int, phase: str, **more: Any) -> None:
        self._events.append({"name": name, "ph": phase, "pid": self._first_process + process, "tid": row, **more})

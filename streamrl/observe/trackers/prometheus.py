"""The Prometheus tracker: the last metrics of a run at ``http://ADDRESS:PORT/metrics``, while the run goes on. It runs
in the process of its follower."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from streamrl.base.errors import StreamRLError
from streamrl.base.types import MetricsMapping, TextsByName
from streamrl.observe.run_files.metric_help import find_metric
from streamrl.observe.run_files.run_reader import RunFiles
from streamrl.observe.trackers.tracker import RunInfo, Tracker

PORT = 9464
_UNITS = (
    (r"tok_s$", "tokens_per_second"),
    (r"(samples|groups)_s$", r"\1_per_second"),
    (r"_tok(?=_|$)", "_tokens"),
    (r"_s(?=_total$|$)", "_seconds"),
)


class Prometheus(Tracker):
    """Answers a scrape with the last metrics of steps and evaluations, with the id of the run as label ``run``.
    Options: ``port`` (9464), ``address`` (127.0.0.1)."""

    def open(self, run: RunInfo) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()  # the default registry has the metrics of vLLM
        registry.register(self)
        self._run = run.run_id
        self._values = {"step": 0.0}
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        for line in RunFiles(run.directory).metric_lines():  # the lines that an earlier follower got
            self.metrics(line.step, line.time, line.values)
        port = int(run.options.get("port", PORT))
        address = run.options.get("address", "127.0.0.1")
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise StreamRLError(
                f'port {port} of {address} cannot be used ({error.strerror}): report to "prometheus?port=N"'
            ) from error

    def metrics(self, step: int, time_s: float, values: MetricsMapping) -> None:
        with self._lock:
            self._values |= {**values, "step": max(self._values["step"], step)}

    def event(self, step: int, kind: str, text: str) -> None:
        with self._lock:
            self._events[kind] += 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield every metric. Called once a scrape, in a thread of the server."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            figures = [(key, *name_and_labels(key), value) for key, value in self._values.items()]
            figures += [("events_total", "events_total", {"kind": kind}, count) for kind, count in self._events.items()]
        families: dict[str, list[tuple[str, TextsByName, float]]] = {}
        for key, name, labels, value in figures:
            families.setdefault(name, []).append((key, {"run": self._run, **labels}, value))
        for name, rows in families.items():
            names = list(dict.fromkeys(label for _, labels, _ in rows for label in labels))
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family: Any = kind(f"streamrl_{name.removesuffix('_total')}", f"{rows[0][0]} of streamrl", labels=names)
            for _, labels, value in rows:
                family.add_metric([labels.get(label, "") for label in names], value)
            yield family


def name_and_labels(key: str) -> tuple[str, TextsByName]:
    """Return the name and the labels of a metric for Prometheus: ``reward/func/exact/latency_p50_s`` becomes
    ``reward_func_latency_p50_seconds`` with ``function="exact"``."""
    metric, labels = find_metric(key) or (None, {})
    name = re.sub(r"<\w+>", "", metric.name) if metric else key
    name = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    for pattern, unit in _UNITS:
        name = re.sub(pattern, unit, name)
    return name, labels

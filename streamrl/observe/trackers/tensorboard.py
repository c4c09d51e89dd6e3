"""The TensorBoard tracker: event files in ``RUN/tensorboard``, by tensorboardX without torch. It runs in the process of
its follower, which the supervisor starts for each tracker and which sends it the lines of the run's files."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.base.run_events import CompletionSampled
from streamrl.base.types import MetricsMapping
from streamrl.observe.trackers.tracker import RunInfo, Tracker, sample_table

_BINS = 30
_LONGEST_CELL = 2000
_CLOCK_S = 1.0  # resolution of modification times, on coarse file systems


class TensorBoard(Tracker):
    """Writes no event twice. The follower stores a cursor (how far it has read the run's files), and after a kill sends
    again what follows it; this class reads what an earlier follower wrote since then, and leaves it out.

    It uses ``EventsWriter``, because ``SummaryWriter`` has a queue that ``flush`` does not empty, and a thread that
    dies of a full disk and then hangs its caller."""

    def open(self, run: RunInfo) -> None:
        self._parts = _import_without_torch()
        folder = run.directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        files = sorted(folder.glob("events.out.tfevents.*"))
        recent = [path for path in files if path.stat().st_mtime > run.moved_s - _CLOCK_S]
        self._written = {self._key(event) for path in recent for event in self._events(path)}
        # TensorBoard reads files in the order of their names, which hold the second of their start. The suffix orders
        # two files of one second.
        self._writer = self._parts.EventsWriter(str(folder / "events"), filename_suffix=f".{len(files):06d}")

    def metrics(self, step: int, time_s: float, values: MetricsMapping) -> None:
        make_value = self._parts.Summary.Value
        cells = [make_value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, time_s, self._parts.Summary(value=cells))

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        heads, cells = sample_table(step, rows)
        table = [heads, ["---"] * len(heads), *(list(map(_cell, row)) for row in cells)]
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
        self._write(step, time.time(), self._parts.text(f"samples/{kind}", text))

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        for name, column in values.items():
            array = np.asarray(column)
            counts, edges = np.histogram(array, bins=_BINS)
            histogram = self._parts.HistogramProto(
                min=array.min(),
                max=array.max(),
                num=len(array),
                sum=array.sum(),
                sum_squares=array.dot(array),
                bucket_limit=edges[1:].tolist(),
                bucket=counts.tolist(),
            )
            value = self._parts.Summary.Value(tag=f"histogram/{name}", histo=histogram)
            self._write(step, time.time(), self._parts.Summary(value=[value]))

    def event(self, step: int, kind: str, text: str) -> None:
        self._write(step, time.time(), self._parts.text(f"event/{kind}", text))

    def flush(self) -> None:
        self._writer.flush()  # with fsync

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, time_s: float, summary: Any) -> None:
        event = self._parts.Event(wall_time=time_s, step=step, summary=summary)
        if self._key(event) not in self._written:
            self._writer.write_event(event)

    def _key(self, event: Any) -> int:
        """Return a hash of an event, as a long run has gigabytes of events."""
        return hash((event.step, event.summary.SerializeToString()))

    def _events(self, path: Path) -> Iterator[Any]:
        """Yield the complete events of a file. An event is its length, a checksum of it, the data, and its checksum."""
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                (length,) = struct.unpack("<Q", head[:8])
                block = file.read(length + 4)
                if len(block) < length + 4:
                    break
                yield self._parts.Event.FromString(block[:length])


class _Parts:
    """The classes and the function of tensorboardX that are used."""

    def __init__(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary
        from tensorboardX.summary import text

        self.EventsWriter = EventsWriter
        self.Event = Event
        self.text = text
        self.HistogramProto = HistogramProto
        self.Summary = Summary


def _import_without_torch() -> _Parts:
    """Import tensorboardX while torch cannot be imported. It would take 190 MB and a second."""
    if "torch" in sys.modules:
        return _Parts()
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return _Parts()
    finally:
        del sys.modules["torch"]


def _cell(value: Any) -> str:
    """Return the text of a cell of a Markdown table, in which a completion is never markup."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)[:_LONGEST_CELL]
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")

"""TensorBoard: event files below ``RUN/tensorboard``, by tensorboardX without torch."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.base.run_events import CompletionSampled
from streamrl.observe.trackers.tracker import RunInfo, Tracker, sample_table

_BINS = 30
_LONGEST_CELL = 2000
_CLOCK_S = 1.0  # the times of files are coarse


class TensorBoard(Tracker):
    """Writes no event twice: those that a killed process wrote after the cursor had moved are looked up in its files.

    ``EventsWriter``, because ``SummaryWriter`` has a queue that ``flush`` does not empty, and a thread that dies of a
    full disk and then hangs its caller."""

    def open(self, run: RunInfo) -> None:
        self._parts = _import_without_torch()
        folder = run.directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        files = sorted(folder.glob("events.out.tfevents.*"))
        recent = [path for path in files if path.stat().st_mtime > run.moved_s - _CLOCK_S]
        self._there = {self._key(event) for path in recent for event in self._events(path)}
        # Readers take files in the order of their names, which begin with the second.
        self._writer = self._parts.EventsWriter(str(folder / "events"), filename_suffix=f".{len(files):06d}")

    def metrics(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        value = self._parts.Summary.Value
        self._write(step, time_s, self._parts.Summary(value=[value(tag=k, simple_value=v) for k, v in values.items()]))

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        heads, cells = sample_table(step, rows)
        table = [heads, ["---"] * len(heads), *(list(map(_cell, row)) for row in cells)]
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
        self._write(step, time.time(), self._parts.text(f"samples/{kind}", text))

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        for name, column in values.items():
            counts, edges = np.histogram(array := np.asarray(column), bins=_BINS)
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
        self._writer.flush()  # an fsync

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, time_s: float, summary: Any) -> None:
        event = self._parts.Event(wall_time=time_s, step=step, summary=summary)
        if self._key(event) not in self._there:
            self._writer.write_event(event)

    def _key(self, event: Any) -> int:
        """A hash: a long run has gigabytes of events."""
        return hash((event.step, event.summary.SerializeToString()))

    def _events(self, path: Path) -> Iterator[Any]:
        """Whole events of a file: each has its length, a checksum of it, the event, and its checksum."""
        with path.open("rb") as file:
            while len(head := file.read(12)) == 12:
                (length,) = struct.unpack("<Q", head[:8])
                block = file.read(length + 4)
                if len(block) < length + 4:
                    break
                yield self._parts.Event.FromString(block[:length])


class _Parts:
    """Classes of tensorboardX."""

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
    """tensorboardX imports torch where it finds it: 190 MB and a second."""
    if "torch" in sys.modules:
        return _Parts()
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return _Parts()
    finally:
        del sys.modules["torch"]


def _cell(value: Any) -> str:
    """A cell of a Markdown table, in which nothing of a completion is markup."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:_LONGEST_CELL]
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")

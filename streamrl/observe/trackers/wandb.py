"""Weights & Biases: online where a key is found, else files below ``RUN/wandb`` that ``wandb sync`` sends later."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import CompletionSampled
from streamrl.observe.trackers.tracker import RunInfo, Tracker, sample_table

log = logging.getLogger(__name__)

_LONGEST = 8000
_START = 7
_HEAD = struct.Struct("<IHB")
_BLOCK = 1 << 15
_ENDS = (1, 4)
_FLUSH_S = 1.0
_SENT_S = 30.0
_WRITTEN_S = 20.0


class Wandb(Tracker):
    """Metrics have the axis ``step``, which is a metric: wandb's own step must rise, and an evaluation that ends later
    than its step would be dropped. Its files are asked for what they have. Online, lines of the last 30 s before a kill
    come twice: wandb does not say what its server has."""

    def open(self, run: RunInfo) -> None:
        import wandb

        self._wandb = wandb
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        # Else it takes stdout and uploads code.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True)
        settings.x_transaction_log_flush_interval = _FLUSH_S
        begin = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT") or run.project,
            id=run.run_id,
            name=run.run_id,
            dir=str(run.directory),
            resume="allow",
            tags=run.tags,
            config=run.recipe,
            settings=settings,
        )
        try:
            self._run: Any = begin(mode=mode)
        except wandb.errors.CommError as error:
            log.warning("wandb cannot be reached (%s): it writes files, which wandb sync sends later", error)
            self._run = begin(mode="offline")
        self._rows = Rows(Path(self._run.settings.sync_file))
        self._logged = 0
        self._written = 0
        files = run.directory.glob("wandb/offline-run-*/*.wandb") if self._run.offline else ()
        self._there = {row for path in files if path != self._rows.path for row in map(hash, _rows_before(path))}
        self.lag_s = 0.0 if self._run.offline else _SENT_S
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._log(step, values)

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        """A table of its own each time: one that grows keeps every row in memory, and the functions of the first."""
        heads, table = sample_table(step, rows)
        cells = [[cell[:_LONGEST] if isinstance(cell, str) else cell for cell in row] for row in table]
        table = self._wandb.Table(columns=heads, data=cells, allow_mixed_types=True)
        self._log(step, {f"samples/{kind}": table})

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        made = {f"histogram/{name}": self._wandb.Histogram(list(column)) for name, column in values.items()}
        self._log(step, made)

    def event(self, step: int, kind: str, text: str) -> None:
        self._log(step, {f"event/{kind}": text})

    def flush(self) -> None:
        """A process of its own writes them, and says nothing of a full disk. Raises ``StreamRLError``."""
        deadline_s = time.monotonic() + _WRITTEN_S
        while not self._run.disabled:
            self._written += sum(1 for _ in self._rows.read())
            if self._written >= self._logged:
                break
            if time.monotonic() > deadline_s:
                raise StreamRLError(f"wandb has not written {self._rows.path} for {_WRITTEN_S:g} s: is its disk full?")
            time.sleep(_FLUSH_S / 10)

    def close(self) -> None:
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if hash((step, frozenset(values))) not in self._there:
            self._run.log({"step": step, **values})
            self._logged += 1


class Rows:
    """Rows in a file of wandb: LevelDB's log format (checksum, length, kind; blocks of 32 KiB) after 7 bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = _START

    def read(self) -> Iterator[tuple[int, frozenset[str]]]:
        """The step and the names of those that came since the last call."""
        from wandb.proto.wandb_internal_pb2 import Record

        with self.path.open("rb") as file:
            file.seek(self.end)
            whole = b""
            while True:
                if (left := _BLOCK - file.tell() % _BLOCK) < _HEAD.size:
                    file.seek(left, os.SEEK_CUR)
                if len(head := file.read(_HEAD.size)) < _HEAD.size:
                    break
                check, length, kind = _HEAD.unpack(head)
                if crc32(part := file.read(length), crc32(head[6:])) != check or len(part) < length:
                    break  # it is not whole yet, or never will be
                whole += part
                if kind in _ENDS:
                    record = Record.FromString(whole)
                    whole = b""
                    self.end = file.tell()
                    if record.WhichOneof("record_type") == "history":
                        items = {one.key or one.nested_key[0]: one.value_json for one in record.history.item}
                        names = frozenset(name for name in items if not name.startswith("_") and name != "step")
                        yield json.loads(items["step"]), names


def _rows_before(path: Path) -> list[tuple[int, frozenset[str]]]:
    """Rows of a process before this one. Half a record, or a file without any, is removed: wandb sync ends at it."""
    rows = Rows(path)
    found = [*rows.read()]
    if rows.end == _START:
        shutil.rmtree(path.parent, ignore_errors=True)
    else:
        os.truncate(path, rows.end)
    return found

"""The Weights & Biases tracker: online where there is a key, else files in ``RUN/wandb`` that ``wandb sync`` sends
later. It runs in the process of its follower."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen
from zlib import crc32

from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import CompletionSampled
from streamrl.base.types import JsonMapping
from streamrl.observe.trackers.tracker import RowTracker, RunInfo, sample_table

log = logging.getLogger(__name__)

_LONGEST_CELL = 8000
_START = 7  # bytes before the first chunk of a file of wandb
_HEAD = struct.Struct("<IHB")  # head of a chunk: checksum, length, kind
_BLOCK = 1 << 15
_ENDS = (1, 4)  # kinds of the last chunk of a record
_CONNECT_S = 10.0
_FLUSH_S = 1.0
_SENT_S = 30.0
_WRITTEN_S = 20.0


class Wandb(RowTracker):
    """Logs metrics over the axis ``step``, which is a metric: the step of wandb must rise, and an evaluation that ends
    after later steps would be dropped. Offline it reads the files of earlier followers, and logs no row twice. Online,
    lines of the last 30 s before a kill are sent twice, because wandb does not say which rows its server has."""

    def open(self, run: RunInfo) -> None:
        import wandb

        self._library = wandb
        mode: Any = os.environ.get("WANDB_MODE")
        if not mode:
            has_key = wandb.login(prompt=False, verify=False)
            mode = "online" if has_key and _answers(wandb.setup().settings.base_url) else "offline"
        # With other settings wandb captures stdout and uploads code.
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
            log.warning("wandb: %s: files are written, which wandb sync sends later", error)
            wandb.teardown()  # its service still holds the id of this run
            self._run = begin(mode="offline")
        self._rows = Rows(Path(self._run.settings.sync_file))
        self._logged = 0
        self._written = 0
        self._earlier_rows = set()
        self.lag_s = _SENT_S
        if self._run.offline:
            self.lag_s = 0.0
            for path in run.directory.glob("wandb/offline-run-*/*.wandb"):
                if path != self._rows.path:
                    self._earlier_rows.update(map(hash, _rows_before(path)))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        """Log a new table each time: a table that grows keeps every row in memory, and the columns of its first
        rows."""
        heads, table = sample_table(step, rows)
        cells = [[cell[:_LONGEST_CELL] if isinstance(cell, str) else cell for cell in row] for row in table]
        table = self._library.Table(columns=heads, data=cells, allow_mixed_types=True)
        self._log(step, {f"samples/{kind}": table})

    def flush(self) -> None:
        """Wait until the rows are in the file. The process of wandb that writes them does not report a full disk.
        Raises ``StreamRLError``."""
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

    def _add_row(self, step: int, values: JsonMapping) -> None:
        self._run.log({"step": step, **values})
        self._logged += 1


def _answers(address: str) -> bool:
    """Return whether a server is there, which wandb itself tries for 90 s. Hosts of a cluster often have a key and no
    way to the server."""
    try:
        urlopen(address, timeout=_CONNECT_S).close()
    except HTTPError:  # an answer
        return True
    except OSError as error:
        log.warning("wandb: %s does not answer (%s): files are written, which wandb sync sends later", address, error)
        return False
    return True


class Rows:
    """Reads the rows of a file of wandb: 7 bytes, then blocks of 32 KiB in the log format of LevelDB, whose chunks have
    a checksum, a length and a kind. ``end``: position behind the last complete record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = _START

    def read(self) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield the step and the names of each row that was added since the last call."""
        from wandb.proto.wandb_internal_pb2 import Record

        with self.path.open("rb") as file:
            file.seek(self.end)
            record_bytes = b""
            while True:
                block_rest = _BLOCK - file.tell() % _BLOCK
                if block_rest < _HEAD.size:
                    file.seek(block_rest, os.SEEK_CUR)  # padding
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    break
                check, length, kind = _HEAD.unpack(head)
                chunk = file.read(length)
                if crc32(chunk, crc32(head[6:])) != check or len(chunk) < length:
                    break  # it is not complete yet, or never will be
                record_bytes += chunk
                if kind in _ENDS:
                    record = Record.FromString(record_bytes)
                    record_bytes = b""
                    self.end = file.tell()
                    if record.WhichOneof("record_type") == "history":
                        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                        names = frozenset(name for name in items if not name.startswith("_") and name != "step")
                        yield json.loads(items["step"]), names


def _rows_before(path: Path) -> list[tuple[int, frozenset[str]]]:
    """Return the rows of an earlier follower. An incomplete record, or a file without records, is removed, because
    wandb sync would end at it."""
    rows = Rows(path)
    earlier_rows = [*rows.read()]
    if rows.end == _START:
        shutil.rmtree(path.parent, ignore_errors=True)
    else:
        os.truncate(path, rows.end)
    return earlier_rows

"""Rows of parquet, Arrow and CSV files, read with pyarrow (not with ``datasets`` or pandas). ``open_prompts`` opens
them in the process that draws or checks prompts.

Arrow files are mapped into memory, so that a table may be larger than the memory. Parquet has no fast access to one
row: its row groups are written one by one to a nameless temporary Arrow file, which is then mapped."""

from __future__ import annotations

import bisect
import mmap
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.base.types import JsonObject
from streamrl.pretrained.lfs_pointers import pointer_problem
from streamrl.run.prompts.prompt_rows import BadRow, RowStore, without_nulls

_CHAT_COLUMNS = ("prompt", "messages", "tools", "chat_template_kwargs")


class TableRows(RowStore):
    """Rows of the tables in ``files``. ``path``: file or directory of the source, for messages. Raises ``RecipeError``
    when there is nothing to read."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self._open: list[mmap.mmap] = []
        self._batches: list[pa.RecordBatch] = []
        try:
            for file in files:
                if problem := pointer_problem(file):
                    raise pa.ArrowInvalid(problem)
                self._batches += [_checked(batch) for batch in self._read(file) if batch.num_rows]
        except (pa.ArrowException, OSError, LookupError, *UNDECODABLE) as error:
            self.close()
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise RecipeError(f"prompts {path} cannot be read ({reason}): correct the path, or the file") from error
        # Index of the row after the last one of each batch.
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        if not self._ends:
            raise RecipeError(f"prompts {path} is empty: add rows")
        self.size = self._ends[-1]
        self.columns = frozenset.intersection(*(frozenset(batch.schema.names) for batch in self._batches))

    def row(self, index: int) -> JsonObject:
        """Return the values of a row as Python objects. Raises ``BadRow``."""
        place = bisect.bisect_right(self._ends, index)
        batch = self._batches[place]
        start = self._ends[place] - batch.num_rows
        try:
            row = batch.slice(index - start, 1)
            row.validate(full=True)  # offsets in a broken file may lead beyond its end
            columns = dict(row.to_pylist()[0])
        except (pa.ArrowException, LookupError, *UNDECODABLE) as error:
            raise BadRow(f"has a value that Python cannot represent ({error}): convert the column") from error
        return columns | {name: without_nulls(columns[name]) for name in _CHAT_COLUMNS if name in columns}

    def close(self) -> None:
        """Release the memory maps; rows read so far stay valid."""
        self._batches = []
        self._open = []

    def _read(self, file: Path) -> Sequence[pa.RecordBatch]:
        if file.suffix in (".csv", ".tsv"):
            return _read_csv(file)
        if file.suffix != ".parquet":
            with file.open("rb") as arrow_file:
                return self._map(arrow_file)
        with tempfile.TemporaryFile(prefix="streamrl-prompts-") as copy:
            # Not the file format of Arrow, which takes one dictionary for all batches: row groups have their own.
            with pq.ParquetFile(file) as parquet, pa.ipc.new_stream(copy, parquet.schema_arrow) as writer:
                for batch in parquet.iter_batches():
                    writer.write_batch(batch)
            copy.flush()
            return self._map(copy)

    def _map(self, arrow_file: IO[bytes]) -> Sequence[pa.RecordBatch]:
        """Return the batches of an Arrow file or stream, without a copy."""
        mapped = mmap.mmap(arrow_file.fileno(), 0, access=mmap.ACCESS_READ)
        self._open.append(mapped)
        source = pa.py_buffer(mapped)
        if mapped[:6] == b"ARROW1":
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(index) for index in range(reader.num_record_batches)]
        return list(pa.ipc.open_stream(source))


def _read_csv(file: Path) -> Sequence[pa.RecordBatch]:
    """Return the rows of a file of comma or tab separated values. Dates stay text, as pandas leaves them,
    and values that are not UTF-8 are refused."""
    parsing = csv.ParseOptions(delimiter="\t" if file.suffix == ".tsv" else ",", newlines_in_values=True)
    table = csv.read_csv(file, parse_options=parsing)
    texts = {
        field.name: pa.string()
        for field in table.schema
        if pa.types.is_temporal(field.type) or pa.types.is_binary(field.type)
    }
    if texts:
        table = csv.read_csv(file, parse_options=parsing, convert_options=csv.ConvertOptions(column_types=texts))
    return list(table.to_batches())


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return ``batch`` after a check that its buffers are long enough, and its columns have names of their own. Their
    content is checked for each row."""
    batch.validate()
    for name, count in Counter(batch.schema.names).most_common(1):
        if count > 1:
            raise pa.ArrowInvalid(f"{count} columns are named {name}")
    return batch

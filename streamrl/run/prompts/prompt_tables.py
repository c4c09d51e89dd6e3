"""Rows of parquet and Arrow tables, and of Hugging Face dataset directories, read with pyarrow (not with ``datasets``
or pandas). ``open_prompts`` opens them in the process that draws or checks prompts.

Arrow files are mapped into memory, so that a table may be larger than the memory. Parquet has no fast access to one
row: its row groups are written one by one to a nameless temporary Arrow file, which is then mapped."""

from __future__ import annotations

import bisect
import mmap
import re
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.run.prompts.prompt_rows import BadRow, RowStore, without_nulls

_SHARD = re.compile(r"[-_.]?\d+[-_]of[-_]\d+(-[0-9a-f]+)?$")
_CHAT_COLUMNS = ("prompt", "messages", "tools")
_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"


class _SavedFile(msgspec.Struct):
    """A file of a ``_SavedState``."""

    filename: str


class _SavedState(msgspec.Struct):
    """``state.json`` of ``Dataset.save_to_disk``."""

    files: list[_SavedFile] = msgspec.field(name="_data_files")


class _SavedSplits(msgspec.Struct):
    """``dataset_dict.json`` of ``DatasetDict.save_to_disk``."""

    splits: list[str]


class TableRows(RowStore):
    """Rows of a table. Raises ``RecipeError`` when there is nothing to read, or several splits and no ``split``."""

    def __init__(self, path: Path, split: str = "", files: Sequence[Path] = ()) -> None:
        files = files or find_table_files(path, split)
        self._open: list[mmap.mmap] = []
        self._batches: list[pa.RecordBatch] = []
        try:
            for file in files:
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

    def row(self, index: int) -> dict[str, Any]:
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
        if file.suffix != ".parquet":
            with file.open("rb") as arrow_file:
                return self._map(arrow_file)
        with tempfile.TemporaryFile(prefix="streamrl-prompts-") as copy:
            with pq.ParquetFile(file) as parquet, pa.ipc.new_file(copy, parquet.schema_arrow) as writer:
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


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return ``batch`` after a check that its buffers are long enough. Their content is checked for each row."""
    batch.validate()
    return batch


def find_table_files(path: Path, split: str = "") -> list[Path]:
    """Return ``path`` itself, or the files of one split of a dataset directory, in order. Raises ``RecipeError`` with
    the names of the splits when there are several and ``split`` is none of them."""
    if not path.is_dir():
        if split:
            raise RecipeError(f'prompts {path} is a file and has no split "{split}": remove the option')
        return [path]
    if (path / _SAVED_SPLITS).is_file():
        splits = _decode(path / _SAVED_SPLITS, _SavedSplits).splits
        return find_table_files(_inside(path, _matching_split(path, splits, split)))
    if (path / _SAVED).is_file():
        if split:
            raise RecipeError(f'prompts {path} has no splits, so no "{split}": remove the option')
        return [_inside(path, file.filename) for file in _decode(path / _SAVED, _SavedState).files]
    by_split: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*.parquet")):
        inside = file.relative_to(path)
        if not any(part.startswith(".") for part in inside.parts):
            by_split.setdefault(str(inside.parent / _SHARD.sub("", file.stem)), []).append(file)
    if not by_split:
        raise RecipeError(
            f"prompts {path} is no dataset directory (no .parquet files, no {_SAVED} and no {_SAVED_SPLITS}): correct "
            "the path, or convert it"
        )
    return by_split[_matching_split(path, list(by_split), split)]


def _inside(path: Path, name: str) -> Path:
    """Return the path of a file in a dataset directory. Raises ``RecipeError`` for a name that leads outside."""
    if name in ("", "..") or Path(name).name != name or "\0" in name:
        raise RecipeError(
            f"prompts {path} name {name!r:.80}, which is no file of that directory: save the dataset again"
        )
    return path / name


def _matching_split(path: Path, splits: Sequence[str], split: str) -> str:
    """Return the only split, or the one with the name ``split``, or else the only one whose path ends with it."""
    if not split and len(splits) == 1:
        return splits[0]
    matches = [name for name in splits if name == split]
    if not matches:
        matches = [name for name in splits if name.endswith(f"/{split}")]
    if split and len(matches) == 1:
        return matches[0]
    problem = f'has no split "{split}"' if split and not matches else "has several splits"
    raise RecipeError(f"prompts {path} {problem}: add ?split=NAME, with one of {', '.join(splits)}")


def _decode(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE) as error:
        raise RecipeError(f"prompts {path} cannot be read ({error}): save the dataset again") from error

"""Rows of parquet and Arrow tables, and of Hugging Face dataset directories, on pyarrow (no ``datasets``, no pandas).

Arrow files are mapped into memory, so a table may be larger than it. Parquet has no quick way to one row: it is
written, row group after row group, to a nameless temporary Arrow file, which is mapped then."""

from __future__ import annotations

import bisect
import mmap
import re
import tempfile
from collections.abc import Sequence
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
    """One of its ``files``."""

    filename: str


class _SavedState(msgspec.Struct):
    """``state.json`` of ``Dataset.save_to_disk``."""

    files: list[_SavedFile] = msgspec.field(name="_data_files")


class _SavedSplits(msgspec.Struct):
    """``dataset_dict.json`` of ``DatasetDict.save_to_disk``."""

    splits: list[str]


class TableRows(RowStore):
    """Raises ``RecipeError`` when there is nothing to read, or a choice to make."""

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
        self._ends: list[int] = []
        for batch in self._batches:
            self._ends.append((self._ends[-1] if self._ends else 0) + batch.num_rows)
        if not self._ends:
            raise RecipeError(f"prompts {path} is empty: add rows")
        self.size = self._ends[-1]
        self.columns = frozenset.intersection(*(frozenset(batch.schema.names) for batch in self._batches))

    def row(self, index: int) -> dict[str, Any]:
        """The values of a row as Python objects. Raises ``BadRow``."""
        which = bisect.bisect_right(self._ends, index)
        batch = self._batches[which]
        start = self._ends[which] - batch.num_rows
        try:
            row = batch.slice(index - start, 1)
            row.validate(full=True)  # offsets of a broken file lead beyond its end
            columns = dict(row.to_pylist()[0])
        except (pa.ArrowException, LookupError, *UNDECODABLE) as error:
            raise BadRow(f"has a value that Python cannot represent ({error}): convert the column") from error
        return columns | {name: without_nulls(columns[name]) for name in _CHAT_COLUMNS if name in columns}

    def close(self) -> None:
        """Let the maps go; rows read so far stay valid."""
        self._batches = []
        self._open = []

    def _read(self, file: Path) -> Sequence[pa.RecordBatch]:
        if file.suffix != ".parquet":
            with file.open("rb") as opened:
                return self._map(opened)
        with tempfile.TemporaryFile(prefix="streamrl-prompts-") as copy:
            with pq.ParquetFile(file) as parquet, pa.ipc.new_file(copy, parquet.schema_arrow) as writer:
                for batch in parquet.iter_batches():
                    writer.write_batch(batch)
            copy.flush()
            return self._map(copy)

    def _map(self, opened: IO[bytes]) -> Sequence[pa.RecordBatch]:
        """Batches of an Arrow file or stream, without a copy."""
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._open.append(mapped)
        source = pa.py_buffer(mapped)
        if mapped[:6] == b"ARROW1":
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(index) for index in range(reader.num_record_batches)]
        return list(pa.ipc.open_stream(source))


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Check that the buffers are as long as their rows need. Their content is checked row by row."""
    batch.validate()
    return batch


def find_table_files(path: Path, split: str = "") -> list[Path]:
    """The files that ``path`` means, in order: itself, or those of one split of a dataset directory. Raises
    ``RecipeError`` naming the splits when there are several and ``split`` names none of them."""
    if not path.is_dir():
        if split:
            raise RecipeError(f'prompts {path} is a file and has no split "{split}": remove the option')
        return [path]
    if (path / _SAVED_SPLITS).is_file():
        splits = _decode(path / _SAVED_SPLITS, _SavedSplits).splits
        return find_table_files(_inside(path, _chosen(path, splits, split)))
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
        what = f"no .parquet files, no {_SAVED} and no {_SAVED_SPLITS}"
        raise RecipeError(f"prompts {path} is no dataset directory ({what}): correct the path, or convert it")
    return by_split[_chosen(path, list(by_split), split)]


def _inside(path: Path, name: str) -> Path:
    """A file of a dataset directory, which names no other places."""
    if name in ("", "..") or Path(name).name != name or "\0" in name:
        raise RecipeError(
            f"prompts {path} name {name!r:.80}, which is no file of that directory: save the dataset again"
        )
    return path / name


def _chosen(path: Path, splits: Sequence[str], split: str) -> str:
    """The split that is meant: by its name, or by the end of its path where that is one split's only."""
    if not split and len(splits) == 1:
        return splits[0]
    named = [name for name in splits if name == split] or [name for name in splits if name.endswith(f"/{split}")]
    if split and len(named) == 1:
        return named[0]
    there = ", ".join(splits)
    problem = f'has no split "{split}"' if split and not named else "has several splits"
    raise RecipeError(f"prompts {path} {problem}: add ?split=NAME, with one of {there}")


def _decode(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE) as error:
        raise RecipeError(f"prompts {path} cannot be read ({error}): save the dataset again") from error

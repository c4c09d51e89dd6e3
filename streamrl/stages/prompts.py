"""Where prompts come from: a JSONL file, or the user's Python (async) iterator.

``open_prompts`` gives a ``PromptSource``; ``check_prompts`` finds what is wrong with a source before anything starts.
A file is read by an index of line offsets (8 bytes a row), never held in memory; it has epochs, each in its own order.
An iterator runs on a thread and an event loop of its own, so that user code that blocks does not stop the controller.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import anyio
import anyio.to_thread
import numpy as np

from streamrl.errors import RecipeError, StreamRLError
from streamrl.stages.prompt_iterator import IteratorPrompts
from streamrl.stages.prompt_probe import probe_in_subprocess
from streamrl.stages.prompt_rows import BadRow, decode_row, read_prompt
from streamrl.tokenizer import Tokenizer
from streamrl.types import Prompt

_FILE_ENDINGS = (".jsonl", ".ndjson")
_MOST_PROBLEMS = 20


class PromptSource(Protocol):
    """Prompts, in order. ``size``: prompts in one epoch; None for an iterator, which has no epochs."""

    @property
    def size(self) -> int | None: ...

    async def draw(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer only when the source is exhausted (a file never is: its epochs repeat).

        Raises ``StreamRLError`` naming the row and the remedy when a row is no prompt or user code fails.
        A draw that is cancelled loses nothing: the next one gets its prompts.
        """
        ...

    async def aclose(self) -> None:
        """Close the file, or the user's iterator. Idempotent."""
        ...


def open_prompts(
    spec: str, tokenizer: Tokenizer, *, seed: int, shuffle: bool, max_tokens: int | None = None, start: int = 0
) -> PromptSource:
    """Open ``path.jsonl``, ``module:name`` or ``file.py:name``.

    ``shuffle`` (files): each epoch in an order that depends on ``(seed, epoch)`` only. ``max_tokens``: the longest
    prompt that the context has room for. ``start`` (files): so many prompts were drawn by an earlier life of the run;
    an iterator begins anew. Raises ``RecipeError`` when a file is missing or empty; user code is
    imported at the first draw, on its own thread.
    """
    if is_file(spec):
        return FilePrompts(Path(spec), tokenizer, seed=seed, shuffle=shuffle, max_tokens=max_tokens, start=start)
    return IteratorPrompts(spec, tokenizer, max_tokens=max_tokens)


def is_file(spec: str) -> bool:
    """Whether ``spec`` names a file of rows; otherwise it names a Python object. Raises ``RecipeError`` for neither."""
    if spec.endswith(_FILE_ENDINGS):
        return True
    if ":" in spec:
        return False
    raise RecipeError([f'prompts "{spec}" is neither a .jsonl file nor "module:name" nor "file.py:name": correct it'])


class FilePrompts:
    """Rows of a JSONL file, epoch after epoch."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, *, seed: int, shuffle: bool, max_tokens: int | None, start: int = 0
    ) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._seed = seed
        self._shuffle = shuffle
        self._max_tokens = max_tokens
        self._file = _open_file(path)
        self._offsets = array("Q")
        self._numbers = array("Q")
        for offset, number, _ in _lines(self._file):
            self._offsets.append(offset)
            self._numbers.append(number)
        if not self._offsets:
            self._file.close()
            raise RecipeError([f"prompts {path} is empty: add rows"])
        self._offsets.append(self._file.tell())
        self._drawn = start
        self._order = (0, self._shuffled(0))
        self._lock = anyio.Lock()

    @property
    def size(self) -> int:
        """Rows of the file."""
        return len(self._numbers)

    async def draw(self, count: int) -> list[Prompt]:
        """See ``PromptSource``."""
        async with self._lock:
            # A thread: disks may be slow, and tokenizing 1,000 prompts takes longer than the control loop may stop.
            prompts = await anyio.to_thread.run_sync(self._read, self._drawn, count)
            self._drawn += count  # only now: a draw that is cancelled is drawn again
            return prompts

    async def aclose(self) -> None:
        """See ``PromptSource``."""
        self._file.close()

    def _read(self, start: int, count: int) -> list[Prompt]:
        """Prompts number ``start`` to ``start + count`` of the run. Changes nothing that another read needs."""
        prompts: list[Prompt] = []
        for position in range(start, start + count):
            epoch, row = divmod(position, self.size)
            if self._order[0] != epoch:
                self._order = (epoch, self._shuffled(epoch))
            prompts.append(self._read_row(int(self._order[1][row])))
        return prompts

    def _read_row(self, index: int) -> Prompt:
        start, end = self._offsets[index], self._offsets[index + 1]
        number = self._numbers[index]
        try:
            row = decode_row(os.pread(self._file.fileno(), end - start, start).strip())
            return read_prompt(row, number, self._tokenizer, self._max_tokens)
        except BadRow as error:
            raise StreamRLError(f"prompts {self._path}, line {number} {error}") from error

    def _shuffled(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if not self._shuffle:
            return np.arange(self.size)
        # NumPy promises the raw stream of a bit generator across its versions, not that of permutation().
        keys = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.size)
        return np.argsort(keys, kind="stable")


def check_prompts(
    spec: str,
    tokenizer: Tokenizer,
    needed_columns: Mapping[str, Sequence[str]],
    max_tokens: int | None = None,
    *,
    timeout_s: float = 60.0,
) -> list[str]:
    """Everything that is wrong with a source, one line each, at most 20 of them; empty: nothing is.

    A file is read whole. Of an iterator the first row is drawn, in a throw-away process and within ``timeout_s``.
    ``needed_columns``: columns by the name of the reward that needs them (``streamrl.rewards.needed_columns``).
    """
    try:
        if is_file(spec):
            problems = _check_file(Path(spec), tokenizer, needed_columns, max_tokens)
        else:
            problems = _check_iterator(spec, tokenizer, needed_columns, max_tokens, timeout_s)
    except RecipeError as error:
        return error.problems
    if len(problems) > _MOST_PROBLEMS:
        more = len(problems) - _MOST_PROBLEMS
        return [*problems[:_MOST_PROBLEMS], f"prompts {spec}: and {more} more problems like these"]
    return problems


def _check_file(
    path: Path, tokenizer: Tokenizer, needed_columns: Mapping[str, Sequence[str]], max_tokens: int | None
) -> list[str]:
    problems: list[str] = []
    first_line: dict[int, int] = {}
    rows = 0
    with _open_file(path) as file:
        for _, number, line in _lines(file):
            rows += 1
            place = f"prompts {path}, line {number}"
            try:
                row = decode_row(line)
                prompt = read_prompt(row, number, tokenizer, max_tokens)
            except BadRow as error:
                problems.append(f"{place} {error}")
                continue
            problems += [f"{place} {missing}" for missing in missing_columns(prompt, needed_columns)]
            # Hashes: a set of the ids of a large file would not be small.
            earlier = first_line.setdefault(hash(prompt.prompt_id), number)
            if earlier != number:
                problems.append(f'{place} has the prompt_id "{prompt.prompt_id}" of line {earlier}: make ids unique')
    return problems if rows else [f"prompts {path} is empty: add rows"]


def _check_iterator(
    spec: str,
    tokenizer: Tokenizer,
    needed_columns: Mapping[str, Sequence[str]],
    max_tokens: int | None,
    timeout_s: float,
) -> list[str]:
    row, problem = probe_in_subprocess(spec, timeout_s)
    if problem:
        return [problem]
    try:
        prompt = read_prompt(row, 1, tokenizer, max_tokens)
    except BadRow as error:
        return [f"prompts {spec}, row 1 {error}"]
    return [f"prompts {spec}, row 1 {missing}" for missing in missing_columns(prompt, needed_columns)]


def missing_columns(prompt: Prompt, needed_columns: Mapping[str, Sequence[str]]) -> list[str]:
    """What rewards need and ``prompt`` has not, a line each."""
    return [
        f'has no column "{column}", which the reward {reward} needs: add it'
        for reward, columns in needed_columns.items()
        for column in columns
        if column not in prompt.columns
    ]


def _open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RecipeError([f"prompts {path} cannot be read ({error.strerror}): correct the path"]) from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Offset, number (from 1) and bytes of every line that is not blank; a byte order mark is skipped."""
    offset = 0
    for number, line in enumerate(file, start=1):
        start = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
        if line[start:].strip():
            yield offset + start, number, line[start:]
        offset += len(line)

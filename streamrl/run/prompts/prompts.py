"""Opening and checking of prompt sources: files of rows, Hugging Face datasets, tasks of reasoning-gym, or the user's
own iterator.

``open_prompts`` gives a ``OpenPrompts``; ``check_prompts`` finds what is wrong with a source before anything starts.
Stored rows are read one by one, never loaded as a whole; they have epochs, each in its own order. An iterator runs on a
thread and an event loop of its own, so that user code that blocks does not stop the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Protocol

import anyio
import anyio.to_thread
import numpy as np

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt
from streamrl.contracts import PromptSource
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.rewards.signature import column_of, missing_column
from streamrl.run.prompts.first_row import first_row
from streamrl.run.prompts.prompt_iterator import IteratorPrompts
from streamrl.run.prompts.prompt_rows import BadRow, LineRows, RowStore, read_prompt, to_form
from streamrl.run.prompts.prompt_spec import LINE_ENDINGS, PromptSpec, SourceKind, read_spec

_MOST_PROBLEMS = 20
_TASK_ROWS_CHECKED = 16


class OpenPrompts(PromptSource, Protocol):
    """Prompts, in order. ``size``: prompts in one epoch; None for an iterator, which has no epochs."""

    @property
    def size(self) -> int | None: ...

    async def aclose(self) -> None:
        """Close the files, or the user's iterator. Idempotent."""
        ...


def open_prompts(spec: str, tokenizer: Tokenizer | None, *, seed: int, shuffle: bool, start: int = 0) -> OpenPrompts:
    """Open what ``spec`` names (``streamrl.run.prompts.prompt_spec``).

    ``shuffle`` (stored rows): each epoch in an order that depends on ``(seed, epoch)`` only. ``start``: so many prompts
    were drawn by an earlier life of the run; an iterator is read again so far, unless it is live (``UserRows``). Raises
    ``RecipeError`` when a file is missing or empty, a library is not installed or an option is wrong; user code is
    imported at the first draw, on its own thread."""
    named = read_spec(spec)
    if named.kind is SourceKind.ITERATOR:
        return IteratorPrompts(spec, tokenizer, start=start)
    return StoredPrompts(named, open_rows(named), tokenizer, seed=seed, shuffle=shuffle, start=start)


def open_rows(spec: PromptSpec) -> RowStore:
    """The rows that ``spec`` names. Raises ``RecipeError``. Not for iterators."""
    limit = None if spec.kind is SourceKind.TASK else spec.options.get("limit")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise RecipeError(f'prompts "{spec.source}": limit = {limit} is no integer >= 1: correct it')
    store = _open_rows(spec)
    store.size = min(store.size, limit or store.size)
    return store


def _open_rows(spec: PromptSpec) -> RowStore:
    if spec.kind is SourceKind.TASK:
        from streamrl.run.prompts.prompt_tasks import TaskRows

        return TaskRows(spec)
    if spec.path.exists() and not (spec.path.is_file() or spec.path.is_dir()):
        raise RecipeError(f"prompts {spec.path} is not a regular file: write its rows to one")
    if spec.kind is SourceKind.LINES:
        spec.take("limit")
        return LineRows(spec.path)
    options = spec.take("split", "limit", "files")
    files = spec.files
    if lines := [file for file in files if file.name.endswith(LINE_ENDINGS)]:
        if len(files) > 1:
            named = ", ".join(file.name for file in files)
            raise RecipeError(f"prompts {spec.path} has {named}: of JSONL name one file with ?files=, or join them")
        return LineRows(lines[0])
    try:
        from streamrl.run.prompts.prompt_tables import TableRows
    except ModuleNotFoundError as error:
        install = "pip install 'streamrl[rewards]'"
        raise RecipeError(f'prompts "{spec.text}" need {error.name}: {install}') from error
    return TableRows(spec.path, str(options.get("split", "")), files)


def stored_rows(spec: str) -> int | None:
    """Count the rows that ``spec`` names; None for an iterator. Raises ``RecipeError``."""
    named = read_spec(spec)
    if named.kind is SourceKind.ITERATOR:
        return None
    with closing(open_rows(named)) as rows:
        return rows.size


def missing_source(spec: str) -> list[str]:
    """Find faults of a source without reading it: whether it names something, and whether that is there."""
    try:
        named = read_spec(spec)
    except RecipeError as error:
        return error.problems
    stored = named.kind in (SourceKind.LINES, SourceKind.TABLE)
    return [f"prompts {named.source} is not there: correct the path"] if stored and not named.path.exists() else []


class StoredPrompts:
    """Rows of a ``RowStore``, epoch after epoch."""

    def __init__(
        self,
        spec: PromptSpec,
        store: RowStore,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        shuffle: bool,
        start: int = 0,
    ) -> None:
        self.size = store.size
        self._spec = spec
        self._store = store
        self._tokenizer = tokenizer
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = start
        self._order = (0, self._shuffled(0))
        self._lock = anyio.Lock()

    async def draw(self, count: int) -> list[Prompt]:
        """Read the next ``count`` rows in a thread."""
        async with self._lock:
            # A thread: disks may be slow, and tokenizing 1,000 prompts takes longer than the control loop may stop.
            prompts = await anyio.to_thread.run_sync(self._read, self._drawn, count)
            self._drawn += count  # only now: a draw that is cancelled is drawn again
            return prompts

    async def aclose(self) -> None:
        self._store.close()

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
        try:
            return _prompt_at(self._spec, self._store, index, self._tokenizer)
        except BadRow as error:
            raise StreamRLError(f"prompts {self._spec.source}, {self._store.place(index)} {error}") from error

    def _shuffled(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if not self._shuffle:
            return np.arange(self.size)
        # NumPy promises the raw stream of a bit generator across its versions, not that of permutation().
        keys = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.size)
        return np.argsort(keys, kind="stable")


def _prompt_at(
    spec: PromptSpec, store: RowStore, index: int, tokenizer: Tokenizer | None, max_tokens: int | None = None
) -> Prompt:
    """Read one prompt. Raises ``BadRow``."""
    return read_prompt(to_form(store.row(index), spec.form), store.number(index), tokenizer, max_tokens)


def check_prompts(
    spec: str,
    tokenizer: Tokenizer | None,
    needed_columns: Mapping[str, Sequence[str]],
    max_tokens: int | None = None,
    *,
    timeout_s: float = 60.0,
    see: Callable[[Prompt], None] | None = None,
) -> list[str]:
    """Everything that is wrong with a source, one line each, at most 20 of them; empty: nothing is.

    Stored rows are all read, of a task the first 16. The first row of an iterator is drawn in a throw-away process,
    within ``timeout_s``. ``needed_columns``: columns by the name of the reward that needs them
    (``rewards.signature.needed_columns``). ``see`` gets the first prompt, where that is one."""
    try:
        named = read_spec(spec)
        if named.kind is SourceKind.ITERATOR:
            problems, first = _check_iterator(spec, tokenizer, needed_columns, max_tokens, timeout_s)
        else:
            problems, first = _check_stored(named, tokenizer, needed_columns, max_tokens)
        if first is not None and see is not None:
            see(first)
    except RecipeError as error:
        return error.problems
    if len(problems) > _MOST_PROBLEMS:
        more = len(problems) - _MOST_PROBLEMS
        return [*problems[:_MOST_PROBLEMS], f"prompts {named.source}: and {more} more problems like these"]
    return problems


def _check_stored(
    spec: PromptSpec, tokenizer: Tokenizer | None, needed_columns: Mapping[str, Sequence[str]], max_tokens: int | None
) -> tuple[list[str], Prompt | None]:
    """The problems, and the first prompt."""
    store = open_rows(spec)
    shown = None
    try:
        if problems := _missing_from_all(spec, store, needed_columns):
            return problems, None
        rows = store.size if spec.kind is not SourceKind.TASK else min(store.size, _TASK_ROWS_CHECKED)
        found: dict[str, list[int]] = {}  # what is wrong, and the rows of which it is
        first: dict[int, int] = {}
        for index in range(rows):
            try:
                prompt = _prompt_at(spec, store, index, tokenizer, max_tokens)
            except BadRow as error:
                found.setdefault(str(error), []).append(index)
                continue
            shown = prompt if index == 0 else shown
            for missing in missing_columns(prompt, needed_columns):
                found.setdefault(missing, []).append(index)
            # Hashes: a set of the ids of a large file would not be small.
            earlier = first.setdefault(hash(prompt.prompt_id), index)
            if earlier != index:
                there = store.place(earlier)
                found.setdefault(f'has the prompt_id "{prompt.prompt_id}" of {there}: make ids unique', []).append(
                    index
                )
        problems = []
        for problem, (index, *others) in sorted(found.items(), key=lambda item: item[1][0]):
            also = f" (so with {len(others)} of the other {rows - 1} rows)" if others else ""
            problems.append(f"prompts {spec.source}, {store.place(index)} {problem}{also}")
        return problems, shown
    finally:
        store.close()


def _missing_from_all(spec: PromptSpec, store: RowStore, needed_columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Columns that a table has not: a line each, instead of one for each row."""
    columns = store.columns
    if columns is None:
        return []
    there = f"it has {', '.join(sorted(columns))}"
    # The form of a prompt makes these where rows have none.
    made = {"prompt", "prompt_id", "messages", *(("question",) if spec.form.chat or spec.form.system else ())}
    made |= {"answer"} if spec.form.answer else set()
    problems = [
        f'prompts {spec.source} has no column "{column}", which the reward {reward} needs ({there}): rename or add it'
        for reward, names in needed_columns.items()
        for column in names
        if column not in columns | made and not (column == "ground_truth" and "reward_model" in columns)
    ]
    if spec.form.prompt and spec.form.prompt not in columns:
        problems.append(f'prompts {spec.source} has no column "{spec.form.prompt}" ({there}): correct ?prompt=')
    elif not spec.form.prompt and not spec.form.template and not columns & {"prompt", "messages", "prompt_token_ids"}:
        problems.append(f'prompts {spec.source} has no column "prompt" ({there}): name the one with ?prompt=COLUMN')
    return problems


def _check_iterator(
    spec: str,
    tokenizer: Tokenizer | None,
    needed_columns: Mapping[str, Sequence[str]],
    max_tokens: int | None,
    timeout_s: float,
) -> tuple[list[str], Prompt | None]:
    row, problem = first_row(spec, timeout_s)
    if problem:
        return [problem], None
    try:
        prompt = read_prompt(row, 1, tokenizer, max_tokens)
    except BadRow as error:
        return [f"prompts {spec}, row 1 {error}"], None
    return [f"prompts {spec}, row 1 {missing}" for missing in missing_columns(prompt, needed_columns)], prompt


def missing_columns(prompt: Prompt, needed_columns: Mapping[str, Sequence[str]]) -> list[str]:
    """List the columns that rewards need and ``prompt`` has not, a line each."""
    return [
        missing_column(column, reward)
        for reward, columns in needed_columns.items()
        for column in columns
        if not column_of(prompt.columns, column)
    ]

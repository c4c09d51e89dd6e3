"""Opening and checking of prompt sources: files of rows, Hugging Face datasets, tasks of reasoning-gym, or the user's
own iterator.

The controller process draws from ``open_prompts``, and so do commands that sample without a run. Preflight calls
``check_prompts``, which finds the faults of a source before anything starts. Stored rows are read one by one, and never
loaded together; they have epochs, each in an order of its own. An iterator runs on a thread with an event loop of its
own, so that user code that blocks does not stop the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Protocol

import anyio
import numpy as np
from anyio import to_thread

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.rewards.signature import column_of, missing_column
from streamrl.run.prompts.data_directory import find_files
from streamrl.run.prompts.first_row import first_row
from streamrl.run.prompts.json_rows import open_json
from streamrl.run.prompts.prompt_iterator import IteratorPrompts
from streamrl.run.prompts.prompt_rows import BadRow, OtherFormat, RowStore, SelectedRows, read_prompt, to_form
from streamrl.run.prompts.prompt_spec import JSON_ENDINGS, PromptSpec, SourceKind, read_spec
from streamrl.run.prompts.row_notes import RowNotes

_MOST_PROBLEMS = 20
_TASK_ROWS_CHECKED = 16
CheckRow = Callable[[Prompt], object]
"""Raises ``BadRow`` for a prompt that cannot be used."""


class OpenPrompts(Protocol):
    """Prompts of one source, in order. ``size``: number of prompts in one epoch; None for an iterator, which has no
    epochs."""

    @property
    def size(self) -> int | None: ...

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next prompts, as ``PromptSource`` does."""

    async def aclose(self) -> None:
        """Close the files, or the user's iterator. Idempotent."""


def open_prompts(spec: str, tokenizer: Tokenizer | None, *, seed: int, shuffle: bool, start: int = 0) -> OpenPrompts:
    """Open the source that ``spec`` names (``streamrl.run.prompts.prompt_spec``). Raises ``RecipeError`` when a file is
    missing or empty, a library is not installed or an option is wrong; user code is imported at the first draw, on a
    thread of its own.

    ``tokenizer``: tokenizer of the model (None: an environment writes the prompts);
    ``shuffle``: whether each epoch of stored rows has an order of its own, which depends on ``(seed, epoch)`` only;
    ``start``: number of prompts that earlier lives of the run drew. An iterator is read again up to there, unless it is
    live (``UserRows``)."""
    source = read_spec(spec)
    if source.kind is SourceKind.ITERATOR:
        return IteratorPrompts(source.source, tokenizer, start=start, form=source.form)
    return StoredPrompts(source, open_rows(source), tokenizer, seed=seed, shuffle=shuffle, start=start)


def open_rows(spec: PromptSpec) -> RowStore:
    """Open the rows that ``spec``, which is no iterator, names. Raises ``RecipeError``."""
    limit = None if spec.kind is SourceKind.TASK else spec.options.get("limit")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise RecipeError(f'prompts "{spec.source}": limit = {limit} is no integer >= 1: correct it')
    store = _open_rows(spec)
    where = spec.options.get("where")
    if where and spec.kind is SourceKind.FILES:
        store = _selected_rows(spec, store, str(where))
    store.size = min(store.size, limit or store.size)
    return store


def _selected_rows(spec: PromptSpec, store: RowStore, where: str) -> RowStore:
    """Return the rows of ``store`` for which ``where`` is true. Raises ``RecipeError``; then ``store`` is closed."""
    try:
        rows = SelectedRows(store, where)
    except BadRow as error:
        store.close()
        raise RecipeError(f"prompts {spec.source}, {error}") from error
    if not rows.size:
        store.close()
        raise RecipeError(f"prompts {spec.source}: ?where={where} is true for none of {store.size:,} rows: correct it")
    return rows


def _open_rows(spec: PromptSpec) -> RowStore:
    if spec.kind is SourceKind.TASK:
        from streamrl.run.prompts.prompt_tasks import TaskRows

        return TaskRows(spec)
    if spec.path.exists() and not (spec.path.is_file() or spec.path.is_dir()):
        raise RecipeError(f"prompts {spec.path} is not a regular file: write its rows to one")
    options = spec.checked_options("config", "split", "limit", "files", "where")
    try:
        files = spec.files or find_files(spec.path, str(options.get("config", "")), str(options.get("split", "")))
    except RecipeError as error:
        raise RecipeError(f"prompts {spec.path} {error}") from error
    if all(file.name.endswith(JSON_ENDINGS) for file in files):
        return open_json(files)
    try:
        from streamrl.run.prompts.prompt_tables import TableRows
    except ModuleNotFoundError as error:
        install = "pip install 'streamrl[rewards]'"
        raise RecipeError(f'prompts "{spec.text}" need {error.name}: {install}') from error
    return TableRows(spec.path, files)


def stored_rows(spec: str) -> int | None:
    """Count the rows that ``spec`` names; None for an iterator. Raises ``RecipeError``."""
    source = read_spec(spec)
    if source.kind is SourceKind.ITERATOR:
        return None
    with closing(open_rows(source)) as rows:
        return rows.size


def missing_source(spec: str) -> list[str]:
    """Find faults of a source without reading it: a wrong spec, or a file or directory that does not exist."""
    try:
        source = read_spec(spec)
    except RecipeError as error:
        return error.problems
    if source.kind is SourceKind.FILES and not source.path.exists():
        return [f"prompts {source.source} is not there: correct the path"]
    return []


class StoredPrompts:
    """Rows of a ``RowStore``, epoch after epoch."""

    def __init__(
        self, spec: PromptSpec, store: RowStore, tokenizer: Tokenizer | None, *, seed: int, shuffle: bool, start: int
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
            # In a thread, because disks may be slow, and tokenising 1,000 prompts blocks the event loop for too long.
            prompts = await to_thread.run_sync(self._read, self._drawn, count)
            self._drawn += count  # after the read: prompts of a cancelled draw are drawn again
            return prompts

    async def aclose(self) -> None:
        self._store.close()

    def _read(self, start: int, count: int) -> list[Prompt]:
        """Return prompts ``start`` to ``start + count`` of the run. Only the cached order of an epoch is changed."""
        prompts = []
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
        # NumPy guarantees the raw stream of a bit generator across versions, and not the stream of permutation().
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
    notes: RowNotes | None = None,
    check: CheckRow = lambda prompt: None,
) -> list[str]:
    """Return the faults of a source, one line each, at most 20; empty: there is none. All stored rows are read, but
    only the first 16 of a task. The first row of an iterator is drawn in a throw-away process.

    ``needed_columns``: columns by the name of the reward that needs them (``rewards.signature.needed_columns``);
    ``max_tokens``: largest number of tokens of a prompt (None: no limit);
    ``timeout_s``: seconds for the first row of an iterator;
    ``notes``: notes about the rows, which are added to;
    ``check``: further check of each prompt that is read."""
    notes = notes or RowNotes()
    try:
        source = read_spec(spec)
        if source.kind is SourceKind.ITERATOR:
            problems = _check_iterator(source, tokenizer, needed_columns, max_tokens, timeout_s, notes, check)
        else:
            problems = _check_stored(source, tokenizer, needed_columns, max_tokens, notes, check)
    except RecipeError as error:
        return error.problems
    if len(problems) > _MOST_PROBLEMS:
        omitted = len(problems) - _MOST_PROBLEMS
        return [*problems[:_MOST_PROBLEMS], f"prompts {source.source}: and {omitted} more problems like these"]
    return problems


def _check_stored(
    spec: PromptSpec,
    tokenizer: Tokenizer | None,
    needed_columns: Mapping[str, Sequence[str]],
    max_tokens: int | None,
    notes: RowNotes,
    check: CheckRow,
) -> list[str]:
    """Return the problems of stored rows."""
    store = open_rows(spec)
    notes.size = store.size
    try:
        if problems := _missing_from_all(spec, store, needed_columns):
            return problems
        rows = store.size if spec.kind is not SourceKind.TASK else min(store.size, _TASK_ROWS_CHECKED)
        rows_by_problem: dict[str, list[int]] = {}
        # By the hash of the id, because the ids of a large file would take much memory.
        row_by_id: dict[int, int] = {}
        for index in range(rows):
            try:
                prompt = _prompt_at(spec, store, index, tokenizer, max_tokens)
                check(prompt)
            except BadRow as error:
                rows_by_problem.setdefault(str(error), []).append(index)
                if isinstance(error, OtherFormat) and not index:
                    break
                continue
            notes.add(index, store.place(index), prompt, needed_columns)
            row_problems = missing_columns(prompt, needed_columns)
            earlier = row_by_id.setdefault(hash(prompt.prompt_id), index)
            if earlier != index:
                place = store.place(earlier)
                row_problems.append(f'has the prompt_id "{prompt.prompt_id}" of {place}: make ids unique')
            for problem in row_problems:
                rows_by_problem.setdefault(problem, []).append(index)
        problems = []
        for problem, indices in sorted(rows_by_problem.items(), key=lambda item: item[1][0]):
            text = f"prompts {spec.source}, {store.place(indices[0])} {problem}"
            if len(indices) > 1:
                text += f" (so with {len(indices) - 1} of the other {rows - 1} rows)"
            problems.append(text)
        return problems
    finally:
        store.close()


def _missing_from_all(spec: PromptSpec, store: RowStore, needed_columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the columns that no row of a table has, a line each, so that they are not reported for each row."""
    columns = store.columns
    if columns is None:
        return []
    names_text = f"it has {', '.join(sorted(columns))}"
    if len(columns) == 1 and ";" in names_text:
        return [f"prompts {spec.source} has no commas between columns ({names_text}): write it with commas"]
    # These columns are made for rows that do not have them.
    generated = {"prompt", "prompt_id", "messages"}
    if spec.form.chat or spec.form.system:
        generated.add("question")
    if spec.form.answer:
        generated.add("answer")
    problems = [
        f'prompts {spec.source} has no column "{column}", which the reward {reward} needs ({names_text}): '
        "rename or add it"
        for reward, names in needed_columns.items()
        for column in names
        if column not in columns | generated and not (column == "ground_truth" and "reward_model" in columns)
    ]
    if spec.form.prompt and spec.form.prompt not in columns:
        problems.append(f'prompts {spec.source} has no column "{spec.form.prompt}" ({names_text}): correct ?prompt=')
    elif not spec.form.prompt and not spec.form.template and not columns & {"prompt", "messages", "prompt_token_ids"}:
        problems.append(
            f'prompts {spec.source} has no column "prompt" ({names_text}): name the one with ?prompt=COLUMN'
        )
    return problems


def _check_iterator(
    spec: PromptSpec,
    tokenizer: Tokenizer | None,
    needed_columns: Mapping[str, Sequence[str]],
    max_tokens: int | None,
    timeout_s: float,
    notes: RowNotes,
    check: CheckRow,
) -> list[str]:
    """Return the problems of an iterator's first row."""
    row, problem = first_row(spec.source, timeout_s)
    if problem:
        return [problem]
    try:
        prompt = read_prompt(to_form(row, spec.form), 1, tokenizer, max_tokens)
        check(prompt)
    except BadRow as error:
        return [f"prompts {spec.source}, row 1 {error}"]
    notes.add(0, "row 1", prompt, needed_columns)
    return [f"prompts {spec.source}, row 1 {missing}" for missing in missing_columns(prompt, needed_columns)]


def missing_columns(prompt: Prompt, needed_columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the columns that rewards need and ``prompt`` does not have, a line each."""
    return [
        missing_column(column, reward)
        for reward, columns in needed_columns.items()
        for column in columns
        if not column_of(prompt.columns, column)
    ]

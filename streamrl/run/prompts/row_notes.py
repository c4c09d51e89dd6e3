"""Notes about the rows of a source: values that are no fault of a single row, but surprise where many rows have them.
``check_prompts`` adds each prompt; preflight and the dry run read the notes, in the process of a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from streamrl.base.types import Prompt, TextsByName

_MOST_PROMPTS = 1_000_000
"""Largest number of prompts that are compared with others."""


class RowNotes:
    """Notes about the rows of one source.

    ``size``: number of rows of the source (0: an iterator);
    ``rows``: number of rows that were read;
    ``first``: prompt of the first row (None: it is none);
    ``prompts``: hash of each different prompt."""

    def __init__(self) -> None:
        self.size = 0
        self.rows = 0
        self.first: Prompt | None = None
        self.prompts: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._places: TextsByName = {}

    def add(self, index: int, place: str, prompt: Prompt, needed_columns: Mapping[str, Sequence[str]]) -> None:
        """Take in the prompt of the row ``index`` at ``place``. ``needed_columns``: columns by the name of the reward
        that needs them."""
        self.rows += 1
        columns = prompt.columns
        if not index:
            self.first = prompt
        for name in {name for names in needed_columns.values() for name in names if name in columns}:
            if columns[name] is None:
                self._count(f"{name} is null", place)
            elif columns[name] in ("", [], {}):
                self._count(f"{name} is empty", place)
        messages = columns.get("messages")
        if isinstance(messages, list) and messages and messages[-1].get("role") == "assistant":
            self._count("the last message is the assistant's, which is continued, not answered,", place)
        if len(self.prompts) < _MOST_PROMPTS:
            content = prompt.token_ids.tobytes() or repr(columns.get("messages") or columns.get("prompt"))
            if hash(content) in self.prompts:
                self._count("the prompt is that of an earlier row", place)
            self.prompts.add(hash(content))

    def _count(self, note: str, place: str) -> None:
        self._counts[note] += 1
        self._places.setdefault(note, place)

    def lines(self) -> Iterator[str]:
        """Yield the notes, each with the number of rows and the place of the first one."""
        for note, count in self._counts.items():
            rows = f"all {self.rows:,}" if count == self.rows else f"{count:,} of {self.rows:,}"
            yield f"{note} in {rows} rows, the first is {self._places[note]}"

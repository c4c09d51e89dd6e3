"""Texts of problems with the user's input, one line each: the place, the key, the value and the remedy. The checks and
rules of a recipe use them, in every process that reads one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from streamrl.base.types import TextMapping
from streamrl.recipe.toml_text import toml_value

LONGEST_VALUE = 60


class Origin(Struct, frozen=True):
    """Source of a recipe's values, for the places in problems.

    ``file``: path of the recipe file;
    ``lines``: line number of each key, by its dotted path;
    ``overridden``: paths of the keys that ``--set`` sets;
    ``implied``: place of the line that set a value which is not written (``rollout.system``), by the path of the
    value."""

    file: str
    lines: Mapping[str, int]
    overridden: frozenset[str] = frozenset()
    implied: TextMapping = {}

    def locate(self, path: str) -> str:
        """Return the place of a key, as ``demo.toml:12`` or ``--set``; where the key has no line, that of the nearest
        enclosing table."""
        if path not in self.lines and any(overridden.startswith(f"{path}.") for overridden in self.overridden):
            return "--set"
        while path:
            if path in self.implied:
                return self.implied[path]
            if path in self.overridden:
                return "--set"
            if path in self.lines:
                return f"{self.file}:{self.lines[path]}"
            path = path.rpartition(".")[0]
        return self.file


def short_toml(value: Any) -> str:
    """Return a value as TOML, shortened to ``LONGEST_VALUE`` characters."""
    text = toml_value(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that ``word`` probably means, or None."""
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(candidates), n=1, cutoff=0.6)
    return next(iter(close), None)


def did_you_mean(word: str, candidates: Iterable[str], otherwise: str = "") -> str:
    """Return ``; did you mean "X"?``, or ``otherwise`` where no candidate is near."""
    meant = nearest(word, candidates)
    return f'; did you mean "{meant}"?' if meant else otherwise


def problem(origin: Origin, path: str, text: str) -> str:
    """Return the line for a problem at ``path``, or for one of the file as a whole where ``path`` is empty."""
    return f"{origin.locate(path)}: {path}: {text}" if path else f"{origin.file}: {text}"

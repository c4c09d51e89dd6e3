"""One line for each thing that is wrong with the user's input: where, what, the value, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from streamrl.recipe.toml_text import toml_value

LONGEST_VALUE = 60


class Origin(msgspec.Struct, frozen=True):
    """Source of a recipe's values, so that a problem can point at its line. ``implied``: for values that nobody wrote,
    the place of the line that set them."""

    file: str
    lines: Mapping[str, int]
    overridden: frozenset[str] = frozenset()
    implied: Mapping[str, str] = {}

    def locate(self, path: str) -> str:
        """``demo.toml:12`` or ``--set``; the nearest enclosing table where the key itself has no line."""
        if path not in self.lines and any(one.startswith(f"{path}.") for one in self.overridden):
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


def shown(value: Any) -> str:
    """A value as the user would write it, cut where it is long."""
    text = toml_value(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``word`` was probably meant to be."""
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(candidates), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, candidates: Iterable[str], otherwise: str = "") -> str:
    """``; did you mean "X"?``, or ``otherwise`` where no candidate is near."""
    meant = nearest(word, candidates)
    return f'; did you mean "{meant}"?' if meant else otherwise


def problem(origin: Origin, path: str, text: str) -> str:
    """The line for a problem at ``path``."""
    return f"{origin.locate(path)}: {path}: {text}" if path else f"{origin.file}: {text}"

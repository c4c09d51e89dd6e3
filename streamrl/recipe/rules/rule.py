"""Type of a rule: a function that yields what does not fit together in a recipe, and what to write instead. A rule
names the fields that it reads, so that it is skipped where one of them is already known to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from typing import NamedTuple

import msgspec

from streamrl.recipe.fields import as_written, keys_of, written_path
from streamrl.recipe.problems import shown
from streamrl.recipe.sections import Recipe


class Problem(NamedTuple):
    """Fault of the value at ``path``, and the remedy. Keys are named as fields (``run.restarts``)."""

    path: str
    text: str


Broken = Iterator[Problem]


class Rule(msgspec.Struct, frozen=True):
    """``reads``: paths whose values ``check`` relies on."""

    reads: tuple[str, ...]
    check: Callable[[Recipe], Broken]


RULES: list[Rule] = []
"""Filled by the modules of this folder when they are imported (``rules.py`` imports all)."""


def rule(*reads: str) -> Callable[[Callable[[Recipe], Broken]], Callable[[Recipe], Broken]]:
    """Make a function a rule."""

    def register(check: Callable[[Recipe], Broken]) -> Callable[[Recipe], Broken]:
        RULES.append(Rule(reads, check))
        return check

    return register


def has_no_effect(keys: str, why: Callable[[Recipe], str], *reads: str) -> None:
    """A rule for each of ``keys`` (of one section, with spaces between): where ``why`` returns a reason and a remedy,
    and the value is not the default, it is refused; somebody who wrote it would rely on it."""
    section = keys.partition(".")[0]
    struct = keys_of(Recipe)[section].section
    names: Mapping[str, object] = {
        key.rpartition(".")[2]: keys_of(struct)[key.rpartition(".")[2]].default for key in keys.split()
    }

    @rule(section, *reads)
    def check(recipe: Recipe) -> Broken:
        reason = why(recipe)
        for name, default in names.items() if reason else ():
            if (value := getattr(getattr(recipe, section), name)) != default:
                yield Problem(f"{section}.{name}", f"{shown(value)} has no effect{reason}")


def broken_rules(recipe: Recipe, bad_paths: Set[str] = frozenset()) -> list[tuple[str, str]]:
    """Every (path, message) of the rules that ``recipe`` breaks, with keys as they are written (``[run.advanced]``);
    rules that read a bad path are left out."""
    bad = {".".join(part for part in path.split(".") if not part.isdigit()) for path in bad_paths}
    above_bad = {above for path in bad for above in _upwards(path)}
    found = [one for rule in RULES if not _reads_any(rule, bad, above_bad) for one in rule.check(recipe)]
    return [(written_path(Recipe, path), as_written(Recipe, text)) for path, text in found]


def _reads_any(rule: Rule, bad: Set[str], above_bad: Set[str]) -> bool:
    """Return whether it reads a bad path, something in it, or what holds it."""
    return bool(bad) and not (above_bad.isdisjoint(rule.reads) and bad.isdisjoint(_above_reads(rule.reads)))


@cache
def _above_reads(reads: tuple[str, ...]) -> Set[str]:
    return {above for read in reads for above in _upwards(read)}


def _upwards(path: str) -> Set[str]:
    """``path`` and every table that holds it."""
    parts = path.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}

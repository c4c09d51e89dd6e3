"""A rule: a function that yields the problems between fields of a recipe, with the remedy. A rule names the fields that
it reads, and is skipped where the value of one of them is wrong by itself. The other files of this folder define the
rules; ``rules.load_recipe`` checks them for every recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from typing import NamedTuple

from msgspec import Struct

from streamrl.base.types import Texts
from streamrl.recipe.field_types import as_written, keys_of, without_index, written_path
from streamrl.recipe.problems import short_toml
from streamrl.recipe.sections import Recipe


class Problem(NamedTuple):
    """A problem with the value at ``path``, and the remedy. Path and text have names of fields (``run.restarts``),
    without ``advanced``."""

    path: str
    text: str


Broken = Iterator[Problem]


class Rule(Struct, frozen=True):
    """A rule. ``reads``: paths of the values that ``check`` reads."""

    reads: Texts
    check: Callable[[Recipe], Broken]


RULES: list[Rule] = []
"""All rules. The modules of this folder add theirs when they are imported (``rules.py`` imports all)."""


def rule(*reads: str) -> Callable[[Callable[[Recipe], Broken]], Callable[[Recipe], Broken]]:
    """Decorate a function as a rule. ``reads``: paths of the values that it reads."""

    def register(check: Callable[[Recipe], Broken]) -> Callable[[Recipe], Broken]:
        RULES.append(Rule(reads, check))
        return check

    return register


def has_no_effect(keys: str, why: Callable[[Recipe], str], *reads: str) -> None:
    """Add a rule that refuses values without an effect, on which the user would rely.

    ``keys``: paths of keys of one section, with spaces between; a value that is not the default is refused;
    ``why``: function that returns the reason and the remedy (empty: the values have an effect);
    ``reads``: paths of further values that ``why`` reads."""
    section = keys.partition(".")[0]
    fields = keys_of(keys_of(Recipe)[section].section)
    names = [key.rpartition(".")[2] for key in keys.split()]

    @rule(section, *reads)
    def check(recipe: Recipe) -> Broken:
        reason = why(recipe)
        if not reason:
            return
        for name in names:
            value = getattr(getattr(recipe, section), name)
            if value != fields[name].default:
                yield Problem(f"{section}.{name}", f"{short_toml(value)} has no effect{reason}")


def unless(condition: Callable[[Recipe], object], reason: str) -> Callable[[Recipe], str]:
    """Return a ``why`` of ``has_no_effect`` with a fixed reason, for recipes without ``condition``."""

    def why(recipe: Recipe) -> str:
        if condition(recipe):
            return ""
        return reason

    return why


def names_are_unique(path: str, names: Sequence[str]) -> Broken:
    """Names in a list must be set and unique. ``path``: recipe path of the list."""
    for name, count in Counter(names).items():
        if count > 1 or not name:
            yield Problem(path, f"the name {short_toml(name)} is empty or not unique: give each its own")


def broken_rules(recipe: Recipe, bad_paths: Set[str] = frozenset()) -> list[tuple[str, str]]:
    """Return (path, message) of each problem by the rules, with paths as in a recipe file (``run.advanced.restarts``).
    ``bad_paths``: paths of values that are wrong by themselves; rules that read one are skipped."""
    bad = set(map(without_index, bad_paths))
    above_bad = {above for path in bad for above in _upwards(path)}
    problems: list[Problem] = []
    for candidate in RULES:
        reads = candidate.reads
        if not bad or (above_bad.isdisjoint(reads) and bad.isdisjoint(_above_reads(reads))):
            problems += candidate.check(recipe)
    return [(written_path(Recipe, path), as_written(Recipe, text)) for path, text in problems]


@cache
def _above_reads(reads: Texts) -> Set[str]:
    return {above for read in reads for above in _upwards(read)}


def _upwards(path: str) -> Set[str]:
    """Return ``path`` and the paths of all tables that contain it."""
    parts = path.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}

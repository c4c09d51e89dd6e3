"""Cases of a campaign: each has a name, a call, and the value that is right."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A call whose value is compared with ``right``; a ``right`` that is a function judges the value itself."""

    name: str
    value: Callable[[], Any]
    right: Any

    def is_right(self, value: object) -> bool:
        """Return whether ``value`` is the right one."""
        if callable(self.right):
            return bool(self.right(value))
        return bool(value == self.right)


def add_case_arguments(command: argparse.ArgumentParser, cases: Callable[[], Iterable[Case]]) -> None:
    """Add the options of a command that runs ``cases``."""
    command.add_argument("words", nargs="*", help="only cases that have one of these in their names")
    command.set_defaults(work=partial(run_cases, cases))


def run_cases(cases: Callable[[], Iterable[Case]], arguments: argparse.Namespace) -> int:
    """Print one line for each case. Returns 1 where a case is not as it should be."""
    count = 0
    failures = 0
    for case in cases():
        if arguments.words and not any(word in case.name for word in arguments.words):
            continue
        count += 1
        value = case.value()
        if case.is_right(value):
            print(f"held   {case.name}: {str(value)[:160]!r}", flush=True)
            continue
        failures += 1
        print(f"BROKEN {case.name}: {value!r}", flush=True)
        if not callable(case.right):
            print(f"       right is {case.right!r}")
    print(f"{failures} of {count} cases failed")
    return int(failures > 0)

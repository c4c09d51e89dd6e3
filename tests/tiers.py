"""The two tiers of tests: ``quick`` ones, for ``make test``, and those marked ``long``, for ``make test-long``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = {"quick": 2.0, "long": 60.0}
"""Processor seconds of a test, with its processes and without its fixtures, by its tier. ``pytest.mark.seconds(n)``
names those of a test that takes longer and is in its tier on purpose."""
TOLERANCE = 6
_REFERENCE_LOOP_S = 0.035
"""Processor time of ``_loop_seconds`` on the machine on which the tiers were made."""
_MODULES_OF_A_LIBRARY = 300
"""A test that imports as many has no limit: it imports torch, transformers or vLLM."""


def quick_only(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """``cases`` as parameters of a test (a tuple: several parameters), of which those that are not in ``quick`` are
    marked long."""
    marked: list[Any] = []
    for case in cases:
        parameters = case if isinstance(case, tuple) else (case,)
        marks = [] if case in quick else [pytest.mark.long]
        marked.append(pytest.param(*parameters, marks=marks))
    return marked


def tier_of(item: pytest.Item) -> str:
    """``quick`` or ``long``."""
    return "long" if item.get_closest_marker("long") else "quick"


def refuse_shared_fixtures(items: Sequence[pytest.Item]) -> None:
    """Raise ``pytest.UsageError`` where tests of ``items`` share a fixture of their module, such as an engine, and are
    of two tiers: it would be made in both."""
    tiers: dict[tuple[Path, str], set[str]] = {}
    for item in items:
        for name, definitions in item._fixtureinfo.name2fixturedefs.items():  # type: ignore[attr-defined]
            if definitions[-1].scope == "module":
                tiers.setdefault((item.path, name), set()).add(tier_of(item))
    mixed = [f"{path.name}: {name}" for (path, name), shared in tiers.items() if len(shared) > 1]
    if mixed:
        raise pytest.UsageError(f"tests of both tiers share a fixture; mark all or none of them long: {mixed}")


@contextmanager
def tier_time(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose body takes ``TOLERANCE`` times the processor time of its tier, so that the tiers stay true. The
    limit is higher by as much as the machine is slower than the reference."""
    began = time.monotonic()
    used = sum(os.times()[:4])
    modules = len(sys.modules)
    yield
    if len(sys.modules) > modules + _MODULES_OF_A_LIBRARY:
        return  # the first test that needs torch imports it for all others of this worker
    taken = min(
        sum(os.times()[:4]) - used,
        # A process of an earlier test that is waited for only now would count with all its time.
        (time.monotonic() - began) * (os.cpu_count() or 1),
    )
    marked = item.get_closest_marker("seconds")
    seconds = marked.args[0] if marked else SECONDS[tier_of(item)]
    limit = TOLERANCE * seconds
    if taken > limit and taken > limit * _slowness():
        pytest.fail(
            f"it took {taken:.1f} s of processor time, where its tier or its mark says {seconds:g} s: make it quicker, "
            f"mark it long, or name its time by pytest.mark.seconds({taken:.0f})"
        )


def _slowness() -> float:
    """How many times slower than the reference this machine is now, 1 at least."""
    return max(1.0, min(_loop_seconds() for _ in range(3)) / _REFERENCE_LOOP_S)


def _loop_seconds() -> float:
    began = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - began

"""Whether a call gave what a dataset expects, which is JSON. Only the standard library: the judge of a test runs it."""

from __future__ import annotations

import json
import math
from typing import Any


def same_result(given: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Whether they are the same but for what JSON cannot say: a tuple is a list, the keys of a mapping are strings.

    ``tolerance``: numbers may differ by that much, absolutely or relative to the expected one.
    """
    if isinstance(expected, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(expected):
            return False
        return all(same_result(ours, theirs, tolerance) for ours, theirs in zip(given, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(given, dict) or len(given) != len(expected):
            return False
        ours = {_key(key): value for key, value in given.items()}
        return all(
            _key(key) in ours and same_result(ours[_key(key)], value, tolerance) for key, value in expected.items()
        )
    if isinstance(given, float) and isinstance(expected, float) and math.isnan(expected):
        return math.isnan(given)
    return bool(given == expected) or _both_near(given, expected, tolerance)


def near(given: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most ``tolerance``. Nothing is near infinity."""
    return (
        math.isfinite(given)
        and math.isfinite(expected)
        and abs(given - expected) <= tolerance * max(1.0, abs(expected))
    )


def _both_near(given: Any, expected: Any, tolerance: float | None) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (given, expected))
    try:
        return tolerance is not None and numbers and near(given, expected, tolerance)
    except OverflowError:  # an int beyond all floats
        return False


def _key(key: Any) -> Any:
    """What a key of a mapping is in JSON."""
    return json.dumps(key) if key is None or isinstance(key, int | float) else key

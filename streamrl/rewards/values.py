"""Checks of what reward functions return: each return value becomes a finite value or a failure. Pure.

The process that runs a function checks the function's return value: the reward worker for trusted functions, a call
process for all others. Nothing here raises for what user code returned."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from streamrl.base.printable import printable
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import RewardCredit
from streamrl.rewards.signature import RewardSignature

_LONGEST_NAME = 100  # characters of a part's name, which becomes the name of a metric


class CallFailure(Struct, frozen=True, array_like=True):
    """Reason why a call gave no value."""

    kind: RewardFailureKind
    message: str


class NumberedSpan(Struct, frozen=True, array_like=True):
    """A ``number`` for the characters ``[start, end)`` of the text of a turn. ``turn``: number of the model's turn,
    from 0 (-1: the last one)."""

    start: int
    end: int
    number: float
    turn: int = -1


class CheckedValue(Struct, frozen=True, array_like=True):
    """Result of one function for one sample: a finite ``value``, finite named ``parts``, of which the reward is
    the weighted sum, or a ``failure``. With none of the three the function does not apply to the sample.

    ``spans``, ``token_numbers``: numbers of steps or tokens, whose sum is ``value``, where ``rewards.credit`` says that
    the function gives them; ``token_numbers`` has an entry for each sampled token (None: no number)."""

    value: float | None = None
    parts: dict[str, float] = {}
    failure: CallFailure | None = None
    spans: tuple[NumberedSpan, ...] = ()
    token_numbers: tuple[float | None, ...] = ()


CheckedValues = tuple[CheckedValue, ...]
"""The values of a call, one for each completion."""

NOT_APPLICABLE = CheckedValue()


class CallResult(Struct, frozen=True):
    """Result of one call: one value for each completion. ``seconds``: wall time inside of the function; ``waited_s``:
    seconds between the request and the start of the call; ``limit_s``: time limit of the call."""

    values: CheckedValues
    seconds: float = 0.0
    waited_s: float = 0.0
    limit_s: float = 0.0


def failed(kind: RewardFailureKind, message: str, count: int = 1) -> CheckedValues:
    """The same failure for each of ``count`` completions."""
    return (CheckedValue(failure=CallFailure(kind, message)),) * count


def check_returned(returned: Any, count: int, signature: RewardSignature) -> CheckedValues:
    """``count`` checked values from the return value of one call of a function with ``signature``. A function that
    scores all completions of a group in one call (``per_group``) returns a list."""
    check = check_value if signature.credit is RewardCredit.COMPLETION else _check_numbers
    if not signature.per_group:
        return (check(returned),)
    values = _as_list(returned)
    if not isinstance(values, (list, tuple)):
        message = f"returned {_type_name(values)}: a group function returns a list with one value for each completion"
    elif len(values) != count:
        message = f"returned {len(values)} values for {count} completions"
    else:
        return tuple(check(value) for value in values)
    return failed(RewardFailureKind.WRONG_TYPE, message, count)


def check_value(value: Any) -> CheckedValue:
    """A finite float, finite named parts, or a failure, from the return value of a function for one sample. Valid
    return values are a number (bool and NumPy scalars too), a mapping of names to numbers, and None."""
    if type(value) is float and math.isfinite(value):  # the usual case
        return CheckedValue(value)
    if value is None:
        return NOT_APPLICABLE
    if isinstance(value, Mapping):
        return _check_parts(value)
    number = _number(value)
    if isinstance(number, CallFailure):
        return CheckedValue(failure=number)
    return CheckedValue(number)


def _check_parts(value: Mapping[Any, Any]) -> CheckedValue:
    """The parts that apply. One part that is no number fails them all: a sum of the others would be a wrong reward."""
    parts = {}
    try:
        items = list(value.items())
    except Exception as error:  # noqa: BLE001 - a user's mapping class may raise anything
        message = f"returned {_type_name(value)} that cannot be read: {type(error).__name__}"
        return CheckedValue(failure=CallFailure(RewardFailureKind.WRONG_TYPE, message))
    for key, part in items:
        name = _part_name(key)
        if name is None:
            message = (
                f"returned a part called {_printable_repr(key)}: name parts with printable strings without a slash, of "
                f"at most {_LONGEST_NAME} characters"
            )
            return CheckedValue(failure=CallFailure(RewardFailureKind.WRONG_TYPE, message))
        if part is None:
            continue
        number = _number(part)
        if isinstance(number, CallFailure):
            return CheckedValue(failure=CallFailure(number.kind, f'part "{name}": {number.message}'))
        parts[name] = number
    return CheckedValue(parts=parts)


def _check_numbers(value: Any) -> CheckedValue:
    """Numbers of steps or tokens, or a failure, from the return value of a function for one sample. One entry that is
    no number or span fails them all. None and an empty list: the function does not apply to the sample."""
    entries = _as_list(value)
    if entries is None:
        return NOT_APPLICABLE
    if not isinstance(entries, (list, tuple)):
        message = (
            f"returned {_type_name(value)}: with rewards.advanced.credit it returns a list, of one number for each of "
            "token_ids (None: no number) or of spans (start, end, number); for one number remove credit"
        )
        return CheckedValue(failure=CallFailure(RewardFailureKind.WRONG_TYPE, message))
    spans: list[NumberedSpan] = []
    token_numbers: list[float | None] = []
    for index, entry in enumerate(map(_as_list, entries)):
        if entry is None:
            token_numbers.append(None)
            continue
        is_span = isinstance(entry, (list, tuple))
        number = _number(entry[2] if is_span and _is_span(entry) else entry)
        if isinstance(number, CallFailure):
            message = f"entry {index} is no number and no span (start, end, number) or (start, end, number, turn)"
            if number.kind is RewardFailureKind.NOT_FINITE:
                message = f"entry {index}: {number.message}"
            return CheckedValue(failure=CallFailure(number.kind, message))
        if is_span:
            spans.append(NumberedSpan(entry[0], entry[1], number, *entry[3:]))
        else:
            token_numbers.append(number)
    if spans and token_numbers:
        message = f"returned {len(spans)} spans and {len(token_numbers)} numbers of tokens: return one kind of them"
        return CheckedValue(failure=CallFailure(RewardFailureKind.WRONG_TYPE, message))
    all_numbers = [span.number for span in spans] + [number for number in token_numbers if number is not None]
    total = math.fsum(all_numbers) if all_numbers else None
    return CheckedValue(total, spans=tuple(spans), token_numbers=tuple(token_numbers))


def _is_span(entry: Sequence[Any]) -> bool:
    """Return whether the places of an entry are those of a span."""
    places = [*entry[:2], *entry[3:]]
    return 3 <= len(entry) <= 4 and all(isinstance(place, int) for place in places)


def _part_name(key: Any) -> str | None:
    """The name of a part as a plain string; None: ``key`` is no valid name."""
    if not isinstance(key, str):
        return None
    name = str.__str__(key)  # an instance of a subclass of str cannot be sent to another process
    if "/" in name or len(name) > _LONGEST_NAME or name != printable(name):
        return None
    return name


def _printable_repr(value: Any) -> str:
    try:
        return printable(f"{value!r:.60}")
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        return _type_name(value)


def _as_list(value: Any) -> Any:
    """Return the lists and numbers of an array or a tensor; return any other value as it is."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return value


def _number(value: Any) -> float | CallFailure:
    plain = value if isinstance(value, numbers.Real) else _as_list(value)
    if not isinstance(plain, numbers.Real):
        hint = ""
        if isinstance(plain, (list, tuple)):
            hint = '; numbers of steps or tokens need credit = "steps" or "tokens" below [rewards.advanced]'
        return CallFailure(
            RewardFailureKind.WRONG_TYPE,
            f"returned {_type_name(value)}: return a float, an int, a bool, a mapping of named parts, or None for not "
            f"applicable{hint}",
        )
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    except Exception as error:  # noqa: BLE001 - a user's number class may raise anything
        message = f"returned {_type_name(value)} that is no float: {type(error).__name__}"
        return CallFailure(RewardFailureKind.WRONG_TYPE, message)
    if not math.isfinite(number):
        return CallFailure(RewardFailureKind.NOT_FINITE, f"returned {number}: a reward must be finite")
    return number


def _type_name(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"

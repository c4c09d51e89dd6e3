"""What a reward function asks for, read from its signature.

A function is *per sample* when its first parameter takes one completion (``completion: str``), and *per group* when
that parameter is named ``completions`` (``list[str]``, the completions of one prompt; it returns one value each).
All other parameters are passed by name: dataset columns, and the names of ``PROVIDED``. ``**columns`` gets every
column.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from streamrl.errors import RecipeError
from streamrl.user_code import load_user_object

PROVIDED = ("prompt", "prompt_id", "token_ids", "finish_reason")
"""What a function may ask for besides columns. Per group, ``token_ids`` and ``finish_reason`` are lists with one
entry for each completion; columns, ``prompt`` and ``prompt_id`` are those of the one prompt."""

_GROUP_PARAMETER = "completions"
_COMPLETION_NAMES = ("completion", _GROUP_PARAMETER)


class RewardSignature(msgspec.Struct, frozen=True, kw_only=True):
    """What one reward function needs. ``columns``: dataset columns it cannot do without; ``optional_columns``: those
    with a default; ``provided``: names of ``PROVIDED`` it asked for; ``first``: its first parameter's name."""

    spec: str
    name: str
    first: str
    per_group: bool
    is_async: bool
    wants_all: bool
    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    provided: tuple[str, ...] = ()


class RewardFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A user's function, ready to be called with ``call(completion, **arguments)``."""

    signature: RewardSignature
    call: Callable[..., Any]

    @property
    def name(self) -> str:
        """The function's own name, as metrics show it."""
        return self.signature.name


def load_reward(spec: str) -> RewardFunction:
    """Import the function that ``spec`` names (``module:function`` or ``path/to/file.py:function``).

    Raises ``RecipeError`` when it does not import or has a signature that cannot be called.
    """
    function = load_user_object(spec)
    if not callable(function):
        raise RecipeError([f'reward "{spec}" is a {type(function).__name__}, not a function: name a function'])
    return RewardFunction(signature=_read_signature(spec, function), call=function)


def inspect_reward(spec: str) -> RewardSignature:
    """Signature of the function that ``spec`` names, imported in this process. Raises ``RecipeError``."""
    return load_reward(spec).signature


def needed_columns(signatures: Iterable[RewardSignature]) -> dict[str, tuple[str, ...]]:
    """The dataset columns that each reward cannot do without, by reward name."""
    return {signature.name: signature.columns for signature in signatures}


def _read_signature(spec: str, function: Callable[..., Any]) -> RewardSignature:
    if inspect.isclass(function):
        raise RecipeError([f'reward "{spec}" is a class: name a function, or an instance that can be called'])
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise RecipeError([f'reward "{spec}" is a generator: return the reward instead of yielding it'])
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise RecipeError(
            [f'reward "{spec}" has no readable signature ({error}): wrap it in a Python function']
        ) from error
    first = parameters[0] if parameters else None
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise RecipeError(
            [f'reward "{spec}" takes no completion: its first parameter must be positional, as in {_example(spec)}']
        )
    problems: list[str] = []
    columns: list[str] = []
    optional: list[str] = []
    provided: list[str] = []
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in _COMPLETION_NAMES:
            problems.append(
                f'reward "{spec}": "{parameter.name}" must be the first parameter, before "{first.name}", '
                f"as in {_example(spec)}"
            )
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            if parameter.default is parameter.empty:
                problems.append(
                    f'reward "{spec}": parameter "{parameter.name}" is positional-only, but columns are passed '
                    f"by name: move the / before it, as in {_example(spec)}"
                )
        elif parameter.name in PROVIDED:
            provided.append(parameter.name)
        else:
            (columns if parameter.default is parameter.empty else optional).append(parameter.name)
    if problems:
        raise RecipeError(problems)
    return RewardSignature(
        spec=spec,
        name=spec.rpartition(":")[2],
        first=first.name,
        per_group=first.name == _GROUP_PARAMETER,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called),
        wants_all=any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        columns=tuple(columns),
        optional_columns=tuple(optional),
        provided=tuple(provided),
    )


def _example(spec: str) -> str:
    return f"`async def {spec.rpartition(':')[2]}(completion, *, answer, **columns)`"

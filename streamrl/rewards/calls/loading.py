"""The function that a recipe names: imported or built in, with its options, and what its signature asks for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.recipe.rewards import Reward
from streamrl.recipe.user_code import load_user_object
from streamrl.rewards.builtin.catalog import BUILTIN
from streamrl.rewards.calls.call_form import (
    TEXTS,
    VERL_EXTRA,
    VERL_TEXT,
    adapted,
    annotation_of,
    completion_parameter,
    example,
    misread,
    takes_group,
)
from streamrl.rewards.signature import PROVIDED, PROVIDED_OF_GROUPS, RewardFunction, RewardSignature
from streamrl.rewards.time_limits import TimeLimits


def load_reward(reward: Reward, limits: TimeLimits | None = None) -> RewardFunction:
    """The function that ``reward`` names, with its options.

    ``module:function`` and ``path/to/file.py:function`` are imported and called with the options as keyword arguments;
    a name without a colon is a built-in reward: a factory that is called with the options and returns the function.
    ``limits``: where one that runs test cases keeps what it learns of each (None: limits of its own).
    Raises ``RecipeError`` when there is none, it does not import, or it has a signature that cannot be called."""
    if ":" not in reward.function:
        function: Any = _build(reward)
        if reward.adaptive_timeout is not None and hasattr(function, "learn_time_limits"):
            function.learn_time_limits(limits or TimeLimits(reward))
    else:
        function = load_user_object(reward.function)
        if not callable(function):
            kind = type(function).__name__
            raise RecipeError(f'reward "{reward.function}" is a {kind}, not a function: name a function')
        if reward.options:
            function = _bind(reward, function)
    read = _read_function(reward.function, reward.label, function)
    adaptive = reward.adaptive_timeout
    limit_key = adaptive.key if adaptive is not None and adaptive.key != "prompt_id" else ""
    signature = msgspec.structs.replace(read.signature, limit_key=limit_key, special_tokens=reward.special_tokens)
    return msgspec.structs.replace(read, signature=signature)


def _build(reward: Reward) -> Callable[..., Any]:
    factory = BUILTIN.get(reward.function)
    if factory is None:
        yours = 'or a function of yours as "module:function" or "path/to/file.py:function"'
        one_of = f"write one of {', '.join(sorted(BUILTIN))}, {yours}"
        raise RecipeError(f'there is no built-in reward "{reward.function}": {one_of}')
    try:
        return factory(**reward.options)
    except TypeError as error:
        taken = ", ".join(name for name in inspect.signature(factory).parameters) or "none"
        raise RecipeError(
            f'built-in reward "{reward.function}": {error}: correct its options (it takes {taken})'
        ) from error


def _bind(reward: Reward, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the options bound. A name that it does not take is a mistake, not a column."""
    parameters = _parameters(reward.function, function)
    taker = completion_parameter(reward.function, parameters)
    taken = [p.name for p in parameters if p is not taker and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [] if any(p.kind is p.VAR_KEYWORD for p in parameters) else sorted(set(reward.options) - set(taken))
    if unknown:
        remedy = f"correct rewards.options (it takes {', '.join(taken) or 'none'})"
        raise RecipeError(f'reward "{reward.function}" takes no option "{unknown[0]}": {remedy}')
    return functools.partial(function, **reward.options)


def _parameters(spec: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f'reward "{spec}" has no readable signature ({error}): wrap it in a Python function'
        ) from error


def _read_function(spec: str, name: str, function: Callable[..., Any]) -> RewardFunction:
    if inspect.isclass(function):
        raise RecipeError(f'reward "{spec}" is a class: name a function, or an instance that can be called')
    bound = tuple(function.keywords) if isinstance(function, functools.partial) else ()
    inner = function.func if isinstance(function, functools.partial) else function
    called = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise RecipeError(f'reward "{spec}" is a generator: return the reward instead of yielding it')
    parameters = [p for p in _parameters(spec, function) if p.name not in bound]
    taker = completion_parameter(spec, parameters)
    per_group = takes_group(taker)
    wants_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = PROVIDED_OF_GROUPS if per_group else PROVIDED
    problems = list(misread(spec, taker, parameters))
    columns: list[str] = []
    optional: list[str] = []
    provided = [name for name in ("prompts", "completion_ids") if per_group and wants_all]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in known:
            provided.append(parameter.name)
        elif parameter is taker and not (per_group and taker.kind is taker.POSITIONAL_ONLY):
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            if parameter.default is parameter.empty:
                problems.append(
                    f'reward "{spec}": parameter "{parameter.name}" is positional-only, but columns are passed '
                    f"by name: move the / before it, as in {example(spec)}"
                )
        elif not per_group or parameter.name != "prompt":
            is_extra = (taker.name, parameter.name) == (VERL_TEXT, VERL_EXTRA)  # verl gives {} where there is none
            has_default = parameter.default is not parameter.empty
            (optional if has_default or is_extra else columns).append(parameter.name)
    if problems:
        raise RecipeError(*problems)
    signature = RewardSignature(
        spec=spec,
        name=name,
        first=taker.name,
        per_group=per_group,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called),
        bound=bound,
        wants_all=wants_all,
        columns=tuple(columns),
        optional_columns=tuple(optional),
        provided=tuple(dict.fromkeys(provided)),
        as_text=not per_group or TEXTS.match(annotation_of(taker)) is not None,
    )
    return RewardFunction(
        signature=signature, call=adapted(function, signature, taker, is_first=taker is parameters[0])
    )

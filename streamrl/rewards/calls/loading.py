"""Loading of the function that a recipe names, imported or built in, and reading of its signature.

``reward_set`` loads trusted functions in the reward worker (or in the process of a command), ``fork_server`` loads all
others in the fork server or its call processes, and ``inspect`` loads functions in a process that only inspects
them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.types import AnyFunction, Texts
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
    ``limits``: store of the adaptive time limits of test cases, for a reward that runs them (None: a new store).
    Raises ``RecipeError`` where the function does not exist, cannot be imported, or has a signature that cannot be
    called."""
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
    reward_function = _read_function(reward.function, reward.label, function)
    signature = replace(reward_function.signature, special_tokens=reward.special_tokens, credit=reward.credit)
    adaptive = reward.adaptive_timeout
    if adaptive is not None and adaptive.key != "prompt_id":
        signature = replace(signature, limit_key=adaptive.key)
    return replace(reward_function, signature=signature)


def _build(reward: Reward) -> AnyFunction:
    factory = BUILTIN.get(reward.function)
    if factory is None:
        own_function = 'or a function of yours as "module:function" or "path/to/file.py:function"'
        remedy = f"write one of {', '.join(sorted(BUILTIN))}, {own_function}"
        raise RecipeError(f'there is no built-in reward "{reward.function}": {remedy}')
    try:
        return factory(**reward.options)
    except TypeError as error:
        names = ", ".join(inspect.signature(factory).parameters) or "none"
        raise RecipeError(
            f'built-in reward "{reward.function}": {error}: correct its options (it takes {names})'
        ) from error


def _bind(reward: Reward, function: AnyFunction) -> AnyFunction:
    """``function`` with the options bound. Raises ``RecipeError`` for an option that the function does not take."""
    parameters = _parameters(reward.function, function)
    completion_param = completion_parameter(reward.function, parameters)
    names = [
        parameter.name
        for parameter in parameters
        if parameter is not completion_param
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    unknown = sorted(set(reward.options) - set(names))
    if unknown and not _takes_any_keyword(parameters):
        remedy = f"correct rewards.options (it takes {', '.join(names) or 'none'})"
        raise RecipeError(f'reward "{reward.function}" takes no option "{unknown[0]}": {remedy}')
    return functools.partial(function, **reward.options)


def _takes_any_keyword(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parameters(spec: str, function: AnyFunction) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f'reward "{spec}" has no readable signature ({error}): wrap it in a Python function'
        ) from error


def _read_function(spec: str, name: str, function: AnyFunction) -> RewardFunction:
    if inspect.isclass(function):
        raise RecipeError(f'reward "{spec}" is a class: name a function, or an instance that can be called')
    bound: Texts = ()
    inner = function
    if isinstance(function, functools.partial):
        bound = tuple(function.keywords)
        inner = function.func
    routine = inner if inspect.isroutine(inner) else type(inner).__call__
    if inspect.isgeneratorfunction(routine) or inspect.isasyncgenfunction(routine):
        raise RecipeError(f'reward "{spec}" is a generator: return the reward instead of yielding it')
    parameters = [parameter for parameter in _parameters(spec, function) if parameter.name not in bound]
    completion_param = completion_parameter(spec, parameters)
    per_group = takes_group(completion_param)
    wants_all = _takes_any_keyword(parameters)
    provided_names = PROVIDED_OF_GROUPS if per_group else PROVIDED
    problems = list(misread(spec, completion_param, parameters))
    columns = []
    optional = []
    provided = [name for name in ("prompts", "completion_ids") if per_group and wants_all]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in provided_names:
            provided.append(parameter.name)
        elif parameter is completion_param and not (
            per_group and completion_param.kind is completion_param.POSITIONAL_ONLY
        ):
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            if parameter.default is parameter.empty:
                problems.append(
                    f'reward "{spec}": parameter "{parameter.name}" is positional-only, but columns are passed '
                    f"by name: move the / before it, as in {example(spec)}"
                )
        elif not per_group or parameter.name != "prompt":
            # ``adapted`` passes {} as ``extra_info`` where the prompt has no such column, as verl does.
            is_extra = (completion_param.name, parameter.name) == (VERL_TEXT, VERL_EXTRA)
            has_default = parameter.default is not parameter.empty
            if has_default or is_extra:
                optional.append(parameter.name)
            else:
                columns.append(parameter.name)
    raise_problems(problems)
    signature = RewardSignature(
        spec=spec,
        name=name,
        first=completion_param.name,
        per_group=per_group,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(routine),
        bound=bound,
        wants_all=wants_all,
        columns=tuple(columns),
        optional_columns=tuple(optional),
        provided=tuple(dict.fromkeys(provided)),
        as_text=not per_group or TEXTS.match(annotation_of(completion_param)) is not None,
    )
    return RewardFunction(
        signature=signature,
        call=adapted(function, signature, completion_param, is_first=completion_param is parameters[0]),
    )

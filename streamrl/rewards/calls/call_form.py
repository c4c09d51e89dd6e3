"""Forms in which reward functions are called: streamrl's, TRL's and verl's.

``loading`` recognizes the form of a function by its parameters, and adapts the function to the call of streamrl:
``call(completion, **arguments)``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.base.types import AnyFunction
from streamrl.rewards.scoring import copied
from streamrl.rewards.signature import PROVIDED, RewardSignature

VERL_TEXT = "solution_str"
VERL_EXTRA = "extra_info"
_FIRST_OF_GROUPS = ("completion_ids", "prompts")  # first parameters of TRL functions that take no ``completions``
# Arguments of a group that differ between siblings.
_LISTS = {"completion_ids", "token_ids", "finish_reason", "environment_reward", "tool_calls", "turn_texts"}

# Annotations of one value and of several. A union of both kinds matches neither pattern: it takes either.
_SINGLE = re.compile(r"(?!.*\|(list|List|Sequence)\b)(Optional\[)?(str|int|float|bool|dict|Dict|Mapping)\b")
_SEVERAL = re.compile(r"(?!.*\|str\b)((list|List|Sequence|tuple|Tuple)\b|Messages$)")
TEXTS = re.compile(r"(list|List|Sequence)\[str\]$")


def completion_parameter(spec: str, parameters: Sequence[inspect.Parameter]) -> inspect.Parameter:
    """The parameter that takes one completion, or the completions of a group. Raises ``RecipeError`` for a function
    without such a parameter."""
    by_name = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    if {"completion", "completions"} <= by_name.keys():
        remedy = "keep the first to get one, or the second to get a group"
        raise RecipeError(f'reward "{spec}" takes "completion" and "completions": {remedy}')
    names = ["completions", "completion"]
    if "ground_truth" in by_name:
        names.append(VERL_TEXT)
    for name in names:
        if name in by_name:
            return by_name[name]
    first = parameters[0] if parameters else None
    remedy = "its first parameter must be positional"
    if first is not None and first.name in PROVIDED:
        remedy = f'"{first.name}" gets something else, so name the one that gets it "completion"'
    elif first is not None and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return first
    raise RecipeError(f'reward "{spec}" takes no completion: {remedy}, as in {example(spec)}')


def takes_group(completion_param: inspect.Parameter) -> bool:
    """Return whether a function with this completion parameter is called once for each group, in TRL's form."""
    return completion_param.name == "completions" or completion_param.name in _FIRST_OF_GROUPS


def misread(spec: str, completion_param: inspect.Parameter, parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    """Yield a problem for each parameter whose name or annotation does not fit the argument that it would get."""
    if not takes_group(completion_param):
        kind = annotation_of(completion_param)
        if _SEVERAL.match(kind):
            yield (
                f'reward "{spec}": "{completion_param.name}" is annotated {kind}, and would get the text of one '
                f'completion: annotate it str, or name it "completions" to get all of a group'
            )
        return
    for parameter in parameters:
        name = parameter.name
        needed = parameter.default is parameter.empty
        if name == "prompt" and needed:
            yield (
                f'reward "{spec}" asks for "prompt" beside "{completion_param.name}": a function of a group gets '
                '"prompts", a list with one for each completion'
            )
        elif parameter is not completion_param and needed and _SINGLE.match(kind := annotation_of(parameter)):
            yield (
                f'reward "{spec}": "{name}" is annotated {kind}, and would get a list with one value for each '
                f'completion: use zip({completion_param.name}, {name}), or take one "completion"'
            )


def adapted(
    function: AnyFunction, signature: RewardSignature, completion_param: inspect.Parameter, *, is_first: bool
) -> AnyFunction:
    """A function for ``call(completion, **arguments)``: ``function`` itself where that is its form, otherwise a wrapper
    around it."""
    is_verl = completion_param.name == VERL_TEXT
    if (
        is_first
        and completion_param.kind is not completion_param.KEYWORD_ONLY
        and not signature.per_group
        and not is_verl
    ):
        return function

    def keyword_arguments(completion: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        if signature.per_group:
            count = len(completion)
            for name in arguments.keys() - _LISTS:
                arguments[name] = [copied(arguments[name]) for _ in range(count)]
        elif is_verl and VERL_EXTRA in signature.optional_columns:
            arguments.setdefault(VERL_EXTRA, {})
        if completion_param.name in _FIRST_OF_GROUPS:
            return arguments  # they have the ids or prompts already
        return {completion_param.name: completion, **arguments}

    async def call_async(completion: Any, **arguments: Any) -> Any:
        return _score_of(await function(**keyword_arguments(completion, arguments)), is_verl)

    def call(completion: Any, **arguments: Any) -> Any:
        return _score_of(function(**keyword_arguments(completion, arguments)), is_verl)

    wrapper = call_async if signature.is_async else call
    vars(wrapper).update(getattr(function, "__dict__", {}))  # a built-in reward is closed by its ``aclose``
    return wrapper


def example(spec: str) -> str:
    """A signature of ``spec`` that can be called, for error messages."""
    return f"`async def {spec.rpartition(':')[2]}(completion, *, answer, **columns)`"


def _score_of(returned: Any, is_verl: bool) -> Any:
    """Return the item ``score`` of a mapping in verl's form; verl only records the other items. Return any other value
    as it is."""
    if is_verl and isinstance(returned, Mapping) and "score" in returned:
        return returned["score"]
    return returned


def annotation_of(parameter: inspect.Parameter) -> str:
    """Return an annotation as it is written, without module names, quotes and spaces; empty: no annotation."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return ""
    text = annotation.__name__ if type(annotation) is type else str(annotation)
    return re.sub(r"\b(typing|t|collections\.abc|abc)\.|[\"' ]", "", text)

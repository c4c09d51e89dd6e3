"""The forms in which reward functions are called, those of TRL and verl among them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.rewards.scoring import copied
from streamrl.rewards.signature import PROVIDED, RewardSignature

VERL_TEXT = "solution_str"
VERL_EXTRA = "extra_info"
_FIRST_OF_GROUPS = ("completion_ids", "prompts")  # what a function of TRL's form may look at instead
_LISTS = {
    "completion_ids",
    "token_ids",
    "finish_reason",
    "environment_reward",
    "tool_calls",
}  # arguments of a group that differ between siblings

# A union with the other kind takes what it gets.
_SINGLE = re.compile(r"(?!.*\|(list|List|Sequence)\b)(Optional\[)?(str|int|float|bool|dict|Dict|Mapping)\b")
_SEVERAL = re.compile(r"(?!.*\|str\b)((list|List|Sequence|tuple|Tuple)\b|Messages$)")
TEXTS = re.compile(r"(list|List|Sequence)\[str\]$")


def completion_parameter(spec: str, parameters: Sequence[inspect.Parameter]) -> inspect.Parameter:
    """The parameter that takes one completion, or those of a group. Raises ``RecipeError`` where there is none."""
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if {"completion", "completions"} <= named.keys():
        remedy = "keep the first to get one, or the second to get a group"
        raise RecipeError(f'reward "{spec}" takes "completion" and "completions": {remedy}')
    for name in ("completions", "completion", *([VERL_TEXT] if "ground_truth" in named else [])):
        if name in named:
            return named[name]
    first = parameters[0] if parameters else None
    remedy = "its first parameter must be positional"
    if first is not None and first.name in PROVIDED:
        remedy = f'"{first.name}" gets something else, so name the one that gets it "completion"'
    elif first is not None and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return first
    raise RecipeError(f'reward "{spec}" takes no completion: {remedy}, as in {example(spec)}')


def takes_group(taker: inspect.Parameter) -> bool:
    """Return whether a function with this completion parameter is called once for each group, in TRL's form."""
    return taker.name == "completions" or taker.name in _FIRST_OF_GROUPS


def misread(spec: str, taker: inspect.Parameter, parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    """Parameters whose names or annotations say that they expect something else than they would get, a line each."""
    if not takes_group(taker):
        if _SEVERAL.match(kind := annotation_of(taker)):
            yield (
                f'reward "{spec}": "{taker.name}" is annotated {kind}, and would get the text of one completion: '
                f'annotate it str, or name it "completions" to get all of a group'
            )
        return
    for parameter in parameters:
        name = parameter.name
        needed = parameter.default is parameter.empty
        if name == "prompt" and needed:
            yield (
                f'reward "{spec}" asks for "prompt" beside "{taker.name}": a function of a group gets "prompts", a '
                "list with one for each completion"
            )
        elif parameter is not taker and needed and _SINGLE.match(kind := annotation_of(parameter)):
            yield (
                f'reward "{spec}": "{name}" is annotated {kind}, and would get a list with one value for each '
                f'completion: use zip({taker.name}, {name}), or take one "completion"'
            )


def adapted(
    function: Callable[..., Any], signature: RewardSignature, taker: inspect.Parameter, *, is_first: bool
) -> Callable[..., Any]:
    """A function that is called with the completions, and with columns by name: ``function`` itself where it is one."""
    is_verl = taker.name == VERL_TEXT
    if is_first and taker.kind is not taker.KEYWORD_ONLY and not signature.per_group and not is_verl:
        return function

    def named(completion: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        if signature.per_group:
            count = len(completion)
            for name in arguments.keys() - _LISTS:
                arguments[name] = [copied(arguments[name]) for _ in range(count)]
        elif is_verl and VERL_EXTRA in signature.optional_columns:
            arguments.setdefault(VERL_EXTRA, {})
        # What looks at ids or prompts alone has these among its arguments.
        return arguments if taker.name in _FIRST_OF_GROUPS else {taker.name: completion, **arguments}

    async def call_async(completion: Any, **arguments: Any) -> Any:
        return _score_of(await function(**named(completion, arguments)), is_verl)

    def call(completion: Any, **arguments: Any) -> Any:
        return _score_of(function(**named(completion, arguments)), is_verl)

    return call_async if signature.is_async else call


def example(spec: str) -> str:
    """A signature that works."""
    return f"`async def {spec.rpartition(':')[2]}(completion, *, answer, **columns)`"


def _score_of(returned: Any, is_verl: bool) -> Any:
    """Return ``score`` of a mapping: verl records what is beside it and does not train on it."""
    return returned["score"] if is_verl and isinstance(returned, Mapping) and "score" in returned else returned


def annotation_of(parameter: inspect.Parameter) -> str:
    """Return an annotation as it is written; empty: there is none."""
    given = parameter.annotation
    if given is parameter.empty:
        return ""
    text = given if isinstance(given, str) else given.__name__ if type(given) is type else str(given)
    return re.sub(r"\b(typing|t|collections\.abc|abc)\.|[\"' ]", "", text)

"""Declarations of built-in rewards: a name, options that are checked, and the columns that the function needs.

``builtin``, ``judge`` and ``sandbox`` declare their rewards with it. ``calls.loading`` calls a ``BuiltinReward`` with
the options of the recipe: in the reward worker, in its fork server, or in the process that inspects functions."""

from __future__ import annotations

import inspect
import keyword
import re
from collections import deque
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from msgspec import Struct, ValidationError, convert

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.types import JsonMapping, TextMapping
from streamrl.recipe.check_fields import expected
from streamrl.recipe.field_types import keys_of
from streamrl.recipe.problems import did_you_mean, short_toml

RewardCallable = Callable[..., Any]
"""``function(completion, **columns)``, or a coroutine function of that form."""


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the options of a built-in reward; the docstring of each subclass describes them."""


class BadOption(ValueError):
    """An option that its type allows and the reward cannot use; the message begins with the option's name."""


class BuiltinReward:
    """Maker of one kind of reward function. ``needs``: importable module -> the extra of streamrl that installs it."""

    def __init__(
        self, name: str, options: type[Options], make: Callable[[Any], RewardCallable], needs: TextMapping | None = None
    ) -> None:
        self.name = name
        self.options = options
        self._make = make
        self._needs = needs or {}

    def __call__(self, **options: Any) -> RewardCallable:
        """The reward function. Raises ``RecipeError`` with one problem for each option that is wrong or missing,
        and for each library that is not installed."""
        problems = [*self._bad_options(options), *self._missing_libraries()]
        raise_problems(problems)
        try:
            function = self._make(convert(options, self.options))
        except BadOption as error:
            raise RecipeError(f'reward "{self.name}": option {error}') from error
        function.__name__ = function.__qualname__ = self.name
        return function

    def _bad_options(self, options: JsonMapping) -> Iterable[str]:
        fields = keys_of(self.options)
        for key, value in options.items():
            place = f'reward "{self.name}": option "{key}"'
            if key not in fields:
                hint = did_you_mean(key, fields, ".")
                yield f"{place} is unknown{hint} Its options: {', '.join(fields) or 'none'}"
                continue
            try:
                convert(value, fields[key].annotation)
            except ValidationError:
                yield f"{place} = {short_toml(value)} is not allowed: must be {expected(fields[key].kind)}"
        for key, field in fields.items():
            if field.required and key not in options:
                yield f'reward "{self.name}" has no option "{key}": set it in [rewards.options]'

    def _missing_libraries(self) -> Iterable[str]:
        for module, extra in self._needs.items():
            if find_spec(module) is None:
                yield f"reward \"{self.name}\" needs {module}: pip install 'streamrl[{extra}]'"


def declare(
    function: RewardCallable,
    *,
    columns: Iterable[str] = (),
    optional: Iterable[str] = (),
    provided: Iterable[str] = (),
    of_group: bool = False,
) -> RewardCallable:
    """Give ``function(completion, **columns)`` a signature that names the arguments of its calls, or
    ``function(completions, **columns)`` where it is ``of_group``.

    ``columns``: dataset columns that the function needs; ``optional``: columns whose default is None; ``provided``:
    names of arguments that the runtime provides (``token_ids``, ``prompt``, ...). Raises ``BadOption`` for a column
    that cannot be passed by name."""
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    first = inspect.Parameter("completion", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if of_group:
        first = first.replace(name="completions", annotation="list[str]")
    parameters = [first]
    for name in dict.fromkeys([*columns, *provided]):
        if not name.isidentifier() or keyword.iskeyword(name) or name in ("completion", "completions"):
            raise BadOption(f'"column": {name!r} cannot be passed by name: rename the column of the dataset')
        parameters.append(inspect.Parameter(name, keyword_only))
    parameters += [inspect.Parameter(name, keyword_only, default=None) for name in optional]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def compiled(option: str, pattern: str) -> re.Pattern[str]:
    """The regular expression of an option. Raises ``BadOption``."""
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadOption(f'"{option}" = {pattern!r} is no regular expression ({error}): correct it') from error


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the last match (the whole match where the pattern has no group); None: no match."""
    last_matches = deque(pattern.finditer(text), maxlen=1)
    if not last_matches:
        return None
    match = last_matches[0]
    return match.group(1) if pattern.groups else match.group()

"""A value made of the columns of a row: by its name, by an expression or by a template of jinja, in jinja's sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from streamrl.base.errors import StreamRLError

_MARKS = ("{{", "{%", "{#")


class TemplateFailed(StreamRLError):
    """A row of which the value cannot be made; the message says why."""


def value_of(source: str, columns: Mapping[str, Any]) -> Any:
    """The column that is called ``source``, the value of the expression, or the text of the template that it is. Raises
    ``TemplateFailed``, also where a column is missing or null."""
    try:
        value = columns[source] if source in columns else _compiled(source)(columns)
    except Exception as error:  # of the user's template, over the user's data
        raise TemplateFailed(str(error) or type(error).__name__) from error
    if value is None:
        raise TemplateFailed("it is null")
    return value


@cache
def _compiled(source: str) -> Callable[[Mapping[str, Any]], Any]:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def shown(value: Any) -> Any:
        if value is None:
            raise jinja2.UndefinedError("a value in it is null")
        return value

    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, finalize=shown)
    if any(mark in source for mark in _MARKS):
        return environment.from_string(source).render
    expression = environment.compile_expression(source, undefined_to_none=False)
    # A column that is not there raises, and says its name, when it is to be made a list.
    return lambda columns: msgspec.to_builtins(expression(columns), enc_hook=list)

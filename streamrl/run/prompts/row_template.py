"""Values made of the columns of a row: by the name of a column, or by an expression or template of jinja in jinja's
sandbox. ``prompt_rows`` makes prompts and answers with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from msgspec import to_builtins

from streamrl.base.errors import StreamRLError
from streamrl.base.types import JsonMapping

_MARKS = ("{{", "{%", "{#")


class TemplateFailed(StreamRLError):
    """A value that cannot be made of a row; the message has the reason."""


def value_of(source: str, columns: JsonMapping) -> Any:
    """Return the value of ``source``: the name of a column, an expression or a template. Raises ``TemplateFailed``,
    also where a column is missing or null."""
    try:
        value = columns[source] if source in columns else _compiled(source)(columns)
    except Exception as error:  # a user's template over a user's data may raise any error
        raise TemplateFailed(str(error) or type(error).__name__) from error
    if value is None:
        raise TemplateFailed("it is null")
    return value


@cache
def _compiled(source: str) -> Callable[[JsonMapping], Any]:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse_null(value: Any) -> Any:
        if value is None:
            raise jinja2.UndefinedError("a value in it is null")
        return value

    jinja = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, finalize=refuse_null)
    if any(mark in source for mark in _MARKS):
        return jinja.from_string(source).render
    expression = jinja.compile_expression(source, undefined_to_none=False)
    # An undefined value, such as a missing column, raises here with its name, because ``list`` fails on it.
    return lambda columns: to_builtins(expression(columns), enc_hook=list)

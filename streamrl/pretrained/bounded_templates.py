"""jinja2's sandbox with a limit of loops and of texts, for the chat template of a model that anybody may have made.
``chat_template`` renders with it, in the process that makes prompts: the dry run, the controller, environment workers.

The sandbox keeps a template from files, processes and Python's internals; the limits keep it from holding that process
for hours, or taking all of its memory, by loops, products, sums and joins. Filters and methods of texts have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_ITERATIONS = 10_000_000
"""Iterations of all loops of one rendering. A chat of 10,000 messages takes some 100,000."""
LARGEST_VALUE = 64 << 20
"""Characters of a text, or items of a list, that an operator makes."""
LARGEST_EXPONENT = 10_000


class _LoopCounter(CodeGenerator):
    """Compiles a read of ``next_iteration`` into each loop, and a call of ``join_texts`` into each ``~``."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        # A read of an attribute, since the sandbox checks each call, which takes ten times as long.
        counter = nodes.EnvironmentAttribute("next_iteration")
        node.body.insert(0, nodes.ExprStmt(counter, lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with limits, for one template. Raises ``jinja2.TemplateError`` where a rendering exceeds them."""

    code_generator_class = _LoopCounter
    intercepted_binops = frozenset({"+", "*", "**"})  # the compiler would compute those of constants itself

    def begin_rendering(self) -> None:
        """Count the iterations of the next rendering from 0."""
        self._iterations = 0

    @property
    def next_iteration(self) -> int:
        """Number of the iteration that begins."""
        self._iterations += 1
        if self._iterations > MOST_ITERATIONS:
            raise jinja2.TemplateError(f"its loops have more than {MOST_ITERATIONS:,} iterations")
        return self._iterations

    def join_texts(self, parts: Sequence[Any]) -> str:
        texts = list(map(str, parts))
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, first: Any, second: Any) -> Any:
        if operator == "**" and isinstance(second, int | float) and second > LARGEST_EXPONENT:
            raise jinja2.TemplateError(f"it has an exponent above {LARGEST_EXPONENT:,}")
        for value, other in ((first, second), (second, first)):
            if isinstance(value, str | bytes | list | tuple):
                size = len(value)
                if operator == "*" and isinstance(other, int):
                    size = size * other
                elif operator == "+" and isinstance(other, str | bytes | list | tuple):
                    size = size + len(other)
                _check_size(size)
        return super().call_binop(context, operator, first, second)


def _check_size(size: int) -> None:
    if size > LARGEST_VALUE:
        raise jinja2.TemplateError(f"it makes a text or a list of {size:,} parts; {LARGEST_VALUE:,} are allowed")

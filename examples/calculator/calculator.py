"""The tool of the calculator. One object of the class is made for each chat, whose reward a call costs."""

from __future__ import annotations

import ast
import operator

PRICE = 0.2
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """Work out whole numbers with +, - and *."""
    return str(_value(ast.parse(expression, mode="eval").body))


class Calculator:
    """``calculate`` at a price. ``reward``: of the chat, beside the one for its answer."""

    reward = 0.0

    def calculate(self, expression: str) -> str:
        """Work out whole numbers with +, - and *."""
        self.reward -= PRICE
        return calculate(expression)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return int(OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("write whole numbers with +, - and * between them")

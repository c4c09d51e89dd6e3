"""The taskset of sums.py with a tool, which verifiers serves to the model's program as an MCP server."""

from __future__ import annotations

import ast
import operator
from typing import Any

import verifiers.v1 as vf
from sums import Sums

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
SCHEMA |= {"additionalProperties": False}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """One tool."""

    TOOL_PREFIX = None  # the model knows it as calculate

    @vf.tool
    def calculate(self, expression: str) -> str:
        """Work out whole numbers with +, - and *."""
        return str(_value(ast.parse(expression, mode="eval").body))

    def register(self, mcp: Any) -> None:
        """Offer the tool with the schema that the small model has seen: pydantic's has titles."""
        super().register(mcp)
        for tool in mcp._tool_manager.list_tools():
            tool.parameters = SCHEMA


class SumsWithTool(Sums):
    """The questions of ``Sums``, with one calculator for all that are being answered."""

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        """The servers that all tasks share."""
        return [Calculator(vf.SharedToolsetConfig())]


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return int(OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("write whole numbers with +, - and * between them")


__all__ = ["SumsWithTool"]

if __name__ == "__main__":
    Calculator.run()

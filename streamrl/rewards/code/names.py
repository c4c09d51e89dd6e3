"""Names of a test that are the judge's own, whatever the code defines. Only the standard library: the zygote loads it.

The test sees what the code defines, and some tests use a module or ``Counter`` that they do not import, because the
code does. A ``class math`` of the code's must not decide such a test.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import itertools
import math
import re
import sys
from collections.abc import Iterable
from typing import Any

MODULES = frozenset(
    ["bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
     "json", "math", "operator", "random", "re", "statistics", "string", "typing"]
)  # fmt: skip
"""Modules of which the judge uses its own, where the code imported them and the test did not."""
_MEMBERS = {
    name: getattr(module, name)
    for module in (collections, itertools, math)
    for name in (collections.__all__ if module is collections else dir(module))
    if not name.startswith("_")
}


def own_names(setup: str, test: str, entry_point: str, defined: Iterable[str]) -> dict[str, Any]:
    """What the judge uses of its own in place of names that the code has ``defined`` otherwise.

    A module where the test takes attributes of it, as in ``math.isclose(...)``. A public member of collections,
    itertools or math where something else is tested: ``entry_point``, or what it is called with, as in
    ``isclose(area(2), 12.57)``. In ``gcd(4, 6) == 2`` the code's own is what is tested.
    """
    # Most code defines none of them: the syntax tree of a test with a large literal is not made for nothing.
    doubted = {name for name in defined if name in MODULES or name in _MEMBERS} - {entry_point}
    doubted = {name for name in doubted if re.search(rf"\b{name}\b", f"{setup}\n{test}")}
    if not doubted:
        return {}
    nodes = [node for source in (setup, test) for node in ast.walk(ast.parse(source))]
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    own: dict[str, Any] = {name: importlib.import_module(name) for name in doubted & MODULES & bases}
    checks = doubted & _MEMBERS.keys() if entry_point else _checks(nodes, doubted & _MEMBERS.keys())
    return own | {name: _MEMBERS[name] for name in checks}


def _checks(nodes: list[ast.AST], members: set[str]) -> set[str]:
    """Those of ``members`` that the test calls with what comes from something else that only the code can define."""
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - _bound(nodes)
    tested = {name for name in used if not (name in MODULES or name in _MEMBERS or hasattr(builtins, name))}
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and _names([node.value]) & tested]
    results = tested.union(*(_names(node.targets) for node in assigned))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _names([*node.args, *node.keywords]) & results]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)} & members


def _names(trees: Iterable[ast.AST]) -> set[str]:
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _bound(nodes: list[ast.AST]) -> set[str]:
    """Names that the test itself gives a meaning to, somewhere."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def genuine_member(name: str, value: Any) -> str | None:
    """The module of ``MODULES`` that holds ``value`` under ``name``."""
    for module in MODULES:
        if module in sys.modules and getattr(sys.modules[module], name, None) is value:
            return module
    return None

"""What the text of a test says about its names. Only the standard library: the zygote loads it.

The test sees what the code defines. Some tests use a module or ``Counter`` that they do not import, because the code
does: a ``class math`` of the code's must not decide such a test. And some handle objects of the code's, or what the
code prints, so that they can only run in the code's process. Both are for the text to say, never for the code.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import itertools
import math
import sys
import typing
from collections.abc import Iterable
from typing import Any

MODULES = frozenset(
    ["bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
     "json", "math", "operator", "random", "re", "statistics", "string", "typing"]
)  # fmt: skip
"""Modules of which the test uses its own, where the code imported them and the test did not."""
_MEMBERS = {
    name: getattr(module, name)
    for module in (collections, itertools, math, typing)
    for name in (module.__all__ if hasattr(module, "__all__") else dir(module))
    if not name.startswith("_")
}
_OF_THE_PROCESS = frozenset(
    ["asyncio", "builtins", "capsys", "inspect", "mock", "monkeypatch", "patch", "redirect_stderr", "redirect_stdout",
     "stderr", "stdin", "stdout"]
)  # fmt: skip
_AWAITING = (ast.Await, ast.AsyncFor, ast.AsyncWith)


def names_a_class(name: str) -> bool:
    """Whether a name of the code's is written as classes are."""
    return name[:1].isupper() and "_" not in name


class TextOfTest:
    """The syntax trees of a test and of its setup. Takes the messages of their asserts away: what only a failure shows
    must not decide where the test runs."""

    def __init__(self, *trees: ast.Module) -> None:
        self._nodes: list[ast.AST] = [*trees]
        for node in self._nodes:  # grows while it is read
            if isinstance(node, ast.Assert):
                node.msg = None
            self._nodes.extend(ast.iter_child_nodes(node))
        used = {node.id for node in self._nodes if isinstance(node, ast.Name)} - self._bound()
        self._tested = {name for name in used if not (name in MODULES or name in _MEMBERS or hasattr(builtins, name))}

    def own_names(self, entry_point: str, defined: Iterable[str]) -> dict[str, Any]:
        """What the test uses of its own in place of names that the code has ``defined`` otherwise.

        A module where the test takes attributes of it, as in ``math.isclose(...)``. A public member of collections,
        itertools, math or typing where something else is tested: ``entry_point``, or what it is called with, as in
        ``isclose(area(2), 12.57)``. In ``gcd(4, 6) == 2`` the code's own is what is tested.
        """
        doubted = {name for name in defined if name in MODULES or name in _MEMBERS} - {entry_point}
        if not doubted:
            return {}
        bases = {
            node.value.id
            for node in self._nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        own: dict[str, Any] = {name: importlib.import_module(name) for name in doubted & MODULES & bases}
        members = doubted & _MEMBERS.keys()
        return own | {name: _MEMBERS[name] for name in (members if entry_point else self._checks() & members)}

    def must_run_inside(self) -> bool:
        """Whether the test handles what is no plain value: coroutines, the code's classes other than through methods
        and attributes, the identity of a result, or what the process prints and reads."""
        if any(self._is_of_the_process(node) for node in self._nodes):
            return True
        classes = {name for name in self._tested if names_a_class(name)}
        if not classes:
            return False
        parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        objects = classes | {
            node.targets[0].id
            for node in self._nodes
            if isinstance(node, ast.Assign) and _calls(node.value, classes) and isinstance(node.targets[0], ast.Name)
        }
        for node in self._nodes:
            if isinstance(node, ast.Name) and node.id in objects and isinstance(node.ctx, ast.Load):
                value: ast.AST = parents[node] if node.id in classes else node
                if (value is not node and not _calls(value, {node.id})) or not self._is_plain_use(
                    value, parents[value], objects
                ):
                    return True
        return False

    def _is_plain_use(self, value: ast.AST, parent: ast.AST, objects: set[str]) -> bool:
        """Whether an object of the code's is used for its methods or attributes, is passed to the code, or is compared
        with something that is not such an object (always unequal)."""
        if isinstance(parent, ast.Attribute):
            return isinstance(parent.ctx, ast.Load)
        if isinstance(parent, ast.Assign):
            return isinstance(value, ast.Call) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name)
        if isinstance(parent, ast.Call):
            function = parent.func
            of_object = isinstance(function, ast.Attribute) and _names([function.value]) & objects
            return value in parent.args and bool(of_object or _calls(parent, self._tested))
        if isinstance(parent, ast.Compare) and len(parent.ops) == 1:
            others = [other for other in (parent.left, *parent.comparators) if other is not value]
            return isinstance(parent.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot) and not _names(others) & objects
        return isinstance(parent, ast.Expr)

    def _is_of_the_process(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in _OF_THE_PROCESS
        if isinstance(node, ast.Attribute):
            return node.attr in _OF_THE_PROCESS
        if isinstance(node, ast.alias):
            return not _OF_THE_PROCESS.isdisjoint(node.name.split("."))
        if isinstance(node, ast.ExceptHandler):
            return node.type is not None and bool(_names([node.type]) & self._tested)
        if isinstance(node, ast.Compare) and any(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
            known = [
                isinstance(one, ast.Constant) or (isinstance(one, ast.Name) and hasattr(builtins, one.id))
                for one in (node.left, *node.comparators)
            ]
            return not any(known)
        return isinstance(node, _AWAITING)

    def _checks(self) -> set[str]:
        """Names of the functions that the test calls on the code's results."""
        assigned = [
            node for node in self._nodes if isinstance(node, ast.Assign) and _names([node.value]) & self._tested
        ]
        results = self._tested.union(*(_names(node.targets) for node in assigned))
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        return {
            call.func.id
            for call in calls
            if isinstance(call.func, ast.Name) and _names([*call.args, *call.keywords]) & results
        }

    def _bound(self) -> set[str]:
        """Names that the test itself gives a meaning to, somewhere."""
        stored = {node.id for node in self._nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        binding = [node for node in self._nodes if not isinstance(node, ast.keyword)]
        named = {getattr(node, field, None) for node in binding for field in ("name", "asname", "arg")}
        return stored | {str(name).partition(".")[0] for name in named}


def _names(trees: Iterable[ast.AST]) -> set[str]:
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def genuine_member(name: str, value: Any) -> str | None:
    """The module of ``MODULES`` that holds ``value`` under ``name``."""
    for module in MODULES:
        if module in sys.modules and getattr(sys.modules[module], name, None) is value:
            return module
    return None

"""Count what a reader of a page pays for: nodes, statements, dense forms and names (part of ``lint/house.py``).

Lines, blank lines and comments are free: a count of nodes does not depend on where lines are broken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rooms import nodes_of

STATEMENTS_A_CLASS = 200
STATEMENTS_A_FUNCTION = 45
CHARACTERS_A_TEST_NAME = 60

_WORDS = """
said given found known asked wanted chosen left made held kept heard done seen taken shown sent met used called begun
ended opened served placed noted tried told mine others theirs one there here what rest apart own whole beside elsewhere
away among more most least
"""
PARTICIPLES_AND_PRONOUNS = frozenset(_WORDS.split())
"""Names that are only a participle or a pronoun: write the thing, as ``match``, ``requested_rows`` or ``exit_code``."""

_OPENINGS = """
of by from for with in on at to until since after before between behind beside beyond below above within without over
under into upon as than like that this those these it its they them their he his she her what which who whose whom where
when how why one
"""
PREPOSITIONS_AND_PRONOUNS = frozenset(_OPENINGS.split())
"""First words of a description of a parameter that does not begin with its noun."""

_DESCRIPTION = re.compile(r"``[\w.]+``(?:(?:,| and) ``[\w.]+``)*:\s+(\w+)")

Node = tuple[Path, ast.AST]


def nodes_in(paths: Iterable[Path], *kinds: type[ast.AST]) -> Iterator[Node]:
    """Nodes of ``kinds`` in the syntax trees of ``paths``, each with its file."""
    for path in paths:
        for kind in kinds:
            for node in nodes_of(path).get(kind, ()):
                yield path, node


def number_of_nodes(paths: Iterable[Path]) -> int:
    """Number of all nodes of the syntax trees of ``paths``."""
    return sum(len(nodes) for path in paths for nodes in nodes_of(path).values())


def _statements(definition: ast.AST) -> int:
    """Number of statements in a class or function, docstrings apart."""
    count = 0
    left = list(ast.iter_child_nodes(definition))
    while left:
        node = left.pop()
        if isinstance(node, ast.stmt):
            count += not _is_docstring(node)
            left.extend(ast.iter_child_nodes(node))
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            left.extend(ast.iter_child_nodes(node))
    return count


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def long_classes(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Classes of more than ``STATEMENTS_A_CLASS`` statements."""
    for path, node in nodes_in(paths, ast.ClassDef):
        if (count := _statements(node)) > STATEMENTS_A_CLASS:
            yield path, node, f"{node.name} has {count} statements"  # type: ignore[attr-defined]


def long_functions(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Functions of more than ``STATEMENTS_A_FUNCTION`` statements."""
    for path, node in nodes_in(paths, ast.FunctionDef, ast.AsyncFunctionDef):
        if (count := _statements(node)) > STATEMENTS_A_FUNCTION:
            yield path, node, f"{node.name} has {count} statements"  # type: ignore[attr-defined]


def tuple_assignments(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Assignments of a tuple to a tuple. A call that is unpacked is none."""
    for path, node in nodes_in(paths, ast.Assign):
        assert isinstance(node, ast.Assign)
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield path, node, ast.unparse(node)


def values_or_empty(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Conditional expressions one side of which is an empty collection or text."""
    for path, node in nodes_in(paths, ast.IfExp):
        assert isinstance(node, ast.IfExp)
        if _is_empty(node.body) or _is_empty(node.orelse):
            yield path, node, ast.unparse(node)


def _is_empty(expression: ast.expr) -> bool:
    if isinstance(expression, ast.Dict):
        return not expression.keys
    if isinstance(expression, ast.List | ast.Tuple | ast.Set):
        return not expression.elts
    return isinstance(expression, ast.Constant) and expression.value in ("", b"")


def bare_names(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Variables, attributes, parameters and functions whose name is one of ``PARTICIPLES_AND_PRONOUNS``."""
    for path, node in nodes_in(paths, ast.Name, ast.Attribute, ast.arg, ast.FunctionDef, ast.AsyncFunctionDef):
        name = _bound_name(node)
        if name.strip("_") in PARTICIPLES_AND_PRONOUNS:
            yield path, node, name


def _bound_name(node: ast.AST) -> str:
    """The name that a node binds; empty where it only reads one."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
    return ""


def descriptions_without_a_noun(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Descriptions of parameters and fields in docstrings that open with one of ``PREPOSITIONS_AND_PRONOUNS``."""
    for path, node in nodes_in(paths, ast.Expr):
        if _is_docstring(node):  # type: ignore[arg-type]
            text = node.value.value  # type: ignore[attr-defined]
            for description in _DESCRIPTION.finditer(str(text)):
                if description[1].lower() in PREPOSITIONS_AND_PRONOUNS:
                    yield path, node, " ".join(description[0].split())


def long_test_names(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Tests whose name has more than ``CHARACTERS_A_TEST_NAME`` characters: the sentence is the docstring."""
    for path, node in nodes_in(paths, ast.FunctionDef, ast.AsyncFunctionDef):
        name = node.name  # type: ignore[attr-defined]
        if name.startswith("test_") and len(name) > CHARACTERS_A_TEST_NAME:
            yield path, node, name

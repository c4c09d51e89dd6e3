"""Simple tests, taken apart: questions that the code answers in the sandbox, and checks of its answers outside. Pure.

``assert add(3, 4) == 7`` becomes the question ``add(3, 4)`` and the check that the answer equals 7: the code never
sees what is expected. A test is simple when it is made of asserts, of assignments of names, and of a
``check(candidate)`` of these; when no answer is part of the arguments of another question; and when everything around
the questions is built of literals, operators, ``_FUNCTIONS`` and ``math``. All others run in the code's process."""

from __future__ import annotations

import ast
import builtins
import collections
import itertools
import math
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from streamrl.rewards.sandbox.values import limited

_LARGEST = 10_000_000  # bits of a power, or items of a product
_MOST_DIGITS = 1000


class SimpleTest(msgspec.Struct, frozen=True):
    """``setup``: Python that runs in the sandbox first; ``questions``: expressions about the code, in order;
    ``checks``: assignments and asserts, in which a name of ``ANSWER`` and a number stands for an answer."""

    setup: str
    questions: tuple[str, ...]
    checks: tuple[ast.Assign | ast.Assert, ...]


ANSWER = "answer "  # not a name that a test can have


class _NotSimple(Exception):
    """The test can only run where the code does."""


def parse_test(setup: str, test: str) -> ast.Module:
    """The syntax of a test. Raises ``ValueError`` where it is no Python, or needs a module that no sandbox has."""
    try:
        trees = [ast.parse(setup), ast.parse(test)]
        compile(setup, "setup", "exec", dont_inherit=True)
        compile(test, "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test is no Python: {error}") from error
    for node in (node for tree in trees for node in ast.walk(tree)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                raise ValueError(f"the test needs the module {name}, which the sandbox does not have")
    return trees[1]


def take_apart(setup: str, tree: ast.Module, entry_point: str) -> SimpleTest | None:
    """Questions and checks of a test; None: it is not simple."""
    try:
        return _Parts(setup, entry_point).read(tree)
    except (_NotSimple, RecursionError):
        return None


class _Parts:
    def __init__(self, setup: str, entry_point: str) -> None:
        self._entry_point = entry_point
        self._setup = [setup]
        self._bound = _bound_names(ast.parse(setup))
        self._only_library = False
        self._questions: list[str] = []
        self._checks: list[ast.Assign | ast.Assert] = []
        self._variables: dict[str, ast.expr | None] = {}  # what is assigned; None: it is made of answers
        self._answers: set[str] = set()  # those variables
        self._inside: set[str] = set()
        self._outside: set[str] = set()

    def read(self, tree: ast.Module) -> SimpleTest:
        statements = _inlined(tree.body)
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        self._only_library = not any(self._is_of_the_code(name) for name in called)
        for statement in statements:
            self._read_statement(statement)
        if self._inside & self._outside or not self._checks:
            raise _NotSimple  # it looks at what the code made of its arguments
        return SimpleTest("\n".join(self._setup), tuple(self._questions), tuple(self._checks))

    def _read_statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                # For arguments; around answers only ``math`` is known, which is ours.
                self._setup.append(ast.unparse(statement))
                self._bound |= _bound_names(statement)
            case ast.Assert():
                self._checks.append(ast.Assert(test=self._outer(statement.test), msg=None))
            case ast.Assign(targets=[ast.Name(id=name)]) if name not in self._variables:
                asked = len(self._questions)
                text = ast.unparse(statement.value)
                value = self._outer(statement.value)
                made_of_answers = len(self._questions) > asked or bool(self._answers & _used_names(value))
                self._variables[name] = None if made_of_answers else ast.parse(text, mode="eval").body
                self._answers |= {name} if made_of_answers else set()
                self._checks.append(ast.Assign(targets=statement.targets, value=value))
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return
            case _:
                raise _NotSimple

    def _outer(self, node: ast.expr) -> ast.expr:
        """``node`` with names in place of questions; what is around them must be known."""
        if self._is_question(node):
            question = _Arguments(self._variables, self._inside).visit(ast.parse(ast.unparse(node), mode="eval"))
            self._questions.append(ast.unparse(question))
            return ast.Name(f"{ANSWER}{len(self._questions) - 1}", ast.Load())
        if isinstance(node, ast.Name):
            if node.id not in self._variables:
                raise _NotSimple
            self._outside.add(node.id)
        elif isinstance(node, ast.Call):
            if not _is_known(node.func):
                raise _NotSimple
            node.args = [self._outer(argument) for argument in node.args]
            for keyword in node.keywords:
                keyword.value = self._outer(keyword.value)
        elif not isinstance(node, ast.Attribute) or not _is_known(node):
            shifts = isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.RShift | ast.MatMult)
            if not isinstance(node, _OUTER) or shifts or _compares_identity(node):
                raise _NotSimple
            for field, value in ast.iter_fields(node):
                if isinstance(value, ast.expr):
                    setattr(node, field, self._outer(value))
                elif isinstance(value, list):
                    setattr(node, field, [self._outer(one) if isinstance(one, ast.expr) else one for one in value])
            if isinstance(node, ast.BinOp) and type(node.op) in _GUARDED:
                return ast.Call(ast.Name(_GUARDED[type(node.op)], ast.Load()), [node.left, node.right], [])
        return node

    def _is_question(self, node: ast.expr) -> bool:
        """Return whether it is a call of the code's function, or of a method of a new object: ``Solution().add(2,
        3)``."""
        if not isinstance(node, ast.Call):
            return False
        called = node
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        of_object = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call)
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            called = node.func.value
            arguments += [*called.args, *(keyword.value for keyword in called.keywords)]
        if not isinstance(called.func, ast.Name) or not self._is_of_the_code(called.func.id):
            return False
        if (called.func.id != self._entry_point and _names_a_class(called.func.id)) is not of_object:
            raise _NotSimple  # an object, or a method of an answer
        if any(self._asks(argument) for argument in arguments):
            raise _NotSimple
        return True

    def _is_of_the_code(self, name: str) -> bool:
        """A name of the library that a test may mean without an import is the code's only where the test calls nothing
        else of the code's."""
        if name == self._entry_point:
            return True
        known = hasattr(builtins, name) or name in self._bound or name in self._variables
        return not known and (self._only_library or not _is_of_library(name))

    def _asks(self, argument: ast.expr) -> bool:
        for node in ast.walk(argument):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and self._is_of_the_code(node.func.id):
                return True
            if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
                return True
        return False


class _Arguments(ast.NodeTransformer):
    """Puts what variables of the test are in place of their names, in what the code is asked."""

    def __init__(self, variables: Mapping[str, ast.expr | None], used: set[str]) -> None:
        self._variables = variables
        self._used = used

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._variables:
            return node
        value = self._variables[node.id]
        if value is None:
            raise _NotSimple
        self._used.add(node.id)
        return self.visit(value)  # type: ignore[no-any-return]


def _inlined(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements with the body of ``check`` (of HumanEval) in place of its call."""
    checks = {one.name: one for one in body if isinstance(one, ast.FunctionDef) and len(one.args.args) == 1}
    statements: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) if name in checks:
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Name() as given], keywords=[])) if (
                name in checks
            ):
                parameter = checks[name].args.args[0].arg
                renamed = _Arguments({parameter: given}, set())
                statements += [renamed.visit(ast.parse(ast.unparse(one)).body[0]) for one in checks[name].body]
            case _:
                statements.append(statement)
    return statements


def _names_a_class(name: str) -> bool:
    return name[0].isupper() and "_" not in name


def _is_of_library(name: str) -> bool:
    return any(hasattr(module, name) for module in (collections, itertools, math, typing))


def _compares_identity(node: ast.expr) -> bool:
    """Return whether it asks if two objects are the same, neither of which is ``None``, ``True`` or the like."""
    return isinstance(node, ast.Compare) and any(
        isinstance(op, ast.Is | ast.IsNot) and not isinstance(other, ast.Constant)
        for op, other in zip(node.ops, node.comparators, strict=True)
    )


def _used_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _bound_names(tree: ast.AST) -> set[str]:
    """Names that get a meaning somewhere in ``tree``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def passes(test: SimpleTest, answers: Sequence[Any]) -> bool:
    """Return whether the checks hold. Raises whatever an answer of another type than expected makes them raise."""
    names: dict[str, Any] = {f"{ANSWER}{number}": answer for number, answer in enumerate(answers)}
    names |= _FUNCTIONS | {"__builtins__": {}, "math": math}
    for check in test.checks:
        expression = check.value if isinstance(check, ast.Assign) else check.test
        # Of known nodes only, and without an attribute but those of ``math``: see ``_outer``.
        value = eval(compile(ast.fix_missing_locations(ast.Expression(expression)), "test", "eval"), names)
        if isinstance(check, ast.Assert) and not value:
            return False
        if isinstance(check, ast.Assign):
            names[ast.unparse(check.targets[0])] = value
    return True


def _product(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, list | tuple | str | bytes) and len(one) * other > _LARGEST:
            raise ValueError("a sequence that is too large")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _LARGEST:
        raise ValueError("a number that is too large")
    return left**right


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        raise TypeError("text is not formatted outside of the sandbox")
    return left % right


def _rounded(number: Any, digits: int = 0) -> Any:
    if abs(digits) > _MOST_DIGITS:
        raise ValueError("too many digits")
    return round(number, digits) if digits else round(number)


def _is_known(node: ast.expr) -> bool:
    """Return whether it is a function that a test may use outside, or a number of ``math``."""
    match node:
        case ast.Name(id=name):
            return name in _FUNCTIONS
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return name in _MATHEMATICS
    return False


_OUTER = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare,
    ast.Subscript, ast.Slice,
)  # fmt: skip
_GUARDED: dict[type, str] = {ast.Mult: "_product", ast.Pow: "_power", ast.Mod: "_remainder"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "dict": lambda given=(): dict(limited(given)), "float": float,
    "frozenset": lambda given=(): frozenset(limited(list(given))), "int": int, "len": len, "list": list, "max": max,
    "min": min, "round": _rounded, "set": lambda given=(): set(limited(list(given))), "sorted": sorted, "str": str,
    "sum": sum, "tuple": tuple, "_product": _product, "_power": _power, "_remainder": _remainder,
}  # fmt: skip
_MATHEMATICS = frozenset({"ceil", "e", "fabs", "floor", "inf", "isclose", "isinf", "isnan", "nan", "pi", "sqrt", "tau"})

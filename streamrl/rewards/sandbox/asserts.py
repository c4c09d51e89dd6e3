"""Simple tests, split into questions that the code of a completion answers in the sandbox, and checks of its answers
outside of it. No input or output.

``rewards.sandbox.reward`` calls it for each test of a completion, in a call process, or in the reward worker where the
reward is trusted. ``assert add(3, 4) == 7`` becomes the question ``add(3, 4)`` and the check that the answer equals 7:
the code never sees the expected result. A test is simple when it consists of asserts, of assignments of names, and of
a function ``check(candidate)`` that consists of both; when no answer is part of the arguments of another question; and
when everything around the questions consists of literals, operators, ``_FUNCTIONS`` and ``math``. All other tests run
in the code's process."""

from __future__ import annotations

import ast
import builtins
import collections
import itertools
import math
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from streamrl.rewards.sandbox.values import limited

_LARGEST = 10_000_000  # bits of a power, or items of a product
_MOST_DIGITS = 1000


class SimpleTest(Struct, frozen=True):
    """A simple test in two parts. ``setup``: Python that runs in the sandbox first; ``questions``: expressions that the
    sandbox evaluates, in order; ``checks``: assignments and asserts that run outside, in which a name (``ANSWER`` and a
    number) stands for each answer."""

    setup: str
    questions: tuple[str, ...]
    checks: tuple[ast.Assign | ast.Assert, ...]


ANSWER = "answer "  # not a name that a test can have


class _NotSimple(Exception):
    """The test can only run in the code's process."""


def parse_test(setup: str, test: str) -> ast.Module:
    """The syntax of a test. Raises ``ValueError`` where it is no Python, or needs a module that the sandbox lacks."""
    try:
        trees = [ast.parse(setup), ast.parse(test)]
        compile(setup, "setup", "exec", dont_inherit=True)
        compile(test, "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test is no Python: {error}") from error
    for tree in trees:
        for name in _imported_modules(tree):
            if name.partition(".")[0] not in sys.stdlib_module_names:
                raise ValueError(f"the test needs the module {name}, which the sandbox does not have")
    return trees[1]


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def take_apart(setup: str, tree: ast.Module, entry_point: str) -> SimpleTest | None:
    """Questions and checks of a test; None: the test is not simple."""
    try:
        return _TestReader(setup, entry_point).read(tree)
    except (_NotSimple, RecursionError):
        return None


class _TestReader:
    """Reader of one test."""

    def __init__(self, setup: str, entry_point: str) -> None:
        self._entry_point = entry_point
        self._setup = [setup]
        self._setup_names = _bound_names(ast.parse(setup))
        self._calls_only_library = False
        self._questions: list[str] = []
        self._checks: list[ast.Assign | ast.Assert] = []
        self._variables: dict[str, ast.expr | None] = {}  # variable -> its value; None: the value contains answers
        self._answer_variables: set[str] = set()  # variables whose value contains answers
        self._names_in_questions: set[str] = set()
        self._names_in_checks: set[str] = set()

    def read(self, tree: ast.Module) -> SimpleTest:
        """Questions and checks of the test. Raises ``_NotSimple``."""
        statements = _inlined(tree.body)
        function_names = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        self._calls_only_library = not any(self._is_of_the_code(name) for name in function_names)
        for statement in statements:
            self._read_statement(statement)
        if self._names_in_questions & self._names_in_checks or not self._checks:
            raise _NotSimple  # the test may check whether the code changed its arguments
        return SimpleTest("\n".join(self._setup), tuple(self._questions), tuple(self._checks))

    def _read_statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                # Arguments of questions may use the import. Checks know only ``math``, which is the real module.
                self._setup.append(ast.unparse(statement))
                self._setup_names |= _bound_names(statement)
            case ast.Assert():
                self._checks.append(ast.Assert(test=self._check_of(statement.test), msg=None))
            case ast.Assign(targets=[ast.Name(id=name)]) if name not in self._variables:
                questions_before = len(self._questions)
                text = ast.unparse(statement.value)
                value = self._check_of(statement.value)
                if len(self._questions) > questions_before or self._answer_variables & _names_in(value):
                    self._variables[name] = None
                    self._answer_variables.add(name)
                else:
                    self._variables[name] = ast.parse(text, mode="eval").body
                self._checks.append(ast.Assign(targets=statement.targets, value=value))
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return
            case _:
                raise _NotSimple

    def _check_of(self, node: ast.expr) -> ast.expr:
        """``node`` with names of answers in place of questions. Raises ``_NotSimple`` where the expression around the
        questions uses other syntax than ``_CHECK_NODES``, ``_FUNCTIONS`` and ``math``."""
        if self._is_question(node):
            values = _ValuesForNames(self._variables, self._names_in_questions)
            question = values.visit(ast.parse(ast.unparse(node), mode="eval"))
            self._questions.append(ast.unparse(question))
            return ast.Name(f"{ANSWER}{len(self._questions) - 1}", ast.Load())
        if isinstance(node, ast.Name):
            if node.id not in self._variables:
                raise _NotSimple
            self._names_in_checks.add(node.id)
        elif isinstance(node, ast.Call):
            if not _is_allowed(node.func):
                raise _NotSimple
            node.args = [self._check_of(argument) for argument in node.args]
            for keyword in node.keywords:
                keyword.value = self._check_of(keyword.value)
        elif not isinstance(node, ast.Attribute) or not _is_allowed(node):
            shifts = isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.RShift | ast.MatMult)
            if not isinstance(node, _CHECK_NODES) or shifts or _compares_identity(node):
                raise _NotSimple
            for field, value in ast.iter_fields(node):
                if isinstance(value, ast.expr):
                    setattr(node, field, self._check_of(value))
                elif isinstance(value, list):
                    checks = [self._check_of(item) if isinstance(item, ast.expr) else item for item in value]
                    setattr(node, field, checks)
            if isinstance(node, ast.BinOp) and type(node.op) in _GUARDED:
                return ast.Call(ast.Name(_GUARDED[type(node.op)], ast.Load()), [node.left, node.right], [])
        return node

    def _is_question(self, node: ast.expr) -> bool:
        """Return whether ``node`` is a call of a function of the code, or of a method of a new object:
        ``Solution().add(2, 3)``. Raises ``_NotSimple`` for other calls of the code."""
        if not isinstance(node, ast.Call):
            return False
        call = node  # the call of the function or the class
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        of_object = False
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            of_object = True
            call = node.func.value
            arguments += [*call.args, *(keyword.value for keyword in call.keywords)]
        if not isinstance(call.func, ast.Name) or not self._is_of_the_code(call.func.id):
            return False
        is_class = call.func.id != self._entry_point and _names_a_class(call.func.id)
        if is_class is not of_object:
            raise _NotSimple  # the result is an object, or the method of an answer is called
        if any(self._contains_question(argument) for argument in arguments):
            raise _NotSimple
        return True

    def _is_of_the_code(self, name: str) -> bool:
        """Return whether ``name`` is a function or class of the code. A test may use names of ``collections``,
        ``itertools``, ``math`` and ``typing`` without an import. Where it calls nothing but such names, the code must
        have defined them."""
        if name == self._entry_point:
            return True
        if hasattr(builtins, name) or name in self._setup_names or name in self._variables:
            return False
        return self._calls_only_library or not _is_of_library(name)

    def _contains_question(self, argument: ast.expr) -> bool:
        for node in ast.walk(argument):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and self._is_of_the_code(node.func.id):
                return True
            if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
                return True
        return False


class _ValuesForNames(ast.NodeTransformer):
    """Puts the values of variables in place of their names, and adds each name to ``replaced_names``."""

    def __init__(self, variables: Mapping[str, ast.expr | None], replaced_names: set[str]) -> None:
        self._variables = variables
        self._replaced_names = replaced_names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._variables:
            return node
        value = self._variables[node.id]
        if value is None:
            raise _NotSimple
        self._replaced_names.add(node.id)
        return self.visit(value)  # type: ignore[no-any-return]


def _inlined(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements with the body of HumanEval's ``check(candidate)`` in place of its call."""
    functions = [statement for statement in body if isinstance(statement, ast.FunctionDef)]
    checks = {function.name: function for function in functions if len(function.args.args) == 1}
    statements: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) if name in checks:
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Name() as argument], keywords=[])) if (
                name in checks
            ):
                parameter = checks[name].args.args[0].arg
                renamer = _ValuesForNames({parameter: argument}, set())
                copies = [ast.parse(ast.unparse(inner)).body[0] for inner in checks[name].body]
                same_name = argument.id == parameter
                statements += copies if same_name else [renamer.visit(copy) for copy in copies]
            case _:
                statements.append(statement)
    return statements


def _names_a_class(name: str) -> bool:
    return name[0].isupper() and "_" not in name


def _is_of_library(name: str) -> bool:
    return any(hasattr(module, name) for module in (collections, itertools, math, typing))


def _compares_identity(node: ast.expr) -> bool:
    """Return whether ``node`` compares the identity of objects (``is``), except with ``None``, ``True`` or another
    constant."""
    return isinstance(node, ast.Compare) and any(
        isinstance(operator, ast.Is | ast.IsNot) and not isinstance(comparator, ast.Constant)
        for operator, comparator in zip(node.ops, node.comparators, strict=True)
    )


def _names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _bound_names(tree: ast.AST) -> set[str]:
    """Names that an assignment, a definition or an import binds somewhere in ``tree``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def passes(test: SimpleTest, answers: Sequence[Any]) -> bool:
    """Return whether the checks hold. Raises any exception of an expression that gets an answer of an unexpected
    type."""
    names: dict[str, Any] = {f"{ANSWER}{number}": answer for number, answer in enumerate(answers)}
    names |= _FUNCTIONS | {"__builtins__": {}, "math": math}
    for check in test.checks:
        expression = check.value if isinstance(check, ast.Assign) else check.test
        # The expression has only allowed nodes, and no attribute except those of ``math``: see ``_check_of``.
        value = eval(compile(ast.fix_missing_locations(ast.Expression(expression)), "test", "eval"), names)
        if isinstance(check, ast.Assert) and not value:
            return False
        if isinstance(check, ast.Assign):
            names[ast.unparse(check.targets[0])] = value
    return True


def _product(left: Any, right: Any) -> Any:
    for sequence, factor in ((left, right), (right, left)):
        if isinstance(sequence, list | tuple | str | bytes) and len(sequence) * factor > _LARGEST:
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


def _limited_dict(items: Any = (), /) -> dict[Any, Any]:
    return dict(limited(items))  # raises ValueError for too many items


def _limited_set(items: Any = (), /) -> set[Any]:
    return set(limited(list(items)))


def _limited_frozenset(items: Any = (), /) -> frozenset[Any]:
    return frozenset(limited(list(items)))


def _is_allowed(node: ast.expr) -> bool:
    """Return whether ``node`` names a function or a number that checks may use."""
    match node:
        case ast.Name(id=name):
            return name in _FUNCTIONS
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return name in _MATHEMATICS
    return False


_CHECK_NODES = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare,
    ast.Subscript, ast.Slice,
)  # fmt: skip
_GUARDED: dict[type, str] = {ast.Mult: "_product", ast.Pow: "_power", ast.Mod: "_remainder"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "dict": _limited_dict, "float": float,
    "frozenset": _limited_frozenset, "int": int, "len": len, "list": list, "max": max, "min": min, "round": _rounded,
    "set": _limited_set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple, "_product": _product,
    "_power": _power, "_remainder": _remainder,
}  # fmt: skip
_MATHEMATICS = frozenset({"ceil", "e", "fabs", "floor", "inf", "isclose", "isinf", "isnan", "nan", "pi", "sqrt", "tau"})

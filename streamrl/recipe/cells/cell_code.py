"""Writes functions, classes and callable objects to files that the processes of a run import. Called in the process of
a notebook by ``cells.python_recipe`` and ``launch.pipeline``, and for the rewards of a TRL script by
``cli.dialects``. The files have source code and no pickles, so
that a reader sees the code of the run, and a resumed run can import it."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import os
import re
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from streamrl.base.atomic_files import make_directory, write_durable
from streamrl.base.errors import RecipeError
from streamrl.base.types import TextsByName
from streamrl.recipe.user_code import spec_of

CELLS = "cells"
"""Directory of the files that are written for a notebook, beside the directories of runs."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_REMEDY = "make it inside of the function, or define both in a file and name that"


def name_of_code(code: Any, directory: Path) -> str:
    """Return the name by which another process imports a function or class. Code of a notebook's cell is written to a
    file in ``directory`` with all parts of the notebook that it uses (``source_of``). The same source gives the same
    file.

    Raises ``RecipeError`` for a lambda or a nested function, and where a used object has no source."""
    name = getattr(code, "__qualname__", "")
    if not _of_a_cell(code) or not name.isidentifier() or name == "<lambda>":
        return spec_of(code)
    return f"{written(directory, name, '.py', source_of(name, code).encode())}:{name}"


def source_of(name: str, code: Any) -> str:
    """Return the text of a file that defines ``code`` as ``name``: a function (also a nested one, with the values of
    its closure), a class, a partial, a bound method or an instance that can be called, with everything of its module
    that it uses.

    Raises ``RecipeError`` where a used object has no source and is no plain value."""
    definitions = _Definitions(name)
    definitions.add(name, code, name)
    script = getattr(sys.modules["__main__"], "__file__", None)
    place = os.getcwd() if script is None else str(Path(script).absolute().parent)
    path = f"if {place!r} not in sys.path:\n    sys.path.append({place!r})"
    future = "from __future__ import annotations"
    return "\n".join(
        [f'"""Written from Python objects, for {name}."""', future, "import sys", path, *definitions.texts(), ""]
    )


def written(directory: Path, name: str, ending: str, content: bytes) -> Path:
    """Write ``content`` to a file of ``directory`` and return the path. The file's name has ``name``, the digest of the
    content and ``ending``; an existing file is not written again."""
    file = directory.absolute() / f"{name}_{hashlib.sha256(content).hexdigest()[:10]}{ending}"
    if not file.exists():
        make_directory(file.parent)
        write_durable(file, content)
    return file


def _of_a_cell(code: Any) -> bool:
    return getattr(code, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__")


class _Definitions:
    """Statements that define an object and everything that it uses, by the names that they define."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._texts: TextsByName = {}
        self._values: dict[str, Any] = {}

    def texts(self) -> list[str]:
        """Return the statements, each after those of the names that it uses."""
        return list(self._texts.values())

    def add(self, name: str, value: Any, user: str) -> None:
        """Add the statement that defines ``name`` as ``value``, after those that it needs. ``user``: name of the object
        that uses it. Raises ``RecipeError`` where there is no such statement."""
        if name in self._texts:
            if self._values[name] is not value and not (_is_plain(value) and value == self._values[name]):
                raise RecipeError(f"{user} uses two objects with the name {name}: rename one of them")
            return
        self._texts[name] = ""  # two functions may use each other
        self._values[name] = value
        text = self._statement(name, value, user)
        del self._texts[name]  # the new entry stands after those of its dependencies
        self._texts[name] = text

    def _statement(self, name: str, value: Any, user: str) -> str:
        if isinstance(value, ModuleType):
            return f"import {value.__name__} as {name}"
        if isinstance(value, re.Pattern):
            return f"import re\n{name} = re.compile({value.pattern!r}, {int(value.flags)})"
        if imported := _import_of(name, value):
            return imported
        if isinstance(value, type | FunctionType):
            return self._code(name, value)
        if isinstance(value, MethodType):
            owner = f"{name}_owner"
            self.add(owner, value.__self__, user)
            return f"{name} = {owner}.{value.__name__}"
        if isinstance(value, functools.partial):
            function = self._expression(f"{name}_function", value.func, user)
            positional = self._expression(f"{name}_arguments", value.args, user)
            keywords = self._expression(f"{name}_keywords", value.keywords, user)
            return f"import functools\n{name} = functools.partial({function}, *{positional}, **{keywords})"
        kind = type(value)
        of_user = kind.__module__ == "__main__" or name in (self._root, f"{self._root}_owner")
        if of_user and hasattr(value, "__dict__") and vars(kind).get("__reduce__") is None:
            self.add(kind.__name__, kind, user)
            state = f"{name}.__dict__.update({self._expression(f'{name}_state', vars(value), user)})"
            return f"{name} = {kind.__name__}.__new__({kind.__name__})\n{state}"
        return f"{name} = {self._expression(name, value, user)}"

    def _expression(self, name: str, value: Any, user: str) -> str:
        """Return an expression of ``value``. What is no plain value and no container gets a definition as ``name``."""
        if _is_plain(value):
            return repr(value)
        if type(value) in (list, tuple, set):
            items = [self._expression(f"{name}_{place}", item, user) for place, item in enumerate(value)]
            return f"{type(value).__name__}([{', '.join(items)}])"
        if type(value) is dict:
            return f"dict({self._expression(name, [*value.items()], user)})"
        if name in self._texts and self._values[name] is value:
            raise RecipeError(
                f"{user} uses {name} ({type(value).__name__}), which cannot be written to a file: {_REMEDY}"
            )
        self.add(name, value, user)
        return name

    def _code(self, name: str, value: Any) -> str:
        """Return the source of a function or class, after everything that it uses was added."""
        text = _definition(value)
        defined = value.__name__
        variables = dict(vars(sys.modules[value.__module__]))
        for function in _functions_of(value):
            free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            variables |= {variable: cell.cell_contents for variable, cell in free if variable != "__class__"}
        for dependency in sorted(_globals_of(text) & variables.keys() - {defined}):
            self.add(dependency, variables[dependency], defined)
        return f"{text}{name} = {defined}\n" if defined != name else text


def _import_of(name: str, value: Any) -> str:
    """Return the statement that imports ``value`` from its module; empty: it has no such module."""
    module = getattr(value, "__module__", None) or ""
    defined_name = getattr(value, "__qualname__", "")
    if module == "__main__" or not defined_name.isidentifier():
        return ""
    if getattr(sys.modules.get(module), defined_name, None) is not value:
        return ""
    return f"from {module} import {defined_name} as {name}"


def _is_plain(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _functions_of(value: Any) -> list[FunctionType]:
    """Return a function without its decorators, or the methods of a class."""
    members = vars(value).values() if isinstance(value, type) else [value]
    functions = [inspect.unwrap(getattr(member, "__func__", member)) for member in members if callable(member)]
    return [function for function in functions if isinstance(function, FunctionType)]


def _definition(value: Any) -> str:
    """Return the source of a function or class, with its decorators: the statement in whose lines its code is."""
    codes = [function.__code__ for function in _functions_of(value)]
    for file in {code.co_filename for code in codes}:
        lines = linecache.getlines(file)
        try:
            nodes = [*ast.walk(ast.parse("".join(lines)))]
        except SyntaxError:  # a cell with a magic
            continue
        for node in nodes:
            if isinstance(node, _DEFINITIONS) and node.name == value.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if any(first <= code.co_firstlineno <= (node.end_lineno or first) for code in codes):
                    text = "".join(lines[first - 1 : node.end_lineno]).rstrip() + "\n"
                    # Not dedented: that would change texts of several lines.
                    return f"if True:\n{text}" if node.col_offset else text
    raise RecipeError(f"the source of {value.__qualname__} is not known: write it as a function with a name, in a file")


def _globals_of(source: str) -> set[str]:
    """Return the names that ``source`` reads from its module."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        at_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_global() or (at_top and symbol.is_referenced()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    return set(walk(symtable.symtable(source, "cell", "exec")))

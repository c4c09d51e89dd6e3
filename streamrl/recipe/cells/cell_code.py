"""Writes functions and classes of a notebook's cells to files that the processes of a run import. Called in the
notebook's process by ``cells.python_recipe`` and ``launch.pipeline``. The files have source code and no pickles, so
that a reader sees the code of the run, and a resumed run can import it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import os
import re
import symtable
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from streamrl.base.atomic_files import make_directory, write_durable
from streamrl.base.errors import RecipeError
from streamrl.recipe.user_code import spec_of

CELLS = "cells"
"""Directory of the files that are written for a notebook, beside the directories of runs."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_REMEDY = "make it inside of the function, or define both in a file and name that"


def name_of_code(code: Any, directory: Path) -> str:
    """Return the name by which another process imports a function or class. Code of a notebook's cell is written to a
    file in ``directory``, with all parts of the notebook that it uses: modules, functions, classes, plain values. The
    same source gives the same file.

    Raises ``RecipeError`` for a lambda or a nested function, and where a used object has no source."""
    name = getattr(code, "__qualname__", "")
    if not _of_a_cell(code) or not name.isidentifier() or name == "<lambda>":
        return spec_of(code)
    parts: dict[str, str] = {}
    _collect(name, code, vars(sys.modules["__main__"]), parts, name)
    path = f"sys.path += [place for place in [{os.getcwd()!r}] if place not in sys.path]"
    text = "\n".join([f'"""Written from a notebook, for {name}."""', "import sys", path, *parts.values(), ""])
    return f"{written(directory, name, '.py', text.encode())}:{name}"


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


def _collect(name: str, value: Any, notebook: Mapping[str, Any], parts: dict[str, str], user: str) -> None:
    """Add to ``parts`` the source that defines ``name``, after the sources of the objects that it uses.

    ``value``: object of this name; ``notebook``: variables of the notebook; ``user``: name of the object that uses
    it."""
    if name in parts:
        return
    parts[name] = ""  # two functions may use each other
    defined_name = getattr(value, "__qualname__", "")
    module = getattr(value, "__module__", "")
    if isinstance(value, ModuleType):
        text = f"import {value.__name__} as {name}"
    elif _of_a_cell(value) and callable(value) and defined_name.isidentifier():
        text = _definition(value)
        for dependency in sorted(_globals_of(text) & notebook.keys() - {name}):
            _collect(dependency, notebook[dependency], notebook, parts, defined_name)
        if defined_name != name:
            text += f"{name} = {defined_name}\n"
    elif defined_name.isidentifier() and getattr(sys.modules.get(module), defined_name, None) is value:
        text = f"from {module} import {defined_name} as {name}"
    elif isinstance(value, re.Pattern):
        text = f"import re\n{name} = re.compile({value.pattern!r}, {int(value.flags)})"
    elif _is_plain(value):
        text = f"{name} = {value!r}"
    else:
        raise RecipeError(f"{user} uses {name} ({type(value).__name__}), which cannot be written to a file: {_REMEDY}")
    del parts[name]  # the new entry stands after those of its dependencies
    parts[name] = text


def _is_plain(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _definition(value: Any) -> str:
    """Return the source of a function or class of a cell, with its decorators."""
    members = [value, *vars(value).values()] if isinstance(value, type) else [inspect.unwrap(value)]
    for file in {member.__code__.co_filename for member in members if hasattr(member, "__code__")}:
        lines = linecache.getlines(file)
        try:
            nodes = ast.parse("".join(lines)).body
        except SyntaxError:  # a cell with a magic
            continue
        for node in reversed(nodes):
            if isinstance(node, _DEFINITIONS) and node.name == value.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).rstrip() + "\n"
    raise RecipeError(f"the source of {value.__qualname__} is not known: define it in a file")


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

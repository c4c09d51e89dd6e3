"""Functions and classes of a notebook's cells, written to files that other processes import. Nothing is pickled: source
is written, so that a file says what was run, and a resumed run finds it."""

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
"""Directory of what is written for a notebook, beside the directories of runs."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_REMEDY = "make it inside of the function, or define both in a file and name that"


def name_of_code(given: Any, directory: Path) -> str:
    """The name by which another process imports a function or class. One of a notebook's cell is written to
    ``directory``, with everything of the notebook that it uses: modules, functions, classes, plain values. The same
    source gives the same file.

    Raises ``RecipeError`` for a lambda or a nested function, and where something it uses has no source."""
    name = getattr(given, "__qualname__", "")
    if not _of_a_cell(given) or not name.isidentifier() or name == "<lambda>":
        return spec_of(given)
    parts: dict[str, str] = {}
    _collect(name, given, vars(sys.modules["__main__"]), parts, name)
    path = f"sys.path += [place for place in [{os.getcwd()!r}] if place not in sys.path]"
    text = "\n".join([f'"""Written from a notebook, for {name}."""', "import sys", path, *parts.values(), ""])
    return f"{written(directory, name, '.py', text.encode())}:{name}"


def written(directory: Path, name: str, ending: str, content: bytes) -> Path:
    """The file of ``content`` in ``directory``, written once; its name ends with the digest."""
    file = directory.absolute() / f"{name}_{hashlib.sha256(content).hexdigest()[:10]}{ending}"
    if not file.exists():
        make_directory(file.parent)
        write_durable(file, content)
    return file


def _of_a_cell(given: Any) -> bool:
    return getattr(given, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__")


def _collect(name: str, value: Any, notebook: Mapping[str, Any], parts: dict[str, str], user: str) -> None:
    """Add to ``parts`` the text that makes ``name``, behind the texts of what that uses. ``user``: who uses it."""
    if name in parts:
        return
    parts[name] = ""  # two functions may use each other
    own = getattr(value, "__qualname__", "")
    module = getattr(value, "__module__", "")
    if isinstance(value, ModuleType):
        text = f"import {value.__name__} as {name}"
    elif _of_a_cell(value) and callable(value) and own.isidentifier():
        text = _definition(value)
        for used in sorted(_globals_of(text) & notebook.keys() - {name}):
            _collect(used, notebook[used], notebook, parts, own)
        text += "" if own == name else f"{name} = {own}\n"
    elif own.isidentifier() and getattr(sys.modules.get(module), own, None) is value:
        text = f"from {module} import {own} as {name}"
    elif isinstance(value, re.Pattern):
        text = f"import re\n{name} = re.compile({value.pattern!r}, {int(value.flags)})"
    elif _is_plain(value):
        text = f"{name} = {value!r}"
    else:
        raise RecipeError(f"{user} uses {name} ({type(value).__name__}), which cannot be written to a file: {_REMEDY}")
    del parts[name]
    parts[name] = text


def _is_plain(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _definition(value: Any) -> str:
    """The source of a function or class of a cell, decorators included."""
    members = [value, *vars(value).values()] if isinstance(value, type) else [inspect.unwrap(value)]
    for file in {one.__code__.co_filename for one in members if hasattr(one, "__code__")}:
        lines = linecache.getlines(file)
        try:
            nodes = ast.parse("".join(lines)).body
        except SyntaxError:  # a cell with a magic
            continue
        for node in reversed(nodes):
            if isinstance(node, _DEFINITIONS) and node.name == value.__name__:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).rstrip() + "\n"
    raise RecipeError(f"the source of {value.__qualname__} is not known: define it in a file")


def _globals_of(source: str) -> set[str]:
    """Names that ``source`` takes from its module."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        whole = table.get_type() == "module"
        yield from (one.get_name() for one in table.get_symbols() if one.is_global() or (whole and one.is_referenced()))
        for child in table.get_children():
            yield from walk(child)

    return set(walk(symtable.symtable(source, "cell", "exec")))

"""Import of the user's objects by their name in a recipe: ``module:name`` or ``path/to/file.py:name``. Called in the
process that uses the object: reward and environment workers, the controller (policies, observers, prompts).

A user's module may do anything while it is imported, so a process that must not hang or die imports it in a child
process first (``recipe.throwaway_process``)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.base.printable import printable

LASTING_ERRORS = (TypeError, ValueError, NameError, AttributeError, ImportError, SyntaxError)
"""Errors that user code raises again where it is run again: others may pass, as those of a server that does not answer.
"""
_LONGEST_MESSAGE = 300


def describe_error(error: BaseException) -> str:
    """Describe an exception of user code as ``Type: first line (file.py:12)``. Never raises."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything; the type still names the failure
        lines = ["(its message cannot be read)"]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    text = text[:_LONGEST_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        text += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return printable(text)


def load_user_object(spec: str) -> object:
    """Import the object that ``spec`` names.

    The directory of a ``file.py`` is put first on ``sys.path``, as Python does for a script; for a ``module`` the
    current directory is put last. Raises ``RecipeError`` with one problem where the spec has no name, the file is
    missing, the import raises (also ``SystemExit``) or the module has no such name."""
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise RecipeError(f'"{spec}" does not name an object: write "module:name" or "path/to/file.py:name"')
    is_file = source.endswith(".py")
    if not is_file and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it hides no module of Python or of an installed package
    if is_file and not Path(source).is_file():
        raise RecipeError(f'"{spec}": there is no file {Path(source).absolute()}: correct the path')
    try:
        module = _import_file(Path(source)) if is_file else importlib.import_module(source)
    except BaseException as error:  # a user's module may call sys.exit()
        if isinstance(error, ModuleNotFoundError) and error.name == source.partition(".")[0] and not is_file:
            remedy = f'install it, or name its file: "path/to/{source.rpartition(".")[2]}.py:{name}"'
            raise RecipeError(f'"{spec}": there is no module "{source}": {remedy}') from error
        remedy = "correct it, or install what it needs"
        raise RecipeError(f'"{spec}" cannot be imported: {describe_error(error)}: {remedy}') from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        problem = f'"{spec}": {source} has no "{name}"'
        if names:
            problem += f" (it has {', '.join(names[:8])})"
        raise RecipeError(f"{problem}: correct the name") from error


def spec_of(code: Any) -> str:
    """Return the name by which another process imports a function or class. Raises ``RecipeError`` for code without
    such a name, such as a lambda."""
    name = getattr(code, "__qualname__", "")
    module = getattr(code, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name.isidentifier() or not module or (module == "__main__" and file is None):
        raise RecipeError(
            f"{code!r} cannot be imported by another process: define it at the top level of a module or a file"
        )
    return f"{Path(str(file)).absolute()}:{name}" if module == "__main__" else f"{module}:{name}"


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    namesake = sys.modules.get(path.stem)
    if namesake is not None and getattr(namesake, "__file__", None) == str(path):
        return namesake
    # A file with the name of an imported module (tokenize.py) must not replace it.
    name = path.stem if namesake is None else f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

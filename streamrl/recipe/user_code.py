"""Finding the user's own objects: ``module:name`` or ``path/to/file.py:name``.

User modules may do anything while they are imported, so a process that must not hang or die imports them in a
process of its own (``streamrl.rewards.calls.inspect``)."""

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

_LONGEST_MESSAGE = 300


def describe_error(error: BaseException) -> str:
    """``Type: first line (file.py:12)`` of whatever user code raised; never raises itself."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything; the type still names the failure
        lines = ["(its message cannot be read)"]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return printable(text[:_LONGEST_MESSAGE] + where)


def load_user_object(spec: str) -> object:
    """The object that ``spec`` names.

    The directory of a ``file.py`` is put first on ``sys.path``, as Python does for a script; for a ``module`` the
    current directory is put last.
    Raises ``RecipeError`` with one problem when the spec has no name, the file is missing, the import raises
    (``SystemExit`` included) or the name is not there."""
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
        public = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        there = f" (it has {', '.join(public[:8])})" if public else ""
        raise RecipeError(f'"{spec}": {source} has no "{name}"{there}: correct the name') from error


def spec_of(named: Any) -> str:
    """Return the name by which another process imports a function or class. Raises ``RecipeError`` for one that has
    none, such as a lambda."""
    name = getattr(named, "__qualname__", "")
    module = getattr(named, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name.isidentifier() or not module or (module == "__main__" and file is None):
        raise RecipeError(
            f"{named!r} cannot be imported by another process: define it at the top level of a module or a file"
        )
    return f"{Path(str(file)).absolute()}:{name}" if module == "__main__" else f"{module}:{name}"


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    # A file called like an imported module (tokenize.py) must not replace that module.
    name = path.stem if known is None else f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
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

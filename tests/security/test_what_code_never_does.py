"""S6, S8, S19: what is nowhere in the product's code: pickles, evaluated text, a shell, sockets beside the factory."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from builders.files import ROOT

PACKAGE = ROOT / "streamrl"
FILES = sorted(PACKAGE.rglob("*.py"))

UNPICKLE = "its bytes run code when they are read"
EVALUATE = "text becomes code"
YAML = "it makes objects of any class: yaml.safe_load does not"
OBJECTS = "torch pickles objects: gather tensors"
SHELL = "a shell reads text as commands"
FORBIDDEN_MODULES = (
    dict.fromkeys(
        ("pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib", "jsonpickle"), UNPICKLE
    )
    | {"ruamel": YAML}
    | {"pty": SHELL, "telnetlib": "plain text"}
)
FORBIDDEN_NAMES = {"eval": EVALUATE, "exec": EVALUATE, "compile": EVALUATE, "__import__": EVALUATE}
FORBIDDEN_METHODS = {
    "torch.load": UNPICKLE,
    "torch.save": "its file can only be read by unpickling",
    "numpy.load": "it can be asked to unpickle",
    "np.load": "it can be asked to unpickle",
    **{f"yaml.{load}": YAML for load in ("load", "load_all", "full_load", "unsafe_load")},
    "os.system": SHELL,
    "os.popen": SHELL,
    "subprocess.getoutput": SHELL,
    "subprocess.getstatusoutput": SHELL,
}
FORBIDDEN_ENDINGS = {"_pyobj": UNPICKLE, "_object_list": OBJECTS, "gather_object": OBJECTS, "broadcast_object": OBJECTS}
# Where code that a model wrote is run on purpose: inside the sandbox (docs/rewards.md), in a process that has
# given up everything before. Nowhere else may text become code.
RUNS_CODE = {"streamrl/rewards/sandbox/program.py", "streamrl/rewards/sandbox/asserts.py"}
SOCKET_FACTORY = "streamrl/comm/socket_options.py"
BINDERS = {
    "streamrl/comm/zmq_sockets.py",
    "streamrl/comm/zmq_connection.py",  # ipc; tcp with a guard
    "streamrl/comm/guarded_sockets.py",
    "streamrl/comm/key_gate.py",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def found(look: Callable[[ast.AST], Iterator[str]], tree: ast.Module) -> list[str]:
    return [f"{getattr(node, 'lineno', 0)}: {problem}" for node in ast.walk(tree) for problem in look(node)]


def unsafe(node: ast.AST) -> Iterator[str]:
    """What no file may hold."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            if whole in FORBIDDEN_METHODS or alias.name.endswith(tuple(FORBIDDEN_ENDINGS)):
                yield f"imports {whole}"
    yield from (
        f"imports {m}: {FORBIDDEN_MODULES[m.split('.')[0]]}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES
    )
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
            yield f"calls {node.func.id}: {FORBIDDEN_NAMES[node.func.id]}"
        if isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_METHODS:
                yield f"calls {called}: {FORBIDDEN_METHODS[called]}"
            for ending, why in FORBIDDEN_ENDINGS.items():
                if called.endswith(ending):
                    yield f"calls {called}: {why}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "shell" and value is not False:
                yield f"shell=...: {SHELL}"
            if keyword.arg == "allow_pickle" and value is not False:
                yield f"allow_pickle: {UNPICKLE}"
            if keyword.arg == "trust_remote_code" and value is not False:
                yield "trust_remote_code: code of a model would run"
            if keyword.arg == "weights_only" and value is not True:
                yield f"weights_only: {UNPICKLE}"


@pytest.mark.long
def test_no_text_and_no_bytes_become_code() -> None:
    problems = []
    for path in FILES:
        lines = found(unsafe, tree_of(path))
        if name_of(path) in RUNS_CODE:
            lines = [line for line in lines if EVALUATE not in line]
        problems += [f"{name_of(path)}:{line}" for line in lines]
    assert not problems, "\n".join(problems)


@pytest.mark.long
def test_the_places_that_run_code_still_do() -> None:
    """An exception that is needed no more must go."""
    assert {
        name_of(path) for path in FILES if any(EVALUATE in line for line in found(unsafe, tree_of(path)))
    } == RUNS_CODE


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "import torch; torch.load('x')",
        "from torch import load",
        "torch.save(1, 'x')",
        "socket.recv_pyobj()",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "dist.scatter_object_list(a, b)",
        "eval('1')",
        "exec('1')",
        "yaml.load(text, Loader)",
        "subprocess.run('x', shell=True)",
        "os.system('x')",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=options.trust)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert found(unsafe, ast.parse(line))


# ---- sockets -----------------------------------------------------------------------------------------


def makes_socket(node: ast.AST) -> Iterator[str]:
    """``context.socket(kind)`` of ZeroMQ; Python's own ``socket.socket(family, type)`` has other arguments."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "socket"):
        return
    if ast.unparse(node.func) not in ("socket.socket", "sockets.socket"):
        yield f"{ast.unparse(node)}: sockets are made by make_socket, with every option"


def binds_or_connects(node: ast.AST) -> Iterator[str]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return
    if node.func.attr in ("bind", "connect"):
        yield f"{ast.unparse(node)}: guarded_sockets binds and connects, with or without keys as must be"


def test_one_factory_makes_sockets_and_one_place_binds_them() -> None:
    problems = []
    for path in FILES:
        if "zmq" not in path.read_text():
            continue
        name, tree = name_of(path), tree_of(path)
        problems += [f"{name}:{line}" for line in found(makes_socket, tree) if name != SOCKET_FACTORY]
        if name not in BINDERS:
            problems += [f"{name}:{line}" for line in found(binds_or_connects, tree)]
            assert not re.search(r"zmq_sockets import .*\b(bind|connect)\b", path.read_text()), f"{name}: has no guard"
    assert not problems, "\n".join(problems)
    (made,) = found(makes_socket, tree_of(PACKAGE.parent / SOCKET_FACTORY))
    assert "context.socket(kind)" in made, "the search finds the one there is"
    assert found(binds_or_connects, ast.parse("socket.bind('tcp://*:1')"))

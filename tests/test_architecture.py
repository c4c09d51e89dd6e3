"""The shape of the code: where third-party libraries are confined, what the pure core imports, what is never written.
The order of the rooms and sizes are checked by lint/house.py.

When a rule here is in the way, the design is what has to change first (an ADR), then this file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.files import ROOT

from lint.rooms import nodes_of

PACKAGE = ROOT / "streamrl"
FILES = sorted(PACKAGE.rglob("*.py"))
BASE = {"base", "recipe"}
# What owns a vLLM, or runs inside of vLLM's own processes.
WORKER_SIDE = ("streamrl/engines/async_llm/", "streamrl/engines/vllm/", "streamrl/weights/vllm/")
WORKER_SIDE += ("streamrl/engines/families/",)
# In a reward's own process, once the first completion comes.
REWARD_MODEL = "streamrl/rewards/builtin/classifier_scores.py"
# For mypy alone: an objective is read where there is no torch, and given tensors where there is.
TENSORS = "streamrl/recipe/objectives/method.py"
CONFINED = {
    "zmq": ("streamrl/comm/", "streamrl/weights/", "streamrl/observe/telemetry.py"),
    # A process of environments takes vLLM's tool parsers, where a recipe names one.
    "vllm": (*WORKER_SIDE, "streamrl/run/environments/vllm_parsers.py"),
    "torch": ("streamrl/learning/", "streamrl/weights/publish/torch_tensors.py", *WORKER_SIDE, REWARD_MODEL, TENSORS),
    # For training two files import it, without the compiler that it brings along otherwise; the dry run's in a process
    # that imports vLLM. Small models are made by programs of their own.
    "transformers": (
        "streamrl/learning/model/hugging_face.py",
        "streamrl/learning/small_model/",
        "streamrl/learning/families/tiny_checkpoint.py",
        REWARD_MODEL,
        "streamrl/prepare/first_prompt.py",
        "streamrl/engines/async_llm/image_packages.py",
        "streamrl/learning/model/parallel.py",
        "streamrl/cli/dialects/recorded_script.py",
    ),
    # Where a user's script asks for it.
    "trl": ("streamrl/trl.py", "streamrl/cli/dialects/recorded_script.py"),
    # Extras of their own: who does not ask for them starts without.
    "httpx": ("streamrl/rewards/served/",),
    "mcp": ("streamrl/run/environments/mcp_tools.py",),
    "reasoning_gym": (),
    "math_verify": (),
    # In the process that asks the Hub, and where a checkpoint is written.
    "huggingface_hub": (
        "streamrl/prepare/hub/fetch.py",
        "streamrl/prepare/hub/failures.py",
        "streamrl/cli/trained_models/",
        "streamrl/learning/state/",
        "streamrl/run/prompts/data_directory.py",
    ),
    "obstore": ("streamrl/comm/object_store.py",),
    "textual": ("streamrl/observe/top/application.py",),
    "pyarrow": ("streamrl/run/prompts/prompt_tables.py",),
}
FORBIDDEN_FILE_NAME = re.compile(r"(^|_)(utils?|helpers?|managers?|handlers?|misc|common|base|core)(_|$)|^process_")
NAMES_ALLOWED = {"process_group"}  # the noun: torch's process group
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "create_task": "task groups only: a bare task outlives the nursery and hides its failure",
    "ensure_future": "task groups only: a bare task outlives the nursery and hides its failure",
    "gather": "gather leaves siblings running when one fails",
    "send_pyobj": "pickle on a wire",
    "recv_pyobj": "pickle on a wire",
    "print": "the library logs or reports",
}
MAY_PRINT = ("streamrl/cli/",)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(path: Path, *kinds: type[ast.AST]) -> list[Any]:
    """Nodes of ``kinds`` in the syntax tree of a file."""
    return [node for kind in kinds for node in nodes_of(path).get(kind, ())]


def package_of(path: Path) -> str:
    """First component below ``streamrl``: a folder, or a top-level module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").removesuffix("__init__")


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of all modules that the file imports, at the top or inside a function."""
    for node in nodes(path, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            module = node.module or ""
            # `from streamrl import x` imports streamrl.x.
            yield from (f"streamrl.{alias.name}" for alias in node.names) if module == "streamrl" else (module,)


def imported_packages(path: Path) -> set[str]:
    return {module.split(".")[1] for module in imports_of(path) if module.startswith("streamrl.")}


def problems(find: Callable[[Path], Iterator[str]]) -> list[str]:
    return [f"{name_of(path)}{problem}" for path in FILES for problem in find(path)]


def assert_none(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def pure_control() -> list[Path]:
    """The core and everything in control that it imports, and every round policy."""
    found: set[Path] = set()
    waiting = [PACKAGE / "control" / "machine.py", *(PACKAGE / "control" / "policies").rglob("*.py")]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for module in imports_of(path):
            if module.startswith("streamrl.control."):
                below = PACKAGE.joinpath(*module.split(".")[1:])
                waiting.append(below / "__init__.py" if below.is_dir() else below.with_suffix(".py"))
    return sorted(found)


def test_pure_core_of_control_knows_only_base_and_buffers() -> None:
    for path in pure_control():
        name = name_of(path)
        assert imported_packages(path) <= BASE | {"buffers", "control"}, name
        assert not set(imports_of(path)) & {"time", "asyncio", "anyio", "random", "socket", "threading"}, name
        assert "async def" not in path.read_text(), name


def test_third_party_libraries_are_confined() -> None:
    def wrong(path: Path) -> Iterator[str]:
        for module in imports_of(path):
            places = CONFINED.get(module.split(".")[0])
            if places is not None and not name_of(path).startswith(places):
                yield f": imports {module}, which is confined to {', '.join(places)}"

    assert_none(problems(wrong))


def test_base_imports_only_its_four_sources() -> None:
    """The room base imports anyio, msgspec, NumPy and the standard library only."""

    def wrong(path: Path) -> Iterator[str]:
        if package_of(path) in BASE and name_of(path) not in {"streamrl/recipe/user_code.py", TENSORS}:
            for module in imports_of(path):
                if (
                    module.split(".")[0]
                    not in {"streamrl", "anyio", "msgspec", "numpy", "__future__"} | sys.stdlib_module_names
                ):
                    yield f": the base must not import {module}"

    assert_none(problems(wrong))


def test_file_names_say_what_is_inside() -> None:
    bad = [name_of(path) for path in FILES if FORBIDDEN_FILE_NAME.search(path.stem) and path.stem not in NAMES_ALLOWED]
    assert_none(bad)


def test_nothing_is_pickled_and_no_task_is_bare() -> None:
    def wrong(path: Path) -> Iterator[str]:
        for module in set(imports_of(path)) & FORBIDDEN_MODULES:
            yield f": imports {module}"
        for node in nodes(path, ast.ImportFrom, ast.Call):
            if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                for name in {alias.name for alias in node.names} & set(FORBIDDEN_CALLS):
                    yield f":{node.lineno}: {name}: {FORBIDDEN_CALLS[name]}"
            if isinstance(node, ast.Call) and (called := forbidden_call(node)):
                if called == "print" and name_of(path).startswith(MAY_PRINT):
                    continue
                yield f":{node.lineno}: {called}: {FORBIDDEN_CALLS[called]}"

    assert_none(problems(wrong))


def forbidden_call(node: ast.Call) -> str | None:
    """Name of the forbidden function that is called. A task group's own ``create_task`` is what is asked for."""
    function = node.func
    if isinstance(function, ast.Name):
        return "print" if function.id == "print" else None
    if not isinstance(function, ast.Attribute) or function.attr not in FORBIDDEN_CALLS or function.attr == "print":
        return None
    owner = ast.unparse(function.value)
    if function.attr == "create_task" and not re.search(r"asyncio|loop", owner):
        return None
    # torch.gather and dist.gather are other things than asyncio's.
    return None if function.attr == "gather" and "asyncio" not in owner else function.attr


def test_no_failure_is_swallowed() -> None:
    def wrong(path: Path) -> Iterator[str]:
        for node in nodes(path, ast.ExceptHandler, ast.Call):
            if isinstance(node, ast.ExceptHandler) and is_broad(node) and is_empty(node.body):
                yield f":{node.lineno}: a broad except with an empty body"
            for argument in arguments_of(node, "suppress"):
                if argument in {"Exception", "BaseException"}:
                    yield f":{node.lineno}: suppresses everything"

    assert_none(problems(wrong))


def arguments_of(node: ast.AST, function: str) -> list[str]:
    """Source of the arguments where ``node`` calls ``function``, else nothing."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function):
        return [ast.unparse(argument) for argument in node.args]
    return []


def is_broad(node: ast.ExceptHandler) -> bool:
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)


def is_empty(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(line, ast.Pass | ast.Continue)
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in body
    )


def test_no_receive_is_cancelled_by_a_timeout() -> None:
    """``wait_for`` around a ZeroMQ receive loses messages (a quarter of them, measured)."""

    def wrong(path: Path) -> Iterator[str]:
        for node in nodes(path, ast.Call):
            if any("recv" in argument for argument in arguments_of(node, "wait_for")):
                yield f":{node.lineno}: wait_for(...recv...)"

    assert_none(problems(wrong))


BLOCKER = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "vllm", "transformers"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"importing {name}: {error}")
sys.exit("\\n".join(failed) or 0)
"""


def modules_without_torch() -> list[str]:
    """Every module outside of the places where torch and vllm are at home; a trainer process is at home too."""
    at_home = tuple(place for place in CONFINED["torch"] if place != TENSORS)
    paths = [path for path in FILES if not name_of(path).startswith(at_home)]
    return [name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]


def test_the_core_imports_without_torch_and_vllm() -> None:
    command = [sys.executable, "-c", BLOCKER, *modules_without_torch()]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert_none(result.stderr.splitlines())

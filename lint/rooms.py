"""The order of the rooms (docs/adr/0013-rooms.md): who imports whom in ``streamrl/``.

A *room* is a folder of ``streamrl``. Its files are what one run of one recipe needs; its folders are *wings*, which can
be done without, but for the ``PARTS``: folders of a room that has too many files for one. Imports inside functions and
for type checkers count: an arrow is a dependency, whenever it is followed."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ORDER = (
    "base", "recipe", "pretrained", "comm", "buffers", "control", "contracts", "learning", "weights", "engines",
    "rewards", "stages", "run", "observe", "simulate", "prepare", "processes", "launch", "cli",
)  # fmt: skip
"""A room imports only rooms before it. ``contracts`` is a file, which stands between two rooms as one would."""

PARTS = {f"learning/{part}" for part in ("objective", "model", "layers", "state", "batches")}
PARTS |= {"recipe/objectives", "recipe/schedules", "weights/codec"}
"""Folders that belong to the files of their room."""

OPEN = ("simulate", "prepare", "processes", "launch", "cli")
"""Rooms that put a run together: their files may import any wing. Their own wings are bound as all others are."""

WINGS = {
    "cli/compare": (
        "control/policies", "launch/steering", "observe/dashboard", "observe/run_files", "observe/report",
        "observe/terminal", "prepare/hub", "recipe/rules",
    ),
    "cli/dialects": ("cli/trained_models", "prepare/hub", "recipe/cells", "recipe/dialects", "recipe/rules"),
    "cli/trained_models": (
        "engines/vllm", "observe/run_files", "observe/terminal", "prepare/hub", "recipe/rules", "rewards/calls",
        "run/environments", "run/evaluate", "run/prompts",
    ),
    "cli/families": ("engines/families", "learning/families"),
    "cli/init": ("cli/dialects", "recipe/rules", "run/prompts"),
    "cli/objective": ("learning/custom_objective", "recipe/rules"),
    "cli/steering": ("launch/steering",),
    "cli/submit": ("observe/run_files", "processes/cluster", "recipe/rules"),
    "cli/try_rewards": (
        "cli/trained_models", "observe/terminal", "prepare/hub", "recipe/rules", "rewards/calls", "run/evaluate",
        "run/prompts",
    ),
    "cli/views": (
        "launch/steering", "observe/dashboard", "observe/run_files", "observe/top", "observe/trackers", "prepare/hub",
        "recipe/rules",
    ),
    "control/policies": ("control/steering",),
    "engines/elastic": ("engines/push",),
    "engines/families": (
        "engines/async_llm", "engines/push", "engines/vllm", "learning/families", "weights/publish", "weights/pull",
        "weights/vllm",
    ),
    "engines/vllm": ("engines/async_llm", "weights/pull", "weights/vllm"),
    "learning/families": ("learning/small_model",),
    "launch/steering": ("control/steering", "recipe/rules", "run/journal"),
    "observe/dashboard": ("observe/run_files", "observe/report"),
    "observe/run_files": ("run/journal",),
    "observe/report": ("run/evaluate", "run/journal"),
    "observe/terminal": ("observe/run_files",),
    "observe/top": ("observe/run_files", "observe/terminal"),
    "observe/trackers": ("observe/run_files",),
    "prepare/hub": ("observe/terminal", "recipe/rules", "run/copies", "run/prompts"),
    "processes/cluster": ("engines/vllm", "recipe/rules"),
    "recipe/rules": ("recipe/cells", "recipe/dialects"),
    "rewards/builtin": ("rewards/judge", "rewards/sandbox"),
    "rewards/calls": ("rewards/builtin",),
    "rewards/teacher": ("rewards/served",),
    "rewards/judge": ("rewards/served",),
    "rewards/served": ("engines/async_llm", "engines/vllm"),
    "run/environments": ("pretrained/turns", "rewards/calls"),
    "run/evaluate": ("run/prompts",),
    "weights/publish": ("weights/pull", "weights/store"),
    "weights/pull": ("weights/store",),
    "weights/vllm": ("weights/pull",),
}  # fmt: skip
"""Wings that a wing imports."""


class Place(NamedTuple):
    """Where a module lies. ``room``: empty for a file of ``streamrl`` itself that the order does not name; ``folder``:
    ``room/wing``, or empty."""

    module: str
    room: str
    folder: str

    @property
    def wing(self) -> str:
        """The wing, as ``room/wing``; empty for files and parts of a room."""
        return "" if self.folder in PARTS else self.folder


class Import(NamedTuple):
    """``source`` imports ``target`` in ``line``."""

    source: Place
    target: Place
    line: int

    def __str__(self) -> str:
        return f"{self.source.module}:{self.line} imports {self.target.module}"


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes_of(path: Path) -> Mapping[type[ast.AST], list[ast.AST]]:
    """All nodes of the syntax tree of a file, by their kind."""
    nodes: dict[type[ast.AST], list[ast.AST]] = {}
    left: list[ast.AST] = [tree_of(path)]
    while left:
        node = left.pop()
        nodes.setdefault(type(node), []).append(node)
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.AST):
                left.append(value)
            elif isinstance(value, list):
                left.extend([item for item in value if isinstance(item, ast.AST)])
    return nodes


def place_of(path: Path, root: Path) -> Place:
    """The place of a file below ``root``, the directory that has ``streamrl``."""
    parts = path.relative_to(root).with_suffix("").parts
    module = ".".join(parts).removesuffix(".__init__")
    _, *folders = parts[:-1]
    if not folders and parts[-1] in ORDER:
        folders = [parts[-1]]
    return Place(module, "".join(folders[:1]), "/".join(folders[:2]) if len(folders) > 1 else "")


def imports_of(paths: Iterable[Path], root: Path) -> list[Import]:
    """All imports of one module of ``streamrl`` by another, each once a line."""
    places = {place_of(path, root).module: path for path in paths}
    imports: dict[Import, None] = {}
    for name, path in places.items():
        for module, line in _imported_modules(path, places):
            if module != name:
                imports[Import(place_of(path, root), place_of(places[module], root), line)] = None
    return list(imports)


def _imported_modules(path: Path, modules: Container[str]) -> Iterator[tuple[str, int]]:
    """Those of ``modules`` that a file imports, with the line."""
    nodes = nodes_of(path)
    for node in [*nodes.get(ast.Import, ()), *nodes.get(ast.ImportFrom, ())]:
        for target in _targets(node):
            module = target if target in modules else target.rpartition(".")[0]
            if module in modules:
                yield module, node.lineno


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(imports: Iterable[Import]) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    pairs = {(one.source.room, one.target.room) for one in imports}
    return {(a, b) for a, b in pairs if a and b and a != b}


def against_the_order(imports: Iterable[Import]) -> Iterator[str]:
    """Imports of a room that does not stand before, and rooms that the order does not name."""
    for one in imports:
        if not one.target.room:
            # The package itself, whose names are loaded when they are asked for.
            continue
        for room in {one.source.room, one.target.room} - {"", *ORDER}:
            yield f"{one}: {room} is not in lint/rooms.py:ORDER"
            break
        else:
            if one.source.room and ORDER.index(one.target.room) > ORDER.index(one.source.room):
                yield f"{one}: {one.source.room} stands before {one.target.room}"


def files_that_import_a_wing(imports: Iterable[Import]) -> Iterator[str]:
    """Imports of a wing by a file that is in none. The face of a package (``__init__``) may show its own wings."""
    for one in imports:
        face = one.source.module == f"streamrl.{one.source.room}" and one.source.room == one.target.room
        if one.target.wing and not one.source.wing and one.source.room not in ("", *OPEN) and not face:
            yield f"{one}: a file imports no wing"


def unlisted_wings(imports: Iterable[Import]) -> Iterator[str]:
    """Imports of a wing by another that ``WINGS`` does not list."""
    for one in imports:
        own, other = one.source.wing, one.target.wing
        if own and other and own != other and other not in WINGS.get(own, ()):
            yield f"{one}: lint/rooms.py:WINGS does not let {own} import {other}"


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            circle = [stack.pop()]
            while circle[-1] != name:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def circles_of_files(imports: Iterable[Import]) -> list[list[str]]:
    """Modules that import each other. What a package's face shows is asked for later and is not counted."""
    graph: dict[str, list[str]] = {}
    for one in imports:
        if one.source.module != "streamrl" and one.target.module != "streamrl":
            face = one.source.module == f"streamrl.{one.source.room}"
            graph.setdefault(one.source.module, []).extend([] if face else [one.target.module])
    return circles(graph)


def circles_of_folders(imports: Iterable[Import]) -> list[list[str]]:
    """Rooms that import each other, and folders of rooms (wings and parts) that do."""
    graph: dict[str, set[str]] = {}
    for room, other in arrows(imports):
        graph.setdefault(room, set()).add(other)
    for one in imports:
        if one.source.folder and one.target.folder and one.source.folder != one.target.folder:
            graph.setdefault(one.source.folder, set()).add(one.target.folder)
    return circles(graph)


def circles_of_scripts(paths: Iterable[Path], root: Path) -> list[list[str]]:
    """Modules outside of ``streamrl`` that import each other; ``root``: directory below which they are imported."""
    modules = {}
    for path in paths:
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
    graph = {name: {module for module, _ in _imported_modules(path, modules)} for name, path in modules.items()}
    return circles(graph)

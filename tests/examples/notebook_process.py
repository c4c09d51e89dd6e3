"""Runs the code cells of a notebook as IPython does, in this process: one namespace ``__main__`` without a file, an
``await`` at the top level, the source of each cell in ``linecache``. Arguments: the notebook, and JSON of replacements
in its source; stdout ends with JSON of ``RESULT``, an expression."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType

notebook, replacements, result = sys.argv[1:]
CELLS = [
    "".join(cell["source"]) for cell in json.loads(Path(notebook).read_text())["cells"] if cell["cell_type"] == "code"
]
for old, new in json.loads(replacements).items():
    assert any(old in cell for cell in CELLS), old
    CELLS = [cell.replace(old, new) for cell in CELLS]


async def run() -> None:
    for number, cell in enumerate(CELLS):
        name = f"<ipython-input-{number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        code = compile(cell, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, vars(sys.modules["__main__"]))
        if inspect.iscoroutine(value):
            await value


sys.modules["__main__"] = ModuleType("__main__")
asyncio.run(run())
sys.__stdout__.write("\n" + json.dumps(eval(result, vars(sys.modules["__main__"]))) + "\n")

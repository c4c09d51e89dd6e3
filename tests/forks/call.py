"""Call a function of a test in a process of its own: for what starts an engine of vLLM in its process. The core is a
fork of that process, which must not have run operations of torch as pytest's process has."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def call_in_process(function: Callable[..., Any], *arguments: Any, variables: Mapping[str, str] | None = None) -> Any:
    """Call ``function``, of a module of tests that imports only what lies beside it or in ``tests``. Arguments and what
    is returned go through JSON (paths become texts); ``variables``: further variables of the process. Raises
    ``AssertionError`` with what the process printed where the function raises."""
    command = [sys.executable, __file__, function.__module__, inspect.getfile(function), function.__name__]
    done = subprocess.run(
        [*command, json.dumps(arguments, default=str)],
        # With one thread no operation of torch starts others, which a fork of the process would wait for.
        env=os.environ | {"OMP_NUM_THREADS": "1", **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    *printed, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, done.stdout[-20_000:]
    print(*printed, sep="\n")
    return json.loads(last)


def main() -> None:
    module_name, path, name, arguments = sys.argv[1:]
    module = sys.modules.get(module_name)  # of the fork server of pytest's workers, which has imported the tests
    if module is None:
        sys.path[:0] = [str(TESTS), str(TESTS.parent), str(Path(path).parent)]
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    returned = getattr(module, name)(*json.loads(arguments))
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    sys.stdout.flush()
    print(json.dumps(returned), flush=True)


if __name__ == "__main__":
    main()

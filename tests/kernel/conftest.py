"""The kernel in a folder by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.files import ROOT

ROOMS = (
    "base", "recipe", "pretrained", "comm", "buffers", "control", "learning", "weights", "engines", "rewards", "stages",
    "run",
)  # fmt: skip
# Parts of a room (lint/house.py), and the wings that the example asks for.
WITH = (
    *(f"learning/{part}" for part in ("batches", "layers", "model", "objective", "state")),
    "weights/codec", "weights/publish", "weights/pull", "weights/store", "weights/vllm",
    "recipe/cells", "recipe/dialects", "recipe/objectives", "recipe/rules", "recipe/schedules",
    "engines/simulated", "engines/push", "rewards/calls", "rewards/builtin",
)  # fmt: skip
# The checkout is installed editable: a package that is not in the folder would be imported from there.
NO_CHECKOUT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the rooms that a run needs, ``examples/sort``, and nothing else of streamrl."""
    folder = tmp_path_factory.mktemp("alone")
    without = shutil.ignore_patterns("__pycache__")
    for name in (*ROOMS, *WITH):
        (folder / "streamrl" / name).mkdir(parents=True)
        for path in (ROOT / "streamrl" / name).glob("*.[pt][yo]*"):  # Python and TOML
            shutil.copy(path, folder / "streamrl" / name)
    for name in ("__init__.py", "contracts.py"):
        shutil.copy(ROOT / "streamrl" / name, folder / "streamrl")
    shutil.copytree(ROOT / "examples" / "sort", folder / "examples" / "sort", ignore=without)
    (folder / "sitecustomize.py").write_text(NO_CHECKOUT)
    return folder


@pytest.fixture(scope="module")
def run_alone(alone: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in ``alone``, and fails with what it wrote where it fails."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(alone), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=alone, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run

"""The kernel trains with no package beside it (docs/adr/0013-rooms.md): its folders and an example in a folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ("base", "recipe", "control", "buffers", "comm", "engines", "learning", "rewards", "stages", "run")
# The checkout is installed editable: a package that is not in the folder would be imported from there.
NO_CHECKOUT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernel, ``examples/sort``, and nothing else of streamrl."""
    folder = tmp_path_factory.mktemp("alone")
    without = shutil.ignore_patterns("__pycache__")
    for name in KERNEL:
        shutil.copytree(ROOT / "streamrl" / name, folder / "streamrl" / name, ignore=without)
    shutil.copy(ROOT / "streamrl" / "__init__.py", folder / "streamrl")
    shutil.copytree(ROOT / "examples" / "sort", folder / "examples" / "sort", ignore=without)
    (folder / "sitecustomize.py").write_text(NO_CHECKOUT)
    return folder


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def test_every_module_of_the_kernel_is_imported_without_a_package(alone: Path) -> None:
    paths = (path.relative_to(alone).with_suffix("") for path in (alone / "streamrl").rglob("*.py"))
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    code = (
        f"from importlib import import_module, util\nfor name in {names!r}: import_module(name)\n"
        "assert util.find_spec('streamrl.rules') is None, 'a package is in reach'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=alone, env=environment(alone), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("rounds", ["synchronous", "continuous"])
def test_the_kernel_trains_the_example_alone(alone: Path, rounds: str) -> None:
    command = [sys.executable, "examples/sort/one_process.py", rounds, rounds]
    done = subprocess.run(command, cwd=alone, env=environment(alone), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, reason = done.stdout.splitlines()
    steps = [json.loads(line) for line in lines]
    assert reason == "finished" and [step["step"] for step in steps] == list(range(1, 31))
    assert all(first == second for first, second in (step["weights"] for step in steps)), "engines differ"
    assert len({step["weights"][0] for step in steps}) == 30, "a step changed nothing"
    published = sorted(path.name for path in (alone / rounds).glob("version-*"))
    assert published == [f"version-{n}.safetensors" for n in (29, 30)]
    assert (alone / rounds / "latest" / "hf" / "config.json").is_file()

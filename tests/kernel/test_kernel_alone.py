"""The kernel trains with no package beside it (docs/adr/0013-rooms.md): its folders and an example in a folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors import deserialize

SHORTER = """
import sys
sys.path.insert(0, "examples/sort")
import one_process
one_process.STEPS = 8
one_process.main(*sys.argv[1:])
"""
RunAlone = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_kernel_modules_are_imported_without_the_package(alone: Path, run_alone: RunAlone) -> None:
    """Every module of the kernel can be imported without the rest of the package. Triton, which the module of a kernel
    needs, is not installed on a CPU."""
    files = [path for path in (alone / "streamrl").rglob("*.py") if path.name != "hash_kernel.py"]
    paths = (path.relative_to(alone).with_suffix("") for path in files)
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    code = (
        f"from importlib import import_module, util\nfor name in {names!r}: import_module(name)\n"
        "assert util.find_spec('streamrl.launch') is None, 'a package is in reach'"
    )
    run_alone("-c", code)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rounds", "last", "script"),
    [("synchronous", 30, ["examples/sort/one_process.py"]), ("continuous", 8, ["-c", SHORTER])],
    ids=["synchronous", "continuous"],
)
def test_the_kernel_trains_the_example_alone(
    alone: Path, run_alone: RunAlone, rounds: str, last: int, script: list[str]
) -> None:
    *lines, reason = run_alone(*script, rounds, rounds).stdout.splitlines()
    steps = [json.loads(line) for line in lines]
    assert reason == "finished" and [step["step"] for step in steps] == list(range(1, last + 1))
    assert all(first == second for first, second in (step["weights"] for step in steps)), "engines differ"
    assert len({step["weights"][0] for step in steps}) == last, "a step changed nothing"
    tensors = deserialize((alone / rounds / "latest" / "hf" / "model.safetensors").read_bytes())
    saved = {name: sha256(tensor["data"]).hexdigest() for name, tensor in tensors}
    assert steps[-1]["weights"][0] == sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest(), (
        "not what is saved"
    )

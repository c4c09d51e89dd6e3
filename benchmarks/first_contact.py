"""The first run on a real GPU: every check of one card, and of two, in order, with figures; 20 minutes on an A100.

    make first-contact                                    # or, where the packages are installed:
    python benchmarks/first_contact.py                    # writes first_contact.json to $OUT, or where --out says
    python benchmarks/first_contact.py --rehearse         # the same checks on a CPU, in small
    python benchmarks/first_contact.py --pretend T4       # the same code on a GPU that is not there

Each line of ``LINES`` is a process of its own, so that a crash or a hang of the device costs one check. What the
machine cannot do is skipped, with the reason. The report has versions, figures and traces, and no names of hosts,
users and folders; it is written before the first check and after each. Exit code 0: none failed; 1: some failed, or
none passed; 2: there is no CUDA device."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from contact_lines import TRACE
from contact_machine import machine, nameless, state_of_gpus

ROOT = Path(__file__).resolve().parents[1]
REPORT = "first_contact.json"
FORMAT = 2
"""Of the report. 1 had names, figures and one line of each failure."""
SENTENCE = 300
"""Characters of a reason in a line."""


class Line(NamedTuple):
    """One file of checks, with its time limit. ``tier``: 0 needs torch and transformers, 1 vLLM's CUDA build, too, 2 is
    about speed, 3 needs two GPUs."""

    tier: int
    file: str
    minutes: float


LINES = (
    Line(0, "test_machine.py", 1),
    Line(0, "test_packed_rows.py", 1.5),
    Line(0, "test_memory.py", 3.5),
    Line(0, "test_weights_on_device.py", 1.5),
    Line(0, "test_gpu_mover.py", 1),
    Line(1, "test_engine.py", 3.5),
    Line(1, "test_demo.py", 3),
    Line(1, "test_smollm2.py", 2.5),
    Line(2, "test_throughput.py", 2.5),
    Line(3, "test_two_gpus.py", 6),
)
NO_ENGINE = "a pretended GPU computes nothing in vLLM"
OF_ENGINES = ("test_engine.py", "test_demo.py", "test_smollm2.py")


class Check(NamedTuple):
    """What became of one check. ``outcome``: passed, failed, skipped. ``about``: what must hold."""

    name: str
    outcome: str
    seconds: float = 0.0
    figures: dict[str, Any] = {}
    reason: str = ""
    about: str = ""
    trace: str = ""


class Report:
    """The file that is sent."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.file, self.facts = folder / REPORT, facts
        self.checks: list[Check] = []
        self.files: dict[str, str] = {}
        self.began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def count(self, outcome: str) -> int:
        """How many checks have this outcome."""
        return sum(check.outcome == outcome for check in self.checks)

    def write(self, left: list[str]) -> None:
        """Write all that is known by now, whole. ``left``: checks and files that are still to be run."""
        counts = {name: self.count(name) for name in ("passed", "failed", "skipped")}
        found = {
            "format": FORMAT,
            "state": f"stopped before {len(left)} of these were run" if left else "complete",
            "seconds": round(time.monotonic() - self.began, 1),
            **counts,
            "what failed": [f"{one.name}: {one.reason[:SENTENCE]}" for one in self.checks if one.outcome == "failed"],
            **self.facts,
            "checks": [{name: value for name, value in check._asdict().items() if value} for check in self.checks],
            "files": self.files,
            "not run": left,
        }
        partial = self.file.with_suffix(".partial")
        partial.write_text(nameless(json.dumps(found, indent=1, ensure_ascii=False)))
        partial.replace(self.file)


def main() -> int:
    """Run them, print them, write them."""
    arguments = argparse.ArgumentParser(description="Run every check of one GPU, and of two where there are two.")
    arguments.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "."), metavar="DIRECTORY")
    arguments.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    arguments.add_argument("--pretend", default="", metavar="CARDS", help="on GPUs that are not there: T4 or H100,H100")
    arguments.add_argument("--tier", type=int, default=3, help="the last that is run (0: without vLLM)")
    arguments.add_argument("--only", nargs="*", default=[], metavar="FILE", help="some files of checks: test_engine.py")
    options = arguments.parse_args()
    if not options.rehearse and not options.pretend and (missing := no_device()):
        print(missing, file=sys.stderr)
        return 2
    mode = Mode(rehearse=options.rehearse, pretend=options.pretend)
    lines = [one for one in LINES if one.tier <= options.tier and (not options.only or one.file in options.only)]
    facts = {
        "on": mode.words,
        "arguments": sys.argv[1:],
        "began": datetime.now(UTC).isoformat(timespec="minutes"),
        "how to read it": "a check is a function of tests/gpu/FILE; figures are what it measured; reason and trace say "
        "why it failed or was skipped; times are seconds where nothing else is said; packages other than cuda.lock are "
        "all of them where the build is for a CPU; a file that is skipped whole counts as one check",
        "machine": machine(),
    }
    report = Report(options.out, facts)
    report.write([line.file for line in lines])
    longest = mode.patience * sum(line.minutes for line in lines)
    print(f"{len(lines)} files of checks, {longest:g} minutes at most: {report.file}")
    for number, line in enumerate(lines):
        later, began = lines[number + 1 :], time.monotonic()
        for check, still in run(line, mode):
            report.checks.append(check)
            report.write([*still, *(one.file for one in later)])
            print(shown(check), flush=True)
            minutes = mode.patience * (sum(one.minutes for one in later) + (line.minutes if still else 0))
            left = f"{len(still)} of {line.file}, {len(later)} files more, {minutes:g} minutes at most"
            print(f"    left: {left}" if still or later else "    left: nothing", flush=True)
        limit = mode.patience * line.minutes
        report.files[line.file] = f"{time.monotonic() - began:.0f} s with imports, of {limit:g} minutes"
    facts["gpus afterwards"] = state_of_gpus()
    report.write([])
    passed, failed = report.count("passed"), report.count("failed")
    print(f"{passed} passed, {failed} failed, {report.count('skipped')} skipped")
    print(f"please attach {report.file} to an issue on the project's tracker, whatever it says. It has versions,")
    print("figures and traces, and no names of hosts, users or folders; it is text: read it before you send it.")
    return 1 if failed or not passed else 0


class Mode(NamedTuple):
    """On what the checks run."""

    rehearse: bool = False
    pretend: str = ""

    @property
    def words(self) -> str:
        """For the report."""
        if self.pretend:
            return (
                f"pretended GPUs {self.pretend}: torch on a CPU that says cuda, with tiny models; no figure is one of "
                "a GPU. On a GPU that is there: make first-contact"
            )
        return "a CPU, with tiny models. On a GPU: make first-contact" if self.rehearse else "CUDA"

    @property
    def patience(self) -> int:
        """How many times as long a check may take as on a GPU."""
        return 4 if self.rehearse or self.pretend else 1

    def options(self) -> list[str]:
        """Of pytest."""
        plugin = ["-p", "campaigns.pretended_gpu.plugin"] if self.pretend else []
        return [*plugin, "-m", "not gpu" if self.rehearse else "gpu"]

    def variables(self) -> dict[str, str]:
        """Of the process of the checks."""
        variables = {"STREAMRL_TESTS_SPAWN": "1"}  # else tests/tiers.py limits their processor time, on WSL too
        if self.pretend:
            sys.path.insert(0, str(ROOT))
            from campaigns.pretended_gpu.cards import cards_of

            variables["FAKE_GPUS"] = ",".join(map(str, cards_of(self.pretend)))
        elif self.rehearse:
            variables["STREAMRL_REHEARSAL"] = "1"
        return variables


def no_device() -> str:
    """Why nothing can be run; empty where there is a device."""
    probe = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    code = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode
    return {0: "", 3: "no CUDA device: torch sees none; streamrl check says why, --rehearse runs on the CPU"}.get(
        code, "no CUDA device: torch cannot be imported; streamrl check says why"
    )


def run(line: Line, mode: Mode) -> Iterator[tuple[Check, list[str]]]:
    """The checks of one file, in a process of their own, as they end; each with those of the file that are left."""
    if mode.pretend and line.file in OF_ENGINES:
        yield Check(line.file, "skipped", reason=NO_ENGINE), []
        return
    with tempfile.TemporaryDirectory() as folder:
        lines, output = Path(folder) / "lines", Path(folder) / "output"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", str(ROOT / "tests/gpu" / line.file)]
        command += ["-p", "no:cacheprovider", "-p", "contact_lines", "--tb=long", *mode.options()]
        paths = [str(ROOT / "benchmarks"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | mode.variables()
        variables |= {"FIRST_CONTACT_LINES": str(lines), "PYTHONPATH": ":".join(paths)}
        began = last = time.monotonic()
        minutes = line.minutes * mode.patience
        seen = _Lines(lines)
        late = False
        with output.open("w") as printed:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, start_new_session=True, stdout=printed, stderr=subprocess.STDOUT
            )
            try:
                while process.poll() is None and not late:
                    time.sleep(0.2)
                    late = time.monotonic() - began > 60 * minutes
                    for check in seen.fresh():
                        last = time.monotonic()
                        yield check, seen.left
            finally:  # also where somebody ends this program
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for check in seen.fresh():
            last = time.monotonic()
            yield check, seen.left
        ended = f"not done in {minutes:g} minutes" if late else f"exit code {process.returncode}"
        crashed = process.returncode < 0 and not late
        if seen.begun or seen.left or not seen.any or crashed:
            tail = output.read_text(errors="replace")[-TRACE:].strip()
            yield _unfinished(line, seen, ended, time.monotonic() - last, tail, process.returncode), []


def _unfinished(line: Line, seen: _Lines, ended: str, seconds: float, tail: str, code: int | None) -> Check:
    """The check that took its process with it, or a file without checks."""
    if code == 5 and not seen.any:
        return Check(line.file, "skipped", reason="none of its checks is for this device")
    never = f"; not run: {', '.join(seen.left)}" if seen.left else ""
    reason = f"{ended}: {tail.splitlines()[-1] if tail else ''}{never}"
    return Check(seen.begun or line.file, "failed", round(seconds, 2), {}, reason, seen.about, tail)


class _Lines:
    """What the plugin has written by now."""

    def __init__(self, file: Path) -> None:
        self.file, self.read = file, 0
        self.left: list[str] = []
        self.begun = self.about = ""
        self.any = False

    def fresh(self) -> Iterator[Check]:
        """Checks that have ended since the last time."""
        lines = self.file.read_text().split("\n")[:-1]
        for text in lines[self.read :]:
            self.read += 1
            found = json.loads(text)
            if "checks" in found:
                self.left = found["checks"]
            elif "begun" in found:
                self.begun, self.about = found["begun"], found["about"]
                self.left = [name for name in self.left if name != self.begun]
            else:
                self.begun, self.any = "", True
                yield Check(**{name: value for name, value in found.items() if name in Check._fields})


def shown(check: Check) -> str:
    """One line of the terminal."""
    figures = "  ".join(f"{name} {_figure(value)}" for name, value in check.figures.items())
    reason = check.reason.partition("\n")[0][:SENTENCE]
    return f"{check.outcome:8}{check.seconds:6.1f} s  {check.name}  {figures}  {reason}".rstrip()


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())

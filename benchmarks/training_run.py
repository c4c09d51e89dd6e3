"""Start ``streamrl`` as a user would, and read what it prints and writes: the driver of benchmarks of whole runs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from cpu_time import CpuTree

ROOT = Path(__file__).parents[1]
DEMO_RECIPE = ROOT / "examples" / "sort" / "recipe.toml"
STOP_SECONDS = 30.0
MARK = "STREAMRL_BENCHMARK"
"""Environment variable that every descendant of a benchmarked command inherits."""


class RunFailed(Exception):
    """The run ended with another exit code than was expected; the message ends with its last lines."""


class StreamrlCommand:
    """``streamrl ARGUMENTS``, once or again and again, in ``folder``. What it prints is appended to ``output.txt``
    there."""

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.log = folder / "output.txt"
        self.variables = dict(variables or {})
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start it in a session of its own."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "streamrl", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.variables},
                cwd=self.folder,
                start_new_session=True,
            )
        return self.process

    @property
    def over(self) -> bool:
        """Whether the command has ended, or was never started."""
        return self.process is None or self.process.poll() is not None

    def terminate(self) -> None:
        """Send the first signal: finish what is open, save, end."""
        if self.process is not None and not self.over:
            self.process.terminate()

    def exit_code(self, timeout_s: float) -> int | None:
        """Wait for the end; None when it did not end in time."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def tail(self, lines: int = 30, *, separator: str = "\n") -> str:
        """The last lines that it printed."""
        return separator.join(self.log.read_text(errors="replace").splitlines()[-lines:])


class TrainingRun(StreamrlCommand):
    """A running ``streamrl train``. Its run directory is somewhere under ``folder``. ``cpu``: what it used so far."""

    cpu: CpuTree

    @property
    def directory(self) -> Path | None:
        """The run directory, once the run has written its first file there."""
        return next((path.parent for path in sorted(self.folder.rglob("metrics.jsonl"))), None)

    def steps(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` that belong to optimizer steps, in order."""
        return [line for line in self.lines("metrics.jsonl") if line["kind"] == "step"]

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` that hold held-out evaluations, in order."""
        return [line for line in self.lines("metrics.jsonl") if line["kind"] == "evaluation"]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a JSON Lines file of the run directory; none where it does not exist yet."""
        directory = self.directory
        path = directory / name if directory else None
        if path is None or not path.exists():
            return []
        complete = path.read_text().rpartition("\n")[0]  # the last line may be half written
        return [json.loads(line) for line in complete.splitlines() if line]

    def wait_for_step(self, step: int, *, timeout_s: float) -> None:
        """Return once ``step`` is reported. Raises ``RunFailed`` when the run ends or ``timeout_s`` passes first."""
        deadline = time.monotonic() + timeout_s
        while not any(line["step"] >= step for line in self.steps()):
            if self.over:
                raise RunFailed(f"the run ended before step {step} with exit code {self.exit_code(0)}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RunFailed(f"step {step} was not reached within {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(0.2)

    def wait(self, *, timeout_s: float) -> None:
        """Wait for a successful end. Raises ``RunFailed`` otherwise."""
        if (code := self.exit_code(timeout_s)) is None:
            raise RunFailed(f"the run did not end within {timeout_s:.0f} s\n{self.tail()}")
        if code != 0:
            raise RunFailed(f"the run ended with exit code {code}\n{self.tail()}")


NOTHING_LEARNT: dict[str, object] = {
    "training.learning_rate": 0.0,
    "training.warmup_steps": 0,
    "evaluation.prompts": "",
    "checkpoint.at_end": False,
}
"""Overrides of a run in which only sampling is measured: its policy stays as it is."""


def mean_figures(records: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Mean of each of the metrics ``names`` over the lines of steps that have it; without those that no line has."""
    values = {name: [record[name] for record in records if name in record] for name in names}
    return {name: statistics.fmean(known) for name, known in values.items() if known}


@contextmanager
def training_run(
    recipe: Path, overrides: Mapping[str, object], *, variables: Mapping[str, str] | None = None
) -> Iterator[TrainingRun]:
    """Start ``streamrl train recipe --set ...`` in a folder of its own, of this checkout unless ``variables`` has
    another ``PYTHONPATH``; on leaving nothing of it is left running."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="streamrl-benchmark-") as name:
        run = TrainingRun(Path(name), {"PYTHONPATH": str(ROOT), **(variables or {}), MARK: mark})
        settings = {"run.directory": f"{name}/runs", **overrides}
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={toml_value(value)}")]
        run.cpu = CpuTree(run.start("train", str(recipe.absolute()), *flags).pid).start()
        try:
            yield run
        finally:
            run.cpu.stop()
            run.terminate()
            if run.exit_code(STOP_SECONDS) is None and run.process is not None:
                run.process.kill()
            for left in marked_processes(mark):  # a benchmark must not disturb the next one
                left.kill()


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every living process whose variables carry ``MARK=mark``, whichever parent it has by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def toml_value(value: object) -> str:
    """``value`` as ``--set`` reads it: JSON is TOML for strings, numbers, booleans and flat lists of them."""
    return json.dumps(value)

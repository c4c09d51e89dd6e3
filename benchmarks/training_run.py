"""Start ``streamrl train`` as a user would, and read what it writes into its run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from process_tree import MARK, MemorySamples, marked_processes, sampled_memory

DEMO_RECIPE = Path(__file__).parents[1] / "examples" / "sort" / "recipe.toml"
STOP_SECONDS = 30.0


class RunFailed(Exception):
    """The run ended with another exit code than was expected; the message ends with its last lines."""


class TrainingRun:
    """A running ``streamrl train``. Its output goes to ``log``; its run directory is somewhere under ``folder``."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log: Path, mark: str) -> None:
        self.process = process
        self.folder = folder
        self.log = log
        self.mark = mark

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
            if self.process.poll() is not None:
                raise RunFailed(
                    f"the run ended before step {step} with exit code {self.process.returncode}\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise RunFailed(f"step {step} was not reached within {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(0.2)

    def wait(self, *, timeout_s: float) -> None:
        """Wait for a successful end. Raises ``RunFailed`` otherwise."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"the run did not end within {timeout_s:.0f} s\n{self.tail()}") from None
        if code != 0:
            raise RunFailed(f"the run ended with exit code {code}\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def training_run(
    recipe: Path,
    overrides: Mapping[str, object],
    *,
    cores: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[TrainingRun]:
    """Start ``streamrl train recipe --set ...`` in a folder of its own; on leaving nothing of it is left running."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="streamrl-benchmark-") as name:
        folder = Path(name)
        settings = {"run.directory": str(folder / "runs"), **overrides}
        command = [str(Path(sys.executable).with_name("streamrl")), "train", str(recipe)]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={toml_value(value)}")]
        log = folder / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                pinned(command, cores),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), MARK: mark},
                start_new_session=True,
            )
        try:
            yield TrainingRun(process, folder, log, mark)
        finally:
            end_marked(process, mark)


def pinned(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """``command`` bound to ``cores`` (empty: all)."""
    return ["taskset", "-c", ",".join(map(str, cores)), *command] if cores else list(command)


def end_marked(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask ``process`` to end, then kill whatever of its run is left: a benchmark must not disturb the next one."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for left in marked_processes(mark):
        left.kill()


def toml_value(value: object) -> str:
    """``value`` as ``--set`` reads it: JSON is TOML for strings, numbers, booleans and flat lists of them."""
    return json.dumps(value)


def timed_run(
    recipe: Path, overrides: Mapping[str, object], *, timeout_s: float, cores: Sequence[int] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], MemorySamples]:
    """Run to the end; returns its steps, its evaluations and the memory samples."""
    with training_run(recipe, overrides, cores=cores) as run, sampled_memory(run.process.pid) as memory:
        run.wait(timeout_s=timeout_s)
        return run.steps(), run.evaluations(), memory

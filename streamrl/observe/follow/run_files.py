"""The directory of a run, for readers: of a run that goes on, has ended, was killed, was half deleted, or was written
by another version of streamrl. Nothing here changes it."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import decoded_lines, open_rotated
from streamrl.recipe.check_fields import leaves
from streamrl.run.journal.log import writer_of

METRICS = "metrics.jsonl"
SCORE = re.compile(r"eval/(?P<set>.+)/(?P<metric>(avg|pass)@\d+)")
"""Names of the metrics that are scores of an evaluation."""
_HEAD = frozenset({"kind", "time", "step", "policy_version"})
_STARTED = re.compile(r"-(\d{8}-\d{6})(-\d+)?$")


class RunStatus(StrEnum):
    """``running``: a process of this machine holds its lock; ``finished``: all its steps are done;
    ``failed``: its newest crash bundle is newer than its last step; ``stopped``: it was drained or killed."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


class MetricLine(msgspec.Struct, frozen=True):
    """A line of ``METRICS``: of a ``step``, or of an ``evaluation`` of its version. ``time``: seconds since 1970;
    ``values``: those that are finite, by name."""

    kind: str
    step: int
    time: float
    values: dict[str, float]


def metric_lines(lines: Iterable[bytes]) -> Iterator[MetricLine]:
    """``lines`` of ``METRICS``, without those that cannot be read."""
    for line in decoded_lines(lines, dict[str, Any]):
        step = line.get("step")
        time_s = line.get("time")
        if isinstance(step, int) and isinstance(time_s, int | float):
            values = {name: one for name, one in line.items() if name not in _HEAD and isinstance(one, int | float)}
            yield MetricLine("step" if line.get("kind") == "step" else "evaluation", step, time_s, values)


class RunFiles(msgspec.Struct, frozen=True):
    """Files of the run in ``directory``; any of them may be missing. Those of lines may have an older part
    (``read_lines`` and ``FollowedLines`` read both)."""

    directory: Path

    @property
    def run_id(self) -> str:
        """The name of the directory, behind links."""
        return self.directory.resolve().name

    @property
    def metrics(self) -> Path:
        """Lines of steps and evaluations (``kind``)."""
        return self.directory / METRICS

    @property
    def trace(self) -> Path:
        """Lines of ``observe/report/trajectory_trace.py``."""
        return self.directory / "trace.jsonl"

    @property
    def samples(self) -> Path:
        """``CompletionSampled`` lines: three completions of each batch."""
        return self.directory / "samples.jsonl"

    def evaluations(self) -> dict[int, Path]:
        """Files with the completions of evaluations, by step, ascending."""
        found = {path.stem.removeprefix("step-"): path for path in self.directory.glob("evaluations/step-*.jsonl")}
        return {int(step): found[step] for step in sorted(found) if step.isdecimal()}

    def logs(self) -> dict[str, Path]:
        """Log files of its processes, by the name of the process."""
        return {
            path.stem: path for path in sorted(self.directory.glob("logs/*.log")) if not path.name.startswith("older-")
        }

    def recipe_text(self) -> str:
        """Its recipe as TOML; empty where it is missing."""
        try:
            return (self.directory / "recipe.toml").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def recipe(self) -> dict[str, Any]:
        """Values of its recipe by path, such as ``run.steps``, as they were written: of another version keys may be
        missing or unknown here. Empty where it is missing or cannot be read."""
        try:
            values = tomllib.loads(self.recipe_text())
            return dict(leaves("", values)) if values else {}
        except ValueError:
            return {}

    def started(self) -> float | None:
        """When it was begun, in seconds since 1970, as the name of the directory says it in local time; None where it
        does not."""
        found = _STARTED.search(self.run_id)
        try:
            return time.mktime(time.strptime(found[1], "%Y%m%d-%H%M%S")) if found else None
        except (ValueError, OverflowError):  # digits that are no time
            return None

    def metric_lines(self) -> Iterator[MetricLine]:
        """The lines of its metrics, with those of the older part; none where there is no file."""
        with ExitStack() as stack:
            for file in [stack.enter_context(file) for file in open_rotated(self.metrics)]:
                yield from metric_lines(file)

    def steps(self, last_step: MetricLine | None) -> int | None:
        """Steps that it is to make, which may have changed since it was started. ``last_step``: as for ``state``."""
        changed = last_step.values.get("run/steps") if last_step else None
        steps = changed if changed is not None else self.recipe().get("run.steps")
        return None if steps is None else int(steps)

    def state(self, last_step: MetricLine | None) -> RunStatus:
        """Its state now. ``last_step``: the last line of a step of its metrics, where there is one."""
        if writer_of(self.directory) is not None:  # the lock of the run, which its supervisor holds
            return RunStatus.RUNNING
        steps = self.steps(last_step)
        last_s = last_step.time if last_step else 0.0
        if steps is not None and last_step is not None and last_step.step >= steps:
            return RunStatus.FINISHED
        failed = any(changed_s(bundle) > last_s for bundle in self.directory.glob("crash/*.zip"))
        return RunStatus.FAILED if failed else RunStatus.STOPPED


def run_files(directory: Path) -> RunFiles:
    """The run in ``directory``. Raises ``StreamRLError`` where nothing of a run is there to be read."""
    run = RunFiles(directory)
    if not run.recipe() and not any(path.is_file() for path in (run.metrics, run.trace)):
        raise StreamRLError(
            f"{directory} is not the directory of a run (it has no recipe.toml that can be read, and no metrics): name "
            "one, such as runs/latest"
        )
    return run


def runs_in(directory: Path) -> list[RunFiles]:
    """The runs in the folders of ``directory``, the first started first; links such as ``latest`` name none twice."""
    folders = (path for path in directory.glob("*/") if not path.is_symlink())
    found = [RunFiles(path) for path in folders if (path / "recipe.toml").is_file()]
    return sorted(found, key=lambda run: (run.started() or 0.0, run.run_id))


def changed_s(path: Path) -> float:
    """When the file was changed last, in seconds since 1970; 0 where it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0

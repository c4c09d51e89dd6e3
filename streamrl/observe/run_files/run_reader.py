"""The directory of a run, for readers in other processes: commands, the dashboard, the trackers. The run may go on,
have ended, have been killed, be half deleted, or be of another version of streamrl. Nothing here writes to the
directory."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeGuard

from msgspec import Struct

from streamrl.base.errors import InputError
from streamrl.base.line_file import bounded_lines, decoded_lines, open_regular, open_rotated
from streamrl.base.types import JsonMapping, JsonObject, Metrics
from streamrl.observe.run_files.redaction import Redaction, run_redaction
from streamrl.recipe.check_fields import leaves
from streamrl.recipe.toml_text import parse_toml
from streamrl.run.journal.journal_file import writer_of

METRICS = "metrics.jsonl"
LARGEST_RECIPE = 1 << 20
"""Bytes of a recipe that are read."""
MOST_STEPS = 1 << 53
"""A larger number of a step is an error of its line: the page counts in float64."""
SCORE = re.compile(r"eval/(?P<set>.+)/(?P<metric>(avg|pass)@\d+)")
"""Names of metrics that are scores of an evaluation."""
_HEAD = frozenset({"kind", "time", "step", "policy_version"})
_STARTED = re.compile(r"-(\d{8}-\d{6})(-\d+)?$")


class RunStatus(StrEnum):
    """State of a run.

    ``running``: a process of this machine holds its lock. ``failed``: a crash bundle is newer than its last event.
    ``finished``: all its steps are done. ``stopped``: the run was drained or killed."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


class MetricLine(Struct, frozen=True):
    """A line of ``metrics.jsonl``. ``kind``: ``step``, or ``evaluation`` of the version of a step. ``time``: seconds
    since 1970. ``values``: finite metrics by name."""

    kind: str
    step: int
    time: float
    values: Metrics


def metric_lines(lines: Iterable[bytes]) -> Iterator[MetricLine]:
    """Decode lines of ``metrics.jsonl``, without those that cannot be read."""
    for line in decoded_lines(lines, JsonObject):
        step = line.get("step")
        time_s = line.get("time")
        if isinstance(step, int) and 0 <= step < MOST_STEPS and is_number(time_s):
            values = {name: float(value) for name, value in line.items() if name not in _HEAD and is_number(value)}
            yield MetricLine("step" if line.get("kind") == "step" else "evaluation", step, time_s, values)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is finite as a float: an integer of 400 digits is not."""
    return isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max


def set_size(name: str, values: JsonMapping) -> float | None:
    """Return the number of prompts of the score ``name`` among the ``values`` of an evaluation. Scores on different
    numbers of prompts are not comparable. None: it is not known."""
    held_out_set = name.rpartition("/")[0]
    size: float | None = values.get(f"{held_out_set}/size", values.get(f"{held_out_set}/prompts"))
    return size


class RunFiles(Struct, frozen=True):
    """Files of the run in ``directory``. Each of them may be missing. A file of lines may have an older part, which
    ``read_lines`` and ``FollowedLines`` read as well."""

    directory: Path

    @property
    def run_id(self) -> str:
        """Name of the directory, after links are resolved."""
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

    @property
    def prompts(self) -> Path:
        """``NamedPrompt`` lines: the first words of each prompt."""
        return self.directory / "prompts.jsonl"

    def evaluations(self) -> dict[int, Path]:
        """Return the files with the completions of evaluations, by step, ascending."""
        paths = {path.stem.removeprefix("step-"): path for path in self._files_of("evaluations", "step-*.jsonl")}
        return {int(step): paths[step] for step in sorted(paths) if step.isdecimal()}

    def logs(self) -> dict[str, Path]:
        """Return the log files of the run, by the name of the process."""
        return {path.stem: path for path in self._files_of("logs", "*.log") if not path.name.startswith("older-")}

    def _files_of(self, folder: str, pattern: str) -> list[Path]:
        if (self.directory / folder).is_symlink():
            return []
        return sorted(path for path in (self.directory / folder).glob(pattern) if not path.is_symlink())

    def links(self) -> list[str]:
        """Return the names of files and folders of the run that are links, which are not read: they may lead to files
        that only the reader may see."""
        entries = [*self.directory.glob("*"), *self.directory.glob("logs/*"), *self.directory.glob("evaluations/*")]
        return sorted(str(path.relative_to(self.directory)) for path in entries if path.is_symlink())

    def recipe_text(self) -> str:
        """Return the recipe as TOML; empty where the file is missing, a link or too large."""
        try:
            with open_regular(self.directory / "recipe.toml") as file:
                content = file.read(LARGEST_RECIPE + 1)
        except OSError:
            return ""
        if len(content) > LARGEST_RECIPE:
            return ""
        return content.decode(errors="replace")

    def redaction(self) -> Redaction:
        """Return the redaction of the secrets of this run's recipe and of this process's variables."""
        return run_redaction(os.environ, self.recipe_text())

    def recipe(self) -> JsonObject:
        """Return the values of the recipe by path, such as ``run.steps``, as they were written. A recipe of another
        version may lack keys, or have keys that this version does not know. Empty where the file is missing or cannot
        be read (``recipe_problem``)."""
        with suppress(ValueError, RecursionError):  # not TOML
            if values := parse_toml(self.recipe_text()):
                return dict(leaves("", values))
        return {}

    def recipe_problem(self) -> str:
        """Return the reason for which model and steps of the recipe are not known; empty where they are."""
        text = self.recipe_text()
        if not text.strip():
            return "recipe.toml is empty, a link, too large, or cannot be read"
        try:
            parse_toml(text)
        except (ValueError, RecursionError) as error:
            return f"recipe.toml is no TOML: {error}"
        recipe = self.recipe()
        kinds = {"run.steps": int, "model.path": str, "run.tags": list}
        if all(isinstance(recipe.get(key, []), kind) for key, kind in kinds.items()):
            return ""
        return "recipe.toml is of another version: model.path, run.steps or run.tags is missing, or of another type"

    def started(self) -> float | None:
        """Return the time of the start of the run in seconds since 1970, from the name of the directory, which has it
        in local time. None where the name has none."""
        match = _STARTED.search(self.run_id)
        if match is None:
            return None
        try:
            return time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S"))
        except (ValueError, OverflowError):  # digits that are no time
            return None

    def metric_lines(self) -> Iterator[MetricLine]:
        """Yield the lines of ``metrics.jsonl``, with those of its older part. None where there is no file."""
        with ExitStack() as stack:
            files = [stack.enter_context(file) for file in open_rotated(self.metrics)]
            for file in files:
                yield from metric_lines(bounded_lines(file))

    def steps(self, last_step: MetricLine | None) -> int | None:
        """Return the number of steps that the run is to make, which may change while it goes on. ``last_step``: last
        line of a step in ``metrics.jsonl``, where there is one."""
        steps = last_step.values.get("run/steps") if last_step else None
        if steps is None:
            steps = self.recipe().get("run.steps")
        if not is_number(steps):
            return None
        return int(steps)

    def state(self, last_step: MetricLine | None) -> RunStatus:
        """Return the current state of the run. ``last_step``: last line of a step in ``metrics.jsonl``, where there is
        one."""
        if writer_of(self.directory) is not None:  # the lock of the run, which its supervisor holds
            return RunStatus.RUNNING
        if self.last_crash(last_step.time if last_step else 0.0) is not None:
            return RunStatus.FAILED
        steps = self.steps(last_step)
        if steps is not None and last_step is not None and last_step.step >= steps:
            return RunStatus.FINISHED
        return RunStatus.STOPPED

    def last_crash(self, last_s: float = 0.0) -> Path | None:
        """Return the newest crash bundle; None where there is none, or the run went on after it: its journal, or a step
        at ``last_s`` (seconds since 1970), is newer."""
        newest = max(self.directory.glob("crash/*.zip"), key=changed_s, default=None)
        journal_s = max(map(changed_s, self.directory.glob("journal/*.journal")), default=0.0)
        if newest is None or changed_s(newest) < max(journal_s, last_s):
            return None
        return newest


def run_files(directory: Path) -> RunFiles:
    """Return the files of the run in ``directory``. Raises ``StreamRLError`` where the directory has no file of a
    run."""
    run = RunFiles(directory)
    if not run.recipe() and not any(path.is_file() for path in (run.metrics, run.trace)):
        raise InputError(f"{directory} is not the directory of a run: name one, such as runs/latest")
    return run


def runs_in(directory: Path) -> list[RunFiles]:
    """Return the runs in the folders of ``directory``, in the order of their starts. Links such as ``latest`` are
    skipped."""
    folders = (path for path in directory.glob("*/") if not path.is_symlink())
    runs = [RunFiles(path) for path in folders if (path / "recipe.toml").is_file()]
    return sorted(runs, key=lambda run: (run.started() or 0.0, run.run_id))


def changed_s(path: Path) -> float:
    """Return the time of the last change of a file in seconds since 1970; 0 where the file does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0

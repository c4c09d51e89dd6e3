"""The interface of a tracker, for those that are here and for plug-ins (entry point group ``streamrl.trackers``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.run_events import CompletionSampled


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The run that is followed. ``recipe``: its values by path, such as ``run.steps``; ``moved_s``: when the cursor was
    last moved, in seconds since 1970 (0: never): what was taken after that comes again; ``options``: what stands
    behind ``?`` in ``metrics.report_to``."""

    directory: Path
    run_id: str
    project: str
    tags: tuple[str, ...]
    recipe: dict[str, Any]
    moved_s: float = 0.0
    options: dict[str, str] = {}


def sample_table(step: int, samples: Sequence[CompletionSampled]) -> tuple[list[str], list[list[Any]]]:
    """The heads and the rows of a table of ``samples``, with a column for each reward function that one of them has;
    None where a sample does not have it."""
    functions = sorted({name for sample in samples for name in sample.rewards})
    rows = [
        [step, one.prompt, one.text, one.reward, one.finish_reason, one.tokens, *map(one.rewards.get, functions)]
        for one in samples
    ]
    return ["step", "prompt", "completion", "reward", "finish_reason", "tokens", *functions], rows


class Tracker:
    """Takes what a run reports, and may block: the run does not wait for it. Every method may raise: the process ends
    then, is started again, and begins with what was taken after the cursor was moved. The cursor moves after ``flush``
    returned, ``lag_s`` later where that does not mean that all is on the disk."""

    lag_s: float = 0.0

    def open(self, run: RunInfo) -> None:
        """Begin, or go on with, this run."""

    def metrics(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take the finite figures of a step or of an evaluation, which may come after later steps. ``time_s``: seconds
        since 1970."""

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        """Take completions. ``kind``: ``training`` (the best, the worst and one more of a batch, every tenth step) or
        ``evaluation`` (up to 64)."""

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Take the values of each trained trajectory of a step: ``completion/length`` (tokens), ``reward``,
        ``async/staleness`` (versions)."""

    def event(self, step: int, kind: str, text: str) -> None:
        """Take something that happened, such as a checkpoint or an alarm."""

    def flush(self) -> None:
        """Return once all that was taken is on the disk, or on its way there."""

    def close(self) -> None:
        """Return once all that was taken is on the disk, and end."""

"""``streamrl show RUN|BUNDLE``: the events of a run, while it goes on and after its end, from its journal or a crash
bundle. Only reads files, in the command's own process."""

from __future__ import annotations

import textwrap
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from streamrl.base.errors import InputError, StreamRLError
from streamrl.cli.command import Argument, Command
from streamrl.control.actions import ALL_STEPS_DONE, PROMPTS_EXHAUSTED
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import control_settings
from streamrl.observe.run_files.run_reader import RunFiles
from streamrl.processes.crash_bundle import SUMMARY, CrashManifest, read_manifest, read_member
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.topology import JOURNAL_DIRECTORY
from streamrl.run.journal.journal_file import read_journal, writer_of
from streamrl.run.journal.log_errors import JournalFailed
from streamrl.run.journal.summary import RunSummary, StepSummary, summarize

WIDTH = 80
SHOWN_STEPS = 10
SHOWN_GROUPS = 10


class ShownRun(Struct, frozen=True, kw_only=True):
    """``status``: ``running``, ``ended``, ``failed`` or ``killed``; ``process``: controller of a running run;
    ``failure``: text of the newest crash bundle of a failed run."""

    run_id: str
    status: str
    process: int | None = None
    failure: str | None = None
    summary: RunSummary


class Show(Command, frozen=True):
    """Show what happened in a run: its last steps, what was dropped and why, what is pending, why it ended. The journal
    goes back to the checkpoint before the last; metrics.jsonl has every step."""

    subject: Annotated[
        Path, Argument("the directory of a run, such as runs/latest, or a crash bundle", "RUN|BUNDLE", positional=True)
    ]

    def run(self) -> int:
        """Print the summary. Raises ``StreamRLError`` for a run without a journal."""
        if zipfile.is_zipfile(self.subject):
            manifest = read_manifest(self.subject)
            return self.print(manifest, *_crash(manifest), read_member(self.subject, SUMMARY))
        run = read_run(self.subject)
        return self.print(run, *lines_of(run))


def read_run(directory: Path) -> ShownRun:
    """Return the run in ``directory``. Raises ``StreamRLError`` if its journal is missing or cannot be read."""
    directory = directory.resolve()
    if not (directory / JOURNAL_DIRECTORY).is_dir():
        raise InputError(f"{directory} is not the directory of a run: name one, such as runs/latest")
    settings = control_settings(load_recipe(directory / "recipe.toml"))
    summary = None
    for last in (False, True):  # a run that goes on may remove a segment meanwhile
        try:
            summary = summarize(read_journal(directory / JOURNAL_DIRECTORY).records(0), partial(make_control, settings))
            break
        except JournalFailed:
            if last:
                raise
    if summary is None:
        raise StreamRLError(f"{directory / JOURNAL_DIRECTORY} is empty: the run has not begun")
    process = writer_of(directory / JOURNAL_DIRECTORY)
    failure = None
    if process is None and (summary.failed or not summary.finished):
        bundle = RunFiles(directory).last_crash()
        failure = read_manifest(bundle).failure if bundle else None
    if process:
        status = "running"
    elif summary.finished and not summary.failed:
        status = "ended"
    elif failure or summary.failed:
        status = "failed"
    else:
        status = "killed"
    return ShownRun(run_id=directory.name, status=status, process=process, failure=failure, summary=summary)


def lines_of(run: ShownRun) -> list[str]:
    """Format the run for people, in 80 columns."""
    summary = run.summary
    accounts = summary.accounting
    dropped = sum(accounts.dropped.values())
    status = {
        "running": f"running, process {run.process}",
        "ended": f"ended: {_end_text(summary)}",
        "failed": f"failed: {(run.failure or summary.ending or 'unknown').splitlines()[0]}",
        "killed": "killed, or its machine stopped",
    }[run.status]
    rows = {
        "run": run.run_id,
        "status": status,
        "step": f"{summary.live_version} of {summary.wanted_steps}, {summary.time_s:,.1f} s after the start",
        "versions": f"trainer {summary.trainer_version}, live {summary.live_version}",
        "accounting": f"issued {accounts.issued:,} = trained {accounts.trained:,} + dropped {dropped:,}"
        f" + in flight {accounts.in_flight:,}",
        "dropped": ", ".join(f"{reason} {count:,}" for reason, count in accounts.dropped.items()),
        "open batch": summary.batch,
        "prompts": summary.prompts,
        "pending": ", ".join(f"{action} of version {version}" for action, version in summary.pending.items()),
        "waited for": f"{summary.waits_for}, for {summary.time_s - summary.waits_since_s:.1f} s",
        "stopping": summary.ending or "",
    }
    if run.status == "ended" or summary.failed:
        del rows["waited for"], rows["stopping"]
    lines = [line for name, text in rows.items() if text for line in _wrapped(name, text)]
    for text in summary.violations:
        lines += _wrapped("VIOLATION", f"{text} (a bug of streamrl)")
    lines += _steps(summary.steps) + _groups(summary)
    for time_s, subject, reason in summary.decisions:
        lines += _wrapped("decision", f"{time_s:,.1f} s {subject}: {reason}")
    if run.status in ("failed", "killed"):
        lines.append(f"continue with: streamrl resume {run.run_id}")
    return lines


def _end_text(summary: RunSummary) -> str:
    return "all steps done" if summary.ending == ALL_STEPS_DONE else summary.ending or ""


def nothing_left(run: ShownRun) -> str:
    """Return what an ended run ended with, where ``streamrl resume`` has nothing left to do; empty where it has."""
    summary = run.summary
    is_over = summary.live_version >= summary.wanted_steps or summary.ending == PROMPTS_EXHAUSTED
    if run.status != "ended" or not is_over:
        return ""
    return _end_text(summary)


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name:<12}{text}", WIDTH, subsequent_indent=" " * 12)


def _steps(steps: list[StepSummary]) -> list[str]:
    if not steps:
        return []
    head = f"{'step':>6} {'at s':>9} {'took s':>7}  {'round':<12}{'groups':>7}{'samples':>8}{'reward':>8}  dropped"
    rows = [
        f"{step.step:>6} {step.time_s:>9,.1f} {_figure(step.seconds, 1):>7}  {step.round_kind[:11]:<12}{step.groups:>7}"
        f"{step.samples:>8}{_figure(step.reward, 3):>8}  "
        + ", ".join(f"{reason} {count}" for reason, count in step.dropped.items())
        for step in steps[-SHOWN_STEPS:]
    ]
    return ["", head, *rows, ""]


def _figure(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}"


def _groups(summary: RunSummary) -> list[str]:
    oldest = sorted(summary.groups, key=lambda group: group.launched_s)
    if not oldest:
        return []
    rows = [
        f"  group {group.group_id} of prompt {group.prompt_id!r}, attempt {group.attempt}: {group.stage}; "
        f"{summary.time_s - group.launched_s:.1f} s old, version {group.launch_version}"
        for group in oldest[:SHOWN_GROUPS]
    ]
    if len(oldest) > SHOWN_GROUPS:
        rows.append(f"  and {len(oldest) - SHOWN_GROUPS} more")
    return [f"{len(oldest)} groups have not ended, the oldest first:", *rows, ""]


def _crash(manifest: CrashManifest) -> list[str]:
    crash_time = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    lines = [f"crash of {manifest.run_id} at {crash_time}", *(f"  {line}" for line in manifest.failure.splitlines())]
    lines += textwrap.wrap(f"with {versions}, Python {manifest.python.split()[0]}, {manifest.platform}", WIDTH)
    return lines + [f"not in the bundle: {text}" for text in manifest.left_out] + [""]

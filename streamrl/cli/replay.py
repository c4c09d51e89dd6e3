"""``streamrl replay BUNDLE|RUN``: what control knew when a run failed."""

from __future__ import annotations

import shutil
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Annotated

from streamrl.base.errors import StreamRLError
from streamrl.cli.command import Argument, Command
from streamrl.journal.replayed_run import describe, replay_run
from streamrl.supervise.crash.crash_bundle import EVENTS, UNREADABLE, CrashManifest, read_manifest

LARGEST_LOG = 8 << 30
"""Bytes of an event log that are unpacked from a bundle. A log says what it holds before it is unpacked."""


class Replay(Command, frozen=True):
    """Rebuild the state of control from the recorded events, and print it."""

    subject: Annotated[
        Path, Argument("a crash bundle, or the directory of a run", metavar="BUNDLE|RUN", positional=True)
    ]

    def run(self) -> int:
        """Print it. Raises ``StreamRLError`` where nothing was recorded."""
        return replay(self.subject)


def replay(subject: Path) -> int:
    """Print the state of control after the last recorded event of ``subject``, a run's directory or a crash bundle."""
    if subject.is_dir():
        if not (subject / EVENTS).exists():
            raise StreamRLError(f"{subject} has no {EVENTS}: it is not the directory of a run that began")
        return _show(subject / EVENTS)
    if not subject.exists():
        raise StreamRLError(f"{subject}: no such file; give a crash bundle, or the directory of a run")
    if not zipfile.is_zipfile(subject):
        return _show(subject)
    manifest = read_manifest(subject)
    print("\n".join(_head(manifest)))
    with tempfile.TemporaryDirectory(prefix="streamrl-replay-") as folder, zipfile.ZipFile(subject) as archive:
        if EVENTS not in archive.namelist():
            why = next((text for text in manifest.left_out if text.startswith(EVENTS)), "the run had not begun")
            print(f"no events to replay ({why})")
            return 0
        if archive.getinfo(EVENTS).file_size > LARGEST_LOG:
            raise StreamRLError(f"{subject}: its event log would be larger than {LARGEST_LOG >> 30} GiB unpacked")
        log = Path(folder) / EVENTS
        try:
            with archive.open(EVENTS) as packed, log.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        except UNREADABLE as error:
            raise StreamRLError(f"{subject} cannot be unpacked: {error}; copy it again") from error
        return _show(log)


def _head(manifest: CrashManifest) -> list[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    lines = [f"crash of {manifest.run_id} at {when}"]
    lines += [f"  {line}" for line in manifest.failure.splitlines()]
    lines += [f"with {versions}, Python {manifest.python.split()[0]}, {manifest.platform}"]
    return lines + [f"not in the bundle: {text}" for text in manifest.left_out] + [""]


def _show(log: Path) -> int:
    print("\n".join(describe(replay_run(log))))
    return 0

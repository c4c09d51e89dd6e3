"""The real disk: kill -9 of writers at any time, disks that are full or fail, two writers."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from writer_process import RUN, check

from streamrl.journal.journal import JournalFailed, JournalRefused, open_journal, read_journal

WRITER = Path(__file__).parent / "writer_process.py"
ROOT = WRITER.parent.parent.parent


def started(
    directory: Path,
    *arguments: object,
    before: tuple[str, ...] = (),
    prepare: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    command = [*before, sys.executable, str(WRITER), str(directory), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, preexec_fn=prepare)


def test_every_acknowledged_record_survives_kill_9(tmp_path: Path) -> None:
    rng = random.Random(11)
    acknowledged = 0
    for epoch in range(1, 7):
        writer = started(tmp_path / "journal", epoch)
        assert writer.stdout
        kind, said_epoch, last = writer.stdout.readline().split()
        assert (kind, int(said_epoch)) == (b"opened", epoch)
        assert int(last) >= acknowledged, f"{acknowledged} records were acknowledged, {int(last)} came back"
        acknowledged = int(last)
        for _ in range(rng.choice([0, 1, 3, 40])):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
        rest = writer.stdout.read().split(b"\n")[:-1]  # what it said before it died
        acknowledged = max([acknowledged, *map(int, rest)])
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
    journal = read_journal(tmp_path / "journal")
    assert journal.last_sequence >= acknowledged > 0
    check(journal.records(), journal.last_sequence)


def test_a_second_writer_is_refused_and_told_who_is_the_first(tmp_path: Path) -> None:
    writer = started(tmp_path / "journal", 1)
    assert writer.stdout
    try:
        assert writer.stdout.readline().startswith(b"opened")
        with pytest.raises(JournalRefused, match=f"is being written by process {writer.pid}; end that run first"):
            open_journal(tmp_path / "journal", run_id=RUN)
        assert read_journal(tmp_path / "journal").epoch == 1, "reading is allowed"
    finally:
        writer.kill()
        writer.communicate()


def limit_file_sizes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    writer = started(tmp_path / "journal", 1, prepare=limit_file_sizes)
    refused(writer, tmp_path / "journal", rb"File too large \(errno 27\); raise the limit of file sizes")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip(f"this user may not mount: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    writer = started(small_disk / "journal", 3)
    acknowledged = refused(writer, small_disk / "journal", rb"No space left on device \(errno 28\); free space on that")
    # As the message says: with space it goes on. The segment before ends in a part of a frame.
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    goes_on(small_disk / "journal", acknowledged)


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("fdatasync", "EIO", rb"Input/output error \(errno 5\); the disk is failing"),
        ("pwrite64", "ENOSPC", rb"No space left on device \(errno 28\); free space"),
    ],
)
def test_a_system_call_that_fails(tmp_path: Path, call: str, error: str, said: bytes) -> None:
    log = tmp_path / "calls"
    trace = ("strace", "-f", "-qq", "-o", str(log), "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when=6")
    writer = started(tmp_path / "journal", 1, before=trace)
    refused(writer, tmp_path / "journal", said)
    lines = log.read_text().splitlines()
    assert "INJECTED" in lines[-1], "after it failed nothing was written or flushed any more"


def refused(writer: subprocess.Popen[bytes], journal: Path, said: bytes) -> int:
    """The writer ends with a message that matches; all it acknowledged is there."""
    output, _ = writer.communicate(timeout=30)
    lines = output.splitlines()
    assert writer.returncode == 3
    assert lines[-1].startswith(b"failed journal " + bytes(journal))
    assert re.search(said, lines[-1]), lines[-1]
    acknowledged = max(int(line) for line in lines[1:-1])
    found = read_journal(journal)
    assert found.last_sequence >= acknowledged
    check(found.records(), found.last_sequence)
    return acknowledged


def goes_on(journal: Path, acknowledged: int) -> None:
    writer = started(journal, 5, acknowledged + 50)
    output, _ = writer.communicate(timeout=30)
    assert output.startswith(b"opened 2 ") and output.endswith(b"done\n")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(JournalFailed, match=r"making the directory failed: No such file or directory \(errno 2\)"):
        open_journal(tmp_path / "missing" / "journal", run_id=RUN)

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

from streamrl.run.journal.journal_file import JournalFile, read_journal
from streamrl.run.journal.log_errors import JournalFailed, JournalRefused
from tests.run.journal.writer_process import last_of

WRITER = Path(__file__).parent / "writer_process.py"


def started(
    directory: Path, *arguments: object, before: tuple[str, ...] = (), prepare: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    command = [*before, sys.executable, str(WRITER), str(directory), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(WRITER.parents[2])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, preexec_fn=prepare)


def test_every_acknowledged_record_survives_kill_9(tmp_path: Path) -> None:
    rng = random.Random(11)
    acknowledged = 0
    for seed in range(6):
        writer = started(tmp_path / "journal", seed)
        assert writer.stdout
        opened = int(writer.stdout.readline().removeprefix(b"opened "))
        assert opened >= acknowledged, f"{acknowledged} records were acknowledged, {opened} came back"
        acknowledged = opened
        for _ in range(rng.choice([0, 1, 3, 40])):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
        rest = writer.stdout.read().split(b"\n")[:-1]  # what it said before it died
        acknowledged = max([acknowledged, *map(int, rest)])
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
    assert last_of(read_journal(tmp_path / "journal").records()) >= acknowledged > 0


def test_a_second_writer_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    writer = started(tmp_path / "journal", 1)
    assert writer.stdout
    try:
        lines = [writer.stdout.readline() for _ in range(3)]
        assert lines[0] == b"opened 0\n"
        with pytest.raises(JournalRefused, match=f"is being written by process {writer.pid}; end that run first"):
            JournalFile(tmp_path / "journal")
        assert last_of(read_journal(tmp_path / "journal").records()) > 0, "reading is allowed"
    finally:
        writer.kill()
        writer.communicate()


def limit_file_sizes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    writer = started(tmp_path / "journal", 1, prepare=limit_file_sizes)
    fails(writer, tmp_path / "journal", rb"File too large \(errno 27\); raise the limit of file sizes")


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


@pytest.mark.long
def test_a_full_disk(small_disk: Path) -> None:
    writer = started(small_disk / "journal", 3)
    last = fails(writer, small_disk / "journal", rb"No space left on device \(errno 28\); free space on that")
    # As the message says: with space it goes on. The journal ends in a part of a frame.
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    output, _ = started(small_disk / "journal", 5, last + 50).communicate(timeout=900)
    assert output.startswith(b"opened %d\n" % last) and output.endswith(b"done\n")


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_a_flush_that_fails(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    trace = ("strace", "-f", "-qq", "-o", str(log), "-e", "trace=fdatasync,pwrite64")
    writer = started(tmp_path / "journal", 1, before=(*trace, "-e", "inject=fdatasync:error=EIO:when=6"))
    fails(writer, tmp_path / "journal", rb"Input/output error \(errno 5\); the disk is failing")
    assert "INJECTED" in log.read_text().splitlines()[-1], "after it failed something was written or flushed"


def fails(writer: subprocess.Popen[bytes], journal: Path, said: bytes) -> int:
    """The writer ends with this message, and all it acknowledged is there. Returns the number of the last record."""
    output, _ = writer.communicate(timeout=900)
    lines = output.splitlines()
    assert writer.returncode == 3
    assert lines[-1].startswith(b"failed journal " + bytes(journal))
    assert re.search(said, lines[-1]), lines[-1]
    last = last_of(read_journal(journal).records())
    assert last >= max(int(line) for line in lines[1:-1])
    return last


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(JournalFailed, match=r"making the directory failed: No such file or directory \(errno 2\)"):
        JournalFile(tmp_path / "missing" / "journal")

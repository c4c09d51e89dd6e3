"""Errors of the journal's files, raised by ``journal_file``: a journal cannot be written, must not be opened, or is
damaged."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.base.errors import StreamRLError

_RESUME = "then resume the run: every acknowledged record is kept"
_REMEDIES = {
    errno.ENOSPC: f"free space on that file system, {_RESUME}",
    errno.EDQUOT: f"free space within the quota, {_RESUME}",
    errno.EFBIG: f"raise the limit of file sizes (ulimit -f), {_RESUME}",
    errno.EROFS: f"mount that file system for writing (the kernel may have found errors: dmesg), {_RESUME}",
    errno.EIO: f"the disk is failing (dmesg says how): repair or replace it, {_RESUME}",
}


class JournalFailed(StreamRLError):
    """A failed call on the disk. It is final: the journal neither writes nor acknowledges anything from then on."""

    def __init__(self, path: Path, doing: str, cause: OSError) -> None:
        self.errno = cause.errno or 0
        remedy = _REMEDIES.get(self.errno, f"remove the cause, {_RESUME}")
        super().__init__(f"journal {path}: {doing} failed: {cause.strerror} (errno {self.errno}); {remedy}")


class JournalRefused(StreamRLError):
    """A journal that is in use, has another format, was closed, or lacks records that the run needs."""


class JournalDamaged(StreamRLError):
    """A journal whose bytes of ``path`` from ``offset`` on differ from those that were written."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        self.path = path
        self.offset = offset
        run = path.parent.parent
        super().__init__(
            f"journal {path} is damaged at byte {offset}: {reason}; nothing was skipped and nothing was changed. Bring "
            "the file back from a copy, or begin another run from the last checkpoint of this one (what was done after "
            f"it is done again): {another_run(run, run / 'checkpoints' / 'latest')}"
        )


def another_run(run_directory: Path, checkpoint: Path | None) -> str:
    """Return the command that starts another run with the recipe of a run that lost its journal. ``checkpoint``:
    checkpoint to start from (None: the run starts from the beginning)."""
    command = ["streamrl", "train", str(run_directory / "recipe.toml")]
    if checkpoint is not None:
        command += ["--set", f"checkpoint.resume_from={checkpoint}"]
    return shlex.join(command)


@contextmanager
def failing(path: Path, doing: str) -> Iterator[None]:
    """Turn ``OSError`` into ``JournalFailed``. ``doing``: name of the work on ``path``, for the message."""
    try:
        yield
    except OSError as error:
        raise JournalFailed(path, doing, error) from error

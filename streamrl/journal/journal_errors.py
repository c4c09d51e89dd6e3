"""How a journal says no: it cannot be written, it must not be opened, or it is damaged."""

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
    errno.EMFILE: f"raise the limit of open files (ulimit -n), {_RESUME}",
    errno.ENFILE: f"this machine has too many open files; close some, {_RESUME}",
    errno.EACCES: f"make that path readable and writable for this user, {_RESUME}",
    errno.EPERM: f"make that path readable and writable for this user, {_RESUME}",
}


class JournalFailed(StreamRLError):
    """A call on the disk failed. It is final: the journal neither writes nor acknowledges anything from then on."""

    def __init__(self, path: Path, doing: str, cause: Exception) -> None:
        self.path, self.doing, self.cause = path, doing, cause
        self.errno = getattr(cause, "errno", None) or 0
        remedy = _REMEDIES.get(self.errno, f"remove the cause, {_RESUME}")
        why = getattr(cause, "strerror", None) or repr(cause)
        super().__init__(f"journal {path}: {doing} failed: {why} (errno {self.errno}); {remedy}")

    def again(self) -> JournalFailed:
        """The same failure for another caller."""
        return JournalFailed(self.path, self.doing, self.cause)


class JournalRefused(StreamRLError):
    """The journal may not be opened so: in use, of another run, of a later streamrl; or what was asked of it is
    against its rules."""


def another_run(run_directory: Path, checkpoint: Path | None) -> str:
    """The command that begins another run from ``checkpoint`` (None: from the beginning) of one that cannot go on:
    without its journal none can, whatever checkpoints it has."""
    command = ["streamrl", "train", str(run_directory / "recipe.toml")]
    if checkpoint is not None:
        command += ["--set", f"checkpoint.resume_from={checkpoint}"]
    return shlex.join(command)


class JournalDamaged(StreamRLError):
    """Bytes that were on the disk are not what was written. ``offset`` in bytes from the beginning of ``path``."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        self.path, self.offset, self.reason = path, offset, reason
        run = path.parent.parent
        super().__init__(
            f"journal {path} is damaged at byte {offset}: {reason}; nothing was skipped and nothing was changed. Bring "
            "the file back from a copy, or begin another run from the last checkpoint of this one (what was done after "
            f"it is done again): {another_run(run, run / 'checkpoints' / 'latest')}"
        )


@contextmanager
def failing(path: Path, doing: str) -> Iterator[None]:
    """Turn ``OSError`` into ``JournalFailed``; ``doing``: what is being done with ``path``."""
    try:
        yield
    except OSError as error:
        raise JournalFailed(path, doing, error) from error

"""Files and directories that are complete or absent for every reader, whenever the writer is killed: atomic writes,
durable writes (flushed, so that they outlive a power cut), links, new directories and locks. Every room that writes
files uses them, in the command's process and in the processes of a run. All functions block and raise ``OSError``."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from signal import SIGTERM
from time import monotonic
from typing import IO

from streamrl.base.errors import RecipeError, StreamRLError

PRIVATE = 0o600
"""Mode of files that only this user may read."""
SHARED = 0o666
"""Mode of files that others may read where the umask allows."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write ``content`` to a partial file beside ``path``, then rename it. Not flushed: for files that nobody needs
    after a power cut, such as the reason why a process died. The file is for this user alone: it may have prompts and
    completions of a run."""
    partial = _partial(path)
    with create_file(partial, PRIVATE) as file:
        file.write(content)
    partial.replace(path)


def write_durable(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write ``path`` as ``write_atomic`` does, flushed to the disk when it returns. ``mode``: mode of the file, before
    the umask."""
    partial = _partial(path)
    _write_flushed(partial, content, mode)
    partial.replace(path)
    flush_directory(path.parent)


_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_SEEN_LATE_S = 3.0

MOST_BYTES = 64 << 20
"""Limit of all files of one kind that a run writes now and then, such as evaluations, stacks and crash bundles."""


def remove_oldest(paths: Iterable[Path], most_bytes: int = MOST_BYTES) -> None:
    """Keep the newest of ``paths`` by name, at least one, within ``most_bytes``, and remove the others."""
    total = 0
    for index, path in enumerate(sorted(paths, reverse=True)):
        total += path.stat().st_size
        if index > 0 and total > most_bytes:
            path.unlink(missing_ok=True)


def append_whole(file: IO[bytes], content: bytes) -> None:
    """Append ``content`` to an unbuffered file, all of it or nothing: where the disk is full, the written part is
    removed before ``OSError`` is raised, so that a later line does not follow half a line."""
    begin = file.seek(0, os.SEEK_END)
    try:
        while content:  # a write takes only the first bytes where the disk gets full
            written = file.write(content)
            content = content[written:]
    except OSError:
        file.truncate(begin)
        raise


def write_link(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target``, a name in the same directory. Replaces an existing link in one step;
    of concurrent writers the last one wins. Durable when it returns."""
    partial = path.with_name(f".{path.name}.{target}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(path)
    flush_directory(path.parent)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Make ``directory`` with ``mode``, less the umask, and its missing parents. Durable when it returns."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(mode, exist_ok=True)
    flush_directory(directory.parent)


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory that is renamed to ``directory`` at the end of the block. It is removed where the block
    raises, or where SIGTERM ends the process in the block. For the main thread only. Raises ``RecipeError`` for a
    ``directory`` that exists and is not empty."""
    problem = _occupied(directory)
    if problem:
        text = f"{directory} {problem}: name a directory that is not there yet"
        raise RecipeError(text, outcome="nothing was written")
    target = directory.absolute()
    make_directory(target.parent)
    previous_handler = signal.signal(SIGTERM, lambda *_: sys.exit(128 + SIGTERM))
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.replace(target)
        flush_directory(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        signal.signal(SIGTERM, previous_handler)


def _occupied(directory: Path) -> str:
    """Return why ``directory`` cannot be made; empty: it is absent or empty."""
    if not directory.exists():
        return ""
    if not directory.is_dir():
        return "is a file"
    if any(directory.iterdir()):
        return "is not empty"
    return ""


def flush_directory(directory: Path) -> None:
    """Flush the names in ``directory`` to the disk, on a file system that can (SMB and some in user space cannot)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


def hold_lock(path: Path, refused: Callable[[str], StreamRLError]) -> IO[bytes]:
    """Open and lock ``path`` and write the process id to it. The lock ends with the file or with the process. Raises
    ``refused(PID)`` while the process PID holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    lock = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
    except BlockingIOError:
        holder = lock.read(20).decode("ascii", "replace") or "unknown"
        lock.close()
        raise refused(holder) from None
    except BaseException as error:  # a full disk, too
        lock.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOLCK, *_NOT_OFFERED):
            raise StreamRLError(
                f"files cannot be locked in {path.parent} ({error.strerror}), so two processes could run one run: "
                "mount it with locks (NFS 4, or lockd), or set another run.directory"
            ) from error
        raise
    return lock


# ---- sidecars: files of the controller for a directory (a checkpoint) that a trainer rank writes --------


def write_sidecar(directory: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Write ``files`` to the sidecar folder of ``directory``, from which its writer takes them (``take_sidecar``).
    Replaces the files of an earlier call. Returns their SHA-256 by name. Durable when it returns."""
    folder = sidecar_folder(directory)
    shutil.rmtree(folder, ignore_errors=True)
    if not files:
        return {}
    make_directory(folder)
    for name, content in files.items():
        _write_flushed(folder / name, content, SHARED)
    flush_directory(folder)
    return {name: hashlib.sha256(content).digest() for name, content in files.items()}


def take_sidecar(directory: Path, into: Path, digests: Mapping[str, bytes]) -> None:
    """Move the files that ``write_sidecar`` wrote for ``directory`` to ``into``, on the same file system, not flushed.
    Raises ``StreamRLError`` for a file that is not there or has another digest."""
    folder = sidecar_folder(directory)
    for name, expected in digests.items():
        try:
            with _open_late(folder / name) as file:
                digest = hashlib.file_digest(file, "sha256").digest()
        except FileNotFoundError as error:
            raise StreamRLError(
                f"{folder / name} is not there, where the controller wrote it: controller and trainer ranks need the "
                f"same file system at {directory.parent}"
            ) from error
        if digest != expected:
            raise StreamRLError(f"{folder / name} differs from what the controller wrote: look at the disk")
        (folder / name).replace(into / name)
    shutil.rmtree(folder, ignore_errors=True)


def _open_late(path: Path) -> BufferedReader:
    """Open a file of another host. Its name may appear late: an NFS client caches that the file was absent until it
    reads the changed folder."""
    deadline = monotonic() + _SEEN_LATE_S
    while True:
        try:
            return path.open("rb")
        except FileNotFoundError:
            if path.name not in os.listdir(path.parent) and monotonic() > deadline:
                raise
        time.sleep(0.2)


def sidecar_folder(directory: Path) -> Path:
    """Staging folder of the sidecars of ``directory``. It is named like a partial file, so that it is cleaned up like
    one."""
    return directory.with_name(f".{directory.name}.beside.partial")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def create_file(path: Path, mode: int) -> IO[bytes]:
    """Open a new file to write, of ``mode`` before the umask, in place of an older one of that name."""
    path.unlink(missing_ok=True)  # an older file would keep its mode
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


def _write_flushed(path: Path, content: bytes, mode: int) -> None:
    with create_file(path, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

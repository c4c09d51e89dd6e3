"""A directory that is whole or absent, also after a power cut: flushed, listed with digests, then renamed."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from streamrl.base.atomic_files import flush_directory
from streamrl.base.errors import StreamRLError

DIGESTS = "digests"
_REPLACED = ".replaced"

log = logging.getLogger(__name__)


def files_below(directory: Path) -> list[str]:
    """Relative names of all files but the digests, sorted."""
    names = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in names if name != DIGESTS)


def flush_and_digest(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Force these files to the disk, also those of other libraries, and return their sha256 by name."""
    digests = {}
    for name in names:
        with (directory / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    return digests


def write_digests(directory: Path, digests: Iterable[Mapping[str, str]]) -> None:
    """Write one list (``sha256sum -c digests`` reads it) and force it and every directory below to the disk."""
    with (directory / DIGESTS).open("w") as file:
        file.writelines(f"{digest}  {name}\n" for part in digests for name, digest in sorted(part.items()))
        file.flush()
        os.fsync(file.fileno())
    for below in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
        flush_directory(below)


def read_digests(directory: Path) -> dict[str, str]:
    """sha256 by file name. Raises ``StreamRLError`` when the directory was not written by ``write_digests``."""
    try:
        lines = (directory / DIGESTS).read_text().splitlines()
        digests = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        if outside := [name for name in digests if not name or Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"{outside[0]!r} leads out of it")
        return digests
    except (OSError, ValueError) as error:
        raise StreamRLError(
            f"{str(directory)!r} is not a checkpoint of this version of streamrl: its list {DIGESTS!r} cannot be read "
            f"({error}); give a step directory of a run's checkpoints/, or checkpoints/latest"
        ) from error


def faults(directory: Path, digests: Mapping[str, str]) -> list[str]:
    """Files that are missing or whose bytes are not those that were written, each in a few words."""
    found = []
    for name, expected in digests.items():
        try:
            with (directory / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    found.append(f"{name} differs")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def refuse_faults(directory: Path, found: list[str]) -> None:
    """Raise ``StreamRLError`` when ``faults`` found any."""
    if found:
        raise StreamRLError(
            f"checkpoint {str(directory)!r} is damaged: {', '.join(sorted(found))}; resume from another checkpoint"
        )


def verify(directory: Path) -> None:
    """Compare every file with its digest. Raises ``StreamRLError`` that names those that differ."""
    refuse_faults(directory, faults(directory, read_digests(directory)))


def move_into_place(partial: Path, directory: Path) -> None:
    """Rename ``partial`` to ``directory``, replacing one of that name. Durable when it returns. Nobody may read what is
    ``surviving`` beside it meanwhile."""
    aside = _aside(directory)
    if directory.exists():  # where it is not, what a crash left aside is the only one: it stays until there is another
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
    partial.rename(directory)
    flush_directory(directory.parent)
    _settle(directory.parent)


def surviving(directory: Path) -> Path:
    """``directory`` without links, or what a crash between the two renames of ``move_into_place`` left of it."""
    real = directory.resolve()
    return _aside(real) if not real.exists() and _aside(real).exists() else real


def newest_checkpoint(run_directory: Path) -> Path | None:
    """The newest checkpoint of a run whose files are all as they were written; None: there is none. A damaged one is
    left out, and the log says so."""
    checkpoints = run_directory / "checkpoints"
    latest = surviving(checkpoints / "latest")
    older = sorted((path for path in checkpoints.glob("step-*") if path.is_dir()), reverse=True)
    for directory in dict.fromkeys([*([latest] if latest.is_dir() else []), *(path.resolve() for path in older)]):
        try:
            verify(directory)
        except StreamRLError as error:
            log.warning("%s; trying the one before", error)
            continue
        return directory
    return None


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}{_REPLACED}")


def _settle(checkpoints: Path) -> None:
    """Repair what a killed process left: a directory that was moved aside gets its name back where that is free, and is
    deleted otherwise."""
    for aside in checkpoints.glob(f".*{_REPLACED}"):
        directory = aside.with_name(aside.name.removeprefix(".").removesuffix(_REPLACED))
        if directory.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(directory)

"""Directories that are complete or absent, also after a power cut: flushed, listed with digests, then renamed.

Trainer ranks write checkpoints with it; the controller, ``preflight`` and commands on models read and verify them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from logging import getLogger
from pathlib import Path

from streamrl.base.atomic_files import flush_directory
from streamrl.base.errors import StreamRLError
from streamrl.base.types import TextMapping, TextsByName

DIGESTS = "digests"
_REPLACED = ".replaced"

log = getLogger(__name__)


def files_below(directory: Path) -> list[str]:
    """Relative names of all files except the digests, sorted."""
    names = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in names if name != DIGESTS)


def flush_and_digest(directory: Path, names: Iterable[str]) -> TextsByName:
    """Force files, of any library, to the disk, and return their sha256 by name."""
    digests = {}
    for name in names:
        with (directory / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    return digests


def write_digests(directory: Path, digests: Iterable[TextMapping]) -> None:
    """Write the list of digests (``sha256sum -c digests`` reads it), and force it and all directories to the disk."""
    with (directory / DIGESTS).open("w") as file:
        file.writelines(f"{digest}  {name}\n" for part in digests for name, digest in sorted(part.items()))
        file.flush()
        os.fsync(file.fileno())
    for folder in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
        flush_directory(folder)


def read_digests(directory: Path) -> TextsByName:
    """Read the sha256 of each file, by name. Raises ``StreamRLError`` for a directory without a list of digests."""
    places = "give a step directory of a run's checkpoints/, or checkpoints/latest"
    if not directory.exists():
        raise StreamRLError(f"there is no checkpoint {directory}: {places}")
    try:
        lines = (directory / DIGESTS).read_text().splitlines()
        digests = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        if outside := [name for name in digests if not name or Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"{outside[0]!r} leads out of it")
        return digests
    except (OSError, ValueError) as error:
        raise StreamRLError(
            f"{str(directory)!r} is not a checkpoint of this version of streamrl: its list {DIGESTS!r} cannot be read "
            f"({error}); {places}"
        ) from error


def faults(directory: Path, digests: TextMapping) -> list[str]:
    """Compare files with their digests, and return the faults, each in a few words: missing files and other bytes."""
    problems = []
    for name, expected in digests.items():
        try:
            with (directory / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    problems.append(f"{name} differs")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
    return problems


def refuse_faults(directory: Path, problems: list[str]) -> None:
    """Raise ``StreamRLError`` when there are ``problems``, results of ``faults``."""
    if problems:
        raise StreamRLError(
            f"checkpoint {str(directory)!r} is damaged: {', '.join(sorted(problems))}; resume from another checkpoint"
        )


def verify(directory: Path) -> None:
    """Compare every file with its digest. Raises ``StreamRLError`` that names the files that differ."""
    refuse_faults(directory, faults(directory, read_digests(directory)))


def move_into_place(partial: Path, directory: Path) -> None:
    """Rename ``partial`` to ``directory``, and replace the directory of that name. The rename is durable when the call
    returns. No other process may read the directory of ``surviving`` during the call."""
    aside = _aside(directory)
    # Without ``directory``, a crash left the only checkpoint aside: it stays until there is another one.
    if directory.exists():
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
    partial.rename(directory)
    flush_directory(directory.parent)
    _settle(directory.parent)


def surviving_directory(directory: Path) -> Path:
    """Return ``directory`` without links. After a crash between the two renames of ``move_into_place``, return the
    directory that the first rename moved aside."""
    real = directory.resolve()
    if not real.exists() and _aside(real).exists():
        return _aside(real)
    return real


def newest_checkpoint(run_directory: Path) -> Path | None:
    """Return the newest undamaged checkpoint of a run; None where there is none. The log names damaged checkpoints."""
    checkpoints = run_directory / "checkpoints"
    latest = surviving_directory(checkpoints / "latest")
    older = sorted((path for path in checkpoints.glob("step-*") if path.is_dir()), reverse=True)
    candidates = [path.resolve() for path in older]
    if latest.is_dir():
        candidates.insert(0, latest)
    for directory in dict.fromkeys(candidates):
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
    """Clean up after a killed process: a directory that was moved aside gets its name back where the name is free, and
    is deleted otherwise."""
    for aside in checkpoints.glob(f".*{_REPLACED}"):
        directory = aside.with_name(aside.name.removeprefix(".").removesuffix(_REPLACED))
        if directory.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(directory)

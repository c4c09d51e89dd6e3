"""A home directory for libraries that keep caches and settings in one, where the user has none that can be written."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def ensure_home() -> None:
    """Set HOME to a private temporary directory, for this process and those that it starts, where nothing can be
    written below the user's (containers run programs under ids that have none), and LOGNAME where the id has no name.
    Where there is no such directory either, HOME stays: then caches are not kept."""
    user = os.geteuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        os.environ.setdefault("LOGNAME", f"uid-{user}")
    home = Path(os.path.expanduser("~"))
    caches = home / ".cache"
    if not home.is_absolute() or not os.access(caches if caches.exists() else home, os.W_OK | os.X_OK):
        with suppress(OSError):
            os.environ["HOME"] = str(_private_directory(Path(tempfile.gettempdir()) / f"streamrl-home-{user}"))


def _private_directory(wanted: Path) -> Path:
    """``wanted``, or another where that is not this user's alone. Raises ``OSError``."""
    with suppress(FileExistsError):
        wanted.mkdir(mode=0o700)
    found = wanted.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return wanted
    return Path(tempfile.mkdtemp(prefix=f"{wanted.name}-"))

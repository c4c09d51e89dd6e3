"""Keys of a run, and processes' environments that hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.comm.transport_keys import KEY_ROLE, KEYS_DIRECTORY, KeyRole, make_keys

ActAs = Callable[[KeyRole | None], None]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A new directory of keys."""
    directory = tmp_path / "keys"
    make_keys(directory)
    return directory


@pytest.fixture
def act_as(keys: Path, monkeypatch: pytest.MonkeyPatch) -> ActAs:
    """Sockets that are made from now on are those of a process of this role; None: of one without keys."""

    def act(role: KeyRole | None, directory: Path = keys) -> None:
        monkeypatch.setenv(KEYS_DIRECTORY, str(directory) if role else "")
        monkeypatch.setenv(KEY_ROLE, role or "")

    return act

"""What a whole run must not leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def nothing_left(
    abandoned_memory: Callable[[], set[str]], socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No shared memory or socket directory of the run may be left behind."""
    monkeypatch.setenv("TMPDIR", str(socket_directory))

    def left() -> set[str]:
        return abandoned_memory() | {n for n in os.listdir(socket_directory) if n.startswith("streamrl-")}

    yield
    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left(), f"left behind: {left()}"

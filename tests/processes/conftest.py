from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.trials import Trial


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    trials: list[Trial] = []

    def make(**behaviour: str) -> Trial:
        trials.append(Trial(tmp_path, {name.replace("_", "-"): word for name, word in behaviour.items()}))
        return trials[-1]

    yield make
    for one in trials:  # what a failed test left must not disturb the next
        for pid in one.pids():
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

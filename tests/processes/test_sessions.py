"""Children that lead a session of their own: how they are ended, and what they wrote."""

from __future__ import annotations

import subprocess
import tempfile

import psutil
import pytest

from streamrl.base.run_process import end_session, last_line, start_session


@pytest.mark.parametrize("patience_s", [0.0, 0.2])
def test_a_session_ends_with_all_that_it_started(patience_s: float) -> None:
    """Also a process that ignores SIGTERM, and one that its parent has left."""
    script = "trap '' TERM; (sleep 100 & echo $!); exec sleep 100"
    child = start_session(["sh", "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        orphan = psutil.Process(int(child.stdout.readline()))
    assert not end_session(child, patience_s)
    psutil.wait_procs([orphan], timeout=5)
    assert child.returncode == -9 and not (orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE)
    assert end_session(child), "it has ended"


def test_the_last_line_of_a_child_is_short() -> None:
    with tempfile.TemporaryFile() as output:
        assert last_line(output.fileno()) == ""
        child = start_session(["sh", "-c", "yes | head -5000; printf 'ERROR %0300d\\n\\n' 0 >&2"], stdout=output)
        assert end_session(child, 5.0)
        assert last_line(output.fileno()) == f"ERROR {'0' * 194}"

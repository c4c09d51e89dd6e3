"""What the suite promises of itself: its tiers stay true, and a fork server whose forks would hang refuses to fork."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from builders.files import ROOT
from forks.call import call_in_process
from forks.server import Threads, serve
from forks.starts import ForkServer

from campaigns.suite_faults import FAULTS

SLOW_TESTS = """
import pytest
from tiers import _loop_seconds

def compute():
    for _ in range(40):  # as slow as the machine, as the limit is: 1.4 s of the reference
        _loop_seconds()

@pytest.mark.seconds(0.1)
def test_slower_than_its_mark():
    compute()

@pytest.mark.seconds(2)
def test_as_slow_as_its_mark():
    compute()

def test_within_its_tier():
    compute()
"""
SHARED_ENGINE = """
import pytest

pytestmark = pytest.mark.{engine_mark}

@pytest.fixture(scope="module")
def engine():
    raise AssertionError("it would be made in both tiers")

def test_quick(engine): ...

@pytest.mark.long
def test_long(engine): ...
"""


def pytest_of(test_file: Path, text: str) -> str:
    """What pytest prints of a file with ``text``, with the hooks of these tests."""
    test_file.write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", test_file.parent]
    options = ["-p", "conftest", "-p", "no:cacheprovider", "--tb=short", "-q", test_file]
    variables = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    process = subprocess.run([*command, *options], env=variables, capture_output=True, text=True, check=False)
    return process.stdout + process.stderr


def test_a_test_that_is_slower_than_its_tier_fails(tmp_path: Path) -> None:
    printed = pytest_of(tmp_path / "test_slow.py", SLOW_TESTS)
    assert "1 failed, 2 passed" in printed
    assert "::test_slower_than_its_mark" in printed
    assert "s of processor time, where its tier or its mark says 0.1 s: make it quicker, mark it long" in printed


def test_an_engine_that_tests_of_both_tiers_share_is_refused(tmp_path: Path) -> None:
    printed = pytest_of(tmp_path / "test_engines.py", SHARED_ENGINE.format(engine_mark="vllm"))
    assert "tests of both tiers share a fixture; mark all or none of them long: ['test_engines.py: engine']" in printed


@pytest.mark.parametrize("name", FAULTS)
def test_the_line_of_a_planted_fault_is_in_its_file(name: str) -> None:
    """Otherwise a campaign would end in the middle: a line is renamed, and the fault still has the old one."""
    fault = FAULTS[name]
    assert (ROOT / "streamrl" / fault.file).read_text().count(fault.line) == 1
    assert [place for place in fault.tests.split() if not (ROOT / "tests" / place).exists()] == []


def answer_of_a_fork_server(with_a_thread: bool) -> str:
    """What a fork server answers to an order, once it has run a thread or a parallel loop."""
    threads = Threads()
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not os.fork():
        own.close()
        if with_a_thread:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        else:
            from numba.np.ufunc import parallel

            parallel._launch_threads()
        serve(other, parent, threads)
    other.close()
    fork_server = ForkServer(own, os.environ)
    try:
        fork_server.fork({}, [])
    except OSError as error:
        return str(error)
    finally:
        fork_server.close()
        os.wait()
    return "it forked"


@pytest.mark.parametrize(
    ("with_a_thread", "refusal"),
    [(True, "the fork server has 2 threads, and had 1 after"), (False, "the fork server ")],
)
def test_a_fork_server_that_would_hang_its_forks_refuses(with_a_thread: bool, refusal: str) -> None:
    answer = call_in_process(answer_of_a_fork_server, with_a_thread)
    assert answer.startswith(refusal) and answer.endswith("STREAMRL_TESTS_SPAWN=1 starts processes without it")

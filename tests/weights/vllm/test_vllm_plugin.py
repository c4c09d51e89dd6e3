"""The plugin does nothing in a process that streamrl did not start; in one it did, a child dies with its parent, and
vLLM's workers can do what a push asks of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import psutil
import pytest


def test_does_nothing_in_a_process_of_somebody_else() -> None:
    script = (
        "import sys; from streamrl.engines.vllm.plugin import register; register(); sys.exit('vllm' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "STREAMRL_ENGINE"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=900)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux only")
def test_a_child_dies_with_a_killed_parent() -> None:
    script = textwrap.dedent("""
        import multiprocessing, os, time

        def child(ready):
            from streamrl.engines.vllm.plugin import die_with_parent
            die_with_parent()
            ready.send(os.getpid())
            time.sleep(7200)

        receive, send = multiprocessing.Pipe()
        multiprocessing.get_context("fork").Process(target=child, args=(send,)).start()
        print(receive.recv(), flush=True)
        time.sleep(7200)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    try:
        child.wait(timeout=900)
    finally:
        if child.is_running():
            child.kill()


@pytest.mark.long
@pytest.mark.vllm
def test_a_worker_can_start_where_numba_was_imported() -> None:
    """What vLLM's CPU worker does to every module when it starts, in a process of its own."""
    pytest.importorskip("numba")
    script = textwrap.dedent("""
        import numba, sys
        from streamrl.engines.vllm.plugin import make_numba_harmless
        from vllm.triton_utils.dispatcher import _rebind_kernels
        make_numba_harmless()
        make_numba_harmless()
        _rebind_kernels([(object(), object())])
        assert numba.njit(lambda x: x + 1)(1) == 2
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=900)

"""What is said, how fast, and what is left when a process of a real engine is killed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from streamrl.base.errors import EngineError
from streamrl.base.messages import Generate, PauseMode
from streamrl.contracts import Engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.torch,
    # A killed engine leaves its streams broken, and vLLM's own objects unclosed.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def find(owner: int, title: str) -> int:
    if title == "owner":
        return owner
    found = psutil.Process(owner).children(recursive=True)
    return next(process.pid for process in found if title in " ".join(process.cmdline()))


async def until_gone(pids: list[int]) -> None:
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        await anyio.sleep(0.02)


async def kill_is_reported(engine: Engine, host: int, title: str, cause: str) -> None:
    """Kill the process ``title`` of the engine: the next order says why it fails, soon, and no process is left."""
    pids = [host, *(process.pid for process in psutil.Process(host).children(recursive=True))]
    os.kill(find(host, title), signal.SIGKILL)
    with pytest.raises(EngineError, match=cause):
        await engine.checksums()
    await until_gone(pids)


CORE_DIED = r"engine-0: its process VLLM::EngineCore \(pid \d+\) died"


@pytest.mark.long
@pytest.mark.parametrize(
    ("title", "cause"),
    [("VLLM::EngineCore", CORE_DIED), ("owner", r"engine-0: its process is gone")],
    ids=["core", "owner"],
)
async def test_sigkill_is_reported_at_once_and_leaves_nothing(
    title: str,
    cause: str,
    tiny_options: Callable,
    hosted: Callable,
    make_request: Callable[..., Generate],
    abandoned_memory: Callable[[], set[str]],
) -> None:
    """Requests are open; ``test_engine_statistics.py`` kills the core of an idle engine."""
    pytest.importorskip("vllm")
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        options = tiny_options(Path(directory))
        async with hosted(options, Path(directory)) as (engine, host), anyio.create_task_group() as group:
            await engine.generate(make_request())
            await engine.pause(PauseMode.KEEP, clear_cache=False)  # so that the requests are surely open

            async def expect_failure(request: Generate) -> None:
                try:
                    await engine.generate(request)
                except EngineError as error:
                    errors.append(str(error))

            for _ in range(8):
                group.start_soon(expect_failure, make_request(max_tokens=400))
            await anyio.sleep(0.2)  # let the requests reach the engine
            await kill_is_reported(engine, host.pid, title, cause)
    assert len(errors) == 8
    assert all("engine-0" in error for error in errors)
    with anyio.move_on_after(300):
        while abandoned_memory():
            await anyio.sleep(0.05)
    assert not abandoned_memory()

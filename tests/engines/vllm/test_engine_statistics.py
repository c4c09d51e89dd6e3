"""What an engine says about its load: the arithmetic, and a real engine whose numbers rise, fall and add up."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest
import pytest_asyncio

from streamrl.base.messages import EngineLoad, Generate, PauseMode
from streamrl.base.types import Completion, FinishReason, token_array
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.vllm.statistics import EngineCounters
from tests.engines.conftest import owned
from tests.engines.test_engine_death import CORE_DIED, kill_is_reported

# ---- the arithmetic ------------------------------------------------------------------------------


def one(
    engine: EngineCounters, seconds: float, tokens: int, running: int, *, prefilled: int = 0, kv: float = 0.5
) -> None:
    engine.count_step(tokens, seconds, 0, prefilled=prefilled, running=running, kv_usage=kv)


def test_the_time_of_a_decode_step_is_of_decode_steps_only() -> None:
    engine = EngineCounters()
    one(engine, 0.500, 3, 3, prefilled=300)
    one(engine, 0.002, 3, 3)
    one(engine, 0.004, 3, 2)  # one ends
    one(engine, 0.050, 3, 3, prefilled=40)  # another is prefilled, while two decode
    one(engine, 0.003, 3, 0)  # the last ones end
    one(engine, 0.001, 0, 0)  # only frees what ended
    load = engine.load(open_requests=0, paused=False)
    assert (load.decode_steps, load.decode_tokens, load.generated_tokens) == (3, 9, 15)
    assert load.decode_s == pytest.approx(0.009)
    assert load.prefilled_tokens == 340 and load.prefill_s == pytest.approx(0.500 + 0.050 - 0.004)


def test_an_aborted_request_runs_until_the_engine_dropped_it() -> None:
    engine = EngineCounters()
    one(engine, 0.1, 8, 8, prefilled=80, kv=0.8)
    load = engine.load(open_requests=10, paused=False)
    assert (load.running, load.waiting) == (8, 2)
    load = engine.load(open_requests=3, paused=False)  # seven were aborted and have their answer
    assert (load.running, load.waiting) == (8, 0)
    one(engine, 0.002, 0, 3, kv=0.3)
    load = engine.load(open_requests=3, paused=False)
    assert (load.running, load.waiting, load.kv_cache_usage) == (3, 0, 0.3)
    paused = engine.load(open_requests=3, paused=True)
    assert (paused.running, paused.waiting) == (0, 3)


def test_a_forked_process_counts_for_its_parent() -> None:
    engine = EngineCounters()
    if not (child := os.fork()):
        one(engine, 0.5, 7, 7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.load(open_requests=7, paused=False).generated_tokens == 7


# ---- a real engine -------------------------------------------------------------------------------

REAL = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
MAX_RUNNING = 8
LONG = 480
CACHE_BLOCKS = 24  # 23 of 128 tokens for requests: six long ones fit, eight do not


def real(test: Callable[..., Any]) -> Callable[..., Any]:
    for mark in REAL:
        test = mark(test)
    return test


class LongRequests:
    """Requests that end only at their limit: from prompts after which the model, nearly greedy, never stops."""

    def __init__(self, engine: RemoteEngine, host: int) -> None:
        self.engine = engine
        self.host = host
        self.prompts: list[list[int]] = []
        self.done: dict[str, Completion] = {}
        self._count = 0

    def request(self, prompt: list[int]) -> Generate:
        self._count += 1
        return Generate(
            request_id=f"long-{self._count}", token_ids=token_array(prompt), max_tokens=LONG, seed=7, temperature=0.01
        )

    async def find_prompts(self) -> None:
        found: list[list[int]] = []

        async def one(prompt: list[int]) -> None:
            completion = await self.engine.generate(self.request(prompt))
            if completion.finish_reason is FinishReason.LENGTH:
                found.append(prompt)

        async with anyio.create_task_group() as group:
            for first in range(2, 18):
                group.start_soon(one, [first, 3, 5, 8])
        assert found, "the model stops after every prompt; choose others"
        self.prompts = sorted(found)

    def start(self, count: int, group: anyio.abc.TaskGroup) -> list[str]:
        requests = [self.request(self.prompts[i % len(self.prompts)]) for i in range(count)]
        for request in requests:
            group.start_soon(self._finish, request)
        return [request.request_id for request in requests]

    async def _finish(self, request: Generate) -> None:
        self.done[request.request_id] = await self.engine.generate(request)

    async def until(self, holds: Callable[[EngineLoad], bool]) -> EngineLoad:
        """The first report of the engine's for which ``holds``."""
        while not holds(self.engine.load()):
            await anyio.sleep(0.005)
        return self.engine.load()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long_requests(request: pytest.FixtureRequest) -> AsyncIterator[LongRequests]:
    """A real engine with little KV memory, shared by the module."""
    pytest.importorskip("vllm")

    @asynccontextmanager
    async def opened(directory: Path) -> AsyncIterator[LongRequests]:
        options = request.getfixturevalue("tiny_options")(directory)
        options = msgspec.structs.replace(options, max_num_seqs=MAX_RUNNING, cache_blocks=CACHE_BLOCKS)
        async with request.getfixturevalue("hosted")(options, directory) as (engine, host):
            requests = LongRequests(engine, host.pid)
            await requests.find_prompts()
            yield requests

    async with owned(opened) as made:
        yield made


def idle(load: EngineLoad) -> bool:
    return load.running == load.waiting == 0


@real
async def test_the_load_rises_falls_and_adds_up(long_requests: LongRequests) -> None:
    assert (await long_requests.engine.start()).kv_tokens == pytest.approx(CACHE_BLOCKS * 128, abs=128)
    before = await long_requests.until(idle)
    async with anyio.create_task_group() as group:
        ids = long_requests.start(MAX_RUNNING + 4, group)
        full = await long_requests.until(lambda load: load.running == MAX_RUNNING)
        assert full.waiting == 4
        assert full.kv_cache_usage > 0.2
    after = await long_requests.until(idle)
    assert after.kv_cache_usage == pytest.approx(0.0, abs=1e-6), "every block is free again"
    sampled = sum(len(long_requests.done[i].token_ids) for i in ids)
    assert sampled == LONG * len(ids)
    assert after.generated_tokens - before.generated_tokens == sampled
    assert after.preemptions > before.preemptions, "eight long requests do not fit into the KV cache"
    steps = after.decode_steps - before.decode_steps
    assert steps >= LONG
    assert 3 < (after.decode_tokens - before.decode_tokens) / steps <= MAX_RUNNING
    assert after.decode_s > before.decode_s


@real
async def test_an_abort_frees_the_engine_while_the_others_go_on(long_requests: LongRequests) -> None:
    await long_requests.until(idle)
    async with anyio.create_task_group() as group:
        ids = long_requests.start(5, group)
        # Ten blocks are more than the two that stay can ever have.
        before = await long_requests.until(lambda load: load.running == 5 and load.kv_cache_usage > 9.5 / CACHE_BLOCKS)
        await long_requests.engine.abort(ids[:3])
        after = await long_requests.until(lambda load: load.running != 5)
        assert after.running == 2
        assert after.waiting == 0
        assert after.kv_cache_usage < before.kv_cache_usage
        assert not any(i in long_requests.done for i in ids[3:]), "the others go on"
    assert [long_requests.done[i].finish_reason for i in ids[:3]] == [FinishReason.ABORT] * 3
    assert [len(long_requests.done[i].token_ids) for i in ids[3:]] == [LONG] * 2


@real
async def test_a_pause_that_clears_the_cache_is_no_pressure(long_requests: LongRequests) -> None:
    before = await long_requests.until(idle)
    async with anyio.create_task_group() as group:
        long_requests.start(4, group)
        await long_requests.until(lambda load: load.running == 4)
        await long_requests.engine.pause(PauseMode.KEEP, clear_cache=True)
        paused = await long_requests.until(lambda load: load.running == 0)
        assert paused.waiting == 4
        await long_requests.engine.resume()
    after = await long_requests.until(idle)
    assert after.preemptions == before.preemptions


@real
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # as in test_engine_death.py
async def test_of_an_idle_engine_a_killed_core_is_reported_at_once(long_requests: LongRequests) -> None:
    """Last in this module: it ends the engine."""
    await long_requests.until(idle)
    await kill_is_reported(long_requests.engine, long_requests.host, "VLLM::EngineCore", CORE_DIED)

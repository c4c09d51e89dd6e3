"""Engine processes that are killed, hang, or kill themselves, as real processes under a real supervisor, while
trajectories are sampled and weights are pushed: no trajectory is lost, none comes twice, none is changed."""

from __future__ import annotations

import random
import signal

import anyio
import pytest

from streamrl.base.messages import EngineOrder, Generate
from streamrl.base.run_events import EngineBack, EngineLost, KillEngine
from streamrl.base.stage_messages import Scored
from streamrl.base.types import FinishReason, token_array
from streamrl.comm import socket_options
from streamrl.comm.zmq_stream import zmq_receiver
from tests.engines.lost_engines_world import Controller, controlled
from tests.engines.recovery_process import POISON


async def tokens_made(one: Controller, name: str) -> None:
    """Until ``name`` samples something of what was launched."""
    engine = one.pool.attached[name]
    before = engine.load().generated_tokens
    while engine.load().generated_tokens == before:
        await anyio.sleep(0.01)


async def samples_with(one: Controller, name: str) -> set[int]:
    """Versions by which ``name``, and nobody else, samples now."""
    request = Generate(
        request_id=f"asked-of-{name}", token_ids=token_array([3]), max_tokens=20, seed=1, temperature=1.0
    )
    completion = await one.pool.attached[name].generate(request)
    assert completion.finish_reason is not FinishReason.ABORT
    return {span.policy_version for span in completion.version_spans}


async def test_requests_of_a_killed_engine_are_sampled_elsewhere() -> None:
    """Requests of a killed engine are sampled by the others, and its successor takes the live version."""
    async with controlled(2) as one:
        await one.launch(40)
        await tokens_made(one, "engine-1")
        one.kill("engine-1")
        await one.until(lambda: one.lost("engine-1") == 1)
        assert one.pool.serving == ("engine-0",) and sorted(one.pool.attached) == ["engine-0"]
        await one.push()  # nobody waits for it
        await one.until_serving(["engine-1"])
        assert await samples_with(one, "engine-1") == {one.live} == {1}
        lost, back = one.events
        assert isinstance(lost, EngineLost) and "its process is gone" in lost.reason and lost.requests > 0
        assert isinstance(back, EngineBack) and back.engine == "engine-1"
        assert one.processes.figures == {
            "engines/restarts_total": 1.0,
            "engines/lost_requests_total": float(lost.requests),
        }
        await one.push()
        assert await samples_with(one, "engine-1") == {2}, "later pushes reach it"
    one.assert_whole()


async def test_an_ending_host_does_not_keep_its_successors_orders() -> None:
    """A host that receives its successor's orders while it ends does not keep them."""
    async with controlled(2) as one:
        ended_pid = one.pid("engine-1")
        one.kill("engine-1")
        await one.until(lambda: one.lost("engine-1") == 1)
        while one.pid("engine-1") == ended_pid:
            await anyio.sleep(0.01)
        one.kill("engine-1", signal.SIGSTOP)  # on a busy machine the successor could be there first
        orders_at = one.endpoints["engine-1"][0]
        async with zmq_receiver(EngineOrder, orders_at, bind=False, name="engine-1.orders") as orders:
            while orders._end.peer is None:
                await anyio.sleep(0.01)
        one.kill("engine-1", signal.SIGCONT)
        await one.until_serving(["engine-1"])
        assert one.lost("engine-1") == 1
    one.assert_whole()


async def test_versions_and_requests_wait_without_an_engine() -> None:
    """While no engine is there, a version becomes live and requests wait."""
    async with controlled(1) as one:
        await one.launch(20)
        await tokens_made(one, "engine-0")
        one.kill("engine-0")
        await one.until(lambda: one.lost("engine-0") == 1)
        await one.push()
        await one.until_serving(["engine-0"])
        assert await samples_with(one, "engine-0") == {1}
        assert one.asked == [1], "it holds nothing that the announced delta is made on, and no push is to come"
    one.assert_whole()


@pytest.mark.parametrize("seed", range(3))
async def test_kills_at_any_moment_lose_nothing_and_double_nothing(seed: int) -> None:
    """Pushes, holds and requests go on while processes are killed, one or both at once, also while they start."""
    source = random.Random(seed)
    async with controlled(2, restarts=40, fatal_deaths=0) as one, anyio.create_task_group() as group:
        ended = anyio.Event()
        group.start_soon(keep_busy, one, source, ended)
        for _ in range(6):
            await anyio.sleep(source.uniform(0.0, 0.3))
            for name in source.choice([["engine-0"], ["engine-1"], ["engine-0", "engine-1"]]):
                one.kill(name)
        ended.set()
        await one.until_serving(["engine-0", "engine-1"])
        await one.push()
        await one.until_serving(["engine-0", "engine-1"])
        for name in one.names:
            assert await samples_with(one, name) == {one.live}
    assert any(isinstance(event, EngineLost) for event in one.events)
    one.assert_whole()


async def keep_busy(one: Controller, source: random.Random, ended: anyio.Event) -> None:
    while not ended.is_set():
        await one.launch(8)
        if source.random() < 0.5:
            await one.sync.pause()
            await one.launch(4)
        await one.push()
        await anyio.sleep(source.uniform(0.0, 0.1))


async def test_an_engine_that_stalls_is_ended_and_replaced() -> None:
    async with controlled(2, silence_timeout_s=5.0) as one:
        await one.launch(30)
        await tokens_made(one, "engine-1")
        pid = one.pid("engine-1")
        one.kill("engine-1", signal.SIGSTOP)
        await one.until(lambda: one.lost("engine-1") == 1)
        [order] = one.ordered
        assert isinstance(order, KillEngine) and order.pid == pid and "nothing was heard" in order.reason
        await one.until_serving(["engine-1"])
        assert one.pid("engine-1") != pid
    one.assert_whole()


async def test_a_stalled_engine_with_broken_streams_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose streams break first because it stalls is ended, too."""
    monkeypatch.setattr(socket_options, "stays_here", lambda _: False)
    monkeypatch.setattr(socket_options, "HEARTBEAT_INTERVAL_MS", 300)
    monkeypatch.setattr(socket_options, "HEARTBEAT_TIMEOUT_MS", 1500)
    async with controlled(1, silence_timeout_s=8.0) as one:
        await one.launch(30)
        await tokens_made(one, "engine-0")
        pid = one.pid("engine-0")
        one.kill("engine-0", signal.SIGSTOP)
        await one.until(lambda: one.lost("engine-0") == 1)
        assert not one.ordered, "it may come back"
        await one.until_serving(["engine-0"])
        [order] = one.ordered
        assert isinstance(order, KillEngine) and order.pid == pid and "did not come back within 8 s" in order.reason
    one.assert_whole()


async def test_a_healthy_engine_that_samples_nothing_is_ended() -> None:
    """An engine that says it is healthy and samples nothing is ended. What counts is whether requests get on, not what
    a host says of itself."""
    async with controlled(2, behaviour={"engine-1": "deaf"}, progress_timeout_s=5.0) as one:
        await one.launch(30)
        (one.supervisor.run_directory / "behaviour" / "engine-1").unlink()
        await one.until(lambda: one.lost("engine-1") == 1)
        assert "none of its requests made progress" in one.events[0].reason  # type: ignore[union-attr]
        await one.until_serving(["engine-1"])
    one.assert_whole()


async def test_a_request_that_engines_die_of_is_refused_in_the_end() -> None:
    """So may be others that were sampled at each of these deaths."""
    behaviour = {"engine-0": "poison", "engine-1": "poison"}
    async with controlled(2, behaviour=behaviour, restarts=9, fatal_deaths=3) as one:
        await one.launch(6, seeds=lambda index: POISON if index == 2 else 7000 + index)
        await one.until(lambda: len(one.outcomes) == 6)
        assert one.lost("engine-0") + one.lost("engine-1") == 3
        refused = {o.id.prompt_id: o.reason for o in one.outcomes if not isinstance(o, Scored)}
        assert "2.0.0 was being sampled when 3 engines died" in refused["p2"]
    one.assert_whole(refused=[POISON, *range(7000, 7006)])


async def test_an_order_to_kill_means_one_host_and_not_its_successor() -> None:
    async with controlled(1) as one:
        old = one.pid("engine-0")
        one.kill("engine-0")
        await one.until(lambda: one.lost("engine-0") == 1)
        await one.until_serving(["engine-0"])
        await one.order(KillEngine(engine="engine-0", reason="late", pid=old))
        await one.order(KillEngine(engine="engine-0", reason="late", older_than_s=300))
        assert await samples_with(one, "engine-0") == {0} and one.lost("engine-0") == 1

"""Orders of a controller that dies before they were carried out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import anyio
import msgspec
import pytest
from trials import PLANS, STAND_IN, Trial, lives, until

from streamrl.plan.topology import ProcessPlan, Role, Topology
from streamrl.supervise.supervisor import Supervisor
from streamrl.supervise.supervisor_orders import StartEngine, StopEngine

pytestmark = pytest.mark.asyncio
PATIENCE_S = 60.0


@pytest.mark.parametrize("sets", [False, True])
async def test_an_engine_that_was_being_stopped_serves_the_next_controller(
    trial: Callable[..., Trial], sets: bool
) -> None:
    one, second = trial(), ProcessPlan(role=Role.ENGINE, index=1, resting=sets)
    (one.directory / "behaviour" / "engine-1").write_text("serve")
    plans = tuple(msgspec.structs.replace(plan, restarts=1) if plan.role is not Role.REWARD else plan for plan in PLANS)
    topology = Topology(processes=(*plans, second), endpoints={})

    def started(name: str, start: int) -> bool:
        return (one.directory / "pids" / f"{name}.{start}").exists()

    hosts = Supervisor(topology, one.directory, one.sockets, entry=(str(STAND_IN),))
    async with hosts as supervisor, anyio.create_task_group() as tasks:
        await until(lambda: started("controller", 0) and started("engine-0", 0) and (sets or started("engine-1", 0)))
        tasks.start_soon(supervisor.watch)
        began = time.monotonic()
        for order in (StopEngine(engine="engine-0", patience_s=PATIENCE_S), StartEngine(engine="engine-1")):
            tasks.start_soon(supervisor.obey, order)  # the second waits for the first
        await until(lambda: "engine-0" in supervisor._resting)
        os.kill(one.pid("controller"), signal.SIGKILL)
        await until(lambda: started("controller", 1) and started("engine-0", 1))
        assert time.monotonic() - began < PATIENCE_S / 2, "whoever would have ended it is dead"
        assert lives(one.pid("engine-0", 1))
        assert started("engine-1", 0) is not sets, "an order of the one that died"
        await supervisor.stop(deadline_s=20)
    one.assert_nothing_left()

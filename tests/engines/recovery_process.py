"""A process of a run for tests of recovery: ``recovery_process.py <role> --index i --run-directory DIR``.

An engine serves a simulated engine over the real streams. ``DIR/behaviour/<name>``
says what else it does, when there is such a file:

poison   it dies of a request with the seed 666
deaf     it takes requests, says that it is well, and never samples a token
late     it never says hello

Every other role waits for SIGTERM."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio

from streamrl.base.messages import EngineEvent, EngineOrder, EngineReady, Generate
from streamrl.base.run_process import die_with_parent
from streamrl.base.types import Completion
from streamrl.engines.engine_process import serve_engine
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.engines.step_cost import StepCost
from streamrl.launch.roles import controller_streams
from streamrl.processes.run_role import leave, parse_arguments
from streamrl.recipe.topology import Role, read_topology

POISON = 666
LENGTHS = LengthMixture(median=60.0, sigma=0.5, long_share=0.0)


class Engine(SimulatedEngine):
    """Misbehaves as ``behaviour`` says."""

    def __init__(self, name: str, behaviour: str) -> None:
        step = StepCost(base_s=2e-3, per_running_s=0.027e-3)
        super().__init__(SimulationOptions(name=name, step=step, lengths=LENGTHS))
        self.behaviour = behaviour

    async def start(self) -> EngineReady:
        if self.behaviour == "late":
            await anyio.sleep_forever()
        return await super().start()

    async def generate(self, request: Generate) -> Completion:
        if self.behaviour == "poison" and request.seed == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.behaviour == "deaf":
            await anyio.sleep_forever()
        return await super().generate(request)


async def serve(name: str, directory: Path) -> None:
    topology = read_topology(directory)
    told = directory / "behaviour" / name
    engine = Engine(name, told.read_text() if told.exists() else "")
    streams = controller_streams(topology, name, ("orders", EngineOrder), ("completions", EngineEvent))
    await serve_engine(engine, streams)


def main() -> None:
    die_with_parent()
    plan, directory, _, _ = parse_arguments()
    if plan.role is Role.ENGINE:
        leave(plan, directory, lambda: anyio.run(serve, plan.name, directory))
    signal.pause()


if __name__ == "__main__":
    main()

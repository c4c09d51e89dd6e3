"""A controller's engines, as real processes under a real supervisor: the test is the controller."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import anyio
import anyio.abc
from builders.stages import episodes_on

from streamrl.base.messages import Generate, WeightAnnouncement, WeightSource
from streamrl.base.run_events import EngineBack, EngineLost, SupervisorOrder
from streamrl.base.stage_messages import EndedOutcome, LaunchTrajectory, Scored, TrajectoryOutcome, TrajectoryPaused
from streamrl.base.types import Prompt, TokenArray, TrajectoryId, token_array
from streamrl.engines.elastic.engine_processes import EngineProcesses
from streamrl.engines.pool import EnginePool
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.simulated.engine import SimulationOptions
from streamrl.engines.simulated.text import UniformText
from streamrl.processes.engine_orders import EngineOrders
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.scheduling import InFlight
from streamrl.recipe.sections import Engines
from streamrl.recipe.topology import ProcessPlan, Role, Topology
from tests.engines.recovery_process import LENGTHS

PROCESS = Path(__file__).with_name("recovery_process.py")
MAX_TOKENS = 200


def announced(version: int, base: int | None) -> WeightAnnouncement:
    source = WeightSource(
        rank=0, endpoint="", manifest_digest="", payload_bytes=8, changed_elements=1, total_elements=4
    )
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=1000 + version, sources=(source,))


def topology_of(directory: Path, count: int, restarts: int) -> Topology:
    engines = [ProcessPlan(role=Role.ENGINE, index=index, restarts=restarts) for index in range(count)]
    endpoints = {
        f"{plan.name}.{stream}": f"ipc://{directory}/{plan.name}.{stream}"
        for plan in engines
        for stream in ("orders", "completions")
    }
    return Topology(processes=(ProcessPlan(role=Role.CONTROLLER, index=0), *engines), endpoints=endpoints)


class Controller:
    """What of a controller deals with engines. ``live``: the version that was pushed last."""

    def __init__(self, topology: Topology, supervisor: Supervisor, settings: Engines) -> None:
        self.names = [plan.name for plan in topology.processes if plan.role is Role.ENGINE]
        self.supervisor = supervisor
        self.orders_of_engines = EngineOrders(supervisor)
        at = topology.endpoint
        self.endpoints = {name: (at(name, "orders"), at(name, "completions")) for name in self.names}
        self.processes = EngineProcesses(self.endpoints, settings, order=self.order, emit=self.emit)
        self.ordered: list[SupervisorOrder] = []
        self.events: list[EngineLost | EngineBack] = []
        self.outcomes: list[EndedOutcome] = []
        self.launched: dict[TrajectoryId, int] = {}
        self.live = -1
        self.asked: list[int] = []
        self.changed, self.closing = anyio.Event(), anyio.Event()

    async def order(self, order: SupervisorOrder) -> None:
        self.ordered.append(order)
        await self.orders_of_engines.handle(order)

    async def emit(self, event: EngineLost | EngineBack) -> None:
        self.events.append(event)
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def anchor(self, policy_version: int) -> WeightAnnouncement:
        self.asked.append(policy_version)
        return announced(policy_version, None)

    async def connect(self, group: anyio.abc.TaskGroup) -> EnginePool:
        await group.start(self.processes.run)
        self.pool, self.ready = await self.processes.start(self.names)
        self.sync = WeightSync(
            self.pool.attached,
            self.anchor,
            in_flight=InFlight.KEEP,
            timeout_s=300,
            on_failure=self.processes.on_failure,
        )
        self.processes.set_weight_sync(self.sync)
        self.live = 0
        await self.sync.push(announced(0, None))
        self.episodes = episodes_on(self.pool, MAX_TOKENS)
        await group.start(self._run)
        return self.pool

    async def _run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self.episodes.running():
            task_status.started()
            await self.closing.wait()

    async def _take(self, outcome: TrajectoryOutcome) -> None:
        assert not isinstance(outcome, TrajectoryPaused)
        self.outcomes.append(outcome)
        self.notify()

    async def launch(self, count: int, *, seeds: Callable[[int], int] = lambda index: 7000 + index) -> None:
        for _ in range(count):
            index = len(self.launched)
            identity = TrajectoryId(prompt_id=f"p{index}", group_id=index, sample=0, attempt=0)
            self.launched[identity] = seeds(index)
            prompt = Prompt(prompt_id=identity.prompt_id, token_ids=prompt_tokens(index), columns={})
            order = LaunchTrajectory(id=identity, prompt=prompt, group_size=1, seed=seeds(index))
            self.episodes.launch(order, self._take)

    async def push(self) -> None:
        self.live += 1
        await self.sync.push(announced(self.live, self.live - 1))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.changed.wait()

    async def until_serving(self, names: Sequence[str]) -> None:
        await self.until(lambda: set(names) <= set(self.pool.serving))

    def lost(self, name: str) -> int:
        return sum(isinstance(event, EngineLost) and event.engine == name for event in self.events)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.supervisor.children[name].process.send_signal(number)

    def pid(self, name: str) -> int:
        return self.supervisor.children[name].process.pid

    async def close(self) -> None:
        self.closing.set()
        await self.until(lambda: len(self.outcomes) >= len(self.launched))
        await self.processes.aclose()
        await self.pool.aclose()

    def assert_whole(self, *, refused: Sequence[int] = ()) -> None:
        """Every trajectory came back once, as an engine that nothing happens to samples it."""
        identities = [o.outcome.trajectory.id if isinstance(o, Scored) else o.id for o in self.outcomes]
        assert sorted(identities, key=str) == sorted(self.launched, key=str)
        for outcome in self.outcomes:
            if isinstance(outcome, Scored):
                trajectory = outcome.outcome.trajectory
                assert trajectory.segments[0].token_ids == undisturbed(self.launched[trajectory.id])
            else:
                assert self.launched[outcome.id] in refused, outcome


def prompt_tokens(index: int) -> TokenArray:
    return token_array([2 + index % 7, 3, 5, 8, 2 + index % 11])


@cache
def undisturbed(seed: int) -> TokenArray:
    """The simulated engine's tokens are a function of the seed."""
    options = SimulationOptions()
    text = UniformText(LENGTHS, vocabulary=options.vocabulary, end_token=options.end_token)
    request = Generate(request_id="r", token_ids=prompt_tokens(0), max_tokens=MAX_TOKENS, seed=seed, temperature=1.0)
    return text.draft(request, options.max_model_len).token_ids


@asynccontextmanager
async def world(
    count: int = 2, *, restarts: int = 5, behaviour: dict[str, str] | None = None, **settings: float
) -> AsyncIterator[tuple[Topology, Supervisor, Engines]]:
    """A supervisor that starts ``count`` engine processes again, each ``restarts`` times."""
    with tempfile.TemporaryDirectory(prefix="srl") as root:
        directory, sockets = Path(root) / "run", Path(root) / "s"
        (directory / "behaviour").mkdir(parents=True)
        for name, word in (behaviour or {}).items():
            (directory / "behaviour" / name).write_text(word)
        topology = topology_of(sockets, count, restarts)
        supervisor = Supervisor(topology, directory, sockets, entry=(str(PROCESS),))
        async with supervisor, anyio.create_task_group() as watching:
            watching.start_soon(supervisor.watch)
            yield topology, supervisor, Engines(**settings)  # type: ignore[arg-type]
            await supervisor.kill()


@asynccontextmanager
async def controlled(count: int = 2, **options: object) -> AsyncIterator[Controller]:
    """``world`` with one controller, which sees everything that it launched come back."""
    async with world(count, **options) as parts, anyio.create_task_group() as group:  # type: ignore[arg-type]
        one = Controller(*parts)
        await one.connect(group)
        yield one
        await one.close()

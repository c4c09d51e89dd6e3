"""The way in from Python: ``async with Pipeline(recipe) as pipeline: async for step in pipeline: ...``

``Pipeline`` is the parent's side of a run: it checks the recipe, makes the run directory, starts and watches
the processes, and hands on what the controller says. It needs neither torch nor vllm.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from streamrl.comm.control_socket import serving_control
from streamrl.comm.reward_changes import RewardReply
from streamrl.comm.stream import ReceiveStream
from streamrl.comm.supervisor_orders import ParentMessage, StartEngine, StopEngine, SupervisorOrder
from streamrl.comm.zmq_stream import zmq_receiver
from streamrl.config.load import dump_recipe, load_recipe
from streamrl.config.recipe import Recipe
from streamrl.config.topology import control_socket, plan_topology, rewards_endpoint
from streamrl.errors import ProcessDied, StreamBroken
from streamrl.messages import RunEvent, RunFinished, RunProgress, StepFinished
from streamrl.preflight import preflight, resumed
from streamrl.processes.control_operations import ControlOperations
from streamrl.processes.supervisor import Supervisor
from streamrl.rewards.attachments import RewardAttachments
from streamrl.rewards.kept_rewards import KeptRewards, rewards_file

PROGRESS_BACKLOG = 1000
"""Events that a slow reader may leave unread before progress is dropped; steps never are."""


class Pipeline:
    """One run. Raises ``RecipeError`` on entering when something is wrong with it, ``ProcessDied`` from the iteration
    when a process ends that should not have. Leaving early drains the run; leaving with an exception kills it."""

    def __init__(self, recipe: Recipe | str | Path, *, drain_s: float = 60.0) -> None:
        self.recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        self.run_directory = Path()
        self._drain_s = drain_s
        self._failure: ProcessDied | None = None
        self._ended = anyio.Event()
        self._rewards = RewardAttachments()
        self._open = AsyncExitStack()
        self._watching = anyio.CancelScope()
        self._receiving = anyio.CancelScope()
        self._obeying = anyio.CancelScope()
        self._changing = anyio.CancelScope()

    async def __aenter__(self) -> Self:
        self.recipe, kept = await anyio.to_thread.run_sync(resumed, self.recipe)
        await anyio.to_thread.run_sync(preflight, self.recipe, kept)
        self.run_directory = await anyio.to_thread.run_sync(_make_run_directory, self.recipe, kept)
        # Short, because a socket path has at most 107 bytes, whatever the run directory is called.
        sockets = Path(tempfile.mkdtemp(prefix="streamrl-"))
        self._give, self._take = anyio.create_memory_object_stream[RunEvent](math.inf)
        self._order, self._ordered = anyio.create_memory_object_stream[SupervisorOrder](math.inf)
        topology = plan_topology(self.recipe, sockets)
        self._supervisor = Supervisor(topology, self.run_directory, sockets)
        async with AsyncExitStack() as entered:
            for stream in (self._give, self._take, self._order, self._ordered):
                entered.callback(stream.close)
            tasks = await entered.enter_async_context(anyio.create_task_group())
            await entered.enter_async_context(self._supervisor)
            steps = await entered.enter_async_context(
                zmq_receiver(
                    ParentMessage, topology.endpoint("controller", "steps"), bind=True, name="controller.steps"
                )
            )
            operations = ControlOperations(self._rewards)
            await entered.enter_async_context(
                serving_control(control_socket(topology), self.run_directory, operations.carry_out)
            )
            tasks.start_soon(self._watch)
            tasks.start_soon(self._receive, steps)
            tasks.start_soon(self._obey)
            tasks.start_soon(self._change_rewards, rewards_endpoint(topology))
            self._open = entered.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._ended.is_set():
            self.drain()
            with anyio.move_on_after(self._drain_s):
                await self._ended.wait()
        await self._supervisor.kill()
        self._watching.cancel()
        self._receiving.cancel()
        self._obeying.cancel()
        self._changing.cancel()
        self._rewards.close()
        await self._open.__aexit__(None, None, None)

    @property
    def rewards(self) -> RewardAttachments:
        """Attach, replace or detach rewards while the run goes on."""
        return self._rewards

    def drain(self) -> None:
        """Ask the run to finish what is closed, save, and end. The iteration goes on until it did."""
        self._supervisor.request_drain()

    async def events(self) -> AsyncIterator[RunEvent]:
        """Everything the run says, from ``RunStarted`` to ``RunFinished``. Raises ``ProcessDied``."""
        async for event in self._take:
            yield event
            if isinstance(event, RunFinished):
                break
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[StepFinished]:
        """One item for each optimizer step whose version is live."""
        async for event in self.events():
            if isinstance(event, StepFinished):
                yield event

    async def _watch(self) -> None:
        with self._watching:
            try:
                await self._supervisor.watch()
            except ProcessDied as died:
                self._failure = died
                await self._supervisor.kill()
        self._ended.set()
        self._rewards.close()
        self._give.close()

    async def _receive(self, steps: ReceiveStream[ParentMessage]) -> None:
        with self._receiving:
            try:
                async for event in steps:
                    if isinstance(event, StopEngine | StartEngine):
                        await self._order.send(event)
                        continue
                    if isinstance(event, RewardReply):
                        self._rewards.answered(event)
                        continue
                    backlog = self._give.statistics().current_buffer_used
                    if not isinstance(event, RunProgress) or backlog < PROGRESS_BACKLOG:
                        await self._give.send(event)
            except (StreamBroken, anyio.ClosedResourceError):
                return  # the controller is gone, and the supervisor says why

    async def _change_rewards(self, endpoint: str) -> None:
        with self._changing:
            await self._rewards.run(endpoint)

    async def _obey(self) -> None:
        """One after the other: an engine is started again only when its last host and all it started are gone."""
        with self._obeying:
            async for order in self._ordered:
                if isinstance(order, StopEngine):
                    await self._supervisor.stop_engine(order.engine, patience_s=order.patience_s)
                else:
                    self._supervisor.start_engine(order.engine)


def _make_run_directory(recipe: Recipe, kept: KeptRewards | None) -> Path:
    """``<directory>/<name>-<time>``, with the resolved recipe and what a resumed run ``kept`` of its rewards; and the
    link ``latest`` beside it."""
    parent = Path(recipe.run.directory).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    stem = f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        directory = parent / f"{stem}{suffix}"
        if not directory.exists():
            break
    directory.mkdir()
    (directory / "recipe.toml").write_text(dump_recipe(recipe))
    for name, content in (rewards_file(kept) if kept else {}).items():
        (directory / name).write_bytes(content)
    latest = parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(directory.name)
    return directory

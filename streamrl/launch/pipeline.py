"""The way in from Python: ``async with Pipeline(recipe) as pipeline: async for step in pipeline: ...``

``Pipeline`` is the parent's side of a run: it checks the recipe, makes the run directory, starts and watches
the processes, and hands on what the controller says. It needs neither torch nor vllm."""

from __future__ import annotations

import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import anyio
import anyio.to_thread
from msgspec import structs

from streamrl.base.atomic_files import make_directory, write_durable, write_link
from streamrl.base.errors import ProcessDied, RecipeError, StreamBroken, StreamRLError
from streamrl.base.run_events import (
    KillEngine,
    RunEvent,
    RunFinished,
    RunProgress,
    StartEngine,
    StepFinished,
    StopEngine,
)
from streamrl.comm.stream import ReceiveStream
from streamrl.comm.zmq_stream import zmq_receiver
from streamrl.contracts import Observer, Sink
from streamrl.launch.control_protocol import ControlAnswer, ControlOperation, Draining, DrainRun, ParentMessage
from streamrl.launch.control_socket import serving_control
from streamrl.launch.run_directory import NOT_RESUMED, lock_run, refuse_changes, write_changed_recipe, write_inputs
from streamrl.launch.run_record import refuse_lost_journal
from streamrl.launch.steering.steering_messages import SteeringReply, SteeringRequest
from streamrl.launch.steering.steering_requests import SteeringRequests, steering_endpoint
from streamrl.observe.user_calls import UserCalls, close_all
from streamrl.prepare.gpu_demand import gpu_placement
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.prepare.preflight import preflight, recipe_of_resumed_run, with_checkpoint_rewards
from streamrl.prepare.run_length import with_steps_of_epochs
from streamrl.processes.clean_up import remove_half_written, remove_killed_life
from streamrl.processes.cluster.opened import hosts_of, open_launcher
from streamrl.processes.crash_bundle import write_crash_bundle
from streamrl.processes.engine_orders import EngineOrders
from streamrl.processes.exit_reason import failures
from streamrl.processes.local import SOCKET_PREFIX
from streamrl.processes.supervisor import Supervisor
from streamrl.processes.watchdog import ask_for_stacks
from streamrl.recipe.cells.cell_code import CELLS, name_of_code
from streamrl.recipe.rules.load import dump_recipe, load_recipe, resolve_function
from streamrl.recipe.schedules.schedule import horizon_notices
from streamrl.recipe.sections import JournalKind, Recipe
from streamrl.recipe.topology import control_socket, plan_topology, rewards_endpoint
from streamrl.rewards.attachments import RewardAttachments
from streamrl.rewards.reward_messages import ListRewards, RewardReply, RewardRequest
from streamrl.rewards.rewards_snapshot import RewardsSnapshot, read_rewards_file, rewards_file

log = logging.getLogger(__name__)

PROGRESS_BACKLOG = 1000
"""Events that a slow reader may leave unread before progress is dropped; steps never are."""

GRACE_S = 1.0
"""How long processes have to end by themselves when a run is over. One that is cut short has waited long enough."""
STACKS_S = 0.2
"""How long processes have to write their stacks to their logs before a run that failed ends them."""
LAST_EVENTS_S = 2.0
"""How long the last events of a controller that has ended well may take to be read."""


class Pipeline:
    """One run of a recipe: the path of a file, a ``Recipe``, or its sections, in one mapping or by keyword, in which a
    reward, a policy or a source of prompts may be a function, also of a notebook's cell.

    ``sinks`` are given every event of the run, in this process. ``observers``, classes or their names, are called in
    the controller's process, beside those of ``run.advanced.observers``. Both have threads of their own
    (docs/extending.md).

    Raises ``RecipeError`` on entering when something is wrong with the recipe, ``ProcessDied`` from the iteration when
    a process ends that should not have. Leaving early drains the run; leaving with an exception kills it."""

    def __init__(
        self,
        recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
        *,
        sinks: Sequence[Sink] = (),
        observers: Sequence[type[Observer] | str] = (),
        drain_s: float = 60.0,
        **sections: Any,
    ) -> None:
        if recipe is not None and sections:
            raise RecipeError(f"a recipe and sections beside it ({', '.join(sections)}): give one of them")
        self.recipe = recipe if isinstance(recipe, Recipe) else load_recipe(sections if recipe is None else recipe)
        cells = Path(self.recipe.run.directory) / CELLS
        if observers:
            named = [one if isinstance(one, str) else name_of_code(one, cells) for one in observers]
            names = tuple(resolve_function(name, Path.cwd()) for name in named)
            run = structs.replace(self.recipe.run, observers=(*self.recipe.run.observers, *names))
            self.recipe = structs.replace(self.recipe, run=run)
        self.run_directory = Path()
        self._sinks = tuple(sinks)
        self._sink_calls: list[UserCalls] = []
        self._resumes = False
        self._despite_changes = False
        self._changed_now: Set[str] = frozenset()
        self._lock: IO[bytes] | None = None
        self._drain_s = drain_s
        self._failure: ProcessDied | None = None
        self._ended = anyio.Event()
        self._heard = anyio.Event()
        self._rewards = RewardAttachments(partial(name_of_code, directory=cells))
        self._steering = SteeringRequests()
        self._open = AsyncExitStack()
        self._conversation = anyio.CancelScope()
        self._bound = anyio.Event()

    @classmethod
    def of_run(
        cls,
        run_directory: Path,
        *,
        overrides: Sequence[str] = (),
        despite_changes: bool = False,
        sinks: Sequence[Sink] = (),
        drain_s: float = 60.0,
    ) -> Self:
        """The run in ``run_directory``, to go on where its journal ends, however it ended. ``overrides``: such as
        ``run.steps=200``, which is kept as the run's from now on. Raises ``RecipeError``, here and on entering: where
        it runs, or was begun with other data, another model, other code or other settings (unless
        ``despite_changes``; ``run.steps`` may be overridden)."""
        pipeline = cls(recipe_of_run(run_directory, overrides), sinks=sinks, drain_s=drain_s)
        pipeline.run_directory = run_directory.resolve()
        pipeline._resumes = True
        pipeline._despite_changes = despite_changes
        pipeline._changed_now = {override.partition("=")[0].strip() for override in overrides}
        return pipeline

    def __repr__(self) -> str:
        return f"<Pipeline {self.recipe.run.name!r} in {self.run_directory}>"

    async def __aenter__(self) -> Self:
        try:
            await self._open_directory()
            return await self._start()
        except BaseException as error:
            self._let_go()
            for leaf in failures(error):
                if isinstance(leaf, OSError) and leaf.filename is None:  # of a write
                    leaf.filename = str(self.run_directory if self._resumes else self.recipe.run.directory)
            raise

    async def _open_directory(self) -> None:
        """Check the recipe, and make the directory of the run or take hold of it."""
        to_thread = anyio.to_thread.run_sync
        self.recipe = await to_thread(with_hub_folders, self.recipe)
        if self._resumes:
            self._lock = lock_run(self.run_directory)
            await to_thread(refuse_lost_journal, self.run_directory)
            for failure in await to_thread(remove_killed_life, self.run_directory):
                log.warning("%s", failure)
            for change in await to_thread(self._changes):
                log.warning("%s", change)
            await to_thread(preflight, *await to_thread(recipe_of_resumed_run, self.recipe, self.run_directory))
            if self._changed_now:
                await to_thread(write_changed_recipe, self.run_directory, self.recipe)
            return
        self.recipe, _ = await to_thread(with_steps_of_epochs, self.recipe)
        self.recipe, kept = await to_thread(with_checkpoint_rewards, self.recipe)
        await to_thread(preflight, self.recipe, kept)
        await hosts_of(self.recipe)
        self.run_directory = await to_thread(_make_run_directory, self.recipe, kept)
        self._lock = lock_run(self.run_directory)

    def _changes(self) -> list[str]:
        changes = refuse_changes(self.run_directory, self.recipe, force=self._despite_changes, chosen=self._changed_now)
        return [*changes, *horizon_notices(recipe_of_run(self.run_directory), self.recipe)]

    def _let_go(self) -> None:
        self._rewards.close()
        self._steering.close()
        if self._lock is not None:
            self._lock.close()

    async def _start(self) -> Self:
        sockets = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX))  # short: a socket path has at most 107 bytes
        self._sender, self._receiver = anyio.create_memory_object_stream[RunEvent](math.inf)
        topology = gpu_placement(self.recipe).placed(plan_topology(self.recipe, sockets))
        async with AsyncExitStack() as entered:
            opened = open_launcher(self.recipe, self.run_directory, sockets, write_changed_recipe)
            launcher = await entered.enter_async_context(opened)
            make = partial(Supervisor, topology, self.run_directory, sockets, launcher=launcher)
            self._supervisor = make(resumes=self._resumes, metrics=self.recipe.metrics)
            self._supervisor.before_resume.append(self._await_controller)
            self._orders = EngineOrders(self._supervisor)
            launcher.on_join = self._orders.start_retired
            self._sink_calls = [UserCalls(sink, f"sink {type(sink).__name__}") for sink in self._sinks]
            entered.push_async_callback(close_all, self._sink_calls, "close")
            for stream in (self._sender, self._receiver):
                entered.callback(stream.close)
            await entered.enter_async_context(self._supervisor)
            await entered.enter_async_context(
                serving_control(control_socket(topology), self.run_directory, self._carry_out)
            )
            self._tasks = await entered.enter_async_context(anyio.create_task_group())
            self._tasks.start_soon(self._watch)
            self._tasks.start_soon(self._receive, topology.endpoint("controller", "steps"))
            self._tasks.start_soon(self._rewards.run, rewards_endpoint(topology))
            self._tasks.start_soon(self._steering.run, steering_endpoint(topology))
            self._open = entered.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._ended.is_set():
                self.drain()
                with anyio.move_on_after(self._drain_s):
                    await self._ended.wait()
            await self._supervisor.kill(GRACE_S if kind is None else 0.0)
            with anyio.CancelScope(shield=True):
                for failure in await anyio.to_thread.run_sync(remove_half_written, self.run_directory):
                    log.warning("%s", failure)
            self._tasks.cancel_scope.cancel()
            self._rewards.close()
            await self._open.__aexit__(None, None, None)
        finally:
            self._let_go()

    @property
    def rewards(self) -> RewardAttachments:
        """Attach, replace or detach rewards while the run goes on."""
        return self._rewards

    @property
    def sink_errors(self) -> int:
        """Calls of ``sinks`` that raised, and those that were not made because a sink was too far behind."""
        return sum(calls.errors + calls.dropped for calls in self._sink_calls)

    def drain(self) -> None:
        """Ask the run to finish what is closed, save, and end. The iteration goes on until it did."""
        self._supervisor.request_drain()

    async def events(self) -> AsyncIterator[RunEvent]:
        """Everything the run says, from ``RunStarted`` to ``RunFinished``. Raises ``ProcessDied``."""
        async for event in self._receiver:
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

    async def _carry_out(self, operation: ControlOperation) -> ControlAnswer:
        if isinstance(operation, SteeringRequest):
            return await self._steering.carry_out(operation, self._supervisor)
        return await carry_out(self._rewards, self.drain, operation)

    async def _watch(self) -> None:
        try:
            await self._supervisor.watch()
            with anyio.move_on_after(LAST_EVENTS_S):  # of a controller that has ended, they may not be read yet
                await self._heard.wait()
        except ProcessDied as died:
            await self._note_failure(died)
        finally:
            self._ended.set()
            self._rewards.close()
            self._steering.close()
            self._sender.close()

    async def _note_failure(self, died: ProcessDied) -> None:
        """End what is left, and put what tells why into one file."""
        if ask_for_stacks(os.getpid()):
            await anyio.sleep(STACKS_S)
        await self._supervisor.kill()
        note = await anyio.to_thread.run_sync(_crash_note, self.run_directory, str(died), abandon_on_cancel=True)
        self._failure = ProcessDied(f"{died}\n{note}")

    async def _receive(self, endpoint: str) -> None:
        """Receive the events of the controller and of its successors."""
        while not self._heard.is_set():
            with anyio.CancelScope() as self._conversation:
                async with zmq_receiver(ParentMessage, endpoint, bind=True, name="controller.steps") as steps:
                    self._bound.set()
                    await self._listen(steps)
            if not self._conversation.cancelled_caught:
                self._heard.set()

    async def _await_controller(self) -> None:
        """Listen to the next controller, and no more to the one that died, before the run is resumed."""
        self._bound = anyio.Event()
        self._conversation.cancel()
        self._rewards.controller_replaced()
        self._steering.controller_replaced()
        await self._bound.wait()

    async def _listen(self, steps: ReceiveStream[ParentMessage]) -> None:
        try:
            async for event in steps:
                if isinstance(event, StopEngine | StartEngine | KillEngine):
                    self._tasks.start_soon(self._orders.handle, event)
                    continue
                if isinstance(event, RewardReply | SteeringReply):
                    (self._rewards if isinstance(event, RewardReply) else self._steering).answered(event)
                    continue
                if isinstance(event, RunFinished):
                    self._supervisor.run_finished()
                for calls in self._sink_calls:
                    calls.call("record", event)
                backlog = self._sender.statistics().current_buffer_used
                if not isinstance(event, RunProgress) or backlog < PROGRESS_BACKLOG:
                    await self._sender.send(event)
        except anyio.ClosedResourceError:
            return
        except StreamBroken:
            # The controller is gone, and the supervisor says why, or starts another one.
            await anyio.sleep_forever()


async def carry_out(
    rewards: RewardAttachments, drain: Callable[[], None], operation: RewardRequest | DrainRun
) -> ControlAnswer:
    """Carry out an operation of the control socket. Raises ``StreamRLError`` (``RecipeError`` where what is asked for
    is wrong): then nothing was done."""
    if isinstance(operation, DrainRun):
        drain()
        return Draining()
    return await rewards.attached() if isinstance(operation, ListRewards) else await rewards.change(operation)


def recipe_of_run(run_directory: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run that can go on, with ``overrides``. Raises ``RecipeError``."""
    path = run_directory / "recipe.toml"
    recipe = load_recipe(path, overrides) if path.is_file() else None
    if recipe is None or recipe.run.journal is JournalKind.NONE:
        remedy = "name the directory of a run that keeps a journal (run.journal), such as runs/latest"
        raise RecipeError(f"{run_directory} has no journal to go on from: {remedy}", outcome=NOT_RESUMED)
    return recipe


def _crash_note(run_directory: Path, failure: str) -> str:
    """Write the crash bundle. Returns the line for the user; a failure to write it hides no other."""
    try:
        kept = read_rewards_file(run_directory)
        bundle = write_crash_bundle(run_directory, failure, rewards=kept.rewards if kept else ())
    except (OSError, StreamRLError) as error:  # unread rewards may have secrets: better no bundle than one with them
        return f"no crash bundle could be written: {error}"
    return f"crash bundle: {bundle} (streamrl show {bundle})"


def _make_run_directory(recipe: Recipe, kept: RewardsSnapshot | None) -> Path:
    """``<directory>/<name>-<time>``, with the resolved recipe and what a resumed run ``kept`` of its rewards; and the
    link ``latest`` beside it. Durable when it returns: a journal without a recipe cannot be gone on with."""
    parent = Path(recipe.run.directory).absolute()
    make_directory(parent)
    directory = _unused_directory(parent / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    write_inputs(directory, recipe)
    for name, content in (rewards_file(kept) if kept else {}).items():
        write_durable(directory / name, content)
    write_durable(directory / "recipe.toml", dump_recipe(recipe).encode())  # last: with a recipe it can be resumed
    write_link(parent / "latest", directory.name)
    return directory


def _unused_directory(stem: Path) -> Path:
    """Make ``stem``, or one with a number where another run began in the same second, this moment perhaps."""
    for number in itertools.count(1):
        directory = stem.with_name(stem.name if number == 1 else f"{stem.name}-{number}")
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)  # recipe, prompts, completions and weights are for this user alone
            break
    return directory

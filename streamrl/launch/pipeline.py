"""The Python interface of a run: ``async with Pipeline(recipe) as pipeline: async for step in pipeline: ...``

``streamrl train``, ``resume`` and ``compare`` use it in the process of the command, user programs in their own
process: this process is the parent of a run. ``Pipeline`` checks the recipe, makes the run directory, starts and
watches the processes, and yields the events of the controller. It needs neither torch nor vllm."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import AsyncExitStack, suppress
from functools import partial
from logging import getLogger
from math import inf
from os import getpid
from pathlib import Path
from typing import IO, Any, Self

import anyio
import anyio.to_thread
from anyio import (
    CancelScope,
    ClosedResourceError,
    Event,
    create_memory_object_stream,
    create_task_group,
    move_on_after,
    sleep,
    sleep_forever,
)
from msgspec.structs import replace

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
from streamrl.launch.control_protocol import (
    ControlAnswer,
    ControlOperation,
    Draining,
    DrainRun,
    ParentMessage,
    SteeringReply,
    SteeringRequest,
)
from streamrl.launch.control_socket import serving_control
from streamrl.launch.run_directory import NOT_RESUMED, lock_run, refuse_changes, write_changed_recipe, write_inputs
from streamrl.launch.run_record import refuse_lost_journal
from streamrl.launch.steering.steering_requests import SteeringRequests, steering_endpoint
from streamrl.observe.user_calls import UserCalls, close_all
from streamrl.prepare.adapter_sync import with_adapter_sync
from streamrl.prepare.gpu_placement import gpu_placement
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.prepare.preflight import preflight, recipe_of_resumed_run, with_checkpoint_rewards
from streamrl.prepare.run_length import with_steps_of_epochs
from streamrl.processes.clean_up import remove_half_written, remove_killed_life
from streamrl.processes.cluster.open_launcher import hosts_of, open_launcher
from streamrl.processes.crash_bundle import write_crash_bundle
from streamrl.processes.engine_orders import EngineOrders
from streamrl.processes.exit_reason import failures
from streamrl.processes.local_launcher import SOCKET_PREFIX
from streamrl.processes.supervisor import Supervisor
from streamrl.processes.watchdog import ask_for_stacks
from streamrl.recipe.cells.cell_code import CELLS, name_of_code
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe, resolve_function
from streamrl.recipe.schedules.schedule import changed_rate_notices
from streamrl.recipe.sections import JournalKind, Recipe
from streamrl.recipe.topology import control_socket, plan_topology, rewards_endpoint
from streamrl.rewards.attachments import RewardAttachments
from streamrl.rewards.reward_messages import ListRewards, RewardReply, RewardRequest
from streamrl.rewards.rewards_snapshot import RewardsSnapshot, read_rewards_file, rewards_file

log = getLogger(__name__)

PROGRESS_BACKLOG = 1000
"""Events that a slow reader may leave unread before progress is dropped; steps never are."""

GRACE_S = 1.0
"""How long processes have to end by themselves when a run is over. A run that is killed does not wait."""
STACKS_S = 0.2
"""How long processes have to write their stacks to their logs before they are ended after a failure."""
LAST_EVENTS_S = 2.0
"""How long the last events of a controller that has ended well may take to be read."""


class Pipeline:
    """One run of a recipe: the path of a file, a ``Recipe``, or its sections, in one mapping or by keyword, in which a
    reward, a policy or a source of prompts may be a function, also of a notebook's cell.

    ``sinks``: sinks that get every event of the run, in this process. ``observers``: classes of observers or their
    names, called in the controller's process, in addition to ``run.advanced.observers``. Both run in their own threads
    (docs/python.md). ``drain_s``: longest time for draining when the body is left early.

    Raises ``RecipeError`` on entering when the recipe is wrong, ``ProcessDied`` from the iteration when a process ends
    that should not have. Leaving early drains the run; leaving with an exception kills it."""

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
        if isinstance(recipe, Recipe):
            self.recipe = recipe
        else:
            self.recipe = load_recipe(sections if recipe is None else recipe)
        cells = Path(self.recipe.run.directory) / CELLS
        if observers:
            # ``name_of_code`` writes the code of a notebook's cell to a file in ``cells``.
            names = [observer if isinstance(observer, str) else name_of_code(observer, cells) for observer in observers]
            resolved_names = tuple(resolve_function(name, Path.cwd()) for name in names)
            run = replace(self.recipe.run, observers=(*self.recipe.run.observers, *resolved_names))
            self.recipe = replace(self.recipe, run=run)
        self.run_directory = Path()
        self._sinks = tuple(sinks)
        self._sink_calls: list[UserCalls] = []
        self._resumes = False
        self._despite_changes = False
        self._overridden_settings: Set[str] = frozenset()
        self._lock: IO[bytes] | None = None
        self._drain_s = drain_s
        self._failure: ProcessDied | None = None
        self._run_over = Event()
        self._all_events_received = Event()
        self._rewards = RewardAttachments(partial(name_of_code, directory=cells))
        self._steering = SteeringRequests()
        self._resources = AsyncExitStack()
        self._steps_scope = CancelScope()  # of the stream from the present controller
        self._steps_bound = Event()

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
        """The run in ``run_directory``, which goes on where its journal ends, whatever ended it. ``overrides``: changed
        settings, such as ``run.steps=200``, which the run keeps. ``despite_changes``: go on also with other data,
        another model, other code or other settings than at the start. Raises ``RecipeError``, here and on entering,
        where the run is running, or its inputs have changed (``run.steps`` may be overridden)."""
        pipeline = cls(recipe_of_run(run_directory, overrides), sinks=sinks, drain_s=drain_s)
        pipeline.run_directory = run_directory.resolve()
        pipeline._resumes = True
        pipeline._despite_changes = despite_changes
        pipeline._overridden_settings = {override.partition("=")[0].strip() for override in overrides}
        return pipeline

    def __repr__(self) -> str:
        return f"<Pipeline {self.recipe.run.name!r} in {self.run_directory}>"

    async def __aenter__(self) -> Self:
        try:
            await self._open_directory()
            return await self._start()
        except BaseException as error:
            self._release()
            for leaf in failures(error):
                if isinstance(leaf, OSError) and leaf.filename is None:  # an error of a write has no file name
                    leaf.filename = str(self.run_directory if self._resumes else self.recipe.run.directory)
            raise

    async def _open_directory(self) -> None:
        """Check the recipe, and make and lock the directory of the run; for a resumed run lock it and clean up."""
        to_thread = anyio.to_thread.run_sync
        self.recipe = await to_thread(with_hub_folders, self.recipe)  # downloads what has a name of the Hub
        if self._resumes:
            self._lock = lock_run(self.run_directory)
            await to_thread(refuse_lost_journal, self.run_directory)
            # Sockets, shared memory and processes that a killed supervisor of this run has left behind.
            for failure in await to_thread(remove_killed_life, self.run_directory):
                log.warning("%s", failure)
            for change in await to_thread(self._changes):
                log.warning("%s", change)
            # Checked with the rewards that were attached while the run went on, in place of the recipe's.
            await to_thread(preflight, *await to_thread(recipe_of_resumed_run, self.recipe, self.run_directory))
            if self._overridden_settings:
                await to_thread(write_changed_recipe, self.run_directory, self.recipe)
            return
        # ``training.epochs`` becomes ``run.prompts``; the line that says so is for the dry run.
        self.recipe, _ = await to_thread(with_steps_of_epochs, self.recipe)
        self.recipe, merging = await to_thread(with_adapter_sync, self.recipe)
        if merging:
            log.warning("%s", merging)
        self.recipe, rewards = await to_thread(with_checkpoint_rewards, self.recipe)
        await to_thread(preflight, self.recipe, rewards)
        placement = await to_thread(gpu_placement, self.recipe)
        self.recipe = placement.decided(self.recipe)
        await hosts_of(self.recipe)
        self.run_directory = await to_thread(_make_run_directory, self.recipe, rewards)
        self._lock = lock_run(self.run_directory)

    def _changes(self) -> list[str]:
        """Notices of what has changed since the start of the run. Raises ``RecipeError`` unless changes are allowed."""
        changes = refuse_changes(
            self.run_directory, self.recipe, force=self._despite_changes, overridden=self._overridden_settings
        )
        return [*changes, *changed_rate_notices(recipe_of_run(self.run_directory), self.recipe)]

    def _release(self) -> None:
        self._rewards.close()
        self._steering.close()
        if self._lock is not None:
            self._lock.close()

    async def _start(self) -> Self:
        sockets = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX))  # short: a socket path has at most 107 bytes
        self._sender, self._receiver = create_memory_object_stream[RunEvent](inf)
        topology = gpu_placement(self.recipe).placed(plan_topology(self.recipe, sockets))
        async with AsyncExitStack() as entered:
            # A run on a cluster that goes on with fewer ranks saves its recipe by ``write_changed_recipe``.
            launcher = await entered.enter_async_context(
                open_launcher(self.recipe, self.run_directory, sockets, write_changed_recipe)
            )
            self._supervisor = Supervisor(
                topology,
                self.run_directory,
                sockets,
                launcher=launcher,
                resumes=self._resumes,
                metrics=self.recipe.metrics,
            )
            self._supervisor.before_resume.append(self._rebind_events)
            self._orders = EngineOrders(self._supervisor)
            # A host that joins a cluster has room for engines that were left out.
            launcher.on_join = self._orders.start_retired
            self._sink_calls = [UserCalls(sink, f"sink {type(sink).__name__}") for sink in self._sinks]
            entered.push_async_callback(close_all, self._sink_calls, "close")
            for stream in (self._sender, self._receiver):
                entered.callback(stream.close)
            await entered.enter_async_context(self._supervisor)
            await entered.enter_async_context(
                serving_control(control_socket(topology), self.run_directory, self._carry_out)
            )
            self._tasks = await entered.enter_async_context(create_task_group())
            self._tasks.start_soon(self._watch)
            self._tasks.start_soon(self._receive, topology.endpoint("controller", "steps"))
            self._tasks.start_soon(self._rewards.run, rewards_endpoint(topology))
            self._tasks.start_soon(self._steering.run, steering_endpoint(topology))
            self._resources = entered.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._run_over.is_set():
                self.drain()
                with move_on_after(self._drain_s):
                    await self._run_over.wait()
            await self._supervisor.kill(GRACE_S if kind is None else 0.0)
            with CancelScope(shield=True):
                for failure in await anyio.to_thread.run_sync(remove_half_written, self.run_directory):
                    log.warning("%s", failure)
            self._tasks.cancel_scope.cancel()
            self._rewards.close()
            await self._resources.__aexit__(None, None, None)
        finally:
            self._release()

    @property
    def rewards(self) -> RewardAttachments:
        """Attach, replace or detach rewards while the run goes on."""
        return self._rewards

    @property
    def sink_errors(self) -> int:
        """Number of calls of ``sinks`` that raised, or were dropped because a sink was too far behind."""
        return sum(calls.errors + calls.dropped for calls in self._sink_calls)

    def drain(self) -> None:
        """Ask the run to finish the open step, save, and end. The iteration goes on until the run has ended."""
        self._supervisor.request_drain()

    async def events(self) -> AsyncIterator[RunEvent]:
        """All events of the run, from ``RunStarted`` to ``RunFinished``. Raises ``ProcessDied``."""
        async for event in self._receiver:
            yield event
            if isinstance(event, RunFinished):
                break
        await self._run_over.wait()
        if self._failure is not None:
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[StepFinished]:
        """One event for each optimizer step whose version is live."""
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
            with move_on_after(LAST_EVENTS_S):  # the last events of the controller may not be read yet
                await self._all_events_received.wait()
        except ProcessDied as died:
            await self._note_failure(died)
        finally:
            self._run_over.set()
            self._rewards.close()
            self._steering.close()
            self._sender.close()

    async def _note_failure(self, died: ProcessDied) -> None:
        """End all processes, and write the crash bundle."""
        if ask_for_stacks(getpid()):  # the children of this process
            await sleep(STACKS_S)
        await self._supervisor.kill()
        note = await anyio.to_thread.run_sync(_crash_note, self.run_directory, str(died), abandon_on_cancel=True)
        self._failure = ProcessDied(f"{died}\n{note}")

    async def _receive(self, endpoint: str) -> None:
        """Receive the events of the controller and of its successors."""
        while not self._all_events_received.is_set():
            with CancelScope() as self._steps_scope:
                async with zmq_receiver(ParentMessage, endpoint, bind=True, name="controller.steps") as steps:
                    self._steps_bound.set()
                    await self._listen(steps)
            if not self._steps_scope.cancelled_caught:
                self._all_events_received.set()

    async def _rebind_events(self) -> None:
        """Close the stream from the controller that died, and bind it for the next one, before the run is resumed."""
        self._steps_bound = Event()
        self._steps_scope.cancel()
        self._rewards.controller_replaced()
        self._steering.controller_replaced()
        await self._steps_bound.wait()

    async def _listen(self, steps: ReceiveStream[ParentMessage]) -> None:
        """Pass each message of one controller to its receiver: engine orders, replies, sinks and the iteration."""
        try:
            async for event in steps:
                if isinstance(event, StopEngine | StartEngine | KillEngine):
                    self._tasks.start_soon(self._orders.handle, event)
                    continue
                if isinstance(event, RewardReply):
                    self._rewards.deliver_reply(event)
                    continue
                if isinstance(event, SteeringReply):
                    self._steering.deliver_reply(event)
                    continue
                if isinstance(event, RunFinished):
                    self._supervisor.run_finished()
                for calls in self._sink_calls:
                    calls.call("record", event)
                backlog = self._sender.statistics().current_buffer_used
                if not isinstance(event, RunProgress) or backlog < PROGRESS_BACKLOG:
                    await self._sender.send(event)
        except ClosedResourceError:
            return
        except StreamBroken:
            # The controller is gone: the supervisor reports its death or starts a successor.
            await sleep_forever()


async def carry_out(
    rewards: RewardAttachments, drain: Callable[[], None], operation: RewardRequest | DrainRun
) -> ControlAnswer:
    """Carry out an operation of the control socket. Raises ``StreamRLError`` (``RecipeError`` for a wrong request):
    then nothing was changed."""
    if isinstance(operation, DrainRun):
        drain()
        return Draining()
    if isinstance(operation, ListRewards):
        return await rewards.attached()
    return await rewards.change(operation)


def recipe_of_run(run_directory: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe of a run that can be resumed, with ``overrides``. Raises ``RecipeError``."""
    path = run_directory / "recipe.toml"
    recipe = load_recipe(path, overrides) if path.is_file() else None
    if recipe is None or recipe.run.journal is JournalKind.NONE:
        remedy = "name the directory of a run that keeps a journal (run.journal), such as runs/latest"
        raise RecipeError(f"{run_directory} has no journal to go on from: {remedy}", outcome=NOT_RESUMED)
    if any(override.partition("=")[0].strip() == "run.steps" for override in overrides):
        recipe = replace(recipe, run=replace(recipe.run, prompts=0))  # run.steps counts, not prompts
    return recipe


def _crash_note(run_directory: Path, failure: str) -> str:
    """Write the crash bundle. Returns a line for the user, also where the bundle cannot be written."""
    try:
        rewards = read_rewards_file(run_directory)
        if rewards is None:
            bundle = write_crash_bundle(run_directory, failure)
        else:
            bundle = write_crash_bundle(run_directory, failure, rewards=rewards.rewards)
    except (OSError, StreamRLError) as error:  # no bundle where rewards cannot be read: they may have secrets
        return f"no crash bundle could be written: {error}"
    return f"crash bundle: {bundle} (streamrl show {bundle})"


def _make_run_directory(recipe: Recipe, rewards: RewardsSnapshot | None) -> Path:
    """Make ``<directory>/<name>-<time>`` with the resolved recipe, and the link ``latest`` to it. ``rewards``: rewards
    of the checkpoint from which the run begins. Durable when it returns: without a recipe no journal can be resumed."""
    parent = Path(recipe.run.directory).absolute()
    make_directory(parent)
    directory = _unused_directory(parent / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    write_inputs(directory, recipe)
    if rewards is not None:
        for name, content in rewards_file(rewards).items():
            write_durable(directory / name, content)
    write_durable(directory / "recipe.toml", dump_recipe(recipe).encode())  # last: then the run can be resumed
    write_link(parent / "latest", directory.name)
    return directory


def _unused_directory(stem: Path) -> Path:
    """Make the directory ``stem``, with a number where another run began in the same second, perhaps at this moment."""
    for number in itertools.count(1):
        directory = stem.with_name(stem.name if number == 1 else f"{stem.name}-{number}")
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)  # recipe, prompts, completions and weights are for this user alone
            break
    return directory

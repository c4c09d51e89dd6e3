"""The common start and end of the processes of a run: controller, engine processes, trainer ranks, workers, judge.

``launch.__main__`` calls ``run_role`` in each process that the supervisor or the daemon of a host has started. A
process ends when the coroutine of its role returns (exit code 0), by an exception (1, and a reason in ``exit/``), or by
SIGTERM (143). It leaves through ``os._exit``: the coroutine has ended everything that must be ended, and a thread that
hangs in a collective or in a user's function must not keep a failed process alive."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from os import environ
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import NoReturn

import anyio
from msgspec import Struct

from streamrl.base.errors import StreamRLError
from streamrl.base.printable import log_to
from streamrl.base.run_process import CUDA_DEVICES, CUDA_ORDER, RUN_EPOCH, name_shared_memory
from streamrl.comm.transport_keys import transport_variables, with_cluster_keys
from streamrl.observe.terminal.screen import open_screen
from streamrl.processes.exit_reason import TERMINATED_CODE, exit_code_of, failures, reason_of, write_reason
from streamrl.recipe.rules.transport_rules import insecure_notice
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import ProcessPlan, Role, Topology, read_topology

log = logging.getLogger(__name__)


class ChildSetup(Struct, frozen=True, kw_only=True):
    """Setup of a role. ``socket_directory``: short path, private to the run; ``resumes``: whether this process
    continues the work of a process that died."""

    plan: ProcessPlan
    recipe: Recipe
    topology: Topology
    run_directory: Path
    socket_directory: Path
    resumes: bool = False


RoleMain = Callable[[ChildSetup], Awaitable[None]]


class Terminated(Exception):
    """SIGTERM ended this process, which is no error."""


def parse_arguments() -> tuple[ProcessPlan, Path, Path, bool]:
    """Parse the arguments of a child of the supervisor: its role, the directories of the run and of its sockets on this
    host, and whether it resumes the run."""
    parser = argparse.ArgumentParser(prog="python -m streamrl.launch")
    parser.add_argument("role", type=Role, choices=list(Role))
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--socket-directory", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    plan = ProcessPlan(role=arguments.role, index=arguments.index)
    return plan, arguments.run_directory, arguments.socket_directory, arguments.resume


def leave(plan: ProcessPlan, run_directory: Path, work: Callable[[], None]) -> NoReturn:
    """Run ``work`` and end this process: with 0, or with the exit code and the reason of the error."""
    # A terminal's Ctrl-C is only for the supervisor. Processes that this process starts inherit the setting.
    signal.signal(SIGINT, signal.SIG_IGN)
    name_shared_memory()
    # On the signal of ``ask_for_stacks``, write the stacks of all threads to the log, also in native code.
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    open_screen(drops=True, escapes=False)
    log_to(sys.stderr, logging.INFO)
    code = 0
    try:
        work()
    except Terminated:
        code = TERMINATED_CODE
    except BaseException as error:  # noqa: BLE001 - the supervisor reads the reason, and the process ends
        code = exit_code_of(error)
        if code != 0:
            with suppress(OSError):  # the disk may be full: then the exit code is enough
                write_reason(run_directory, plan.name, reason_of(plan.role, error))
            _log_failures(error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log_failures(error: BaseException) -> None:
    """Log each error of a group: one of streamrl in a line, with the traceback of its cause, which is of user code or
    of a library; any other with its traceback."""
    for leaf in list(failures(error)) or [error]:
        unexpected: BaseException | None = leaf
        if isinstance(leaf, StreamRLError):
            log.error("%s: %s", type(leaf).__name__, leaf)
            unexpected = leaf.__cause__
        if unexpected is not None:
            traceback.print_exception(unexpected)


def load_setup(plan: ProcessPlan, run_directory: Path, socket_directory: Path, *, resumes: bool) -> ChildSetup:
    """Read the recipe and the topology that the command and the supervisor wrote."""
    from streamrl.recipe.rules.load_recipe import load_recipe

    recipe = with_cluster_keys(load_recipe(run_directory / "recipe.toml"), run_directory)
    topology = read_topology(run_directory)
    return ChildSetup(
        plan=next((process for process in topology.processes if process.name == plan.name), plan),
        recipe=recipe,
        topology=topology,
        run_directory=run_directory,
        socket_directory=socket_directory,
        resumes=resumes,
    )


def run_role(setup: ChildSetup, main: RoleMain) -> None:
    """Run the role's coroutine ``main``. Raises ``Terminated`` on SIGTERM, ``StreamRLError`` without usable keys."""
    # Also for the processes that this process starts: vLLM's workers pull weights themselves.
    environ.update(transport_variables(setup.recipe, setup.plan.role))
    environ[RUN_EPOCH] = str(setup.topology.epoch)
    # Before anything opens a device; numbered as NVML does. Rewards run code of users, which takes what it sees: a
    # worker without GPUs sees none.
    are_placed = any(process.gpus for process in setup.topology.processes)
    if setup.plan.gpus or (setup.plan.role is Role.REWARD and are_placed):
        environ[CUDA_ORDER] = "PCI_BUS_ID"
        environ[CUDA_DEVICES] = ",".join(setup.plan.gpus)
    if notice := insecure_notice(setup.recipe):
        log.warning("%s", notice)
    anyio.run(_until_terminated, main, setup, backend_options={"use_uvloop": True})


async def _until_terminated(main: RoleMain, setup: ChildSetup) -> None:
    if setup.plan.role is Role.CONTROLLER:
        await main(setup)  # the controller handles SIGTERM itself: the signal orders it to drain
        return
    terminated = False
    async with anyio.create_task_group() as tasks:

        async def cancel_on_sigterm() -> None:
            nonlocal terminated
            with anyio.open_signal_receiver(SIGTERM) as signals:
                async for _ in signals:
                    log.info("%s: SIGTERM", setup.plan.name)
                    terminated = True
                    tasks.cancel_scope.cancel()

        tasks.start_soon(cancel_on_sigterm)
        await main(setup)
        tasks.cancel_scope.cancel()
    if terminated:
        raise Terminated

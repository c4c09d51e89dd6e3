"""The machine on which a simulated run lives: it starts processes and ends them, and has nothing else to sweep.

The product's own supervisor runs on it; only what touches the operating system is replaced."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from campaigns.faults.virtual_time import PROCESS, SimulatedProcess
from campaigns.faults.world_state import WorldState
from streamrl.base.errors import StreamRLError
from streamrl.launch.roles import role_main
from streamrl.processes import run_role
from streamrl.processes.exit_reason import TERMINATED_CODE, exit_code_of, failures, reason_of, write_reason
from streamrl.processes.launcher import ChildProcess
from streamrl.processes.run_role import ChildSetup, Terminated
from streamrl.recipe.topology import ProcessPlan, Topology

FIRST_PID = 100
DECLARED = (StreamRLError, OSError, SystemExit)
"""What a process may die of."""
BEYOND_WINDOW = "more than its window"


class SimulatedPopen:
    """What ``subprocess.Popen`` is to ``ChildProcess``."""

    stdin = None

    def __init__(self, machine: Machine, pid: int, process: SimulatedProcess | None) -> None:
        self.pid = pid
        self.process = process
        self.code: int | None = None
        self._machine = machine

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.code is None:
            self._machine.signal(self, number)

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            self.kill()
        assert self.code is not None or self.process is None
        return self.code or 0


class Machine:
    """Processes of one world by pid. ``exited`` is called at every end."""

    def __init__(self, world: WorldState, exited: Callable[[SimulatedPopen], None]) -> None:
        self.world = world
        self.by_pid: dict[int, SimulatedPopen] = {}
        self.incarnations: dict[str, int] = {}
        self.lives: dict[str, SimulatedPopen] = {}
        self._exited = exited

    # ---- processes -------------------------------------------------------------------------------------

    def start(self, plan: ProcessPlan, run_directory: Path, *, resumes: bool) -> SimulatedPopen:
        """A role of the run, as ``python -m streamrl.launch`` would start it."""
        world = self.world
        assert world.topology is not None
        setup = ChildSetup(
            plan=plan,
            recipe=world.recipe,
            topology=world.topology,
            run_directory=run_directory,
            socket_directory=Path("/simulated"),
            resumes=resumes,
        )

        async def main() -> int:
            try:
                await run_role._until_terminated(role_main(plan.role), setup)
            except Terminated:
                return TERMINATED_CODE
            except BaseException as error:  # noqa: BLE001 - as ``run_role.leave``
                if (code := exit_code_of(error)) != 0:
                    reason = reason_of(plan.role, error)
                    if not world.over:
                        world.note("dies", plan.name, reason.kind, reason.message)
                    if BEYOND_WINDOW in reason.message:  # which no fault can make of messages in order
                        world.ledger.violated("slots", f"{plan.name} died of {reason.message}")
                    undeclared = [leaf for leaf in failures(error) if not isinstance(leaf, DECLARED)]
                    if undeclared and not world.over:
                        world.ledger.violated(
                            "errors", f"{plan.name} died of {undeclared[0]!r}, which nothing declares"
                        )
                    write_reason(run_directory, plan.name, reason)
                return code
            return 0

        return self.spawn(plan.name, main, start_s=world.start_seconds(plan))

    def spawn(self, name: str, main: Callable[[], Any], start_s: float = 0.0) -> SimulatedPopen:
        """A process that runs ``main``, which returns its exit code."""
        loop = self.world.loop
        if self.living(name) is not None:
            self.world.ledger.violated("lives", f"{name} is started while an earlier life of it goes on")
        incarnation = self.incarnations[name] = self.incarnations.get(name, -1) + 1
        process = SimulatedProcess(name, incarnation)
        pid = process.pid = FIRST_PID + len(self.by_pid)
        popen = self.by_pid[pid] = self.lives[name] = SimulatedPopen(self, pid, process)
        self.world.note("start", repr(process))

        async def life() -> None:
            await asyncio.sleep(start_s)
            code = await main()
            loop.call_soon(self._left, popen, code, context=self.world.context)

        process.context.run(lambda: process.roots.append(loop.create_task(life())))
        return popen

    def _left(self, popen: SimulatedPopen, code: int) -> None:
        if popen.code is None:
            self._end(popen, code)

    def getpid(self) -> int:
        """``os.getpid``."""
        process = PROCESS.get()
        return 1 if process is None else process.pid

    def leave(self, code: int) -> NoReturn:
        """``os._exit`` of the calling process."""
        process = PROCESS.get()
        popen = next(p for p in self.by_pid.values() if p.process is process)
        self._left(popen, code)
        raise asyncio.CancelledError  # it is frozen from its next wait on

    def signal(self, popen: SimulatedPopen, number: int) -> None:
        """Deliver a signal. SIGTERM waits for a process that hangs, as in reality."""
        process = popen.process
        assert process is not None
        self.world.note("signal", repr(process), number)
        if number != signal.SIGKILL and (_receivers(process, number) or process.hung_until > self.world.loop.now):
            self.world.loop.call_soon(self._take_signal, popen, number, context=process.context)
        else:
            self._end(popen, -number)

    def _take_signal(self, popen: SimulatedPopen, number: int) -> None:
        process = popen.process
        assert process is not None
        receivers = _receivers(process, number)
        if not receivers and popen.code is None:
            self.world.loop.call_soon(self._left, popen, -number, context=self.world.context)
        for receiver in receivers:
            receiver.tell(number)

    def _end(self, popen: SimulatedPopen, code: int) -> None:
        process = popen.process
        assert process is not None
        popen.code = code
        self.world.note("exit", repr(process), code)
        self.world.loop.kill(process)
        self.world.network.process_died(process)
        for clean_up in process.at_end:
            clean_up()
        self._exited(popen)

    def kill(self, name: str) -> bool:
        """SIGKILL to the living process of that name."""
        popen = self.lives.get(name)
        if popen is None or popen.code is not None:
            return False
        popen.kill()
        return True

    def living(self, name: str) -> SimulatedProcess | None:
        popen = self.lives.get(name)
        return popen.process if popen is not None and popen.code is None else None


def _receivers(process: SimulatedProcess, number: int) -> list[Any]:
    """Who in the process waits for that signal."""
    return [receiver for receiver in process.signals if number in receiver.wanted]


class SimulatedLauncher:
    """Starts the processes of a run on a ``machine``, in the place of ``LocalLauncher``."""

    def __init__(self, machine: Machine, run_directory: Path) -> None:
        self._machine = machine
        self._run_directory = run_directory
        self.on_join: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Prepare nothing."""

    def close(self) -> None:
        """Give back nothing."""

    async def place(self, topology: Topology) -> Topology:
        """Return ``topology``."""
        return topology

    def start(self, plan: ProcessPlan, *, resumes: bool = False) -> ChildProcess:
        process = self._machine.start(plan, self._run_directory, resumes=resumes)
        return ChildProcess(plan, process, self._run_directory / "logs" / f"{plan.name}.log", 0)

    async def end_left_behind(self, child: ChildProcess) -> list[int]:
        child.process.kill()
        return []

    async def end_all(self) -> list[int]:
        for name, popen in list(self._machine.lives.items()):
            if name != "parent" and popen.code is None:
                popen.kill()
        return []

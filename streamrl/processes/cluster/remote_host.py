"""A host of a cluster in the supervisor's process: states of the host's processes, and orders to its daemon.

``cluster`` makes a ``RemoteHost`` for each host; the supervisor sees each process of a host as a ``RemoteProcess``."""

from __future__ import annotations

from contextlib import suppress
from logging import getLogger
from pathlib import Path
from signal import SIGKILL, SIGTERM
from time import monotonic
from typing import Protocol

from anyio import Event, fail_after, move_on_after
from msgspec import msgpack
from msgspec.structs import replace

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.notifier import Notifier
from streamrl.processes.cluster.daemon_messages import (
    DaemonAnswer,
    DaemonOrder,
    DaemonRequest,
    HostFacts,
    ProcessState,
    SignalProcess,
    StartProcess,
)
from streamrl.processes.exit_reason import ExitKind, ExitReason, read_exit_reason, write_reason

log = getLogger(__name__)

PING_S = 0.25
ANSWER_S = 1.0
"""How long one request may take before the next one is sent."""
MARGIN_S = 2.0
"""How long after the end of a lease the processes of a host are certainly gone."""


class DaemonGone(StreamRLError):
    """The daemon of a host has ended, or cannot be reached any more."""


class DaemonLink(Protocol):
    """A connection to a daemon."""

    async def ask(self, request: bytes) -> bytes:
        """Return the encoded ``DaemonAnswer`` of the daemon. May be cancelled. Raises ``DaemonGone``, or ``OSError``
        where the daemon does not answer now."""

    async def release(self) -> None:
        """End the daemon with all processes below it, and free the run's resources on the host. Idempotent."""


class RemoteProcess:
    """A process on another host, in the state of the daemon's last answer: a ``ProcessHandle``."""

    def __init__(self, host: RemoteHost, number: int) -> None:
        self.host = host
        self.number = number

    @property
    def pid(self) -> int:
        """Process id on its host; 0 until it is known."""
        return self.host.state(self.number).pid

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs; negative for a signal that ended it."""
        return self.host.state(self.number).exit_code

    def send_signal(self, number: int, /) -> None:
        """Order the daemon to send a signal, unless the process is known to have ended."""
        if self.poll() is None:
            self.host.order(SignalProcess(self.number, number))

    def terminate(self) -> None:
        """Order the daemon to send SIGTERM."""
        self.send_signal(SIGTERM)

    def kill(self) -> None:
        """Order the daemon to send SIGKILL."""
        self.send_signal(SIGKILL)


class RemoteHost:
    """Orders to the daemon of a host, and the states of its processes. Start ``run`` in a nursery; it returns when the
    host is lost: the daemon has ended, or has not answered for its lease and a margin, after which its processes are
    gone."""

    def __init__(self, facts: HostFacts, link: DaemonLink, run_directory: Path, *, epoch: int, lease_s: float) -> None:
        self.facts = facts
        self.link = link
        self.lost = ""
        """Reason for which the host is lost; empty for a host that is not lost."""
        self.survivors: tuple[int, ...] = ()
        self._run_directory = run_directory
        self._epoch = epoch
        self._lease_s = lease_s
        self._orders: list[DaemonOrder] = []
        self._first = 0
        self._names: dict[int, str] = {}
        self._states: dict[int, ProcessState] = {}
        self._answered_s = monotonic()
        self._is_late = False
        self._changed = Notifier()
        self._wake = Event()

    @property
    def name(self) -> str:
        """Name of the host."""
        return self.facts.name

    def state(self, number: int) -> ProcessState:
        """Return the last known state of the process that was started as ``number``."""
        return self._states[number]

    def order(self, order: DaemonOrder) -> int:
        """Send an order at once. Returns its number, for ``carried_out``."""
        if isinstance(order, StartProcess):
            self._names[order.number] = order.plan.name
            self._states[order.number] = ProcessState(pid=0)
        if self.lost:
            self._end_states()
            return -1
        self._orders.append(order)
        self._wake.set()
        return self._first + len(self._orders) - 1

    async def carried_out(self, number: int) -> None:
        """Wait until the daemon has carried out an order, or the host is lost."""
        while not self.lost and number >= self._first:
            await self._changed.wait()

    async def run(self) -> None:
        """Send requests to the daemon, which renew its lease, until the host is lost."""
        try:
            while not self.lost:
                await self._ask()
                if monotonic() > self._answered_s + self._lease_s + MARGIN_S:
                    self.lose(f"{self.name} has not answered for {self._lease_s + MARGIN_S:g} s")
                with move_on_after(PING_S):
                    await self._wake.wait()
        finally:
            self.lose("the run has ended")  # also when cancelled: ``carried_out`` would wait for ever
        await self.link.release()  # the daemon may still receive orders, though its answers do not arrive

    def lose(self, reason: str) -> None:
        """Note that no process of the run lives on this host any more."""
        if not self.lost:
            self.lost = reason
            self._end_states()
            self._changed.notify()

    async def _ask(self) -> None:
        asked_s = monotonic()
        self._wake = Event()
        request = DaemonRequest(epoch=self._epoch, first=self._first, orders=tuple(self._orders))
        try:
            with fail_after(ANSWER_S):
                encoded = await self.link.ask(msgpack.encode(request))
            answer = msgpack.decode(encoded, type=DaemonAnswer)
        except DaemonGone as error:
            self.lose(f"the daemon of {self.name} has ended: {error}")
            return
        except (OSError, *UNDECODABLE) as error:  # TimeoutError, too
            if not self._is_late:
                log.warning("%s does not answer (%s)", self.name, str(error) or type(error).__name__)
            self._is_late = True
            return
        if answer.refusal:
            self.lose(answer.refusal)
            return
        if self._is_late:
            log.warning("%s answers again, after %.1f s", self.name, asked_s - self._answered_s)
        self._is_late = False
        self._answered_s = asked_s
        self._take(answer)

    def _take(self, answer: DaemonAnswer) -> None:
        newly_done = answer.orders_done - self._first
        for number, state in answer.processes.items():
            earlier_state = self._states.get(number)
            if earlier_state is None or earlier_state.exit_code is not None:
                continue
            if state.exit_code is not None:
                self._note_reason(self._names[number], state)
            self._states[number] = state
        if newly_done > 0:
            del self._orders[:newly_done]
            self._first = answer.orders_done
            self.survivors = answer.survivors
        self._changed.notify()

    def _note_reason(self, name: str, state: ProcessState) -> None:
        """Write the reason of an end where the supervisor reads it, with the time of this host's clock."""
        at_s = monotonic()
        if state.failure:
            self._write(name, ExitReason(kind=ExitKind.CAUSE, message=state.failure, monotonic_s=at_s))
        elif state.reason and (reason := read_exit_reason(state.reason)):
            self._write(name, replace(reason, monotonic_s=at_s - state.reason_age_s))

    def _write(self, name: str, reason: ExitReason) -> None:
        with suppress(OSError):  # the disk may be full: the end itself is known
            write_reason(self._run_directory, name, reason)

    def _end_states(self) -> None:
        for number, state in self._states.items():
            if state.exit_code is None:
                reason = ExitReason(kind=ExitKind.CAUSE, message=self.lost, monotonic_s=monotonic())
                self._write(self._names[number], reason)
                self._states[number] = replace(state, exit_code=-SIGKILL)

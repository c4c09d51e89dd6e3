"""The fork server: ``python -m streamrl.rewards.calls.fork_server FD PID``. ``pool`` starts it as a child of the reward
worker. It imports the user's functions once and forks all call processes from that state.

The fork server starts no thread and has no socket except the one to the worker, so forking it is safe. Where the user's
modules start threads, the pool lets each call process import them instead. A process that a call process started
becomes a child of the fork server when its parent ends, even where it has left the process group
(PR_SET_CHILD_SUBREAPER); the fork server kills such orphans. When the reward worker is gone, the fork server kills all
its children and ends. While it imports it cannot read the socket; then the end of the worker kills it
(PR_SET_PDEATHSIG), as the end of the fork server kills call processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import msgpack

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, die_with, set_process_option
from streamrl.rewards.calls.frames import (
    ORDERS,
    ChildEnded,
    Clock,
    ForkChild,
    KillChild,
    LoadRewards,
    RewardsLoaded,
    ServerEvent,
    ServerOrder,
    SharedStatus,
    decoded,
)
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.calls.process import run_call_process
from streamrl.rewards.signature import RewardFunction

_LARGEST_ORDER = 1 << 20
_MOST_DESCRIPTORS = 1 << 20
_LEAVE_S = 2.0  # limit of the wait for killed processes, when the fork server ends
_EXPLAIN_S = 0.2  # from SIGABRT, with which a process prints its stacks, until SIGKILL
_EXPLAIN_POLL_MS = 50
_LEAVE_POLL_S = 0.005


class ForkServer:
    """Serves one reward worker over ``control`` (SOCK_SEQPACKET: one order a packet, with descriptors attached)."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}  # pid of a call process -> its number
        self._loading = LoadRewards(rewards=[])
        self._functions: list[RewardFunction] = []
        self._pending_kills: dict[int, float] = {}  # pid -> time of its SIGKILL
        self._started_by_imports: set[int] = set()  # pids of processes that user modules started

    def serve(self) -> None:
        """Serve until the worker closes the socket, or ends."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_EXPLAIN_POLL_MS if self._pending_kills else None)}
            if wake_read in ready:
                with suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            self._reap()
            self._kill_pending()
            if self._control.fileno() in ready:
                received, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_ORDER, 3)
                if not received:
                    break
                self._carry_out(decoded(ORDERS, received), descriptors)
        self._leave()

    def _carry_out(self, order: ServerOrder, descriptors: Sequence[int]) -> None:
        match order:
            case LoadRewards():
                self._loading = order
                if order.preload:
                    self._load()
                # From now on ``serve`` notices the end of the worker by its socket, and ends all children.
                set_process_option(PR_SET_PDEATHSIG, 0)
            case ForkChild():
                self._fork(order, descriptors)
            case KillChild():
                for pid, child in self._children.items():
                    if child == order.child:
                        self._kill(pid, explain=order.explain)

    def _kill(self, pid: int, *, explain: bool) -> None:
        """Kill a call process. ``explain``: SIGABRT comes before SIGKILL; it prints the stacks and ends the process,
        even where C code holds the interpreter."""
        if explain:
            self._pending_kills[pid] = Clock.monotonic() + _EXPLAIN_S
            os.kill(pid, signal.SIGABRT)
        else:
            _kill_group(pid)

    def _kill_pending(self) -> None:
        now = Clock.monotonic()
        for pid in [pid for pid, kill_at in self._pending_kills.items() if now >= kill_at]:
            del self._pending_kills[pid]
            _kill_group(pid)

    def _load(self) -> None:
        signatures = []
        problems = []
        for reward in self._loading.rewards:
            try:
                function = load_reward(reward)
            except RecipeError as error:
                problems += error.problems
            else:
                self._functions.append(function)
                signatures.append(function.signature)
        sys.stdout.flush()
        self._started_by_imports = set(_child_pids())
        threads = len(os.listdir("/proc/self/task"))
        self._report(RewardsLoaded(signatures, problems, threads))

    def _fork(self, order: ForkChild, descriptors: Sequence[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            self._children[pid] = order.child
            return
        try:
            connection, page = self._become_child(parent, descriptors)
        except BaseException:  # noqa: BLE001 - a child that fails here must not run on as a second server
            os._exit(1)
        run_call_process(connection, page, self._functions_of_child, loop=order.loop, memory_bytes=order.memory_bytes)

    def _become_child(self, parent: int, descriptors: Sequence[int]) -> tuple[socket.socket, SharedStatus]:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        die_with(parent)
        socket_fd, page_fd, output_fd = descriptors
        page = SharedStatus(page_fd)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        if socket_fd != 3:
            socket_fd = os.dup2(socket_fd, 3, inheritable=False)
        os.closerange(4, _MOST_DESCRIPTORS)
        return socket.socket(fileno=socket_fd), page

    def _functions_of_child(self) -> list[RewardFunction]:
        if self._loading.preload:
            return self._functions
        return [load_reward(reward) for reward in self._loading.rewards]

    def _reap(self) -> None:
        """Collect processes that ended, and report call processes. WNOWAIT keeps the pid of an ended process reserved
        until ``waitpid``, so the signal to its group cannot reach a new process."""
        any_ended = False
        while True:
            try:
                exit_info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if exit_info is None:
                break
            pid = exit_info.si_pid
            child = self._children.pop(pid, None)
            self._pending_kills.pop(pid, None)
            if child is not None:
                _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            any_ended = True
            if child is not None:
                self._report(ChildEnded(child, os.waitstatus_to_exitcode(status)))
        if any_ended:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill processes that ended call processes have left behind; they are children of the fork server now."""
        for pid in _child_pids():
            if pid not in self._children and pid not in self._started_by_imports:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _leave(self) -> None:
        deadline = Clock.monotonic() + _LEAVE_S
        for pid in self._children:
            _kill_group(pid)
        self._started_by_imports.clear()  # ``_kill_orphans`` kills these processes, too
        while Clock.monotonic() < deadline:
            self._children.clear()
            self._reap()
            self._kill_orphans()
            if not _child_pids():
                return
            Clock.sleep(_LEAVE_POLL_S)

    def _report(self, event: ServerEvent) -> None:
        # Where the worker is gone, the next ``recv_fds`` of ``serve`` ends this process.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(msgpack.encode(event))


def _child_pids() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # the process may not have made its own session yet
        os.kill(pid, signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Serve over the socket with the descriptor ``arguments[0]``, for the worker with the pid ``arguments[1]``."""
    die_with(int(arguments[1]))
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # output of user modules while they are imported goes to the worker, which logs its beginning
    ForkServer(socket.socket(fileno=int(arguments[0]))).serve()
    os._exit(0)  # a thread that a user's module left behind must not keep this process


if __name__ == "__main__":
    main(sys.argv[1:])

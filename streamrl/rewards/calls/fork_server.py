"""The fork server: ``python -m streamrl.rewards.calls.fork_server FD``. It imports the user's functions once and forks
call processes from that state; it is the parent of them all.

It is started before it has threads or sockets of its own and never gets any, so that forking it is safe. Processes that
call processes start become its children in the end (PR_SET_CHILD_SUBREAPER), also those that left their process group:
it dies with the call process. When the reward worker is gone the fork server kills them all and ends; while it imports,
and can look at nothing else, it is killed (PR_SET_PDEATHSIG), as call processes are when the fork server is."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, die_with, set_process_option
from streamrl.rewards.calls.frames import (
    ChildEnded,
    Clock,
    ForkChild,
    KillChild,
    LoadRewards,
    RewardsLoaded,
    ServerEvent,
    ServerOrder,
    SharedStatus,
    decode_order,
)
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.calls.process import run_call_process
from streamrl.rewards.signature import RewardFunction

_LARGEST_ORDER = 1 << 20
_MOST_DESCRIPTORS = 1 << 20
_LEAVE_S = 2.0
_EXPLAIN_S = 0.2
_EXPLAIN_LOOK_MS = 50
_LOOK_S = 0.005


class ForkServer:
    """Serves one reward worker over ``control`` (SOCK_SEQPACKET: an order a packet, descriptors beside it)."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}  # pid -> number of the child
        self._loading = LoadRewards(rewards=[])
        self._functions: list[RewardFunction] = []
        self._pending_kills: dict[int, float] = {}  # pid -> when SIGKILL follows
        self._imported: set[int] = set()  # pids of what user modules started when they were imported

    def serve(self) -> None:
        """Serve until the worker closes the socket, or is gone."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_EXPLAIN_LOOK_MS if self._pending_kills else None)}
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            self._reap()
            self._kill_pending()
            if self._control.fileno() in ready:
                received, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_ORDER, 3)
                if not received:
                    break
                self._carry_out(decode_order(received), descriptors)
        self._leave()

    def _carry_out(self, order: ServerOrder, descriptors: Sequence[int]) -> None:
        match order:
            case LoadRewards():
                self._loading = order
                if order.preload:
                    self._load()
                # From now on the end of the socket shows that the worker is gone: so nothing is left behind.
                set_process_option(PR_SET_PDEATHSIG, 0)
            case ForkChild():
                self._fork(order, descriptors)
            case KillChild():
                for pid, child in self._children.items():
                    if child == order.child:
                        self._kill(pid, explain=order.explain)

    def _kill(self, pid: int, *, explain: bool) -> None:
        """SIGABRT prints the stacks and ends it, also where C code holds the interpreter; SIGKILL follows it."""
        if explain:
            self._pending_kills[pid] = Clock.monotonic() + _EXPLAIN_S
            os.kill(pid, signal.SIGABRT)
        else:
            _kill_group(pid)

    def _kill_pending(self) -> None:
        now = Clock.monotonic()
        for pid in [pid for pid, at in self._pending_kills.items() if now >= at]:
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
        self._imported = set(_own_children())
        threads = len(os.listdir("/proc/self/task"))
        self._report(RewardsLoaded(signatures, problems, threads))

    def _fork(self, order: ForkChild, descriptors: Sequence[int]) -> None:
        own = os.getpid()
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            self._children[pid] = order.child
            return
        try:
            connection, page = self._become_child(own, descriptors)
        except BaseException:  # noqa: BLE001 - half a child must not become a second server
            os._exit(1)
        run_call_process(connection, page, self._functions_of_child, loop=order.loop, memory_bytes=order.memory_bytes)

    def _become_child(self, parent: int, descriptors: Sequence[int]) -> tuple[socket.socket, SharedStatus]:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        die_with(parent)
        own_socket, page_at, printed_to = descriptors
        page = SharedStatus(page_at)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(printed_to, 1)
        os.dup2(printed_to, 2)
        keep = os.dup2(own_socket, 3, inheritable=False) if own_socket != 3 else 3
        os.closerange(4, _MOST_DESCRIPTORS)
        return socket.socket(fileno=keep), page

    def _functions_of_child(self) -> list[RewardFunction]:
        if self._loading.preload:
            return self._functions
        return [load_reward(reward) for reward in self._loading.rewards]

    def _reap(self) -> None:
        """Collect those that ended. The group of a call process is killed before its pid can be another's."""
        ended = False
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            pid = found.si_pid
            child = self._children.pop(pid, None)
            self._pending_kills.pop(pid, None)
            if child is not None:
                _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            ended = True
            if child is not None:
                self._report(ChildEnded(child, os.waitstatus_to_exitcode(status)))
        if ended:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill what call processes that are gone have left: it is ours now."""
        for pid in _own_children():
            if pid not in self._children and pid not in self._imported:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _leave(self) -> None:
        deadline = Clock.monotonic() + _LEAVE_S
        for pid in self._children:
            _kill_group(pid)
        self._imported.clear()
        while Clock.monotonic() < deadline:
            self._children.clear()
            self._reap()
            self._kill_orphans()
            if not _own_children():
                return
            Clock.sleep(_LOOK_S)

    def _report(self, event: ServerEvent) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then the next receive ends this process
            self._control.send(msgspec.msgpack.encode(event))


def _own_children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it may not have made its session yet
        os.kill(pid, signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Serve over the socket that descriptor ``arguments[0]`` is; ``arguments[1]``: the pid of the worker."""
    die_with(int(arguments[1]))
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what user modules print while they are imported goes to the worker, which logs the first of it
    ForkServer(socket.socket(fileno=int(arguments[0]))).serve()
    os._exit(0)  # a thread that a user's module left behind must not keep this process


if __name__ == "__main__":
    main(sys.argv[1:])

"""The reward worker's end of the fork server: it starts it, tells it what to fork and to kill, and restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.call_child import CallChild, PrintedOutput
from streamrl.rewards.calls.call_frames import (
    ChildEnded,
    ForkChild,
    KillChild,
    Leave,
    LoadRewards,
    RewardsLoaded,
    ServerOrder,
    decode_event,
)
from streamrl.rewards.clock import Clock
from streamrl.rewards.environment import passed_environment
from streamrl.rewards.signature import RewardSignature

LOAD_LIMIT_S = 120.0
_LEAVE_LIMIT_S = 3.0
_LARGEST_EVENT = 1 << 20

_log = logging.getLogger(__name__)


class ForkLink:
    """``on_ended``: a call process is gone. ``on_lost``: the server is, and another one is there already."""

    def __init__(
        self, rewards: Sequence[Reward], on_ended: Callable[[ChildEnded], None], on_lost: Callable[[], None]
    ) -> None:
        self._rewards = list(rewards)
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._preload = True
        self._encoder = msgspec.msgpack.Encoder()
        self._loaded: asyncio.Future[RewardsLoaded] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._output: PrintedOutput | None = None
        self._control: socket.socket | None = None

    async def open(self) -> list[RewardSignature]:
        """Start the server and import the rewards in it. Raises ``RecipeError``."""
        loaded = await self._load()
        if loaded.problems:
            raise RecipeError(loaded.problems)
        if loaded.threads > 1:
            # A thread may hold a lock that a forked child waits for for ever.
            _log.info("reward modules start %d threads: each process imports them anew", loaded.threads - 1)
            self._preload = False
            await self.aclose()
            self._start()
        return loaded.signatures

    async def _load(self) -> RewardsLoaded:
        self._loaded = asyncio.get_running_loop().create_future()
        self._start()
        try:
            return await asyncio.wait_for(self._loaded, LOAD_LIMIT_S)
        except TimeoutError:
            names = ", ".join(reward.label for reward in self._rewards)
            await self.aclose()
            message = (
                f"rewards {names} were not imported within {LOAD_LIMIT_S:g} s: move slow work out of their modules"
            )
            raise RecipeError([message]) from None
        finally:
            self._loaded = None

    def fork(self, child: CallChild, memory_bytes: int) -> None:
        """Fork a call process for ``child``."""
        order = ForkChild(child.number, child.loop, memory_bytes)
        self._tell(order, child.descriptors())
        child.started()

    def kill(self, child: int, *, explain: bool = False) -> None:
        """Kill a call process and all that it started; ``on_ended`` follows. ``explain``: it prints where it was."""
        self._tell(KillChild(child, explain))

    def kill_server(self) -> None:
        """End an unresponsive server. ``on_lost`` follows."""
        if self._server is not None:
            self._server.kill()

    async def aclose(self) -> None:
        """End the server and all its processes. Idempotent."""
        server = self._server
        if server is None or self._control is None:
            return
        self._tell(Leave())
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        deadline = Clock.monotonic() + _LEAVE_LIMIT_S
        while server.poll() is None and Clock.monotonic() < deadline:  # noqa: ASYNC110 - ends of processes are polled
            await asyncio.sleep(0.005)
        self._ended()

    def _ended(self) -> int:
        """Give back what belongs to a server that has ended, or is ended here; its exit code."""
        assert self._server is not None
        assert self._control is not None
        assert self._output is not None
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._server.kill()
        status = self._server.wait()
        self._output.close()
        self._server = self._control = self._output = None
        return status

    def _start(self) -> None:
        self._output = PrintedOutput("the server of the reward processes")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = str(theirs.fileno())
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "streamrl.rewards.calls.fork_server", number, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stderr=self._output.writable,
                pass_fds=[theirs.fileno()],
                env=passed_environment(self._rewards),
                start_new_session=True,
            )
        self._output.started()
        self._tell(LoadRewards(self._rewards, self._preload))
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._receive)

    def _tell(self, order: ServerOrder, descriptors: Sequence[int] = ()) -> None:
        if self._control is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: its end is read
            socket.send_fds(self._control, [self._encoder.encode(order)], list(descriptors))

    def _receive(self) -> None:
        while self._control is not None:
            try:
                received = self._control.recv(_LARGEST_EVENT, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                received = b""
            if not received:
                self._lost()
                return
            try:
                event = decode_event(received)
            except msgspec.DecodeError as error:  # user code that it imported wrote to the socket
                _log.warning("the server of the reward processes answers in no known way (%s)", error)
                self._lost()
                return
            if isinstance(event, ChildEnded):
                self._on_ended(event)
            elif self._loaded is not None and not self._loaded.done():
                self._loaded.set_result(event)

    def _lost(self) -> None:
        """It ended by itself: a user's module exited or crashed while it was imported, or user code killed it."""
        status = self._ended()
        if self._loaded is not None and not self._loaded.done():
            names = ", ".join(reward.label for reward in self._rewards)
            problem = f"the process that imported the rewards {names} ended (exit code {status}): import them by hand"
            self._loaded.set_result(RewardsLoaded([], [problem], 1))
            return
        _log.warning("the server of the reward processes ended (exit code %s)", status)
        self._start()
        self._on_lost()

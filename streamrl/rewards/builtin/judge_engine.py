"""A judge's vLLM engine beside the actor: awake for batches of questions, asleep (or paused) in between.

The server must run in vLLM's developer mode, where its sleep and pause routes are: keep its port private. Several
reward workers may share the engine: each holds a shared file lock while it asks, and the last one to let go puts the
engine to sleep. A worker that dies lets go too.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio

from streamrl.errors import StreamRLError

if TYPE_CHECKING:
    import httpx

_LOCK_LOOK_S = 0.02
_SWITCH_S = 120.0  # waking a large model copies its weights back


class YieldKind(StrEnum):
    """What the engine does while it has nothing to judge. ``sleep``: weights go to host memory, the KV cache is freed
    (a GPU, and a server with ``--enable-sleep-mode``). ``pause``: its scheduler stands still."""

    NEVER = "never"
    PAUSE = "pause"
    SLEEP = "sleep"


class YieldingError(StreamRLError):
    """The engine could not be woken or put to sleep."""


_ROUTES = {YieldKind.PAUSE: ("resume", "pause?mode=keep"), YieldKind.SLEEP: ("wake_up", "sleep?level=1&mode=wait")}


class YieldingEngine:
    """Counts who asks, in this process and (by a lock file) in others. Belongs to one event loop."""

    def __init__(
        self, http: httpx.AsyncClient, endpoint: str, kind: YieldKind, *, batch: int, patience_s: float
    ) -> None:
        """``endpoint``: the ``/v1`` of the server. ``batch``, ``patience_s``: it stays asleep until so many questions
        wait, or one has waited so long."""
        address = urlsplit(endpoint)
        self._root = f"{address.scheme}://{address.netloc}"
        self._http = http
        self._wake, self._sleep = _ROUTES[kind]
        self._batch = batch
        self._patience_s = patience_s
        self._asking = 0
        self._gathered = asyncio.Event()
        self._switching = asyncio.Lock()
        self._lock: SharedLock | None = None

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """The engine answers inside."""
        self._asking += 1
        if self._asking >= self._batch:
            self._gathered.set()
        try:
            # One of those who wait wakes the engine; the next does when that one is cancelled.
            async with self._switching:
                if self._lock is None:
                    await self._gather_batch()
                    self._lock = await self._wake_up()
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                with anyio.CancelScope(shield=True):
                    await self._let_go()

    async def _gather_batch(self) -> None:
        with anyio.move_on_after(self._patience_s):
            await self._gathered.wait()

    async def _wake_up(self) -> SharedLock:
        lock = await SharedLock.take(_lock_path(self._root))
        try:
            await self._post(self._wake)
        except BaseException:
            if lock.is_last():
                lock.remove()
            lock.close()
            raise
        return lock

    async def _let_go(self) -> None:
        async with self._switching:
            lock = self._lock
            if lock is None:
                return
            self._lock = None
            self._gathered.clear()
            try:
                if lock.is_last():
                    try:
                        await self._post(self._sleep)
                    finally:
                        lock.remove()
            finally:
                lock.close()

    async def _post(self, route: str) -> None:
        import httpx

        url = f"{self._root}/{route}"
        try:
            response = await self._http.post(url, timeout=_SWITCH_S)
        except httpx.TransportError as error:
            what = f"{type(error).__name__} {error}".strip()
            raise YieldingError(f"the judge's engine {url} cannot be reached ({what}): is it up?") from error
        if response.status_code != 200:
            remedy = "start it with VLLM_SERVER_DEV_MODE=1 (and --enable-sleep-mode), or set yields to never"
            raise YieldingError(f"the judge's engine {url} answered {response.status_code}: {remedy}")


def _lock_path(root: str) -> Path:
    name = hashlib.sha256(f"{os.getuid()} {root}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"streamrl-judge-{name}.lock"


class SharedLock:
    """A file lock that several hold. The file is there only while somebody holds it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    async def take(cls, path: Path) -> SharedLock:
        """Wait until nobody holds it alone."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if _same_file(path, descriptor):
                    return cls(path, descriptor)
            except BlockingIOError:
                pass  # somebody is putting the engine to sleep
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            await asyncio.sleep(_LOCK_LOOK_S)

    def is_last(self) -> bool:
        """Whether nobody else holds it; it is held alone from here on. False: it is no longer held."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def remove(self) -> None:
        """Unlink the file (held alone: who opened it meanwhile sees that it is another file, and opens anew)."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go."""
        os.close(self._descriptor)


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        there, ours = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

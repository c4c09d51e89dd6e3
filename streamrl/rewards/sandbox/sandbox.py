"""The sandbox in the process of the reward: start of the zygote, requests for runs, and the layers of this machine.

``reward`` calls it in a call process, or in the reward worker where the reward is trusted. Each ``Sandbox`` has one
zygote, a child of that process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from anyio import to_thread
from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.run_process import end_session, last_line, start_session
from streamrl.base.types import JsonMapping, JsonObject, Texts, TextsByName
from streamrl.rewards.sandbox.jail import Limits
from streamrl.rewards.sandbox.values import MALFORMED, decode

ALL_LAYERS = ("namespaces", "landlock", "seccomp")
_START_S = 30.0
_ANSWER_GRACE_S = 10.0  # beyond the time limit of a run; the zygote kills a run 2 s after its limit
_END_S = 5.0
_MESSAGE_BYTES = 65536
_MOST_STDERR_BYTES = 4096
_F_ADD_SEALS = 1033
_SEALS = 0xF  # seal, shrink, grow, write
# Packages without their __init__, so that the zygote loads only the standard library and files of this package.
_BOOT = """
import sys, types
place, fd = sys.argv[1:]
for depth, name in ((1, "streamrl"), (0, "streamrl.rewards.sandbox")):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [place.rsplit("/", depth)[0]]
from streamrl.rewards.sandbox.zygote import main
main(int(fd))"""


class SandboxError(StreamRLError):
    """The sandbox could not run the code, so there is no verdict and no reward."""


class ProgramEnd(Struct, frozen=True, kw_only=True):
    """End of the code's process. ``status``: exit code, or minus the number of the signal that ended the process;
    ``seconds``, ``cpu_seconds``: wall and CPU time; ``timed_out``: the process ran beyond its time limit;
    ``last_error``: last line of its stderr."""

    status: int
    seconds: float
    cpu_seconds: float
    timed_out: bool
    last_error: str = ""


class Answer(Struct, frozen=True):
    """Answer of the code's process to questions about its module. Nothing in it is trusted. ``values``: values of the
    answers, None: the process wrote no values; ``raised``: exception that the process reports."""

    values: list[Any] | None = None
    raised: str = ""


def read_answer(content: bytes) -> Answer:
    """Decode the answer from a file that the code's process could write."""
    try:
        answer = json.loads(content) if content else {"raised": "it ended before it answered"}
        if "values" in answer:
            return Answer([decode(value) for value in answer["values"]])
        return Answer(raised=str(answer["raised"]))
    except MALFORMED as error:
        return Answer(raised=f"an answer that cannot be read: {type(error).__name__}: {error}")


class LayersFound(Struct, frozen=True, tag=True):
    """First message of a zygote. ``active``: layers that were built and tested; ``missing``: layers that could not be
    built, each with the reason."""

    active: Texts
    missing: TextsByName

    @property
    def isolating(self) -> bool:
        """Return whether files, network and other processes are out of reach. Landlock alone leaves UDP and signals
        open."""
        return "namespaces" in self.active or "seccomp" in self.active


class RunEnded(Struct, frozen=True, tag=True):
    """Message of a zygote about the end of a run. ``run``: id of the run; ``error``: reason why it could not begin."""

    run: int
    report: ProgramEnd | None = None
    error: str = ""


_messages: msgspec.json.Decoder[LayersFound | RunEnded] = msgspec.json.Decoder(LayersFound | RunEnded)


def read_zygote_message(content: bytes) -> LayersFound | RunEnded:
    """Decode a zygote's hello, or the end of a run. Raises ``SandboxError`` for anything else."""
    try:
        return _messages.decode(content)
    except UNDECODABLE as error:
        raise SandboxError(f"the sandbox says what is no message of it: {error}") from error


class Sandbox:
    """Runs code in jails. It belongs to one event loop. The first run starts the zygote, and so does the first run
    after a zygote died. ``layers``: names of ``ALL_LAYERS`` to use where the kernel has them."""

    def __init__(self, layers: Sequence[str] = ALL_LAYERS) -> None:
        self._layers = tuple(layers)
        self._starting = asyncio.Lock()
        self._run_ids = itertools.count()
        self._zygote: _Zygote | None = None

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the zygote and every run. A later run starts another."""
        zygote = self._zygote
        self._zygote = None
        if zygote is not None:
            await zygote.aclose()

    async def layers(self) -> LayersFound:
        """The active layers, and the reasons why others are missing. Raises ``SandboxError`` when no zygote starts."""
        return (await self._ready()).hello

    async def run_program(self, source: bytes, stdin: bytes, limits: Limits) -> tuple[ProgramEnd, bytes]:
        """Run ``source`` as a program. Returns its end and its stdout (up to the limit for files + 1)."""
        with _files(source, stdin, None, None) as files:
            report = await self._run("program", limits, files)
            return report, _content(files[2], limits.file_bytes + 1)

    async def run_module(self, source: bytes, order: JsonMapping, limits: Limits) -> tuple[ProgramEnd, Answer]:
        """Load ``source`` as a module and carry out ``order`` (see ``program.as_module``) in its process. Returns the
        end of the process and its answer."""
        with _files(source, json.dumps(order).encode(), None, None) as files:
            report = await self._run("module", limits, files)
            return report, read_answer(_content(files[2], limits.file_bytes + 1))

    async def _run(self, kind: str, limits: Limits, files: Sequence[int]) -> ProgramEnd:
        zygote = await self._ready()
        run_id = next(self._run_ids)
        order = {"run": run_id, "kind": kind, "limits": list(limits)}
        report = await zygote.run(run_id, order, files, limits.seconds + _ANSWER_GRACE_S)
        return replace(report, last_error=last_line(files[3]))

    async def _ready(self) -> _Zygote:
        async with self._starting:
            if self._zygote is None or self._zygote.dead:
                await self.aclose()
                self._zygote = await _Zygote.start(self._layers)
            return self._zygote


class _Zygote:
    """The process of a zygote and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, errors: int) -> None:
        self.hello = LayersFound((), {})
        self.dead = False
        self._process = process
        self._control = control
        self._errors = errors
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[Any] = self._loop.create_future()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    async def start(cls, layers: Sequence[str]) -> _Zygote:
        control, zygote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        errors = os.memfd_create("zygote errors")
        with zygote_socket:
            folder = str(Path(__file__).parent)
            process = start_session(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, folder, str(zygote_socket.fileno())],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env={"MALLOC_ARENA_MAX": "1"},  # an arena for each thread would count as memory of the code
                pass_fds=(zygote_socket.fileno(),),
            )
        zygote = cls(process, control, errors)
        try:
            control.send(json.dumps({"layers": list(layers)}).encode())
            async with asyncio.timeout(_START_S):
                zygote.hello = await zygote._hello
        except TimeoutError:
            await zygote.aclose()
            raise SandboxError(f"the sandbox did not start within {_START_S:g} s") from None
        except BaseException:
            await zygote.aclose()
            raise
        return zygote

    async def run(self, run_id: int, order: JsonObject, files: Sequence[int], seconds: float) -> ProgramEnd:
        answer = self._answers[run_id] = self._loop.create_future()
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], list(files))
            async with asyncio.timeout(seconds):
                run_end: RunEnded = await answer
        except OSError as error:  # TimeoutError too
            self._end(f"the sandbox does not answer ({type(error).__name__}: {error})")
            raise SandboxError("the sandbox does not answer: it is started again for the next run") from error
        except asyncio.CancelledError:
            with suppress(OSError):
                self._control.send(json.dumps({"cancel": run_id}).encode())
            raise
        finally:
            self._answers.pop(run_id, None)
        if run_end.report is None:
            raise SandboxError(f"no jail for the code: {run_end.error}")
        return run_end.report

    async def aclose(self) -> None:
        self._end("the sandbox was closed")
        try:
            await to_thread.run_sync(end_session, self._process, _END_S)
        finally:
            os.close(self._errors)

    def _receive(self) -> None:
        try:
            content = self._control.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            content = b""
        if not content:
            stderr = _content(self._errors, _MOST_STDERR_BYTES).decode(errors="replace").strip()
            self._end(f"the sandbox ended: {stderr[-500:] or 'it said nothing'}")
            return
        try:
            message = read_zygote_message(content)
        except SandboxError as error:
            self._end(str(error))
            return
        future = self._hello if isinstance(message, LayersFound) else self._answers.get(message.run)
        if future is not None and not future.done():
            future.set_result(message)

    def _end(self, reason: str) -> None:
        """Close the socket, which ends the zygote. Callers that wait for an answer get ``SandboxError``."""
        if self.dead:
            return
        self.dead = True
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for future in (self._hello, *self._answers.values()):
            if not future.done():
                future.set_exception(SandboxError(reason))
                future.exception()  # retrieve it: asyncio would report a future that nobody awaits


@contextlib.contextmanager
def _files(*contents: bytes | None) -> Iterator[list[int]]:
    """Make files in memory, one for each of ``contents``: sealed with the content; empty and writable for None."""
    files = []
    try:
        for content in contents:
            fd = os.memfd_create("run", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            files.append(fd)
            if content is not None:
                unwritten = memoryview(content)
                while unwritten:
                    unwritten = unwritten[os.write(fd, unwritten) :]
                os.lseek(fd, 0, os.SEEK_SET)
                fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        yield files
    finally:
        for fd in files:
            os.close(fd)


def _content(fd: int, limit: int) -> bytes:
    """The first ``limit`` bytes of a file."""
    content = b""
    while len(content) < limit and (part := os.pread(fd, limit - len(content), len(content))):
        content += part
    return content


@cache
def available_layers() -> LayersFound:
    """Find the layers of this machine by starting a sandbox once (about a tenth of a second). Raises nothing."""
    if sys.platform != "linux":
        return LayersFound((), dict.fromkeys(ALL_LAYERS, f"{sys.platform} has none of them: Linux only"))
    return probe_layers(ALL_LAYERS)


def probe_layers(layers: Texts) -> LayersFound:
    """Start a sandbox and return the names of ``layers`` that are active in it, and the reasons why others are not."""
    results = []

    async def start_sandbox() -> None:
        try:
            async with Sandbox(layers) as sandbox:
                results.append(await sandbox.layers())
        except (SandboxError, OSError) as error:
            results.append(LayersFound((), dict.fromkeys(layers, str(error))))

    # A thread: the caller may be on an event loop already.
    thread = threading.Thread(target=lambda: asyncio.run(start_sandbox()), name="sandbox probe")
    thread.start()
    thread.join()
    return results[0]

"""Runs a target many times in a forked process, and tells what ended it.

What a target is given follows from its name and the number of the execution alone. The number is written to shared
memory before the decoder sees a byte, so whoever crashed the process is known, and runs again (``run_one``).

Numbers come in blocks of ``BLOCK``: one generator draws the inputs of a block, and time and memory are looked at once a
block. A block that took too long or grew by half of what one execution may tells nothing yet of who it was: the slice
is run again then, in a new process, and every execution is looked at on its own (``watched``). Only that makes a fault.

========  ==============================================================================================
fault     how it is seen
========  ==============================================================================================
crash     the process was ended by a signal, or an exception came that is not the decoder's declared one
hang      ``SIGPROF``: the kernel ends an execution that used ``CPU_LIMIT_S`` of processor time, and
          ``CPU_S_A_BYTE``; or nothing moved for ``IDLE_LIMIT_S``
memory    the peak of resident memory grew by more than ``target.amplification`` x input +
          ``target.spare_bytes``; or more address space was asked for than ``ADDRESS_BYTES`` beyond
          what the process had
meaning   the target found that what was accepted cannot be (``AssertionError``)
========  ==============================================================================================
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

import msgspec

from campaigns.fuzz.mutations import mutated_message
from campaigns.fuzz.seeds import Seed

CPU_LIMIT_S, CPU_S_A_BYTE = 2.0, 5e-7
IDLE_LIMIT_S = 120.0
"""Nothing moved for so long, though it used no processor: it waits for something. The machine may be full."""

SPARE_BYTES = 16 << 20
ADDRESS_BYTES = 1 << 30
SCHEME = 2
"""Of how an input follows from its number. Scheme 1 drew each from a generator of its own."""

BLOCK = 256
_MOST_OUTCOMES = 400
_OUTCOME_OF_EACH = 8
"""One refusal of so many is told by its text, without what varies in it: that takes longer than most executions."""

_RESET_FROM = 1 << 20
_SUSPECT = 77
_VARYING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+|[-+]?\d[\d.e+-]*|b'[^']*'")

Run = Callable[[Sequence[bytes]], str]
Inputs = list[list[bytes]]


class Target(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A decoder. ``run``: gives it the frames of one message and returns a word for what it made of them; it may raise
    nothing but ``refusals``. ``repair``: puts right, after the mutation, what would hide what lies behind: a checksum,
    a digest. ``amplification``: bytes of memory for a byte of input, ``spare_bytes`` beside.
    ``quick``: executions in the suite."""

    name: str
    messages: Sequence[Sequence[Seed]]
    run: Run
    refusals: tuple[type[Exception], ...]
    repair: Callable[[Random, list[bytes]], list[bytes]] | None = None
    amplification: int = 8
    spare_bytes: int = SPARE_BYTES
    quick: int = 800


class Fault(msgspec.Struct, frozen=True):
    """An input that a decoder could not take. ``frames``: the input; ``began_at``: where the process began, whose
    memory may have been spoilt before."""

    target: str
    number: int
    kind: str
    reason: str
    frames: list[bytes]
    began_at: int


class Slice(msgspec.Struct, frozen=True):
    """Executions ``first`` to ``last`` (not itself): how they ended, and what they cost. ``seconds``: of processor
    time; ``grown_bytes``: of resident memory, over all; ``watched``: each was looked at on its own."""

    first: int
    last: int
    outcomes: dict[str, int]
    seconds: float
    grown_bytes: int
    fault: Fault | None = None
    watched: bool = False


def input_of(target: Target, number: int) -> list[bytes]:
    """What execution ``number`` gets."""
    return inputs_of(target, number, number + 1)[0]


def inputs_of(target: Target, first: int, last: int) -> Inputs:
    """What executions ``first`` to ``last`` (not itself) get, all of one block."""
    block = first // BLOCK
    random = Random(SCHEME << 96 | zlib.crc32(target.name.encode()) << 64 | block)
    drawn = [_drawn(target, random) for _ in range(block * BLOCK, last)]
    return drawn[first - block * BLOCK :]


def _drawn(target: Target, random: Random) -> list[bytes]:
    chosen = target.messages[int(random.random() * len(target.messages))]
    frames = mutated_message(random, chosen, target.messages)
    return target.repair(random, frames) if target.repair is not None and random.random() < 0.9 else frames


def check_seeds(target: Target) -> None:
    """Raise where a target refuses all that is valid: it would be fuzzed in vain."""
    accepted = 0
    for chosen in target.messages:
        try:
            target.run([frame.content for frame in chosen])
            accepted += 1
        except target.refusals as error:
            refused = error
    if 2 * accepted < len(target.messages):
        raise ValueError(f"{target.name} refuses most of its seeds: {refused}") from refused


def run_slice(target: Target, first: int, last: int, *, given: Sequence[Sequence[bytes]] = ()) -> Slice:
    """Fork, run executions up to the first fault, and tell how they ended. ``given``: inputs that are known."""
    running = RunningSlice(target, first, last, given=given)
    while (found := running.look(1.0)) is None:
        pass
    return found


def run_one(target: Target, frames: Sequence[bytes]) -> Slice:
    """Run a stored input again, as ``run_slice`` does."""
    return run_inputs(target, [frames])


def run_inputs(target: Target, inputs: Sequence[Sequence[bytes]]) -> Slice:
    """Run these inputs, one after the other, as ``run_slice`` does."""
    return run_slice(target, 0, len(inputs), given=inputs)


class RunningSlice:
    """Executions in a forked process. ``source``: readable when ``look`` should be called."""

    source: int
    _child: int
    _watched: bool
    _told: bytes
    _at: int
    _moved: float

    def __init__(self, target: Target, first: int, last: int, *, given: Sequence[Sequence[bytes]] = ()) -> None:
        self.target = target
        self._numbers = range(first, last)
        self._given = given
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._number = memoryview(self._page).cast("q")
        self._fork(watched=bool(given))

    def look(self, wait_s: float) -> Slice | None:
        """What became of it; None while it runs. A process in which nothing moves any more is killed."""
        try:
            if select.select([self.source], [], [], wait_s)[0]:
                part = os.read(self.source, 1 << 16)
                if not part:
                    return self._ended()
                self._told += part
        except BaseException:
            self.end()
            raise
        at = int(self._number[0])
        if at != self._at:
            self._at, self._moved = at, time.monotonic()
        elif time.monotonic() - self._moved > IDLE_LIMIT_S:
            os.kill(self._child, signal.SIGKILL)
            self._moved = time.monotonic()
        return None

    def end(self) -> None:
        """Kill the process."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self.source)

    def _fork(self, *, watched: bool) -> None:
        self._watched = watched
        self._told, self._at, self._moved = b"", self._numbers.start, time.monotonic()
        self._number[0] = self._numbers.start
        sys.stdout.flush()
        sys.stderr.flush()
        self.source, sink = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(self.source)
            _child(self.target, self._numbers, self._inputs, self._number, sink, watched=watched)
        os.close(sink)

    def _ended(self) -> Slice | None:
        os.close(self.source)
        _, status = os.waitpid(self._child, 0)
        suspect = os.WIFEXITED(status) and os.WEXITSTATUS(status) == _SUSPECT
        if not self._watched and (suspect or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF)):
            self._fork(watched=True)
            return None
        reached = int(self._number[0])
        self._number.release()
        self._page.close()
        if self._told and not status:
            return msgspec.msgpack.decode(self._told, type=Slice)
        kind, reason = _how_it_ended(status)
        (frames,) = self._inputs(reached, reached + 1)
        first = self._numbers.start
        fault = Fault(self.target.name, reached, kind, reason, frames, first)
        return Slice(first, reached, {}, 0.0, 0, fault, self._watched)

    def _inputs(self, first: int, last: int) -> Inputs:
        if self._given:
            return [list(frames) for frames in self._given[first:last]]
        return inputs_of(self.target, first, last)


def _how_it_ended(status: int) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        return "hang", f"one execution used more than {CPU_LIMIT_S:g} s of processor time"
    if code == -signal.SIGKILL:
        return "hang", f"nothing moved for {IDLE_LIMIT_S:g} s, or the kernel ended it for its memory"
    return "crash", f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# ---- in the forked process -----------------------------------------------------------------------------


def _child(
    target: Target,
    numbers: range,
    inputs_at: Callable[[int, int], Inputs],
    number: memoryview,
    sink: int,
    *,
    watched: bool,
) -> None:
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.disable()
        os.environ["RUST_BACKTRACE"] = "0"  # what a panic is told by takes 50 MiB of symbols
        address = _status_kib("VmSize") * 1024 + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (address, address))
        gc.freeze()  # what was there before is no garbage
        ctypes.CDLL(None).malloc_trim(0)  # what the parent freed would be taken first, and no growth be seen
        told = _Executions(target, number, watched=watched).run(numbers, inputs_at)
        signal.setitimer(signal.ITIMER_PROF, 0)
        content = memoryview(msgspec.msgpack.encode(told))
        while content:
            content = content[os.write(sink, content) :]
        code = 0
    except _SuspectError:
        code = _SUSPECT
    except BaseException:  # noqa: BLE001 - the parent sees the exit code; this process must not go on as a test
        traceback.print_exc()
    finally:
        os._exit(code)


class _SuspectError(Exception):
    """An execution of this slice took more than it may, perhaps."""


class _Executions:
    """``watched``: time and memory of each execution; otherwise of a block, and too much of either ends the process,
    since it cannot be known who it was."""

    def __init__(self, target: Target, number: memoryview, *, watched: bool) -> None:
        self._target = target
        self._number = number
        self._watched = watched
        self._outcomes: Counter[str] = Counter()
        self._peak = 0

    def run(self, numbers: range, inputs_at: Callable[[int, int], Inputs]) -> Slice:
        began, before = time.process_time(), _status_kib("VmRSS")
        fault = None
        for first, inputs in self._watched_together(numbers, inputs_at):
            self._peak = self._peak if self._watched and self._peak else _reset_peak()
            limit = CPU_LIMIT_S + (CPU_S_A_BYTE * sum(map(len, inputs[0])) if self._watched else 0.0)
            signal.setitimer(signal.ITIMER_PROF, limit)
            at, problem = self._run_all(first, inputs)
            if problem := problem or self._too_much_memory(inputs):
                kind, _, reason = problem.partition(": ")
                frames = inputs[at - first]
                fault = Fault(self._target.name, at, kind, _plain(reason), frames, numbers.start)
                numbers = range(numbers.start, at)
                break
        grown_bytes = (_status_kib("VmRSS") - before) << 10
        seconds = time.process_time() - began
        return Slice(numbers.start, numbers.stop, dict(self._outcomes), seconds, grown_bytes, fault, self._watched)

    def _watched_together(
        self, numbers: range, inputs_at: Callable[[int, int], Inputs]
    ) -> Iterator[tuple[int, Inputs]]:
        """First number and inputs of a block, or of each execution."""
        first = numbers.start
        while first < numbers.stop:
            last = min(first - first % BLOCK + BLOCK, numbers.stop)
            inputs = inputs_at(first, last)
            if self._watched:
                yield from ((at, [frames]) for at, frames in enumerate(inputs, start=first))
            else:
                yield first, inputs
            first = last

    def _run_all(self, first: int, inputs: Inputs) -> tuple[int, str]:
        """Number of the last one that was run, and what is wrong with it."""
        run, refusals, number, outcomes = self._target.run, self._target.refusals, self._number, self._outcomes
        at = first
        for at, frames in enumerate(inputs, start=first):
            number[0] = at
            try:
                outcome = run(frames)
            except refusals as error:
                outcome = "refused" if at % _OUTCOME_OF_EACH else _refusal(error)
            except AssertionError as error:
                return at, f"meaning: {error}\n{traceback.format_exc(limit=-4)}"
            except BaseException as error:  # noqa: BLE001 - panics of compiled code too: it is what is looked for
                return at, f"crash: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
            if outcome in outcomes or len(outcomes) < _MOST_OUTCOMES:
                outcomes[outcome] += 1
            else:
                outcomes["more"] += 1
        return at, ""

    def _too_much_memory(self, inputs: Inputs) -> str:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._peak << 10
        if not self._watched:
            if grown > self._target.spare_bytes // 2:
                raise _SuspectError
            return ""
        if grown <= _RESET_FROM:
            return ""
        self._peak = _reset_peak()
        size = sum(map(len, inputs[0]))
        allowed = self._target.amplification * size + self._target.spare_bytes
        if grown <= allowed:
            return ""
        return f"memory: the peak grew by {grown} bytes for {size} of input; {allowed} are allowed"


def _refusal(error: Exception) -> str:
    """The kind of a refusal: its text without what varies."""
    return _plain("refused: " + _VARYING.sub("#", str(error)[:200])[:90])


def _plain(text: str) -> str:
    """Without what cannot be written down: what a decoder quotes may be any text."""
    return text.encode("ascii", "backslashreplace").decode()


def _reset_peak() -> int:
    """Forget the peak of resident memory; returns what it is now, in KiB."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status_kib(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1])

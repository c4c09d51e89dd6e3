"""Runs a target many times in a forked process, and finds what ended it.

What a target is given follows from its name and the number of the execution alone. The number is written to shared
memory before the decoder sees a byte, so that what crashed the process is known, and runs again (``run_inputs``).

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
========  =============================================================================================="""

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
from collections.abc import Callable, Sequence
from random import Random
from typing import NoReturn

import msgspec

from campaigns.fuzz.mutations import mutated_message
from campaigns.fuzz.seeds import Seed

CPU_LIMIT_S, CPU_S_A_BYTE = 2.0, 5e-7
IDLE_LIMIT_S = 120.0
SPARE_BYTES = 16 << 20
ADDRESS_BYTES = 1 << 30
_RESET_FROM = 1 << 20
_MOST_OUTCOMES = 400
_VARYING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+|[-+]?\d[\d.e+-]*|b'[^']*'")

Run = Callable[[Sequence[bytes]], str]


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
    quick: int = 600


class Fault(msgspec.Struct, frozen=True):
    """An input that a decoder could not take. ``frames``: the input."""

    target: str
    number: int
    kind: str
    reason: str
    frames: list[bytes]


class Slice(msgspec.Struct, frozen=True):
    """How executions ended."""

    outcomes: dict[str, int]
    fault: Fault | None = None


def input_of(target: Target, number: int) -> list[bytes]:
    """Return what execution ``number`` gets."""
    random = Random(zlib.crc32(target.name.encode()) << 64 | number)
    chosen = target.messages[int(random.random() * len(target.messages))]
    frames = mutated_message(random, chosen, target.messages)
    return target.repair(random, frames) if target.repair is not None and random.random() < 0.9 else frames


def check_seeds(target: Target) -> None:
    """Raise where a target refuses most of what is valid: it would be fuzzed in vain."""
    accepted = 0
    for chosen in target.messages:
        try:
            target.run([frame.content for frame in chosen])
            accepted += 1
        except target.refusals as error:
            refused = error
    if 2 * accepted < len(target.messages):
        raise ValueError(f"{target.name} refuses most of its seeds: {refused}") from refused


def run_inputs(target: Target, inputs: Sequence[Sequence[bytes]]) -> Slice:
    """Run these inputs, one after the other, as ``run_slice`` does."""
    return run_slice(target, 0, len(inputs), given=inputs)


def run_slice(target: Target, first: int, last: int, *, given: Sequence[Sequence[bytes]] = ()) -> Slice:
    """Fork, and run executions ``first`` to ``last`` (not itself) up to the first fault. ``given``: their inputs."""

    def input_at(number: int) -> list[bytes]:
        return list(given[number]) if given else input_of(target, number)

    page = mmap.mmap(-1, mmap.PAGESIZE)
    current = memoryview(page).cast("q")
    current[0] = first
    sys.stdout.flush()
    sys.stderr.flush()
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        _child(target, range(first, last), input_at, current, sink)
    os.close(sink)
    result, at, moved = b"", first, time.monotonic()
    try:
        while True:
            if select.select([source], [], [], 1.0)[0]:
                part = os.read(source, 1 << 16)
                if not part:
                    break
                result += part
            if current[0] != at:
                at, moved = int(current[0]), time.monotonic()
            elif time.monotonic() - moved > IDLE_LIMIT_S:
                os.kill(child, signal.SIGKILL)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(source)
        _, status = os.waitpid(child, 0)
    if result and not status:
        return msgspec.msgpack.decode(result, type=Slice)
    number = int(current[0])
    kind, reason = _how_it_ended(os.waitstatus_to_exitcode(status))
    return Slice({}, Fault(target.name, number, kind, reason, input_at(number)))


def _how_it_ended(code: int) -> tuple[str, str]:
    if code == -signal.SIGPROF:
        return "hang", f"one execution used more than {CPU_LIMIT_S:g} s of processor time"
    if code == -signal.SIGKILL:
        return "hang", f"nothing moved for {IDLE_LIMIT_S:g} s, or the kernel ended it for its memory"
    return "crash", f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# ---- in the forked process -----------------------------------------------------------------------------

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def _child(
    target: Target, numbers: range, input_at: Callable[[int], list[bytes]], current: memoryview, sink: int
) -> NoReturn:
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.disable()
        for number in _CRASHES:  # a library's own handler may take half a second to print a native backtrace
            signal.signal(number, signal.SIG_DFL)
        os.environ["RUST_BACKTRACE"] = "0"  # a panic's backtrace takes 50 MiB of symbols
        with open("/proc/self/status") as file:
            size = next(int(line.split()[1]) for line in file if line.startswith("VmSize:"))
        address = size * 1024 + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (address, address))
        gc.freeze()  # what was there before is no garbage
        ctypes.CDLL(None).malloc_trim(0)  # else what the parent freed is taken first, and no growth is seen
        content = memoryview(msgspec.msgpack.encode(_run_all(target, numbers, input_at, current)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        while content:
            content = content[os.write(sink, content) :]
        code = 0
    except BaseException:  # noqa: BLE001 - the parent sees the exit code; this process must not go on as a test
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_all(target: Target, numbers: range, input_at: Callable[[int], list[bytes]], current: memoryview) -> Slice:
    outcomes: Counter[str] = Counter()
    peak = _reset_peak()
    for number in numbers:
        frames = input_at(number)
        size = sum(map(len, frames))
        current[0] = number
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S + CPU_S_A_BYTE * size)
        outcome, problem = _run(target, frames)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak << 10
        if grown > _RESET_FROM:
            peak = _reset_peak()
            allowed = target.amplification * size + target.spare_bytes
            if not problem and grown > allowed:
                problem = f"memory: the peak grew by {grown} bytes for {size} of input; {allowed} are allowed"
        if problem:
            kind, _, reason = problem.partition(": ")
            return Slice(dict(outcomes), Fault(target.name, number, kind, _plain(reason), frames))
        outcomes[outcome if outcome in outcomes or len(outcomes) < _MOST_OUTCOMES else "more"] += 1
    return Slice(dict(outcomes))


def _run(target: Target, frames: list[bytes]) -> tuple[str, str]:
    """Return the outcome, and what is wrong with it."""
    try:
        return target.run(frames), ""
    except target.refusals as error:
        return _plain("refused: " + _VARYING.sub("#", str(error)[:200])[:90]), ""
    except AssertionError as error:
        return "", f"meaning: {error}\n{traceback.format_exc(limit=-4)}"
    except BaseException as error:  # noqa: BLE001 - panics of compiled code too: it is what is looked for
        return "", f"crash: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"


def _plain(text: str) -> str:
    """Without what cannot be written down: what a decoder quotes may be any text."""
    return text.encode("ascii", "backslashreplace").decode()


def _reset_peak() -> int:
    """Forget the peak of resident memory; returns what it is now, in KiB."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

"""Runs a target many times in a forked process, and tells what ended it.

What a target is given follows from its name and the number of the execution alone. The number is written to shared
memory before the decoder sees a byte, so whoever crashed the process is known, and runs again (``run_one``).

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

import msgspec

from tests.fuzz.mutations import mutated_message
from tests.fuzz.seeds import Seed

CPU_LIMIT_S, CPU_S_A_BYTE = 2.0, 5e-7
IDLE_LIMIT_S = 120.0
"""Nothing moved for so long, though it used no processor: it waits for something. The machine may be full."""

SPARE_BYTES = 16 << 20
ADDRESS_BYTES = 1 << 30
_MOST_OUTCOMES = 400
_RESET_FROM = 1 << 20
_VARYING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+|[-+]?\d[\d.e+-]*|b'[^']*'")

Run = Callable[[Sequence[bytes]], str]
InputAt = Callable[[int], list[bytes]]


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
    """Executions ``first`` to ``last`` (not itself): how they ended, and what they cost. ``grown_bytes``: of resident
    memory, over all."""

    first: int
    last: int
    outcomes: dict[str, int]
    seconds: float
    grown_bytes: int
    fault: Fault | None = None


def input_of(target: Target, number: int) -> list[bytes]:
    """What execution ``number`` gets."""
    random = Random(zlib.crc32(target.name.encode()) << 32 | number)
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

    def input_at(number: int) -> list[bytes]:
        return list(given[number]) if given else input_of(target, number)

    page = mmap.mmap(-1, mmap.PAGESIZE)
    number = memoryview(page).cast("q")
    number[0] = first
    sys.stdout.flush()
    sys.stderr.flush()
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        _child(target, range(first, last), input_at, number, sink)
    os.close(sink)
    try:
        told = _read_all(source, child, number)
        _, status = os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(source)
    reached = int(number[0])
    number.release()
    page.close()
    if told and not status:
        return msgspec.msgpack.decode(told, type=Slice)
    kind, reason = _how_it_ended(status)
    fault = Fault(target.name, reached, kind, reason, input_at(reached), first)
    return Slice(first, reached, {}, 0.0, 0, fault)


def run_one(target: Target, frames: Sequence[bytes]) -> Slice:
    """Run a stored input again, as ``run_slice`` does."""
    return run_inputs(target, [frames])


def run_inputs(target: Target, inputs: Sequence[Sequence[bytes]]) -> Slice:
    """Run these inputs, one after the other, as ``run_slice`` does."""
    return run_slice(target, 0, len(inputs), given=inputs)


def _how_it_ended(status: int) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        return "hang", f"one execution used more than {CPU_LIMIT_S:g} s of processor time"
    if code == -signal.SIGKILL:
        return "hang", f"nothing moved for {IDLE_LIMIT_S:g} s, or the kernel ended it for its memory"
    return "crash", f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _read_all(source: int, child: int, number: memoryview) -> bytes:
    """What the child tells; it is killed when nothing moves any more."""
    told, at, moved = b"", int(number[0]), time.monotonic()
    while True:
        if select.select([source], [], [], 1.0)[0]:
            part = os.read(source, 1 << 16)
            if not part:
                return told
            told += part
        if int(number[0]) != at:
            at, moved = int(number[0]), time.monotonic()
        elif time.monotonic() - moved > IDLE_LIMIT_S:
            os.kill(child, signal.SIGKILL)
            moved = time.monotonic()


# ---- in the forked process -----------------------------------------------------------------------------


def _child(target: Target, numbers: range, input_at: InputAt, number: memoryview, sink: int) -> None:
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        faulthandler.disable()
        os.environ["RUST_BACKTRACE"] = "0"  # what a panic is told by takes 50 MiB of symbols
        address = _status_kib("VmSize") * 1024 + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (address, address))
        gc.freeze()  # what was there before is no garbage
        told = _executions(target, numbers, input_at, number)
        signal.setitimer(signal.ITIMER_PROF, 0)
        content = memoryview(msgspec.msgpack.encode(told))
        while content:
            content = content[os.write(sink, content) :]
        code = 0
    except BaseException:  # noqa: BLE001 - the parent sees the exit code; this process must not go on as a test
        traceback.print_exc()
    finally:
        os._exit(code)


def _executions(target: Target, numbers: range, input_at: InputAt, number: memoryview) -> Slice:
    outcomes: Counter[str] = Counter()
    run, refusals, set_timer, usage = target.run, target.refusals, signal.setitimer, resource.getrusage
    began, before = time.perf_counter(), _status_kib("VmRSS")
    peak = _reset_peak()
    first, last = numbers.start, numbers.stop
    for at in numbers:
        number[0] = at
        frames = input_at(at)
        set_timer(signal.ITIMER_PROF, CPU_LIMIT_S + CPU_S_A_BYTE * sum(map(len, frames)))
        problem = ""
        try:
            outcome = run(frames)
        except refusals as error:
            outcome = _refusal(error)
        except AssertionError as error:
            problem = f"meaning: {error}\n{traceback.format_exc(limit=-4)}"
        except BaseException as error:  # noqa: BLE001 - panics of compiled code too: it is what is looked for
            problem = f"crash: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
        now = usage(resource.RUSAGE_SELF).ru_maxrss
        if now - peak > _RESET_FROM >> 10:
            grown, size = (now - peak) << 10, sum(map(len, frames))
            allowed = target.amplification * size + target.spare_bytes
            if grown > allowed and not problem:
                problem = f"memory: the peak grew by {grown} bytes for {size} of input; {allowed} are allowed"
            peak = _reset_peak()
        if problem:
            kind, _, reason = problem.partition(": ")
            fault = Fault(target.name, at, kind, _plain(reason), frames, first)
            return Slice(first, at, dict(outcomes), time.perf_counter() - began, 0, fault)
        if outcome in outcomes or len(outcomes) < _MOST_OUTCOMES:
            outcomes[outcome] += 1
        else:
            outcomes["more"] += 1
    grown_bytes = (_status_kib("VmRSS") - before) << 10
    return Slice(first, last, dict(outcomes), time.perf_counter() - began, grown_bytes)


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

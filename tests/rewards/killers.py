"""Reward functions that behave, and all the ways in which they do not."""

import asyncio
import contextlib
import ctypes
import functools
import json
import mmap
import os
import re
import signal
import stat
import sys
import threading
import time
import types
from fractions import Fraction

import numpy as np

RELEASE = threading.Event()  # ends the functions that would never end, so that the test process can
HALF_A_PAIR = r'"\ud83d"'  # of surrogates, as a model may write it: a text that UTF-8 has no bytes for


def length(completion):
    return len(completion)


async def async_length(completion, **columns):
    await asyncio.sleep(0)
    return len(completion)


async def match(completion, *, answer, bonus=0, **columns):
    return float(completion == answer) + bonus


def everything(completion, *, prompt, prompt_id, token_ids, finish_reason, **columns):
    assert (completion, prompt, prompt_id, finish_reason) == ("abc", "sort", "p0", "stop"), locals()
    assert token_ids == [3, 4, 5, 1], token_ids
    assert columns == {"answer": "x", "extra": [1, 2]}, columns
    columns["extra"].append(3)  # must not reach anybody else
    return 1


def ranks(prompts, completions, *, answer, finish_reason, **given):
    count = len(completions)
    assert isinstance(completions, list)
    assert (finish_reason, answer, prompts) == (["stop"] * count, ["x"] * count, ["sort"] * count)
    assert given == {"completion_ids": given["completion_ids"], "extra": [[1]] * count}, given
    assert [len(ids) - 1 for ids in given["completion_ids"]] == [len(text) for text in completions]
    given["extra"][0].append(2)  # must not reach its siblings
    assert given["extra"][1:] == [[1]] * (count - 1)
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [float(order.index(i)) for i in range(len(completions))]


def verl(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, extra_info) == ("gsm8k", {}), locals()
    return {"score": float(solution_str == ground_truth), "acc": 1.0, "said": solution_str}


async def verl_async(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "acc": 1.0}


def of_chat(completions, prompts, answer, **_):
    assert all(prompt == [{"role": "user", "content": "sort"}] for prompt in prompts)
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [float(completion[0]["content"] == a) for completion, a in zip(completions, answer, strict=True)]


async def of_texts(prompts, completions: list[str], answer):
    return [float(completion == a) for completion, a in zip(completions, answer, strict=True)]


def of_ids(completion_ids, answer, **_):
    return [float(len(ids) == len(a) + 1) for ids, a in zip(completion_ids, answer, strict=True)]


def last(answer, completion):
    return float(completion == answer)


def only_named(*, completion, answer):
    return float(completion == answer)


async def group_none(completions):
    return [None if len(c) == 1 else True for c in completions]


def group_short(completions):
    return [1.0]


def group_number(completions):
    return 1.0


def hidden_async(function):
    def inner(*positional, **named):
        return function(*positional, **named)

    return inner


wrapped = hidden_async(async_length)
partial = functools.partial(match, answer="abc")


class Judge:
    async def __call__(self, completion, *, answer):
        return 0.5


judge = Judge()


def raises(completion):
    raise ValueError("no such digit\nsecond line")


async def raises_async(completion):
    raise KeyError("column")


def raises_half_a_pair(completion):
    raise ValueError(f"no such answer: {json.loads(HALF_A_PAIR)}")


async def raises_half_a_pair_async(completion):
    raise ValueError(f"no such answer: {json.loads(HALF_A_PAIR)}")


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("no")


def raises_unreadable(completion):
    raise UnreadableError


def system_exit(completion):
    sys.exit(3)


async def system_exit_async(completion):
    raise SystemExit("bye")


def keyboard_interrupt(completion):
    raise KeyboardInterrupt


async def keyboard_interrupt_async(completion):
    raise KeyboardInterrupt


async def generator_exit(completion):
    raise GeneratorExit


async def stop_iteration(completion):
    raise StopAsyncIteration


def stop_iteration_sync(completion):
    raise StopIteration


async def cancelled_error(completion):
    raise asyncio.CancelledError


async def cancels_itself(completion):
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


def recursion(completion):
    return recursion(completion)


async def hangs_async(completion):
    await asyncio.Event().wait()


async def swallows_cancellation(completion):
    while not RELEASE.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:  # what a careless `except BaseException: continue` does
            continue
    return 1.0


async def late(completion):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return 1.0


async def holds_interpreter(completion):
    re.match(r"(a+)+b", "a" * 60)


async def blocks_on_z(completion):
    if completion == "z":
        time.sleep(7200)  # noqa: ASYNC251 - this is the fault
    return 1.0


async def never_ends_on_z(completion):
    while completion == "z":
        try:
            await asyncio.sleep(7200)
        except asyncio.CancelledError:
            continue
    return 1.0


async def slow_on_z(completion):
    if completion == "z":
        await asyncio.sleep(0.05)
    return len(completion)


def burns(completion):
    end = time.perf_counter() + 0.002
    while time.perf_counter() < end:
        pass
    return 1.0


def ends_process(completion):
    os._exit(9)


def nan(completion):
    return float("nan")


def infinite(completion):
    return float("-inf")


def huge(completion):
    return 10**400


def text(completion):
    return "1.0"


def mapping(completion):
    return {"score": 1.0, "style": True, "other": None}


def mapping_of_text(completion):
    return {"score": 1.0, "style": "good"}


def mapping_of_a_long_name(completion):
    return {"score": 1.0, "n" * 101: 1.0}


def mapping_of_half_a_pair(completion):
    return {"score": 1.0, json.loads(HALF_A_PAIR): 1.0}


def mapping_of_nothing(completion):
    return {"score": None}


def array(completion):
    return np.ones(1)


def nested(completion):
    return [1.0]


def true(completion):
    return True


def none(completion):
    return None


def three(completion):
    return 3


def half(completion):
    return 0.5


def numpy_number(completion):
    return np.float32(0.25)


def fraction(completion):
    return Fraction(1, 4)


# ---- what must not touch anybody else: on a completion "z" each does its worst, otherwise it returns the length


def fault(worst):
    def reward(completion):
        return worst() if completion == "z" else len(completion)

    reward.__name__ = worst.__name__
    return reward


@fault
def fault_raises():
    raise ValueError("planted")


@fault
def fault_nan():
    return float("nan")


@fault
def fault_text():
    return "1.0"


@fault
def fault_late():
    time.sleep(7200)


@fault
def fault_exit():
    sys.exit(0)


@fault
def fault_os_exit():
    os._exit(0)


@fault
def fault_forks():
    """Copies of the process that go on as if nothing had been, and one that leaves its session and stays."""
    if os.fork() == 0:
        return 111.0
    if os.fork() == 0:
        os.setsid()
        time.sleep(7200)
    return 1.0


@fault
def fault_forks_and_hangs():
    if os.fork() == 0:
        os.setsid()
    time.sleep(7200)


@fault
def fault_leaks():
    kept = []
    while sum(map(len, kept)) < 4 << 30:
        kept.append(bytearray(16 << 20))
    return 1.0


@fault
def fault_deadlocks():
    lock = threading.Lock()
    with lock, lock:
        return 1.0


@fault
def fault_prints():
    for _ in range(100):
        sys.stdout.write("x" * (1 << 20))
        sys.stdout.write("\n")
    return 1.0


class NeverWritten:
    def flush(self):
        threading.Event().wait()


def stalls_after_z(completion):
    """Answers, and then takes no other call: what it printed is flushed between two of them."""
    if completion == "z":
        sys.stdout = NeverWritten()
    return len(completion)


async def fault_blocks_loop(completion):
    if completion == "z":
        while True:
            pass
    await asyncio.sleep(0)
    return len(completion)


async def fault_swallows(completion):
    while completion == "z":
        try:
            await asyncio.sleep(7200)
        except asyncio.CancelledError:
            continue
    return len(completion)


# ---- limits, retries, options


def tries(completion, *, directory, until):
    """Raises until it was called so often."""
    with open(os.path.join(directory, "calls"), "a") as calls:
        calls.write(f"{time.monotonic()}\n")
    with open(os.path.join(directory, "calls")) as calls:
        count = len(calls.readlines())
    if count < until:
        raise ConnectionError("come back later")
    return float(count)


def scaled(completion, *, factor, offset=0.0):
    return factor * len(completion) + offset


def product(values, *, answer=""):
    result = 1.0
    for value in values.values():
        result *= value
    return result


def visible_environment(completion):
    return {name.lower(): 1.0 for name in os.environ if name.endswith(("_TOKEN", "_KEY"))}


KEPT = []


def leaks_a_little(completion):
    KEPT.append(bytearray(b"x") * (20 << 20))
    time.sleep(0.05)
    return os.getpid()


async def waits(completion, *, seconds):
    await asyncio.sleep(seconds)
    return 1.0


def takes(completion, *, seconds):
    time.sleep(seconds)
    return 1.0


def prepared(completion, *, missing):
    return 1.0


# ---- what strikes again and again


@fault
def fault_segfaults():
    ctypes.string_at(0)


@fault
def fault_kills_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(7200)


@fault
def fault_writes_to_its_channel():
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"\xff" * 64)
    return 1.0


def leaks_threads(completion):
    KEPT.append(threading.Thread(target=threading.Event().wait, daemon=True))
    KEPT[-1].start()
    return float(len(completion))


def leaks_addresses(completion):
    KEPT.append(mmap.mmap(-1, 8 << 20))
    return float(len(completion))


def leaks_descriptors(completion):
    KEPT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(5))
    return float(len(completion))


def leaks_and_needs_many(completion):
    """Keeps a few descriptors, and takes more for a moment than a process has that kept those of five calls."""
    KEPT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(20))
    for descriptor in [os.dup(KEPT[-1]) for _ in range(140)]:
        os.close(descriptor)
    return float(len(completion))


async def leaks_and_needs_many_async(completion):
    return leaks_and_needs_many(completion)


def noted(completion, *, path, seconds=0.0):
    """Notes that it began, keeps a thread, and does as the completion says."""
    with open(path, "a") as begun:
        begun.write(f"{completion}\n")
    leaks_threads(completion)
    if completion == "hang":
        time.sleep(7200)
    if completion == "exit":
        os._exit(0)
    if completion == "write":
        fault_writes_to_its_channel("z")
    time.sleep(seconds)
    return float(len(completion))


# ---- clocks


def patch_clocks():
    """As freezegun does: also where somebody has imported the functions by name."""
    frozen = {
        time.monotonic_ns: lambda: 1 << 62,
        time.monotonic: lambda: 1e9,
        time.perf_counter: lambda: 1e9,
        time.process_time: lambda: 1e9,
        time.time: lambda: 1e9,
        time.sleep: lambda seconds: None,
    }
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if isinstance(value, types.BuiltinFunctionType) and value in frozen:
                setattr(module, name, frozen[value])


def fault_stops_clocks(completion):
    patch_clocks()
    if completion == "z":
        threading.Event().wait()
    return len(completion)


async def fault_stops_clocks_async(completion):
    patch_clocks()
    if completion == "z":
        await asyncio.Event().wait()
    return len(completion)

"""Reward functions that behave, and all the ways in which they do not."""

import asyncio
import functools
import os
import re
import sys
import threading
import time
from fractions import Fraction

import numpy as np

RELEASE = threading.Event()  # ends the functions that would never end, so that the test process can


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


def ranks(completions, *, answer, finish_reason, prompt):
    assert isinstance(completions, list)
    assert finish_reason == ["stop"] * len(completions)
    assert isinstance(answer, str)
    assert prompt == "sort"
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [float(order.index(i)) for i in range(len(completions))]


async def group_none(completions):
    return [None if len(c) == 1 else True for c in completions]


def group_short(completions):
    return [1.0]


def group_number(completions):
    return 1.0


def group_one_nan(completions):
    return [float("nan"), *[2.0] * (len(completions) - 1)]


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


def hangs_sync(completion):
    RELEASE.wait(30)
    return 1.0


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


async def blocks_loop(completion):
    time.sleep(600)  # noqa: ASYNC251 - this is the fault


async def holds_interpreter(completion):
    re.match(r"(a+)+b", "a" * 60)


async def blocks_on_z(completion):
    if completion == "z":
        time.sleep(600)  # noqa: ASYNC251 - this is the fault
    return 1.0


def hangs_for_ever(completion):
    if completion == "z":
        threading.Event().wait()
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
    return {"score": 1.0}


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


def biggest(completion):
    return 1.7e308

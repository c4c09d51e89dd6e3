"""A call process that answers many calls takes no more memory than one that answered a few."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, ctypes, socket, sys, threading
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.frames import CallAnswer, CallOrder, CallPage, FrameReader, to_frame
from streamrl.rewards.calls.process import LoopServer
from streamrl.rewards.signature import load_reward

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd us fs uord ford keep".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Heap
worker, theirs = socket.socketpair()
CALLS = 8

def ask():
    frames, sizes = FrameReader(CallAnswer), []
    list(frames.feed(worker.recv(4096)))  # it is ready
    for number in range(400):
        orders = [CallOrder(number * CALLS + n + 1, 0, 60.0, "x" * 300, {}) for n in range(CALLS)]
        worker.sendall(b"".join(map(to_frame, orders)))
        answers = 0
        while answers < CALLS:
            answers += len(list(frames.feed(worker.recv(4096))))
        if number in (40, 399):
            sizes.append(mallinfo().arena)
    print(sizes[1] - sizes[0], flush=True)
    worker.close()

threading.Thread(target=ask).start()
reward = load_reward(Reward(function=f"{sys.argv[1]}:soon"))
asyncio.run(LoopServer(theirs, CallPage(CallPage.create()), [reward], 1 << 30).serve())
"""


async def soon(completion: str) -> float:
    """A reward that takes a turn of the loop."""
    await asyncio.sleep(0)
    return float(len(completion))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not this C library")
def test_what_comes_in_does_not_make_the_heap_crawl() -> None:
    """Where each piece is received into a large block, and cut to what came, the next large block lies behind it."""
    command = [sys.executable, "-c", SCRIPT, __file__]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 300 << 10

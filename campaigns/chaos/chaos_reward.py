"""The reward of the chaos runs: a number that the completion alone decides, and a line for each call.

The ledger is the runner's, not the product's: one JSON line a call, appended in one write, whatever happens to the
process a moment later."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.pretrained.turns.tool_calls import ToolCall
from streamrl.run.environments.chat import EpisodePolicy
from streamrl.run.environments.tools import ToolContext


def digest_of(token_ids: Sequence[int]) -> str:
    """What the tap in the trainer calls a completion."""
    return hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=12).hexdigest()


def reward_of(prompt_id: str, digest: str) -> float:
    """0 to 1, the same for the same completion of the same prompt."""
    drawn = hashlib.blake2b(f"{prompt_id} {digest}".encode(), digest_size=4).digest()
    return int.from_bytes(drawn, "little") / 2**32


async def ledgered(completion: str, *, prompt_id: str, token_ids: Sequence[int], ledger: str) -> float:
    """Scores, and writes down that it did. Takes up to 10 ms, so that calls are under way when something dies."""
    del completion
    digest = digest_of(token_ids)
    await asyncio.sleep(random.random() / 100)
    return _written(ledger, prompt_id, digest, reward_of(prompt_id, digest))


async def ledgered_sort(
    completion: str,
    *,
    prompt: str,
    answer: str,
    finish_reason: str,
    prompt_id: str,
    token_ids: Sequence[int],
    ledger: str,
) -> float:
    """The demo's own reward (``examples/sort/reward.py``), with a ledger."""
    last_list = completion[:-1].rpartition(";")[2] or prompt[:-1]
    right = finish_reason == "stop" and completion.endswith(".") and last_list == answer
    return _written(ledger, prompt_id, digest_of(token_ids), float(right))


def effect(turn: int, context: ToolContext) -> str:
    """Do what may not be done twice: write a line."""
    ledger = str(Path(os.environ["STREAMRL_CHAOS_TAP"]).with_name("ledger.jsonl"))
    _append(ledger, "environment-0", "called", trajectory=context.trajectory, turn=turn)
    return " 1 2 "


async def talk(model: EpisodePolicy, *, prompt: str) -> None:
    """Talk for two to four turns, with a call of ``effect`` between them, which a simulated engine does not write."""
    chat = model.chat(tools=[effect])
    reply = await chat.say(prompt)
    for turn in range(model.random.randint(1, 3)):
        await asyncio.sleep(model.random.random() / 50)
        reply = await chat.run_tools(msgspec.structs.replace(reply, calls=(ToolCall("effect", {"turn": turn}),)))


def _written(ledger: str, prompt_id: str, digest: str, reward: float) -> float:
    _append(ledger, "reward", "scored", prompt=prompt_id, digest=digest, reward=reward)
    return reward


def _append(ledger: str, role: str, kind: str, **known: object) -> None:
    line = {"t": time.monotonic(), "born": _born(), "pid": os.getpid(), "role": role, "kind": kind, **known}
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def _born() -> float:
    """When this process was made (a forked one has its parent's modules): seconds of the monotonic clock."""
    with open("/proc/self/stat", encoding="ascii") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()

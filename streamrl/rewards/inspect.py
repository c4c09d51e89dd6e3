"""Looking at reward functions in a process of their own: ``python -m streamrl.rewards.inspect REWARD...`` (JSON).

The user's modules may import torch, call ``sys.exit`` or never return; the process that checks a recipe must
neither load that nor wait for it. One JSON line is written for each reward, as soon as it is known.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

import msgspec

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.fork_server import die_with
from streamrl.rewards.environment import passed_environment
from streamrl.rewards.signature import RewardSignature, inspect_reward


class RewardInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One reward: its signature, or why it cannot be used (one line each, with the remedy)."""

    spec: str
    signature: RewardSignature | None = None
    problems: tuple[str, ...] = ()


def inspect_in_subprocess(rewards: Sequence[Reward], timeout_s: float = 60.0) -> list[RewardInspection]:
    """Inspect rewards in a throw-away process, in at most ``timeout_s`` seconds for all of them.

    One inspection for each reward, in order. A module that hangs, exits or crashes the process is a problem of
    that reward and not an exception; those after it are inspected in another process.
    """
    inspections: list[RewardInspection] = []
    budget = timeout_s
    while len(inspections) < len(rewards):
        found, failure, seconds = _inspect_some(rewards[len(inspections) :], budget)
        inspections += found
        budget = max(1.0, budget - seconds)
        if len(inspections) < len(rewards):
            spec = rewards[len(inspections)].function
            inspections.append(RewardInspection(spec=spec, problems=(f'reward "{spec}" {failure}',)))
    return inspections


def _inspect_some(rewards: Sequence[Reward], timeout_s: float) -> tuple[list[RewardInspection], str, float]:
    """Inspections of the first rewards, what stopped the process at the next one, and the seconds it had."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given = [msgspec.json.encode(reward).decode() for reward in rewards]
        command = [sys.executable, "-P", "-m", "streamrl.rewards.inspect", str(timeout_s), str(os.getpid()), *given]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            env=passed_environment(rewards),  # what it will find when it scores, and no more
        )
        late = f"was not imported within {timeout_s:g} s: move slow work out of the module's top level"
        failure = ""
        started = time.monotonic()
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            failure = late
        finally:
            _end_session(child)
        seconds = time.monotonic() - started
        output.seek(0)
        written = output.read()
        if child.returncode == -signal.SIGALRM:
            failure = late
        if not failure:
            ended = f"exit code {child.returncode}{_last_line(errors)}"
            failure = f"ended the process that imported it ({ended}): import it by hand"
    return read_inspections(written)[: len(rewards)], failure, seconds


def read_inspections(written: bytes) -> list[RewardInspection]:
    """The lines that the process wrote before it ended, up to the first that is none."""
    found = []
    for line in filter(None, written.splitlines()):
        try:
            found.append(msgspec.json.decode(line, type=RewardInspection))
        except UNDECODABLE:  # cut, or the user's module found the descriptor
            break
    return found


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill what the user's module may have started, and the child itself when it still runs."""
    with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4096))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f", {lines[-1][:200]}" if lines else ""


def main(arguments: Sequence[str]) -> None:
    """Inspect the rewards in ``arguments[2:]`` and write a ``RewardInspection`` as JSON for each, a line each.
    ``arguments[0]``: the seconds that it may take; ``arguments[1]``: the pid of the process that asks."""
    if sys.platform == "linux":
        die_with(int(arguments[1]))
    seconds = float(arguments[0])
    # The default action of SIGALRM ends the process even while the interpreter lock is held, or the parent is dead.
    signal.alarm(math.ceil(seconds) + 1)
    # What the user's module prints must not mix with the answer: it goes to stderr from here on.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for given in arguments[2:]:
        reward = msgspec.json.decode(given, type=Reward)
        try:
            inspection = RewardInspection(spec=reward.function, signature=inspect_reward(reward))
        except RecipeError as error:
            inspection = RewardInspection(spec=reward.function, problems=tuple(error.problems))
        answers.write(msgspec.json.encode(inspection) + b"\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that the user's module left behind must not keep this process


if __name__ == "__main__":
    main(sys.argv[1:])

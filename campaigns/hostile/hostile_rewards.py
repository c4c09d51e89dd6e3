"""Hostile reward functions, each run by the real reward processes, and the nastiest together in a whole run.

Every case is a module of its own, inspected and opened as ``streamrl reward test`` does. One of three completions makes
the function do its worst; then another completion is scored. A case passes when all of that ends in time, the reward
processes go on, and every sample ends as a value that the function returned or as a recorded failure. Where only the
call itself can be hurt, the other completions have their values. At the end no process is left."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from campaigns.hostile.hostile_reward_cases import (
    COROUTINES,
    CRASHES,
    DESCRIPTORS,
    FUNCTIONS,
    GROUPS,
    HANGS,
    HEAD,
    IMPORTS,
    LEAKS,
    PATCHES,
    PROCESSES,
    RAISES,
    RETURNS,
    SOUND,
)
from campaigns.hostile.real_runs import adopt_orphans, end_left_behind, train_command
from streamrl.base.errors import StreamRLError
from streamrl.base.types import (
    FinishReason,
    Prompt,
    RewardFailure,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)
from streamrl.cli.try_rewards.trial_completions import PlainText
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.rewards.calls.inspect import inspect_in_subprocess
from streamrl.rewards.calls.reward_set import RewardSet
from streamrl.rewards.scoring import Outcome

AT_ONCE = 4
LIMIT_S = 0.5
CASE_LIMIT_S = 45.0
IMPORT_LIMIT_S = 5.0
MEMORY_MIB = 256
LEAKY_CALLS = 60
NASTIEST = (
    *("os._exit(3)", "ctypes.string_at(0)", "sleeps()", "re.match(r'(a+)+b', 'a' * 60)", "clocks(lambda *_: 1e9)"),
    *("os.kill(os.getppid(), signal.SIGKILL); sleeps()", "os.closerange(0, 100)", "return math.nan"),
    *("KEPT.append(mmap.mmap(-1, 8 << 20))", "threading.Thread(target=sleeps, daemon=True).start()"),
    *("os.fork() == 0 and sleeps()", "raise SystemExit"),
)


class Case(msgspec.Struct, frozen=True):
    """``completions``: scored together. ``apart``: what it does hurts no other call. ``all_score``: none may fail.
    ``may_end``: it may make the processes useless before the first call, which ends a worker in words."""

    name: str
    source: str
    completions: tuple[str, ...] = ("a", "z", "b")
    apart: bool = False
    all_score: bool = False
    may_end: bool = False


def cases() -> Iterator[Case]:
    """All of them."""
    plain = {"crash": CRASHES, "raise": RAISES, "return": RETURNS, "hang": HANGS}
    for family, codes in plain.items():
        yield from (Case(f"{family}: {name}", _function(code), apart=True) for name, code in codes.items())
    for family, codes in {"patch": PATCHES, "process": PROCESSES, "descriptor": DESCRIPTORS}.items():
        yield from (Case(f"{family}: {name}", _function(code)) for name, code in codes.items())
    leaky = ("z",) * LEAKY_CALLS
    for name, code in LEAKS.items():
        yield Case(f"leak: {name}", _function(code), completions=leaky, all_score=True)
    for name, fake in {"still": "1e9", "back": "-random.random()", "nan": "math.nan"}.items():
        code = f"clocks(lambda *_: {fake})\nif KEPT: sleeps()\nKEPT.append(1)"
        yield Case(f"hang: clocks {name}, then hangs", _function(code), completions=("z",) * 6)
    for name, code in COROUTINES.items():
        yield Case(f"coroutine: {name}", _function(code, "async ", "await "))
    for name, code in GROUPS.items():
        body = textwrap.indent(code, "    ")
        yield Case(
            f"group: {name}",
            f"{HEAD}\ndef reward(completions):\n    if len(completions) == 1: return [{SOUND}]\n{body}\n",
        )
    for name, code in IMPORTS.items():
        yield Case(f"import: {name}", f"{HEAD}\n{code}\ndef reward(completion): return {SOUND}\n", may_end=True)
    for name, code in FUNCTIONS.items():
        yield Case(f"function: {name}", f"{HEAD}\n{code}\n")


def _function(code: str, kind: str = "", waits: str = "") -> str:
    return (
        f"{HEAD}\n{kind}def strike(completion):\n{textwrap.indent(code, '    ')}\n    return {SOUND}\n"
        f"{kind}def reward(completion): return {waits}strike(completion) if completion == 'z' else {SOUND}\n"
    )


async def run_case(case: Case, directory: Path) -> str:
    """What was wrong; empty: nothing."""
    reward = Reward(function=f"{_module(case, directory)}:reward", timeout_s=LIMIT_S, memory_mib=MEMORY_MIB)
    try:
        async with asyncio.timeout(CASE_LIMIT_S):
            (inspection,) = await asyncio.to_thread(inspect_in_subprocess, [reward], IMPORT_LIMIT_S)
            return "" if inspection.signature is None else await _score(case, reward)
    except TimeoutError:
        return f"did not end within {CASE_LIMIT_S:g} s"
    except BaseExceptionGroup as error:
        _, other = error.split(StreamRLError)
        return "" if case.may_end and other is None else f"ended the worker: {error.exceptions}"


def _module(case: Case, directory: Path) -> Path:
    directory.mkdir()
    module = directory / "hostile.py"
    module.write_text(case.source, errors="surrogateescape")
    return module


async def _score(case: Case, reward: Reward) -> str:
    async with asyncio.TaskGroup() as tasks:
        rewards = RewardSet([reward], RewardLimits(processes=2), PlainText(), tasks)
        try:
            await rewards.open()
            together = await rewards.score([_trajectory(text, i) for i, text in enumerate(case.completions)])
            (after,) = await rewards.score([_trajectory("c", len(case.completions))])
        finally:
            await asyncio.shield(rewards.aclose())
    must = list(together) if case.all_score else []
    if case.apart:
        must = [outcome for outcome, text in zip(together, case.completions, strict=True) if text != "z"] + [after]
    return "; ".join(filter(None, [_made_up([*together, after]), _unscored(must)]))


def _made_up(outcomes: Sequence[Outcome]) -> str:
    """Values that no function returned. Those of ``RETURNS`` and ``GROUPS`` are all other than 0."""
    values = [outcome.reward for outcome in outcomes if not isinstance(outcome, RewardFailure)]
    wrong = [value for value in values if value not in (SOUND, 1.5, 7.0, 1.0)]
    return f"values that were not returned: {wrong}" if wrong else ""


def _unscored(outcomes: Sequence[Outcome]) -> str:
    messages = [outcome.message for outcome in outcomes if isinstance(outcome, RewardFailure)]
    return f"{len(messages)} failed that should not, such as: {messages[0]}" if messages else ""


def _trajectory(text: str, number: int) -> Trajectory:
    ids = token_array(list(text.encode()))
    return Trajectory(
        id=TrajectoryId(prompt_id="p", group_id=0, sample=number),
        prompt=Prompt(prompt_id="p", token_ids=token_array([1]), columns={}),
        segments=(Segment(token_ids=ids, trained=True, behavior_logprobs=float_array([0.0] * len(ids))),),
        finish_reason=FinishReason.STOP,
    )


async def _run_all(chosen: Sequence[Case], directory: Path, out: Callable[[str], None]) -> int:
    places, failed = asyncio.Semaphore(AT_ONCE), 0

    async def one(number: int, case: Case) -> None:
        nonlocal failed
        async with places:
            began = time.monotonic()
            problem = await run_case(case, directory / str(number))
            seconds = time.monotonic() - began
            if problem:
                failed += 1
            if problem or seconds > CASE_LIMIT_S / 2:
                out(f"  {case.name}: {problem or 'slow'} ({seconds:.1f} s)")

    async with asyncio.TaskGroup() as tasks:
        for number, case in enumerate(chosen):
            tasks.create_task(one(number, case))
    return failed


def _whole_run(directory: Path) -> str:
    """A run in which one prompt of ten is scored by one of the nastiest functions. Empty: it trained to its end."""
    strikes = "\n".join(
        f"def strike_{number}(completion):\n{textwrap.indent(code, '    ')}\n    return 1.0"
        for number, code in enumerate(NASTIEST)
    )
    module = directory / "nasty.py"
    module.write_text(
        f"{HEAD}\nimport zlib\n{strikes}\nSTRIKES = [strike_{', strike_'.join(map(str, range(len(NASTIEST))))}]\n"
        "def reward(completion, *, prompt_id):\n"
        "    number = zlib.crc32(prompt_id.encode()) % (10 * len(STRIKES))\n"
        "    if number < len(STRIKES): return STRIKES[number](completion)\n"
        "    return 1.0 + len(completion) % 7\n"
    )
    settings = {
        "run.directory": str(directory / "runs"),
        "run.steps": 30,
        "rewards.0.function": f"{module}:reward",
        "rewards.0.timeout_s": 1.0,
        "rewards.0.memory_mib": MEMORY_MIB,
        "reward_limits.advanced.processes": 4,
        "reward_limits.max_failed_share": 0.9,
        "rollout.prompts_per_batch": 8,
        "sampling.max_tokens": 8,
    }
    try:
        done = subprocess.run(train_command(settings), capture_output=True, text=True, timeout=170, check=False)
    except subprocess.TimeoutExpired as error:
        return f"did not end: {(error.stdout or b'')[-2000:]!r}"
    if done.returncode != 0 or "ended with exit code" in done.stdout + done.stderr:
        return f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
    lines = [json.loads(line) for line in (directory / "runs/latest/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    if [step["step"] for step in steps] != list(range(1, 31)) or min(step["reward/min"] for step in steps) < 1.0:
        return f"{len(steps)} steps, smallest reward {min(step['reward/min'] for step in steps)}"
    return "" if steps[-1].get("reward/func/reward/raised_total", 0) else "no prompt was hostile"


def run(out: Callable[[str], None], words: Sequence[str] = ()) -> int:
    """Run all cases, or those with one of ``words`` in their names. Returns how many failed."""
    logging.getLogger("streamrl").setLevel(logging.CRITICAL)
    adopt_orphans()
    chosen = [case for case in cases() if not words or any(word in case.name for word in words)]
    with tempfile.TemporaryDirectory() as directory:
        out(f"{len(chosen)} hostile rewards")
        failed = asyncio.run(_run_all(chosen, Path(directory), out))
        problems = {"left behind": ", ".join(end_left_behind(5.0))}
        if not words:
            problems["a whole run"] = _whole_run(Path(directory))
    for name, problem in problems.items():
        if problem:
            failed += 1
            out(f"  {name}: {problem}")
    return failed

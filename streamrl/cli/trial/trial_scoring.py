"""Scoring of completions outside of a run, and the surroundings of a command that does it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from streamrl.base.printable import log_to, printable
from streamrl.cli.trial.trial_completions import CompletedGroup
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.rewards.calls.reward_set import opened_rewards
from streamrl.rewards.scoring import Outcome

Result = TypeVar("Result")


def run_for_report(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run ``work()`` to its end and return its result. Warnings and what engines print go to stderr: stdout is the
    report. SIGTERM cancels it, as Ctrl-C does: what was started is ended in order."""
    log_to(sys.stderr, logging.WARNING, "%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work()

    with _only_the_report_on_stdout():
        return asyncio.run(cancellable())


@contextlib.contextmanager
def _only_the_report_on_stdout() -> Iterator[None]:
    """vLLM logs to stdout, in several processes; the reader of the report must not get that."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def say(text: str) -> None:
    """Progress, on stderr: stdout is the report."""
    print(printable(text), file=sys.stderr, flush=True)


async def score_groups(
    scoring: Sequence[Reward], limits: RewardLimits, groups: Sequence[CompletedGroup], tokenizer: Tokenizer
) -> tuple[list[tuple[Outcome, ...]], float]:
    """Outcomes of each group, and the seconds that all took."""
    async with opened_rewards(scoring, limits, tokenizer) as rewards:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as calls:
            tasks = [calls.create_task(rewards.score(group.trajectories)) for group in groups]
        seconds = time.perf_counter() - started
        if notice := rewards.take_notice():
            say(f"warning: {notice}")
        return [task.result() for task in tasks], seconds

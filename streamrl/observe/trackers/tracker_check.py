"""A check for the tests of a plug-in (docs/watch.md), which every tracker must pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import CompletionSampled
from streamrl.observe.trackers.tracker import RunInfo, Tracker

HOSTILE = "<img src=x onerror=alert(1)> | 1,2 \x00\u2028\n\U0001f600"


def check_tracker(make: Callable[[], Tracker], directory: Path, **options: str) -> None:
    """Give the tracker that ``make`` returns a short run in ``directory``, in two processes that send some steps twice:
    with an evaluation that ends late, metrics that come and go, and a completion that is markup.

    Raises ``StreamRLError`` with the call that raised, and where threads of the tracker do not end. The caller checks
    the output of the tracker."""
    run = RunInfo(
        directory=directory, run_id="check", project="p", tags=("a",), recipe={"run.steps": 4}, options=options
    )
    rows = [
        CompletionSampled(
            step=2, prompt_id="p", prompt=HOSTILE, text=HOSTILE * 999, reward=-1.0, rewards=parts, tokens=10**6,
            finish_reason="length",
        )
        for parts in ({}, {"a": 1.0}, {"b/c": -1e30})
    ]  # fmt: skip
    before = set(threading.enumerate())
    now = time.time()
    for steps in (range(1, 4), range(3, 5)):
        tracker = make()
        calls: list[tuple[str, tuple[Any, ...]]] = [("open", (run,))]
        for step in steps:
            calls += [("metrics", (step, now, {"reward/mean": step, f"only/{step}": 0.0})), ("flush", ())]
        calls += [
            ("metrics", (1, now, {"eval/held_out/avg@1": 0.5})),
            ("samples", (1, "evaluation", rows)),
            ("samples", (2, "training", rows[:1])),
            ("histograms", (2, {"reward": [1.0], "async/staleness": [0.0] * 9})),
            ("event", (2, "checkpoint", HOSTILE)),
            ("flush", ()),
            ("close", ()),
        ]
        for method, arguments in calls:
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                call = f"{method}{arguments}"[:200]
                raise StreamRLError(f"{tracker} raised {type(error).__name__} in {call}: {error}") from error
    new_threads = set(threading.enumerate()) - before
    names = [thread.name for thread in new_threads if thread.is_alive() and not thread.daemon]
    if names:
        raise StreamRLError(f"{tracker} left threads that keep its process from ending: {', '.join(names)}")

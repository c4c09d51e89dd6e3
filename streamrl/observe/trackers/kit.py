"""A check that any tracker passes: for the tests of plug-ins."""

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
    """Give the tracker a short run in ``directory``, in two lives that overlap: an evaluation that ends late, names
    that come and go, a completion that is markup. Raises ``StreamRLError`` for what a run does to it and it does not
    take, naming the call; what it made of the run, the caller looks up."""
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
        for n in steps:
            calls += [("metrics", (n, now, {"reward/mean": n, f"only/{n}": 0.0})), ("flush", ())]
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
                given = f"{method}{arguments}"[:200]
                raise StreamRLError(f"{tracker} raised {type(error).__name__} in {given}: {error}") from error
    if left := [one.name for one in set(threading.enumerate()) - before if one.is_alive() and not one.daemon]:
        raise StreamRLError(f"{tracker} left threads that keep its process from ending: {', '.join(left)}")

"""Readers of the directory of a run, which may come from anybody: the page, the report, the list, the samples."""

from __future__ import annotations

import atexit
import io
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec

from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import JSON, PLAIN, Seed, message, seed
from streamrl.base.errors import StreamRLError
from streamrl.cli.samples import Samples
from streamrl.cli.trained_models.runs import listed_run
from streamrl.observe.dashboard.live_events import StreamPlace, news
from streamrl.observe.dashboard.report_page import report_page
from streamrl.observe.dashboard.run_view import ANSWERS, RunViews, recipe_differences
from streamrl.observe.run_files.run_reader import run_files

_SECRET = b"sk-0123456789abcdefghijklmn"
_RECIPE = b"""[run]
name = "x"
steps = 3
tags = ["a"]
[model]
path = "m"
[[rewards]]
function = "reward.py:f"
options = { api_key = "sk-0123456789abcdefghijklmn" }
"""
_STEPS: list[dict[str, Any]] = [
    {"kind": "step", "step": n, "time": 1000.0 + n, "policy_version": n, "reward/mean": 0.5} for n in (1, 2)
]
_TIMES = {"time/step_s": 2.0, "perf/train_tok_s": 10.0, "util/wait_reason/tail": 0.25, "run/steps": 3.0}
_SCORES = [{"kind": "evaluation", "time": 1003.0, "step": 1, "eval/held_out/avg@1": 0.5, "eval/held_out/size": 8}]
_SAMPLE: dict[str, Any] = {"step": 1, "prompt_id": "p-1", "prompt": "one", "text": "a", "reward": 1.0, "chosen": "best"}
_SAMPLE |= {"rewards": {"f": 1.0}, "tokens": 3, "finish_reason": "stop"}
_HEADER = {"type": "header", "schema": 1, "run_id": "x", "seed": 0, "max_tokens": 64, "max_model_len": 128}
_HEADER |= {"temperature": 1.0, "prompts_per_batch": 4, "group_size": 2, "rounds": "streaming", "max_staleness": 1}
_HEADER |= {"engines": 1, "capacity": 8}
_TRAJECTORY: dict[str, Any] = {
    "type": "trajectory",
    "prompt_id": "p-1",
    "group": 1,
    "sample": 0,
    "attempt": 0,
    "prompt_tokens": 5,
}
_TRAJECTORY |= {"tokens": 10, "finish_reason": "stop", "outcome": "trained", "round_kind": "long", "reward": 1.0}
_TRAJECTORY |= {"launched_s": 1.0, "ended_s": 3.0, "rollout_s": 1.0, "engine": "engine-0"}
_TRAJECTORY |= {"turns": [[1, 0.5, 2, 0.5], [1, 0.5, 2, 0.5]], "returned_s": 2.5, "queued_s": 0.25}
_STEP = {"type": "step", "time_s": 4.0, "policy_version": 1, "round_kind": "long", "group_size": 2.0, "samples": 2}
_STEP |= {"trained_tokens": 20, "generated_tokens": 30, "step_s": 2.0, "rollout_s": 1.5, "training_s": 0.3}
_STEP |= {"push_s": 0.2}
_ENGINES = {"type": "engines", "time_s": 1.5, "running": 2, "waiting": 1, "kv_usage": 0.5}
_EVENT = {"type": "event", "time_s": 4.0, "kind": "evaluation", "text": "t", "step": 1, "seconds": 0.5}
FILES: dict[str, Any] = {
    "recipe.toml": seed(_RECIPE, PLAIN),
    "metrics.jsonl": [*(step | _TIMES for step in _STEPS), *_SCORES],
    "samples.jsonl": [_SAMPLE, _SAMPLE | {"step": 2, "chosen": "worst"}],
    "evaluations/step-1.jsonl": [_SAMPLE | {"sample": 0}],
    "trace.jsonl": [_HEADER, _TRAJECTORY, _TRAJECTORY | {"sample": 1}, _ENGINES, _STEP, _EVENT],
    "logs/engine-0.log": seed(b"a line\nAuthorization: Bearer abcdefgh0123456789\n", PLAIN),
}


def _lines(records: Sequence[Any]) -> Seed:
    """A file of JSON lines, with the places of the values of each line."""
    content = b""
    spans: list[tuple[int, int]] = []
    for record in records:
        line = seed(json.dumps(record).encode(), JSON)
        spans += [(first + len(content), last + len(content)) for first, last in line.spans]
        content += line.content + b"\n"
    return Seed(content, JSON, tuple(spans))


def directories() -> Target:
    """A directory of a run is shown as far as its files go, or refused as a whole, in every view of it."""
    place = Path(tempfile.mkdtemp(prefix="streamrl-fuzz-")) / "x-20260101-000000"
    atexit.register(shutil.rmtree, place.parent, ignore_errors=True)
    for name in FILES:
        (place / name).parent.mkdir(parents=True, exist_ok=True)

    def run(frames: Sequence[bytes]) -> str:
        for name, content in zip(FILES, [*frames, *[b""] * len(FILES)], strict=False):
            (place / name).write_bytes(content)
        run_files(place)
        listed = listed_run(place)
        msgspec.json.encode(listed)
        (view,) = RunViews([place]).views()
        view.refresh()
        answers = [view.summary(), view.metrics.answer(-1), recipe_differences([view, view])]
        answers += [answer(view) for answer in ANSWERS.values()]
        answers += list(news(view, StreamPlace(server=0)))
        json.loads(msgspec.json.encode(answers))  # as a browser reads it: without nan
        page = report_page([place])
        assert frames[0] != _RECIPE or _SECRET not in page
        try:
            with redirect_stdout(io.StringIO()):
                Samples(run_directory=place).run()
        except StreamRLError:
            return f"{listed.state}, without samples"
        return f"{listed.state}"

    made = [message(*(content if isinstance(content, Seed) else _lines(content) for content in FILES.values()))]
    return Target(name="runs.directory", messages=made, run=run, refusals=(StreamRLError,), quick=60)


def targets() -> list[Target]:
    """All of this module."""
    return [directories()]

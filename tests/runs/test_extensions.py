"""Sinks and observers of a user in a real run on simulated engines: they see it, and cannot end or delay it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamrl import Pipeline, load_recipe
from streamrl.base.errors import RecipeError
from streamrl.base.run_events import RunEvent, RunFinished, RunStarted, RunWarning, StepFinished
from streamrl.launch import user_calls
from streamrl.launch.plan.probe import problems_of_object
from streamrl.launch.user_calls import MOST_WAITING, UserCalls
from streamrl.recipe.toml_text import toml_value

EXAMPLE = Path(__file__).parents[2] / "examples" / "sort" / "recipe.toml"
OWN = """
import json, threading
from pathlib import Path
from streamrl.contracts import Observer

class Notes(Observer):
    def __init__(self):
        self.file = (Path(__file__).parent / "notes.jsonl").open("a", buffering=1)

    def on_trained(self, policy_version, batch, metrics):
        self.file.write(json.dumps([policy_version, len(batch), "optim/grad_norm" in metrics]) + "\\n")

    async def on_weights_live(self, push, *, last):
        self.file.write(json.dumps(["live", push.policy_version, last]) + "\\n")

    def end(self):
        self.file.write('"end"\\n')

class Failing(Observer):
    async def on_event(self, event):
        raise SystemExit("of the user")

class Blocking(Observer):
    def on_outcome(self, outcome):
        threading.Event().wait()

class Runs(Observer):
    async def run(self, notify):
        notify(None)

class Needy(Observer):
    def __init__(self, url):
        self.url = url

def function():
    return Notes()
"""


class Noting:
    def __init__(self) -> None:
        self.seen: list[RunEvent | str] = []

    def record(self, event: RunEvent) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.seen.append("closed")


class FailingSink(Noting):
    def record(self, event: RunEvent) -> None:
        raise ValueError("of the user")


class BlockingSink(Noting):
    def record(self, event: RunEvent) -> None:
        threading.Event().wait()


@pytest.mark.torch
@pytest.mark.usefixtures("nothing_left")
async def test_sinks_and_observers_see_a_run_and_cannot_end_or_delay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(user_calls, "CLOSE_S", 0.5)  # in this process, for the sink that blocks
    own = tmp_path / "own.py"
    own.write_text(OWN)
    settings: dict[str, Any] = {
        "run.directory": str(tmp_path / "runs"),
        "run.steps": 3,
        "run.advanced.observers": [f"{own}:Failing"],
        "engines.kind": "simulated",
        "engines.count": 1,
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 64,
        "evaluation.prompts": "",
        "training.advanced.threads": 1,
    }
    recipe = load_recipe(EXAMPLE, [f"{key}={toml_value(value)}" for key, value in settings.items()])
    noting = Noting()
    sinks = [FailingSink(), BlockingSink(), noting]
    async with Pipeline(recipe, sinks=sinks, observers=[f"{own}:Notes", f"{own}:Blocking"]) as pipeline:
        events = [event async for event in pipeline.events()]
    assert noting.seen == [*events, "closed"]
    assert isinstance(events[-1], RunFinished) and any(isinstance(event, RunStarted) for event in events)
    steps = [event for event in events if isinstance(event, StepFinished)]
    assert [step.step for step in steps] == [1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert lines == [part for n in (1, 2, 3) for part in ([n, 16, True], ["live", n, n == 3])] + ["end"]

    [warning] = [event.message for event in events if isinstance(event, RunWarning)]
    assert f"observer {own}:Failing failed in on_event: SystemExit: of the user (own.py:" in warning
    assert steps[-1].metrics["health/observer_errors_total"] > 16, "counted"
    log = (pipeline.run_directory / "logs" / "controller.log").read_text()
    assert log.count("Failing failed in") == 1, "logged once"
    assert f"{own}:Blocking: did not return from its calls in 10 s; 0 errors" in log
    assert pipeline.sink_errors == len(events), "of the sink that fails; the one that blocks is not that far behind"
    assert [m for m in caplog.messages if "sink FailingSink failed in record: ValueError: of the user" in m] != []
    assert [m for m in caplog.messages if "sink BlockingSink: did not return" in m] != []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("function", "is no class that inherits streamrl.contracts.Observer"),
        ("Runs", "has run, which is never called"),
        ("Needy", "is made without arguments, and needs some: missing a required argument: 'url'"),
        ("Nots", 'has no "Nots"'),
        ("Notes", ""),
    ],
)
def test_the_dry_run_refuses_what_is_no_observer(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    found = problems_of_object(f"{tmp_path / 'own.py'}:{name}", 60.0, kind="observer")
    assert len(found) == bool(problem) and problem in "".join(found)
    assert not (tmp_path / "notes.jsonl").exists(), "none is made"


def test_an_observer_needs_a_name() -> None:
    with pytest.raises(RecipeError, match=r'observers: run.advanced.observers: "own" does not name a class'):
        Pipeline(load_recipe(EXAMPLE), observers=["own"])
    with pytest.raises(RecipeError, match="cannot be imported by another process"):
        Pipeline(load_recipe(EXAMPLE), observers=[type("Local.Class", (), {})])


async def test_calls_that_a_busy_object_cannot_take_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, began = threading.Event(), threading.Event()

    class Busy(Noting):
        def record(self, event: Any) -> None:
            began.set()
            blocked.wait()
            super().record(event)

    busy = Busy()
    calls = UserCalls(busy, "sink Busy")
    calls.call("record", 0)
    await anyio.to_thread.run_sync(began.wait)
    for number in range(MOST_WAITING + 3):
        calls.call("record", number + 1)
    assert calls.dropped == 3
    blocked.set()
    await calls.aclose("close")
    assert busy.seen[: MOST_WAITING + 1] == list(range(MOST_WAITING + 1)) and calls.errors == 0

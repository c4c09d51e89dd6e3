"""Code of a user in a real run on simulated engines: all of docs/python.md, and what misbehaves."""

from __future__ import annotations

import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from builders.files import ROOT

from streamrl import Pipeline, load_recipe
from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.run_events import RunFinished, RunWarning, StepFinished
from streamrl.observe import user_calls
from streamrl.observe.user_calls import MOST_WAITING, UserCalls
from streamrl.prepare.recipe_probe import problems_of_object
from streamrl.recipe.toml_text import toml_value
from streamrl.recipe.user_code import load_user_object

EXAMPLE = ROOT / "examples" / "sort" / "recipe.toml"
OWN = """
import threading
from pathlib import Path
from streamrl.contracts import Observer
from streamrl.run.journal.journal_file import writer_of

class Failing(Observer):
    async def on_event(self, event):
        raise SystemExit("of the user")

    def end(self):
        place = Path(__file__).parent
        (place / "writer").write_text(str(writer_of(place / "runs" / "latest" / "journal")))

class Blocking(Observer):
    def on_outcome(self, outcome):
        threading.Event().wait()

class Runs(Observer):
    async def run(self, notify): ...

class Needy(Observer):
    def __init__(self, url): ...

def function(): ..."""


class Calls:
    def __init__(self, record: Any) -> None:
        self._record = record
        self.seen: list[object] = []

    def record(self, event: object) -> None:
        self._record()
        self.seen.append(event)

    def close(self) -> None:
        self.seen.append("closed")


def fail() -> None:
    raise ValueError("of the user")


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.usefixtures("nothing_left")
async def test_the_page_of_extensions_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The examples of the page are a run, and faulty extensions neither end nor delay it."""
    pytest.importorskip("torch")
    monkeypatch.setattr(user_calls, "CLOSE_S", 0.5)  # in this process, for the sink that blocks
    monkeypatch.chdir(tmp_path)
    own, page = tmp_path / "own.py", tmp_path / "page.py"
    own.write_text(OWN)
    page.write_text("\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)))
    settings: dict[str, Any] = {
        "run.steps": 3,
        "run.advanced.observers": [f"{page}:Longest", f"{own}:Failing"],
        "prompts.train": f"{page}:sums",
        "rewards.0.function": f"{page}:brief",
        "rollout.rounds": "custom",
        "rollout.policy": f"{page}:OneByOne",
        "objective.function": str(ROOT / "examples" / "custom_loss.py") + ":gmpo",
        "engines.kind": "simulated",
        "engines.count": 1,
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 64,
        "evaluation.prompts": "",
        "training.advanced.threads": 1,
    }
    recipe = load_recipe(EXAMPLE, [f"{key}={toml_value(value)}" for key, value in settings.items()])
    rewards: Any = load_user_object(f"{page}:Rewards")
    noting, failing, blocking = Calls(lambda: None), Calls(fail), Calls(threading.Event().wait)
    sinks = [failing, blocking, noting, rewards(tmp_path / "rewards.csv")]
    async with Pipeline(recipe, sinks=sinks, observers=["own.py:Blocking"]) as pipeline:
        events = [event async for event in pipeline.events()]
    assert noting.seen == [*events, "closed"] and isinstance(events[-1], RunFinished)
    steps = [event for event in events if isinstance(event, StepFinished)]
    table = (tmp_path / "rewards.csv").read_text().split()
    assert table == [f"{step.step},{step.metrics['reward/mean']}" for step in steps] and len(table) == 3
    longest = (tmp_path / "longest.txt").read_text().splitlines()
    assert [line.split()[0] for line in longest] == ["1", "2", "3"]
    assert steps[-1].metrics["round/plain/total"] == 3, "of the round policy"

    assert [e.step for e in events if isinstance(e, RunWarning) and "health/observer_errors_total" in e.message] == [1]
    assert steps[-1].metrics["health/observer_errors_total"] > 16, "counted"
    log = (pipeline.run_directory / "logs" / "controller.log").read_text()
    assert log.count(f"observer {own}:Failing failed in on_event: SystemExit: of the user (own.py:") == 1, "logged once"
    assert (tmp_path / "writer").read_text() == "None", "the journal is closed before observers are waited for"
    assert f"{own}:Blocking: did not return from its calls in 10 s; 0 errors" in log
    assert pipeline.sink_errors == len(events), "of the sink that fails; the one that blocks is not that far behind"
    messages = "\n".join(caplog.messages)
    assert "sink Calls failed in record: ValueError: of the user" in messages and "did not return" in messages


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("function", "is no class that inherits streamrl.contracts.Observer"),
        ("Runs", "has run, which is never called"),
        ("Needy", "is made without arguments, and needs some: missing a required argument: 'url'"),
        ("Nots", 'has no "Nots"'),
        ("Failing", ""),
    ],
)
def test_the_dry_run_refuses_what_is_no_observer(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    found = problems_of_object(f"{tmp_path / 'own.py'}:{name}", 60.0, kind="observer")
    assert len(found) == bool(problem) and problem in "".join(found)


async def test_an_observer_needs_a_name() -> None:
    with pytest.raises(RecipeError, match=r'run.advanced.observers: "own" does not name an object'):
        await Pipeline(load_recipe(EXAMPLE, ['engines.kind="simulated"']), observers=["own"]).__aenter__()
    with pytest.raises(RecipeError, match="cannot be imported by another process"):
        Pipeline(load_recipe(EXAMPLE), observers=[type("Local.Class", (), {})])


async def test_calls_that_a_busy_object_cannot_take_are_counted() -> None:
    began, blocked = threading.Event(), threading.Event()
    busy = Calls(lambda: (began.set(), blocked.wait()))
    calls = UserCalls(busy, "sink")
    calls.call("record", 0)
    await anyio.to_thread.run_sync(began.wait)
    for number in range(MOST_WAITING + 3):
        calls.call("record", number + 1)
    assert calls.dropped == 3
    async with anyio.create_task_group() as closing:
        closing.start_soon(calls.aclose, "close")
        await anyio.wait_all_tasks_blocked()
        blocked.set()
    assert busy.seen == [*range(MOST_WAITING + 1), "closed"] and calls.errors == 0


@pytest.mark.long
async def test_sinks_of_a_run_that_does_not_start_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sockets := tmp_path / ("s" * 107)).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    sink = Calls(lambda: None)
    with pytest.raises(StreamRLError, match="set TMPDIR to a shorter directory"):
        await Pipeline(load_recipe(EXAMPLE, ['engines.kind="simulated"']), sinks=[sink]).__aenter__()
    assert sink.seen == ["closed"]

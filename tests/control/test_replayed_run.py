"""``streamrl replay``: the state of control at the end of a recorded run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from control_world import control_settings
from scripted_parts import SimulatedRun

import streamrl.cli.main
from streamrl.base.types import FinishReason, TrajectoryId
from streamrl.control.events import PromptsDrawn, RunBegan, TrajectoryScored
from streamrl.journal.event_log import EventLog
from streamrl.journal.replayed_run import describe, replay_run
from streamrl.observe.report.wait_reason import WaitReason
from streamrl.recipe.scheduling import RoundKind
from streamrl.supervise.crash.crash_bundle import write_crash_bundle


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run that was killed: two prompts were launched, one trajectory of four is scored."""
    settings = control_settings()
    log = EventLog(tmp_path / "events.jsonl", "killed-run", settings)
    first = TrajectoryId(prompt_id="a", group_id=0, sample=0, attempt=0)
    scored = TrajectoryScored(
        id=first, reward=1.0, tokens=7, finish_reason=FinishReason.STOP, oldest_version=0, newest_version=0
    )
    for time_s, event in ((0.0, RunBegan()), (0.5, PromptsDrawn(prompt_ids=("a", "b"))), (4.0, scored)):
        log.append(event, time_s)
    log.close()
    return tmp_path


def test_what_was_in_flight_and_what_it_waited_for(recorded: Path) -> None:
    run = replay_run(recorded / "events.jsonl")
    assert run.events == 3 and run.waits is WaitReason.SAMPLING
    text = "\n".join(describe(run))
    assert "issued 4 = trained 0 + dropped 0 + in flight 4" in text
    assert "group 0 of prompt 'a', attempt 0: 1 of 2 not scored; launched 3.5 s ago at version 0" in text
    assert "group 1 of prompt 'b', attempt 0: 2 of 2 not scored" in text
    assert "waits for     sampling, since event 1 (3.5 s)" in text


def test_the_command_reads_a_directory_and_a_bundle(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert streamrl.cli.main.main(["replay", str(recorded)]) == 0
    of_directory = capsys.readouterr().out
    bundle = write_crash_bundle(recorded, "engine-0 was killed by SIGKILL\n  last words", environment={})
    assert streamrl.cli.main.main(["replay", str(bundle)]) == 0
    of_bundle = capsys.readouterr().out
    assert of_bundle.endswith(of_directory)
    assert "engine-0 was killed by SIGKILL\n    last words" in of_bundle and "msgspec " in of_bundle
    (recorded / "events.jsonl").unlink()
    empty = write_crash_bundle(recorded, "before anything", environment={})
    assert streamrl.cli.main.main(["replay", str(empty)]) == 0
    assert "no events to replay" in capsys.readouterr().out
    assert streamrl.cli.main.main(["replay", str(recorded)]) == 1
    assert "not the directory of a run" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_an_asynchronous_run_replays_to_the_same_state(tmp_path: Path) -> None:
    """Arrival order is in the log: rounds that race and fail, on two engines and two ranks."""
    settings = control_settings(
        steps=4, batch_groups=4, group_size=4, rounds=RoundKind.CONTINUOUS, max_staleness=2, failure_window=64
    )
    run = SimulatedRun(settings, tmp_path, engines=2, ranks=2, failing=9)
    await run.run()
    replayed = replay_run(run.log_path)
    assert replayed.state.accounting() == run.controller.state.accounting()
    assert replayed.events > 60

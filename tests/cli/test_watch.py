"""``streamrl watch`` of a run by its directory, and of one that is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import RunStarted, StepFinished
from streamrl.cli.main import main
from streamrl.cli.watch import endpoint_of
from streamrl.observe.terminal.run_history import RunHistory
from streamrl.recipe.topology import TOPOLOGY_FILE, ProcessPlan, Role, Topology


def run_at(directory: Path, metrics: str = "") -> Path:
    """Its files, as far as a watcher reads them."""
    directory.mkdir()
    topology = Topology(
        processes=(ProcessPlan(role=Role.CONTROLLER, index=0),), endpoints={"controller.steps": f"ipc://{directory}/s"}
    )
    (directory / TOPOLOGY_FILE).write_bytes(msgspec.json.encode(topology))
    (directory / "recipe.toml").write_text(
        f'[model]\npath = "m"\n[prompts]\ntrain = "t.jsonl"\n[[rewards]]\nfunction = "a:b"\n'
        f'[metrics]\nendpoint = "{metrics}"\n'
    )
    return directory


def test_a_run_is_watched_by_its_directory(tmp_path: Path) -> None:
    assert endpoint_of(run_at(tmp_path / "one")) == f"ipc://{tmp_path}/one/s.metrics"
    assert endpoint_of(run_at(tmp_path / "other", "tcp://127.0.0.1:5700")) == "tcp://127.0.0.1:5700"
    with pytest.raises(StreamRLError, match="is not the directory of a run"):
        endpoint_of(tmp_path)


def test_nobody_waits_for_a_run_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("streamrl.cli.watch.PATIENCE_S", 0.1)
    run = run_at(tmp_path / "one")
    assert main(["watch", str(run)]) == 1
    assert f"the run has ended: no process listens at ipc://{run}/s.metrics" in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as killed:  # what a run leaves behind that was killed with its supervisor
        killed.bind(f"{run}/s.metrics")
    assert main(["watch", str(run)]) == 1
    assert "the run has ended" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "nope")]) == 2
    assert "nope is neither the directory of a run" in capsys.readouterr().err


def test_the_summary_counts_from_the_resumed_step(tmp_path: Path) -> None:
    """The summary at the end of a run counts from the step where it was resumed, and says how to continue."""
    history = RunHistory(lambda: 100.0)
    (tmp_path / "journal").mkdir()
    history.started(
        RunStarted(run_id="r", steps=300, policy_version=0, parameters=1, directory=str(tmp_path), metrics_endpoint="")
    )
    history.resumed(13)
    drained = history.summary("drained")
    assert "drained: 13 of 300 steps" in drained[1]
    assert f"  go on with  streamrl resume {tmp_path}" in drained
    (tmp_path / "checkpoints" / "latest" / "hf").mkdir(parents=True)
    model, more = (
        f"  model  {tmp_path}/checkpoints/latest/hf",
        f"  go on with  streamrl resume {tmp_path} run.steps=600",
    )
    assert history.summary("finished")[-3:] == [model, more, f"  page  streamrl dashboard {tmp_path}"]


def test_the_time_left_does_not_depend_on_the_watcher() -> None:
    """The time left does not depend on the moment at which a watcher attached."""
    history = RunHistory(lambda: 100.0)
    history.steps = 11
    _, left = history.stepped(StepFinished(step=1, policy_version=1, metrics={"time/step_s": 2.0}))
    assert left == 20.0

"""``streamrl show``: a run that is killed, goes on, and ended; and its crash bundle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import anyio
import pytest
from builders.files import SORT_RECIPE as DEMO

import streamrl.cli.main
from streamrl.buffers.rollout_buffer import RolloutBuffer
from streamrl.cli.show import nothing_left, read_run
from streamrl.control.settings import control_settings
from streamrl.processes.crash_bundle import write_crash_bundle
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from tests.run.scripted_parts import Killed, SimulatedRun

CHOSEN = ["run.steps=6", "rollout.prompts_per_batch=4", "rollout.group_size=4", "evaluation.every=0"]
CHOSEN += ["evaluation.at_start=false", "evaluation.at_end=false", "checkpoint.every=2"]


@pytest.fixture
def run(tmp_path: Path) -> SimulatedRun:
    recipe = load_recipe(DEMO, CHOSEN)
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    return SimulatedRun(control_settings(recipe), tmp_path, failing=29)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert streamrl.cli.main.main(["show", *arguments]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if "--json" not in arguments), out
    return out


def test_a_run_that_was_killed_and_then_ended(run: SimulatedRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.events_to_live = 75
    with pytest.raises(BaseExceptionGroup) as ended:
        anyio.run(run.run)
    assert ended.value.subgroup(Killed)
    directory = str(run.directory)
    text, known = shown(capsys, directory), json.loads(shown(capsys, directory, "--json"))
    accounts, steps = known["summary"]["accounting"], known["summary"]["steps"]
    assert known["status"] == "killed" and "continue with: streamrl resume" in text
    assert accounts["in_flight"] > 0 and f"+ in flight {accounts['in_flight']}" in text
    assert [step["step"] for step in steps] == list(range(1, known["summary"]["live_version"] + 1)) != []
    assert known["summary"]["groups"] and "groups have not ended, the oldest first:" in text
    assert "reward_failed" in text and "VIOLATION" not in text
    with mock.patch.object(RolloutBuffer, "_dropped"):
        assert "VIOLATION   accounting: " in shown(capsys, directory), "a replay by control with a bug"
    bundle = write_crash_bundle(run.directory, "engine-0 was killed by SIGKILL\n  last words", variables={})
    assert "status      failed: engine-0 was killed by SIGKILL\n" in shown(capsys, directory)
    of_bundle = shown(capsys, str(bundle))
    assert of_bundle.startswith(f"crash of {run.directory.name} at ") and "    last words" in of_bundle
    assert text in of_bundle

    again = SimulatedRun(run.settings, run.directory, failing=29)
    again.ranks = run.ranks
    anyio.run(again.run)
    text = shown(capsys, directory)
    assert "status      ended: all steps done" in text and "step        6 of 6" in text
    assert "+ in flight 0" in text and "waited for" not in text
    # Orders to a run that has ended: first what the run is, then the request.
    (run.directory / "recipe.toml").write_text(dump_recipe(load_recipe(DEMO, CHOSEN)))
    orders = (
        ["resume"], ["drain"], ["status"], ["pause"], ["continue"], ["checkpoint"], ["evaluate"], ["set", "no.key=1"],
        ["reward list"], ["reward attach", "none.py:f"], ["reward detach", "f"], ["reward replace", "f", "none.py:g"],
    )  # fmt: skip
    for name, *rest in orders:
        code = streamrl.cli.main.main([*name.split(), directory, *rest])
        out, problem = capsys.readouterr()
        if name == "resume":
            assert (code, problem) == (0, "") and "has ended: all steps done; nothing is started" in out
        else:
            assert (code, out) == (1, "") and f"{directory} does not run on this host: it has ended" in problem, name


def test_a_run_that_control_ended_with_an_error(run: SimulatedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Show says failed with the cause, without a crash bundle too; ``resume`` does not refuse such a run."""
    recipe = load_recipe(DEMO, [*CHOSEN, "reward_limits.max_failed_share=0.01"])
    (run.directory / "recipe.toml").write_text(dump_recipe(recipe))
    failed = SimulatedRun(control_settings(recipe), run.directory, failing=2)
    with pytest.raises(BaseExceptionGroup):
        anyio.run(failed.run)
    text = shown(capsys, str(run.directory))
    assert "status      failed: " in text and "trajectories failed" in text and "all steps done" not in text
    known = read_run(run.directory)
    assert known.status == "failed" and not nothing_left(known)


def test_a_run_that_goes_on(run: SimulatedRun, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []

    def look(kind: str, number: int) -> None:
        if (kind, number) == ("live", 3):
            texts.append(shown(capsys, str(run.directory)))

    run.happened = look  # type: ignore[method-assign]
    anyio.run(run.run)
    assert "status      running, process " in texts[0]


def test_sets_and_baselines_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(DEMO, [*CHOSEN, 'prompts.train={a = "a.jsonl", b = "b.jsonl"}', "objective.algorithm=spo"])
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    anyio.run(SimulatedRun(control_settings(recipe), tmp_path).run)
    prompts = " ".join(shown(capsys, str(tmp_path)).partition("prompts     ")[2].split())
    assert re.match(
        r"24 drawn, 0 waiting, 0 deferred; a: 12 drawn, 0 skipped; b: 12 drawn, 0 skipped; baselines of", prompts
    )


def test_what_has_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert streamrl.cli.main.main(["show", str(tmp_path)]) == 2
    assert f"{tmp_path} is not the directory of a run: name one" in capsys.readouterr().err
    (tmp_path / "recipe.toml").write_text(dump_recipe(load_recipe(DEMO)))
    (tmp_path / "journal").mkdir()
    assert streamrl.cli.main.main(["show", str(tmp_path)]) == 1
    assert "the run has not begun" in capsys.readouterr().err

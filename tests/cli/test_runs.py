"""``streamrl runs`` on run directories that are written here: what is listed, and what is compared."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from builders.recipe import small_recipe

from streamrl.base.atomic_files import hold_lock
from streamrl.base.errors import RecipeError
from streamrl.cli.main import main
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.scheduling import Rollout
from streamrl.recipe.sections import Run


def write_run(runs: Path, name: str, *, steps: int, group_size: int = 4, score: float | None = None) -> Path:
    """A run of ten steps that has trained ``steps`` of them."""
    run = runs / name
    run.mkdir(parents=True)
    base = "/cache/models--Qwen--Qwen3-0.6B/snapshots/" + "a" * 40
    recipe = small_recipe(base, run=Run(steps=10), rollout=Rollout(group_size=group_size))
    (run / "recipe.toml").write_text(dump_recipe(recipe))
    lines = [
        {"kind": "step", "time": 1e9 + n, "step": n, "policy_version": n, "reward/mean": n / 10}
        for n in range(1, steps + 1)
    ]
    scores = {"eval/held_out/avg@1": score, "eval/held_out/prompts": 8.0}
    lines += [] if score is None else [{"kind": "evaluation", "time": 2e9, "step": steps} | scores]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs, one in each state, and the link to the last."""
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "runs"
    write_run(found, "a-20261101-101500", steps=10, score=0.5)
    failed = write_run(found, "b-20261102-101500", steps=3, group_size=8, score=0.25)
    (failed / "crash").mkdir()
    (failed / "crash" / "one.zip").write_bytes(b"")
    stopped = write_run(found, "c-20261103-101500", steps=2)
    with (stopped / "metrics.jsonl").open("a") as lines:
        lines.write('{"kind":"step","step":2,"time":1e9,"run/steps":12.0}\n')
    (stopped / "crash").mkdir()
    (stopped / "crash" / "old.zip").write_bytes(b"")
    os.utime(stopped / "crash" / "old.zip", (1e8, 1e8))  # it was resumed since
    write_run(found, "d-20261031-101500", steps=0)
    (found / "latest").symlink_to("c-20261103-101500")
    return found


def test_a_list_has_every_run_once_the_oldest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(holder: str) -> RecipeError:
        return RecipeError(holder)

    with hold_lock(runs / "d-20261031-101500" / "lock", refused):
        assert main(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["run"][0], one["state"], one["step"]) for one in listed] == [
        ("d", "running", 0),
        ("a", "finished", 10),
        ("b", "failed", 3),
        ("c", "stopped", 2),
    ]
    assert listed[1]["scores"] == {"eval/held_out/avg@1": 0.5} and listed[1]["metrics"]["reward/mean"] == 1.0
    assert [one["steps"] for one in listed] == [10, 10, 10, 12], "`streamrl set` gave the last one two more"
    assert {one["model"] for one in listed} == {"Qwen/Qwen3-0.6B"} and listed[0]["started"] == "2026-10-31 10:15:00"
    assert main(["runs", str(runs)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2] == [
        "a-20261101-101500",
        "2026-11-01",
        "10:15:00",
        "finished",
        "10/10",
        "1",
        "0.5",
        "of",
        "8",
        "Qwen/Qwen3-0.6B",
    ]


def test_runs_are_compared_by_what_differs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "b-20261102-101500", "runs/a-20261101-101500", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert compared == {
        "rollout.group_size": ["8", "4"],
        "step": ["3", "10"],
        "reward/mean": ["0.3", "1"],
        "eval/held_out/avg@1": ["0.25", "0.5"],
    }
    assert main(["runs", "runs/a-20261101-101500", "runs/b-20261102-101500"]) == 0
    assert ["rollout.group_size", "4", "8"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("", "recipe.toml is empty, a link, too large"),
        ("\n \n", "recipe.toml is empty, a link, too large"),
        ('[model]\npath = "m', "recipe.toml is no TOML"),
        ("\x00\x00\x00\x00", "recipe.toml is no TOML"),
        ('[policy]\npath = "m"\n', "of another version"),
        ('[model]\npath = 3\n[run]\nsteps = "many"\n', "of another version"),
        ('model = "m"\nrun = 7\n', "of another version"),
        ('[model]\npath = "m"\n[run]\ntags = 3\nsteps = 3\n', "of another version"),
    ],
)
def test_a_broken_run_hides_no_other(runs: Path, capsys: pytest.CaptureFixture[str], recipe: str, problem: str) -> None:
    broken = runs / "e-20261104-101500"
    broken.mkdir()
    (broken / "recipe.toml").write_text(recipe)
    (broken / "metrics.jsonl").write_text('{"kind": "step", "step": 4, "time": 1e9, "reward/mean": 0.5}\n')
    assert main(["runs", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[1:6]] == ["d", "a", "b", "c", "e"] and " 0.5 " in lines[5]
    assert lines[6].startswith("e-20261104-101500: recipe.toml is ") and problem in lines[6]
    assert main(["runs", str(runs), "--json"]) == 0
    *others, listed = json.loads(capsys.readouterr().out)
    assert problem in listed["problem"] and listed["step"] == 4 and not any(other["problem"] for other in others)


def test_a_run_that_failed_after_its_last_step(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = runs / "a-20261101-101500"
    (failed / "crash").mkdir()
    (failed / "crash" / "one.zip").write_bytes(b"")
    assert main(["runs", str(failed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "failed"
    (failed / "journal").mkdir()
    (failed / "journal" / "000002.journal").write_bytes(b"")  # it was resumed since, and ended
    os.utime(failed / "crash" / "one.zip", (1e9 + 20, 1e9 + 20))
    assert main(["runs", str(failed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "finished"


@pytest.mark.parametrize(("size", "prompts"), [(12, "held_out.jsonl"), (8, "other.jsonl")])
def test_scores_of_other_sets_are_not_compared(
    runs: Path, capsys: pytest.CaptureFixture[str], size: int, prompts: str
) -> None:
    """A score on another number of prompts, or on other prompts, has a row of its own."""
    for name in ("a-20261101-101500", "b-20261102-101500"):
        source = prompts if name.startswith("b") else "held_out.jsonl"
        recipe = load_recipe(runs / name / "recipe.toml", [f'evaluation.prompts="/{source}"', "evaluation.every=2"])
        (runs / name / "recipe.toml").write_text(dump_recipe(recipe))
    with (runs / "b-20261102-101500" / "metrics.jsonl").open("a") as lines:
        scores = {"eval/held_out/avg@1": 0.25, "eval/held_out/size": size, "eval/held_out/prompts": 8.0}
        lines.write(json.dumps({"kind": "evaluation", "time": 2e9, "step": 3} | scores) + "\n")
    assert main(["runs", "a-20261101-101500", "b-20261102-101500", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["compared"]
    assert {name: row for name, row in rows.items() if name.startswith("eval/")} == {
        'eval/held_out/avg@1 (8 prompts of "/held_out.jsonl")': ["0.5", ""],
        f'eval/held_out/avg@1 ({size} prompts of "/{prompts}")': ["", "0.25"],
    }


@pytest.mark.parametrize(
    ("place", "problem"), [("none", "none has no runs"), ("broken", "broken is not the directory of a run")]
)
def test_what_is_no_run_is_named(runs: Path, capsys: pytest.CaptureFixture[str], place: str, problem: str) -> None:
    (runs.parent / "broken").mkdir()
    (runs.parent / "broken" / "recipe.toml").write_text("[run")
    assert main(["runs", place]) == 2
    assert problem in capsys.readouterr().err

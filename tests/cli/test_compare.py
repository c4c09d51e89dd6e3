"""``streamrl compare``: what is refused before a run, figures and the page, and two systems on simulated engines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from builders.files import SORT_RECIPE as RECIPE

from streamrl.cli.compare.comparison import Comparison, typical_step
from streamrl.cli.compare.measured_run import SPARE_STEPS, ComparedRun, measured_recipe
from streamrl.cli.compare.run_figures import WARM_UP_STEPS
from streamrl.cli.main import main
from streamrl.recipe.rules.load_recipe import load_recipe

SECONDS = (9.0, 9.0, 1.0, 3.0, 2.0, 50.0)
"""Of the steps of a run: two of warm-up, three that count, one of the drain."""


def compared(directory: Path, system: str = "synchronous", repeat: int = 1, slower: float = 1.0) -> ComparedRun:
    each = {"util/rollout_bubble_ratio": 0.5, "util/free_slot_ratio": 0.75, "perf/train_tok_s": 80.0}
    times = [seconds * slower for seconds in SECONDS]
    steps = [each | {"time/step_s": took, "perf/samples_s": 4 / took, "perf/train_tok_s": 80 / took} for took in times]
    figures: dict[str, Any] = {"accuracy": 0.5, "stragglers": math.nan, "cool_down": 1, "warnings": ("step 1: <odd>",)}
    return ComparedRun(steps=steps, system=system, repeat=repeat, directory=str(directory), **figures)


def test_speeds_are_compared_repeat_by_repeat(tmp_path: Path) -> None:
    """Figures come from the measured steps alone, and speeds are compared repeat by repeat."""
    runs = [compared(tmp_path), compared(tmp_path, repeat=2, slower=2.0)]
    runs += [compared(tmp_path, "sagc", slower=0.5), compared(tmp_path, "sagc", repeat=2, slower=0.5)]
    assert runs[0].measured == runs[0].steps[WARM_UP_STEPS:5]
    assert (runs[0].samples, runs[0].sample_ms, runs[0].length) == pytest.approx((12.0, 500.0, 20.0))
    assert typical_step(runs[0]) == 4, "two seconds: the median of one, three and two"
    named = ("synchronous", "sagc", "rollpacker")
    found = Comparison(recipe="r", machine="m", samples=12, repeats=2, systems=named, runs=tuple(runs))
    assert found.speeds("sagc") == pytest.approx([2.0, 4.0])
    heads, rows = found.table()
    table = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    assert table["synchronous"]["ms a sample"] == "750.0 (500.0 to 1000.0)"
    assert table["sagc"]["times as fast"] == "2.83 (2.00 to 4.00)", "the geometric mean, as in the tables of the papers"
    caption = "sagc: 2.83 (2.00 to 4.00) times as fast, 250.0 (250.0 to 250.0) ms a sample"
    assert found.caption("sagc") == caption, "a picture has the figures of its row"
    assert table["sagc"]["stragglers"] == "-" and set(list(table["rollpacker"].values())[2:]) == {"-"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--systems", "synchronous,rolpacker"], "'rolpacker' is no system and no kind of rounds: choose from rollpac"),
        (["--systems", "sagc,synchronous:rollout.group_size=0"], "synchronous:rollout.group_size=0: "),
        (["rollout.rounds=tail_batching"], 'contradicts rollout.system = "sortedrl"'),
        (["model.path=nowhere"], "sagc: model.path"),
        (["--samples", "-1"], "--samples -1 --repeats 2"),
        (["--out", "there"], "--out there: a comparison is there already"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "comparison.json").touch()
    assert main(["compare", str(RECIPE), "run.steps=1", *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "no directory was made"


def test_repeats_have_seeds_and_enough_steps(tmp_path: Path) -> None:
    """Every repeat has its own seed, and enough steps for the smallest groups."""
    recipe = load_recipe(RECIPE, ["rollout.system=sagc", "rollout.prompts_per_batch=8", "rollout.group_size=8"])
    run = measured_recipe(recipe, 320, 3, "sagc", tmp_path)
    assert (run.run.name, run.run.seed, run.run.directory) == ("sagc-3", recipe.run.seed + 2, str(tmp_path))
    assert run.run.steps == WARM_UP_STEPS + 320 // (8 * 4) + SPARE_STEPS
    assert not run.evaluation.at_start and not run.evaluation.every


@pytest.mark.long
@pytest.mark.torch
def test_two_systems_train_as_many_samples(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "reward.py").write_text("async def reward(completion):\n    return len(completion) % 7 / 6\n")
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("\n".join((RECIPE.parent / "held_out.jsonl").read_text().splitlines()[:4]))
    flags = ["engines.kind=simulated", "rollout.prompts_per_batch=4", "rollout.group_size=4", "sampling.max_tokens=48"]
    flags += [f"rewards.0.function={tmp_path / 'reward.py'}:reward", f"evaluation.prompts={held_out}"]
    flags += ["training.advanced.threads=1", "checkpoint.advanced.min_free_gib=0"]
    command = ["compare", str(RECIPE), *flags, "--samples", "48", "--repeats", "1", "--out", str(tmp_path / "out")]

    assert main([*command, "--systems", "synchronous,sagc", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["system"] for run in found["runs"]] == ["synchronous", "sagc"]
    kept = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert kept == found and not found["failures"] and len(found["notes"]) == 1
    for run in found["runs"]:
        measured = run["steps"][WARM_UP_STEPS : len(run["steps"]) - run["cool_down"]]
        assert sum(step["perf/samples_s"] * step["time/step_s"] for step in measured) > 47.9
        assert run["cool_down"] <= 3, "no more than steps beside the evaluation"
        assert run["accuracy"] is not None and Path(run["directory"]).parent == tmp_path / "out"
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert '{"name":"times as fast","meaning":""}' in page and page.count('"place":') == 2
    assert '{"key":"group_sizing.kind","values":["fixed","sagc"]}' in page

"""``streamrl compare``: what is refused before a run, figures and the page, and two systems on simulated engines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.cli.main import main
from streamrl.launch.comparison.comparison import Comparison, comparison_page
from streamrl.launch.comparison.measured_run import SPARE_STEPS, ComparedRun, measured_recipe
from streamrl.launch.comparison.run_figures import WARM_UP_STEPS
from streamrl.launch.comparison.step_timeline import bars_of, typical_step
from streamrl.observe.dashboard.timeline_columns import TimelineColumns
from streamrl.observe.follow.run_files import RunFiles
from streamrl.observe.report.trajectory_trace import StepLine, TraceHeader, TrajectoryLine, TrajectoryTrace
from streamrl.recipe.rules.load import load_recipe

RECIPE = Path(__file__).parents[2] / "examples" / "sort" / "recipe.toml"
SECONDS = (9.0, 9.0, 1.0, 3.0, 2.0, 50.0)
"""Of the steps of a run: two of warm-up, three that count, one of the drain."""


def compared(directory: Path, system: str = "synchronous", repeat: int = 1, slower: float = 1.0) -> ComparedRun:
    each = {"util/rollout_bubble_ratio": 0.5, "util/free_slot_ratio": 0.75, "perf/train_tok_s": 80.0}
    times = [seconds * slower for seconds in SECONDS]
    steps = [each | {"time/step_s": took, "perf/samples_s": 4 / took, "perf/train_tok_s": 80 / took} for took in times]
    figures: dict[str, Any] = {"accuracy": 0.5, "stragglers": math.nan, "cool_down": 1, "warnings": ("step 1: <odd>",)}
    return ComparedRun(steps=steps, system=system, repeat=repeat, directory=str(directory), **figures)


def write_trace(directory: Path) -> None:
    """Six steps of ``SECONDS`` with four trajectories each, of which the last is dropped."""
    numbers = dict.fromkeys(("seed", "max_tokens", "max_model_len", "prompts_per_batch", "group_size"), 4)
    numbers |= dict.fromkeys(("max_staleness", "engines", "capacity"), 4)
    header = TraceHeader(schema=1, run_id="r", temperature=1.0, rounds="synchronous", **numbers)
    trace, began = TrajectoryTrace(directory / "trace.jsonl", header), 0.0
    for version, took in enumerate(SECONDS, start=1):
        for sample, share in enumerate((0.2, 0.4, 0.1, 0.6)):
            texts = {"prompt_id": "p", "finish_reason": "stop", "round_kind": "synchronous"}
            texts["outcome"] = "trained" if sample < 3 else "race_lost"
            counts = {"group": version, "sample": sample, "attempt": 0, "prompt_tokens": 3, "tokens": 5}
            at = {"launched_s": began, "ended_s": began + took, "rollout_s": share * took, "reward_s": 0.1 * took}
            trace.append(msgspec.convert(texts | counts | at, TrajectoryLine))
        began += took
        spans = {"step_s": took, "rollout_s": 0.7 * took, "training_s": 0.2 * took, "push_s": 0.1 * took}
        counts = {"policy_version": version, "samples": 4, "trained_tokens": 80, "generated_tokens": 80}
        line = {"time_s": began, "round_kind": "synchronous", "group_size": 4.0}
        trace.append(msgspec.convert(line | spans | counts, StepLine))
    trace.close()


def test_figures_are_those_of_the_measured_steps_and_speeds_are_taken_repeat_by_repeat(tmp_path: Path) -> None:
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
    assert table["sagc"]["times as fast"] == "3.00 (2.00 to 4.00)"
    assert table["sagc"]["stragglers"] == "-" and set(list(table["rollpacker"].values())[2:]) == {"-"}


def test_bars_are_in_slots_that_were_free_the_busiest_first(tmp_path: Path) -> None:
    write_trace(tmp_path)
    trace = TimelineColumns(RunFiles(tmp_path))
    trace.refresh()
    bars = bars_of(trace, begin=sum(SECONDS[:4]), seconds=2.0)
    assert [bar.lane for bar in sorted(bars, key=lambda bar: -bar.end)] == [0, 1, 2, 3]
    assert {bar.begin for bar in bars} == {0.0}, "nothing of the steps before and after it"
    longest = next(bar for bar in bars if bar.lane == 0)
    assert (longest.end, longest.scored) == pytest.approx((1.2, 1.4)) and not longest.trained
    both = bars_of(trace, begin=sum(SECONDS[:3]), seconds=5.0)
    assert len(both) == 8 and {bar.lane for bar in both} == {0, 1, 2, 3}, "slots are used again"


def test_the_page_asks_no_other_host_and_shows_names_as_text(tmp_path: Path) -> None:
    write_trace(tmp_path)
    odd = "<img src=http://x onerror=alert(1)>"
    runs = (compared(tmp_path), compared(tmp_path / "gone", odd))
    notes = {"failures": (f"{odd} broke",)}
    page = comparison_page(
        Comparison(recipe=odd, machine=odd, samples=12, repeats=1, systems=("synchronous", odd), runs=runs, **notes)
    )
    assert "<img" not in page and "&lt;img" in page and "&lt;odd&gt;" in page
    assert "default-src 'none'" in page and not any(word in page for word in ("<script", "href=", 'src=http://x"'))
    assert page.count('class="trained"') == 3 and page.count('class="dropped"') == 1 and "its trace is gone" in page


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


def test_every_repeat_has_its_seed_and_steps_enough_for_the_smallest_groups(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["rollout.system=sagc", "rollout.prompts_per_batch=8", "rollout.group_size=8"])
    run = measured_recipe(recipe, 320, 3, "sagc", tmp_path)
    assert (run.run.name, run.run.seed, run.run.directory) == ("sagc-3", recipe.run.seed + 2, str(tmp_path))
    assert run.run.steps == WARM_UP_STEPS + 320 // (8 * 4) + SPARE_STEPS
    assert not run.evaluation.at_start and not run.evaluation.every


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
    assert page.count("<figure>") == 2 and "group_sizing.kind = &quot;sagc&quot;" in page and "run.name = " not in page

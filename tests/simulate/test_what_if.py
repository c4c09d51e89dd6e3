"""The search for better rounds, and its command."""

from __future__ import annotations

import functools
import json
import math
import random
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from oracle.trace_header import trace_header

from streamrl.base.errors import StreamRLError
from streamrl.cli.main import main
from streamrl.observe.report.trajectory_trace import EnginesLine, StepLine, TrajectoryLine, TrajectoryTrace, read_trace
from streamrl.recipe.rules.load_recipe import check_recipe, load_recipe
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.simulate.fleet import DEMO, HEAVY, FleetModel
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.what_if import CURRENT, Advice, Budget, Search, World, eta_of, grid, recipe_fragment, variants
from tests.simulate.worlds import with_part

RECIPE = """
[model]
path = "model"

[prompts]
train = "train.jsonl"

[[rewards]]
function = "reward.py:reward"

[rollout]
prompts_per_batch = {prompts}
group_size = 8
{more}
"""


def write_recipe(folder: Path, prompts: int, more: str = "") -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(prompts=prompts, more=more))
    return path


def advice(recipe: Recipe, model: FleetModel, *, steps: int = 40, **budget: Any) -> Advice:
    lengths = functools.cache(lambda seed: ModelledLengths(model.lengths, seed))  # drawing changes nothing in them
    world = World(model=model, steps=steps, warm_up=5, lengths=lengths)
    return Search(world, Budget(**budget)).run(recipe)


# ---- the search -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def heavy_recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return load_recipe(write_recipe(tmp_path_factory.mktemp("heavy"), 8))


@pytest.fixture(scope="module")
def on_policy_advice(heavy_recipe: Recipe) -> Advice:
    return advice(heavy_recipe, HEAVY, steps=24)


@pytest.mark.long
def test_a_race_is_recommended_where_the_tail_binds(heavy_recipe: Recipe, on_policy_advice: Advice) -> None:
    told, best = on_policy_advice, on_policy_advice.recommended
    assert best.recipe.rollout.rounds in (RoundKind.TAIL_BATCHING, RoundKind.AUTO)
    assert told.gain > 0.3
    figures = best.figures
    assert figures is not None
    assert figures.staleness == 0
    assert figures.length_share >= 0.9
    assert figures.simulations == 2, "a recommendation is confirmed with other lengths"
    names = {tried.name for tried in told.tried}
    refined = {name for name in names if name.startswith("tail_batching")} - set(grid(heavy_recipe, Budget()))
    assert refined, "neighbours of the best race of the grid were simulated"
    assert any("presubmitted" in name for name in names)


@pytest.mark.long
def test_nothing_is_recommended_where_nothing_helps(tmp_path: Path) -> None:
    """Token-bound, and requests cost nothing to submit: every race only adds tokens."""
    slow = with_part(DEMO, "engine", per_running_s=2e-3, arrival_s=0.0, admission_s=0.0, admission_per_running_s=0.0)
    recipe = load_recipe(write_recipe(tmp_path, 16))
    told = advice(recipe, slow, steps=8)
    if told.recommended is not told.current:
        assert recipe_fragment(told.recommended.recipe, recipe).splitlines() == [
            "[rollout.advanced]",
            "presubmit = true",
        ]
    assert told.gain < 0.1
    assert told.current.name == CURRENT


@pytest.mark.long
def test_the_budget_is_kept(heavy_recipe: Recipe, on_policy_advice: Advice) -> None:
    strict, loose = on_policy_advice, advice(heavy_recipe, HEAVY, steps=10, max_staleness=2)
    assert not any(name.startswith("continuous") for name in (tried.name for tried in strict.tried))
    assert any(name.startswith("continuous") for name in (tried.name for tried in loose.tried))
    for told, oldest in ((strict, 0), (loose, 2)):
        for tried in told.tried:
            if tried.figures is None or tried.problem:
                assert tried.problem, tried.name
                continue
            assert tried.figures.staleness <= oldest, tried.name
            assert tried.figures.length_share >= 0.9, tried.name
    biased = next(tried for tried in strict.tried if tried.name == "tail_batching 1.25/1.25")
    assert "of the unbiased length" in biased.problem
    assert "0.9 asked" in biased.problem


@pytest.mark.long
def test_a_recipe_that_breaks_the_budget_is_not_recommended(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, 4))
    stale = msgspec.structs.replace(
        recipe, rollout=msgspec.structs.replace(recipe.rollout, rounds=RoundKind.CONTINUOUS, max_staleness=3)
    )
    told = advice(stale, HEAVY, steps=6)
    assert told.current.problem.startswith("tokens")
    assert told.recommended.name != CURRENT
    assert told.gain > -1


def test_every_candidate_of_the_grid_is_a_recipe_that_could_run(tmp_path: Path) -> None:
    more = 'rounds = "tail_batching"\n[tail_batching]\nprompt_oversampling = 1.4'
    recipe = load_recipe(write_recipe(tmp_path, 8, more))
    candidates = grid(recipe, Budget(max_staleness=3))
    assert len(candidates) >= 12
    assert {"as it is, groups of 4", "as it is, groups of 16"} <= set(candidates)
    assert candidates["as it is, groups of 16"].rollout.prompts_per_batch == 4, "as many samples a batch"
    assert {r.rollout.rounds for r in candidates.values()} == set(RoundKind) - {RoundKind.CUSTOM}
    for candidate in candidates.values():
        check_recipe(candidate)


def test_several_engines_may_be_freed_or_have_other_sets(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, 8, "[engines]\ncount = 4"))
    found = variants(recipe)
    assert found["engines freed"].engines.release is ReleaseKind.DRAIN
    assert [(one.count, one.tensor_parallel_size) for one in found["sets of engines"].engines.sets] == [(2, 2)]
    for candidate in found.values():
        check_recipe(candidate)
    assert recipe_fragment(found["sets of engines"], recipe).startswith("[engines.advanced]\nsets = [{count = 2")


def test_the_fragment_turns_the_recipe_into_the_recommendation(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, 8)
    recipe = load_recipe(path)
    for candidate in grid(recipe, Budget(max_staleness=3)).values():
        table = tomllib.loads(recipe_fragment(candidate, recipe))
        advanced = {f"{s}.advanced": keys.pop("advanced") for s, keys in table.items() if "advanced" in keys}
        overrides = [f"{s}.{k}={json.dumps(v)}" for s, keys in (table | advanced).items() for k, v in keys.items()]
        assert load_recipe(path, overrides) == candidate
    assert recipe_fragment(recipe, recipe) == ""


def test_an_unsimulated_candidate_is_left_out_by_name(tmp_path: Path) -> None:
    """A candidate that cannot be simulated is left out and named."""
    recipe = load_recipe(write_recipe(tmp_path, 4))

    class Few(ModelledLengths):
        """Whose prompts run out, as those of a cohort do first."""

        def draw(self, prompt: int, seed_base: int, samples: int, version: int) -> list[int]:
            if prompt >= 30:
                raise StreamRLError("no more prompts")
            return super().draw(prompt, seed_base, samples, version)

    world = World(model=HEAVY, steps=4, warm_up=1, lengths=functools.cache(lambda seed: Few(HEAVY.lengths, seed)))
    told = Search(world, Budget(min_length_share=0.0)).run(recipe)
    broken = [tried for tried in told.tried if tried.name.startswith("length_sorted")]
    assert broken
    assert any(tried.problem == "no more prompts" and tried.figures is None for tried in broken)


# ---- the command ------------------------------------------------------------------------------------


def record_run(folder: Path, *, stalled_s: float = 0.0, evaluated_s: float = 0.0) -> Path:
    """A run directory as a synchronous run of an engine with a decode step of 2 ms + 0.05 ms x running leaves it, where
    each rollout also takes ``stalled_s``, and one beside an evaluation (every fourth) ``evaluated_s``."""
    steps, prompts, every = 16, 8, 4
    evaluation = f'[evaluation]\nprompts = "held_out.jsonl"\nevery = {every}'
    write_recipe(folder, prompts, "\n".join(["[sampling]", "max_tokens = 2048", evaluation if evaluated_s else ""]))
    header = trace_header(
        max_tokens=2048, max_model_len=4096, prompts_per_batch=prompts, group_size=8, capacity=prompts * 8
    )
    trace = TrajectoryTrace(folder / "trace.jsonl", header)
    lengths, now = ModelledLengths(HEAVY.lengths, 3), 0.0
    for step in range(steps):
        beside_s = evaluated_s if step % every == 0 else 0.0
        now = record_step(trace, lengths, step, prompts, now, stalled_s + beside_s)
    trace.close()
    return folder


def record_step(
    trace: TrajectoryTrace, lengths: ModelledLengths, step: int, prompts: int, now: float, stalled_s: float
) -> float:
    groups = [lengths.draw(step * prompts + number, 0, 8, 0) for number in range(prompts)]
    ends: dict[int, float] = {}
    running = sorted(length for group in groups for length in group)
    clock, before = 0.0, 0
    for number, length in enumerate(running):
        busy = len(running) - number
        token_s = 2e-3 + 5e-5 * busy
        if length > before:
            clock += (length - before) * token_s
            line = EnginesLine(
                time_s=now + clock, running=busy, waiting=0, kv_usage=0.1, token_s=token_s, mean_running=busy
            )
            trace.append(line)
        ends[length], before = clock, length
    chance = random.Random(step)
    for number, group in enumerate(groups):
        for sample, length in enumerate(group):
            trace.append(
                TrajectoryLine(
                    prompt_id=f"p{step * prompts + number}",
                    group=step * prompts + number,
                    sample=sample,
                    attempt=0,
                    prompt_tokens=8,
                    tokens=length,
                    finish_reason="length" if length >= 2048 else "stop",
                    outcome="trained",
                    round_kind="synchronous",
                    launched_s=now,
                    ended_s=now + clock,
                    rollout_s=ends[length],
                    reward=float(chance.random() < 0.5),
                    oldest_version=step,
                    newest_version=step,
                )
            )
    tokens = sum(map(sum, groups))
    clock += stalled_s
    trace.append(
        StepLine(
            time_s=now + clock + 0.1,
            policy_version=step + 1,
            round_kind="synchronous",
            group_size=8,
            samples=8 * prompts,
            trained_tokens=tokens,
            generated_tokens=tokens,
            step_s=clock + 0.1,
            rollout_s=clock,
            training_s=0.07,
            push_s=0.03,
            forward_backward_s=0.05,
        )
    )
    return now + clock + 0.1


@pytest.mark.long
def test_command_on_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record_run(tmp_path, evaluated_s=5.0)
    assert main(["what-if", str(run), "--steps", "24", "--warm-up", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["notes"][0].endswith("; left out: 3 steps beside an evaluation")
    assert told["fleet"] == "of run run-1"
    assert abs(told["mismatch"]) < 0.1 and "as recorded / as simulated" in told["notes"][0]
    assert "assumed, not fitted: engine.presubmitted_s" in told["notes"][1]
    assert told["current"]["recipe"] == ""
    assert told["gain"] > 0.1
    ranked = [one for one in told["tried"] if one["figures"] and not one["problem"]]
    assert len(ranked) >= 12 and any("groups of 4" in one["name"] for one in ranked)
    assert {one["steps_a_gradient"] for one in told["tried"] if "long 4" in one["name"]} == {4}
    assert told["current"]["steps_a_gradient"] == 1
    best = told["recommended"]
    assert best["figures"]["length_share"] >= 0.9
    assert tomllib.loads(best["recipe"])["rollout"]["rounds"] in ("tail_batching", "auto")
    assert told["tried"][0]["name"] == best["name"]


@pytest.mark.long
def test_unseen_forecasts_are_none_where_records_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A forecast of rounds that were never seen is none where the record does not fit."""
    run = record_run(tmp_path, stalled_s=2.0)
    assert main(["what-if", str(run), "--steps", "24", "--warm-up", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mismatch"] > 0.3 and "WARNING" in " ".join(told["notes"])
    assert told["gain"] is None and "cannot know" in told["recommended"]["unknown"]
    by_name = {one["name"]: one for one in told["tried"]}
    assert not by_name["as it is, groups of 4"]["unknown"] and by_name["tail_batching 1.25"]["unknown"]
    recorded = read_trace(run / "trace.jsonl").steps[4:]
    goodput = sum(line.trained_tokens for line in recorded) / sum(line.step_s for line in recorded)
    assert told["current"]["figures"]["goodput"] == pytest.approx(goodput, rel=0.15), "scaled to what was recorded"
    assert main(["simulate", str(run), "--trace", str(run), "--compare", "synchronous,tail_batching"]) == 0
    shown = capsys.readouterr()
    assert "as recorded / as simulated" in shown.err and "tail_batching: cannot know" in shown.out


@pytest.mark.long
def test_command_on_a_recipe_prints_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path, 8)
    arguments = ["what-if", str(path), "--fleet", "heavy", "--steps", "16", "--set", "run.seed=4"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "budget: tokens at most 0 steps old" in text
    assert "recommended" in text
    assert "rounds = " in text
    assert "left out: tail_batching 1.25/1.25: trains" in text


def test_command_refuses_what_makes_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recipe(tmp_path, 8)
    assert main(["what-if", str(path), "--min-length-share", "2"]) == 2
    assert "between 0 and 1" in capsys.readouterr().err
    assert main(["what-if", str(path), "--steps", "0"]) == 2
    assert main(["what-if", str(tmp_path / "none.toml")]) == 2


def test_a_race_launches_as_many_prompts_as_it_means_to() -> None:
    for prompts in range(4, 129):
        for number in range(prompts + 1, 2 * prompts + 1):
            assert math.ceil(eta_of(number, prompts) * prompts) == number

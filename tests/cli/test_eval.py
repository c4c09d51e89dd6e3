"""``streamrl eval`` on simulated engines: what it asks for, what it computes, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from builders.files import SORT_MODEL as MODEL
from builders.files import json_lines
from builders.hub import LocalHub

from streamrl.cli.main import main
from streamrl.cli.trained_models.model_evaluation import scores_of
from streamrl.recipe.sections import Evaluation

REWARD = """
def right(completion, *, answer):
    if completion[-1:].isdigit():
        raise LookupError("ends with a digit")
    return float(len(completion) % 3 == 0)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with three held-out prompts, four completions of each."""
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "held.jsonl").write_text("".join(f'{{"prompt": "{n}2{n}:", "answer": ""}}\n' for n in range(1, 4)))
    (tmp_path / "recipe.toml").write_text(
        '[model]\npath = "gone"\n[prompts]\ntrain = "held.jsonl"\n[[rewards]]\nfunction = "mine.py:right"\n'
        '[engines]\nkind = "simulated"\n[sampling]\nmax_tokens = 24\n[lora]\nrank = 4\n'
        '[evaluation]\nprompts = "held.jsonl"\nsamples = 4\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["eval", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_scores_are_those_of_the_completions_that_are_written(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``pass@k`` is 1 - C(n - c, k) / C(n, k) of n scored completions of which c are right."""
    code, out, _ = evaluate(capfd, str(MODEL), "recipe.toml", "--out", "all.jsonl", "--json")
    assert code == 0
    report = json.loads(out)
    lines = json_lines(work / "all.jsonl")
    assert len(lines) == 3 * 4 + 3
    sampled, greedy = lines[:12], lines[12:]
    for one, rows, samples in zip(report["passes"], (sampled, greedy), (4, 1), strict=True):
        by_prompt: dict[int, list[float]] = {}
        for row in rows:
            if row["reward"] is not None:
                by_prompt.setdefault(row["number"], []).append(row["reward"])
        groups = list(by_prompt.values())
        failed = [row["failure"] for row in rows if row["reward"] is None]
        assert all("LookupError: ends with a digit" in failure for failure in failed)
        figures = [one["figures"][f"eval/held_out/{name}"] for name in ("prompts", "failed")]
        assert (one["samples"], figures) == (samples, [len(groups), len(failed)])
        scores = one["scores"]["held_out"]
        assert scores[f"avg@{samples}"]["value"] == pytest.approx(fmean(map(fmean, groups)))
        for k in (1, 2, 4)[: 3 if samples == 4 else 1]:
            enough = [1 - comb(len(g) - round(sum(g)), k) / comb(len(g), k) for g in groups if len(g) >= k]
            assert scores[f"pass@{k}"]["value"] == pytest.approx(fmean(enough))
    assert report["passes"][0]["figures"]["eval/held_out/failed"] and [
        one["temperature"] for one in report["passes"]
    ] == [1.0, 0.0]
    assert len({row["text"] for row in sampled}) > 8 and {row["number"] for row in greedy} == {0, 1, 2}


def test_what_is_chosen_on_the_command_line(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (work / "other.jsonl").write_text('{"prompt": "7:", "answer": ""}\n' * 5)
    options = ("--prompts", "other.jsonl", "-n", "2", "--samples", "3", "--no-greedy", "sampling.max_tokens=5")
    code, out, _ = evaluate(capfd, str(MODEL), "recipe.toml", *options, "--out", "some.jsonl")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and [row[1] for row in rows[1:5]] == ["avg@3", "pass@1", "pass@2", "pass@3"]
    assert "model, at most 5 tokens" in out and "random text" in out
    lines = json_lines(work / "some.jsonl")
    assert len(lines) == 6 and all(len(line["token_ids"]) <= 5 for line in lines)


def test_the_limit_applies_to_each_held_out_set(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The limit of the command applies to each held-out set, whatever the recipe says for its steps."""
    (work / "other.jsonl").write_text('{"prompt": "7:", "answer": ""}\n' * 5)
    sets = 'evaluation.prompts={a = "held.jsonl", b = {prompts = "other.jsonl", every = 7, limit = 1}}'
    for options, prompts in (((), [3, 5]), (("-n", "2"), [2, 2])):
        code, out, _ = evaluate(capfd, str(MODEL), "recipe.toml", sets, *options, "--out", "all.jsonl", "--json")
        assert code == 0 and set(json.loads(out)["passes"][0]["scores"]) == {"a", "b"}
        names = [json.loads(line)["number"] for line in (work / "all.jsonl").read_text().splitlines()]
        assert len(names) == 5 * sum(prompts) and len(set(names)) == sum(prompts)


def test_sets_are_scored_as_in_training_and_siblings_together(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the template and the rewards of the training set of the name; a function of groups gets all samples."""
    (work / "mine.py").write_text(
        "def together(completions, **columns): return [float(len(completions))] * len(completions)\n"
        "def right(completion, *, missing): return 1.0\n"
    )
    train = '{a = {prompts = "gone.jsonl", rewards = ["together"], template = "{{prompt}}9"}, b = "gone.jsonl"}'
    changes = (f"prompts.train={train}", "rewards.1.function=mine.py:together", 'evaluation.prompts={a = "held.jsonl"}')
    code, out, err = evaluate(capfd, str(MODEL), "recipe.toml", *changes, "--out", "all.jsonl", "--json")
    assert code == 0, err
    values = [one["scores"]["a"][f"avg@{one['samples']}"]["value"] for one in json.loads(out)["passes"]]
    assert values == [4.0, 1.0]
    assert all(line["prompt"].endswith(":9") for line in json_lines(work / "all.jsonl"))


@pytest.mark.long
def test_a_model_of_the_hub_by_its_name(work: Path) -> None:
    with LocalHub() as hub:
        hub.commit("org/tiny", MODEL)
        command = [sys.executable, "-m", "streamrl", "eval", "org/tiny", "recipe.toml", "--json"]
        environment = os.environ | hub.environment(work / "home")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert "models--org--tiny/snapshots" in report["model"] and len(report["passes"]) == 2
        missing = [*command[:4], "org/none", "recipe.toml"]
        done = subprocess.run(missing, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 2 and "the Hub has no model of that name" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ((str(MODEL),), 2, "is no run: name the recipe too: streamrl eval MODEL RECIPE"),
        (("nowhere", "recipe.toml"), 2, "nowhere is no model"),
        (
            (".", "recipe.toml"),
            2,
            ". has no checkpoint of version 'latest' (a number, latest, best): it has no checkpo",
        ),
        ((".@7", "recipe.toml"), 2, ". has no checkpoint of version '7'"),
        (
            (str(MODEL), "recipe.toml", "evaluation.prompts=", "evaluation.samples=1"),
            2,
            "recipe.toml has no evaluation.prompts",
        ),
        ((str(MODEL), "recipe.toml", "--samples", "0"), 2, "--set: evaluation.samples: 0 is not allowed"),
        ((str(MODEL), "recipe.toml", "--prompts", "bare.jsonl"), 2, 'has no column "answer", which the reward'),
        (
            (str(MODEL), "recipe.toml", "judge.model=j", "rewards.1.function=judge"),
            2,
            "has a judge.model, which eval does not start",
        ),
        ((str(MODEL), "recipe.toml", "--out", "none/x"), 2, "--out none/x: there is no directory"),
    ],
)
def test_bad_evaluations_are_refused_before_an_engine_starts(
    work: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, problem: str
) -> None:
    """An evaluation that cannot work is refused before an engine starts."""
    (work / "bare.jsonl").write_text('{"prompt": "7:"}\n')
    found, out, err = evaluate(capfd, *arguments)
    assert (found, out) == (code, "") and problem in err


def test_intervals_by_hand() -> None:
    """Wilson's for 0 and 1 (4 of 5: 0.376 to 0.964), the standard error of the mean for others, none for one prompt."""
    binary = scores_of([[1.0]] * 4 + [[0.0]], Evaluation())["pass@1"]
    assert (binary.value, binary.low, binary.high) == pytest.approx((0.8, 0.3755, 0.9638), abs=1e-4)
    sure: Any = scores_of([[1.0]] * 20, Evaluation())["pass@1"]
    assert (sure.value, sure.high) == (1.0, 1.0) and 0.83 < sure.low < 0.84
    mean = scores_of([[0.25], [0.5], [0.75]], Evaluation())["avg@1"]
    assert (mean.low, mean.high) == pytest.approx((0.5 - 1.96 * 0.25 / 3**0.5, 0.5 + 1.96 * 0.25 / 3**0.5), abs=1e-4)
    assert scores_of([[0.25]], Evaluation())["avg@1"].low is None
    assert scores_of([[0.25, 0.5], [1.0]], Evaluation(samples=2))["pass@2"].value == 0.0, "one has too few scores"


@pytest.mark.vllm
@pytest.mark.long
def test_the_output_of_an_engine_is_shown_where_it_fails(work: Path, tmp_path: Path) -> None:
    """vLLM warns of much, and draws bars; what it said is wanted when it could not begin."""
    command = [sys.executable, "-m", "streamrl", "eval", str(MODEL), "recipe.toml", "--no-greedy", "-n", "1"]
    done = subprocess.run([*command, "engines.kind=vllm"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    foreign = [line for line in done.stderr.splitlines() if not line.startswith(("starting an engine", "completions"))]
    assert not foreign

    shutil.copytree(MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    program = (
        "import asyncio, sys\n"
        "from streamrl.cli.trained_models.model_evaluation import started_engine\n"
        "from streamrl.recipe.rules.load_recipe import load_recipe\n"
        "async def start():\n"
        "    async with started_engine(load_recipe('recipe.toml', sys.argv[1:])):\n"
        "        print('it started')\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(start())\n"
    )
    (work / "start.py").write_text(program)
    options = [f"model.path={tmp_path}/model", "engines.kind=vllm"]
    command = [sys.executable, "start.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and not done.stdout
    assert "SafetensorError" in done.stderr.partition("EngineError")[0]

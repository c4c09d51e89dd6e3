"""``streamrl try``: the command on simulated engines and a real trainer, once on vLLM; advice and page by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders.files import SORT_MODEL as MODEL
from builders.recipe import small_recipe

from streamrl.cli.main import main
from streamrl.cli.try_rewards.recipe_report import RecipeTrial, advice_of, proposed_rate, report_page
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Lora, Training

RECIPE = f"""
[model]
path = "{MODEL}"
[prompts]
train = "p.jsonl"
shuffle = false
[[rewards]]
function = "mine.py:parts"
[[rewards]]
function = "mine.py:length"
weight = 0.1
[rollout]
prompts_per_batch = 4
group_size = 4
[sampling]
max_tokens = 24
[training]
learning_rate = 1e-4
[engines]
dtype = "float32"
max_model_len = 64
[run]
steps = 2
"""
REWARD = """
def parts(completion, *, answer):
    if answer == "123":
        raise LookupError("<b>no</b> answer")
    return {"even": float(len(completion) % 2 == 0), "digit": float(completion[:1].isdigit())}
def length(completion):
    return len(completion)
def same(completion):
    return 0.0
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{n}21:", "answer": "12{n}"}}\n' for n in range(9)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


SIMULATED = ("--set", "engines.kind=simulated")


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["try", "recipe.toml", *arguments])
    return code, *capfd.readouterr()


@pytest.mark.long
@pytest.mark.torch
def test_everything_is_said_and_a_step_is_measured(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    code, out, err = run(capfd, *SIMULATED, "--completions", "19", "--json", "--page", "page.html")
    assert code == 0
    trial = json.loads(out)
    assert trial["reward"]["completions"] == 16 and trial["reward"]["signal"]["groups"] == 3
    assert set(trial["reward"]["parts"]) == {"parts", "parts.even", "parts.digit", "length"}
    assert sum(entry["count"] for entry in trial["length_histogram"]) == 16 and trial["lengths"]["most"] <= 24
    assert trial["training"]["trajectories"] == 16 and trial["training"]["problem"] == ""
    assert trial["training"]["tokens"] == round(16 * trial["lengths"]["mean"]) + 16 * 5
    assert trial["training"]["seconds"] > 0 and trial["training"]["cpu_bytes"] > 1 << 27
    assert trial["step_training_s"] == pytest.approx(trial["training"]["seconds"])
    assert any(", 5 tokens: " in line for line in trial["prompt"])
    assert len(trial["reward"]["examples"]) == 5 and len(trial["reward"]["examples"][0]["rewards"]) == 4
    assert trial["learning_rate"] == pytest.approx(1e-4, rel=0.3) and "trainer-0" in trial["memory"][0]
    assert "16 of 16 completions sampled" in err and "the engine is ready" in err
    page = (work / "page.html").read_text()
    assert (
        "&lt;b&gt;no&lt;/b&gt; answer" in page and "<b>no" not in page and "http" not in page.replace("http-equiv", "")
    )
    assert not (work / "runs").exists(), "nothing is kept but the page"


@pytest.mark.long
def test_each_training_set_says_what_it_gives(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rewards and lengths of each set, drawn in their shares, scored by their own rewards and cut at their own limits;
    sets with episodes are left out."""
    more = '[[rewards]]\nfunction = "mine.py:same"\n[environment]\nenv = "mine.py:Game"\nmax_tokens = 60\n'
    more += '[prompts.train]\ngame = "p.jsonl"\n'
    more += 'a = { prompts = "p.jsonl", share = 2, rewards = ["parts"], environment = false }\n'
    more += 'b = { prompts = "p.jsonl", rewards = ["same"], environment = false, max_tokens = 2 }\n'
    (work / "mine.py").write_text(f"{REWARD}class Game:\n    def reset(self): ...\n    def step(self, text): ...\n")
    (work / "recipe.toml").write_text(RECIPE.replace('train = "p.jsonl"\n', "") + more)
    code, out, err = run(capfd, *SIMULATED, "--completions", "24", "--json", "--sampling-only", "--page", "page.html")
    assert code == 0 and "only a, b are tried: the other sets have episodes of [environment]" in err
    trial = json.loads(out)
    a, b = trial["sets"]
    assert (a["name"], a["share"], a["limit_key"], a["max_tokens"]) == ("a", 2 / 3, "sampling.max_tokens", 24)
    assert (b["limit_key"], b["max_tokens"]) == ("prompts.train.b.max_tokens", 2)
    assert (b["figures"]["samples"], b["figures"]["reward_mean"]) == (8, 0) and a["figures"]["reward_mean"] > 0
    assert trial["reward"]["parts"].keys() == {"parts", "parts.even", "parts.digit", "same"}
    assert any("of b are cut at prompts.train.b.max_tokens = 2: raise it (to 4?)" in line for line in trial["advice"])
    page = (work / "page.html").read_text()
    assert "set b: share 0.333, 8 completions with a reward, mean 0.000; 100% of the groups have one value" in page


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.torch
@pytest.mark.filterwarnings("default")
def test_vllm_samples(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    code, out, _ = run(capfd, "--completions", "8", "--sampling-only")
    assert code == 0 and "8 completions in " in out and " by the square-root rule (" in out
    assert out.startswith("run: ") and "length      mean " in out and "prompt      " in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--completions", "3"), "--completions 3: a group has 4 (rollout.group_size): give as many at least"),
        (("--page", "none/x.html"), "there is no directory"),
        (("--set", "rewards.0.function=mine.py:none"), 'has no "none"'),
        (("--set", "prompts.train=q.jsonl"), "q.jsonl"),
        (("--set", "rollout.num_generations=4"), "rollout.group_size here"),
        (
            ("--set", "environment.env=m:Game", "--set", "environment.max_tokens=60"),
            "this recipe has an environment: run a step of it",
        ),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_starts(
    work: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    code, out, err = run(capfd, *SIMULATED, *arguments)
    assert (code, out) == (2, "") and problem in err and "starting" not in err


def test_advice(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    same = ("--set", "rewards.0.function=mine.py:same", "--set", "rewards.1.weight=0", "--sampling-only", "--json")
    trial = msgspec.json.decode(run(capfd, *SIMULATED, *same, "--set", "sampling.max_tokens=2")[1], type=RecipeTrial)
    said = "\n".join(trial.advice)
    assert "every value is 0: there is nothing to learn" in said and "rollout.group_size above 4" in said
    assert "% of the completions are cut at sampling.max_tokens = 2: raise it (to 4?)" in said
    recipe = load_recipe("recipe.toml")

    def advice(changed: dict[str, Any], template: bool = False, rate: float = 1e-4) -> str:
        made = msgspec.structs.replace(recipe, training=Training(learning_rate=rate))
        seen = msgspec.structs.replace(trial, **changed)
        return "\n".join(advice_of(seen, made, unused_template=template))

    solved = msgspec.structs.replace(trial.reward.signal, groups=4, flat=4, flat_high=4, flat_low=0)
    good = msgspec.structs.replace(trial.reward.signal, groups=4, flat=0, flat_high=0, flat_low=0)
    values = msgspec.structs.replace(trial.reward.values, least=0.0, most=1.0)
    assert "take harder prompts" in advice({"reward": msgspec.structs.replace(trial.reward, signal=solved)})
    fine = {"reward": msgspec.structs.replace(trial.reward, signal=good, values=values), "truncated": 0}
    assert advice(fine) == ""
    assert "?chat=true" in advice(fine, template=True) and "is high for a model of 299,136" in advice(fine, rate=1.0)
    assert "<script>" not in report_page(msgspec.structs.replace(trial, advice=("<script>alert(1)</script>",)))


@pytest.mark.parametrize(
    ("rank", "parameters", "rate"), [(0, 596_049_920, 2e-6), (16, 596_049_920, 2e-5), (0, 8e9, 1e-6)]
)
def test_the_proposed_rate_follows_the_square_root_rule(rank: int, parameters: int, rate: float) -> None:
    proposed, reason = proposed_rate(small_recipe(lora=Lora(rank=rank)), int(parameters))
    assert math.isclose(proposed, rate) and f"{int(parameters):,}" in reason and ("LoRA" in reason) == (rank > 0)
    assert ("keep it" in reason) == (rank == 0)  # the recipe has 1e-6

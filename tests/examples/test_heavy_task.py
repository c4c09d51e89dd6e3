"""The rolling task of examples/heavy: what is right, what its prompts ask for, and how long its completions are."""

from __future__ import annotations

import importlib
import json
import random
from itertools import islice
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
from builders.files import EXAMPLES

from streamrl.recipe.rules.load_recipe import load_recipe

HEAVY = EXAMPLES / "heavy"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``examples/heavy/rolling_task.py``."""
    monkeypatch.syspath_prepend(str(HEAVY))
    return importlib.import_module("rolling_task")


def solved(task: ModuleType, prompt: str, rng: random.Random) -> str:
    text = task.lettered(prompt[:2], iter(lambda: rng.choice(task.DIGITS), ""))
    return f"{text}={prompt[:2]}."


def prompts_of(path: Path) -> list[str]:
    return [json.loads(row)["prompt"] for row in path.read_text().splitlines()]


RIGHT = "741a51a0b=3b."
WRONG = {
    "a letter is missing": "74151a0b=3b.",
    "a letter too many": "7a41a51a0b=3b.",
    "the row was counted on after a high roll": "741a51b=3b.",
    "stopped too early": "741a51a=3b.",
    "stopped too late": "741a51a0b8=3b.",
    "another digit": "741a51a0b=2b.",
    "another letter": "741a51a0b=3a.",
    "no row": "741a51a0b=.",
    "no full stop": "741a51a0b=3b",
    "something after it": "741a51a0b=3b.7",
    "no answer": "741a51a0b",
    "no rolls": "=3b.",
    "something else than digits": "741a51a-0b=3b.",
    "only a letter": "b=3b.",
    "nothing": "",
}


def test_the_docstring_example_is_right(task: ModuleType) -> None:
    assert task.is_right("3b:418", RIGHT)
    for other in ("1b:418", "3c:418", "3a:418", "4b:418"):
        assert not task.is_right(other, RIGHT)


@pytest.mark.parametrize("name", WRONG)
def test_one_mistake_makes_it_wrong(task: ModuleType, name: str) -> None:
    assert not task.is_right("3b:418", WRONG[name])


def test_the_rules_answer_is_right_and_exact(task: ModuleType) -> None:
    """The answer that the rule writes is right for every row, and no letter of it may change."""
    rng = random.Random(3)
    for row in (*task.COMMON, *task.RARE):
        prompt = f"{row}:{rng.randrange(1000):03d}"
        completion = solved(task, prompt, rng)
        assert task.is_right(prompt, completion)
        at = rng.choice([at for at, character in enumerate(completion) if character in task.LETTERS])
        other = completion[:at] + rng.choice(task.LETTERS.replace(completion[at], "")) + completion[at + 1 :]
        assert not task.is_right(prompt, other), (prompt, other)


async def test_the_reward_needs_a_stop_of_its_own(task: ModuleType) -> None:
    from rolling_reward import right_row

    assert await right_row(RIGHT, prompt="3b:418", finish_reason="stop", prompt_id="7") == 1.0
    assert await right_row(RIGHT, prompt="3b:418", finish_reason="length") == 0.0
    assert await right_row(WRONG["another digit"], prompt="3b:418", finish_reason="stop") == 0.0


def test_prompt_files_equal_the_tasks_rows(task: ModuleType) -> None:
    """Prompt files hold the rows that the task writes, and share no prompt."""
    files = {name: prompts_of(HEAVY / f"{name}.jsonl") for name in ("train", "held_out")}
    held_out = task.held_out_prompts()
    assert files["held_out"] == held_out and len(set(held_out)) == task.HELD_OUT_PROMPTS
    training = task.random_prompts(task.TRAINING_SEED, excluded=frozenset(held_out))
    assert files["train"] == list(islice(training, task.TRAINING_PROMPTS))
    assert not set(files["train"]) & set(held_out)


def test_lengths_of_right_completions_have_a_heavy_tail(task: ModuleType) -> None:
    cap = load_recipe(HEAVY / "recipe.toml").sampling.max_tokens
    rng = random.Random(5)
    lengths = [
        min(cap, len(task.lettered(prompt[:2], rng.choices(task.DIGITS, k=cap))) + 5)
        for prompt in islice(task.random_prompts(5), 1500)
    ]
    assert cap >= 1024 and cap / median(lengths) >= 20
    assert 0.01 <= sum(length == cap for length in lengths) / len(lengths) <= 0.03

"""A tiny model directory, trajectories, and a recipe around reward functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.base.types import FinishReason, Prompt, Segment, Trajectory, TrajectoryId, float_array, token_array
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.sections import Model, Prompts, Recipe

ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789:"
SPECIAL = ("<pad>", "<eos>", "<unk>")
KILLERS = Path(__file__).parent / "killers.py"


def write_model(directory: Path) -> Path:
    """A model directory with a character tokenizer; EOS is token 1, "a" is token 3."""
    vocabulary = {text: index for index, text in enumerate((*SPECIAL, *ALPHABET))}
    added = [
        {"id": index, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for index, text in enumerate(SPECIAL)
    ]  # fmt: skip
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return directory


def tokens(text: str) -> list[int]:
    return [ALPHABET.index(letter) + len(SPECIAL) for letter in text]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    def make(text: str = "abc", *, sample: int = 0, group: int = 0, **columns: object) -> Trajectory:
        ids = token_array([*tokens(text), 1])
        return Trajectory(
            id=TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=sample),
            prompt=Prompt(prompt_id=f"p{group}", token_ids=token_array(tokens("sort")), columns=columns),
            segments=(Segment(token_ids=ids, trained=True, behavior_logprobs=float_array([0.0] * len(ids))),),
            finish_reason=FinishReason.STOP,
        )

    return make


@pytest.fixture
def make_recipe(model_directory: Path) -> Callable[..., Recipe]:
    def make(
        *functions: str, timeout_s: float = 300.0, weights: tuple[float, ...] = (), trusted: bool = False
    ) -> Recipe:
        rewards = tuple(
            Reward(
                function=name if ":" in name else f"{KILLERS}:{name}",
                timeout_s=timeout_s,
                weight=weights[index] if weights else 1.0,
                trusted=trusted,
            )
            for index, name in enumerate(functions)
        )
        return Recipe(
            model=Model(path=str(model_directory)),
            prompts=Prompts(train="none.jsonl"),
            rewards=rewards,
            reward_limits=RewardLimits(concurrency=64, processes=4),
        )

    return make

"""A tiny model directory, trajectories, and a recipe around reward functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builders.base import trajectory
from builders.pretrained import tokenizer_json, write_tokenizer
from builders.recipe import small_recipe

from streamrl.base.types import Trajectory
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.sections import Recipe

ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789:"
SPECIAL = ("<pad>", "<eos>", "<unk>")
KILLERS = Path(__file__).parent / "killers.py"


def write_model(directory: Path) -> Path:
    """A model directory with a character tokenizer; EOS is token 1, "a" is token 3."""
    return write_tokenizer(directory, tokenizer_json(SPECIAL, ALPHABET))


def tokens(text: str) -> list[int]:
    return [ALPHABET.index(letter) + len(SPECIAL) for letter in text]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    def make(text: str = "abc", *, sample: int = 0, group: int = 0, **columns: object) -> Trajectory:
        ids, asked = [*tokens(text), 1], tokens("sort")
        return trajectory(sample, group, prompt_id=f"p{group}", prompt=asked, tokens=ids, logprob=0.0, columns=columns)

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
        limits = RewardLimits(concurrency=64, processes=4)
        return small_recipe(str(model_directory), rewards=rewards, reward_limits=limits)

    return make

"""examples/adapters: an environment of Gymnasium and a game of textarena, played where their packages are."""

from __future__ import annotations

import ast
import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest
from builders.files import EXAMPLES

from streamrl.recipe.rules.load_recipe import load_recipe

ADAPTERS = EXAMPLES / "adapters"


def adapter(package: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(ADAPTERS))
    return importlib.import_module(f"{package}_game")


@pytest.mark.parametrize("package", ["textarena", "gymnasium"])
def test_a_recipe_names_a_class_and_rows_that_are_there(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(ADAPTERS / f"{package}.toml")
    file, _, name = recipe.environment.env.rpartition(":")
    (found,) = (node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.ClassDef))
    assert name == found.name and {"reset", "step"} <= {getattr(node, "name", "") for node in found.body}
    monkeypatch.syspath_prepend(str(ADAPTERS))
    seeds = importlib.import_module("seeds")
    trained, held_out = ({row["seed"] for row in rows()} for rows in (seeds.train, seeds.held_out))
    assert (len(trained), len(held_out), trained & held_out) == (4096, 256, set())
    sources = [recipe.prompts.train, *(one.prompts for one in recipe.evaluation.sets.values())]
    assert sources == [str(ADAPTERS / f"seeds.py:{name}") for name in ("train", "held_out")]


async def test_a_number_is_found_by_halving_and_siblings_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = adapter("textarena", monkeypatch).GuessTheNumber

    async def play(seed: int) -> list[int]:
        game, low, high, guesses, ended = made(), 1, 7, list[int](), False
        said = await game.reset(seed=seed)
        assert said.count("You are playing") == 1 and "between 1 and 7" in said
        while not ended:
            await asyncio.sleep(0)  # the others play in between
            guesses.append((low + high) // 2)
            answer, reward, ended, *_ = await game.step(f"I say [{guesses[-1]}]")
            assert answer in ("" if ended else "The target number is higher.", "The target number is lower.")
            low, high = (guesses[-1] + 1, high) if "higher" in answer else (low, guesses[-1] - 1)
        assert reward == 1.0 and len(guesses) <= 3
        return guesses

    games = await asyncio.gather(*(play(seed) for seed in [*range(30)] * 2))
    assert games[:30] == games[30:] and len(set(map(tuple, games))) == 7


@pytest.mark.parametrize("said", ["7", "[8]", ""])
async def test_a_turn_without_a_number_is_answered(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn without a number is answered, and the second one ends the game."""
    game = adapter("textarena", monkeypatch).GuessTheNumber()
    await game.reset(seed=3)
    answer, reward, ended, *_ = await game.step(said)
    assert "invalid move" in answer and (reward, ended) == (0.0, False)
    assert (await game.step(said))[:3] == ("", 0.0, True)


def test_a_walk_is_what_gymnasium_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = adapter("gymnasium", monkeypatch).Lake
    ends = set()
    for seed in range(60):
        lake = made()
        said, moves, ended = lake.reset(seed=seed), 0, False
        assert said.startswith("left wall, ") and said.endswith("up wall. The goal is 3 down and 3 right.")
        assert lake.step("to the goal")[:3] == ("Say left, down, right, up.", 0.0, False)
        while not ended and moves < 10:
            around = lake.around()
            move = next(move for move in ("right", "down", "left", "up") if around[move] != "wall")
            said, reward, ended, truncated, _ = lake.step(move)
            moves += 1
            assert (ended, reward) == (around[move] in {"hole", "goal"}, float(around[move] == "goal"))
            assert truncated == (moves == 10)
        ends.add(around[move])
        lake.close()
    assert ends == {"hole", "goal"}

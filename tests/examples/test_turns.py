"""examples/calculator and examples/game: their tasks, and the chats that their starting policies are shown."""

from __future__ import annotations

import importlib
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from builders.files import EXAMPLES, json_lines

from streamrl.base.types import token_array
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.pretrained.turns.template_facts import Appending, template_facts
from streamrl.pretrained.turns.tool_calls import parse_turn
from streamrl.recipe.rules.load_recipe import load_recipe

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(params=["calculator", "game"])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that makes the starting policy of an example."""
    return example(request.param, f"make_{request.param}_model", monkeypatch)


def example(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    return importlib.import_module(module)


def rows(name: str, file: str) -> list[dict[str, Any]]:
    return json_lines(EXAMPLES / name / f"{file}.jsonl")


def test_the_calculator_works_out_numbers_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calculator = example("calculator", "calculator", monkeypatch).Calculator()
    assert calculator.calculate("12 * 34 - 5 + (2 * 3)") == "409"
    refusals = ("2 ** 99", "1 / 2", "-1", "True", "open('x')", "1.5", "'a' * 9", "12 *")
    for refused in refusals:
        with pytest.raises((ValueError, SyntaxError)):
            calculator.calculate(refused)
    assert calculator.reward == pytest.approx(-0.2 * (1 + len(refusals)))


def test_a_game_is_won_by_halving_and_lost_after_five_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    game = example("game", "game", monkeypatch)
    for row in rows("game", "held_out"):
        played, ended = game.Game(), False
        answer = played.reset(**row)
        while not ended:
            assert answer.endswith(f"from {played.low} to {played.high}.")
            answer, reward, ended, *_ = played.step(f" {(played.low + played.high) // 2}\n")
        assert (answer, reward) == ("Right.", 1.0)
        played.reset(**row)
        lost = [played.step(said)[1:3] for said in ("0", "100", "", "none", "-1")]
        assert lost == [(0.0, False)] * (game.GUESSES - 1) + [(0.0, True)]
        assert (played.low, played.high) == (row["low"], row["high"])


@pytest.mark.parametrize("name", ["recipe", "tool"])
def test_the_examples_of_verifiers_are_whole(name: str) -> None:
    folder, recipe = EXAMPLES / "verifiers", load_recipe(EXAMPLES / "verifiers" / f"{name}.toml")
    program, taskset = recipe.environment.agent[1:]
    for file in (Path(program), folder / f"{taskset}.py"):  # of a virtual environment that tests do not have
        compile(file.read_text(), str(file), "exec")
    questions = rows("calculator", "train")
    assert all(row["task"] < len(questions) for row in rows("verifiers", "tasks"))


@pytest.mark.parametrize(("name", "script"), [("calculator", "questions"), ("game", "games")])
def test_prompt_files_equal_the_scripts_rows(
    name: str, script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompt files hold the rows that the script writes, and no held-out row is trained on."""
    module = example(name, script, monkeypatch)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "script.py"))
    module.main()
    files = {path.name: path.read_text() for path in sorted(tmp_path.glob("*.jsonl"))}
    assert files == {path.name: path.read_text() for path in sorted((EXAMPLES / name).glob("*.jsonl"))}
    trained = set(files.pop("train.jsonl").splitlines())
    held_out = [line for text in files.values() for line in text.splitlines()]
    assert len(set(held_out)) == len(held_out) == 512 and not trained & set(held_out)


def test_the_vocabulary_takes_the_chats(maker: ModuleType, tmp_path: Path) -> None:
    """The vocabulary takes the chats of the example, and they are continued by tokens."""
    from streamrl.learning.small_model.chats import BEGIN, END, Chats

    chats = list(islice(maker.chats(3), 200))
    vocabulary = Chats(chats, maker.CONTEXT)
    vocabulary.save(vocabulary.policy(0, layers=1), tmp_path)
    tokenizer, tools = load_tokenizer(tmp_path), getattr(maker, "TOOLS", ())
    facts = template_facts(tokenizer, tools)
    assert set(facts.effects.values()) == {Appending.APPENDS} and all("is appended" in one for one in facts.sentences())
    assert tokenizer.eos_token_ids == (vocabulary.ids[END],)
    opening = f"{BEGIN}assistant\n"
    for chat in chats:
        ids, places = vocabulary.demonstration(chat)
        assert tokenizer.decode(token_array(ids), skip_special=False) == chat and len(ids) < maker.CONTEXT
        prompt, *turns = chat.split(opening)
        assert tokenizer.encode_fragment(prompt + opening).tolist() == ids[: places[0]]
        said = [turn.partition(END)[0] for turn in turns]
        sampled = tokenizer.decode(token_array([ids[place] for place in places]), skip_special=False)
        assert sampled == "".join(f"{one}{END}" for one in said)
        for one in said:
            parsed = parse_turn(one, "hermes", tools)
            assert not parsed.problem and bool(parsed.calls) == ("<tool_call>" in one)
    other = "naïve 东京 🙂"
    assert tokenizer.decode(tokenizer.encode_fragment(other)) == other

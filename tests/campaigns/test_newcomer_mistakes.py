"""A few mistakes of each kind of ``python -m campaigns mistakes``, and whether the campaign sees bad answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.newcomer_mistakes.campaign import mistakes
from campaigns.newcomer_mistakes.mistake import Mistake, nothing, problem_of, removed, wrong_in

NAMES = (
    "recipes: a misspelt key",
    "recipes: backslashes of Windows",
    "recipes: cores that are not there",
    "command_lines: a misspelt command",
    "command_lines: an override without its section",
    "command_lines: export of a folder",
    "data_files: a key twice in a row",
    "data_files: a pointer of git-lfs",
    "data_files: rows without the column of the reward",
    "models: a config that is cut",
    "models: a GGUF file",
    "user_code: a text for a reward",
    "user_code: a game without a method",
    "surroundings: keys that are not there",
    "surroundings: a checkpoint that is not there",
)
MISTAKES = dict(mistakes())


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    assert problem_of(MISTAKES[name], tmp_path / "folder") == ""


def test_there_are_a_hundred_mistakes() -> None:
    assert len(MISTAKES) >= 100


def test_other_words_of_a_refusal_are_seen(tmp_path: Path) -> None:
    mistake = Mistake(removed("train.jsonl"), ("prompts.train:", "buy a file"))
    assert problem_of(mistake, tmp_path / "folder").startswith("no 'buy a file'")


def test_what_is_no_mistake_is_seen(tmp_path: Path) -> None:
    assert problem_of(Mistake(nothing, (), "explain rollout"), tmp_path / "folder").startswith("exit code 0")


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("error: 1 problem; nothing was started\n  a.toml:1: key: correct it\n", ""),
        ("error: a is not there: name another\n", ""),
        ("usage: streamrl train [-h] RECIPE\nstreamrl train: error: key: correct it\n", ""),
        ("error: 2 problems; nothing was started\n  key: correct it\n  key: remove it\n", "not one sentence"),
        ("a warning\nerror: key: correct it\n", "not one sentence"),
        ("Traceback (most recent call last):\nValueError: key\n", "exit code"),
        ("", "not one sentence"),
    ],
)
def test_more_than_a_sentence_is_seen(said: str, wrong: str) -> None:
    assert wrong_in(2, said, ()).startswith(wrong) and bool(wrong_in(2, said, ())) == bool(wrong)

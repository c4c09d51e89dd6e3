"""Exact match, patterns, format, lengths: values by hand, and what a user reads when the options are wrong."""

from __future__ import annotations

import pytest

from streamrl.base.errors import RecipeError
from streamrl.rewards.builtin.catalog import BUILTIN


@pytest.mark.parametrize(
    ("options", "completion", "answer", "value"),
    [
        ({}, " 42\n", "42", 1),
        ({}, "42.", "42", 0),
        ({}, "a  b", "a b", 1),
        ({"ignore_spaces": False}, "a  b", "a b", 0),
        ({}, "Paris", "paris", 0),
        ({"ignore_case": True}, "PARIS", "paris", 1),
        ({}, "7", 7, 1),  # a number in the dataset
        ({}, "b", ["a", "b"], 1),
        ({}, "c", ["a", "b"], 0),
        ({"extract": r"#### (\S+)"}, "#### 1\nno:\n#### 2", "2", 1),  # the last one counts
        ({"extract": r"#### (\S+)"}, "#### 2\nno:\n#### 1", "2", 0),
        ({"extract": r"\d+"}, "it is 12 or 34", "34", 1),  # no group: the whole match
        ({"extract": r"#### (\S+)"}, "2", "2", 0),  # no match
    ],
)
def test_exact(make, score, options, completion, answer, value) -> None:
    assert score(make("exact", **options), completion, answer=answer) == value


def test_another_column(make, score) -> None:
    reward = make("exact", column="solution")
    assert reward.signature.columns == ("solution",)
    assert score(reward, "x", solution="x") == 1


@pytest.mark.parametrize(
    ("options", "completion", "value"),
    [
        ({"pattern": r"answer.*42"}, "the answer\nis 42.", 1),
        ({"pattern": r"answer.*42", "whole": True}, "the answer\nis 42.", 0),
        ({"pattern": r"answer.*42", "whole": True}, "answer 42", 1),
        ({"pattern": "sorry", "absent": True}, "fine", 1),
        ({"pattern": "sorry", "absent": True}, "so sorry", 0),
    ],
)
def test_regex(make, score, options, completion, value) -> None:
    assert score(make("regex", **options), completion) == value


def test_the_pattern_of_each_prompt(make, score) -> None:
    reward = make("regex", column="wanted")
    assert reward.signature.columns == ("wanted",)
    assert score(reward, "cat", wanted="c.t") == 1
    assert score(reward, "dog", wanted="c.t") == 0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>a\nb</think>\n\n<answer></answer>\n", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("well <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>.", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b", 0),
        ("", 0),
    ],
)
def test_format(make, score, completion, value) -> None:
    assert score(make("format", tags=["think", "answer"]), completion) == value


def test_format_that_the_prompt_opened(make, score) -> None:
    reward = make("format", tags=["think", "answer"], opened=True)
    assert score(reward, "a</think> <answer>b</answer>") == 1
    assert score(reward, "<think>a</think> <answer>b</answer>") == 0
    assert score(reward, "a</think> b <answer>b</answer>") == 0


def test_length_is_equation_13_of_dapo(make, score) -> None:
    """With the paper's own numbers: 20480 at most, 4096 of them the buffer."""
    reward = make("length", longest=16384, margin=4096)
    values = {16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 20481: -1.0, 1: 0.0}
    assert {tokens: score(reward, "", token_ids=[0] * tokens) for tokens in values} == values
    assert reward.signature.provided == ("token_ids",)


@pytest.mark.parametrize(("tokens", "value"), [(9, -0.25), (5, -1.0), (10, 0.0), (20, 0.0), (22, -0.5), (90, -1.0)])
def test_length_in_tokens(make, score, tokens, value) -> None:
    reward = make("length", shortest=10, longest=20, margin=4)
    assert score(reward, "", token_ids=[0] * tokens) == value


def test_length_of_text(make, score) -> None:
    assert score(make("length", longest=3, margin=2, unit="words"), "one two three  four") == -0.5
    assert score(make("length", shortest=8, margin=4, unit="characters"), "abcdef") == -0.5
    assert str(score(make("length", longest=3), "", token_ids=[])) == "0.0"  # no minus zero


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("exact", {"colum": "x"}, 'option "colum" is unknown; did you mean "column"? Its options: column, extract'),
        ("exact", {"ignore_case": 1}, 'option "ignore_case" = 1 is not allowed: must be true or false'),
        ("exact", {"column": "ground truth"}, "cannot be passed by name: rename the column of the dataset"),
        ("exact", {"extract": "(a"}, "is no regular expression (missing ), unterminated subpattern"),
        ("regex", {}, 'option "pattern": give either it or "column"'),
        ("regex", {"pattern": "a", "column": "b"}, 'give either it or "column"'),
        ("format", {}, 'has no option "tags": set it in [rewards.options]'),
        ("format", {"tags": ["<think>"]}, "without < and >"),
        ("length", {}, "set one"),
        ("length", {"shortest": 5, "longest": 4}, "correct one"),
        ("length", {"longest": 4, "unit": "lines"}, 'must be one of "tokens", "words", "characters"'),
        ("length", {"longest": 4, "margin": 0}, "must be an integer >"),
        ("reasoning_gym", {"task": "chain_sums"}, 'no task of reasoning-gym (did you mean "chain_sum"?)'),
        ("judge", {"endpoint": "here", "model": "m"}, "is no address: write it as http://host:8000/v1"),
        ("judge", {"model": "m"}, "has no endpoint"),
        ("judge", {"endpoint": "http://h/v1", "model": "m", "question": "Rate it"}, "has no {completion}"),
        ("judge", {"endpoint": "http://h/v1", "model": "m", "question": "{completion} {a.b}"}, "names {a.b}"),
        ("judge", {"endpoint": "http://h/v1", "model": "m", "api_key_variable": "NO_SUCH"}, "NO_SUCH is not set"),
        ("judge", {"endpoint": "http://h/v1", "model": "m", "highest": 0}, "is not above"),
        ("reward_model", {"path": "/nowhere"}, "is no Hugging Face directory"),
    ],
)
def test_wrong_options_are_named_with_the_remedy(make, name, options, problem) -> None:
    with pytest.raises(RecipeError) as caught:
        make(name, **options)
    assert problem in str(caught.value)
    assert f'reward "{name}"' in str(caught.value)


def test_every_wrong_option_is_named_at_once(make) -> None:
    with pytest.raises(RecipeError) as caught:
        make("judge", model=3, maximum=3, retries=-1)
    assert len(caught.value.problems) == 3


def test_a_missing_library_is_named_with_its_extra(make, monkeypatch) -> None:
    import streamrl.rewards.declared as declared

    monkeypatch.setattr(declared, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"needs math_verify: pip install 'streamrl\[rewards\]'"):
        make("math")
    assert make("exact").signature.name == "exact"


def test_names_are_what_the_recipe_says() -> None:
    listed = {"environment", "exact", "regex", "format", "length", "math", "none", "reasoning_gym", "reward_model"}
    assert set(BUILTIN) == listed | {"code", "judge"}

"""Facts of published templates, and text that spells special tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builders.recipe import small_recipe

from streamrl.prepare.summary import arithmetic_lines
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.template_facts import Appending, template_facts, without_special_tokens
from streamrl.recipe.environment import Environment
from tests.pretrained.turns.families import FAMILIES, TOOL

A, T, E, R = Appending.APPENDS, Appending.REWRITES_TURN, Appending.REWRITES_EARLIER, Appending.REFUSED
FACTS = {  # user, tool, user after reasoning, tool after reasoning; calls of two that are written
    "qwen2.5": (A, A, None, None, 2),
    "qwen3": (T, T, T, A, 2),
    "qwen3-2507": (A, A, None, None, 2),
    "qwen3.5": (T, A, T, A, 2),
    "llama3.1": (A, A, None, None, 0),
    "gemma3": (A, R, None, None, 0),
    "glm-4.5": (A, A, T, A, 2),
    "gpt-oss": (T, A, T, A, 1),
    "lfm2": (A, A, T, A, 2),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_template_is_known_before_the_first_chat(name: str, of_family: Callable[[str], Tokenizer]) -> None:
    facts = template_facts(of_family(name), [TOOL], FAMILIES[name].arguments)
    kinds = ("user", "tool", "user after reasoning", "tool after reasoning")
    assert (*map(facts.effects.get, kinds), facts.calls) == FACTS[name]


SENTENCES = {
    "qwen2.5": "a message of the user is appended; a message of a tool is appended",
    "gemma3": "a message of the user is appended; a message of a tool is refused; the model cannot call tools",
    "gpt-oss": "today's date stands in the prompt, which another day changes",
    "qwen3": "a message of a tool rewrites the turn before it; a message of a tool after reasoning is appended",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_dry_run_says_what_a_template_does(name: str, of_family: Callable[[str], Tokenizer]) -> None:
    environment = Environment(agent=("python",), history="template")
    lines = arithmetic_lines(small_recipe(of_family(name).directory, environment=environment))
    [line] = [line for line in lines if "chat template:" in line]
    history = '. history = "template": a turn before which text is rewritten begins a sequence'
    assert f"{SENTENCES[name]}{history if name in ('gpt-oss', 'qwen3') else ''}" in line
    assert (history in line) is (name in ("gpt-oss", "qwen3"))


@pytest.mark.parametrize("name", FAMILIES)
def test_text_of_a_tool_closes_no_turn(name: str, of_family: Callable[[str], Tokenizer]) -> None:
    tokenizer = of_family(name)
    spelled = [tokenizer.token_text(one) for one in sorted(tokenizer.special_token_ids)]
    text = f"a {spelled[0]} b {''.join(spelled)} c {spelled[-1]}{spelled[-1]}"
    assert {*tokenizer.encode_fragment(text)} & tokenizer.special_token_ids
    safe, broken = without_special_tokens(tokenizer, text)
    assert not {*tokenizer.encode_fragment(safe)} & tokenizer.special_token_ids
    assert broken == len(spelled) + 3
    assert safe.replace("\N{ZERO WIDTH JOINER}", "") == text
    assert without_special_tokens(tokenizer, "a < b | c") == ("a < b | c", 0)

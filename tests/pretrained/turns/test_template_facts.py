"""Facts of published templates, and text that spells special tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.recipe import small_recipe

from streamrl.base.errors import RecipeError
from streamrl.prepare.summary import arithmetic_lines
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.pretrained.turns.template_facts import (
    Appending,
    format_of_template,
    template_facts,
    without_special_tokens,
)
from streamrl.recipe.environment import Environment
from streamrl.run.environments.chat_tokens import ChatModel
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


FUNCTION = "{{ call.function.name }}"
ARGUMENTS = "{{ call.function.arguments | tojson }}"
WRITTEN = {  # as a template writes a call: format that reads it
    f'<tool_call>{{"name": "{FUNCTION}", "arguments": {ARGUMENTS}}}</tool_call>': "hermes",
    f"<tool_call><function={FUNCTION}><parameter=x>{{{{ call.function.arguments.x }}}}</parameter></function>"
    "</tool_call>": "qwen_xml",
    f'{{"name": "{FUNCTION}", "parameters": {ARGUMENTS}}}': "llama_json",
    '[TOOL_CALLS][{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}]': "mistral",
    f"[TOOL_CALLS]{FUNCTION}[CALL_ID]{{{{ call.id }}}}[ARGS]{ARGUMENTS}": "mistral",
    f'<tool_call>{{"name": "{FUNCTION}", "arguments": {{{{ "{{}}" + call.function.arguments }}}}}}</tool_call>': "",
    f"<tool_call>{FUNCTION}{ARGUMENTS}</tool_call>": "",
    f'<tool_call>{{"name": "{FUNCTION}", "arguments": {{{{ call.function.arguments }}}}}}</tool_call>': "",
    "{# <tool_call> #}": "",
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_format_reads_the_call_that_the_template_writes(
    written: str, of_family: Callable[[str], Tokenizer], tmp_path: Path
) -> None:
    """A mark of a format in the template, such as <tool_call>, does not make it the format of the model."""
    shutil.copytree(of_family("qwen2.5").directory, tmp_path, dirs_exist_ok=True)
    turn = f"{{% for call in message.tool_calls or [] %}}{written}{{% endfor %}}"
    (tmp_path / "chat_template.jinja").write_text(
        f"{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n{{{{ message.content }}}}{turn}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = ChatModel(load_tokenizer(tmp_path))
    if WRITTEN[written]:
        assert model.call_reader(()) == WRITTEN[written]
    else:
        with pytest.raises(RecipeError, match=r"it writes none" if "#" in written else r"writes it \(<tool_call>.*qxv"):
            model.call_reader(())


def test_a_model_without_a_template_has_no_format(of_family: Callable[[str], Tokenizer], tmp_path: Path) -> None:
    shutil.copytree(of_family("qwen2.5").directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RecipeError, match=r"environment\.tool_format: model directory .* has no chat template"):
        ChatModel(load_tokenizer(tmp_path)).call_reader(())


FORMATS = {"qwen3": "hermes", "qwen3.6": "qwen_xml", "llama3.1": "llama_json", "nemotron-3": "qwen_xml", "glm-4.5": ""}


@pytest.mark.parametrize("name", FORMATS)
def test_families_have_the_formats_of_their_calls(name: str, of_family: Callable[[str], Tokenizer]) -> None:
    assert format_of_template(of_family(name))[0] == FORMATS[name]


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

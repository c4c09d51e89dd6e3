"""Tool parsers of vLLM, as strict as those of the tree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builders.recipe import small_recipe

from streamrl.base.errors import RecipeError
from streamrl.prepare.recipe_probe import look_at_environments
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.tool_calls import parse_turn
from streamrl.recipe.environment import Environment
from streamrl.run.environments.chat_tokens import ChatModel
from tests.pretrained.turns.test_tool_calls import ADD, TOOLS, assert_no_prefix_calls

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
VALUES = "<parameter=a>\n12\n</parameter>\n<parameter=b>\n34\n</parameter>"
XML = f"<tool_call>\n<function=add>\n{VALUES}\n</function>\n</tool_call>"
BAD = {
    CALL.replace("12", "NaN"): "NaN is no JSON",
    CALL.replace("add", "sub"): "there is no tool 'sub': call one of add, say",
    f"{CALL}<tool_call>{{broken}}</tool_call>": "not every <tool_call> begins a call",
}
CASES: dict[str, tuple[str, str, dict[str, str]]] = {  # family; a good turn; bad ones
    "hermes": ("qwen2.5", f"So. {CALL}\n{CALL}", BAD),
    "qwen3_xml": ("qwen3.5", f"So.\n{XML}\n{XML}", {XML.rpartition("\n</function>")[0]: "must end with </tool_call>"}),
    "pythonic": ("llama3.1", "[add(a=12, b=34)]", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_prefix_of_a_good_call_and_no_bad_one_calls(name: str, of_family: Callable[[str], Tokenizer]) -> None:
    family, good, bad = CASES[name]
    read = ChatModel(of_family(family), Environment(tool_format=f"vllm:{name}")).call_reader(TOOLS)
    assert_no_prefix_calls(read, good, [ADD] * good.count("12"))
    for text, problem in (bad | dict.fromkeys(("", "It is 46.", '{"answer": 46}', "{", "]"), "")).items():
        turn = parse_turn(text, read, TOOLS)
        assert (turn.text, turn.calls) == (text.strip(), ()) and problem in turn.problem
        assert bool(turn.problem) is bool(problem)


def test_a_parser_is_tried_before_the_run(of_family: Callable[[str], Tokenizer]) -> None:
    model, environment = of_family("qwen2.5"), Environment(agent=("python",), tool_format="vllm:herms")
    [problem], *_ = look_at_environments(small_recipe(environment=environment), model.directory, 120.0)
    assert problem.startswith(
        'environment.tool_format: vLLM has no tool parser "herms": write vllm: and one of apertus,'
    )
    with pytest.raises(RecipeError, match=r"does not fit the model .*python_tag"):
        ChatModel(model, Environment(tool_format="vllm:llama3_json")).call_reader(TOOLS)

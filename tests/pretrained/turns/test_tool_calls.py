"""Calls of tools in sampled text: good ones, every prefix of them, and bad ones."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.pretrained.turns.tool_calls import CALL_FORMATS, CallReader, ToolCall, parse_turn
from streamrl.recipe.environment import TOOL_FORMATS

NAMES = {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "text": {"type": "string"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": NAMES}}}
    for name in ("add", "say")
]
ODD = "</tool_call> } [1] é"
ADD, SAY = ToolCall("add", {"a": 12, "b": 34}), ToolCall("say", {"text": ODD})
ARGUMENTS, TEXT = '{"a": 12, "b": 34}', f'{{"text": "{ODD}"}}'
GOOD = [
    ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>', [ADD]),
    (
        "hermes",
        f"""So.
<tool_call>{{"name": "say", "arguments": {TEXT}}}</tool_call>
<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call>""",
        [SAY, ADD],
    ),
    (
        "qwen_xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n12</parameter><parameter=b>34\n</parameter>\n</function></tool_call>",
        [ADD],
    ),
    (
        "qwen_xml",
        "<tool_call>\n<function=say>\n<parameter=text>\n7\nlines\n</parameter>\n</function>\n</tool_call>",
        [ToolCall("say", {"text": "7\nlines"})],
    ),
    ("llama_json", f'{{"name": "add", "parameters": {ARGUMENTS}}}', [ADD]),
    ("llama_json", f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}', [ADD]),
    (
        "llama_json",
        f'{{"name": "add", "parameters": {ARGUMENTS}}}; {{"name": "say", "parameters": {TEXT}}}',
        [ADD, SAY],
    ),
    ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}]', [ADD]),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{ARGUMENTS}", [ADD]),
    ("mistral", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]say[ARGS]{TEXT}", [ADD, SAY]),
]


def test_a_recipe_may_name_every_format_that_is_read() -> None:
    assert {*CALL_FORMATS} == {*TOOL_FORMATS}


@pytest.mark.parametrize(("call_format", "text", "calls"), GOOD)
def test_a_call_is_read_and_its_prefixes_call_nothing(call_format: str, text: str, calls: list[ToolCall]) -> None:
    """A good call is read, and no prefix of it calls anything else."""
    assert_no_prefix_calls(call_format, text, calls)


def assert_no_prefix_calls(call_format: str | CallReader, text: str, calls: list[ToolCall]) -> None:
    turn = parse_turn(text, call_format, TOOLS)
    assert (list(turn.calls), turn.problem, turn.reasoning) == (calls, "", "")
    thought = parse_turn(f"<think>\nnot {text}\n</think>\n\n{text}", call_format, TOOLS)
    assert (thought.calls, thought.text) == (turn.calls, turn.text)
    for length in range(len(text)):
        begun = parse_turn(text[:length], call_format, TOOLS)
        assert list(begun.calls) in ([], calls[:1] if len(calls) > 1 else []), text[:length]
        assert not parse_turn(text[:length], call_format, TOOLS, finished=False).calls
    assert not parse_turn(text, call_format, TOOLS, finished=False).calls
    assert not parse_turn(text, call_format, TOOLS, in_reasoning=True).calls, "it is still thinking"


HERMES = "<tool_call>{}</tool_call>"
BAD = [
    ("hermes", HERMES.format('{"name": "add", "arguments": {"a": NaN}}'), "NaN is no JSON"),
    ("hermes", HERMES.format('{"name": "add", "arguments": "{}"}'), "must be a JSON object"),
    ("hermes", HERMES.format('{"name": "sub", "arguments": {}}'), "there is no tool 'sub': call one of add, say"),
    ("hermes", HERMES.format('{"name": "add", "arguments": {"a": 1, "a": 2}}'), "stands twice"),
    ("hermes", HERMES.format('{"name": "add"}') + HERMES.format('{"name": "add", "argum'), "not JSON"),
    ("hermes", HERMES.format("[]"), "must be a JSON object with name and arguments"),
    ("hermes", HERMES.format('{"name": "add", "arguments": ' + "[" * 99_999), "recursion"),
    ("qwen_xml", "<tool_call><function=add><parameter=a>1</function></tool_call>", "must stand in <parameter"),
    ("qwen_xml", "<function=add></function></tool_call>", "must stand between"),
    (
        "hermes",
        HERMES.format('{"name": "add", "parameters": {"a": 1}}'),
        "name and arguments alone: Object contains unknown field parameters",
    ),
    ("hermes", HERMES.format('{"name": "add", "arguments": {}, "args": {"a": 1}}'), "unknown field args"),
    ("llama_json", '{"name": "add", "input": {"a": 1}}', "unknown field input"),
    ("llama_json", '{"name": "add", "parameters": {"a": 1}, "arguments": {}}', "unknown field parameters"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "parameters": {"a": 1}}]', "unknown field parameters"),
    ("llama_json", '{"name": "add", "parameters": {"a": 1}} and more', "may follow a call"),
    ("llama_json", '{"name": "add", "parameters": {"a": 1', "not JSON"),
    ("mistral", "[TOOL_CALLS]add[ARGS]12", "the name of a tool and its arguments"),
    ("mistral", "[TOOL_CALLS][]", "one JSON list of calls"),
]


@pytest.mark.parametrize(("call_format", "text", "problem"), BAD)
def test_a_bad_call_runs_nothing_and_tells_the_model_why(call_format: str, text: str, problem: str) -> None:
    turn = parse_turn(text, call_format, TOOLS)
    assert not turn.calls
    assert problem in turn.problem


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        ("hermes", HERMES.format('{"id": 1, "type": "function", "name": "add", "arguments": {"a": 1}}')),
        ("llama_json", '{"type": "function", "name": "add", "arguments": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "call00000"}]'),
    ],
)
def test_a_call_may_have_an_id_and_a_type(call_format: str, text: str) -> None:
    assert parse_turn(text, call_format, TOOLS).calls == (ToolCall("add", {"a": 1}),)


TEXT_OR_NONE = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
VALUES: list[tuple[Any, str, Any]] = [
    (TEXT_OR_NONE, "2024", "2024"),
    (TEXT_OR_NONE, "true", "true"),
    (TEXT_OR_NONE, "1.50", "1.50"),
    (TEXT_OR_NONE, "null", None),
    ({"type": "string"}, "null", "null"),
    ({"type": ["string", "null"]}, "2024", "2024"),
    ({"type": ["integer", "null"]}, "null", None),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "2024", "2024"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"$ref": "#/$defs/Word"}, "1", "1"),
    ({"$ref": "#/$defs/Size"}, "1", 1),
    ({"enum": ["a", None]}, "null", None),
    ({"$ref": "#/$defs/Missing"}, "1", "1"),
    ({"description": "Anything."}, "1", "1"),
    (True, "1", "1"),
    ({"type": "boolean"}, "True", True),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
    ({"type": "array"}, '["a"]', ["a"]),
    ({"type": "integer"}, "many", "many"),
]
KINDS = {"Word": {"type": "string"}, "Size": {"type": "integer"}}


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_the_schema_says_whether_a_value_is_a_text(schema: Any, text: str, value: Any) -> None:
    """In a format whose values have no quotes."""
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": KINDS}
    call = f"<tool_call><function=find><parameter=x>\n{text}\n</parameter></function></tool_call>"
    turn = parse_turn(call, "qwen_xml", [{"function": {"name": "find", "parameters": parameters}}])
    assert turn.calls == (ToolCall("find", {"x": value}),)


@pytest.mark.parametrize("call_format", CALL_FORMATS)
@pytest.mark.parametrize(
    "text", ["", "It is 46.", '{"answer": 46}', "a < b > c", "{", "]", '{"name": "Ann", "age": 3}']
)
def test_an_answer_is_no_call(call_format: str, text: str) -> None:
    turn = parse_turn(text, call_format, TOOLS)
    assert (turn.text, turn.calls, turn.problem) == (text, (), "")

"""Parser of the tool calls in the text of a sampled turn, for the four formats that most models write. Environment
workers call it. Strict: a truncated turn, or a turn with any invalid call, has no calls, but a sentence for the model
about the problem."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct, ValidationError, convert

from streamrl.base.types import JsonMapping, JsonObject

LONGEST_CALL = 1 << 20
"""Limit of the characters of a call."""
_THINK = "<think>"
_THINK_END = "</think>"


class ToolCall(Struct, frozen=True):
    """A call as the model wrote it. ``arguments``: arguments, not checked against the schema of the tool."""

    name: str
    arguments: JsonObject


class ParsedTurn(Struct, frozen=True):
    """Parts of a turn. ``text``: text outside of reasoning and calls; ``problem``: sentence for the model about invalid
    calls, where ``calls`` is empty; ``stop``: text of the caller that ended the turn, empty where none did."""

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    stop: str = ""


class BadCallError(ValueError):
    """A call is invalid; the message is for the model."""


TextAndCalls = tuple[str, list[ToolCall]]
"""Text outside of the calls, and the calls."""
Functions = Mapping[str, JsonMapping]
"""Functions of the JSON schemas of the tools, by name."""
Schemas = Sequence[JsonMapping]
CallReader = Callable[[str, Functions], TextAndCalls]
"""Reads the text of a turn, without its reasoning. Raises ``BadCallError``."""


def parse_turn(
    text: str, call_format: str | CallReader, tools: Schemas, *, finished: bool = True, in_reasoning: bool = False
) -> ParsedTurn:
    """Return the parts of a turn. Raises ``KeyError`` for an unknown format.

    ``text``: text of the turn, with special tokens, without the end token;
    ``call_format``: name in ``CALL_FORMATS``, or a reader of calls;
    ``tools``: JSON schemas of the tools;
    ``finished``: whether the model ended the turn (False: length or abort, and the turn has no calls);
    ``in_reasoning``: whether the prompt has opened the reasoning."""
    reasoning, content = split_reasoning(text, in_reasoning=in_reasoning)
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    try:
        read = CALL_FORMATS[call_format] if isinstance(call_format, str) else call_format
        text_outside, calls = read(content, functions)
        if not calls:
            return ParsedTurn(content.strip(), reasoning)
        if not finished:
            raise BadCallError("the turn was cut off before its end, so that its calls were not run")
        for call in calls:
            if call.name not in functions:
                raise BadCallError(f"there is no tool {call.name!r}: call one of {', '.join(functions) or 'none'}")
    except BadCallError as error:
        return ParsedTurn(content.strip(), reasoning, problem=str(error))
    return ParsedTurn(text_outside.strip(), reasoning, tuple(calls))


def split_reasoning(text: str, *, in_reasoning: bool = False) -> tuple[str, str]:
    """Return the reasoning that ``text`` begins with (empty: there is none), and the text after it. ``in_reasoning``:
    whether the prompt has opened the reasoning."""
    if not (in_reasoning or text.lstrip().startswith(_THINK)):
        return "", text
    reasoning, _, content = text.lstrip().removeprefix(_THINK).partition(_THINK_END)
    return reasoning.strip("\n"), content


def _hermes(content: str, functions: Functions) -> TextAndCalls:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of times (Hermes, Qwen)."""
    text_outside = ""
    calls = []
    remaining = content
    while "<tool_call>" in remaining:
        before, __, remaining = remaining.partition("<tool_call>")
        text_outside += before
        body = remaining.lstrip()
        value, length = _first_value(body)
        after = body[length:].lstrip()
        if not after.startswith("</tool_call>"):
            raise BadCallError("<tool_call> must hold one JSON object, and end with </tool_call>")
        calls.append(_call_of(value))
        remaining = after.removeprefix("</tool_call>")
    if "</tool_call>" in remaining:
        raise BadCallError("there is a </tool_call> without its <tool_call>")
    return text_outside + remaining, calls


_KINDS_OF_VALUES = {str: "string", type(None): "null"}
_OF_PYTHON = {"True": True, "False": False, "None": None}
"""Values as Python writes them: templates write arguments so, and models learn it from them."""
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _qwen_xml(content: str, functions: Functions) -> TextAndCalls:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`` (Qwen3-Coder, Qwen3.5).
    A value is a text where the tool's schema allows a text (``null`` is none where it allows that, too), else JSON."""
    text_outside = ""
    calls = []
    remaining = content
    while "<tool_call>" in remaining:
        before, __, remaining = remaining.partition("<tool_call>")
        text_outside += before
        match = _FUNCTION.match(remaining)
        if match is None:
            raise BadCallError("<tool_call> must hold <function=NAME> ... </function>, and end with </tool_call>")
        name = match[1].strip()
        body = match[2]
        schema = functions.get(name, {}).get("parameters", {})
        arguments = {}
        while body.strip():
            parameter = _PARAMETER.match(body)
            if parameter is None:
                raise BadCallError(f"the parameters of {name} must stand in <parameter=NAME> ... </parameter>")
            key = parameter[1].strip()
            body = body[parameter.end() :]
            if key in arguments:
                raise BadCallError(f"the parameter {key} of {name} is given twice")
            arguments[key] = _typed(parameter[2], schema.get("properties", {}).get(key), schema.get("$defs", {}))
        calls.append(ToolCall(name, arguments))
        remaining = remaining[match.end() :]
    if "</tool_call>" in remaining or "<function=" in remaining:
        raise BadCallError("a call must stand between <tool_call> and </tool_call>")
    return text_outside + remaining, calls


def _typed(text: str, schema: Any, definitions: JsonMapping) -> Any:
    kinds = _kinds(schema, definitions)
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    try:
        return _loads(text)
    except ValueError:
        return _OF_PYTHON.get(text, text)  # the tool's own check refuses it


def _kinds(schema: Any, definitions: JsonMapping) -> list[str]:
    """Return the JSON types of the values that a schema allows; ``string`` where it does not say. ``definitions``:
    schemas to which it may refer."""
    if not isinstance(schema, Mapping):
        return ["string"]
    if "$ref" in schema:
        return _kinds(definitions.get(schema["$ref"].rpartition("/")[2]), definitions)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return [kind for option in options for kind in _kinds(option, definitions)]
    if "enum" in schema:
        return [_KINDS_OF_VALUES.get(type(value), "") for value in schema["enum"]]
    kinds = schema.get("type", "string")
    return [kinds] if isinstance(kinds, str) else kinds


def _llama_json(content: str, functions: Functions) -> TextAndCalls:
    """``{"name": ..., "parameters": {...}}`` and nothing else, several with ``;`` between them (Llama 3)."""
    remaining = content.strip().removeprefix("<|python_tag|>").strip()
    if not remaining.startswith("{"):
        return content, []
    calls: list[ToolCall] = []
    while True:
        try:
            value, length = _first_value(remaining)
        except BadCallError:
            if calls or re.match(r'\{\s*"name"', remaining):
                raise
            return content, []
        is_named = isinstance(value, dict) and "name" in value
        if not is_named or not ({"parameters", "arguments"} & value.keys() or value["name"] in list(functions)):
            if calls:
                raise BadCallError("another call must follow the ;")
            return content, []  # the turn is an answer in JSON
        if "arguments" not in value:
            value["arguments"] = value.pop("parameters", {})
        calls.append(_call_of(value))
        after = remaining[length:].lstrip()
        if not after:
            return "", calls
        if not after.startswith(";"):
            raise BadCallError("only ; and another call may follow a call")
        remaining = after.removeprefix(";").lstrip()


_NAMED = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(content: str, _: Functions) -> TextAndCalls:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]NAME[ARGS]{...}`` once or more."""
    text_outside, mark, written_calls = content.partition("[TOOL_CALLS]")
    if not mark:
        return content, []
    if written_calls.lstrip().startswith("["):
        values = _loads(written_calls)
        if not values:
            raise BadCallError("[TOOL_CALLS] must be followed by one JSON list of calls, and nothing else")
        return text_outside, list(map(_call_of, values))
    calls = []
    for part in written_calls.split("[TOOL_CALLS]"):
        match = _NAMED.match(part)
        if match is None:
            raise BadCallError("[TOOL_CALLS] must be followed by the name of a tool and its arguments as a JSON object")
        calls.append(read_call(match[1], part[match.end() :]))
    return text_outside, calls


def read_call(name: str, arguments: str) -> ToolCall:
    """Return the call of tool ``name`` with ``arguments`` as JSON text. Raises ``BadCallError``."""
    return _call_of({"name": name, "arguments": _loads(arguments)})


class _WrittenCall(Struct, forbid_unknown_fields=True):
    name: str
    arguments: JsonObject = {}
    id: Any = None
    type: Any = None


def _call_of(value: Any) -> ToolCall:
    try:
        call = convert(value, _WrittenCall)
    except (ValidationError, RecursionError) as error:
        problem = str(error).replace("`", "")
        raise BadCallError(f"a call must be a JSON object with name and arguments alone: {problem}") from None
    return ToolCall(call.name, call.arguments)


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key stands twice")
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _loads(text: str) -> Any:
    value, length = _first_value(text.strip())
    if text.strip()[length:]:
        raise BadCallError("more text follows the value")
    return value


def _first_value(text: str) -> tuple[Any, int]:
    """The JSON value that ``text`` begins with, and its length."""
    if len(text) > LONGEST_CALL:
        raise BadCallError(f"a call may have {LONGEST_CALL} characters")
    try:
        return _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"the arguments are not JSON ({error})") from None


CALL_FORMATS: dict[str, CallReader] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama_json": _llama_json,
    "mistral": _mistral,
}
"""Readers of calls by the name of their format (``environment.tool_format``)."""

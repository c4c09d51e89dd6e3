"""Calls of tools in the text of a sampled turn, for the four formats that most models write. Strict: a turn that was
cut off, or of which any call cannot be read, has no calls, and a sentence for the model says what was wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

LONGEST_CALL = 1 << 20
"""Characters of the calls of a turn."""
_THINK = "<think>"
_THINK_END = "</think>"


class ToolCall(msgspec.Struct, frozen=True):
    """A call as the model wrote it. ``arguments`` are not compared with the schema of the tool."""

    name: str
    arguments: dict[str, Any]


class ParsedTurn(msgspec.Struct, frozen=True):
    """A turn in its parts. ``problem``: why its calls cannot be read, for the model; then ``calls`` is empty."""

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""


class BadCallError(ValueError):
    """A call that cannot be read; the message goes to the model."""


Found = tuple[str, list[ToolCall]]
Functions = Mapping[str, Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]
CallReader = Callable[[str, Functions], Found]
"""Reads a turn without its reasoning. Raises ``BadCallError``."""


def parse_turn(
    text: str, call_format: str | CallReader, tools: Schemas, *, ended: bool = True, in_reasoning: bool = False
) -> ParsedTurn:
    """Return the parts of a turn. ``text``: with special tokens, without the end token; ``call_format``: a name of
    ``CALL_FORMATS``, or what reads calls; ``tools``: JSON schemas of what may be called; ``ended``: the model ended the
    turn (False: length or abort, and no call counts); ``in_reasoning``: the prompt has opened the reasoning. Raises
    ``KeyError``."""
    reasoning = ""
    content = text
    if in_reasoning or text.lstrip().startswith(_THINK):
        reasoning, _, content = text.lstrip().removeprefix(_THINK).partition(_THINK_END)
        reasoning = reasoning.strip("\n")
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    try:
        read = CALL_FORMATS[call_format] if isinstance(call_format, str) else call_format
        said, calls = read(content, functions)
        if not calls:
            return ParsedTurn(content.strip(), reasoning)
        if not ended:
            raise BadCallError("the turn was cut off before its end, so that its calls were not run")
        for call in calls:
            if call.name not in functions:
                raise BadCallError(f"there is no tool {call.name!r}: call one of {', '.join(functions) or 'none'}")
    except BadCallError as error:
        return ParsedTurn(content.strip(), reasoning, problem=str(error))
    return ParsedTurn(said.strip(), reasoning, tuple(calls))


def _hermes(content: str, functions: Functions) -> Found:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of times (Hermes, Qwen)."""
    said = ""
    calls = []
    rest = content
    while "<tool_call>" in rest:
        before, __, rest = rest.partition("<tool_call>")
        said += before
        body = rest.lstrip()
        value, length = _first_value(body)
        after = body[length:].lstrip()
        if not after.startswith("</tool_call>"):
            raise BadCallError("<tool_call> must hold one JSON object, and end with </tool_call>")
        calls.append(_call_of(value, "arguments"))
        rest = after.removeprefix("</tool_call>")
    if "</tool_call>" in rest:
        raise BadCallError("there is a </tool_call> without its <tool_call>")
    return said + rest, calls


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _qwen_xml(content: str, functions: Functions) -> Found:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`` (Qwen3-Coder, Qwen3.5).
    A value is JSON where the schema of the tool does not want text."""
    said = ""
    calls = []
    rest = content
    while "<tool_call>" in rest:
        before, __, rest = rest.partition("<tool_call>")
        said += before
        match = _FUNCTION.match(rest)
        if match is None:
            raise BadCallError("<tool_call> must hold <function=NAME> ... </function>, and end with </tool_call>")
        name = match[1].strip()
        body = match[2]
        kinds = functions.get(name, {}).get("parameters", {}).get("properties", {})
        arguments: dict[str, Any] = {}
        place = 0
        while place < len(body) and body[place:].strip():
            parameter = _PARAMETER.match(body, place)
            if parameter is None:
                raise BadCallError(f"the parameters of {name} must stand in <parameter=NAME> ... </parameter>")
            key = parameter[1].strip()
            place = parameter.end()
            if key in arguments:
                raise BadCallError(f"the parameter {key} of {name} is given twice")
            arguments[key] = _typed(parameter[2], kinds.get(key, {}))
        calls.append(ToolCall(name, arguments))
        rest = rest[match.end() :]
    if "</tool_call>" in rest or "<function=" in rest:
        raise BadCallError("a call must stand between <tool_call> and </tool_call>")
    return said + rest, calls


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    if not schema or schema.get("type") == "string":
        return text
    try:
        return _loads(text)
    except ValueError:
        return text  # the tool answers with what it wants


def _llama_json(content: str, _: Functions) -> Found:
    """``{"name": ..., "parameters": {...}}`` as the whole turn, several with ``;`` between them (Llama 3)."""
    rest = content.strip().removeprefix("<|python_tag|>").strip()
    if not rest.startswith("{"):
        return content, []
    calls: list[ToolCall] = []
    while rest:
        try:
            value, length = _first_value(rest)
        except BadCallError:
            if calls or re.match(r'\{\s*"name"', rest):
                raise
            return content, []
        if not (isinstance(value, dict) and "name" in value and {"parameters", "arguments"} & value.keys()):
            if calls:
                raise BadCallError("another call must follow the ;")
            return content, []  # an answer that is an object
        calls.append(_call_of(value, "parameters" if "parameters" in value else "arguments"))
        rest = rest[length:].lstrip()
        if rest and not rest.startswith(";"):
            raise BadCallError("only ; and another call may follow a call")
        more = bool(rest)
        rest = rest.removeprefix(";").lstrip()
        if more and not rest:
            raise BadCallError("another call must follow the ;")
    return "", calls


_NAMED = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(content: str, _: Functions) -> Found:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]NAME[ARGS]{...}`` once or more."""
    said, found, rest = content.partition("[TOOL_CALLS]")
    if not found:
        return content, []
    if rest.lstrip().startswith("["):
        value, length = _first_value(rest.lstrip())
        if rest.lstrip()[length:].strip() or not value:
            raise BadCallError("[TOOL_CALLS] must be followed by one JSON list of calls, and nothing else")
        return said, [_call_of(one, "arguments") for one in value]
    calls = []
    for part in rest.split("[TOOL_CALLS]"):
        match = _NAMED.match(part)
        if match is None:
            raise BadCallError("[TOOL_CALLS] must be followed by the name of a tool and its arguments as a JSON object")
        value, length = _first_value(part[match.end() :])
        if part[match.end() + length :].strip():
            raise BadCallError(f"nothing may follow the arguments of {match[1]}")
        calls.append(_call_of({"name": match[1], "arguments": value}, "arguments"))
    return said, calls


def read_call(name: str, arguments: str) -> ToolCall:
    """Return a call whose ``arguments`` are a JSON text. Raises ``BadCallError``."""
    return _call_of({"name": name, "arguments": _loads(arguments)}, "arguments")


def _call_of(value: Any, key: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadCallError(f'a call must be a JSON object with "name" and "{key}"')
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        raise BadCallError(f'"{key}" of {value["name"]} must be a JSON object')
    return ToolCall(value["name"], arguments)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


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


def format_of_template(templates: Mapping[str, str]) -> str:
    """Return the name of the format in which chat templates (jinja sources by name) write calls; empty: not known."""
    text = templates.get("tool_use") or templates.get("default") or ""
    marks = {
        "mistral": "[TOOL_CALLS]",
        "qwen_xml": "<function=",
        "hermes": "<tool_call>",
        "llama_json": '"parameters": ',
    }
    return next((name for name, mark in marks.items() if mark in text), "")


CALL_FORMATS: dict[str, CallReader] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama_json": _llama_json,
    "mistral": _mistral,
}
"""Ways to write calls, by name."""

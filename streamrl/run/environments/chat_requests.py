"""Requests of OpenAI's chat completions and responses and of Anthropic's messages, read as a ``ChatRequest``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from streamrl.base.errors import UNDECODABLE
from streamrl.run.environments.endpoint_session import ApiError, ChatRequest, digest_of, message_digest

Body = dict[str, Any]
Content = str | list[Body] | None
_Positive = Annotated[int, msgspec.Meta(ge=1)] | None

_THE_RUNS = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_sequences", "seed", "logit_bias", "best_of"}
_THE_RUNS |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs", "parallel_tool_calls"}
_THE_RUNS |= {"reasoning", "reasoning_effort", "thinking", "verbosity", "chat_template_kwargs"}
_NEUTRAL = {"model", "stream", "stream_options", "logprobs", "include", "store", "metadata", "user", "service_tier"}
_CHAT = {"messages", "input", "system", "instructions", "tools"}
_REFUSED = ["functions", "function_call", "audio", "previous_response_id", "conversation", "prompt", "background"]
_REFUSED += ["web_search_options", "mcp_servers", "container"]


class _Tool(msgspec.Struct, kw_only=True):
    """A tool, or a call of one, of any API: OpenAI's chat completions have the last fields in ``function``."""

    id: str = ""
    type: Literal["function", "custom"] | None = None
    function: _Tool | None = None
    input_schema: Body | None = None
    name: str = ""
    description: str | None = None
    parameters: Body | None = None
    arguments: str | Body = ""


class _Message(msgspec.Struct, kw_only=True):
    """A message of any API, another item of an input of responses, or a block of a message of Anthropic's."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant", "tool"] = "user"
    content: Content = None
    tool_calls: list[_Tool] | None = None
    tool_call_id: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    call_id: str = ""
    name: str | None = None
    arguments: str = ""
    output: Content = None
    id: str | None = None
    input: Body = {}
    tool_use_id: str = ""
    thinking: str = ""


class _Body(msgspec.Struct, kw_only=True):
    messages: list[_Message] = []
    input: str | list[_Message] = []
    system: Content = None
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | Body | None = None
    max_tokens: _Positive = None
    max_completion_tokens: _Positive = None
    max_output_tokens: _Positive = None
    n: Literal[1] | None = None
    response_format: Body | None = None
    text: Body | None = None
    model: str = ""
    stream: bool | None = None
    stream_options: Body | None = None
    logprobs: bool | None = None
    include: list[str] | None = None


def read_request(path: str, body: bytes) -> ChatRequest:
    """Read the request that was sent to ``path``, one of ``READERS``. Raises ``ApiError``."""
    try:
        given = msgspec.json.decode(body, type=Body)
        return _request(given, msgspec.convert(given, _Body), READERS[path])
    except UNDECODABLE as error:
        raise ApiError(400, f"the request cannot be read: {str(error).replace('`', '')}") from None


def _request(body: Body, given: _Body, read: Callable[[_Body], Iterator[Body]]) -> ChatRequest:
    for name in _REFUSED:
        if body.get(name):
            raise ApiError(400, f"{name} is not taken here: send the whole chat, and tools as functions")
    for form in (given.response_format, (given.text or {}).get("format")):
        if isinstance(form, Mapping) and form.get("type", "text") != "text":
            raise ApiError(400, f"an answer as {form['type']} is not taken: the run samples freely; ask in words")
    if body.get("top_logprobs"):
        raise ApiError(400, "top_logprobs is 0 here: logprobs are known of the sampled tokens, and of no others")
    messages = list(read(given))
    if not any(message["role"] != "system" for message in messages):
        raise ApiError(400, "there is no message: send at least one of the user")
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "the last message is the assistant's: end with one of the user or of a tool")
    choice = given.tool_choice.get("type") if isinstance(given.tool_choice, dict) else given.tool_choice
    others = {name: value for name, value in body.items() if name not in _NEUTRAL and value is not None}
    ignored = [name if name in _THE_RUNS else "other" for name in others if name not in _Body.__struct_fields__]
    ignored += ["tool_choice"] * (choice not in (None, "auto", "none"))
    limits = filter(None, (given.max_tokens, given.max_completion_tokens, given.max_output_tokens))
    tools = [_schema(tool, f"tools[{place}]") for place, tool in enumerate(given.tools or ())]
    chat = [message_digest(message) for message in messages]
    tool_set = digest_of(tools)
    others = {name: value for name, value in others.items() if name not in _CHAT}
    digest = digest_of([(said.hex(), thought) for said, thought in chat], tool_set.hex(), others)
    usage = bool((given.stream_options or {}).get("include_usage"))
    logprobs = bool(given.logprobs) or "message.output_text.logprobs" in (given.include or ())
    wanted = min(limits, default=0), bool(given.stream), choice != "none", usage, logprobs
    return ChatRequest(messages, tools, chat, tool_set, digest, given.model, *wanted, ignored)


def _schema(tool: _Tool, place: str) -> Body:
    """The schema of a tool for chat templates."""
    given = tool.function or tool
    if not given.name:
        raise ApiError(400, f"{place} is no function with a name: the server runs no tools of its own")
    parameters = given.parameters or tool.input_schema or {"type": "object", "properties": {}}
    described = {"name": given.name, "description": given.description or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _text(content: Content, place: str) -> str:
    """The text of a message; each of its parts begins a line. Raises ``ApiError`` for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type", "text")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ApiError(400, f"{place}: a part of type {kind!r} cannot be read: the model takes text alone")
        texts.append(text)
    return "\n".join(texts)


def _call(call_id: str, name: str, arguments: str | Body) -> Body:
    """A call of a tool for chat templates. Arguments that are no JSON object stay as they are written."""
    if isinstance(arguments, str):
        with suppress(*UNDECODABLE):
            arguments = msgspec.json.decode(arguments or "{}", type=Body)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _said(message: _Message, place: str, content: Content) -> Body:
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _text(content, f"{place}.content")}


def _chat(given: _Body) -> Iterator[Body]:
    for place, message in enumerate(given.messages):
        made = _said(message, f"messages[{place}]", message.content)
        if message.role == "tool":
            made["tool_call_id"] = message.tool_call_id
        if message.role == "assistant" and message.tool_calls:
            calls = [(one.id, one.function or one) for one in message.tool_calls]
            made["tool_calls"] = [_call(name, one.name, one.arguments) for name, one in calls]
        if message.role == "assistant" and (thought := message.reasoning_content or message.reasoning):
            made["reasoning_content"] = thought
        yield made


def _responses(given: _Body) -> Iterator[Body]:
    made: list[Body] = [{"role": "system", "content": given.instructions}] if given.instructions else []
    items = [_Message(content=given.input)] if isinstance(given.input, str) else given.input
    for number, item in enumerate(items):
        place = f"input[{number}]"
        if item.type == "message":
            made.append(_said(item, place, item.content))
        elif item.type == "function_call":  # a turn's text and calls are items of their own
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": ""})
            made[-1].setdefault("tool_calls", []).append(_call(item.call_id, item.name or "", item.arguments))
        elif item.type == "function_call_output":
            text = _text(item.output, f"{place}.output")
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.type != "reasoning":  # the model's own is in the tokens of its turn
            raise ApiError(400, f"{place} of type {item.type!r} cannot be read: send messages and function calls")
    yield from made


def _anthropic(given: _Body) -> Iterator[Body]:
    if system := _text(given.system, "system"):
        yield {"role": "system", "content": system}
    for number, message in enumerate(given.messages):
        place = f"messages[{number}]"
        texts = list[Body]()
        more = Body()
        for part in [{"text": message.content}] if isinstance(message.content, str) else message.content or ():
            kind = part.get("type", "text")
            block = msgspec.convert(part, _Message)
            if kind == "tool_result":
                text = _text(block.content, f"{place}.content (tool_result)")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            elif kind == "tool_use":
                more.setdefault("tool_calls", []).append(_call(block.id or "", block.name or "", block.input))
            elif kind in ("thinking", "redacted_thinking"):
                more |= {"reasoning_content": block.thinking} if block.thinking else {}
            else:
                texts.append(part)
        if texts or more or message.role == "assistant":
            yield _said(message, place, texts) | more


COUNTED = "/v1/messages/count_tokens"
READERS = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _anthropic, COUNTED: _anthropic}
"""By the path of an API; each gives messages as chat templates take them."""

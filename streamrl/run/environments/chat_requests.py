"""Read requests of OpenAI's chat completions and responses and of Anthropic's messages as a ``ChatRequest``.

``endpoint_server.py`` calls ``read_request`` for each HTTP request of an agent, in the process of the environment
worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct, convert, json

from streamrl.base.errors import UNDECODABLE
from streamrl.base.types import JsonObject, Texts, TokenDistribution
from streamrl.run.environments.endpoint_session import ApiError, ChatRequest, chat_digests, digest_of

Body = JsonObject
Content = str | list[Body] | None
_Positive = Annotated[int, Meta(ge=1)] | None

# Parameters that the run decides: they are accepted, ignored and counted.
_RUN_DECIDES = {*TokenDistribution.__struct_fields__, "seed", "logit_bias", "best_of"}
_RUN_DECIDES |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "top_logprobs"}
_RUN_DECIDES |= {"reasoning", "reasoning_effort", "thinking", "verbosity", "chat_template_kwargs"}
# Parameters that do not change the answer, so that they are no part of a request's digest.
_NEUTRAL = {"model", "stream", "stream_options", "logprobs", "include", "store", "metadata", "user", "service_tier"}
# Parameters that are in the digests of the chat and of the tools.
_CHAT = {"messages", "input", "system", "instructions", "tools"}
# Parameters that the endpoint cannot honour.
_REFUSED = ["functions", "function_call", "audio", "previous_response_id", "conversation", "prompt", "background"]
_REFUSED += ["web_search_options", "mcp_servers", "container"]
# Beginnings of the types of tools that a vendor's server runs. A harness never runs them itself.
_RUN_BY_SERVERS = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution"),
    *("image_generation", "mcp", "tool_search", "advisor"),
)
_MOST = {"messages": 1 << 15, "input": 1 << 15, "tools": 1 << 12}
"""Largest number of items of a request by the name of the list. Each costs the worker some 20 us at every request."""

log = logging.getLogger(__name__)


class _Tool(Struct, kw_only=True):
    """A tool or a call of a tool, of any API. OpenAI's chat completions have ``name``, ``description``, ``parameters``
    and ``arguments`` in ``function``."""

    id: str = ""
    type: str | None = None
    function: _Tool | None = None
    input_schema: Body | None = None
    name: str = ""
    description: str | None = None
    parameters: Body | None = None
    arguments: str | Body = ""


class _Message(Struct, kw_only=True):
    """A message of any API, another item in the input of OpenAI's responses, or a block in a message of Anthropic's."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant", "tool"] = "user"
    content: Content = None
    tool_calls: list[_Tool] | None = None
    tool_call_id: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    call_id: str = ""
    name: str | None = None
    namespace: str | None = None
    arguments: str = ""
    output: Content = None
    id: str | None = None
    input: Body = {}
    tool_use_id: str = ""
    thinking: str = ""


class _RequestBody(Struct, kw_only=True):
    """The parameters that are read, of all three APIs together."""

    messages: list[_Message] = []
    input: str | list[_Message] = []
    system: Content = None
    instructions: str | None = None
    tools: list[Body] | None = None
    tool_choice: str | Body | None = None
    parallel_tool_calls: bool | None = None
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    max_tokens: _Positive = None
    max_completion_tokens: _Positive = None
    max_output_tokens: _Positive = None
    n: int | None = None
    response_format: Body | None = None
    text: Body | None = None
    model: str = ""
    stream: bool | None = None
    stream_options: Body | None = None
    logprobs: bool | None = None
    include: list[str] | None = None


def read_request(path: str, data: bytes) -> ChatRequest:
    """Read the request that was sent to ``path``, one of ``READERS``. Raises ``ApiError``."""
    try:
        parameters = json.decode(data, type=Body)
        _refuse_many(parameters)
        return _request(parameters, convert(parameters, _RequestBody), READERS[path])
    except UNDECODABLE as error:
        raise ApiError(400, f"the request cannot be read: {str(error).replace('`', '')}") from None


def _request(parameters: Body, body: _RequestBody, read: Callable[[_RequestBody], Iterator[Body]]) -> ChatRequest:
    """Make a ``ChatRequest``. ``parameters``: all parameters of the request; ``body``: parameters that are read."""
    _refuse(parameters, body)
    messages = list(read(body))
    if not any(message["role"] != "system" for message in messages):
        raise ApiError(400, "there is no message: send at least one of the user")
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "the last message is the assistant's: end with one of the user or of a tool")
    tools = _read_tools(body.tools or ())
    choice = _read_choice(body.tool_choice)
    # Parameters that may change the answer: requests are equal where these, their chats and their tools are equal.
    decisive = {name: value for name, value in parameters.items() if name not in _NEUTRAL and value is not None}
    unread = [name for name in decisive if name not in _RequestBody.__struct_fields__]
    ignored = [name if name in _RUN_DECIDES else "other" for name in unread]
    ignored += ["tools"] * len(tools.left_out)
    limits = filter(None, (body.max_tokens, body.max_completion_tokens, body.max_output_tokens))
    chat = chat_digests(messages)
    tool_set = digest_of(tools.schemas)
    digested_chat = [(message.frame.hex(), message.text.hex(), message.reasoning) for message in chat]
    options = {name: value for name, value in decisive.items() if name not in _CHAT}
    return ChatRequest(
        messages=messages,
        tools=tools.schemas,
        chat=chat,
        tool_set=tool_set,
        digest=digest_of(digested_chat, tool_set.hex(), options),
        model=body.model,
        max_tokens=min(limits, default=0),
        stop=_stop_texts(body),
        stream=bool(body.stream),
        calls=choice.get("type") != "none",
        one_call=body.parallel_tool_calls is False or bool(choice.get("disable_parallel_tool_use")),
        groups=tools.groups,
        usage=bool((body.stream_options or {}).get("include_usage")),
        logprobs=bool(body.logprobs) or "message.output_text.logprobs" in (body.include or ()),
        ignored=ignored,
    )


def _refuse_many(parameters: Body) -> None:
    """Raise ``ApiError`` for more messages or tools than are worth the time of a check."""
    for name, limit in _MOST.items():
        value = parameters.get(name)
        if isinstance(value, list) and len(value) > limit:
            raise ApiError(400, f"{name} has {len(value)} items: send at most {limit}")


def _refuse(parameters: Body, body: _RequestBody) -> None:
    """Raise ``ApiError`` for a request that the endpoint cannot honour."""
    for name in _REFUSED:
        if parameters.get(name):
            raise ApiError(400, f"{name} is not taken here: send the whole chat, and tools as functions")
    for form in (body.response_format, (body.text or {}).get("format")):
        if isinstance(form, Mapping) and form.get("type", "text") != "text":
            raise ApiError(400, f"an answer as {form['type']} is not taken: the run samples freely; ask in words")
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}: an answer is one turn; send the request {body.n} times for as many turns")
    if parameters.get("top_logprobs"):
        raise ApiError(400, "top_logprobs is 0 here: logprobs are known of the sampled tokens, and of no others")


class _OfferedTools(NamedTuple):
    """The tools of a request. ``schemas``: schemas of the functions, as chat templates take them; ``groups``: names
    as in ``ChatRequest``; ``left_out``: types of the tools that are no functions, which the model is not shown."""

    schemas: list[Body]
    groups: dict[str, tuple[str, str]]
    left_out: list[str]


def _read_tools(tools: Sequence[Body]) -> _OfferedTools:
    """Read the tools of a request. Raises ``ApiError`` where tools are left out that the client needs: it runs them
    itself, and no function is left."""
    offered = _OfferedTools([], {}, [])
    for place, tool in enumerate(tools):
        if tool.get("type") == "namespace":
            group = str(tool.get("name"))
            for member_place, member in enumerate(convert(tool.get("tools") or [], list[Body])):
                _read_tool(offered, member, f"tools[{place}].tools[{member_place}]", group)
        else:
            _read_tool(offered, tool, f"tools[{place}]", "")
    needed = [kind for kind in offered.left_out if not kind.startswith(_RUN_BY_SERVERS)]
    if needed and not offered.schemas:
        raise ApiError(
            400,
            f"tools of type {', '.join(sorted({*needed}))} have no schema that the model could be shown, and no "
            "function is left: offer them as functions with a name and parameters",
        )
    return offered


def _read_tool(offered: _OfferedTools, body: Body, place: str, group: str) -> None:
    """Add a tool to ``offered``. ``group``: name of its group; empty: it belongs to none."""
    kind = body.get("type") or "function"
    # Anthropic's API has "custom" for a function, and OpenAI's for a tool that takes text in a grammar of its own.
    if kind != "function" and "input_schema" not in body:
        offered.left_out.append(str(kind))
        _warn_of_left_out(str(kind))
        return
    tool = convert(body, _Tool)
    function = tool.function or tool
    if not function.name:
        raise ApiError(400, f"{place} is no function with a name: the server runs no tools of its own")
    name = _grouped_name(group, function.name)
    if group:
        offered.groups[name] = (group, function.name)
    parameters = function.parameters or tool.input_schema or {"type": "object", "properties": {}}
    described = {"name": name, "description": function.description or "", "parameters": parameters}
    offered.schemas.append({"type": "function", "function": described})


def _grouped_name(group: str | None, name: str) -> str:
    """Return the name by which the model knows the tool ``name`` of a group, or of none."""
    return f"{group}__{name}" if group else name


@lru_cache(64)  # one line for each type
def _warn_of_left_out(kind: str) -> None:
    log.warning("agents offer tools of type %.100r, which the model does not hear of: they have no schema", kind)


def _read_choice(choice: str | Body | None) -> Body:
    """Return ``tool_choice`` in the form of Anthropic's API. Raises ``ApiError`` for one that forces a call."""
    if choice is None or isinstance(choice, str):
        choice = {"type": choice or "auto"}
    kind = choice.get("type")
    if kind not in ("auto", "none"):
        raise ApiError(
            400,
            f"tool_choice {kind!r} cannot be kept, because the run samples freely: send auto, and say in a message "
            "which tool is to be called",
        )
    return choice


def _stop_texts(body: _RequestBody) -> Texts:
    """Return the texts that end the answer. Raises ``ApiError``."""
    stop = body.stop_sequences or body.stop or ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in texts:
        raise ApiError(400, "stop has an empty text, at which every answer would end: remove it")
    return texts


def _text(content: Content, place: str) -> str:
    """Return the text of a message, each part on a line. Raises ``ApiError`` for a part that is no text."""
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
    """Return a call of a tool for chat templates. Arguments that are no JSON object stay the text that they are."""
    if isinstance(arguments, str):
        with suppress(*UNDECODABLE):
            arguments = json.decode(arguments or "{}", type=Body)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _role_and_text(message: _Message, place: str, content: Content) -> Body:
    """Return the role and text of a message for chat templates."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _text(content, f"{place}.content")}


def _read_chat(body: _RequestBody) -> Iterator[Body]:
    """Read the messages of chat completions."""
    for place, item in enumerate(body.messages):
        message = _role_and_text(item, f"messages[{place}]", item.content)
        if item.role == "tool":
            message["tool_call_id"] = item.tool_call_id
        if item.role == "assistant" and item.tool_calls:
            message["tool_calls"] = [_chat_call(call) for call in item.tool_calls]
        if item.role == "assistant" and (reasoning := item.reasoning_content or item.reasoning):
            message["reasoning_content"] = reasoning
        yield message


def _chat_call(call: _Tool) -> Body:
    function = call.function or call
    return _call(call.id, function.name, function.arguments)


def _read_responses(body: _RequestBody) -> Iterator[Body]:
    """Read the items of an input of responses. The text and the calls of a turn, which are items of their own there,
    become one message."""
    messages: list[Body] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [_Message(content=body.input)] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        place = f"input[{number}]"
        if item.type == "message":
            messages.append(_role_and_text(item, place, item.content))
        elif item.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(_call(item.call_id, _grouped_name(item.namespace, item.name or ""), item.arguments))
        elif item.type == "function_call_output":
            text = _text(item.output, f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.type != "reasoning":  # reasoning is among the sampled tokens of its turn already
            raise ApiError(400, f"{place} of type {item.type!r} cannot be read: send messages and function calls")
    yield from messages


def _read_anthropic(body: _RequestBody) -> Iterator[Body]:
    """Read the messages of Anthropic's API. Its results of tools, which are blocks in messages of the user there,
    become messages of their own, before the text of their message."""
    if system := _text(body.system, "system"):
        yield {"role": "system", "content": system}
    for number, message in enumerate(body.messages):
        place = f"messages[{number}]"
        blocks = [{"text": message.content}] if isinstance(message.content, str) else message.content or ()
        texts = list[Body]()
        calls_and_reasoning = Body()
        for part in blocks:
            kind = part.get("type", "text")
            block = convert(part, _Message)
            if kind == "tool_result":
                text = _text(block.content, f"{place}.content (tool_result)")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            elif kind == "tool_use":
                calls = calls_and_reasoning.setdefault("tool_calls", [])
                calls.append(_call(block.id or "", block.name or "", block.input))
            elif kind in ("thinking", "redacted_thinking"):
                if block.thinking:
                    calls_and_reasoning["reasoning_content"] = block.thinking
            else:
                texts.append(part)
        if texts or calls_and_reasoning or message.role == "assistant":
            yield _role_and_text(message, place, texts) | calls_and_reasoning


TOKEN_COUNT_PATH = "/v1/messages/count_tokens"
READERS = {
    "/v1/chat/completions": _read_chat,
    "/v1/responses": _read_responses,
    "/v1/messages": _read_anthropic,
    TOKEN_COUNT_PATH: _read_anthropic,
}
"""Readers of the messages of a request by the path of its API. They yield messages as chat templates take them."""

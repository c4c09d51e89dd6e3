"""Write answers and refusals in the form of OpenAI's chat completions and responses and of Anthropic's messages. A
stream has the usual events, with the complete turn in one of them.

``endpoint_server.py`` calls it for each HTTP request of an agent, in the process of the environment worker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import msgspec

from streamrl.base.types import FinishReason, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.environments.chat_requests import Body
from streamrl.run.environments.endpoint_session import ApiError, ChatAnswer, ChatRequest

# Fields of responses that always have the same value, which clients expect.
_FIXED_FIELDS: Body = {"error": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
MODELS = b"""{"object": "list", "has_more": false, "first_id": "policy", "last_id": "policy", "data": [{"id": "policy",
"object": "model", "type": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "streamrl",
"display_name": "the policy of the run"}]}"""  # in the form of OpenAI and of Anthropic; other names are the same model


def write_answer(path: str, request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> bytes:
    """Return the body of the answer to a request at ``path``: JSON, or server-sent events for a stream."""
    body = _WRITERS[path](request, answer, tokenizer)
    if not request.stream:
        return msgspec.json.encode(body)
    if path == "/v1/chat/completions":
        lines = [msgspec.json.encode(chunk) for chunk in _chat_chunks(body, usage=request.usage)]
        return b"".join(b"data: " + line + b"\n\n" for line in [*lines, b"[DONE]"])
    return _named_events(_responses_events(body) if path == "/v1/responses" else _anthropic_events(body))


def _named_events(events: Iterable[Body]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events
    )


def write_refusal(path: str, error: ApiError) -> bytes:
    """Return the body of a refusal, in the form of the API at ``path``."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "api_error"}
    refusal: Body = {"type": kinds.get(error.status, "invalid_request_error"), "message": str(error)}
    if path.startswith("/v1/messages"):
        return msgspec.json.encode({"type": "error", "error": refusal})
    return msgspec.json.encode({"error": refusal | {"param": None, "code": None}})


def write_refusal_in_stream(path: str, error: ApiError) -> bytes:
    """Return the events of a refusal that was found after the stream had begun, in the form of the API at ``path``."""
    body = write_refusal(path, error)
    if path == "/v1/chat/completions":
        return b"data: " + body + b"\n\n"
    refusal = msgspec.json.decode(body, type=Body)
    if path != "/v1/responses":
        return _named_events([refusal])
    # Clients differ in which of the two events they read.
    cause = {"code": "server_error", "message": str(error)}
    failed = _FIXED_FIELDS | {"id": "resp_failed", "object": "response", "status": "failed", "output": []}
    return _named_events(
        [
            {"type": "error", "sequence_number": 0, "param": None, **cause, **refusal},
            {"type": "response.failed", "sequence_number": 1, "response": failed | {"error": cause}},
        ]
    )


def _is_complete(answer: ChatAnswer) -> bool:
    return answer.turn.finish_reason is FinishReason.STOP


def _finish_reason(answer: ChatAnswer, calls: str, stop: str, length: str) -> str:
    """Return the word of an API for the reason why the answer ends."""
    if answer.calls:
        return calls
    return stop if _is_complete(answer) else length


def _calls(answer: ChatAnswer) -> Iterator[tuple[str, str, str]]:
    """Yield ids, names and arguments of the calls; arguments are JSON texts."""
    for call in answer.calls:
        function = call["function"]
        yield call["id"], function["name"], json.dumps(function["arguments"], ensure_ascii=False)


def _chat(request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> Body:
    text: str | None = answer.text
    if answer.calls and not text:  # OpenAI's API has null in place of an empty text beside calls
        text = None
    message: Body = {"role": "assistant", "content": text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in _calls(answer)
        ]
    token_logprobs = _logprobs(request, answer, tokenizer)
    logprobs = {"content": token_logprobs, "refusal": None} if token_logprobs else None
    sampled_tokens = len(answer.turn.token_ids)
    return {
        "id": f"chatcmpl-{answer.identity}",
        "object": "chat.completion",
        "created": answer.created,
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": _finish_reason(answer, "tool_calls", "stop", "length"),
            }
        ],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": sampled_tokens,
            "total_tokens": answer.prompt_tokens + sampled_tokens,
        },
    }


def _logprobs(request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> list[Body]:
    """Return the logprobs of all tokens of the turn, also of its reasoning and calls; empty where the request does not
    ask for logprobs."""
    if not request.logprobs:
        return []
    tokens = []
    for token_id, logprob in zip(answer.turn.token_ids, answer.turn.logprobs, strict=False):
        text = tokenizer.decode(token_array([token_id]), skip_special=False)
        # A token that is a part of a character has no text, and its bytes are not known here.
        text_bytes = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        # JSON has no -inf; OpenAI's API writes -9999 for it.
        tokens.append({"token": text, "logprob": max(logprob, -9999.0), "bytes": text_bytes, "top_logprobs": []})
    return tokens


def _chat_chunks(body: Body, *, usage: bool) -> Iterator[Body]:
    """Yield the chunks of a stream: the role, the turn, the end, and with ``usage`` the numbers of tokens."""
    (choice,) = body["choices"]
    turn = {name: value for name, value in choice["message"].items() if name not in ("role", "refusal")}
    if "tool_calls" in turn:
        turn["tool_calls"] = [{"index": place, **call} for place, call in enumerate(turn["tool_calls"])]
    chunk = body | {"object": "chat.completion.chunk", "usage": None}
    deltas: list[Body] = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"delta": turn, "finish_reason": None, "logprobs": choice["logprobs"]},
        {"delta": {}, "finish_reason": choice["finish_reason"]},
    ]
    for delta in deltas:
        yield chunk | {"choices": [{"index": 0, **delta}]}
    if usage:
        yield chunk | {"choices": [], "usage": body["usage"]}


def _responses(request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> Body:
    name = answer.identity
    complete = _is_complete(answer)
    status = "completed" if complete else "incomplete"
    output = []
    if answer.reasoning:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if answer.text or not answer.calls:
        text: Body = {"type": "output_text", "text": answer.text, "annotations": []}
        text["logprobs"] = _logprobs(request, answer, tokenizer)
        output.append(
            {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [text]}
        )
    for call_id, tool, arguments in _calls(answer):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{call_id}",
                "call_id": call_id,
                **_name_and_group(request, tool),
                "arguments": arguments,
                "status": status,
            }
        )
    sampled_tokens = len(answer.turn.token_ids)
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": answer.created,
        "model": request.model,
        **_FIXED_FIELDS,
        "status": status,
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": sampled_tokens,
            "total_tokens": answer.prompt_tokens + sampled_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _name_and_group(request: ChatRequest, tool: str) -> Body:
    """Return the name of a called tool as the request had it, with its group where it belongs to one."""
    if tool not in request.groups:
        return {"name": tool}
    group, name = request.groups[tool]
    return {"name": name, "namespace": group}


def _responses_events(body: Body) -> Iterator[Body]:
    """Yield the events of a stream of responses, numbered from 0."""
    created = body | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[Body] = [
        {"type": "response.created", "response": created},
        {"type": "response.in_progress", "response": created},
    ]
    for place, item in enumerate(body["output"]):
        events.extend(_item_events(place, item))
    events.append({"type": f"response.{body['status']}", "response": body})
    for number, event in enumerate(events):
        yield event | {"sequence_number": number}


def _item_events(place: int, item: Body) -> Iterator[Body]:
    """Yield the events of the item at ``place`` of the output: it is added without its content, then filled."""
    is_call = item["type"] == "function_call"
    added = item | {"status": "in_progress"}
    if is_call:
        added["arguments"] = ""
    else:
        added["content"] = []
    yield {"type": "response.output_item.added", "output_index": place, "item": added}
    item_place = {"output_index": place, "item_id": item["id"]}
    for number, part in enumerate(item.get("content", ())):
        yield from _part_events(part, item_place | {"content_index": number})
    if is_call:
        name = "response.function_call_arguments"
        arguments = item["arguments"]
        yield {"type": f"{name}.delta", "delta": arguments, **item_place}
        yield {"type": f"{name}.done", "arguments": arguments, "name": item["name"], **item_place}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _part_events(part: Body, part_place: Body) -> Iterator[Body]:
    """Yield the events of one part of an item's content, a text or reasoning."""
    name = f"response.{part['type']}"
    empty = part | {"text": ""}
    logprobs = {}
    if part["type"] == "output_text":
        empty["logprobs"] = ()
        logprobs["logprobs"] = part["logprobs"]
    yield {"type": "response.content_part.added", "part": empty, **part_place}
    yield {"type": f"{name}.delta", "delta": part["text"], **logprobs, **part_place}
    yield {"type": f"{name}.done", "text": part["text"], **logprobs, **part_place}
    yield {"type": "response.content_part.done", "part": part, **part_place}


def _anthropic(request: ChatRequest, answer: ChatAnswer, _: Tokenizer) -> Body:
    content: list[Body] = []
    if answer.reasoning:
        # Clients take reasoning without a signature for that of another model, and send it back as a plain text.
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.identity})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for call_id, name, arguments in _calls(answer):
        # Arguments are put into the body as they are: they may have a number that msgspec refuses to encode.
        raw_arguments = msgspec.Raw(arguments.encode())
        content.append({"type": "tool_use", "id": call_id, "name": name, "input": raw_arguments})
    return {
        "id": f"msg_{answer.identity}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": _finish_reason(answer, "tool_use", "stop_sequence" if answer.stop else "end_turn", "max_tokens"),
        "stop_sequence": answer.stop or None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.turn.token_ids)},
    }


def _anthropic_events(body: Body) -> Iterator[Body]:
    """Yield the events of a stream of messages."""
    start = body | {"content": [], "stop_reason": None, "usage": body["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for place, block in enumerate(body["content"]):
        kind = block["type"]
        if kind == "tool_use":
            empty_block = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}
        else:
            empty_block = block | {kind: ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        if kind == "thinking":
            empty_block["signature"] = ""
        yield {"type": "content_block_start", "index": place, "content_block": empty_block}
        yield {"type": "content_block_delta", "index": place, "delta": delta}
        if kind == "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": place, "delta": signature}
        yield {"type": "content_block_stop", "index": place}
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": body["usage"]}
    yield {"type": "message_stop"}


_WRITERS = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _anthropic}

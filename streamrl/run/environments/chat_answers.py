"""Answers and refusals in the form of OpenAI's chat completions and responses and of Anthropic's messages. A stream has
the usual events, with the turn in one piece."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from streamrl.base.types import FinishReason, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.environments.chat_requests import Body
from streamrl.run.environments.endpoint_session import ApiError, ChatAnswer, ChatRequest

_NONE: Body = {"error": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
MODELS = b"""{"object": "list", "has_more": false, "first_id": "policy", "last_id": "policy", "data": [{"id": "policy",
"object": "model", "type": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "streamrl",
"display_name": "the policy of the run"}]}"""  # in the form of OpenAI and of Anthropic; other names are the same model


def write_answer(path: str, request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> bytes:
    """The body of the answer to a request that was sent to ``path``: JSON, or server-sent events for a stream."""
    whole = _WRITERS[path](request, answer, tokenizer)
    if not request.stream:
        return msgspec.json.encode(whole)
    if path == "/v1/chat/completions":
        data = [msgspec.json.encode(chunk) for chunk in _chat_chunks(whole, usage=request.usage)]
        return b"".join(b"data: " + one + b"\n\n" for one in [*data, b"[DONE]"])
    events = _responses_events(whole) if path == "/v1/responses" else _anthropic_events(whole)
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events
    )


def write_refusal(path: str, error: ApiError) -> bytes:
    """The body of a refusal, in the form of the API at ``path``."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "api_error"}
    said: Body = {"type": kinds.get(error.status, "invalid_request_error"), "message": str(error)}
    if path.startswith("/v1/messages"):
        return msgspec.json.encode({"type": "error", "error": said})
    return msgspec.json.encode({"error": said | {"param": None, "code": None}})


def _ended(answer: ChatAnswer) -> bool:
    return answer.turn.finish_reason is FinishReason.STOP


def _calls(answer: ChatAnswer) -> Iterator[tuple[str, str, str]]:
    """Ids, names and arguments, as text."""
    for called, function in ((call["id"], call["function"]) for call in answer.calls):
        yield called, function["name"], json.dumps(function["arguments"], ensure_ascii=False)


def _chat(request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> Body:
    message: Body = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in _calls(answer)
        ]
    reason = "tool_calls" if answer.calls else "stop" if _ended(answer) else "length"
    logprobs = {"content": found, "refusal": None} if (found := _logprobs(request, answer, tokenizer)) else None
    sampled = len(answer.turn.token_ids)
    given = answer.prompt_tokens
    usage = {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
    made = {"id": f"chatcmpl-{answer.identity}", "object": "chat.completion", "created": answer.created}
    return {**made, "model": request.model, "choices": [choice], "usage": usage}


def _logprobs(request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> list[Body]:
    """Logprobs of all tokens of the turn, those of reasoning and calls among them. Empty: not wanted."""
    found: list[Body] = []
    for token_id, logprob in zip(answer.turn.token_ids, answer.turn.logprobs if request.logprobs else (), strict=False):
        text = tokenizer.decode(token_array([token_id]), skip_special=False)
        whole = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        found.append({"token": text, "logprob": max(logprob, -9999.0), "bytes": whole, "top_logprobs": []})
    return found


def _chat_chunks(whole: Body, *, usage: bool) -> Iterator[Body]:
    """The role, the turn, the end, and the usage where it is wanted."""
    (choice,) = whole["choices"]
    turn = {name: value for name, value in choice["message"].items() if name not in ("role", "refusal")}
    if "tool_calls" in turn:
        turn["tool_calls"] = [{"index": place, **call} for place, call in enumerate(turn["tool_calls"])]
    base = whole | {"object": "chat.completion.chunk", "usage": None}
    deltas: list[Body] = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"delta": turn, "finish_reason": None, "logprobs": choice["logprobs"]},
        {"delta": {}, "finish_reason": choice["finish_reason"]},
    ]
    yield from (base | {"choices": [{"index": 0, **delta}]} for delta in deltas)
    if usage:
        yield base | {"choices": [], "usage": whole["usage"]}


def _responses(request: ChatRequest, answer: ChatAnswer, tokenizer: Tokenizer) -> Body:
    name = answer.identity
    status = "completed" if _ended(answer) else "incomplete"
    output: list[Body] = []
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": thought})
    if answer.text or not answer.calls:
        text: Body = {"type": "output_text", "text": answer.text, "annotations": []}
        content = [text | {"logprobs": _logprobs(request, answer, tokenizer)}]
        said: Body = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status}
        output.append(said | {"content": content})
    for call_id, tool, arguments in _calls(answer):
        called = {"type": "function_call", "id": f"fc_{name}_{call_id}", "call_id": call_id, "name": tool}
        output.append(called | {"arguments": arguments, "status": status})
    sampled = len(answer.turn.token_ids)
    given = answer.prompt_tokens
    usage: Body = {"input_tokens": given, "output_tokens": sampled, "total_tokens": given + sampled}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    made = {"id": f"resp_{name}", "object": "response", "created_at": answer.created, "model": request.model, **_NONE}
    cut = None if _ended(answer) else {"reason": "max_output_tokens"}
    return {**made, "status": status, "incomplete_details": cut, "output": output, "usage": usage}


def _responses_events(whole: Body) -> Iterator[Body]:
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    found: list[Body] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for place, item in enumerate(whole["output"]):
        at = {"output_index": place, "item_id": item["id"]}
        calls = item["type"] == "function_call"
        added = item | {"status": "in_progress", "arguments" if calls else "content": "" if calls else []}
        found.append({"type": "response.output_item.added", "output_index": place, "item": added})
        for number, part in enumerate(item.get("content", ())):
            here = at | {"content_index": number}
            name = f"response.{part['type']}"
            more = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            empty = {"text": "", **dict.fromkeys(more, ())}
            found.append({"type": "response.content_part.added", "part": part | empty, **here})
            found.append({"type": f"{name}.delta", "delta": part["text"], **more, **here})
            found.append({"type": f"{name}.done", "text": part["text"], **more, **here})
            found.append({"type": "response.content_part.done", "part": part, **here})
        if calls:
            name = "response.function_call_arguments"
            written = item["arguments"]
            found.append({"type": f"{name}.delta", "delta": written, **at})
            found.append({"type": f"{name}.done", "arguments": written, "name": item["name"], **at})
        found.append({"type": "response.output_item.done", "output_index": place, "item": item})
    found.append({"type": f"response.{whole['status']}", "response": whole})
    yield from (event | {"sequence_number": number} for number, event in enumerate(found))


def _anthropic(request: ChatRequest, answer: ChatAnswer, _: Tokenizer) -> Body:
    content: list[Body] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for call_id, name, arguments in _calls(answer):  # a number may be larger than msgspec writes
        content.append({"type": "tool_use", "id": call_id, "name": name, "input": msgspec.Raw(arguments.encode())})
    made = {"id": f"msg_{answer.identity}", "type": "message", "role": "assistant", "model": request.model}
    reason = "tool_use" if answer.calls else "end_turn" if _ended(answer) else "max_tokens"
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.turn.token_ids)}
    return {**made, "content": content, "stop_reason": reason, "stop_sequence": None, "usage": usage}


def _anthropic_events(whole: Body) -> Iterator[Body]:
    begun = whole | {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for place, block in enumerate(whole["content"]):
        kind = block["type"]
        name, empty = (kind, "") if kind != "tool_use" else ("input", {})
        delta = {"type": f"{kind}_delta", kind: block.get(kind)}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}
        yield {"type": "content_block_start", "index": place, "content_block": block | {name: empty}}
        yield {"type": "content_block_delta", "index": place, "delta": delta}
        yield {"type": "content_block_stop", "index": place}
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": whole["usage"]}
    yield {"type": "message_stop"}


_WRITERS = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _anthropic}

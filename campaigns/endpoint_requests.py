"""Requests with something wrong in them, given to the endpoint of agents: each is answered in the form of its API, none
crashes, and a trajectory samples only for requests that have its key."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from streamrl.base.errors import StreamRLError
from streamrl.base.types import FinishReason, TokenArray, Turn, token_array
from streamrl.pretrained.tokenizer import Tokenizer as ModelTokenizer
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.endpoint_server import EndpointServer
from streamrl.run.environments.endpoint_session import EndpointSession

TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STATUSES = {200, 400, 401, 404, 405, 413, 429}
BODY, AT_ONCE, A_LIFE, SESSIONS = 1 << 16, 8, 160, 3
NESTED = b"[" * 5_000
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
USER: dict[str, Any] = {"role": "user", "content": "What is 2 + 3?"}
CALL = {"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USE = {"type": "tool_use", "id": "c00000000", "name": "add", "input": {"a": 1}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You add."}]},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c00000000", "content": "5"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "max_tokens": 5,
        "temperature": 0,
        "n": 1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is 2 + 3?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c00000000", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c00000000", "output": "5"},
        ],
        "instructions": "You add.",
        "tools": [{"type": "function", **TOOL}],
        "max_output_tokens": 5,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "You add."}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c00000000", "content": "5"}]},
        ],
        "tools": [{"name": "add", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "auto"},
        "stream": True,
    },
}
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    2,
    1e300,
    10**30,
    "",
    "x",
    "<|im_end|>",
    "\0",
    "ü" * 300,
    [],
    {},
    [[]],
    {"type": "x"},
]
JUNK += [
    {"type": "image_url", "image_url": {"url": "x"}},
    [{"type": "text", "text": None}],
    "assistant",
    "tool",
    "none",
]
ALLOWED: ContextVar[frozenset[str]] = ContextVar("ALLOWED")
"""Keys that the request of this task has."""


class RandomTurns:
    """A sampler of random ids, which ends some turns by length and refuses some."""

    def __init__(self, key: str, chance: random.Random) -> None:
        self.key, self.chance, self.turns = key, chance, 0

    async def sample(
        self, appended: TokenArray, *, after: int | None = None, max_tokens: int = 0, stop: tuple[str, ...] = ()
    ) -> Turn:
        assert self.key in ALLOWED.get(), "a request reached the trajectory of another key"
        assert after is not None and -1 <= after < self.turns, after
        assert len(appended), "nothing is appended"
        if self.chance.random() < 0.02:
            raise StreamRLError("the episode has no turns left")
        number, self.turns = self.turns, self.turns + 1
        await anyio.lowlevel.checkpoint()
        count = self.chance.randrange(1, 9)
        ids = token_array([*self.chance.choices(range(256), k=count), *[257] * (self.chance.random() < 0.8)])
        ended = FinishReason.STOP if ids[-1] == 257 else FinishReason.LENGTH
        return Turn(number=number, token_ids=ids, finish_reason=ended)


SAID = 'Action: look\nObservation: a room <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SAID += SAID[SAID.index("<") :]
CHAT, RESPONSES, MESSAGES = BODIES
ADD = {"type": "function", "function": TOOL}
ADD_OF_RESPONSES = {"type": "function", **TOOL}
ADD_OF_MESSAGES = {"name": "add", "input_schema": TOOL["parameters"]}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 500},
}
# What harnesses send: path, parameters, status, and a text that the answer has, or with "!" before it has not. vLLM's
# server is the measure of what stop texts and parallel_tool_calls do.
HARNESSES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "stop as a text": (CHAT, {"stop": "Observation:"}, 200, "!a room"),
    "stop as a list": (CHAT, {"stop": ["x?", "Observation:"]}, 200, "!a room"),
    "stop that is null": (CHAT, {"stop": None}, 200, "a room"),
    "stop that is an empty list": (CHAT, {"stop": []}, 200, "a room"),
    "stop with an empty text": (CHAT, {"stop": [""]}, 400, "stop has an empty text"),
    "stop that is a number": (CHAT, {"stop": 1}, 400, "$.stop"),
    "stop that is the text's begin": (CHAT, {"stop": "Action"}, 200, '"content":""'),
    "stop that ends a call": (CHAT, {"stop": "</tool_call>", "tools": [ADD]}, 200, "!tool_calls"),
    "two stops, the later one first": (CHAT, {"stop": ["room", "Observation"]}, 200, '"Action: look"'),
    "stop of a stream": (CHAT, {"stop": "Observation:", "stream": True}, 200, "!a room"),
    "stop_sequences": (MESSAGES, {"stop_sequences": ["Observation:"]}, 200, '"stop_sequence":"Observation:"'),
    "stop_sequences that are not met": (MESSAGES, {"stop_sequences": ["zzz"]}, 200, '"stop_sequence":null'),
    "one call": (CHAT, {"tools": [ADD], "parallel_tool_calls": False}, 200, "!c00000001"),
    "one call of responses": (
        RESPONSES,
        {"tools": [ADD_OF_RESPONSES], "parallel_tool_calls": False},
        200,
        "!c00000001",
    ),
    "several calls": (CHAT, {"tools": [ADD], "parallel_tool_calls": True}, 200, "c00000001"),
    "one call of messages": (
        MESSAGES,
        {"tools": [ADD_OF_MESSAGES], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        200,
        "!c00000001",
    ),
    "no call": (CHAT, {"tools": [ADD], "tool_choice": "none"}, 200, "!tool_calls"),
    "a call that is required": (CHAT, {"tools": [ADD], "tool_choice": "required"}, 400, "'required' cannot be kept"),
    "a function that is forced": (
        CHAT,
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        400,
        "'function' cannot be kept",
    ),
    "allowed tools": (
        RESPONSES,
        {"tools": [ADD_OF_RESPONSES], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        400,
        "'allowed_tools' cannot be kept",
    ),
    "any call of messages": (
        MESSAGES,
        {"tools": [ADD_OF_MESSAGES], "tool_choice": {"type": "any"}},
        400,
        "'any' cannot",
    ),
    "tool_choice that is null": (CHAT, {"tools": [ADD], "tool_choice": None}, 200, "tool_calls"),
    "tools that are null": (CHAT, {"tools": None}, 200, "a room"),
    "a shell of Codex beside a function": (
        RESPONSES,
        {"tools": [{"type": "local_shell"}, ADD_OF_RESPONSES]},
        200,
        "add",
    ),
    "a shell of Codex alone": (RESPONSES, {"tools": [{"type": "local_shell"}]}, 400, "local_shell"),
    "a patch in a grammar": (
        RESPONSES,
        {"tools": [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, ADD_OF_RESPONSES]},
        200,
        "!apply_patch",
    ),
    "a search of OpenAI alone": (RESPONSES, {"tools": [{"type": "web_search_preview"}]}, 200, "a room"),
    "a search of Anthropic alone": (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, 200, "a room"),
    "an editor of Anthropic alone": (
        MESSAGES,
        {"tools": [{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]},
        400,
        "text_editor_20250728",
    ),
    "a function of Anthropic with its type": (
        MESSAGES,
        {"tools": [{"type": "custom", **ADD_OF_MESSAGES}]},
        200,
        "tool_use",
    ),
    "a group that is empty": (RESPONSES, {"tools": [{"type": "namespace", "name": "a", "tools": []}]}, 200, "a room"),
    "a group without a list": (
        RESPONSES,
        {"tools": [{"type": "namespace", "name": "a", "tools": 1}]},
        400,
        "cannot be read",
    ),
    "parallel_tool_calls that is null": (CHAT, {"tools": [ADD], "parallel_tool_calls": None}, 200, "c00000001"),
    "two answers": (CHAT, {"n": 2}, 400, "n is 2"),
    "metadata and a cache key of Codex": (
        RESPONSES,
        {"store": False, "prompt_cache_key": "k", "client_metadata": {}, "include": ["reasoning.encrypted_content"]},
        200,
        "a room",
    ),
    "beta fields of Claude Code": (
        MESSAGES,
        {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "metadata": {"user_id": "u"}},
        200,
        "a room",
    ),
    "options of litellm": (CHAT, {"user": "u", "seed": 1, "drop_params": True, "extra_headers": None}, 200, "a room"),
}


class SaidTurns:
    """A sampler that says ``SAID`` in every turn, whatever ends it."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer, self.turns = tokenizer, 0

    async def sample(
        self, appended: TokenArray, *, after: int | None = None, max_tokens: int = 0, stop: tuple[str, ...] = ()
    ) -> Turn:
        await anyio.lowlevel.checkpoint()
        self.turns += 1
        ids = token_array([*self.tokenizer.encode_fragment(SAID), 257])
        return Turn(number=self.turns - 1, token_ids=ids, finish_reason=FinishReason.STOP)


async def try_harnesses() -> list[str]:
    """Send every request of ``HARNESSES``. Returns a sentence for each that is answered otherwise."""
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = small_tokenizer(Path(folder))
    for name, (path, parameters, status, text) in HARNESSES.items():
        server = EndpointServer()
        session = EndpointSession("key", SaidTurns(tokenizer), ChatModel(tokenizer))
        data = json.dumps({"model": "m", **ASKED[path], **parameters}).encode()
        sent: list[dict[str, Any]] = []
        received = [{"type": "http.request", "body": data}]

        async def receive(received: list[dict[str, Any]] = received) -> dict[str, Any]:
            if not received:
                await anyio.sleep_forever()
            return received.pop()

        async def send(message: dict[str, Any], sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"x-api-key", b"key")]}
        with server.serving(session):
            await server(scope, receive, send)
        server.socket.close()
        answer = b"".join(message.get("body", b"") for message in sent).decode()
        has_text = text.removeprefix("!") in answer
        if sent[0]["status"] != status or has_text == text.startswith("!"):
            problems.append(f"{name}: {sent[0]['status']} {answer[:400]}")
    return problems


def small_tokenizer(folder: Path) -> ModelTokenizer:
    """Make a tokenizer of single bytes with the special tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    return load_tokenizer(folder)


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of ``value`` in which one place is other than it was."""
    value = deepcopy(value)
    place = value
    while True:
        names = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not names:
            return value
        name = chance.choice(names)
        if isinstance(place[name], dict | list) and place[name] and chance.random() < 0.8:
            place = place[name]
            continue
        match chance.randrange(4):
            case 0:
                del place[name]
            case 1 if isinstance(place, list):
                place.insert(name, deepcopy(place[name]))
            case _:
                place[name] = deepcopy(chance.choice(JUNK))
        return value


def request_of(chance: random.Random, keys: list[str], said: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """A request's scope and body. ``said``: a chat of a trajectory that may be gone on with, by key."""
    path = chance.choice(list(BODIES))
    key = chance.choice(keys)
    body = deepcopy(BODIES[path])
    if chance.random() < 0.4 and key in said:
        path, body = said[key]
    for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
        body = mutated(body, chance)
    if isinstance(body, dict) and chance.random() < 0.3:
        body["stream"] = True
    data = json.dumps(body).encode()
    if chance.random() < 0.1:
        at = chance.randrange(len(data))
        data = (
            data[:at]
            + chance.choice((b"", chance.randbytes(3), NESTED, b"x" * BODY))
            + data[at + chance.randrange(9) :]
        )
    wrong = [key[:-1], key + "x", "", "../" + key, key.upper(), "ü"]
    named = key if chance.random() < 0.8 else chance.choice(wrong)
    headers: list[tuple[bytes, bytes]] = [(b"content-length", str(len(data)).encode())] * chance.randrange(2)
    match chance.randrange(3):
        case 0:
            headers.append((b"authorization", b"Bearer " + named.encode()))
        case 1:
            headers.append((b"x-api-key", named.encode()))
        case _:
            path = f"/sessions/{named}{path}"
    if chance.random() < 0.1:
        headers += [chance.choice([(b"x-stainless-retry-count", b"1"), (b"x-streamrl-resample", b"1")])]
    if chance.random() < 0.05:
        headers += [
            (b"authorization", chance.randbytes(5)),
            (b"content-length", chance.choice((b"9" * 30, b"-1", b"x"))),
        ]
    method = "POST" if chance.random() < 0.97 else chance.choice(["GET", "PUT", "HEAD"])
    path = path if chance.random() < 0.97 else path + chance.choice(["/", "/x", "//", "é"])
    return {"type": "http", "method": method, "path": path, "headers": headers}, data


async def _one(
    server: EndpointServer, request: tuple[dict[str, Any], bytes], keys: list[str], counts: Counter[int]
) -> Any:
    """Send a request; the parsed answer of status 200, else None."""
    scope, data = request
    text = scope["path"].encode() + b" ".join(value for _, value in scope["headers"])
    ALLOWED.set(frozenset(key for key in keys if key.encode() in text))
    parts = [data[: len(data) // 2], data[len(data) // 2 :]]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:  # as a server does: until the client disconnects
            await anyio.sleep_forever()
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await server(scope, receive, send)
    start, *bodies = sent
    body = b"".join(part.get("body", b"") for part in bodies)
    counts[start["status"]] += 1
    assert start["status"] in STATUSES, (start, body, scope, data)
    if (b"content-type", b"text/event-stream") in start["headers"]:
        lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
        assert lines and all(msgspec.json.decode(line[6:]) for line in lines)
        return None
    answer = msgspec.json.decode(body)
    return answer if start["status"] == 200 else None


async def try_requests(count: int, seed: int) -> Counter[int]:
    """Send ``count`` requests that follow from ``seed``, some at once. Returns how many had each status. Raises
    ``AssertionError`` for one that is answered wrongly."""
    chance, counts = random.Random(seed), Counter[int]()
    server = EndpointServer(largest_body=BODY)
    with tempfile.TemporaryDirectory() as folder:
        model = ChatModel(small_tokenizer(Path(folder)))
    said: dict[str, Any] = {}

    async def one(request: tuple[dict[str, Any], bytes], keys: list[str]) -> None:
        answer = await _one(server, request, keys, counts)
        if answer and answer.get("object") == "chat.completion":
            body = json.loads(request[1])
            named = next(iter(ALLOWED.get()))
            body["messages"] = [*body["messages"], answer["choices"][0]["message"], USER][-40:]
            said[named] = ("/v1/chat/completions", body)

    for life in range(-(-count // A_LIFE)):
        keys = [f"key-{life:06}-{number}-{chance.getrandbits(64):016x}" for number in range(SESSIONS)]
        with ExitStack() as stack:
            for key in keys:
                stack.enter_context(
                    server.serving(EndpointSession(key, RandomTurns(key, chance), model, turns_at_once=4))
                )
            for _ in range(min(A_LIFE, count - life * A_LIFE) // AT_ONCE):
                async with anyio.create_task_group() as tasks:
                    for _ in range(AT_ONCE):
                        tasks.start_soon(one, request_of(chance, keys, said), keys)
        said.clear()
    server.socket.close()
    return counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(work=_work)


def _work(options: argparse.Namespace) -> int:
    problems = anyio.run(try_harnesses)
    print(
        f"{len(HARNESSES) - len(problems)} of {len(HARNESSES)} requests of harnesses as they should be",
        *problems,
        sep="\n",
    )
    counts = anyio.run(try_requests, options.requests, options.seed)
    print(*(f"{status}: {number:9,}" for status, number in sorted(counts.items())), sep="\n")
    return int(bool(problems))

"""The chats of one trajectory whose environment is an ``agent``.

``environment_forms.py`` makes an ``EndpointSession`` for each episode, and ``endpoint_server.py`` calls it for each
HTTP request of the agent, in the process of the environment worker. The session matches a request to the sampled turn
that the request continues, samples the next turn from the token ids of that turn, and answers a repeated request once.
Sampled tokens are never tokenised again."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
from msgspec import Struct

from streamrl.base.errors import StreamRLError
from streamrl.base.types import JsonMapping, JsonObject, Texts, Turn
from streamrl.contracts import TurnSampler
from streamrl.pretrained.turns.seam_tokens import CalledTool, CannotContinueError, SeamKind
from streamrl.pretrained.turns.tool_calls import ParsedTurn, split_reasoning
from streamrl.run.environments.chat_tokens import AppendedTokens, ChatModel, ChatTokens, sampled_message
from streamrl.run.environments.turns import EpisodeLimit

TRAJECTORY_ENDED = "the trajectory of this key has ended"
UNWANTED = 503
"""Status of a request whose turn was dropped, because no client waited for it."""
_CHARACTERS_IN_LOOP = 1 << 17
"""Characters of a chat that the event loop tokenises itself; a longer chat is tokenised in a thread."""

log = logging.getLogger(__name__)


class ApiError(StreamRLError):
    """A request that is refused with an HTTP ``status``; the message goes to the client in the form of its API."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageDigest(NamedTuple):
    """A message, to be compared with others. Its parts are apart because a client may leave some of them out of the
    chat that it sends.

    ``frame``: digest of the role, of the calls without their ids, which some clients make anew, and of the place of the
    call that the message is a result of;
    ``calls``: number of calls;
    ``text``: digest of the text; empty: the message has none;
    ``reasoning``: text of the reasoning; empty: there is none."""

    frame: bytes
    calls: int
    text: bytes
    reasoning: str

    def is_equal(self, other: MessageDigest) -> bool:
        """Return whether the messages are equal, apart from their reasoning."""
        return self.frame == other.frame and self.text == other.text

    def is_copy_of(self, sampled: MessageDigest) -> bool:
        """Return whether this message of a client is the ``sampled`` turn. A client may leave out reasoning, and the
        text beside calls."""
        text_matches = self.text == sampled.text or (self.calls > 0 and not self.text)
        # Forks may differ in their reasoning alone, so reasoning that the client did send must match.
        return self.frame == sampled.frame and text_matches and self.reasoning in ("", sampled.reasoning)


class Client:
    """The client of one request. ``idempotency_key``: name that the client gave to the request and its repetitions;
    empty: none; ``gone``: whether the client closed its connection before it had the whole answer."""

    def __init__(self, idempotency_key: bytes) -> None:
        self.idempotency_key = idempotency_key
        self.gone = False


class ChatRequest(Struct, frozen=True):
    """A request, in one form for all APIs.

    ``messages``: messages as chat templates take them;
    ``tools``: JSON schemas of the tools, as chat templates take them;
    ``chat``: digests of ``messages``;
    ``tool_set``: digest of ``tools``;
    ``digest``: digest of everything that decides the answer: equal requests have the same one;
    ``model``: name of the model, which the answer repeats;
    ``max_tokens``: limit of the answer's tokens (0: the limit of the run);
    ``stop``: texts that end the answer, and do not belong to it;
    ``stream``: whether the client wants server-sent events;
    ``calls``: whether the answer may call tools;
    ``one_call``: whether the client reads the first call alone;
    ``groups``: name of the group and name in it of each tool that belongs to a group, by the name in ``tools``;
    ``usage``: whether the client wants the usage at the end of a stream;
    ``logprobs``: whether the client wants logprobs;
    ``ignored``: names of parameters that the run decides and not the client."""

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    chat: Sequence[MessageDigest]
    tool_set: bytes
    digest: bytes
    model: str
    max_tokens: int
    stop: Texts
    stream: bool
    calls: bool
    one_call: bool
    groups: Mapping[str, tuple[str, str]]
    usage: bool
    logprobs: bool
    ignored: Sequence[str]


class ChatAnswer(Struct, frozen=True):
    """The answer to a request.

    ``turn``: sampled turn;
    ``text``: text without reasoning and calls;
    ``reasoning``: text of the reasoning;
    ``calls``: calls of tools, as chat templates take them;
    ``stop``: text of the request that ended the turn; empty: none did;
    ``prompt_tokens``: number of tokens before the turn;
    ``identity``: random name, the same in every repetition of the answer;
    ``created``: seconds since 1970."""

    turn: Turn
    text: str
    reasoning: str
    calls: Sequence[JsonObject]
    stop: str
    prompt_tokens: int
    identity: str
    created: int


class _Node:
    """A request and its answer. The nodes of a trajectory are a forest: each tree is a conversation with its forks.

    ``parent``: node whose answer the request continues; None: the request begins a conversation;
    ``chat``, ``tool_set``, ``digest``: digests of the request, as ``ChatRequest`` has them;
    ``end``: number of messages in the chat, the answer included;
    ``clients``: clients that asked for the answer;
    ``tokens``: length of the token sequence that ends with the answer;
    ``text``: text of that sequence, as ``ChatTokens.text`` gives it;
    ``finished``: event, set once there is an answer or a failure;
    ``failure``: error for the client where there is no answer;
    ``answer``: answer, None until the turn is sampled;
    ``answer_message``: message of the answer, as chat templates take it;
    ``answer_digest``: digest of ``answer_message``."""

    def __init__(self, parent: _Node | None, request: ChatRequest) -> None:
        self.parent = parent
        self.chat = request.chat
        self.tool_set = request.tool_set
        self.digest = request.digest
        self.end = len(request.chat) + 1
        self.clients: list[Client] = []
        self.tokens = 0
        self.text = ""
        self.finished = anyio.Event()
        self.failure = ApiError(UNWANTED, "no client waited for the answer: send the request again")
        self.answer: ChatAnswer | None = None
        self.answer_message: JsonObject = {}
        self.answer_digest = MessageDigest(b"", 0, b"", "")

    def is_for(self, client: Client) -> bool:
        """Return whether an equal request of ``client`` repeats this one: all clients have gone without the answer, or
        one gave it the same idempotency key."""
        if all(earlier.gone for earlier in self.clients):
            return True
        key = client.idempotency_key
        return bool(key) and any(earlier.idempotency_key == key for earlier in self.clients)

    def is_continued_by(self, chat: Sequence[MessageDigest]) -> bool:
        """Return whether ``chat`` continues this answer, given that it continues the answer of ``parent``."""
        answer_place = self.end - 1
        if self.answer is None or len(chat) <= answer_place:
            return False
        if not chat[answer_place].is_copy_of(self.answer_digest):
            return False
        # Messages up to the answer of the parent are known to be equal, which keeps long chats cheap to match.
        begin = self.parent.end if self.parent else 0
        for message, own_message in zip(chat[begin:answer_place], self.chat[begin:], strict=True):
            if not message.is_equal(own_message):
                return False
        return True


class _Prompt(NamedTuple):
    """The chat of a request as tokens.

    ``chat_tokens``: tokeniser of chats with the tools of the request;
    ``parent``: node whose token sequence the prompt continues (None: the prompt begins a new sequence);
    ``appended``: tokens after the sequence of ``parent``."""

    chat_tokens: ChatTokens
    parent: _Node | None
    appended: AppendedTokens

    @property
    def length(self) -> int:
        """Number of tokens before the turn."""
        before = self.parent.tokens if self.parent is not None else 0
        return before + len(self.appended.token_ids)


class EndpointSession:
    """The chats of one trajectory, whose requests have ``key``. ``turns_at_once``: largest number of concurrent calls
    of ``sampler``. ``figures``: counts by name, which the episode records when it ends; ``refusal``: newest refusal in
    words; empty: no request was refused."""

    def __init__(self, key: str, sampler: TurnSampler, model: ChatModel, *, turns_at_once: int = 1) -> None:
        self.key = key
        self.figures = Counter[str]()
        self.refusal = ""
        self.open_requests = 0
        self.unread_bytes = 0  # of requests that are being received and read
        self.reading = anyio.CapacityLimiter(1)  # threads that read large requests
        self.model = model
        self._sampler = sampler
        self._free_turns = anyio.Semaphore(turns_at_once)
        self._nodes: list[_Node] = []
        self._requests: dict[bytes, list[_Node]] = {}
        self._sampling: set[anyio.CancelScope] = set()
        self._closed = False

    def close(self) -> None:
        """End the trajectory: turns that are being sampled are cancelled, and all requests are answered with 410."""
        self._closed = True
        for scope in self._sampling:
            scope.cancel()

    async def answer(self, request: ChatRequest, client: Client, *, retry: bool = False) -> ChatAnswer:
        """Answer ``request`` of ``client``. Equal requests get an answer each, because an agent may vote. A repetition
        gets the answer that was lost on its way. ``retry``: the client says that it repeats a request, and gets the
        newest answer where none was lost. Raises ``ApiError``."""
        if self._closed:
            raise ApiError(410, TRAJECTORY_ENDED)
        self.figures.update(f"ignored/{name}" for name in request.ignored)
        equal_requests = self._requests.setdefault(request.digest, [])
        repeated = [node for node in equal_requests if node.is_for(client)]
        if retry and not repeated:
            repeated = equal_requests[-1:]
        if repeated:
            node = repeated[0]
            self.figures["retries"] += 1
            node.clients.append(client)
            await node.finished.wait()
        else:
            # Nothing is awaited from the look-up above until the node is in ``_requests``. Therefore a request and its
            # repetition cannot both be sampled.
            node = _Node(self._parent_of(request), request)
            node.clients.append(client)
            self._nodes.append(node)
            equal_requests.append(node)
            await self._fill(node, request)
        if node.answer is not None:
            return node.answer
        raise ApiError(410, TRAJECTORY_ENDED) if self._closed else node.failure

    def is_wanted(self, client: Client) -> bool:
        """Return whether a client waits for the answer to the request of ``client``, its own or a repetition."""
        return any(not other.gone for node in self._nodes if client in node.clients for other in node.clients)

    async def count(self, request: ChatRequest) -> int:
        """Count the prompt tokens of ``request``; nothing is sampled. Raises ``ApiError``."""
        try:
            prompt = await self._prompt(self._parent_of(request), request)
        except (StreamRLError, RecursionError) as error:
            raise ApiError(400, str(error)) from None
        return prompt.length

    def _parent_of(self, request: ChatRequest) -> _Node | None:
        """Return the node whose answer ``request`` continues: the deepest one, and the latest of several as deep. None:
        the request begins a conversation."""
        matches: set[_Node | None] = {None}
        deepest = None
        for node in self._nodes:  # parents stand before their children, so one pass is enough
            if node.parent in matches and node.tool_set == request.tool_set and node.is_continued_by(request.chat):
                matches.add(node)
                if deepest is None or node.end >= deepest.end:
                    deepest = node
        return deepest

    async def _fill(self, node: _Node, request: ChatRequest) -> None:
        """Sample the answer of ``node``. A node that gets no answer is removed, so that a repetition of the request is
        sampled."""
        scope = anyio.CancelScope()
        self._sampling.add(scope)
        try:
            with scope:
                await self._sample(node, request)
        except ApiError as error:
            node.failure = error
        except (StreamRLError, EpisodeLimit, RecursionError) as error:
            node.failure = ApiError(400, str(error))
        except Exception as error:
            log.exception("a request of an agent could not be answered")
            node.failure = ApiError(500, f"the turn could not be sampled ({type(error).__name__}: {error})")
        finally:
            self._sampling.discard(scope)
            if node.answer is None:
                self._remove(node)
            node.finished.set()

    def _remove(self, node: _Node) -> None:
        self._nodes.remove(node)
        self._requests[node.digest].remove(node)

    async def _sample(self, node: _Node, request: ChatRequest) -> None:
        """Sample the turn that answers ``node``, and count it in ``figures``."""
        prompt = await self._prompt(node.parent, request)
        parent = prompt.parent
        after = -1
        if parent is not None and parent.answer is not None:
            after = parent.answer.turn.number
        appended = prompt.appended.token_ids
        async with self._free_turns:
            turn = await self._sampler.sample(appended, after=after, max_tokens=request.max_tokens, stop=request.stop)
        node.tokens = prompt.length + len(turn.token_ids)
        node.text = prompt.chat_tokens.text(appended + turn.token_ids)
        if parent is not None:
            node.text = parent.text + node.text
        parsed = prompt.chat_tokens.parse(turn, calls=request.calls, stop=request.stop)
        self._count_turn(prompt, request, parsed)
        calls = parsed.calls[:1] if request.one_call else parsed.calls
        node.answer_message = sampled_message(turn.number, parsed.text, parsed.reasoning, calls)
        (node.answer_digest,) = chat_digests([node.answer_message])
        node.answer = ChatAnswer(
            turn=turn,
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=node.answer_message.get("tool_calls", ()),
            stop=parsed.stop,
            prompt_tokens=prompt.length,
            identity=secrets.token_hex(12),
            created=int(time.time()),
        )

    def _count_turn(self, prompt: _Prompt, request: ChatRequest, parsed: ParsedTurn) -> None:
        _, seam, broken_tokens = prompt.appended
        self.figures["turns"] += 1
        self.figures["sequences" if prompt.parent is None else f"seam_{seam}"] += 1
        # Sums of 0 are recorded, too.
        self.figures["rewritten_turns"] += int(seam == SeamKind.REWRITTEN)
        self.figures["special_tokens"] += broken_tokens
        malformed = request.calls and bool(request.tools) and bool(parsed.problem)
        self.figures["malformed_calls"] += int(malformed)
        if request.one_call and len(parsed.calls) > 1:
            self.figures["dropped_calls"] += len(parsed.calls) - 1

    async def _prompt(self, parent: _Node | None, request: ChatRequest) -> _Prompt:
        """Tokenise the chat of ``request``, a long one in a thread: the event loop serves other trajectories, too."""
        characters = sum(len(message["content"]) for message in request.messages)
        if characters > _CHARACTERS_IN_LOOP:
            return await anyio.to_thread.run_sync(partial(self._tokenise, parent, request))
        return self._tokenise(parent, request)

    def _tokenise(self, parent: _Node | None, request: ChatRequest) -> _Prompt:
        chat_tokens = self.model.tokens(request.tool_set, request.tools)
        if parent is not None:
            try:
                appended = _tokens_after(parent, request, chat_tokens)
            except CannotContinueError:
                self.figures["not_continued"] += 1
            else:
                # A rewritten prompt has the tokens of the whole chat, and continues no sequence.
                continued = parent if appended.seam != SeamKind.REWRITTEN else None
                return _Prompt(chat_tokens, continued, appended)
        return _Prompt(chat_tokens, None, chat_tokens.prompt_tokens(request.messages))


def _tokens_after(parent: _Node, request: ChatRequest, chat_tokens: ChatTokens) -> AppendedTokens:
    """Return the tokens of ``request`` after the answer of ``parent``. Raises ``CannotContinueError``."""
    answer = parent.answer
    assert answer is not None, "only a request that was answered is a parent"
    messages = _with_sampled_turns(parent, request.messages)
    calls = [CalledTool(call["function"]["name"], call["id"]) for call in answer.calls]
    last_token = answer.turn.token_ids[-1] if answer.turn.token_ids else -1
    return chat_tokens.seam_tokens(messages, parent.end - 1, calls, last_token, parent.text)


def _with_sampled_turns(parent: _Node, messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the messages of a client with sampled turns as they were sampled: the client may have left out parts of
    them, and have given other ids to their calls, by which results name their calls."""
    sampled_messages = {}
    ancestor: _Node | None = parent
    while ancestor is not None:
        sampled_messages[ancestor.end - 1] = ancestor.answer_message
        ancestor = ancestor.parent
    call_ids = {}
    replaced = []
    for place, message in enumerate(messages):
        sampled = sampled_messages.get(place)
        if sampled is not None:
            sent_calls = message.get("tool_calls", ())
            for sent_call, call in zip(sent_calls, sampled.get("tool_calls", ()), strict=True):
                call_ids[sent_call["id"]] = call["id"]
            message = sampled
        elif message.get("tool_call_id") in call_ids:
            message = message | {"tool_call_id": call_ids[message["tool_call_id"]]}
        replaced.append(message)
    return replaced


def digest_of(*values: Any) -> bytes:
    """Return a digest of JSON values. Neither the order of keys nor the spelling of a number (2 or 2.0) changes it:
    clients decode what they were sent and encode it again, and JavaScript has one kind of number."""
    numbers_alike = json.loads(json.dumps(values), parse_int=float)
    return blake2b(json.dumps(numbers_alike, sort_keys=True).encode(), digest_size=16).digest()


def _text_digest(text: str) -> bytes:
    """Return a digest of ``text``; empty where it is."""
    if not text:
        return b""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def chat_digests(messages: Sequence[JsonMapping]) -> list[MessageDigest]:
    """Return the digests of the messages of a chat as chat templates take them."""
    digests = []
    calls_before = 0
    call_places = {}
    for message in messages:
        text = message["content"]
        reasoning = message.get("reasoning_content", "")
        if message["role"] == "assistant":
            # Some clients put the reasoning back into the text.
            reasoning_in_text, text = split_reasoning(text)
            reasoning = reasoning or reasoning_in_text
            text = text.strip()
        calls = message.get("tool_calls", ())
        for call in calls:
            call_places[call["id"]] = calls_before
            calls_before += 1
        call_place = call_places.get(message.get("tool_call_id", ""), -1)
        digests.append(
            MessageDigest(
                frame=digest_of(message["role"], [call["function"] for call in calls], call_place),
                calls=len(calls),
                text=_text_digest(text),
                reasoning=reasoning.strip(),
            )
        )
    return digests

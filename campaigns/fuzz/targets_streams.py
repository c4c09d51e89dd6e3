"""Decoders of what travels between the processes of a run: streams, the control socket."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import msgspec

from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import MSGPACK, PLAIN, Seed, fixed_fields, message, seed
from streamrl.base import messages as says
from streamrl.base import run_events
from streamrl.base.errors import WireError
from streamrl.base.types import Completion, FinishReason, Prompt, VersionSpan, float_array, token_array
from streamrl.comm.stream_protocol import Hello, Kind, MessageOrigin, Phase, ReceivingEnd, SendingEnd, StreamRole
from streamrl.comm.wire import WireCodec, WireLimits, pack_header, parse_header
from streamrl.launch import control_protocol
from streamrl.launch.control_protocol import ParentMessage
from streamrl.recipe.rewards import Reward
from streamrl.rewards import reward_messages
from streamrl.rewards.served import gate as judge_gate

_RAW_FROM = 256  # bytes: small arrays travel in frames of their own too
_HEADER = fixed_fields(4, 2, 1, 1, 8)
PROMPT = Prompt(
    prompt_id="p-1", token_ids=token_array(range(40)), columns={"answer": "4", "tests": [{"in": [1, 2.5, None]}]}
)
COMPLETION = Completion(
    token_ids=token_array(range(100)),
    behavior_logprobs=float_array([-0.5] * 100),
    finish_reason=FinishReason.STOP,
    version_spans=(VersionSpan(start=0, end=60, policy_version=3), VersionSpan(start=60, end=100, policy_version=4)),
)
REWARD = Reward(function="reward.py:score", weight=0.5, options={"tolerance": 0.1, "deep": {"a": [1, "b"]}})
_FILLED = (int, str, float, dict)  # optional fields that an example has
_EXAMPLES: dict[Any, Any] = {
    int: 3,
    float: 0.5,
    str: "name",
    bool: True,
    bytes: b"\1\0\0\0" * 9,
    type(None): None,
    dict: {"a": [1.5]},
    Completion: COMPLETION,
    Prompt: PROMPT,
    Reward: REWARD,
    Any: {"a": [None, 1]},
}


def example(hint: Any, name: str = "") -> Any:
    """Make a value of a type of the wire. ``name``: of the field."""
    if hint in _EXAMPLES:
        return _EXAMPLES[hint]
    if hint is array:
        return float_array([-0.5] * 90) if "logprobs" in name else token_array(range(90))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        fields = {field.name: field for field in msgspec.structs.fields(hint)}
        filled = {name for name, one in fields.items() if one.required or (get_origin(one.type) or one.type) in _FILLED}
        return hint(**{name: example(fields[name].type, name) for name in filled})
    inner = get_args(hint)
    if get_origin(hint) is dict:
        return {example(inner[0]): example(inner[1])}
    if get_origin(hint) in (tuple, list):
        return get_origin(hint)(example(one, name) for one in inner if one is not ...)
    return inner[0] if get_origin(hint) is Literal else example(inner[0], name)  # or a union, or a generic


def _codecs() -> list[tuple[WireCodec[Any], Sequence[Any]]]:
    limits = WireLimits(message_bytes=1 << 25, frame_bytes=1 << 24, body_bytes=1 << 24, frames=24)
    unions = [says.EngineOrder, says.EngineEvent, says.TrainingOrder, says.TrainingEvent, ParentMessage]
    unions += [
        reward_messages.RewardOrder,
        reward_messages.RewardResult,
        reward_messages.RewardRequest,
        reward_messages.RewardReply,
    ]
    unions += [getattr(judge_gate, n) for n in dir(judge_gate) if n.endswith(("Order", "Event", "Report"))]
    unions += [getattr(run_events, name) for name in dir(run_events) if name.endswith("Order")]
    return [
        (WireCodec(union, limits, raw_frame_bytes=_RAW_FROM), [example(one) for one in get_args(union) or (union,)])
        for union in unions
    ]


def items_target() -> Target:
    """Items of every stream. The first frame says of which one; the others are what travels behind the header."""
    codecs = _codecs()

    def run(frames: Sequence[bytes]) -> str:
        codec = codecs[frames[0][0] % len(codecs)][0] if frames and frames[0] else codecs[0][0]
        item = codec.decode(frames[1:])
        again = codec.decode(codec.encode(item))
        # Compared as what is sent: a NaN equals itself there.
        assert _sent(codec, again) == _sent(codec, item), "an item that was accepted travels on as another one"
        return f"accepted {type(item).__name__}"

    made = []
    for number, (codec, items) in enumerate(codecs):
        for item in items:
            body, *raw = codec.encode(item)
            made.append(
                message(
                    seed(bytes((number,)), PLAIN), seed(bytes(body), MSGPACK), *(seed(bytes(r), PLAIN) for r in raw)
                )
            )
    return Target(name="streams.items", messages=made, run=run, refusals=(WireError,), spare_bytes=64 << 20)


def _sent(codec: WireCodec[Any], item: Any) -> list[bytes]:
    return [bytes(frame) for frame in codec.encode(item)]


# ---- the protocol of a stream --------------------------------------------------------------------------

_GREETING = Hello(item_type="Item", role=StreamRole.SENDER, window=4, message_bytes=1 << 20, session="s-1", name="far")


def conversation_target() -> Target:
    """A whole conversation with one end. The first frame is the script: which end, then how many frames each message
    has; messages come from the peer, and those of 16 frames or more from a stranger."""
    encoded = msgspec.msgpack.encode(_GREETING)
    as_receiver = msgspec.msgpack.encode(msgspec.structs.replace(_GREETING, role=StreamRole.RECEIVER))
    header = {kind: seed(pack_header(kind), _HEADER) for kind in Kind}
    body = seed(msgspec.msgpack.encode({"a": 1}), MSGPACK)
    hello, other = seed(encoded, MSGPACK), seed(as_receiver, MSGPACK)

    def item(number: int) -> tuple[Seed, Seed]:
        return seed(pack_header(Kind.ITEM, number), _HEADER), body

    end = seed(pack_header(Kind.END, 2), _HEADER)
    credit = seed(pack_header(Kind.CREDIT, 1), _HEADER)
    reason = seed(b"why it is broken", PLAIN)
    made = [
        message(
            seed(bytes((0, 2, 2, 2, 2, 1, 1)), PLAIN),
            header[Kind.HELLO],
            hello,
            header[Kind.READY],
            hello,
            *item(0),
            *item(1),
            end,
            header[Kind.BYE],
        ),
        message(seed(bytes((0, 2, 2, 2)), PLAIN), header[Kind.READY], hello, *item(0), header[Kind.BROKEN], reason),
        message(
            seed(bytes((1, 2, 1, 1, 1)), PLAIN),
            header[Kind.WELCOME],
            other,
            header[Kind.CREDIT],
            credit,
            header[Kind.GOODBYE],
        ),
        message(seed(bytes((2, 2, 2, 2)), PLAIN), header[Kind.WELCOME], hello, *item(0), *item(1)),
        message(seed(bytes((3, 2, 1, 1)), PLAIN), header[Kind.READY], other, header[Kind.CREDIT], credit),
        message(seed(bytes((2, 2)), PLAIN), header[Kind.REFUSED], reason),
    ]
    return Target(name="streams.conversation", messages=made, run=_converse, refusals=())


def _converse(frames: Sequence[bytes]) -> str:
    script = frames[0] if frames else b"\0"
    kind, rest, sent = (script[0] if script else 0) & 3, list(frames[1:]), 0
    limits = WireLimits(message_bytes=1 << 20, frame_bytes=1 << 19, body_bytes=1 << 19, frames=8)

    def transmit(peer: bytes, answer: Sequence[Any]) -> None:
        nonlocal sent
        sent += 1
        parse_header(answer[0])
        assert len(answer) <= 2 and sum(map(len, answer)) < 8192, "an answer that is larger than any the protocol has"

    role, binds = (StreamRole.RECEIVER, StreamRole.SENDER, StreamRole.RECEIVER, StreamRole.SENDER)[kind], kind in (0, 3)
    hello = msgspec.structs.replace(_GREETING, role=role)
    make: Callable[..., ReceivingEnd | SendingEnd] = ReceivingEnd if role is StreamRole.RECEIVER else SendingEnd
    end = make(hello, binds=binds, limits=limits, transmit=transmit)
    end.on_connected()
    sizes = list(script[1:]) or [2]
    for size in sizes + [2] * (len(rest) // 2 + 1):
        if not rest:
            break
        here, rest = rest[: size & 15], rest[size & 15 :]
        received = end.received_items if isinstance(end, ReceivingEnd) else 0
        end.on_message(MessageOrigin(b"stranger" if size >= 16 else b"peer", 1), here)
        if isinstance(end, ReceivingEnd) and end.received_items > received:
            assert parse_header(here[0]).sequence == received, "an item was taken for another one"
        _check_end(end)
    assert sent <= 4 * len(frames) + 8, "one message was answered by many"
    return f"{role} {end.phase}"


def _check_end(end: ReceivingEnd | SendingEnd) -> None:
    if end.phase is Phase.BROKEN:
        assert end.reason, "broken, and nobody knows why"
    if isinstance(end, ReceivingEnd):
        assert len(end.items) == end.received_items - end.taken_items <= end.window, (
            "more items than the window has places"
        )
        if len(end.items) > 1:
            end.take()
    elif end.credit > 0:
        assert end.credit <= end.window
        end.send_item([b"\x90"])


# ---- control, metrics ----------------------------------------------------------------------------------


def control_target() -> Target:
    """The control socket, from its first byte: the length, then the request or the answer."""
    requests = [
        control_protocol.encode(control_protocol.ControlRequest(operation=operation, key="k" * 64))
        for operation in (
            reward_messages.ListRewards(request_id=1),
            reward_messages.AttachReward(reward=REWARD),
            reward_messages.ReplaceReward(name="score", reward=REWARD),
            reward_messages.DetachReward(name="score"),
        )
    ]
    answers = [
        control_protocol.encode(answer)
        for answer in (
            control_protocol.ControlRefused(problems=("no", "never")),
            reward_messages.RewardsChanged(request_id=1, reward_version=2, rewards=("a", "b")),
        )
    ]
    size = control_protocol.LENGTH_BYTES

    def run(frames: Sequence[bytes]) -> str:
        prefix, body = (*frames, b"", b"")[:2]
        largest = control_protocol.LARGEST_REQUEST if len(frames) == 2 else control_protocol.LARGEST_ANSWER
        length = control_protocol.length_of(prefix[:size].ljust(size, b"\0"), largest)
        if len(frames) == 2:
            request = control_protocol.decode_request(body[:length])
            allowed = control_protocol.is_allowed(request, "the key of the run")
            assert not allowed or isinstance(request.operation, control_protocol.READ_ONLY), "allowed without the key"
            return f"accepted {type(request.operation).__name__}"
        return f"accepted {type(control_protocol.decode_answer(body[:length])).__name__}"

    made = [message(seed(r[:size], fixed_fields(4)), seed(r[size:], MSGPACK)) for r in requests]
    made += [message(seed(a[:size], fixed_fields(4)), seed(a[size:], MSGPACK), seed(b"", PLAIN)) for a in answers]
    return Target(name="streams.control", messages=made, run=run, refusals=(WireError,))


def targets() -> list[Target]:
    """All of this module."""
    return [items_target(), conversation_target(), control_target()]

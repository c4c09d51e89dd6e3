"""Decoders of what travels between the processes of a run: streams, the control socket, the metrics socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import JSON, MSGPACK, PLAIN, Seed, fixed_fields, message, seed
from streamrl.base import messages as says
from streamrl.base import stage_messages as stage
from streamrl.base.errors import WireError
from streamrl.base.run_events import StepFinished
from streamrl.base.types import (
    Completion,
    FinishReason,
    Prompt,
    RewardCall,
    RewardFailureKind,
    TrainingGroup,
    TrainingSample,
    TrajectoryId,
    VersionSpan,
    float_array,
    token_array,
)
from streamrl.comm.stream_protocol import Greeting, Kind, Origin, Phase, ReceivingEnd, Role, SendingEnd
from streamrl.comm.wire import WireCodec, WireLimits, pack_header, parse_header
from streamrl.judge import messages as judge_messages
from streamrl.observe import telemetry
from streamrl.recipe.rewards import Reward
from streamrl.remote import control_protocol, reward_changes
from streamrl.supervise import supervisor_orders
from streamrl.supervise.supervisor_orders import ParentMessage

_RAW_FROM = 256  # bytes: small arrays travel in frames of their own too
_HEADER = fixed_fields(4, 2, 1, 1, 8)
_IDS = TrajectoryId(prompt_id="p-1", group_id=7, sample=3, attempt=1)
PROMPT = Prompt(
    prompt_id="p-1", token_ids=token_array(range(40)), columns={"answer": "4", "tests": [{"in": [1, 2.5, None]}]}
)
COMPLETION = Completion(
    token_ids=token_array(range(100)),
    behavior_logprobs=float_array([-0.5] * 100),
    finish_reason=FinishReason.STOP,
    version_spans=(VersionSpan(start=0, end=60, policy_version=3), VersionSpan(start=60, end=100, policy_version=4)),
)
SOURCE = says.WeightSource(
    rank=0,
    endpoint="ipc:///nowhere",
    manifest_digest="ab" * 16,
    payload_bytes=900,
    changed_elements=31,
    total_elements=900,
)
ANNOUNCEMENT = says.WeightAnnouncement(
    policy_version=4, base_version=3, state_hash=2**63 + 11, sources=(SOURCE,), probe_logprobs=(-0.25, -1.5)
)
_GROUP = TrainingGroup(
    group_id=7,
    batch_id=2,
    samples=(
        TrainingSample(
            id=_IDS,
            token_ids=token_array(range(90)),
            loss_mask=b"\0\1" * 45,
            behavior_logprobs=float_array([-0.1] * 90),
            reward=0.5,
            oldest_version=3,
            newest_version=4,
            separate_rewards={"a": (1.0, 0.5)},
        ),
    )
    * 2,
)
_CALL = RewardCall(function="f", seconds=0.1, limit_s=1.0, value=None, failure=RewardFailureKind.TIMED_OUT)
REWARD = Reward(function="reward.py:score", weight=0.5, options={"tolerance": 0.1, "deep": {"a": [1, "b"]}})

_ITEMS: tuple[tuple[Any, Sequence[Any]], ...] = (
    (
        says.EngineOrder,
        (
            says.Generate(
                request_id="7.3.1", token_ids=token_array(range(99)), max_tokens=64, seed=5, temperature=1.0, kept=2
            ),
            says.Abort(request_ids=("7.3.1", "7.3.2")),
            says.Pause(order_id=3, mode=says.PauseMode.KEEP, clear_cache=True),
            says.StageWeights(order_id=4, announcement=ANNOUNCEMENT),
            says.CommitWeights(order_id=5, policy_version=4),
        ),
    ),
    (
        says.EngineEvent,
        (
            says.EngineReady(
                engine="engine-0", policy_version=3, max_model_len=512, max_num_seqs=64, tokenizer_digest="ab"
            ),
            says.Generated(request_id="7.3.1", completion=COMPLETION, seconds=0.25),
            says.OrderDone(order_id=4, seconds=0.1, state_hash=2**64 - 1, checksums={"head": "ff"}),
            says.EngineLoad(running=3, waiting=0, kv_cache_usage=0.5, generated_tokens=900, token_s=0.002),
        ),
    ),
    (
        says.TrainingOrder,
        (
            says.TrainGroup(group=_GROUP),
            says.CloseBatch(batch_id=2, policy_version=4, groups=1, samples=2, trained_tokens=90, engines_idle=True),
            says.SaveCheckpoint(
                directory="/run/step-1", policy_version=1, beside={"control.msgpack": b"\x81\xa1a\x01"}
            ),
        ),
    ),
    (
        says.TrainingEvent,
        (
            says.TrainerReady(rank=0, ranks=2, policy_version=0, parameters=900, state_hash=2**63),
            says.StepReport(
                rank=0, batch_id=2, policy_version=4, base_version=3, state_hash=5, source=SOURCE, metrics={"loss": 0.5}
            ),
        ),
    ),
    (ParentMessage, (StepFinished(step=3, policy_version=3, metrics={"reward/mean": 0.5, "bad": float("nan")}),)),
    (
        stage.RewardOrder,
        (
            stage.ScoreGroups(
                groups=(
                    stage.ScoreGroup(5, (stage.CompletionToScore(0, 7, 3, b"\1\0\0\0" * 9, FinishReason.LENGTH),)),
                ),
                prompts=(PROMPT,),
            ),
            stage.LoadRewardSet(reward_version=2, rewards=(REWARD,)),
            stage.RememberLimits(reward_version=2, slowest_s={"score": {"medium": 0.5}}),
        ),
    ),
    (
        stage.RewardResult,
        (
            stage.GroupsScored(
                groups=(stage.GroupScored(5, (stage.SampleReward(reward=0.5, parts={"a": 1.0}, calls=(_CALL,)),)),)
            ),
            stage.RewardSetLoaded(reward_version=2, problems=("no",)),
        ),
    ),
)


def _more_items() -> Iterator[tuple[Any, Sequence[Any]]]:
    """Unions of which a plain instance of each member will do."""
    for union in (
        reward_changes.RewardRequest,
        reward_changes.RewardReply,
        *(getattr(judge_messages, name) for name in dir(judge_messages) if name.endswith(("Order", "Event", "Report"))),
        *(getattr(supervisor_orders, name) for name in dir(supervisor_orders) if name.endswith("Order")),
    ):
        members = getattr(union, "__args__", (union,))
        found = [made for member in members if (made := _plain_instance(member)) is not None]
        if found:
            yield union, found


_PLAIN: dict[str, Any] = {
    "int": 3,
    "float": 0.5,
    "str": "name",
    "bool": True,
    "Reward": REWARD,
    "tuple[str, ...]": ("a", "b"),
}


def _plain_instance(kind: Any) -> Any:
    """None where a field must be given that is not plain."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return None
    values = {f.name: _PLAIN.get(str(getattr(f.type, "__name__", f.type))) for f in msgspec.structs.fields(kind)}
    if any(values[field.name] is None for field in msgspec.structs.fields(kind) if field.required):
        return None
    return kind(**{name: value for name, value in values.items() if value is not None})


def _codecs() -> list[tuple[WireCodec[Any], Sequence[Any]]]:
    limits = WireLimits(message_bytes=1 << 25, frame_bytes=1 << 24, body_bytes=1 << 24, frames=24)
    return [(WireCodec(kind, limits, raw_frame_bytes=_RAW_FROM), items) for kind, items in (*_ITEMS, *_more_items())]


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

_GREETING = Greeting(item_type="Item", role=Role.SENDER, window=4, message_bytes=1 << 20, session="s-1", name="far")


def conversation_target() -> Target:
    """A whole conversation with one end. The first frame is the script: which end, then how many frames each message
    has; messages come from the peer, and those of 16 frames or more from a stranger."""
    encoded = msgspec.msgpack.encode(_GREETING)
    as_receiver = msgspec.msgpack.encode(msgspec.structs.replace(_GREETING, role=Role.RECEIVER))
    header = {kind: seed(pack_header(kind), _HEADER) for kind in Kind}
    body = seed(msgspec.msgpack.encode({"a": 1}), MSGPACK)
    greeting, other = seed(encoded, MSGPACK), seed(as_receiver, MSGPACK)

    def item(number: int) -> tuple[Seed, Seed]:
        return seed(pack_header(Kind.ITEM, number), _HEADER), body

    end = seed(pack_header(Kind.END, 2), _HEADER)
    credit = seed(pack_header(Kind.CREDIT, 1), _HEADER)
    reason = seed(b"why it is broken", PLAIN)
    made = [
        message(
            seed(bytes((0, 2, 2, 2, 2, 1, 1)), PLAIN),
            header[Kind.HELLO],
            greeting,
            header[Kind.READY],
            greeting,
            *item(0),
            *item(1),
            end,
            header[Kind.BYE],
        ),
        message(seed(bytes((0, 2, 2, 2)), PLAIN), header[Kind.READY], greeting, *item(0), header[Kind.BROKEN], reason),
        message(
            seed(bytes((1, 2, 1, 1, 1)), PLAIN),
            header[Kind.WELCOME],
            other,
            header[Kind.CREDIT],
            credit,
            header[Kind.GOODBYE],
        ),
        message(seed(bytes((2, 2, 2, 2)), PLAIN), header[Kind.WELCOME], greeting, *item(0), *item(1)),
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

    role, binds = (Role.RECEIVER, Role.SENDER, Role.RECEIVER, Role.SENDER)[kind], kind in (0, 3)
    greeting = msgspec.structs.replace(_GREETING, role=role)
    make: Callable[..., ReceivingEnd | SendingEnd] = ReceivingEnd if role is Role.RECEIVER else SendingEnd
    end = make(greeting, binds=binds, limits=limits, transmit=transmit)
    end.on_connected()
    sizes = list(script[1:]) or [2]
    for size in sizes + [2] * (len(rest) // 2 + 1):
        if not rest:
            break
        here, rest = rest[: size & 15], rest[size & 15 :]
        received = end.received if isinstance(end, ReceivingEnd) else 0
        end.on_message(Origin(b"stranger" if size >= 16 else b"peer", 1), here)
        if isinstance(end, ReceivingEnd) and end.received > received:
            assert parse_header(here[0]).sequence == received, "an item was taken for another one"
        _check_end(end)
    assert sent <= 4 * len(frames) + 8, "one message was answered by many"
    return f"{role} {end.phase}"


def _check_end(end: ReceivingEnd | SendingEnd) -> None:
    if end.phase is Phase.BROKEN:
        assert end.reason, "broken, and nobody knows why"
    if isinstance(end, ReceivingEnd):
        assert len(end.items) == end.received - end.taken <= end.window, "more items than the window has places"
        if len(end.items) > 1:
            end.take()
    elif end.credit > 0:
        assert end.credit <= end.window
        end.send_item([b"\x90"])


# ---- control, metrics ----------------------------------------------------------------------------------


def control_target() -> Target:
    """The control socket, from its first byte: the length, then the request or the answer."""
    requests = [
        control_protocol.encode_request(control_protocol.ControlRequest(operation=operation, key="k" * 64))
        for operation in (
            reward_changes.ListRewards(request_id=1),
            reward_changes.AttachReward(reward=REWARD),
            reward_changes.ReplaceReward(name="score", reward=REWARD),
            reward_changes.DetachReward(name="score"),
        )
    ]
    answers = [
        control_protocol.encode_answer(answer)
        for answer in (
            control_protocol.ControlRefused(problems=("no", "never")),
            reward_changes.RewardsChanged(request_id=1, reward_version=2, rewards=("a", "b")),
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


def telemetry_target() -> Target:
    """Messages of the metrics socket."""
    head = {"run_id": "run", "sequence": 4, "time": 1.5, "replay": False}
    bodies = ({**head, "metrics": {"reward/mean": 0.5}, "step": 3}, {**head, "message": "x", "figures": {"a": [1]}})

    def run(frames: Sequence[bytes]) -> str:
        read = telemetry.decode_telemetry(list(frames))
        assert type(read.sequence) is int and isinstance(read.fields, dict)
        return "accepted"

    topics = (b"step", b"warning")
    made = [
        message(seed(topic, PLAIN), seed(b"1", PLAIN), seed(msgspec.json.encode(body), JSON))
        for topic in topics
        for body in bodies
    ]
    return Target(name="streams.telemetry", messages=made, run=run, refusals=(WireError,))


def targets() -> list[Target]:
    """All of this module."""
    return [items_target(), conversation_target(), control_target(), telemetry_target()]

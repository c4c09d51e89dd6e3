"""Decoders of the rewards: what processes that run user code say, what the code in the sandbox says, test cases."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import JSON, MSGPACK, PLAIN, Seed, lines_of, message, seed
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls import frames as call_frames
from streamrl.rewards.calls.frames import CallAnswer, CallOrder, FrameReader, answered_values
from streamrl.rewards.inspect import RewardInspection, read_inspections
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.values import CallFailure, CheckedValue
from streamrl.sandbox.cases import read_cases
from streamrl.sandbox.sandbox import SandboxError, read_answer, read_zygote_message
from streamrl.sandbox.values import encode

_COUNT = 3
_ANSWERS = (
    CallAnswer(5, 0.25, [CheckedValue(0.5), CheckedValue(parts={"a": 1.0}), CheckedValue()]),
    CallAnswer(6, 1.5, [CheckedValue(failure=CallFailure(RewardFailureKind.RAISED, "ValueError: x"))] * 3, retire=True),
)
_ORDERS = (CallOrder(5, 0, 2.0, "the text", {"answer": 4, "tests": [{"a": [1, None]}]}),)


def call_answers() -> Target:
    """What a worker reads from a process that runs user code: many frames in one piece of the stream, and cut anywhere.
    The first frame says where the pieces are cut."""

    def run(frames: Sequence[bytes]) -> str:
        reader: FrameReader[CallAnswer] = FrameReader(CallAnswer)
        stream, cut = b"".join(frames[1:]), frames[0][0] if frames and frames[0] else 0
        found = 0
        for piece in (stream[:cut], stream[cut:]):
            for answer in reader.feed(piece):
                values = answered_values(answer, _COUNT)
                assert len(values) == _COUNT
                found += 1
        return f"{found} answers"

    framed = [_framed(msgspec.msgpack.encode(answer)) for answer in _ANSWERS]
    made = [message(seed(bytes((9,)), PLAIN), *framed), message(seed(b"\0", PLAIN), framed[0])]
    return Target(
        name="rewards.call_answers", messages=made, run=run, refusals=(msgspec.DecodeError,), repair=_right_length
    )


def call_orders() -> Target:
    """What such a process reads from the worker."""

    def run(frames: Sequence[bytes]) -> str:
        reader: FrameReader[CallOrder] = FrameReader(CallOrder)
        return f"{len(list(reader.feed(b''.join(frames))))} frames"

    made = [message(_framed(msgspec.msgpack.encode(_ORDERS[0])))]
    return Target(name="rewards.call_orders", messages=made, run=run, refusals=(msgspec.DecodeError,))


def _framed(body: bytes) -> Seed:
    content = struct.pack("<I", len(body)) + body
    return Seed(content, MSGPACK, tuple((a + 4, b + 4) for a, b in MSGPACK.spans_of(body)))


def _right_length(random: Any, frames: list[bytes]) -> list[bytes]:
    return [
        frame if len(frame) < 4 or random.random() < 0.3 else struct.pack("<I", len(frame) - 4) + frame[4:]
        for frame in frames
    ]


def fork_server() -> Target:
    """What the fork server and the worker tell each other."""
    signature = RewardSignature(**_plain_fields(RewardSignature))
    reward = Reward(function="a.py:f", options={"a": {"b": [1, 2.5]}})
    events = (call_frames.RewardsLoaded([signature], ["no"], 1), call_frames.ChildEnded(3, -9))
    orders = (
        call_frames.LoadRewards([reward]),
        call_frames.ForkChild(3, True, 1 << 30),
        call_frames.KillChild(3, True),
    )

    def run(frames: Sequence[bytes]) -> str:
        decode = call_frames.decode_order if len(frames) > 1 else call_frames.decode_event
        return f"accepted {type(decode(frames[0] if frames else b'')).__name__}"

    made = [message(seed(msgspec.msgpack.encode(event), MSGPACK)) for event in events]
    made += [message(seed(msgspec.msgpack.encode(order), MSGPACK), seed(b"order", PLAIN)) for order in orders]
    return Target(name="rewards.fork_server", messages=made, run=run, refusals=(msgspec.DecodeError,))


def _plain_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    values: dict[type, Any] = {int: 2, str: "name", bool: True, float: 0.5}
    return {f.name: values[f.type] for f in msgspec.structs.fields(kind) if f.required and f.type in values} | {
        f.name: () for f in msgspec.structs.fields(kind) if f.required and f.type not in values
    }


def inspections() -> Target:
    """What the process that imported a reward wrote about it."""
    found = RewardInspection(spec="a.py:f", problems=("no",))

    def run(frames: Sequence[bytes]) -> str:
        return f"{len(read_inspections(b''.join(frames)))} inspections"

    made = [message(seed(lines_of(*[msgspec.json.encode(found)] * 2), JSON))]
    return Target(name="rewards.inspections", messages=made, run=run, refusals=())


# ---- the sandbox ---------------------------------------------------------------------------------------


def zygote_messages() -> Target:
    """What the sandbox's own process tells: who it is, and how runs ended."""
    report = {"status": 0, "seconds": 0.5, "cpu_seconds": 0.25, "killed_for": None}
    said = (
        {"layers": ["namespaces", "seccomp"], "missing": {"landlock": "no"}},
        {"run": 3, "report": report},
        {"run": 3, "report": {"error": "no jail"}},
    )

    def run(frames: Sequence[bytes]) -> str:
        return f"accepted {type(read_zygote_message(b''.join(frames))).__name__}"

    made = [message(seed(json.dumps(one).encode(), JSON)) for one in said]
    return Target(name="rewards.zygote", messages=made, run=run, refusals=(SandboxError,))


def code_answers() -> Target:
    """What the code's process says of its module."""
    values: list[Any] = [1, 2.5, "x", None, [[2, {"a": (3,)}]], {1, "b"}, {(1, 2): b"\0"}, 10**2000, 1j, range(3), max]
    answers: list[Any] = [{"values": [encode(value) for value in values]}, {"raised": "ValueError: x"}]

    def run(frames: Sequence[bytes]) -> str:
        answer = read_answer(b"".join(frames))
        return "raised" if answer.values is None else "values"

    made = [message(seed(json.dumps(answer).encode(), JSON)) for answer in answers]
    return Target(name="rewards.code", messages=made, run=run, refusals=())


def test_cases() -> Target:
    """Test cases in a column of a dataset."""
    columns: list[Any] = [
        [{"input": "3 4", "output": "7"}, {"stdin": ["1", "2"], "expected_output": "3"}],
        {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"},
        {"inputs": [[1, 2]], "outputs": [3]},
        ["assert add(3, 4) == 7", "assert add(1, 1) == 2"],
        "def check(candidate):\n    assert candidate(3, 4) == 7",
        json.dumps([{"input": "1", "output": "2"}]),
    ]

    def run(frames: Sequence[bytes]) -> str:
        try:
            column = json.loads(frames[0])
        except (ValueError, IndexError, RecursionError):
            column = frames[0].decode("latin-1") if frames else ""
        return f"{min(3, len(read_cases(column, entry_point='add')))} cases"

    made = [message(seed(json.dumps(column).encode(), JSON)) for column in columns]
    return Target(name="rewards.cases", messages=made, run=run, refusals=(ValueError,))


def targets() -> list[Target]:
    """All of this module."""
    made: list[Callable[[], Target]] = [
        call_answers,
        call_orders,
        fork_server,
        inspections,
        zygote_messages,
        code_answers,
        test_cases,
    ]
    return [make() for make in made]

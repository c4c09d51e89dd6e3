"""Decoders of the rewards: what processes that run user code say, what the code in the sandbox says, test cases."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import JSON, MSGPACK, PLAIN, Seed, message, seed
from streamrl.base.types import RewardFailureKind
from streamrl.rewards.calls.frames import CallAnswer, FrameReader, answered_values
from streamrl.rewards.sandbox.cases import read_cases
from streamrl.rewards.sandbox.sandbox import SandboxError, read_answer, read_zygote_message
from streamrl.rewards.sandbox.values import encode
from streamrl.rewards.values import CallFailure, CheckedValue

_COUNT = 3
_ANSWERS = (
    CallAnswer(5, 0.25, [CheckedValue(0.5), CheckedValue(parts={"a": 1.0}), CheckedValue()]),
    CallAnswer(6, 1.5, [CheckedValue(failure=CallFailure(RewardFailureKind.RAISED, "ValueError: x"))] * 3, retire=True),
)


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


def _framed(body: bytes) -> Seed:
    content = struct.pack("<I", len(body)) + body
    return Seed(content, MSGPACK, tuple((a + 4, b + 4) for a, b in MSGPACK.spans_of(body)))


def _right_length(random: Any, frames: list[bytes]) -> list[bytes]:
    return [
        frame if len(frame) < 4 or random.random() < 0.3 else struct.pack("<I", len(frame) - 4) + frame[4:]
        for frame in frames
    ]


# ---- the sandbox ---------------------------------------------------------------------------------------


def zygote_messages() -> Target:
    """What the sandbox's own process tells: who it is, and how runs ended."""
    report = {"status": 0, "seconds": 0.5, "cpu_seconds": 0.25, "timed_out": False}
    said = (
        {"type": "LayersFound", "active": ["namespaces", "seccomp"], "missing": {"landlock": "no"}},
        {"type": "RunEnded", "run": 3, "report": report},
        {"type": "RunEnded", "run": 3, "error": "no jail"},
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
    made: list[Callable[[], Target]] = [call_answers, zygote_messages, code_answers, test_cases]
    return [make() for make in made]

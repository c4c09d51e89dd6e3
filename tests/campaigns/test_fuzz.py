"""Every decoder takes any bytes: a value or its one declared error, in bounded time and memory.

A few hundred executions a target here; the campaign is ``python -m campaigns fuzz``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from campaigns.fuzz import execution
from campaigns.fuzz.campaign import every_target
from campaigns.fuzz.execution import Target, check_seeds, input_of, run_inputs, run_slice
from campaigns.fuzz.seeds import JSON, MSGPACK, PLAIN, message, seed
from streamrl.base.errors import RecipeError
from streamrl.base.types import FinishReason, Prompt, RewardCall, token_array
from streamrl.comm.wire import WireCodec
from streamrl.rewards.reward_messages import (
    CompletionToScore,
    GroupScored,
    GroupsScored,
    RewardOrder,
    RewardResult,
    SampleReward,
    ScoreGroup,
    ScoreGroups,
)
from streamrl.run.prompts.data_directory import find_files


def test_no_decoder_is_surprised() -> None:
    targets = every_target()
    refused = 0
    for target in targets.values():
        check_seeds(target)
        found = run_slice(target, 0, target.quick)
        assert found.fault is None, found.fault
        assert sum(found.outcomes.values()) == target.quick
        refused += sum(count for outcome, count in found.outcomes.items() if outcome.startswith("refused"))
    executions = sum(target.quick for target in targets.values())
    assert 0.2 * executions < refused < 0.9 * executions, "mutations are too tame, or too wild"


def test_what_honest_peers_send_is_never_too_large() -> None:
    """Far more in one message than any stage sends: many groups, with tests of programs, and small completions."""
    columns: dict[str, Any] = {
        "tests": [{"input": "3 4\n", "output": "7\n"}] * 20,
        "grid": [[n % 9] * 20 for n in range(20)],
    }
    prompts = tuple(Prompt(prompt_id=f"p-{n}", token_ids=token_array(range(200)), columns=columns) for n in range(700))
    completions = tuple(CompletionToScore(n, n, 0, bytes(40), FinishReason.STOP) for n in range(700))
    groups = tuple(ScoreGroup(n, completions[n : n + 1]) for n in range(700))
    call = RewardCall(function="reward.py:score", seconds=0.25, limit_s=1.0, value=0.5)
    scored = SampleReward(reward=0.5, parts={"format": 1.0, "answer": 0.0}, seconds=0.25, calls=(call, call))
    for union, item in (
        (RewardOrder, ScoreGroups(groups=groups, prompts=prompts)),
        (RewardResult, GroupsScored(groups=tuple(GroupScored(n, (scored,) * 8) for n in range(1000)))),
    ):
        codec: WireCodec[Any] = WireCodec(union)
        frames = codec.encode(item)
        assert len(frames[0]) > 700_000
        assert codec.decode(frames) == item


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a"])
def test_splits_of_a_dataset_lie_in_its_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_bytes(msgspec.json.encode({"splits": [name]}))
    with pytest.raises(RecipeError, match="no file of that directory"):
        find_files(tmp_path)


# ---- what sees a fault is tested itself ----------------------------------------------------------------


def of(run: Callable[[Sequence[bytes]], str]) -> Target:
    return Target(name="planted", messages=[message(seed(b"abcd", PLAIN))], run=run, refusals=(KeyError,))


def crash(frames: Sequence[bytes]) -> str:
    return str(ctypes.string_at(0)) if frames[0][:1] == b"a" else "fine"


def spin(frames: Sequence[bytes]) -> str:
    while frames[0][:1] == b"a":
        pass
    return "fine"


def raise_another(frames: Sequence[bytes]) -> str:
    raise KeyError if frames[0][:1] != b"a" else IndexError("surprise")


def grow(frames: Sequence[bytes]) -> str:
    return str(len(b"x" * (40 << 20 if frames[0][:1] == b"a" else 1)))


def leave(frames: Sequence[bytes]) -> str:
    return os._exit(0) if frames[0][:1] == b"a" else "fine"


def mean_another(frames: Sequence[bytes]) -> str:
    assert frames[0][:1] != b"a", "it means something else"
    return "fine"


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        (crash, "crash", "SIGSEGV"),
        (spin, "hang", "processor time"),
        (raise_another, "crash", "IndexError: surprise"),
        (grow, "memory", "the peak grew by"),
        (leave, "crash", "exit code 0"),
        (mean_another, "meaning", "it means something else"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_seen_and_runs_again(
    run: Callable[[Sequence[bytes]], str], kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "CPU_LIMIT_S", 0.5)  # far more than 40 MB of fresh pages take on a busy machine
    target = of(run)
    fault = run_slice(target, 0, 500).fault
    assert fault is not None
    assert (fault.kind, fault.frames[0][:1]) == (kind, b"a")
    assert words in fault.reason
    assert fault.frames == input_of(target, fault.number)
    again = run_inputs(target, [fault.frames]).fault
    assert again is not None and again.kind == kind
    assert run_inputs(target, [[b"b"]]).fault is None


def test_mutations_know_the_structure() -> None:
    """The places of all values are found, and nearly every mutation changes something."""
    packed = b"\x82\xa1a\x93\x01\xcd\x01\x00\xc0\xa1b\xd4\x01i"
    assert {b"\x93\x01\xcd\x01\x00\xc0", b"\x01", b"\xcd\x01\x00", b"\xc0"} <= {
        packed[a:b] for a, b in seed(packed, MSGPACK).spans
    }
    text = b'{"a": [1, "x\\"]"], "b": null, "c": -1.5}'
    assert {b'[1, "x\\"]"]', b"null", b"-1.5", b'"x\\"]"'} <= {text[a:b] for a, b in seed(text, JSON).spans}
    target = of(grow)
    inputs = {b"|".join(input_of(target, number)) for number in range(300)}
    assert len(inputs) > 150

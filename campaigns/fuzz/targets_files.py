"""Decoders of the files of a run: what processes, checkpoints and logs leave for whoever comes after."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from streamrl.journal.control_file import read_control_file
from streamrl.journal.kept_state import CONTROL_FILE, KEPT_SCHEMA, ControlSnapshot, KeptControl

from campaigns.fuzz.execution import Target
from campaigns.fuzz.held_file import HeldPath
from campaigns.fuzz.seeds import JSON, MSGPACK, TOML, Grammar, lines_of, message, seed
from campaigns.fuzz.targets_streams import REWARD
from streamrl.base.errors import StreamRLError
from streamrl.base.types import Prompt, TrajectoryId, token_array
from streamrl.buffers.rollout_buffer import PromptTicket
from streamrl.learning.state.durable_files import DIGESTS, read_digests
from streamrl.observe.report.trajectory_trace import TRACE_SCHEMA, StepLine, TraceHeader, TrajectoryLine, read_trace
from streamrl.plan.topology import ProcessPlan, Role, Topology, read_topology
from streamrl.rewards.kept_rewards import REWARDS_FILE, KeptRewards, read_rewards_file
from streamrl.run.checkpoints import read_scores
from streamrl.supervise.exit_reason import ExitKind, ExitReason, read_reason, reason_path

_REFUSALS = (StreamRLError,)
_ID = TrajectoryId(prompt_id="p-1", group_id=3, sample=1)


def on_file(
    name: str,
    path: Path,
    contents: Sequence[bytes],
    grammar: Grammar,
    read: Callable[[], Any],
    refusals: tuple[type[Exception], ...] = _REFUSALS,
    **options: Any,
) -> Target:
    """A target that reads the file ``path``, which holds the frame."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def run(frames: Sequence[bytes]) -> str:
        write(path, b"".join(frames))
        return "none" if read() is None else "accepted"

    made = [message(seed(content, grammar)) for content in contents]
    return Target(name=name, messages=made, run=run, refusals=refusals, **options)


def write(path: Path, content: bytes) -> None:
    """As ``write_bytes``, in half its time."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def in_memory(
    name: str,
    path: str,
    contents: Sequence[bytes],
    grammar: Grammar,
    read: Callable[[HeldPath], Any],
    refusals: tuple[type[Exception], ...] = _REFUSALS,
    **options: Any,
) -> Target:
    """A target that reads a file which holds the frame, and asks nothing else of the system. ``path``: whose directory
    ``read`` gets."""
    directory = HeldPath("/run")

    def run(frames: Sequence[bytes]) -> str:
        HeldPath.hold(path, b"".join(frames))
        return "none" if read(directory) is None else "accepted"

    made = [message(seed(content, grammar)) for content in contents]
    return Target(name=name, messages=made, run=run, refusals=refusals, **options)


def _of_processes() -> list[Target]:
    topology = Topology(
        processes=(ProcessPlan(role=Role.CONTROLLER, index=0), ProcessPlan(role=Role.ENGINE, index=1, local=False)),
        endpoints={"controller.steps": "ipc:///run/steps", "engine-1.orders": "tcp://127.0.0.1:5700"},
    )
    reason = ExitReason(kind=ExitKind.CAUSE, message="EngineError: x", monotonic_s=12.5)
    return [
        in_memory("files.topology", "topology.json", [msgspec.json.encode(topology)], JSON, read_topology),
        in_memory(
            "files.exit_reason",
            reason_path(HeldPath(), "engine-0").name,
            [msgspec.json.encode(reason)],
            JSON,
            lambda run: read_reason(run, "engine-0"),
            refusals=(),
        ),
    ]


def _of_logs() -> list[Target]:
    trace_header = TraceHeader(
        schema=TRACE_SCHEMA,
        run_id="run",
        started_at=1.5,
        seed=0,
        max_tokens=448,
        max_model_len=512,
        temperature=1.0,
        prompts_per_batch=32,
        group_size=8,
        rounds="synchronous",
        max_staleness=0,
        engines=1,
        capacity=256,
    )
    ended = TrajectoryLine(
        prompt_id="p-1",
        group=3,
        sample=1,
        attempt=0,
        prompt_tokens=40,
        tokens=90,
        finish_reason="stop",
        outcome="trained",
        round_kind="synchronous",
        launched_s=1.0,
        ended_s=3.5,
        rollout_s=2.0,
        reward=0.5,
    )
    step = StepLine(**_plain_fields(StepLine))
    trace = lines_of(*(msgspec.json.encode(line) for line in (trace_header, ended, step)))

    return [
        in_memory("files.trace", "trace.jsonl", [trace], JSON, lambda run: read_trace(run / "trace.jsonl")),
    ]


def _snapshot() -> ControlSnapshot:
    ticket = PromptTicket(**_plain_fields(PromptTicket))
    return ControlSnapshot(
        queued=(ticket,), waiting=(ticket,), drawn=40, next_group_id=9, sizer={"a": [1.0, {"b": 2}]}, policy={"x": 1}
    )


def _plain_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    values: dict[Any, Any] = {int: 2, str: "name", bool: True, float: 0.5}
    return {field.name: values.get(field.type, {}) for field in msgspec.structs.fields(kind) if field.required}


def _of_checkpoints() -> list[Target]:
    prompt = Prompt(prompt_id="name", token_ids=token_array(range(20)), columns={"answer": 4, "deep": [{"a": None}]})
    control = msgspec.msgpack.Encoder(enc_hook=lambda value: msgspec.msgpack.Ext(1, b"i" + value.tobytes())).encode(
        KeptControl(schema=KEPT_SCHEMA, snapshot=_snapshot(), prompts=(prompt,))
    )
    rewards = msgspec.msgpack.encode(
        KeptRewards(
            reward_version=2,
            rewards=(REWARD,),
            of_recipe=(REWARD,),
            since={"score": 1},
            slowest_s={"score": {"m": 0.5}},
        )
    )
    digests = lines_of(b"ab" * 32 + b"  state.safetensors", b"cd" * 32 + b"  hf/config.json")
    return [
        in_memory("files.control", CONTROL_FILE, [control], MSGPACK, read_control_file),
        in_memory("files.rewards", REWARDS_FILE, [rewards], MSGPACK, read_rewards_file),
        in_memory(
            "files.scores", "scores.json", [b'{"1":0.5,"20":-1}'], JSON, lambda run: read_scores(run / "scores.json")
        ),
        in_memory("files.digests", DIGESTS, [digests], TOML, read_digests),
    ]


def targets() -> list[Target]:
    """All of this module."""
    return [*_of_processes(), *_of_logs(), *_of_checkpoints()]

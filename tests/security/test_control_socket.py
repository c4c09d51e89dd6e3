"""S17: the control socket of a run: who may do what, how fast it answers, and bytes that nobody should send."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import socket
import stat
import struct
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from streamrl.base.errors import RecipeError, StreamRLError, WireError
from streamrl.launch import control_protocol, control_socket
from streamrl.launch.control_protocol import (
    LARGEST_REQUEST,
    ChangeSettings,
    ControlAnswer,
    ControlOperation,
    ControlRefused,
    ControlRequest,
    DrainRun,
    ReadStatus,
    SteerRun,
    decode_answer,
    decode_request,
    encode,
    is_allowed,
    length_of,
)
from streamrl.launch.control_socket import ControlServer, ask_control, read_key, serving_control
from streamrl.recipe.rewards import Reward
from streamrl.rewards.reward_messages import (
    AttachReward,
    DetachReward,
    ListRewards,
    ReplaceReward,
    RewardsChanged,
    RewardsListed,
)

LISTED = RewardsListed(request_id=0, reward_version=7)
DETACH = DetachReward(name="style")


def left_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


class Run:
    """Carries out operations by noting them."""

    def __init__(self) -> None:
        self.done: list[ControlOperation] = []
        self.failure: Exception | None = None

    async def carry_out(self, operation: ControlOperation) -> ControlAnswer:
        if self.failure is not None:
            raise self.failure
        self.done.append(operation)
        if isinstance(operation, ListRewards):
            return LISTED
        return RewardsChanged(request_id=0, reward_version=8)


@asynccontextmanager
async def serving(run: Run, path: Path, *, request_limit_s: float = 5.0) -> AsyncIterator[None]:
    server = ControlServer(path, "the key", run.carry_out, request_limit_s=request_limit_s)
    await server.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        yield
        tasks.cancel_scope.cancel()


async def test_looking_is_free_for_this_user_and_changes_need_the_key(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "control"
    async with serving_control(path, tmp_path, run.carry_out):
        key = read_key(tmp_path)
        assert len(key) == 64
        for private in (path, tmp_path / "control.key"):
            assert stat.S_IMODE(private.stat().st_mode) == 0o600
        assert await ask_control(path, ListRewards(), "", 5) == LISTED
        for wrong in ("", key[:-1], "0" * 64, "ключ"):
            refused = await ask_control(path, DETACH, wrong, 5)
            assert isinstance(refused, ControlRefused)
            assert "needs its key (control.key)" in refused.problems[0]
        assert run.done == [ListRewards()]
        attach = AttachReward(reward=Reward(function="m:f", options={"a": [1, {"b": 2.5}]}))
        for operation in (DETACH, attach):
            assert await ask_control(path, operation, key, 5) == RewardsChanged(request_id=0, reward_version=8)
        assert run.done[1:] == [DETACH, attach]
    assert left_in(tmp_path) == []
    with pytest.raises(StreamRLError, match="no run listens at"):
        await ask_control(path, ListRewards(), "", 5)
    with pytest.raises(StreamRLError, match=r"control\.key cannot be read"):
        read_key(tmp_path)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


WHOLE = encode(ControlRequest(operation=ListRewards()))
NONSENSE: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\0\0",
    "no body": struct.pack(">I", 0),
    "half a body": WHOLE[:-1],
    "a length of 4 GiB": struct.pack(">I", 2**32 - 1) + b"x" * 100,
    "one byte too many": framed(b"\xc4" * (LARGEST_REQUEST + 1)),
    "a key without end": framed(msgspec.msgpack.encode(ControlRequest(operation=ListRewards(), key="k" * 70_000))),
    "zeros": framed(bytes(100)),
    "a pickle": framed(pickle.dumps(ControlRequest(operation=ListRewards()))),
    "JSON": framed(b'{"operation": {"type": "ListRewards"}}'),
    "another operation": framed(msgspec.msgpack.encode({"operation": {"type": "Shutdown"}})),
    "another type": framed(msgspec.msgpack.encode({"operation": {"type": "DetachReward", "name": 3}})),
    "a value out of range": framed(
        msgspec.msgpack.encode({"operation": {"type": "AttachReward", "reward": {"function": "f", "timeout_s": -1}}})
    ),
    "nesting without end": framed(nested(LARGEST_REQUEST - 1)),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_is_refused_and_the_run_goes_on(name: str, tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "control"
    async with serving(run, path):
        async with await anyio.connect_unix(path) as stream:
            await stream.send(NONSENSE[name])
            await stream.send_eof()
            answered = bytearray()
            try:
                async for chunk in stream:
                    answered += chunk
            except anyio.BrokenResourceError:
                assert name in (
                    "one byte too many",
                    "a length of 4 GiB",
                    "a key without end",
                    "HTTP",
                )  # closed with bytes unread
        if answered:
            assert isinstance(decode_answer(bytes(answered[4:])), ControlRefused)
        assert run.done == []
        assert await ask_control(path, ListRewards(), "", 5) == LISTED


def test_no_part_of_a_request_decodes_to_anything() -> None:
    for cut in range(1, len(WHOLE) - 4):
        with pytest.raises(WireError):
            decode_request(WHOLE[4:-cut])
    for length in (0, LARGEST_REQUEST + 1, 2**32 - 1):
        with pytest.raises(WireError, match=f"1 to {LARGEST_REQUEST} are allowed"):
            length_of(struct.pack(">I", length), LARGEST_REQUEST)


async def test_who_says_nothing_is_notified_and_takes_no_place(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "control"
    silent = [socket.socket(socket.AF_UNIX) for _ in range(control_socket.MOST_CONNECTIONS)]
    async with serving(run, path, request_limit_s=0.2):
        for one in silent:
            one.connect(str(path))
        told = await ask_control(path, ListRewards(), "", 5)
        assert isinstance(told, ControlRefused)
        assert "open already" in told.problems[0]
        for one in silent:
            answer = decode_answer((await anyio.to_thread.run_sync(one.recv, 1000))[4:])
            assert isinstance(answer, ControlRefused)
            assert "no whole request" in answer.problems[0]
            one.close()
        assert await ask_control(path, ListRewards(), "", 5) == LISTED


async def test_without_descriptors_a_request_waits_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that cannot be taken, since the process has no descriptor left, is taken once it has one again."""
    path = tmp_path / "c"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(Run(), path):
        with socket.socket(socket.AF_UNIX) as client, ExitStack() as descriptors:
            client.settimeout(60)
            descriptors.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 32, limits[1]))
            with suppress(OSError):
                while True:
                    descriptors.callback(os.close, os.dup(client.fileno()))
            client.connect(str(path))
            client.sendall(encode(ControlRequest(operation=ListRewards())))
            with anyio.fail_after(60):
                while not caplog.messages:
                    await anyio.sleep(0.01)
            assert "cannot take a connection: [Errno 24] Too many open files" in caplog.messages[0]
            descriptors.close()
            assert decode_answer((await anyio.to_thread.run_sync(client.recv, 1000))[4:]) == LISTED


@pytest.mark.parametrize(
    ("failure", "problems"),
    [
        (RecipeError("one", "two"), ("one", "two")),
        (StreamRLError("the run has ended"), ("the run has ended",)),
        (StreamRLError("\udcff is not there"), ("the answer could not be written: a ControlRefused cannot be sent: ",)),
        (ZeroDivisionError("secret"), ("ListRewards failed: ZeroDivisionError: the log of the run has more",)),
    ],
)
async def test_what_fails_is_refused(failure: Exception, problems: tuple[str, ...], tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "control"
    async with serving(run, path):
        run.failure = failure
        answer = await ask_control(path, ListRewards(), "", 5)
        assert isinstance(answer, ControlRefused) and len(answer.problems) == len(problems)
        assert all(told.startswith(begin) for told, begin in zip(answer.problems, problems, strict=True))
        run.failure = None
        assert await ask_control(path, ListRewards(), "", 5) == LISTED


async def test_another_user_is_neither_served_nor_told_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = Run(), tmp_path / "control"
    users: list[Callable[[], int]] = [lambda: 12345, control_socket.os.getuid]  # type: ignore[attr-defined]
    async with serving(run, path):
        monkeypatch.setattr(control_socket, "peer_of", lambda stream: (0, users[0]()))
        with pytest.raises(StreamRLError, match="belongs to another user: nothing was sent to it"):
            await ask_control(path, DETACH, "the key", 5)
        async with await anyio.connect_unix(path) as stream:
            await stream.send(encode(ControlRequest(operation=DETACH, key="the key")))
            answer = decode_answer((await stream.receive())[4:])
        assert answer == ControlRefused(problems=("this run belongs to another user",))
        assert run.done == []


async def test_a_path_that_is_too_long_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 107)
    with pytest.raises(StreamRLError, match="TMPDIR"):
        async with serving_control(path, tmp_path, Run().carry_out):
            raise AssertionError("it must not begin")
    assert left_in(tmp_path) == []
    with pytest.raises(StreamRLError, match="107"):
        await ask_control(path, ListRewards(), "", 5)


# ---- a log of changes, and no faster than it may ---------------------------------------------------

REWARD = Reward(function="m:f")
EXAMPLES = (
    ListRewards(), AttachReward(reward=REWARD), ReplaceReward(name="style", reward=REWARD), DetachReward(name="style"),
    DrainRun(), ReadStatus(), SteerRun(order="pause"), ChangeSettings(changes=("training.learning_rate=1e-6",)),
)  # fmt: skip
LOOKS = {"ListRewards", "ReadStatus"}
"""Every operation that needs no key. One that is added here must not change anything, nor tell a secret."""


async def test_a_client_that_asks_without_pause_has_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("streamrl.launch.control_socket.time.monotonic", lambda: now)
    monkeypatch.setattr(control_socket, "BURST", 5)
    async with serving(Run(), tmp_path / "c"):
        answers = [await ask_control(tmp_path / "c", ListRewards(), "", 5) for _ in range(7)]
        assert [isinstance(answer, ControlRefused) for answer in answers] == [False] * 5 + [True] * 2
        assert isinstance(answers[-1], ControlRefused) and "more than 20 requests a second" in answers[-1].problems[0]
        now += 0.125  # two more
        again = [await ask_control(tmp_path / "c", ListRewards(), "", 5) for _ in range(3)]
        assert [isinstance(answer, ControlRefused) for answer in again] == [False, False, True]


async def test_changes_and_wrong_keys_leave_a_line_without_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(Run(), tmp_path / "c"):
        await ask_control(tmp_path / "c", ListRewards(), "", 5)
        assert caplog.messages == []
        await ask_control(tmp_path / "c", DetachReward(name="style"), "the key", 5)
        await ask_control(tmp_path / "c", DetachReward(name="style"), "sesame", 5)
    changed, refused = caplog.messages
    assert changed.endswith(f"pid {os.getpid()} asked, with the key, for DetachReward('style')")
    assert f"pid {os.getpid()}" in refused and "wrong key" in refused and "sesame" not in refused
    assert "the key'" not in caplog.text


async def test_what_a_reward_is_given_is_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = Reward(function="judges.py:strict", options={"api_key": "swordfish", "headers": [{"x": "swordfish"}]})
    async with serving(Run(), tmp_path / "c"):
        for key in ("the key", "sesame"):
            await ask_control(tmp_path / "c", AttachReward(reward=reward), key, 5)
            await ask_control(tmp_path / "c", ReplaceReward(name="style", reward=reward), key, 5)
    assert "swordfish" not in caplog.text and len(caplog.messages) == 4
    assert [message.rpartition(" for ")[2] for message in caplog.messages[:2]] == [
        "AttachReward('strict')",
        "ReplaceReward('style', 'strict')",
    ]


async def test_every_operation_needs_the_key_but_those_that_look() -> None:
    operations = typing.get_args(control_protocol.ControlOperation)
    assert {kind.__name__ for kind in control_protocol.READ_ONLY} == LOOKS
    assert {type(operation) for operation in EXAMPLES} == set(operations), "add an example of the new operation"
    for operation in EXAMPLES:
        looks = type(operation).__name__ in LOOKS
        for wrong in ("", "the ke", "the key ", "THE KEY"):
            assert is_allowed(ControlRequest(operation=operation, key=wrong), "the key") == looks
        assert is_allowed(ControlRequest(operation=operation, key="the key"), "the key")

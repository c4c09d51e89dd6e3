"""S17: the control socket answers no faster than it may, and changes leave a line in the log.

Who may do what, and bytes that nobody should send: ``tests/comm/test_control_socket.py``.
"""

from __future__ import annotations

import logging
import os
import typing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from streamrl.base.reward_changes import (
    AttachReward,
    DetachReward,
    ListRewards,
    ReplaceReward,
    RewardsChanged,
    RewardsListed,
)
from streamrl.recipe.rewards import Reward
from streamrl.remote import control_protocol, control_socket
from streamrl.remote.control_protocol import (
    ControlAnswer,
    ControlOperation,
    ControlRefused,
    ControlRequest,
    DrainRun,
    is_allowed,
)
from streamrl.remote.control_socket import ControlServer, ask_control

pytestmark = pytest.mark.asyncio
REWARD = Reward(function="m:f")
EXAMPLES = (
    ListRewards(),
    AttachReward(reward=REWARD),
    ReplaceReward(name="style", reward=REWARD),
    DetachReward(name="style"),
    DrainRun(),
)
LOOKS = {"ListRewards"}
"""Every operation that needs no key. One that is added here must not change anything, nor tell a secret."""


async def carry_out(operation: ControlOperation) -> ControlAnswer:
    if isinstance(operation, ListRewards):
        return RewardsListed(request_id=0, reward_version=1)
    return RewardsChanged(request_id=0, reward_version=2)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[ControlServer]:
    server = ControlServer(path, "the key", carry_out)
    await server.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        yield server
        tasks.cancel_scope.cancel()


async def test_whoever_asks_without_pause_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("streamrl.remote.control_socket.time.monotonic", lambda: now)
    monkeypatch.setattr(control_socket, "BURST", 5)
    async with serving(tmp_path / "c"):
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
    async with serving(tmp_path / "c"):
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
    async with serving(tmp_path / "c"):
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

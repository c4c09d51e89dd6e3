"""Sockets that a cleaner of temporary files took away from a run that goes on: those besides its streams."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from builders.processes import until

from streamrl.base.errors import StreamRLError
from streamrl.comm import zmq_sockets
from streamrl.launch import control_socket
from streamrl.launch.control_protocol import ControlAnswer, ControlOperation, ReadStatus
from streamrl.launch.control_socket import ask_control, serving_control
from streamrl.observe import telemetry
from streamrl.observe.telemetry import TelemetryPublisher, TelemetrySubscriber
from streamrl.rewards.reward_messages import RewardsListed
from streamrl.weights.publish import server
from streamrl.weights.publish.server import PublisherServer

LISTED = RewardsListed(request_id=0, reward_version=7)


async def test_commands_reach_a_run_whose_socket_was_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "KEEP_S", 0.05)

    async def carry_out(operation: ControlOperation) -> ControlAnswer:
        return LISTED

    path = tmp_path / "control"
    async with serving_control(path, tmp_path, carry_out):
        await anyio.Path(path).unlink()
        with pytest.raises(StreamRLError, match="no run listens"):
            await ask_control(path, ReadStatus(), "", 5.0)
        await until(path.exists)
        assert await ask_control(path, ReadStatus(), "", 5.0) == LISTED
    assert not path.exists()


def test_metrics_and_weights_outlive_the_files_of_their_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (telemetry, server, zmq_sockets):
        monkeypatch.setattr(module, "KEEP_S", 0.05)
    metrics, weights = tmp_path / "m", tmp_path / "w"
    publisher = TelemetryPublisher(f"ipc://{metrics}", run_id="r")
    parts = PublisherServer(f"ipc://{weights}", "weights")
    parts.start()
    try:
        for path in (metrics, weights):
            path.unlink()
        anyio.run(until, lambda: metrics.exists() and weights.exists())
        publisher.publish("step", {"step": 1})
        with TelemetrySubscriber(publisher.endpoint, topics=("step",)) as subscriber:
            assert subscriber.receive(300) is not None
        parts.check()
    finally:
        publisher.close()
        parts.close()
    assert not metrics.exists() and not weights.exists()

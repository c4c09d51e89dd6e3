"""The metrics socket as documented: a real subscriber, late joiners, and subscribers that never read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from streamrl.base.errors import StreamRLError, WireError
from streamrl.observe.telemetry import TelemetryPublisher, TelemetrySubscriber, decode_telemetry


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/m" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
def publisher(endpoint: str) -> Iterator[TelemetryPublisher]:
    publisher = TelemetryPublisher(endpoint, run_id="run-1", high_water=50)
    yield publisher
    publisher.close()


def _wait_until_sent(publisher: TelemetryPublisher, topic: str, *, sequence: int) -> None:
    with TelemetrySubscriber(publisher.endpoint, topics=(topic,)) as first:
        while (message := first.receive(300)) is not None:
            if message.sequence == sequence:
                return
    raise AssertionError(f"message {sequence} of {topic!r} was never sent")


def test_a_plain_zeromq_subscriber_reads_what_the_document_says(publisher: TelemetryPublisher) -> None:
    publisher.publish("step", {"step": 1, "policy_version": 1, "metrics": {"reward/mean": 0.5}})
    _wait_until_sent(publisher, "step", sequence=1)  # from now on later subscribers get it as a replay
    with zmq.Context() as context, context.socket(zmq.SUB) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.setsockopt(zmq.SUBSCRIBE, b"step")
        plain.connect(publisher.endpoint)
        assert plain.poll(300_000)
        topic, version, body = plain.recv_multipart()
    assert (topic, version) == (b"step", b"1")
    decoded = json.loads(body)
    assert abs(decoded.pop("time") - time.time()) < 60
    assert decoded == {
        "run_id": "run-1",
        "sequence": 1,
        "replay": True,
        "step": 1,
        "policy_version": 1,
        "metrics": {"reward/mean": 0.5},
    }


def test_a_late_subscriber_gets_last_then_live_messages(publisher: TelemetryPublisher) -> None:
    """A late subscriber gets the last message of each topic, then live ones."""
    publisher.publish("run", {"state": "started"})
    for step in range(1, 6):
        publisher.publish("step", {"step": step})
    _wait_until_sent(publisher, "step", sequence=5)  # who joins before the thread has sent them gets them live
    with TelemetrySubscriber(publisher.endpoint) as late:
        first, second = late.receive(300), late.receive(300)
        assert first is not None
        assert second is not None
        assert (first.topic, first.replay, first.fields) == ("run", True, {"state": "started"})
        assert (second.topic, second.replay, second.fields, second.sequence) == ("step", True, {"step": 5}, 5)
        publisher.publish("step", {"step": 6})
        live = late.receive(300)
        assert live is not None
        assert (live.replay, live.sequence, late.lost) == (False, 6, 0)
        with TelemetrySubscriber(publisher.endpoint) as later:  # the same subscription as the first one's
            replayed = [later.receive(300), later.receive(300)]
            assert [message and (message.topic, message.sequence) for message in replayed] == [("run", 1), ("step", 6)]
            # The replay for the second one reaches the first one too, and is not shown to it twice.
            publisher.publish("step", {"step": 7})
            again = late.receive(300)
            assert again is not None
            assert (again.sequence, again.replay) == (7, False)


def test_topics_are_filtered_and_silence_is_none(publisher: TelemetryPublisher) -> None:
    publisher.publish("run", {"state": "started"})
    with TelemetrySubscriber(publisher.endpoint, topics=("evaluation",)) as subscriber:
        assert subscriber.receive(0.2) is None


def test_unwritable_messages_are_dropped(publisher: TelemetryPublisher) -> None:
    """Messages that cannot be written are dropped, and the socket goes on."""
    with TelemetrySubscriber(publisher.endpoint) as subscriber:
        for body in ({"text": "\ud800"}, {"value": object()}):
            publisher.publish("step", body)
        publisher.publish("step", {"value": 1})
        message = subscriber.receive(300)
        assert message is not None and (message.fields["value"], message.sequence) == (1, 3)
        assert publisher.dropped == 2


def test_a_stalled_subscriber_never_blocks(tmp_path: Path) -> None:
    """A stalled subscriber never blocks the run, and its lost messages are counted."""
    publisher = TelemetryPublisher(f"ipc://{tmp_path}/m", run_id="run-1", high_water=20)
    body = {"filler": "x" * 20_000}
    publisher.publish("run", {"state": "started"})
    stalled = TelemetrySubscriber(publisher.endpoint, high_water=1)
    reader = TelemetrySubscriber(publisher.endpoint, topics=("run", "step"), high_water=10_000)
    try:
        assert stalled.receive(300) is not None, "connected, then never read again"
        assert reader.receive(300) is not None
        received = 0
        for step in range(600):
            publisher.publish("step", {"step": step} | body)
            message = reader.receive(300)
            assert message is not None, f"step {step} did not reach the reader: the stalled one starves it"
            assert message.fields["step"] == step
            received += 1
        assert received == 600
        assert publisher.dropped > 0
        assert reader.lost == 0
        kept = 0
        while stalled.receive(0.2) is not None:  # it wakes up, and learns from the gap what it missed
            kept += 1
        publisher.publish("step", {"step": 600})
        last = stalled.receive(300)
        assert last is not None
        assert last.fields["step"] == 600
        assert stalled.lost == 600 - kept > 0
    finally:
        stalled.close()
        reader.close()
        publisher.close()


def test_nobody_listens_and_close_waits_for_nobody(publisher: TelemetryPublisher) -> None:
    for step in range(1000):
        publisher.publish("step", {"step": step})
    publisher.close()
    publisher.close()
    publisher.publish("step", {"step": 1})


def test_the_last_message_before_close_arrives(publisher: TelemetryPublisher) -> None:
    publisher.publish("run", {"state": "started"})
    with TelemetrySubscriber(publisher.endpoint) as subscriber:
        assert subscriber.receive(300) is not None
        publisher.publish("run", {"state": "finished"})
        publisher.close()
        last = subscriber.receive(300)
        assert last is not None
        assert last.fields == {"state": "finished"}


def test_nothing_is_left_of_an_ipc_socket(tmp_path: Path) -> None:
    publisher = TelemetryPublisher(f"ipc://{tmp_path}/m", run_id="r")
    assert (tmp_path / "m").exists()
    publisher.close()
    assert not (tmp_path / "m").exists()


def test_an_endpoint_in_use_or_wrong_says_so(tmp_path: Path) -> None:
    publisher = TelemetryPublisher("tcp://127.0.0.1:*", run_id="r")
    try:
        with pytest.raises(StreamRLError, match=r"cannot bind tcp://127.0.0.1:\d+: Address already in use; "):
            TelemetryPublisher(publisher.endpoint, run_id="r")
    finally:
        publisher.close()
    with pytest.raises(StreamRLError, match="write tcp://HOST:PORT"):
        TelemetrySubscriber("nonsense")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"step"],
        [b"step", b"2", b"{}"],
        [b"step", b"1", b"{}"],
        [b"step", b"1", b"not json"],
        [b"\xff", b"1", b'{"run_id":"r","sequence":1,"time":1.0,"replay":false}'],
        [b"step", b"1", b'{"run_id":"r","sequence":"one","time":1.0,"replay":false}'],
    ],
)
def test_frames_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode_telemetry(frames)


def test_a_controller_that_was_started_again_is_read_on(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/m"
    first = TelemetryPublisher(endpoint, run_id="r")
    with TelemetrySubscriber(endpoint) as subscriber:
        for step in range(500):
            first.publish("step", {"step": step})
        while (message := subscriber.receive(300)) is None or message.sequence < 500:
            pass
        first.close()
        second = TelemetryPublisher(endpoint, run_id="r")
        for _ in range(400):  # those that are sent before it is connected again pass it by
            second.publish("step", {"step": 700})
            if (message := subscriber.receive(0.1)) is not None:
                break
        second.close()
        assert message is not None and message.fields["step"] == 700 and subscriber.lost == 0

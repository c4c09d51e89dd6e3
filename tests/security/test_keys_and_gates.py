"""S2, S3, S4: sockets that other hosts reach let in known keys only, each role where it belongs, or do not open."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from streamrl.base.errors import StreamRLError, leaves
from streamrl.base.messages import EngineCall, EngineOrder
from streamrl.comm import guarded_sockets
from streamrl.comm.guarded_sockets import GuardedContext, KeyGuard, keys_for
from streamrl.comm.key_gate import KeyGate
from streamrl.comm.socket_options import make_socket
from streamrl.comm.transport_keys import OPEN_TO_ALL, KeyRole, make_keys, public_keys, read_role_keys
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.observe.telemetry import TelemetryPublisher, TelemetrySubscriber
from streamrl.weights.publish.publisher import WeightPublisher

ActAs = Callable[..., None]
OUTCOMES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
LOOPBACK = "tcp://127.0.0.1:*"
# Who binds, whom it lets in, and the kind of socket that connects there.
ENDPOINTS = {
    "engine streams": (KeyRole.CONTROLLER, KeyRole.ENGINE, zmq.ROUTER, zmq.DEALER),
    "rank streams": (KeyRole.CONTROLLER, KeyRole.TRAINER, zmq.ROUTER, zmq.DEALER),
    "weights": (KeyRole.TRAINER, KeyRole.ENGINE, zmq.ROUTER, zmq.DEALER),
    "metrics": (KeyRole.CONTROLLER, KeyRole.OBSERVER, zmq.XPUB, zmq.SUB),
}


@contextmanager
def listening(kind: int, admits: KeyRole, at: str = LOOPBACK) -> Iterator[str]:
    """A socket of this process, as every part of streamrl makes them."""
    context = GuardedContext()
    socket = make_socket(context, kind, endpoint=at, max_frame_bytes=1 << 16)
    try:
        yield guarded_sockets.bind(socket, at, admits)
    finally:
        socket.close(linger=0)
        context.close_gate()
        context.term()


def knock(
    kind: int, endpoint: str, configure: Callable[[zmq.Socket[bytes]], Any] = lambda _: None, patience_ms: int = 300_000
) -> str:
    """The first event of a connection by name, or "silence"."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        configure(socket)
        events: zmq.Socket[bytes] = socket.get_monitor_socket(OUTCOMES)
        try:
            socket.connect(endpoint)
            if not events.poll(patience_ms):
                return "silence"
            return str(zmq.Event(parse_monitor_message(events.recv_multipart())["event"]).name)
        finally:
            socket.disable_monitor()
            events.close(linger=0)


def with_keys(directory: Path, role: KeyRole, serves: KeyRole, known: Path | None = None) -> Callable[..., None]:
    """A process of ``role`` by the keys of ``directory``, for a server of ``known``."""
    pair, server = read_role_keys(directory, role), public_keys(known or directory, serves)[0]

    def configure(socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)

    return configure


@pytest.mark.parametrize("name", ENDPOINTS)
def test_each_role_reaches_what_is_its_own_and_nothing_else(
    keys: Path, act_as: ActAs, tmp_path: Path, name: str
) -> None:
    serves, admits, kind, partner = ENDPOINTS[name]
    others = tmp_path / "others"  # another run's keys, as good as these
    make_keys(others)
    act_as(serves)
    with listening(kind, admits) as endpoint:
        outcomes = {role: knock(partner, endpoint, with_keys(keys, role, serves)) for role in KeyRole}
        assert outcomes == {
            role: "HANDSHAKE_SUCCEEDED" if role is admits else "HANDSHAKE_FAILED_AUTH" for role in KeyRole
        }
        stranger = with_keys(others, admits, serves, known=keys)
        assert knock(partner, endpoint, stranger) == "HANDSHAKE_FAILED_AUTH"
        impostor_expected = with_keys(keys, admits, serves, known=others)  # it would not talk to this server
        assert knock(partner, endpoint, impostor_expected).startswith("HANDSHAKE_FAILED")
        assert knock(partner, endpoint).startswith("HANDSHAKE_FAILED")  # no key at all
        # A key that was added is let in at once, one that was taken away no more.
        removed = with_keys(keys, admits, serves)
        file = keys / f"{admits.value}.public"
        file.write_bytes(file.read_bytes() + public_keys(others, admits)[0] + b"\n")
        assert knock(partner, endpoint, stranger) == "HANDSHAKE_SUCCEEDED"
        file.write_bytes(public_keys(others, admits)[0])
        assert knock(partner, endpoint, removed) == "HANDSHAKE_FAILED_AUTH"
        # Where nobody can be known nobody is let in.
        file.unlink()
        assert knock(partner, endpoint, stranger) == "HANDSHAKE_FAILED_AUTH"


async def test_streams_run_between_processes_with_keys(act_as: ActAs) -> None:
    act_as(KeyRole.CONTROLLER)
    async with zmq_receiver(EngineOrder, LOOPBACK, bind=True, guard=KeyGuard(KeyRole.ENGINE)) as receives:
        act_as(KeyRole.ENGINE)
        async with zmq_sender(EngineOrder, receives.endpoint, bind=False, guard=KeyGuard(KeyRole.CONTROLLER)) as sends:
            await sends.send(EngineCall(order_id=1, method="resume"))
            assert await receives.receive() == EngineCall(order_id=1, method="resume")


def test_metrics_are_read_with_the_key_of_an_observer(act_as: ActAs) -> None:
    act_as(KeyRole.CONTROLLER)
    publisher = TelemetryPublisher(LOOPBACK, run_id="r")
    try:
        act_as(KeyRole.OBSERVER)
        with TelemetrySubscriber(publisher.endpoint) as subscriber:
            publisher.publish("run", {"state": "started"})
            message = subscriber.receive(5)
            assert message is not None and message.fields == {"state": "started"}
        act_as(KeyRole.ENGINE)
        with TelemetrySubscriber(publisher.endpoint) as subscriber:
            publisher.publish("run", {"state": "finished"})
            assert subscriber.receive(0.2) is None
    finally:
        publisher.close()


# ---- nothing opens without keys --------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*", "tcp://10.1.2.3:5700"])
def test_no_socket_leaves_the_host_without_keys(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.delenv("STREAMRL_KEYS", raising=False)
    context = GuardedContext()
    try:
        for kind, attempt in ((zmq.ROUTER, guarded_sockets.bind), (zmq.DEALER, guarded_sockets.connect)):
            socket = make_socket(context, kind, endpoint=endpoint, max_frame_bytes=1)
            with socket, pytest.raises(StreamRLError, match="can be reached from other hosts, and this process has no"):
                attempt(socket, endpoint, KeyRole.ENGINE)
        with pytest.raises(StreamRLError, match="can be reached from other hosts"):
            TelemetryPublisher(endpoint, run_id="r")
        with pytest.raises(StreamRLError, match="can be reached from other hosts"):
            WeightPublisher(endpoint, run_id="r", rank=0, shards=[]).start()
    finally:
        context.destroy(linger=0)


def test_the_recipe_may_say_that_everybody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPEN_TO_ALL, "none")
    with listening(zmq.ROUTER, KeyRole.ENGINE, "tcp://0.0.0.0:*") as endpoint:
        assert knock(zmq.DEALER, endpoint.replace("0.0.0.0", "127.0.0.1")) == "HANDSHAKE_SUCCEEDED"


def test_a_stranger_leaves_a_line_and_the_self_test_none(
    act_as: ActAs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = tmp_path / "others"
    make_keys(others)
    act_as(KeyRole.CONTROLLER)
    with listening(zmq.ROUTER, KeyRole.ENGINE) as endpoint:
        assert caplog.messages == []
        stranger = with_keys(others, KeyRole.ENGINE, KeyRole.CONTROLLER, known=tmp_path / "keys")
        assert [knock(zmq.DEALER, endpoint, stranger) for _ in range(9)] == ["HANDSHAKE_FAILED_AUTH"] * 9
    assert len(caplog.messages) == 4, "of the first, second, fourth, eighth: nobody fills a disk by trying"
    assert "127.0.0.1" in caplog.messages[0] and "its key is not known there" in caplog.messages[0]


# ---- the self-test at start: what would let strangers in does not start ----------------------------


def gate_in_another_context(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = GuardedContext()
    there = elsewhere.gate
    monkeypatch.setattr(GuardedContext, "gate", property(lambda _: there))

    def close(_: GuardedContext) -> None:
        there.close()
        elsewhere.term()

    monkeypatch.setattr(GuardedContext, "close_gate", close)


def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(KeyGate):
        def __init__(self, requests: zmq.Socket[bytes]) -> None:
            requests.setsockopt(zmq.LINGER, 0)
            self._requests, self._domains, self._stop_fd = requests, {}, -1
            self._unknown_keys = frozenset()
            self.ended_fd = os.eventfd(0)

        def close(self) -> None:
            self._requests.close()

    monkeypatch.setattr(guarded_sockets, "KeyGate", Absent)


def gate_that_lets_all_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyGate, "_is_known", lambda *_: True)


def plain_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that was forgotten: the gate is there, and is never asked."""
    guard = guarded_sockets.guard_listener

    def forgotten(socket: zmq.Socket[bytes], endpoint: str, admits: KeyRole) -> KeyGate | None:
        gate = guard(socket, endpoint, admits)
        socket.setsockopt(zmq.CURVE_SERVER, 0)
        return gate

    monkeypatch.setattr(guarded_sockets, "guard_listener", forgotten)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (gate_in_another_context, "an unknown key was not refused"),
        (no_gate, "an unknown key was not refused"),
        (gate_that_lets_all_in, "an unknown key was let in"),
        (plain_socket, "no key was let in|an unknown key was not refused"),
    ],
)
def test_a_process_that_would_let_strangers_in_does_not_start(
    act_as: ActAs, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    act_as(KeyRole.CONTROLLER)
    monkeypatch.setattr(guarded_sockets, "STRANGER_MS", 1500)
    fault(monkeypatch)
    with pytest.raises(StreamRLError, match=said), listening(zmq.ROUTER, KeyRole.ENGINE):
        pytest.fail("it started")


def test_the_self_test_needs_more_than_an_enforced_domain(act_as: ActAs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test does not rely on the enforced domain alone. libzmq without a gate and without an enforced domain
    lets everybody in: the trap of M3."""
    act_as(KeyRole.CONTROLLER)

    def unenforced(socket: zmq.Socket[bytes], endpoint: str, admits: KeyRole) -> KeyGate:
        pair = keys_for(endpoint)
        assert pair is not None
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        assert isinstance(socket.context, GuardedContext)
        return socket.context.gate

    no_gate(monkeypatch)
    monkeypatch.setattr(guarded_sockets, "guard_listener", unenforced)
    with pytest.raises(StreamRLError, match="an unknown key was let in"), listening(zmq.ROUTER, KeyRole.ENGINE):
        pytest.fail("it started")


# ---- the gate is watched ----------------------------------------------------------------------------


class GateFault(Exception):
    pass


def break_gate(gate: KeyGate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next question kills the thread."""

    def fail(*_: object) -> None:
        raise GateFault("planted")

    monkeypatch.setattr(gate, "_answer", fail)


async def test_a_dead_gate_ends_streams_and_admits_nobody(
    keys: Path, act_as: ActAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of the gate ends the streams, and nobody is admitted."""
    act_as(KeyRole.CONTROLLER)
    context = GuardedContext()
    monkeypatch.setattr(GuardedContext, "_instance", context)  # its gate does not come back
    with pytest.raises(BaseExceptionGroup) as raised:
        async with zmq_receiver(EngineOrder, LOOPBACK, bind=True, guard=KeyGuard(KeyRole.ENGINE)) as receives:
            break_gate(GuardedContext.instance().gate, monkeypatch)
            outcome = knock(zmq.DEALER, receives.endpoint, with_keys(keys, KeyRole.ENGINE, KeyRole.CONTROLLER), 200)
            assert outcome != "HANDSHAKE_SUCCEEDED"
            await receives.receive()
    context.term()
    (leaf,) = leaves(raised.value)
    assert isinstance(leaf, StreamRLError)
    assert "nobody decides any more who may connect" in str(leaf) and "planted" in str(leaf)


@pytest.mark.parametrize("kind", ["metrics", "weights"])
def test_a_dead_gate_ends_servers_of_metrics_and_weights(
    keys: Path, act_as: ActAs, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The death of the gate ends the processes that serve metrics or weights."""
    serves, admits, _, partner = ENDPOINTS[kind]
    act_as(serves)
    serving: Any = (
        TelemetryPublisher(LOOPBACK, run_id="r")
        if kind == "metrics"
        else WeightPublisher(LOOPBACK, run_id="r", rank=0, shards=[])
    )
    if kind == "weights":
        serving.start()
        context = serving._server._context
    else:
        context = serving._context
    break_gate(context.gate, monkeypatch)
    assert knock(partner, serving.endpoint, with_keys(keys, admits, serves), 200) != "HANDSHAKE_SUCCEEDED"
    context.gate._thread.join(5)
    with pytest.raises(StreamRLError, match="nobody decides any more"):
        if kind == "metrics":
            serving.publish("run", {})
        else:
            serving._server._thread.join(5)
            serving.publish(0, {})
    serving.close()


def test_no_thread_of_a_gate_is_left_behind(act_as: ActAs) -> None:
    act_as(KeyRole.TRAINER)
    before = {thread.name for thread in threading.enumerate()}
    descriptors = len(os.listdir("/proc/self/fd"))
    publisher = WeightPublisher(LOOPBACK, run_id="r", rank=0, shards=[])
    publisher.start()
    assert "key gate" in {thread.name for thread in threading.enumerate()}
    publisher.close()
    assert {thread.name for thread in threading.enumerate()} == before
    assert len(os.listdir("/proc/self/fd")) == descriptors

"""What only streams over ZeroMQ can meet: strangers, liars, the dead, taken addresses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
import zmq
from builders.processes import until

from streamrl.base.errors import StreamBroken, StreamEnded, WireError
from streamrl.base.messages import EngineCall, EngineEvent, EngineLoad, EngineOrder
from streamrl.base.types import Record, TokenArray
from streamrl.comm import socket_options, wire, zmq_sockets, zmq_stream
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.stream_protocol import Hello, Kind, StreamRole
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.wire import WireLimits, pack_header

# Who may connect over tcp: everybody on this host, since no test here has keys.
zmq_sender = partial(zmq_stream.zmq_sender, guard=KeyGuard(KeyRole.CONTROLLER))
zmq_receiver = partial(zmq_stream.zmq_receiver, guard=KeyGuard(KeyRole.CONTROLLER))

NewEndpoint = Callable[[str], str]

CHILD = """
import sys, time, anyio
from streamrl.comm import socket_options
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.base.messages import EngineCall, EngineOrder
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.transport_keys import KeyRole

socket_options.HEARTBEAT_INTERVAL_MS = 0  # it answers the heartbeats of the other end and has none of its own

async def main(role, endpoint, then):
    guard = KeyGuard(KeyRole.CONTROLLER)
    if role == "sender":
        async with zmq_sender(EngineOrder, endpoint, bind=False, window=4, guard=guard) as sends:
            for number in range(3):
                await sends.send(EngineCall(order_id=number, method="resume"))
            await rest(then)
    else:
        async with zmq_receiver(EngineOrder, endpoint, bind=False, window=4, guard=guard) as receives:
            await receives.receive()
            await rest(then)

async def rest(then):
    if then == "block":
        print("ready", flush=True)
        time.sleep(2.5)
    elif then == "sleep":
        print("ready", flush=True)
        await anyio.sleep(3600)
    elif then == "raise":
        raise ValueError("a bad day")

anyio.run(main, *sys.argv[1:])"""


@contextmanager
def child(role: str, endpoint: str, then: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, role, endpoint, then],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert await anyio.to_thread.run_sync(process.stdout.readline) == "ready\n"


@contextmanager
def raw_dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that can say anything."""
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(endpoint)
    try:
        yield dealer
    finally:
        dealer.close(linger=0)


async def answer(dealer: zmq.Socket[bytes]) -> tuple[Kind, bytes]:
    """The next message to a raw peer: its kind and body."""
    await anyio.to_thread.run_sync(dealer.poll, 5000)
    frames = dealer.recv_multipart(zmq.NOBLOCK)
    return Kind(wire.parse_header(frames[0]).kind), b"".join(frames[1:])


def hello_bytes(**changes: Any) -> bytes:
    same = Hello(
        item_type=wire.item_type_name(EngineOrder), role=StreamRole.SENDER, window=4, message_bytes=10**6, session="s"
    )
    return msgspec.msgpack.encode(msgspec.structs.replace(same, **changes))


async def shake_hands(dealer: zmq.Socket[bytes]) -> None:
    dealer.send_multipart([pack_header(Kind.HELLO), hello_bytes()])
    assert (await answer(dealer))[0] is Kind.WELCOME
    dealer.send_multipart([pack_header(Kind.READY), hello_bytes()])
    assert (await answer(dealer))[0] is Kind.CREDIT


# ---- below the handshake -------------------------------------------------------------------------

OLD_PEERS = {
    "noise that looks like ZMTP 1.0": bytes(range(1, 200)),
    "ZMTP 1.0, three messages": b"\x01\x00" + 3 * b"\x02\x00x",
    "ZMTP 2.0, dealer": b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x05hello",
}


def say_raw(endpoint: str, content: bytes) -> socket.socket:
    """A connection that has sent ``content`` below ZMTP; the caller closes it."""
    kind, _, address = endpoint.partition("://")
    connection = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    host, _, port = address.rpartition(":")
    connection.connect(address if kind == "ipc" else (host, int(port)))
    connection.sendall(content)
    return connection


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("in_use", [False, True])
async def test_bytes_of_an_older_zeromq_peer_are_dropped_and_counted(
    new_endpoint: NewEndpoint, transport: str, in_use: bool
) -> None:
    async with zmq_receiver(int, new_endpoint(transport), bind=True) as receives:
        if not in_use:
            await strangers_are_counted(receives)
        async with zmq_sender(int, receives.endpoint, bind=False) as sends:
            await sends.send(1)
            assert await receives.receive() == 1
            if in_use:
                await strangers_are_counted(receives)
            await sends.send(2)
            assert await receives.receive() == 2


async def strangers_are_counted(receives: Any) -> None:
    before = receives.unknown_peers
    connections = [say_raw(receives.endpoint, content) for content in OLD_PEERS.values()]
    while receives.unknown_peers < before + len(OLD_PEERS):
        await anyio.sleep(0.01)
    for connection in connections:
        connection.close()


# ---- handshake -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("receiver_binds", [True, False])
async def test_different_item_types_break_both_ends(
    new_endpoint: NewEndpoint, transport: str, receiver_binds: bool
) -> None:
    first, second = (zmq_receiver, zmq_sender) if receiver_binds else (zmq_sender, zmq_receiver)
    first_type, second_type = EngineEvent, EngineOrder
    async with (
        first(first_type, new_endpoint(transport), bind=True, name="orders") as bound,
        second(second_type, bound.endpoint, bind=False) as connected,
    ):
        sends, receives = (connected, bound) if receiver_binds else (bound, connected)
        with pytest.raises(
            StreamBroken, match=r"the (sender|receiver) carries \w+ \| .*, the (sender|receiver) \w+ \|"
        ):
            await receives.receive()
        with pytest.raises(StreamBroken, match="carries"):
            await sends.send(resume(1) if receiver_binds else LOAD)


def resume(order_id: int) -> EngineCall:
    return EngineCall(order_id=order_id, method="resume")


LOAD = EngineLoad(running=1, waiting=0, kv_cache_usage=0.0, generated_tokens=0)


async def test_two_senders_break(new_endpoint: NewEndpoint) -> None:
    async with (
        zmq_sender(int, new_endpoint("ipc"), bind=True) as bound,
        zmq_sender(int, bound.endpoint, bind=False) as connected,
    ):
        for end in (connected, bound):
            with pytest.raises(StreamBroken, match="both ends are a sender"):
                await end.send(1)


async def test_another_wire_version_is_reported_and_breaks(new_endpoint: NewEndpoint) -> None:
    async with zmq_receiver(EngineOrder, new_endpoint("tcp"), bind=True) as receives:
        with raw_dealer(receives.endpoint) as dealer:
            dealer.send_multipart([pack_header(Kind.HELLO, version=99), b"any other frame"])
            with pytest.raises(StreamBroken, match="wire version 99 at one end, 1 at the other"):
                await receives.receive()
            kind, reason = await answer(dealer)
            assert kind is Kind.REFUSED
            assert b"install the same streamrl" in reason


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_second_peer_is_refused_and_the_first_goes_on(new_endpoint: NewEndpoint, transport: str) -> None:
    async with (
        zmq_receiver(int, new_endpoint(transport), bind=True, name="results") as receives,
        zmq_sender(int, receives.endpoint, bind=False) as first,
    ):
        await first.send(1)
        async with zmq_sender(int, receives.endpoint, bind=False) as second:
            with pytest.raises(StreamBroken, match="in use by another sender"):
                await second.send(666)
        await first.send(2)
        assert [await receives.receive(), await receives.receive()] == [1, 2]


async def test_connecting_before_anybody_binds(new_endpoint: NewEndpoint) -> None:
    endpoint = new_endpoint("ipc")
    async with zmq_sender(int, endpoint, bind=False) as sends, anyio.create_task_group() as tasks:
        tasks.start_soon(sends.send, 5)
        await anyio.sleep(0.15)  # long enough for a refused attempt
        async with zmq_receiver(int, endpoint, bind=True) as receives:
            assert await receives.receive() == 5
            await sends.aclose()


async def test_strangers_at_the_port_are_ignored(new_endpoint: NewEndpoint) -> None:
    async with zmq_receiver(EngineOrder, new_endpoint("tcp"), bind=True) as receives:
        host, port = receives.endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as web, raw_dealer(receives.endpoint) as dealer:
            web.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            for noise in (
                [b"hello"],
                [b"", b""],
                [pack_header(Kind.ITEM), b"\x80"],
                [pack_header(Kind.HELLO), b"\xc1"],
            ):
                dealer.send_multipart(noise)
            dealer.send_multipart([b"x"] * 2000)
            await shake_hands(dealer)
            dealer.send_multipart([pack_header(Kind.ITEM), msgspec.msgpack.encode(resume(3))])
            assert await receives.receive() == resume(3)


# ---- a peer that breaks the protocol -------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([pack_header(Kind.ITEM, 1), b"\x80"], "item 0 was next and ITEM 1 came"),
        ([pack_header(Kind.END, 4)], "item 0 was next and END 4 came"),
        ([pack_header(Kind.CREDIT, 0)], "a sender does not send messages of kind 6"),
        ([pack_header(Kind.ITEM, 0), b"\x81\xa4type\xa4Nope"], "Nope"),
        ([pack_header(Kind.ITEM, 0), b"\xc1"], "malformed"),
        ([pack_header(Kind.ITEM, 0), bytes(3000), bytes(3000)], "over the limit of 4000 bytes"),
        ([pack_header(Kind.ITEM, 0, version=2), b"\x80"], "wire version 2 after a handshake"),
        ([b"noise"], "not streamrl"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_reported(
    new_endpoint: NewEndpoint, frames: list[bytes], message: str
) -> None:
    limits = WireLimits(message_bytes=4000)
    async with zmq_receiver(EngineOrder, new_endpoint("ipc"), bind=True, window=4, limits=limits) as receives:
        with raw_dealer(receives.endpoint) as dealer:
            await shake_hands(dealer)
            dealer.send_multipart(frames)
            with pytest.raises(StreamBroken, match=message):
                await receives.receive()
            kind, reason = await answer(dealer)
            assert kind is Kind.BROKEN
            assert message.encode() in reason


async def test_a_sender_that_ignores_its_window_breaks_the_stream(new_endpoint: NewEndpoint) -> None:
    async with zmq_receiver(EngineOrder, new_endpoint("ipc"), bind=True, window=4) as receives:
        with raw_dealer(receives.endpoint) as dealer:
            await shake_hands(dealer)
            for number in range(5):
                dealer.send_multipart([pack_header(Kind.ITEM, number), msgspec.msgpack.encode(resume(number))])
            while len(receives._end.items) < 4:
                await anyio.sleep(0.001)
            for number in range(4):
                assert await receives.receive() == resume(number)
            with pytest.raises(StreamBroken, match="more than its window of 4"):
                await receives.receive()


async def test_a_frame_over_the_limit_of_the_socket_breaks_the_stream(new_endpoint: NewEndpoint) -> None:
    limits = WireLimits(frame_bytes=1000)
    async with zmq_receiver(EngineOrder, new_endpoint("tcp"), bind=True, window=4, limits=limits) as receives:
        with raw_dealer(receives.endpoint) as dealer:
            await shake_hands(dealer)
            dealer.send_multipart([pack_header(Kind.ITEM), bytes(1001)])
            with pytest.raises(StreamBroken, match="the sender is gone"):
                await receives.receive()


class Bulk(Record):
    tokens: TokenArray


async def test_an_item_over_the_receivers_limit_is_refused(new_endpoint: NewEndpoint) -> None:
    """An item above the limit of the receiver is refused, and the stream goes on."""
    async with (
        zmq_receiver(Bulk, new_endpoint("ipc"), bind=True, limits=WireLimits(message_bytes=5000)) as receives,
        zmq_sender(Bulk, receives.endpoint, bind=False) as sends,
    ):
        with pytest.raises(WireError, match="the receiver takes at most 4984"):
            await sends.send(Bulk(tokens=array("i", bytes(8000))))
        for items in range(1230, 1250):  # across the limit, with the header of a message
            try:
                await sends.send(Bulk(tokens=array("i", bytes(4 * items))))
            except WireError:
                break
            assert len((await receives.receive()).tokens) == items
        assert 1235 < items < 1249
        await sends.send(Bulk(tokens=array("i", [1])))
        assert await receives.receive() == Bulk(tokens=array("i", [1]))


# ---- a peer that dies ----------------------------------------------------------------------------


@pytest.fixture
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no timer ends a wait for a dead peer: only the end of the connection itself can tell of the death."""
    monkeypatch.setattr(socket_options, "HEARTBEAT_INTERVAL_MS", 0)


@pytest.mark.usefixtures("no_heartbeats")
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_killed_sender_breaks_the_receiver_after_its_items(new_endpoint: NewEndpoint, transport: str) -> None:
    async with zmq_receiver(EngineOrder, new_endpoint(transport), bind=True, window=4) as receives:
        with child("sender", receives.endpoint, "sleep") as process:
            await until_ready(process)
            # Sent is handed to libzmq: its thread may not have written yet, and what it has not written dies with it.
            while len(receives._end.items) < 3:
                await anyio.sleep(0.001)
            process.kill()
            process.wait()
            assert [await receives.receive() for _ in range(3)] == [resume(number) for number in range(3)]
            with pytest.raises(StreamBroken, match="the sender is gone"):
                await receives.receive()


async def test_last_messages_of_a_dead_peer_come_first(new_endpoint: NewEndpoint) -> None:
    """Messages that a peer sent before it died come first, even when its death is read at the same time."""
    async with zmq_receiver(EngineOrder, new_endpoint("ipc"), bind=True, window=4) as receives:
        with raw_dealer(receives.endpoint) as dealer:
            await shake_hands(dealer)
            dealer.send_multipart([pack_header(Kind.ITEM), msgspec.msgpack.encode(resume(7))])
            dealer.close(linger=1000)
            time.sleep(0.2)  # noqa: ASYNC251  (a busy event loop: item and disconnection are both there when it turns)
            assert await receives.receive() == resume(7)
            with pytest.raises(StreamBroken, match="the sender is gone"):
                await receives.receive()


@pytest.mark.usefixtures("no_heartbeats")
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_killed_receiver_breaks_a_waiting_sender(new_endpoint: NewEndpoint, transport: str) -> None:
    async with zmq_sender(EngineOrder, new_endpoint(transport), bind=True, window=1) as sends:
        with child("receiver", sends.endpoint, "sleep") as process:
            await sends.send(resume(0))
            await until_ready(process)
            await sends.send(resume(1))
            process.send_signal(signal.SIGKILL)
            with pytest.raises(StreamBroken, match="the receiver is gone"):
                await sends.send(resume(2))


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_the_same_address_serves_a_restarted_peer(new_endpoint: NewEndpoint, transport: str) -> None:
    """A reward worker dies; its successor may be there before the controller has bound again."""
    async with zmq_receiver(EngineOrder, new_endpoint(transport), bind=True, window=4) as receives:
        endpoint = receives.endpoint
        with child("sender", endpoint, "sleep") as process:
            await until_ready(process)
            process.kill()
            with pytest.raises(StreamBroken):
                while True:
                    await receives.receive()
        second = child("sender", endpoint, "end")
        process = second.__enter__()
        await anyio.sleep(0.4)  # the successor meets the broken stream, or no listener
    try:
        for _ in range(2):
            async with zmq_receiver(EngineOrder, endpoint, bind=True, window=4) as receives:
                assert [order.order_id async for order in receives] == [0, 1, 2]
            if process.poll() is None:
                process.wait(300)
            second.__exit__(None, None, None)
            second = child("sender", endpoint, "end")
            process = second.__enter__()
    finally:
        second.__exit__(None, None, None)


async def test_an_exception_in_another_process_is_reported(new_endpoint: NewEndpoint) -> None:
    async with zmq_receiver(EngineOrder, new_endpoint("ipc"), bind=True, window=4, name="results") as receives:
        told = pytest.raises(StreamBroken, match=r"'results'.*the sender failed: ValueError: a bad day")
        with child("sender", receives.endpoint, "raise"), told:
            while True:
                await receives.receive()


async def test_a_peer_that_computes_is_not_dead(new_endpoint: NewEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_options, "HEARTBEAT_INTERVAL_MS", 50)
    monkeypatch.setattr(socket_options, "HEARTBEAT_TIMEOUT_MS", 1000)
    async with zmq_receiver(EngineOrder, new_endpoint("ipc"), bind=True, window=4) as receives:
        with child("sender", receives.endpoint, "block") as process:
            await until_ready(process)  # from here its event loop is blocked for 2.5 s
            assert [order.order_id async for order in receives] == [0, 1, 2]


async def test_a_peer_of_this_host_that_is_stopped_is_not_gone(
    new_endpoint: NewEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither end counts the time: a debugger stops one, and what suspends a job stops both."""
    monkeypatch.setattr(socket_options, "HEARTBEAT_INTERVAL_MS", 50)
    monkeypatch.setattr(socket_options, "HEARTBEAT_TIMEOUT_MS", 300)
    for transport in ("ipc", "tcp"):
        async with zmq_receiver(EngineOrder, new_endpoint(transport), bind=True, window=4) as receives:
            with child("sender", receives.endpoint, "block") as process:
                await until_ready(process)
                process.send_signal(signal.SIGSTOP)
                await anyio.sleep(1.0)
                process.send_signal(signal.SIGCONT)
                assert [order.order_id async for order in receives] == [0, 1, 2]


async def test_a_socket_that_a_cleaner_took_away_is_bound_again(
    new_endpoint: NewEndpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the stream is open already; what is there is renewed, so that it is not taken away."""
    monkeypatch.setattr(zmq_sockets, "KEEP_S", 0.05)
    async with zmq_receiver(EngineOrder, new_endpoint("ipc"), bind=True, window=4) as receives:
        file = receives.endpoint.removeprefix("ipc://")
        os.utime(file, (0, 0))
        await until(lambda: os.stat(file).st_mtime > 0)
        os.unlink(file)
        await until(lambda: os.path.exists(file))
        async with zmq_sender(EngineOrder, receives.endpoint, bind=False) as sends:
            os.unlink(file)
            await until(lambda: os.path.exists(file))
            await sends.send(EngineCall(order_id=7, method="resume"))
            assert (await receives.receive()).order_id == 7
    assert caplog.text.count("as by a cleaner of temporary files") == 2


async def test_a_frozen_peer_is_noticed_by_its_heartbeat(
    new_endpoint: NewEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host; here it stands on this one."""
    monkeypatch.setattr(socket_options, "stays_here", lambda _: False)
    monkeypatch.setattr(socket_options, "HEARTBEAT_INTERVAL_MS", 50)
    monkeypatch.setattr(socket_options, "HEARTBEAT_TIMEOUT_MS", 300)
    async with zmq_receiver(EngineOrder, new_endpoint("tcp"), bind=True, window=4) as receives:
        with child("sender", receives.endpoint, "sleep") as process:
            await until_ready(process)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(StreamBroken, match=r"the sender is gone: .*no heartbeat came for 0.3 s .*the MTU\)"):
                while True:
                    await receives.receive()


async def test_an_end_that_nobody_acknowledges_is_an_error_and_bounded(new_endpoint: NewEndpoint) -> None:
    async with zmq_receiver(EngineOrder, new_endpoint("ipc"), bind=True) as unused:
        endpoint = unused.endpoint
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    try:
        with pytest.raises(StreamBroken, match=r"not acknowledged within 0.2 s; 1 items may be lost"):
            async with zmq_sender(EngineOrder, endpoint, bind=False, close_seconds=0.2) as sends:
                await anyio.to_thread.run_sync(router.poll, 300_000)
                peer, _, hello = router.recv_multipart()
                theirs = msgspec.msgpack.decode(hello, type=Hello)
                reply = hello_bytes(role=StreamRole.RECEIVER, session=theirs.session)
                router.send_multipart([peer, pack_header(Kind.WELCOME), reply])
                router.send_multipart([peer, pack_header(Kind.CREDIT, 0)])
                await sends.send(resume(1))
    finally:
        router.close(linger=0)


async def test_a_late_receiver_gets_an_earlier_end(new_endpoint: NewEndpoint) -> None:
    """A receiver that connects late gets an end that was sent before it came."""
    async with zmq_sender(EngineOrder, new_endpoint("ipc"), bind=True, close_seconds=0.1) as sends:
        await sends.aclose()
        async with zmq_receiver(EngineOrder, sends.endpoint, bind=False) as receives:
            with pytest.raises(StreamEnded):
                await receives.receive()

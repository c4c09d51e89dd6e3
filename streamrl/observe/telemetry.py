"""The metrics socket: ``TelemetryPublisher`` in the process of the controller, ``TelemetrySubscriber`` in the processes
of ``streamrl watch`` and ``streamrl top``. The schema is in docs/metrics.md.

The publisher never waits for a subscriber: ``publish`` only puts a message into a bounded queue. A thread owns the
socket, so that a subscriber that joins late gets the last message of every topic at once, also while the run publishes
nothing."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct, ValidationError, convert, json
from msgspec.structs import asdict

from streamrl.base import run_events
from streamrl.base.errors import UNDECODABLE, UNENCODABLE, InputError, StreamRLError, WireError
from streamrl.base.messages import Message
from streamrl.base.types import JsonMapping, JsonObject, Texts
from streamrl.comm.guarded_sockets import GuardedContext, bind, connect
from streamrl.comm.socket_options import make_socket
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_sockets import KEEP_S, IpcPath

log = logging.getLogger(__name__)

TELEMETRY_SCHEMA = 1
HIGH_WATER = 1000
LARGEST_MESSAGE = 1 << 19
"""Bytes of a message that a subscriber decodes. Decoded JSON takes up to thirty times as many."""
LARGEST_SUBSCRIPTION = 1 << 10
"""Bytes of the frame with which a subscriber names a topic."""


class Telemetry(Struct, frozen=True, kw_only=True):
    """One message of the metrics socket. ``fields``: fields of the topic, as docs/metrics.md lists them."""

    topic: str
    run_id: str
    sequence: int
    time: float
    replay: bool
    fields: JsonObject


class TelemetryPublisher:
    """A sink that binds ``endpoint`` and publishes from its own thread. Raises ``StreamRLError`` when it cannot
    bind."""

    def __init__(self, endpoint: str, *, run_id: str, high_water: int = HIGH_WATER) -> None:
        self._run_id = run_id
        self._sequences: dict[str, int] = {}
        self._latest: dict[str, JsonObject] = {}
        self._pending: queue.Queue[tuple[str, JsonObject]] = queue.Queue(maxsize=high_water)
        self._dropped_before_socket = 0
        self._dropped_at_socket = 0
        self._closed = False
        self._context = GuardedContext()
        self._socket = make_socket(
            self._context,
            zmq.XPUB,
            endpoint=endpoint,
            max_frame_bytes=LARGEST_SUBSCRIPTION,
            linger_ms=200,
            send_high_water_mark=high_water,
        )
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # else only the first subscriber to a topic gets the replay
        try:
            self.endpoint = bind(self._socket, endpoint, KeyRole.OBSERVER)
        except StreamRLError as error:
            self._context.close_gate()
            self._context.destroy(linger=0)
            raise StreamRLError(
                f"the metrics socket is not there: {error}; set metrics.endpoint to a free one, or leave it empty"
            ) from error
        self._wake_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._serve, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """A lower bound of the dropped messages: those that did not fit into the queue, plus one each time that a
        subscriber exceeded its limit. libzmq then skips the subscriber silently until it reads again. The count of the
        subscriber itself (``lost``) is exact."""
        return self._dropped_before_socket + self._dropped_at_socket

    def record(self, event: Message) -> None:
        """Publish an event of a run."""
        topic, fields = topic_and_fields(event)
        if topic == "step":
            fields["metrics"]["health/telemetry_dropped_total"] = self.dropped
        self.publish(topic, fields)

    def publish(self, topic: str, fields: JsonObject) -> None:
        """Queue one message. Always returns at once. Call it from one thread only. Raises ``StreamRLError`` when the
        socket has keys and the gate that checks the keys of subscribers has ended."""
        if self._closed:
            return
        if (gate := self._context.opened_gate) is not None:
            gate.check()
        self._sequences[topic] = self._sequences.get(topic, 0) + 1
        body = {"run_id": self._run_id, "sequence": self._sequences[topic], "time": time.time(), "replay": False}
        try:
            self._pending.put_nowait((topic, body | fields))
        except queue.Full:
            self._dropped_before_socket += 1
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Send the queued messages, within the linger, and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)
        self._context.close_gate()
        self._context.term()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        path = IpcPath(self._socket, self.endpoint)
        with self._socket:  # ``close`` would wait for ever for a socket that is still open
            while not (self._closed and self._pending.empty()):
                ready = dict(poller.poll(int(KEEP_S * 1000)))
                path.keep()
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                    self._send_pending()
                if self._socket in ready and self._socket.recv(zmq.NOBLOCK)[:1] == b"\x01":
                    for topic, body in self._latest.items():
                        self._send(topic, json.encode(body | {"replay": True}))

    def _send_pending(self) -> None:
        while True:
            try:
                topic, body = self._pending.get_nowait()
            except queue.Empty:
                return
            try:
                content = json.encode(body)
            except UNENCODABLE as error:
                self._dropped_before_socket += 1
                log.warning("a message of the metrics socket (%s) cannot be written: %s", topic, error)
                continue
            self._latest[topic] = body
            self._send(topic, content)

    def _send(self, topic: str, content: bytes) -> None:
        frames = [topic.encode(), str(TELEMETRY_SCHEMA).encode(), content]
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # A subscriber exceeded its limit. The other subscribers must get the message, and the loss is counted.
            self._dropped_at_socket += 1
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)


class TelemetrySubscriber:
    """Reads a metrics socket, blocking. ``lost``: number of messages that the publisher dropped for this reader."""

    def __init__(self, endpoint: str, *, topics: Texts = (), high_water: int = HIGH_WATER) -> None:
        self._last_sequence: dict[tuple[str, str], int] = {}
        self.lost = 0
        self._context = GuardedContext()
        self._socket = make_socket(
            self._context,
            zmq.SUB,
            endpoint=endpoint,
            max_frame_bytes=LARGEST_MESSAGE,
            receive_high_water_mark=high_water,
        )
        try:
            for topic in topics or ("",):
                self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            connect(self._socket, endpoint, KeyRole.CONTROLLER)
        except StreamRLError as error:
            self._context.destroy(linger=0)
            raise InputError(f"{endpoint} cannot be watched ({error}): write tcp://HOST:PORT or ipc://PATH") from error

    def __enter__(self) -> TelemetrySubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._context.destroy(linger=0)

    def receive(self, timeout_s: float) -> Telemetry | None:
        """Return the next message that is new, or None when none came in time. Raises ``WireError``."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            if not self._socket.poll(max(0, int(remaining * 1000))):
                return None
            message = decode_telemetry(self._socket.recv_multipart(zmq.NOBLOCK))
            if self._is_new(message):
                return message

    def _is_new(self, message: Telemetry) -> bool:
        key = (message.run_id, message.topic)
        last = self._last_sequence.get(key, 0)
        if message.sequence <= last and message.replay:
            return False
        if last and not message.replay:  # a lower number than the last one: the controller was restarted
            self.lost += max(message.sequence - last - 1, 0)
        self._last_sequence[key] = message.sequence
        return True


def decode_telemetry(frames: list[bytes]) -> Telemetry:
    """Decode the three frames of a message. Raises ``WireError`` for anything else than schema 1."""
    if len(frames) != 3 or frames[1] != str(TELEMETRY_SCHEMA).encode():
        version = frames[1][:20] if len(frames) > 1 else b"none"
        raise WireError(
            f"not a telemetry message of schema {TELEMETRY_SCHEMA} (its version: {version!r}); "
            "use the streamrl version of the run"
        )
    try:
        if len(frames[2]) > LARGEST_MESSAGE:
            raise ValueError(f"{len(frames[2])} bytes; {LARGEST_MESSAGE} are the most")
        body = json.decode(frames[2], type=JsonObject)
        head = {name: body.pop(name) for name in ("run_id", "sequence", "time", "replay")}
        return convert(head | {"topic": frames[0].decode(), "fields": body}, Telemetry)
    except (KeyError, *UNDECODABLE) as error:
        raise WireError(f"a telemetry message that does not decode: {error}") from error


# ---- events of a run as messages, and back ------------------------------------------------------------

_TOPICS: dict[type[Message], str] = {
    run_events.StepFinished: "step",
    run_events.EvaluationFinished: "evaluation",
    run_events.RunProgress: "progress",
    run_events.CompletionSampled: "sample",
    run_events.RunWarning: "warning",
    run_events.RunDecided: "decision",
    run_events.StallSeen: "stall",
}
_STATES: dict[type[Message], str] = {run_events.RunStarted: "started", run_events.RunFinished: "finished"}
_KINDS: dict[str, Any] = {name: kind for kind, name in (*_TOPICS.items(), *_STATES.items())}


def topic_and_fields(event: Message) -> tuple[str, JsonObject]:
    """Return the topic of an event and its fields. The topic is ``run`` for the start and the end of a run, else the
    topic of the event's class in ``_TOPICS``, else ``event``."""
    fields = asdict(event)
    if state := _STATES.get(type(event)):
        return "run", {"state": state} | fields
    if (topic := _TOPICS.get(type(event))) is None:
        return "event", {"event": type(event).__name__, "fields": fields}
    if "metrics" in fields:
        fields["metrics"] = finite_or_none(fields["metrics"])
    return topic, fields


def finite_or_none(metrics: JsonMapping) -> JsonObject:
    """Return ``metrics`` with None for nan and infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def to_run_event(message: Telemetry) -> run_events.RunEvent | None:
    """Return the event that a message was made from, or None where it is not known (topic ``event``, unknown
    topics)."""
    fields = dict(message.fields)
    if "metrics" in fields:  # null: a value that is not finite, which nobody shows
        fields["metrics"] = {name: value for name, value in fields["metrics"].items() if value is not None}
    kind_name = message.topic
    if kind_name == "run":
        kind_name = fields.pop("state", "")
    kind = _KINDS.get(kind_name)
    if kind is None:
        return None
    if kind is run_events.RunStarted:
        # The directory may be on another host or belong to another user: a watcher must not write to it.
        fields |= {"run_id": message.run_id, "directory": ""}
    known_fields = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    try:
        event: run_events.RunEvent = convert(known_fields | {"type": kind.__struct_config__.tag}, kind)
    except ValidationError:
        return None
    return event

"""What other relays do costs pieces, never a version: with the time simulated, and over real sockets with keys."""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement, WeightSource
from streamrl.comm.transport_keys import KEY_ROLE, KEYS_DIRECTORY, make_keys
from streamrl.weights.manifest import (
    FORMAT_VERSION,
    ChunkEntry,
    Manifest,
    ShardSpec,
    UnitEntry,
    WorkUnit,
    digest_of,
    encode_manifest,
)
from streamrl.weights.publish import publisher as publishing
from streamrl.weights.publish.server import PublisherServer, ServedPart
from streamrl.weights.pull.fetch import fetch_version
from streamrl.weights.pull.replica import CheckpointReplica
from streamrl.weights.relay import state
from streamrl.weights.relay.relay import Relay
from streamrl.weights.relay.state import Asker, AskPiece, PieceSource, RelayReply, RelayState, Waiting
from streamrl.weights.requests import MANIFEST, NotServed, Piece
from tests.weights.faulty_link import SmallPush, changed, random_bits, served

CHUNKS = [bytes([number]) * 100 for number in range(20)]
TABLE = tuple(ChunkEntry(digest_of(chunk), len(chunk)) for chunk in CHUNKS)
UNIT = UnitEntry(WorkUnit((ShardSpec("w", "bfloat16", (1000,), 0, 1000),)), sum(map(len, CHUNKS)))
ENCODED = encode_manifest(Manifest(FORMAT_VERSION, "run", 0, 1, None, 0, "", 0, (UNIT,), TABLE))
DIGEST = digest_of(ENCODED)
WORKER = Asker(b"worker", is_local=True)
TRAINER, ABOVE, NEXT = PieceSource("trainer", False), PieceSource("above", True), PieceSource("next", True)


class World:
    """One relay between a worker that asks for all pieces and sources that reply ``delay`` seconds after each other, as
    ``behaves`` says; the trainer is honest. ``asked``: pieces by source."""

    def __init__(self, behaves: Callable[[PieceSource], str], delay: dict[PieceSource, float]) -> None:
        self.now, self.asked, self.got = 0.0, Counter[PieceSource](), dict[int, bytes]()
        self.refused = ""
        self._behaves, self._delay = behaves, delay
        self._queue: dict[PieceSource, deque[AskPiece]] = {source: deque() for source in delay}
        self._free = dict.fromkeys(delay, 0.0)
        self.state = RelayState(self._ask, self._reply)

    def fetch(self, longest_s: float) -> None:
        announced = WeightAnnouncement(
            1, None, 0, (WeightSource(0, "trainer", DIGEST, 0, 0, 0),), (), ("above", "next")
        )
        self.state.announce(announced, 0.0)
        for number in range(MANIFEST, len(CHUNKS)):
            self.state.requested(WORKER, AskPiece(DIGEST, number), 0.0)
        while len(self.got) <= len(CHUNKS) and not self.refused and self.now < longest_s:
            self.now += 0.05
            for source, asked in self._queue.items():
                while asked and self._free[source] <= self.now:
                    self._free[source] = max(self.now, self._free[source]) + self._delay[source]
                    self._serve(source, asked.popleft())
            self.state.tick(self.now)
        assert not self.refused
        assert self.got == {MANIFEST: ENCODED, **dict(enumerate(CHUNKS))}, f"{len(self.got)} pieces after {self.now} s"

    def _ask(self, source: PieceSource, ask: AskPiece) -> None:
        self.asked[source] += 1
        if not self._queue[source]:
            self._free[source] = max(self._free[source], self.now + self._delay[source])
        self._queue[source].append(ask)

    def _serve(self, source: PieceSource, ask: AskPiece) -> None:
        does = self._behaves(source) if source.is_relay else "answers"
        payload = ENCODED if ask.piece == MANIFEST else CHUNKS[ask.piece]
        reply: RelayReply | None = Piece(ask.manifest_digest, ask.piece)
        if does == "is silent":
            return
        if does == "waits":
            self._queue[source].append(ask)
            reply, payload = Waiting(ask.manifest_digest, ask.piece), b""
        elif does == "refuses":
            reply, payload = NotServed(ask.manifest_digest, "gone"), b""
        elif does == "lies":
            payload = payload[:-1] + b"!"
        elif does == "babbles":
            reply = None
        self.state.replied(source, reply, payload, self.now)

    def _reply(self, asker: Asker, reply: RelayReply, payload: bytes) -> None:
        assert asker == WORKER
        if isinstance(reply, Piece):
            assert reply.piece not in self.got, "twice"
            self.got[reply.piece] = payload
        elif isinstance(reply, NotServed):
            self.refused = reply.reason


BEHAVIOURS = ("answers", "is silent", "refuses", "lies", "babbles", "waits")


@given(some.lists(some.sampled_from(BEHAVIOURS), min_size=1, max_size=12), some.data())
def test_a_worker_gets_all_pieces_whatever_relays_do(behaviours: list[str], data: some.DataObject) -> None:
    turn = cycle(behaviours)
    delay = {source: data.draw(some.sampled_from([0.05, 0.5, 3.0])) for source in (ABOVE, NEXT)} | {TRAINER: 0.1}
    World(lambda _: next(turn), delay).fetch(400.0)


@pytest.mark.parametrize(
    ("does", "longest_s"), [("lies", 3), ("refuses", 3), ("babbles", 3), ("is silent", 6), ("waits", 26)]
)
def test_a_relay_that_fails_costs_what_was_asked_of_it(does: str, longest_s: float) -> None:
    world = World(lambda source: does if source == ABOVE else "answers", {ABOVE: 0.1, NEXT: 0.1, TRAINER: 0.1})
    world.fetch(longest_s)
    assert world.asked[ABOVE] <= state.UNDER_WAY
    assert not world.asked[TRAINER]


def test_a_slow_relay_costs_a_piece_and_a_slow_link_a_few() -> None:
    world = World(lambda _: "answers", {ABOVE: 1.8, NEXT: 0.05, TRAINER: 0.05})
    world.fetch(8.0)
    assert world.asked[NEXT] > len(CHUNKS) / 2
    slow = World(lambda _: "answers", {ABOVE: 1.0, NEXT: 1.0, TRAINER: 1.0})
    slow.fetch(40.0)
    assert slow.asked[ABOVE] == len(CHUNKS) + 1
    assert slow.asked[NEXT] + slow.asked[TRAINER] <= 3


def test_slow_relays_are_not_awaited_for_ever() -> None:
    """A relay that was slow again and again is not waited for without end."""
    asked, now = list[tuple[PieceSource, int]](), 0.0
    relay = RelayState(lambda source, ask: asked.append((source, ask.piece)), lambda *_: None)
    source = WeightSource(0, "trainer", DIGEST, 0, 0, 0)
    relay.announce(WeightAnnouncement(1, None, 0, (source,), (), ("above", "next")), now)
    relay.requested(WORKER, AskPiece(DIGEST, MANIFEST), now)
    relay.replied(ABOVE, Piece(DIGEST, MANIFEST), ENCODED, now)
    for number, chunk in enumerate(CHUNKS):
        relay.requested(WORKER, AskPiece(DIGEST, number), began := now)
        while (NEXT, number) not in asked:
            relay.tick(now := now + 1.0)
            assert now - began < 25.0  # a worker gives up after 30 s
        relay.replied(ABOVE, Piece(DIGEST, number), chunk, now)


def test_what_is_asked_for_before_it_is_announced_waits_for_that() -> None:
    lower = World(lambda _: "answers", {ABOVE: 0.1})
    source = WeightSource(0, "trainer", DIGEST, 0, 0, 0)
    announced = WeightAnnouncement(1, None, 0, (source,), peers=("above",))
    below, replies, passed = Asker(b"below", is_local=False), list[RelayReply](), list[AskPiece]()
    relay = RelayState(lambda _, ask: passed.append(ask), lambda _, reply, __: replies.append(reply))
    lower.state.announce(announced, 0.0)
    lower.state.requested(WORKER, AskPiece(DIGEST, MANIFEST), 0.0)
    (ask,) = lower._queue[ABOVE]
    relay.requested(below, ask, 0.0)
    relay.tick(0.5)
    assert not replies and not passed
    relay.announce(msgspec.structs.replace(announced, peers=()), 0.6)
    assert [one.piece for one in passed] == [MANIFEST]
    relay.replied(TRAINER, Piece(DIGEST, MANIFEST), ENCODED, 0.7)
    assert replies == [Piece(DIGEST, MANIFEST)]
    older = RelayState(lambda _, __: None, lambda _, reply, __: replies.append(reply))
    older.requested(below, AskPiece(DIGEST, 3), 0.0)
    older.requested(below, ask, 0.0)
    older.tick(2.0)
    assert [type(reply) for reply in replies[1:]] == [NotServed, NotServed]


# ---- over sockets ----------------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SmallPush, list[Relay]]]:
    """A trainer, and three relays, with keys of their roles. A version has some ten chunks."""
    make_keys(tmp_path / "keys")
    monkeypatch.setenv(KEYS_DIRECTORY, str(tmp_path / "keys"))
    monkeypatch.setenv(KEY_ROLE, "trainer")
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 1000)
    push = SmallPush(tmp_path, endpoint="tcp://127.0.0.1:*")
    monkeypatch.setenv(KEY_ROLE, "engine")
    with ExitStack() as stack:
        stack.callback(push.close)
        yield push, [stack.enter_context(Relay("tcp://127.0.0.1:*", f"ipc://{tmp_path}/r{k}")) for k in range(3)]


def take(announced: WeightAnnouncement, relay: Relay, above: list[Relay], held: CheckpointReplica) -> None:
    routed = msgspec.structs.replace(announced, peers=tuple(one.endpoint for one in above))
    fetched = fetch_version(relay.through(routed), held=held, progress_seconds=10.0)
    held.advance(held.stage(fetched))


def sent_by_trainer(relay: Relay) -> int:
    return sum(count for source, count in relay.state.delivered.items() if not source.is_relay)


def test_versions_travel_along_relays(hosts: tuple[SmallPush, list[Relay]]) -> None:
    """Versions travel from relay to relay, and one that joins takes the chain from there."""
    push, (first, second, joins) = hosts
    held, bits = [CheckpointReplica() for _ in range(3)], random_bits(0)
    announced = push.publish(0, bits)
    take(announced, first, [], held[0])
    take(announced, second, [first], held[1])
    take(announced, joins, [second, first], held[2])
    for version in range(1, 4):
        bits = changed(bits, version)
        announced = push.publish(version, bits)
        take(announced, first, [], held[0])
        take(announced, second, [first], held[1])
    push.close()
    take(announced, joins, [second, first], held[2])
    assert held[2].state_hash == announced.state_hash
    assert sent_by_trainer(second) == sent_by_trainer(joins) == 0 < sent_by_trainer(first)


def test_a_relay_that_lies_or_ended_is_passed_over(hosts: tuple[SmallPush, list[Relay]]) -> None:
    push, (first, second, third) = hosts
    announced = push.publish(0, random_bits(0))
    part = served(push.publisher, announced)
    wrong = [memoryview(bytes(chunk[:-1]) + b"!") for chunk in part.chunks]
    liar = PublisherServer("tcp://127.0.0.1:*", "liar")
    liar.start()
    liar.serve([ServedPart(0, part.manifest_digest, part.manifest, wrong)])
    take(announced, first, [liar, third], held := CheckpointReplica())  # type: ignore[list-item]
    assert held.state_hash == announced.state_hash
    assert first.state.delivered[PieceSource(liar.endpoint, True)] <= 1 + state.UNDER_WAY
    liar.close()
    take(announced, second, [liar, first], held := CheckpointReplica())  # type: ignore[list-item]
    assert held.state_hash == announced.state_hash
    assert sent_by_trainer(second) == 0


def test_a_relay_whose_port_is_taken_serves_its_own_workers(
    hosts: tuple[SmallPush, list[Relay]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay whose port another program has serves the workers of its engine, and others pass it over."""
    push, (first, second, _) = hosts
    announced = push.publish(0, random_bits(0))
    take(announced, first, [], CheckpointReplica())
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        endpoint = f"tcp://127.0.0.1:{other_program.getsockname()[1]}"
        with Relay(endpoint, f"ipc://{tmp_path}/taken") as relay:
            (warning,) = caplog.messages
            assert warning.startswith(f"this engine gives no weights to other hosts: cannot bind {endpoint}: Address")
            for fetching, above in ((relay, [first]), (second, [relay, first])):
                take(announced, fetching, above, held := CheckpointReplica())
                assert held.state_hash == announced.state_hash
    assert sent_by_trainer(relay) == sent_by_trainer(second) == 0


def test_a_relay_that_has_failed_is_left_out(hosts: tuple[SmallPush, list[Relay]]) -> None:
    push, (first, *_) = hosts
    announced = push.publish(0, random_bits(0))
    nowhere = msgspec.structs.replace(announced, peers=("nonsense",))
    with pytest.raises(WeightError, match="nothing arrived"):
        fetch_version(first.through(nowhere), progress_seconds=1.0)
    assert first.through(nowhere) == announced
    take(announced, first, [], held := CheckpointReplica())
    assert held.state_hash == announced.state_hash

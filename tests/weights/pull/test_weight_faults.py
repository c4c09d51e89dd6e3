"""Whatever happens on the way, a receiver ends with equal bits or with a refused version. Over real sockets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from streamrl.base.errors import WeightError
from streamrl.weights import manifest
from streamrl.weights.codec.codec import decode_patch
from streamrl.weights.publish import publisher as publishing
from streamrl.weights.pull import decoding
from streamrl.weights.pull import fetch as fetching
from streamrl.weights.pull.fetch import KeptParts
from streamrl.weights.requests import MANIFEST, GetPiece, decode_request, encoder
from tests.weights.faulty_link import (
    LOST,
    Cut,
    Fault,
    FaultyLink,
    Frames,
    SmallPush,
    changed,
    flip,
    random_bits,
    served,
)

FRAMES = 5
"""Replies of the transfer that is broken here: one manifest and four chunks."""


@pytest.fixture
def push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallPush]:
    """At version 0; the next delta has ``FRAMES - 1`` chunks, and five patches."""
    monkeypatch.setattr(manifest, "UNIT_ELEMENTS", 1000)
    made = SmallPush(tmp_path)
    try:
        made.begin()
        delta = made.publisher.publish(1, changed(made.bits, 1)).source.payload_bytes
        made.publisher.acknowledge(1)
        made.publisher.close()
        monkeypatch.setattr(publishing, "CHUNK_BYTES", delta // (FRAMES - 1) + 1)
        made.publisher = SmallPush(tmp_path).publisher
        made.begin()
        yield made
    finally:
        made.close()


class Once:
    """A fault of one reply, the first time it passes."""

    def __init__(self, number: int, fault: Callable[[Frames], Sequence[Frames]]) -> None:
        self.number, self.fault, self.done = number, fault, False

    def __call__(self, number: int, frames: Frames) -> Sequence[Frames]:
        if number != self.number or self.done:
            return [frames]
        self.done = True
        return self.fault(frames)


class SwappedWithNext:
    """A reply is held back until the next one has passed."""

    def __init__(self, number: int) -> None:
        self.number, self.held = number, None

    def __call__(self, number: int, frames: Frames) -> Sequence[Frames]:
        if number == self.number:
            self.held = frames
            return LOST
        held, self.held = self.held, None
        return [frames] if held is None else [frames, held]


def raise_cut(frames: Frames) -> Sequence[Frames]:
    raise Cut


ONE_FRAME: dict[str, Callable[[Frames], Sequence[Frames]]] = {
    "lost": lambda frames: LOST,
    "duplicated": lambda frames: [frames, frames, frames],
    "header truncated": lambda frames: [[frames[0][:-1], frames[1]]],
    "payload truncated": lambda frames: [[frames[0], frames[1][:-1]]],
    "payload missing": lambda frames: [[frames[0]]],
    "a frame too many": lambda frames: [[*frames, b"more"]],
    "empty": lambda frames: [[b"", b""]],
    "header flipped": lambda frames: [[flip(frames[0], 3), frames[1]]],
    "payload flipped": lambda frames: [[frames[0], flip(frames[1], 8 * len(frames[1]) - 1)]],
    "connection cut": raise_cut,
}


@pytest.mark.parametrize("number", range(FRAMES))
@pytest.mark.parametrize("fault", [*ONE_FRAME, "reordered"])
def test_a_fault_of_any_one_frame_does_not_matter(push: SmallPush, tmp_path: Path, fault: str, number: int) -> None:
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    assert announced.sources[0].payload_bytes
    broken: Fault = SwappedWithNext(number) if fault == "reordered" else Once(number, ONE_FRAME[fault])
    with FaultyLink(tmp_path, push.publisher.endpoint, broken) as link:
        push.commit(link.through(announced))
        assert link.replies >= FRAMES
    push.assert_holds(1, new)


@pytest.mark.parametrize("fault", ["header truncated", "payload truncated", "empty", "header flipped"])
def test_a_frame_that_is_always_broken_is_refused(push: SmallPush, tmp_path: Path, fault: str) -> None:
    announced = push.publish(1, changed(push.bits, 1))
    with (
        FaultyLink(tmp_path, push.publisher.endpoint, lambda number, frames: ONE_FRAME[fault](frames)) as link,
        pytest.raises(WeightError, match=r"came 3 times with digest|does not speak this protocol"),
    ):
        push.fetch(link.through(announced))
    push.assert_holds(0, push.bits)


def chunks_asked(requests: Sequence[bytes]) -> Counter[int]:
    return Counter(r.piece for r in map(decode_request, requests) if r.piece != MANIFEST)


def test_a_cut_transfer_asks_only_for_what_is_missing(push: SmallPush, tmp_path: Path) -> None:
    """The link breaks after two chunks; one chunk at a time is under way."""
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    with FaultyLink(tmp_path, push.publisher.endpoint, Once(3, raise_cut)) as link:
        fetched = push.fetch(link.through(announced), credit_bytes=1, retry_seconds=60.0)
        asked = chunks_asked(link.requests)
    push.replica.advance(push.replica.stage(fetched))
    push.assert_holds(1, new)
    assert asked == {0: 1, 1: 1, 2: 2, 3: 1}


def test_a_transfer_that_was_given_up_goes_on_where_it_stopped(push: SmallPush, tmp_path: Path) -> None:
    new, kept, stop = changed(push.bits, 1), KeptParts(), threading.Event()
    announced = push.publish(1, new)

    def stop_at_the_third(number: int, frames: Frames) -> Sequence[Frames]:
        if number == 3:
            stop.set()
            return LOST
        return [frames]

    with FaultyLink(tmp_path, push.publisher.endpoint, stop_at_the_third) as link:
        with pytest.raises(WeightError, match="was stopped"):
            push.fetch(link.through(announced), kept=kept, credit_bytes=1, stop=stop)
        before = len(link.requests)
        fetched = push.fetch(link.through(announced), kept=kept, credit_bytes=1)
        assert sorted(chunks_asked(link.requests[before:])) == [2, 3]
        assert not any(decode_request(r).piece == MANIFEST for r in link.requests[before:])
    push.replica.advance(push.replica.stage(fetched))
    push.assert_holds(1, new)


def test_patches_are_decoded_while_others_still_arrive(
    push: SmallPush, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk is held back until a patch was decoded."""
    decoded = threading.Event()
    original = decode_patch

    def watched(*arguments: object) -> object:
        result = original(*arguments)  # type: ignore[arg-type]
        decoded.set()
        return result

    monkeypatch.setattr(decoding, "decode_patch", watched)

    def hold_back(number: int, frames: Frames) -> Sequence[Frames]:
        if number == FRAMES - 1:
            assert decoded.wait(10), "nothing was decoded before the last chunk came"
        return [frames]

    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    with FaultyLink(tmp_path, push.publisher.endpoint, hold_back) as link:
        push.commit(link.through(announced))
    push.assert_holds(1, new)


def test_a_receiver_that_does_not_read_holds_up_nobody(push: SmallPush, tmp_path: Path) -> None:
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asleep = context.socket(zmq.DEALER)
    asleep.connect(push.publisher.endpoint)
    try:
        for _ in range(2000):
            for chunk in range(FRAMES - 1):
                asleep.send(encoder.encode(GetPiece(announced.sources[0].manifest_digest, chunk)), zmq.NOBLOCK)
            if not asleep.poll(0, zmq.POLLOUT):
                break
        push.commit(announced)
    finally:
        context.destroy(linger=0)
    push.assert_holds(1, new)


def test_replies_of_another_version_or_run_are_ignored(push: SmallPush, tmp_path: Path) -> None:
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    other = SmallPush(tmp_path, run_id="other")
    try:
        foreign = other.publish(0, random_bits(9))
        digest = foreign.sources[0].manifest_digest
        header = {"type": "Piece", "manifest_digest": digest, "piece": 0}
        stray = [msgspec.msgpack.encode(header), bytes(served(other.publisher, foreign).chunks[0])]
        with FaultyLink(tmp_path, push.publisher.endpoint, lambda number, frames: [stray, frames]) as link:
            push.commit(link.through(announced))
        push.assert_holds(1, new)
        stolen = msgspec.structs.replace(announced, sources=foreign.sources)
        with pytest.raises(WeightError, match="announced was"):
            push.fetch(stolen)
    finally:
        other.close()


def test_an_oversized_frame_ends_the_transfer_only(
    push: SmallPush, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that is too large ends the transfer, and the next transfer works. ZeroMQ drops a connection that breaks
    its limits, for good."""
    monkeypatch.setattr(fetching, "MANIFEST_LIMIT", 1 << 14)
    new, kept = changed(push.bits, 1), KeptParts()
    announced = push.publish(1, new)
    large = Once(2, lambda frames: [[frames[0], bytes(1 << 15)]])
    with FaultyLink(tmp_path, push.publisher.endpoint, large) as link:
        with pytest.raises(WeightError, match=r"nothing arrived .* 3 of 4 chunks are missing"):
            push.fetch(link.through(announced), kept=kept, credit_bytes=1, progress_seconds=0.5)
        push.replica.advance(push.replica.stage(push.fetch(link.through(announced), kept=kept)))
        assert chunks_asked(link.requests)[0] == 1
    push.assert_holds(1, new)

"""Receivers take turns, and no receiver has more under way than its credit."""

from __future__ import annotations

from campaigns.fuzz.weight_frames import receiving, replies_of, world
from streamrl.weights.publish.server import ReplyQueue


def test_peers_take_turns_and_a_request_waits_once() -> None:
    queue = ReplyQueue()
    for request in (b"1", b"2", b"1", b"3"):
        queue.add(b"greedy", [request])
    queue.add(b"other", [b"1"])
    queue.add(b"gone", [b"1"])
    queue.add(b"gone", [b"2"])
    answered = []
    while (waiting := queue.first()) is not None:
        if waiting[0] == b"gone":
            queue.drop_peer()
            continue
        answered.append(waiting)
        queue.drop_first()
    assert answered == [(b"greedy", (b"1",)), (b"other", (b"1",)), (b"greedy", (b"2",)), (b"greedy", (b"3",))]


def test_what_is_under_way_stays_within_the_credit() -> None:
    sample = world().samples[2]
    manifest, *chunks = replies_of(sample)
    sizes = [len(frames[1]) for frames in chunks]
    part = receiving(sample)
    assert len(list(part.requests(0))) == 1
    assert not list(part.requests(0)), "the manifest is under way"
    part.take(manifest)
    credit = 2 * sizes[0] + 1
    under_way = [request.chunk for request in part.requests(credit)]
    assert under_way == [0, 1]
    asked = list(under_way)
    while under_way:
        part.take(chunks[under_way.pop(0)])
        more = [request.chunk for request in part.requests(credit)]
        under_way += more
        asked += more
        assert sum(sizes[chunk] for chunk in under_way) <= credit
    assert asked == list(range(len(chunks)))
    assert part.complete

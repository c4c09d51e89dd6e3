"""The bandwidth cap is exact, receivers take turns, and no receiver has more under way than its credit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.comm.weights import publisher as publishing
from streamrl.comm.weights.received_part import ReceivedPart
from streamrl.comm.weights.slow_link import ReplyQueue, SlowLink
from tests.weights.faulty_link import SmallPush, changed
from tests.weights.fuzz_weight_frames import replies_of, world


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 3), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([1.0, 20.0, 1000.0]),
    st.floats(0, 0.01),
)
def test_bytes_take_exactly_the_time_of_the_link(
    frames: list[tuple[int, float, bool]], megabits: float, late: float
) -> None:
    """Frames come after pauses of any length, or wait already; some find their peer gone, and take no time; the end of
    each is noticed ``late``, which adds up to nothing while others wait."""
    link, now, free_at = SlowLink(megabits), 0.0, 0.0
    waited = False
    for index, (size, pause, gone) in enumerate(frames):
        now += 0.0 if waited else pause
        began = free_at if waited else max(now, free_at)
        if (wait := link.seconds_until_carried(now, size)) > 0:
            now += wait + late
        takes = 8 * size / (megabits * 1e6)
        assert now >= began + takes - 1e-6
        assert abs(link.seconds_until_carried(now, size) - (began + takes - now)) < 1e-6
        if gone:
            link.refused()
            waited = False
        else:
            waited = index % 2 == 0
            link.carried(size, more=waited)
            free_at = began + takes


def test_without_a_limit_nothing_waits() -> None:
    link = SlowLink(0.0)
    assert link.seconds_until_carried(5.0, 1 << 30) == 0.0
    for _ in range(2):
        link.carried(1 << 30, more=True)
        assert link.seconds_until_carried(5.0, 1 << 30) == 0.0


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
    part = ReceivedPart(sample.announced.sources[0], sample.announced)
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


def test_a_push_over_a_capped_link_takes_the_time_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two receivers share it. Only the lower bound is tested: nothing may go faster."""
    monkeypatch.setattr(publishing, "CHUNK_BYTES", 1024)
    push = SmallPush(tmp_path, bandwidth_mbit=2.0)
    try:
        announced = push.publish(0, push.bits)
        began = time.monotonic()
        for _ in range(2):
            push.fetch(announced, retry_seconds=5.0)
        elapsed = time.monotonic() - began
        assert elapsed >= 2 * 8 * announced.sources[0].payload_bytes / 2e6
        push.commit(announced)
        push.commit(push.publish(1, changed(push.bits, 1)))
        push.assert_holds(1, changed(push.bits, 1))
    finally:
        push.close()

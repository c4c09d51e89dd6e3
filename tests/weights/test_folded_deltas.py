"""Engines that missed versions, or hold nothing but the checkpoint, are brought up to date by one delta."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.manifest import CHECKPOINT_VERSION, decode_manifest, digest_of, encode_manifest
from streamrl.weights.publish.folding import FoldMaker
from streamrl.weights.publish.loaded_checkpoint import CheckpointBase
from streamrl.weights.publish.published_versions import MAXIMUM_EARLIER, PendingVersion, PublishedVersions
from streamrl.weights.pull.fetch import FetchedVersion, KeptParts, fetch_version
from streamrl.weights.pull.mirror import CheckpointMirror
from streamrl.weights.pull.received_part import ReceivedPart
from streamrl.weights.requests import FoldReply, GetChunk, GetFold, NotServed, decode_request, encoder
from tests.weights import test_weight_publisher as publishing
from tests.weights.faulty_link import TENSORS as SMALL_TENSORS
from tests.weights.faulty_link import FaultyLink, SmallPush
from tests.weights.faulty_link import changed as small_changed
from tests.weights.faulty_link import random_bits as small_bits
from tests.weights.test_weight_faults import ONE_FRAME, Once
from tests.weights.test_weight_publisher import Bits, Ranks, changed, random_bits

endpoint, make_ranks = publishing.endpoint, publishing.make_ranks
_SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def save_checkpoint(directory: Path, bits: Bits, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    """Written by hand: no torch here."""
    header, payload = {}, b""
    for name, (dtype, shape) in tensors.items():
        raw = bits[name].tobytes()
        offsets = [len(payload), len(payload) + len(raw)]
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": shape, "data_offsets": offsets}
        payload += raw
    encoded = msgspec.json.encode(header)
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + payload)
    return directory


def commit_late(mirror: CheckpointMirror, announced: WeightAnnouncement, **options: object) -> FetchedVersion:
    fetched = fetch_version(announced, held=mirror, progress_seconds=5.0, **options)  # type: ignore[arg-type]
    if fetched.checkpoint is not None:
        mirror.begin(fetched.checkpoint)
    mirror.advance(mirror.stage(fetched))
    return fetched


def assert_equal(mirror: CheckpointMirror, version: int, bits: Bits) -> None:
    assert mirror.policy_version == version
    for name, expected in bits.items():
        assert np.array_equal(mirror.bits(name), expected), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_whatever_was_missed_comes_as_one_delta(make_ranks: Callable[..., Ranks], ranks: int) -> None:
    """From every earlier version, to the acknowledged one and to one that is not acknowledged yet; elements that
    change several times, go back, and change in one version only."""
    run, bits = make_ranks(ranks), random_bits(0)
    versions = [bits]
    run.commit(run.publish(0, bits))
    late = []
    for version in range(1, 5):
        mirror = CheckpointMirror()
        commit_late(mirror, run.publish_anchor(version - 1))
        late.append(mirror)
        new = changed(versions[-1], version, density=0.01)
        back = np.random.default_rng(version).random(bits["embed"].size) < 0.3
        new["embed"][back] = bits["embed"][back]
        versions.append(new)
        announced = run.publish(version, new)
        sent = run.commit(announced).payload_bytes
    for version, mirror in enumerate(late):
        fetched = commit_late(mirror, announced)
        assert (fetched.base_version, mirror.state_hash) == (version, announced.state_hash)
        assert_equal(mirror, 4, versions[4])
        assert fetched.payload_bytes < 5 * sent
    pending = run.publish(5, changed(versions[4], 5))
    (slept,) = [CheckpointMirror()]
    commit_late(slept, run.publish_anchor(4))
    run.commit(pending)
    newest = run.publish(6, versions[1])
    assert commit_late(slept, newest).base_version == 4
    assert_equal(slept, 6, versions[1])


def test_only_what_fits_into_its_bytes_is_kept_of_earlier_versions(make_ranks: Callable[..., Ranks]) -> None:
    bits = random_bits(0)
    one = sum(int((b != bits[n]).sum()) * (4 + b.itemsize) for n, b in changed(bits, 1).items())
    run = make_ranks(1, history_bytes=int(2.5 * one))
    run.commit(run.publish(0, bits))
    late = []
    for version in range(1, 5):
        late.append(CheckpointMirror())
        commit_late(late[-1], run.publish_anchor(version - 1))
        bits = changed(bits, version)
        announced = run.publish(version, bits)
        run.commit(announced)
    with pytest.raises(WeightError, match=r"gets no delta on that \(version 1 is not kept .*: publish an anchor"):
        commit_late(late[1], announced)
    assert late[1].policy_version == 1
    assert commit_late(late[2], announced).base_version == 2
    assert_equal(late[2], 4, bits)


def test_versions_that_change_next_to_nothing_are_not_kept_for_ever() -> None:
    versions = PublishedVersions(1, history_bytes=1 << 30)
    versions.add(PendingVersion(0, {0: WeightPatch(None, np.zeros(8, dtype=np.uint16))}, 0))
    versions.acknowledge(0)
    newest = MAXIMUM_EARLIER + 50
    for version in range(1, newest + 1):
        versions.add(PendingVersion(version, {}, version))
        versions.acknowledge(version)
    assert versions.part_hash(newest - MAXIMUM_EARLIER) == newest - MAXIMUM_EARLIER
    with pytest.raises(WeightError, match="is not kept"):
        versions.part_hash(newest - MAXIMUM_EARLIER - 1)


@pytest.mark.parametrize("announced_as", ["anchor", "delta"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_restarted_engine_gets_one_delta_on_its_checkpoint(
    make_ranks: Callable[..., Ranks], tmp_path: Path, ranks: int, announced_as: str
) -> None:
    first = random_bits(0)
    path = save_checkpoint(tmp_path / "model", first, publishing.TENSORS)
    run = make_ranks(ranks, checkpoint=path)
    announced = run.publish(0, first)
    mirror = CheckpointMirror()
    fetched = commit_late(mirror, announced, checkpoint=CheckpointBase(path))
    assert (fetched.base_version, fetched.payload_bytes) == (CHECKPOINT_VERSION, 0), "it holds version 0 already"
    assert_equal(mirror, 0, first)
    run.commit(announced)
    bits = changed(first, 1)
    dense = sum(s.payload_bytes for s in announced.sources)
    delta = run.publish(1, bits)
    run.commit(delta)
    mirror = CheckpointMirror()
    as_told = delta if announced_as == "delta" else run.publish_anchor(1)
    fetched = commit_late(mirror, as_told, checkpoint=CheckpointBase(path))
    assert fetched.base_version == CHECKPOINT_VERSION
    assert fetched.payload_bytes < dense / 20
    assert_equal(mirror, 1, bits)
    again = run.publish(2, changed(bits, 2))
    assert commit_late(mirror, again).base_version == 1, "from here on as everybody"


def test_a_checkpoint_that_takes_long_to_read_is_no_silence_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small_bits(0)
    path = save_checkpoint(tmp_path / "model", first, SMALL_TENSORS)
    push, read = SmallPush(tmp_path, checkpoint=path), CheckpointBase.of

    def slowly(base: CheckpointBase, shards: Any) -> Any:
        time.sleep(3.3)
        return read(base, shards)

    monkeypatch.setattr(CheckpointBase, "of", slowly)
    try:
        announced = push.publish(1, small_changed(first, 1))
        fetched = fetch_version(
            announced, held=CheckpointMirror(), checkpoint=CheckpointBase(path), progress_seconds=3.0
        )
        assert fetched.base_version == CHECKPOINT_VERSION and fetched.payload_bytes > 0
    finally:
        push.close()


def test_a_checkpoint_that_differs_is_not_built_on(make_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """Other bits, other names, none at all: then an anchor is taken, and a delta refused with the reason."""
    first = random_bits(0)
    right = save_checkpoint(tmp_path / "right", first, publishing.TENSORS)
    other_bits = save_checkpoint(tmp_path / "bits", changed(first, 9), publishing.TENSORS)
    fewer = {name: kind for name, kind in publishing.TENSORS.items() if name != "half"}
    other_names = save_checkpoint(tmp_path / "names", first, fewer)
    run = make_ranks(2, checkpoint=right)
    run.commit(run.publish(0, first))
    anchor, delta = run.publish_anchor(0), run.publish(1, changed(first, 1))
    for path, reason in ((other_bits, "state hash"), (other_names, "holds nothing as 'half'"), (tmp_path, "safetens")):
        mirror = CheckpointMirror()
        with pytest.raises(WeightError, match=rf"needs an anchor; the checkpoint .* of no use: .*{reason}"):
            commit_late(mirror, delta, checkpoint=CheckpointBase(path))
        assert commit_late(mirror, anchor, checkpoint=CheckpointBase(path)).base_version is None
        assert_equal(mirror, 0, first)
    untold = make_ranks(1)
    assert commit_late(CheckpointMirror(), untold.publish(0, first), checkpoint=CheckpointBase(right)).base_hash == 0


# ---- on the wire -----------------------------------------------------------------------------------


@pytest.fixture
def push(tmp_path: Path) -> SmallPush:
    """The receiver is at version 0, the others at 2; version 3 is published as a delta on 2."""
    made = SmallPush(tmp_path, history_bytes=1 << 20)
    made.begin()
    for version in (1, 2):
        made.publish(version, small_changed(made.bits, version))
        made.publisher.acknowledge(version)
    return made


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("fault", list(ONE_FRAME))
def test_a_fault_of_any_one_frame_of_a_fold_does_not_matter(
    push: SmallPush, tmp_path: Path, fault: str, number: int
) -> None:
    """Frames: the announced manifest, that of the folded delta, its chunk."""
    new = small_changed(push.bits, 3)
    with FaultyLink(tmp_path, push.publisher.endpoint, Once(number, ONE_FRAME[fault])) as link:
        push.commit(link.through(push.publish(3, new)))
        assert link.replies >= 3
    push.assert_holds(3, new)
    push.close()


def test_a_fold_that_was_cut_off_goes_on_where_it_stopped(push: SmallPush, tmp_path: Path) -> None:
    new, kept, stop = small_changed(push.bits, 3), KeptParts(), threading.Event()

    def stop_at_the_chunk(number: int, frames: list[bytes]) -> list[list[bytes]]:
        if number == 2:
            stop.set()
            return []
        return [frames]

    announced = push.publish(3, new)
    with FaultyLink(tmp_path, push.publisher.endpoint, stop_at_the_chunk) as link:
        with pytest.raises(WeightError, match="was stopped"):
            push.fetch(link.through(announced), kept=kept, stop=stop)
        before = len(link.requests)
        push.mirror.advance(push.mirror.stage(push.fetch(link.through(announced), kept=kept)))
        assert [type(decode_request(r)) for r in link.requests[before:]] == [GetChunk]
    push.assert_holds(3, new)
    push.close()


def test_a_fold_that_does_not_lead_to_what_was_announced_is_refused(push: SmallPush) -> None:
    announced = push.publish(3, small_changed(push.bits, 3))
    digest = announced.sources[0].manifest_digest
    served = next(p for p in push.publisher._served if p.manifest_digest == digest)
    honest = push.publisher._fold(GetFold(digest, 0))
    manifest = decode_manifest(honest.manifest, honest.manifest_digest, "")

    def taken(**changes: object) -> ReceivedPart:
        part = ReceivedPart(announced.sources[0], announced)
        part.take([encoder.encode({"type": "ManifestReply", "manifest_digest": digest}), served.manifest])
        part.fold_from(0)
        assert list(part.requests(1)) == [GetFold(digest, 0)]
        encoded = encode_manifest(msgspec.structs.replace(manifest, **changes))
        part.take([encoder.encode(FoldReply(digest, digest_of(encoded))), encoded])
        return part

    assert taken().manifest is not None
    for change in ({"part_hash": 1}, {"policy_version": 4}, {"run_id": "other"}, {"rank": 1}, {"base_version": 1}):
        with pytest.raises(WeightError, match="asked for was"):
            taken(**change)
    with pytest.raises(WeightError, match="dense it would have"):
        huge = msgspec.structs.replace(manifest.tensors[0], payload_bytes=1 << 30)
        chunks = (msgspec.structs.replace(manifest.chunks[0], payload_bytes=1 << 20),) * (1 << 10)
        taken(tensors=(huge,), chunks=chunks)
    push.close()


def test_a_fold_is_waited_for_and_made_once(push: SmallPush) -> None:
    """While it is made the publisher serves others, and says from time to time that it lives."""
    begun, go_on, made = threading.Event(), threading.Event(), []
    real = push.publisher._folds._make

    def slow(asked: GetFold) -> object:
        made.append(asked)
        begun.set()
        assert go_on.wait(10)
        return real(asked)

    push.publisher._folds._make = slow  # type: ignore[assignment]
    new = small_changed(push.bits, 3)
    announced, fetched = push.publish(3, new), []
    threads = [threading.Thread(target=lambda: fetched.append(push.fetch(announced))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    push_anchor = push.anchor(3)
    mirror = CheckpointMirror()
    commit_late(mirror, push_anchor)
    assert_equal(mirror, 3, new)
    go_on.set()
    for thread in threads:
        thread.join()
    assert [f.base_version for f in fetched] == [0, 0]
    assert len(made) == 1
    push.mirror.advance(push.mirror.stage(fetched[0]))
    push.assert_holds(3, new)
    push.close()


def test_a_fold_that_fails_is_refused_and_too_many_are(push: SmallPush) -> None:
    def broken(asked: GetFold) -> object:
        raise MemoryError("planted")

    push.publisher._folds._make = broken  # type: ignore[assignment]
    with pytest.raises(WeightError, match="could not be made: MemoryError: planted"):
        push.fetch(push.publish(3, push.bits))
    push.close()
    folds = FoldMaker(broken)  # type: ignore[arg-type]
    folds.close()
    with pytest.raises(WeightError, match="ask for an anchor"):
        folds.part_of(GetFold("", 0))


def test_a_fold_on_small_tensors_needs_no_torch(tmp_path: Path) -> None:
    """A checkpoint of the small model, in a transfer that is refused where nothing is served."""
    bits = small_bits(0)
    path = save_checkpoint(tmp_path / "model", bits, SMALL_TENSORS)
    push = SmallPush(tmp_path, checkpoint=path)
    announced = push.publish(0, bits)
    assert commit_late(push.mirror, announced, checkpoint=CheckpointBase(path)).base_version == CHECKPOINT_VERSION
    push.assert_holds(0, bits)
    push.publisher._thread._folds = None
    part = push.publisher._thread._answer([encoder.encode(GetFold(announced.sources[0].manifest_digest, 0))])
    assert isinstance(part[0], NotServed)
    push.close()

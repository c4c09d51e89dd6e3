"""Engines that missed versions, or hold nothing but the checkpoint, commit the deltas that they lack as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiers import quick_only

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.manifest import CHECKPOINT_VERSION, decode_manifest, digest_of, encode_manifest
from streamrl.weights.pull.fetch import KeptParts, fetch_version
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.received_part import ReceivedChain
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion
from streamrl.weights.requests import MANIFEST, GetPiece, Piece, decode_request, encoder
from tests.weights.faulty_link import TENSORS as SMALL_TENSORS
from tests.weights.faulty_link import FaultyLink, SmallPush, served
from tests.weights.faulty_link import changed as small_changed
from tests.weights.faulty_link import random_bits as small_bits
from tests.weights.publish import test_weight_publisher as publishing
from tests.weights.publish.test_weight_publisher import Bits, Ranks, changed, random_bits
from tests.weights.pull.test_weight_faults import ONE_FRAME, Once

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


def commit_late(replica: CheckpointReplica, announced: WeightAnnouncement, **options: object) -> FetchedVersion:
    fetched = fetch_version(announced, held=replica, progress_seconds=5.0, **options)  # type: ignore[arg-type]
    if fetched.checkpoint is not None:
        replica.advance(fetched.checkpoint)
    replica.advance(replica.stage(fetched))
    return fetched


def assert_equal(replica: CheckpointReplica, version: int, bits: Bits) -> None:
    assert replica.policy_version == version
    for name, expected in bits.items():
        assert np.array_equal(replica.bits(name), expected), name


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_whatever_was_missed_is_committed_as_one(make_ranks: Callable[..., Ranks], ranks: int) -> None:
    """From every earlier version: elements that change several times, go back, and change in one version only; a whole
    tensor that changes and goes back; a version in which everything changes, so that a unit comes complete."""
    run, bits = make_ranks(ranks), random_bits(0)
    versions = [bits]
    run.commit(run.publish(0, bits))
    late, sent = [], []
    for version in range(1, 5):
        replica = CheckpointReplica()
        commit_late(replica, run.publish_anchor(version - 1))
        late.append(replica)
        new = changed(versions[-1], version, density=0.01 if version < 3 else [0.9, 0.01][version - 3])
        back = np.random.default_rng(version).random(bits["embed"].size) < 0.3
        new["embed"][back] = bits["embed"][back]
        new["norm"] = bits["norm"] ^ np.uint16(version % 2)
        versions.append(new)
        announced = run.publish(version, new)
        sent.append(run.commit(announced).payload_bytes)
    for version, replica in enumerate(late):
        fetched = commit_late(replica, announced)
        assert (fetched.base_version, replica.state_hash) == (version, announced.state_hash)
        assert fetched.payload_bytes == sum(sent[version:])
        listed = [patch.patch.positions for patch in fetched.patches]
        assert all(p is None or bool(np.all(np.diff(p) > 0)) for p in listed)
        assert_equal(replica, 4, versions[4])


@pytest.mark.parametrize("ranks", quick_only([1, 3], [1]))
def test_the_first_version_is_a_delta_on_the_checkpoint(
    make_ranks: Callable[..., Ranks], tmp_path: Path, ranks: int
) -> None:
    """The first version is a delta on the checkpoint, and a restarted engine takes all deltas since."""
    first = random_bits(0)
    path = save_checkpoint(tmp_path / "model", first, publishing.TENSORS)
    run = make_ranks(ranks, checkpoint=path)
    announced = run.publish(0, first)
    assert announced.base_version == CHECKPOINT_VERSION
    replica = CheckpointReplica()
    fetched = commit_late(replica, announced, checkpoint=CheckpointBase(path))
    assert (fetched.base_version, fetched.payload_bytes) == (CHECKPOINT_VERSION, 0), "it holds version 0 already"
    assert_equal(replica, 0, first)
    bits = first
    for version in (1, 2):
        bits = changed(bits, version)
        announced = run.publish(version, bits)
    restarted = CheckpointReplica()
    fetched = commit_late(restarted, announced, checkpoint=CheckpointBase(path))
    assert fetched.base_version == CHECKPOINT_VERSION
    assert_equal(restarted, 2, bits)
    assert commit_late(replica, announced).base_version == 0, "what missed them goes on from its own version"
    again = run.publish(3, changed(bits, 3))
    assert commit_late(restarted, again).base_version == 2, "from here on as everybody"


def test_a_resumed_run_begins_with_a_delta_on_the_checkpoint(make_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """A resumed run begins with the elements that differ from the checkpoint."""
    first = random_bits(0)
    path = save_checkpoint(tmp_path / "model", first, publishing.TENSORS)
    run, bits = make_ranks(2, checkpoint=path), changed(first, 7)
    announced, replica = run.publish(40, bits), CheckpointReplica()
    assert commit_late(replica, announced, checkpoint=CheckpointBase(path)).base_version == CHECKPOINT_VERSION
    assert_equal(replica, 40, bits)


def test_reading_a_checkpoint_is_no_silence_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that takes long to read does not count as silence of the source."""
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
            announced, held=CheckpointReplica(), checkpoint=CheckpointBase(path), progress_seconds=3.0
        )
        assert fetched.base_version == CHECKPOINT_VERSION and fetched.payload_bytes > 0
    finally:
        push.close()


def test_a_checkpoint_that_differs_is_not_built_on(make_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """Other bits, other names, none at all: the delta is refused with the reason, and an anchor taken."""
    first = random_bits(0)
    right = save_checkpoint(tmp_path / "right", first, publishing.TENSORS)
    other_bits = save_checkpoint(tmp_path / "bits", changed(first, 9), publishing.TENSORS)
    fewer = {name: kind for name, kind in publishing.TENSORS.items() if name != "half"}
    other_names = save_checkpoint(tmp_path / "names", first, fewer)
    run = make_ranks(2, checkpoint=right)
    delta = run.publish(0, first)
    for path, reason in ((other_bits, "state hash"), (other_names, "holds nothing as 'half'"), (tmp_path, "safetens")):
        replica = CheckpointReplica()
        with pytest.raises(WeightError, match=rf"holds no published version yet.*{reason}.*publish an anchor"):
            commit_late(replica, delta, checkpoint=CheckpointBase(path))
        assert commit_late(replica, run.publish_anchor(0)).base_version is None
        assert_equal(replica, 0, first)
    with pytest.raises(WeightError, match="none is known to be loaded"):
        commit_late(CheckpointReplica(), delta)
    for other in (other_names, None):
        assert make_ranks(1, checkpoint=other).publish(0, first).base_version is None


# ---- on the wire -----------------------------------------------------------------------------------


@pytest.fixture
def push(tmp_path: Path) -> Iterator[SmallPush]:
    """The receiver is at version 0, the others at 2."""
    made = SmallPush(tmp_path)
    made.begin()
    for version in (1, 2):
        made.publish(version, small_changed(made.bits, version))
        made.publisher.acknowledge(version)
    yield made
    made.close()


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("fault", list(ONE_FRAME))
def test_a_fault_of_any_one_frame_of_a_chain_does_not_matter(
    push: SmallPush, tmp_path: Path, fault: str, number: int
) -> None:
    """Frames: three manifests, the newest first, then a chunk of each version."""
    new = small_changed(push.bits, 3)
    with FaultyLink(tmp_path, push.publisher.endpoint, Once(number, ONE_FRAME[fault])) as link:
        push.commit(link.through(push.publish(3, new)))
        assert link.replies >= 6
    push.assert_holds(3, new)


def test_a_cut_chain_goes_on_where_it_stopped(push: SmallPush, tmp_path: Path) -> None:
    """A chain that was cut off goes on where it stopped, also for a newer version."""
    kept, stop = KeptParts(), threading.Event()

    def stop_at_the_last_chunk(number: int, frames: list[bytes]) -> list[list[bytes]]:
        if number == 5:
            stop.set()
            return []
        return [frames]

    announced = push.publish(3, small_changed(push.bits, 3))
    with FaultyLink(tmp_path, push.publisher.endpoint, stop_at_the_last_chunk) as link:
        with pytest.raises(WeightError, match="was stopped"):
            push.fetch(link.through(announced), kept=kept, stop=stop, credit_bytes=1)
        before = len(link.requests)
        new = small_changed(push.bits, 4)
        newer = push.publish(4, new)
        push.replica.advance(push.replica.stage(push.fetch(link.through(newer), kept=kept)))
        asked = [decode_request(request).piece for request in link.requests[before:]]
        assert asked == [MANIFEST, 0, 0], "the newest, its chunk, and the one that did not come"
    push.assert_holds(4, new)


def test_chains_from_elsewhere_are_refused_unfetched(push: SmallPush, tmp_path: Path) -> None:
    """A chain that does not lead to the version that is held is refused before its bytes are requested."""
    push.publisher._chain._budget_bytes = 0
    missed = push.publish(3, small_changed(push.bits, 3))
    push.publisher.acknowledge(3)
    with FaultyLink(tmp_path, push.publisher.endpoint, lambda number, frames: [frames]) as link:
        with pytest.raises(WeightError, match=r"this engine holds version 0 .*not served .*publish an anchor"):
            push.fetch(link.through(missed))
        assert not any(decode_request(request).piece != MANIFEST for request in link.requests)
    push.assert_holds(0, push.bits)


def test_chains_with_gaps_are_refused(push: SmallPush) -> None:
    """An earlier version that is not the one before is refused."""
    announced = push.publish(3, small_changed(push.bits, 3))
    newest = served(push.publisher, announced)
    honest = decode_manifest(newest.manifest, newest.manifest_digest, "")
    before = push.publisher._server._parts[honest.base_digest]
    manifest = decode_manifest(before.manifest, before.manifest_digest, "")

    def taken(**changes: object) -> ReceivedChain:
        encoded = encode_manifest(msgspec.structs.replace(manifest, **changes))
        forged = encode_manifest(msgspec.structs.replace(honest, base_digest=digest_of(encoded)))
        (source,) = announced.sources
        source = msgspec.structs.replace(source, manifest_digest=digest_of(forged))
        chain = ReceivedChain(source, announced, {})
        chain.take([encoder.encode(Piece(digest_of(forged), MANIFEST)), forged])
        chain.extend()
        assert list(chain.requests(1)) == [GetPiece(digest_of(encoded), MANIFEST)]
        chain.take([encoder.encode(Piece(digest_of(encoded), MANIFEST)), encoded])
        return chain

    assert taken().oldest.manifest is not None
    for change in ({"part_hash": 1}, {"policy_version": 4}, {"run_id": "other"}, {"rank": 1}):
        with pytest.raises(WeightError, match="is made on"):
            taken(**change)
    with pytest.raises(WeightError, match="cannot be made on version 2"):
        taken(base_version=2)
    with pytest.raises(WeightError, match="dense it would have"):
        huge = msgspec.structs.replace(manifest.units[0], payload_bytes=1 << 30)
        chunks = (msgspec.structs.replace(manifest.chunks[0], payload_bytes=1 << 20),) * (1 << 10)
        taken(units=(huge,), chunks=chunks)


def test_chains_above_complete_weights_are_not_followed(push: SmallPush) -> None:
    """A chain that takes more bytes than complete weights is not followed."""
    announced = push.publish(3, small_changed(push.bits, 3))
    (source,) = announced.sources
    chain = ReceivedChain(msgspec.structs.replace(source, total_elements=5000), announced, {})
    newest = served(push.publisher, announced)
    chain.take([encoder.encode(Piece(newest.manifest_digest, MANIFEST)), newest.manifest])
    chain.source = msgspec.structs.replace(source, total_elements=1)
    chain.extend()
    assert "lead back to 2" in chain.refusal
    assert not list(chain.requests(1))

"""Object stores as folders (``file://``): who may write, what is copied and fetched, what is done with half of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from builders.files import SORT_RECIPE as RECIPE
from builders.files import json_lines

from streamrl.base.errors import EpochLost, StoreError, StreamRLError, WeightError
from streamrl.base.messages import announcement_of
from streamrl.comm.object_store import ObjectStore, access_problem
from streamrl.learning.state.durable_files import flush_and_digest, verify, write_digests
from streamrl.recipe.remote_names import url_problem
from streamrl.recipe.toml_text import toml_value
from streamrl.run.copies.checkpoint_copies import CheckpointCopies
from streamrl.run.copies.epochs import Epoch, take_epoch
from streamrl.run.copies.fetch_checkpoint import fetch_checkpoint
from streamrl.weights.pull.fetch import fetch_version
from tests.weights.publish.test_weight_publisher import changed, publisher_of, random_bits

pytest.importorskip("obstore")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def checkpoint(run: Path, version: int, content: bytes = b"weights") -> Path:
    directory = run / "checkpoints" / f"step-{version:06d}"
    (directory / "hf").mkdir(parents=True, exist_ok=True)
    (directory / "hf" / "model").write_bytes(content + bytes([version]))
    (directory / "state").write_bytes(b"")
    write_digests(directory, [flush_and_digest(directory, ["hf/model", "state"])])
    return directory


class Copies:
    """Copies of the checkpoints of ``run`` in one life, and what they warned of."""

    def __init__(self, url: str, run: Path) -> None:
        run.mkdir(exist_ok=True)
        self.warnings: list[str] = []
        self.store = ObjectStore(f"{url}/{run.name}/checkpoints")
        epoch = take_epoch(f"{url}/{run.name}", run)
        self.copies = CheckpointCopies(self.store, epoch, run / "checkpoints", self._warn)

    async def _warn(self, version: int, text: str) -> None:
        self.warnings.append(text)

    async def bring(self, *versions: int) -> set[str]:
        """What is there afterwards, without the digests in the names."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.copies.run)
            self.copies.want(versions)
            await self.copies.settled()
            tasks.cancel_scope.cancel()
        return {key.partition(".")[0].partition("/")[0] for key in self.store.list_keys()} - {"latest"}


def test_urls_and_places_that_cannot_be_used_are_named(tmp_path: Path, url: str) -> None:
    assert "ftp://a/b" in url_problem("ftp://a/b") and "s3://" in url_problem("ftp://a/b")
    assert url_problem("s3://ab/x").endswith("one has 3 to 63") and url_problem(f"gs://{'a' * 64}")
    assert not url_problem(url) and not access_problem(url) and not ObjectStore(url).list_keys()
    (tmp_path / "file").write_text("")
    assert "cannot be reached or used" in access_problem(f"file://{tmp_path}/file/below")


def test_of_sixteen_that_begin_at_once_one_may_write(tmp_path: Path, url: str) -> None:
    (run := tmp_path / "run").mkdir()
    store, barrier = ObjectStore(url), threading.Barrier(16)

    def create(writer: int) -> bool:
        barrier.wait()
        return store.create("epoch-object", b"%d" % writer)

    def take() -> Epoch | str:
        barrier.wait()
        try:
            return take_epoch(f"{url}/run", run)
        except StoreError as error:
            return str(error)

    def loss(epoch: Epoch) -> str:
        try:
            epoch.check()
        except EpochLost as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(create, range(16))) == 1
        taken = [future.result() for future in [threads.submit(take) for _ in range(16)]]
    refused = [one for one in taken if isinstance(one, str)]
    assert all("at the same time: this process ends" in text for text in refused)
    lost = [loss(one) for one in taken if isinstance(one, Epoch)]
    assert lost.count("") == 1 and all("writes nothing there any more" in text for text in lost if text)
    (other := tmp_path / "elsewhere" / "run").mkdir(parents=True)
    with pytest.raises(StoreError, match="is of another run"):
        take_epoch(f"{url}/run", other)


def test_a_file_that_cannot_be_read_is_not_tried_again(tmp_path: Path, url: str) -> None:
    """An error of the disk is said at once, with the file: only what the store refuses is tried again."""
    broken = Path("/proc/self/mem")  # opens, and its first page cannot be read
    store, begun = ObjectStore(url, give_up_s=60), time.monotonic()
    with pytest.raises(StoreError, match=r"/proc/self/mem cannot be read \(Input/output error\): it was not copied"):
        store.put_file("copy", broken)
    assert time.monotonic() - begun < 10


async def test_copies_follow_what_is_kept_and_come_back_whole(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    first = Copies(url, run)
    for version in (2, 4, 6):
        checkpoint(run, version)
    assert await first.bring(2, 4) == {"step-000002", "step-000004"}
    assert first.copies.sent_bytes() == 0  # tries after the first are no progress of the run
    first.copies.want((2, 4))
    assert first.copies.sent_bytes() == 2 * len(b"weights.")  # a copy that takes long is no stall of it
    assert await first.bring(4, 6) == {"step-000004", "step-000006"}
    for name in ("latest", "latest/"):
        fetched = fetch_checkpoint(f"{url}/run/checkpoints/{name}", tmp_path / "fetched")
        verify(fetched)
        assert (fetched / "hf" / "model").read_bytes() == b"weights\x06"
    later = Copies(url, run)  # the first was cut off, and goes on
    checkpoint(run, 8)
    assert await first.bring(4, 6, 8) == {"step-000004", "step-000006"}
    first.copies.want([8])
    await first.copies.settled()
    assert len(first.warnings) == 1 and "of epoch 1, writes nothing there any more" in first.warnings[0]
    checkpoint(run, 6, b"written anew")
    await later.bring(6, 8)
    names = {key.partition("/")[0] for key in later.store.list_keys() if key.endswith("digests")}
    assert len(names) == 2 and not later.warnings
    model = next(key for key in later.store.list_keys() if "step-000008" in key and key.endswith("model"))
    later.store.put(model, b"weights\x07")
    with pytest.raises(StreamRLError, match="is damaged: hf/model differs"):
        fetch_checkpoint(f"{url}/run/checkpoints/latest", tmp_path / "fetched")
    later.store.remove([key for key in later.store.list_keys() if "step-000008" in key and key.endswith("digests")])
    with pytest.raises(StreamRLError, match=r"no whole copy of a checkpoint \(whole there are step-000006\."):
        fetch_checkpoint(f"{url}/run/checkpoints/latest", tmp_path / "fetched")
    (run / "checkpoints" / "step-000008" / "hf" / "model").write_bytes(b"damaged")
    await later.bring(8)
    newest = Copies(url, run)
    await newest.bring(8)
    assert "step-000008/hf/model is not as it was written" in newest.warnings[0]
    assert not [key for key in later.store.list_keys() if "step-000008" in key and key.endswith("digests")]


async def test_an_absent_store_keeps_no_older_copies(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that cannot be reached when a life begins keeps no older copies."""

    def away(*_: object) -> list[str]:
        raise StoreError("away")

    first = Copies(url, run := tmp_path / "run")
    for version in (2, 4):
        checkpoint(run, version)
    await first.bring(2)
    later = Copies(url, run)
    with monkeypatch.context() as patched, pytest.raises(StoreError):
        patched.setattr(ObjectStore, "list_keys", away)
        await later.bring(4)
    assert await later.bring(4) == {"step-000004"}


async def test_a_newer_order_of_copies_ends_the_wait_for_an_older(tmp_path: Path, url: str) -> None:
    checkpoint(tmp_path / "run", 2)
    copies = Copies(url, tmp_path / "run").copies
    copies.want([2])
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(copies.settled)
                await anyio.wait_all_tasks_blocked()
                copies.want([2, 4])
                tasks.start_soon(copies.run)
            tasks.cancel_scope.cancel()


@contextmanager
def failing_writes(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """The writer dies after so many objects."""
    create, left = ObjectStore.create, iter(range(after))

    def until_killed(self: ObjectStore, key: str, content: bytes) -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return create(self, key, content)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "create", until_killed)
        yield


def test_half_written_versions_are_unread_and_removed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that was half written is read by nobody, and is removed."""
    bits, store = random_bits(0), ObjectStore(url)
    with publisher_of(url, threads=1) as killed, failing_writes(monkeypatch, 2), pytest.raises(KeyboardInterrupt):
        killed.publish(0, bits)
    half = [key for key in store.list_keys() if not key.startswith("start/")]
    assert len(half) == 2 and not any(key.endswith("manifest") for key in half)
    with publisher_of(url, threads=1) as publisher:
        fetch_version(announcement_of(0, [publisher.publish(0, bits)]))
    with publisher_of(url, threads=1) as publisher:
        newest = announcement_of(3, [publisher.publish(3, changed(bits, 3))])
        assert not set(half) & set(store.list_keys())
        fetch_version(newest)
    with publisher_of(url, threads=1) as again:  # the same version once more: what is there is not written again
        with failing_writes(monkeypatch, 0):
            assert again.publish(3, changed(bits, 3)).source == newest.sources[0]
        store.put(next(key for key in store.list_keys() if key.endswith("000001")), b"other bytes")
        with pytest.raises(WeightError, match=r"chunk 1 from .* came 3 times with digest"):
            fetch_version(newest, progress_seconds=5.0)


def test_an_earlier_life_of_a_rank_writes_and_removes_nothing(url: str) -> None:
    bits = random_bits(0)
    with publisher_of(url, threads=1) as cut_off, publisher_of(url, threads=1) as later:
        newest = announcement_of(3, [later.publish(3, bits)])
        there = ObjectStore(url).list_keys()
        with pytest.raises(EpochLost, match="a later start of this rank writes there"):
            cut_off.publish(2, changed(bits, 2))
        assert ObjectStore(url).list_keys() == there
        fetch_version(newest)


@pytest.mark.long
@pytest.mark.torch
def test_a_run_resumes_from_weights_in_a_store(tmp_path: Path, url: str) -> None:
    """A run keeps weights and checkpoints in a store, and another one goes on from there."""
    pytest.importorskip("torch")
    (tmp_path / "reward.py").write_text("async def reward(completion):\n    return len(completion) % 7 / 6\n")
    settings = {
        "run.directory": f"{tmp_path}/runs",
        "engines.kind": "simulated",
        "rewards.0.function": f"{tmp_path}/reward.py:reward",
        "rollout.prompts_per_batch": 2,
        "rollout.group_size": 4,
        "sampling.max_tokens": 16,
        "evaluation.prompts": "",
        "weights.advanced.transport": url,
        "checkpoint.advanced.copy_to": url,
        "checkpoint.keep": 1,
    }

    def train(**more: object) -> Path:
        chosen = settings | {key.replace("__", "."): value for key, value in more.items()}
        flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={toml_value(value)}")]
        command = [sys.executable, "-m", "streamrl", "train", str(RECIPE), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return (tmp_path / "runs" / "latest").resolve()

    run = train(run__steps=2)
    there = ObjectStore(f"{url}/{run.name}").list_keys()
    assert [key for key in there if key.startswith("epoch/")] == ["epoch/000001"]
    assert [key for key in there if key.startswith("weights/trainer-0/") and key.endswith("/manifest")]
    latest = f"{url}/{run.name}/checkpoints/latest"
    assert len([key for key in there if key.endswith("/digests")]) == 1
    second = train(run__steps=3, checkpoint__resume_from=latest)
    lines = json_lines(second / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [3]

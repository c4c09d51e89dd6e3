"""Processes of several trainer ranks: ``rank_process.py DIRECTORY``. Importing torch is what costs: they are forks of
one that has.

All of them first save weights of odd shapes together to ``DIRECTORY/odd``, then each is a rank of one trainer after the
other (``DIRECTORY/phases.json``). Their exit codes go to ``codes.json`` (None: it hung)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch._dynamo  # what ranks would import: here once
import transformers.distributed.tensor_parallel  # noqa: F401
from peak_bytes import PeakBytes
from sample_groups import close_of, make_groups, master_values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import SaveCheckpoint
from streamrl.learning import process_group
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state import checkpoint
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.state.published_weights import FullWeights
from streamrl.learning.trainer import TorchTrainer
from streamrl.recipe.sections import Gathered
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.publish.torch_tensors import DeviceTensors, TorchOnCpu, shard_specs, start_publisher

SIZES = [4, 3, 1, 5, 2]
ODD = [(3, 5), (7,), (1, 2, 3), (6, 4)]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one trainer. ``shares``: indices of the groups that it gets in even and in odd steps.

    ``checkpoints``: directories by the version at which they are written. ``end``: what this
    rank does after the groups of one more batch: ``die``, ``hang``, or ``survive``, which writes its error and when it
    came to ``out``. ``measured``: also write the bytes of tensors at the peak of its start and its first step."""

    options: TrainerOptions
    shares: list[list[int]]
    steps: int
    out: str
    checkpoints: dict[int, str] = {}
    end: str = ""
    measured: bool = False


def run(phase: Phase) -> None:
    while phase.options.resume_from and not Path(phase.options.resume_from).exists():
        time.sleep(0.05)  # another trainer has still to write it: it appears whole
    trainer = TorchTrainer(phase.options, start_publisher)
    if phase.measured:
        return measure(phase, trainer)
    first = trainer.start().policy_version
    arrays: dict[str, np.ndarray] = {}
    for version in range(first, first + phase.steps + 1):
        if version in phase.checkpoints:
            trainer.save_checkpoint(SaveCheckpoint(directory=phase.checkpoints[version], policy_version=version))
        if version == first + phase.steps and not phase.end:
            break
        groups = make_groups(version, SIZES, seed=version, version=version)
        share = phase.shares[version % len(phase.shares)]
        for index in share[:1]:
            trainer.train_group(groups[index])
        if phase.options.gathered is Gathered.LAYER and phase.options.streaming:
            trainer.train_pending()  # as it is ordered of every rank
        for index in share[1:]:
            trainer.train_group(groups[index])
        if version == first + phase.steps:
            return end(phase, trainer, version)
        report = trainer.close_batch(close_of(groups, version + 1))
        trainer.acknowledge(version + 1)
        arrays |= {f"{version + 1}/{name}": np.float64(value) for name, value in report.metrics.items()}
    arrays |= {f"offset/{shard.name}": np.int64(shard.offset) for shard in trainer._updates.weights.shards}
    arrays |= {f"master/{name}": value for name, value in master_values(trainer).items()}
    np.savez(phase.out, **arrays)
    trainer.close()
    return None


def measure(phase: Phase, trainer: TorchTrainer) -> None:
    groups = make_groups(0, [3, 2, 1, 2, 1], version=0)
    with PeakBytes() as counted:
        trainer.start()
        start, counted.peak = counted.peak, 0
        for index in phase.shares[0]:
            trainer.train_group(groups[index])
        trainer.close_batch(close_of(groups, 1))
    np.savez(phase.out, start=start, step=counted.peak)
    trainer.close()


def end(phase: Phase, trainer: TorchTrainer, version: int) -> None:
    if phase.end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if phase.end == "hang":
        time.sleep(1000)
    started, error = time.monotonic(), "none"
    try:
        trainer.close_batch(close_of(make_groups(version, SIZES, seed=version, version=version), version + 1))
    except (StreamRLError, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    noticed = time.monotonic()
    trainer.close()
    found = {"noticed": noticed - started, "closed": time.monotonic() - noticed, "threads": torch.get_num_threads()}
    Path(phase.out).write_bytes(msgspec.json.encode({"error": error, **found}))


def odd_weights(seed: int, ranks: int = 1) -> FullWeights:
    """Random tensors that four ranks cannot share evenly, some of them in fewer rows than ranks."""
    torch.manual_seed(seed)
    model = torch.nn.ParameterDict({str(i): torch.nn.Parameter(torch.randn(shape)) for i, shape in enumerate(ODD)})
    root = torch.nn.Sequential(model)
    if ranks > 1:
        fully_shard(root, mesh=init_device_mesh("cpu", (ranks,)))
    return FullWeights(dict(root.named_parameters()))


def publish_odd(rank: int, ranks: int) -> None:
    """What FSDP gave this rank goes to engines alike from CPU memory and from a device (which is a CPU here)."""
    weights = odd_weights(3, ranks)
    shards = shard_specs(weights.shards)
    publishers = [
        WeightPublisher("ipc:///nowhere", run_id="odd", rank=rank, shards=shards, source=source)
        for source in (TorchOnCpu(), DeviceTensors(torch.device("cpu")))
    ]
    for version in range(3):
        for publisher in publishers:
            publisher.publish(version, weights.values())
            publisher.acknowledge(version)
        assert len({publisher._chain.newest_digest for publisher in publishers}) == 1
        weights.masters.load(weights.masters.full() * 1.01)


def save_odd(rank: int, ranks: int, directory: Path) -> None:
    rendezvous = f"file://{directory}/odd.rendezvous"
    options = TrainerOptions(
        model_path="", run_id="", weights_endpoint="", rank=rank, ranks=ranks, rendezvous=rendezvous, device="cpu"
    )
    process_group.join(options, torch.device("cpu"))
    publish_odd(rank, ranks)
    weights = odd_weights(1, ranks)
    optimizer = MasterOptimizer(options, weights.masters, weights.decayed_places)
    optimizer.load_moments({"exp_avg": 2 * weights.masters.full(), "exp_avg_sq": weights.masters.full() ** 2}, 9)
    state = checkpoint.TrainerState(policy_version=9)
    model, extra = directory / "model", {"replicated": torch.arange(3.0)}
    checkpoint.save(directory / "odd", weights, optimizer, state=state, model_path=model, extra=extra)
    process_group.leave()


def run_all(rank: int, ranks: int, directory: Path, phases: list[Phase]) -> None:
    save_odd(rank, ranks, directory)
    for each in phases:
        run(each)


if __name__ == "__main__":
    hash_range("", 0, np.zeros(1, dtype=np.uint16))  # compiled code is read here once, too
    directory = Path(sys.argv[1])
    each = msgspec.json.decode((directory / "phases.json").read_bytes(), type=list[list[Phase]])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_all, args=(n, len(each), directory, phases)) for n, phases in enumerate(each)]
    for rank in ranks:
        rank.start()
    for rank, phases in zip(ranks, each, strict=True):
        if phases[-1].end != "hang":
            rank.join()
    (directory / "codes.json").write_bytes(msgspec.json.encode([rank.exitcode for rank in ranks]))
    for rank in ranks:
        rank.kill()

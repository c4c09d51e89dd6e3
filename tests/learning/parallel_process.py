"""``parallel_process.py CASES.json``: trainers cut over some ranks, each case in another way, one after the other.
Importing torch is what costs: it is done once, and the ranks of each case are forks."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist
import transformers.distributed.tensor_parallel  # noqa: F401
from sample_groups import close_of, make_groups
from torch import Tensor, device, int16
from torch.multiprocessing import start_processes

from streamrl.base.messages import SaveCheckpoint
from streamrl.base.types import TrainingSample
from streamrl.learning.batches import packing
from streamrl.learning.model import context_parallel, local_shards
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.published_weights import FullWeights
from streamrl.learning.trainer import TorchTrainer
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.publish import torch_tensors

SIZES = [4, 3, 1, 5, 2]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """``prompts``: tokens of the longest one. ``planted``: a bug that is put in before. ``save``: the directory of a
    checkpoint after all steps."""

    options: TrainerOptions
    out: str
    steps: int = 0
    prompts: int = 6
    save: str = ""
    planted: str = ""


def plant(name: str) -> None:
    if name == "no reduction":
        FullWeights.reduce_over = lambda *_: None  # type: ignore[method-assign]
    elif name == "rows":
        whole = torch_tensors.shard_specs
        torch_tensors.shard_specs = lambda shards: [  # type: ignore[assignment]
            msgspec.structs.replace(spec, run=0, stride=0) for spec in whole(shards)
        ]
    elif name == "no sum":  # of the gradients that keys have on other ranks
        context_parallel.dist = SimpleNamespace(all_gather=dist.all_gather, reduce_scatter=keep_own)  # type: ignore[assignment]
    elif name == "twice":
        local_shards._is_owned = lambda _: True


def keep_own(own: Tensor, parts: list[Tensor], group: Any) -> None:
    own.copy_(parts[dist.get_rank(group)])


def count_cuts() -> Counter[str]:
    """Count the rows that are cut in the middle of a prompt that siblings share, and of what continues one."""
    counted, lay_row = Counter[str](), packing.lay_row

    def counting(groups: Any, multiple: int = 1) -> packing.LaidRow:
        laid = lay_row(groups, multiple)
        size = len(laid.tokens_T) // multiple
        prompts = {sequence.prefix for sequence in laid.sequences}
        for index, (start, length, prefix) in enumerate(laid.sequences):
            if start // size != (start + length - 1) // size and multiple > 1:
                counted["prompts"] += index in prompts
                counted["continuations"] += prefix >= 0
        return laid

    packing.lay_row = counting
    return counted


def of_shards(trainer: TorchTrainer, kind: str, flat_L: Tensor) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for shard in trainer._updates.weights.master_shards:
        arrays[f"{kind}/{shard.name}"] = flat_L[shard.place].detach().numpy().reshape(shard.local_shape).copy()
        arrays |= {f"held/{side}/{shard.name}": indices for side, indices in enumerate(shard.indices)}
        arrays[f"shape/{shard.name}"] = np.array(shard.shape)
    return arrays


def observing(sample: TrainingSample) -> TrainingSample:
    """The sample with every third trained token as one that an environment wrote."""
    mask = bytearray(sample.loss_mask)
    first = mask.index(1)
    mask[first + 1 :: 3] = b"\2" * len(mask[first + 1 :: 3])
    return msgspec.structs.replace(sample, loss_mask=bytes(mask))


def run(rank: int, ranks: list[Case]) -> None:
    case, options = ranks[rank], ranks[rank].options
    plant(case.planted)
    cuts = count_cuts()
    trainer = TorchTrainer(options, torch_tensors.start_publisher)
    first = trainer.start().policy_version
    for group in list(dist.distributed_c10d._world.pg_map):  # also of meshes: a rank that hangs is noticed
        assert group._get_backend(device("cpu")).options._timeout.seconds == options.collective_timeout_s
    published = trainer.publish_anchor(first)
    arrays: dict[str, Any] = {"hash": np.uint64(published.state_hash), "elements": published.source.total_elements}
    weights, collect = trainer._updates.weights, trainer._updates.weights.collect_gradient

    def seen() -> Tensor:
        gradient_L = collect()
        if not any(name.startswith("gradient/") for name in arrays):
            averaged = options.ranks // options.tensor_parallel_size
            arrays.update(of_shards(trainer, "gradient", gradient_L * averaged))
        return gradient_L

    weights.collect_gradient = seen  # type: ignore[method-assign]
    data, number = options.rank // options.ranks_per_group, options.ranks // options.ranks_per_group
    for version in range(first, first + case.steps):
        groups = make_groups(version, SIZES, seed=version, version=version, prompts=case.prompts)
        if options.learn_observations:
            groups = [msgspec.structs.replace(group, samples=tuple(map(observing, group.samples))) for group in groups]
        for index, group in enumerate(groups):
            if (index + version) % 3 % number == data:
                trainer.train_group(group)
            if index == 2 and options.streaming and trainer._updates.by_layer:
                trainer.train_pending()  # as it is ordered of every rank
        report = trainer.close_batch(close_of(groups, version + 1))
        arrays[f"loss/{version}"] = report.metrics["optim/loss"]
        arrays[f"norm/{version}"] = report.metrics["optim/grad_norm"]
        trainer.acknowledge(version + 1)
        arrays["after"] = np.uint64(report.state_hash)
    warnings.simplefilter("ignore")  # torch's own gathering takes two steps for strided shards, and says so
    whole = {name: full.flatten().view(int16).numpy() for name, full in weights.full_published().items()}
    hashes = [hash_range(name, 0, bits.view(np.uint16)) for name, bits in whole.items()]
    arrays["exported"] = np.uint64(sum(hashes) % (1 << 64))
    arrays |= of_shards(trainer, "master", weights.masters.full())
    if case.save:
        trainer.save_checkpoint(SaveCheckpoint(directory=case.save, policy_version=trainer.policy_version))
    arrays |= {"cut_prompts": cuts["prompts"], "cut_continuations": cuts["continuations"]}
    np.savez(case.out, **arrays)
    trainer.close()


if __name__ == "__main__":
    hash_range("", 0, np.zeros(1, dtype=np.uint16))  # compiled code is read here once, too
    for ranks in msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[list[Case]]):
        # New processes for each case: torch keeps plans by mesh, and takes the mesh of another case for an equal one.
        start_processes(run, (ranks,), nprocs=len(ranks), start_method="fork")

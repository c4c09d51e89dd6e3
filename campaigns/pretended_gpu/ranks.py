"""Ranks of one trainer on pretended GPUs, one each: FSDP2 over NCCL as the ranks see it, over gloo in truth.

    python -m campaigns.pretended_gpu.ranks FOLDER MODEL VARIANT

The groups of two steps are shared unevenly. Masters and metrics must be those of one rank on the host:
``problems_of``."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.base.messages import CloseBatch
from streamrl.base.types import TrainingGroup, TrainingSample, TrajectoryId, float_array, token_array
from streamrl.recipe.sections import ComputeDtype, Gathered

RANKS = 2
SIZES = (4, 3, 1, 5, 2)
SHARES = (((0,), (1, 2, 3, 4)), ((0, 1, 2, 3, 4), ()))
"""Groups of each rank in the first and in the second step."""
VARIANTS: dict[str, dict[str, Any]] = {
    "whole model": {"gathered": Gathered.BATCH},
    "layer by layer": {"gathered": Gathered.LAYER, "activation_checkpointing": True},
    "two replicas": {"replicas": 2},
    "tensor parallel": {"tensor_parallel_size": 2},
}
METRICS = ("optim/grad_norm", "policy/entropy", "policy/is_weight_mean")
TOLERANCE = 5e-5
LIMIT_S = 300


def groups_of(step: int) -> list[TrainingGroup]:
    """Random groups of random samples."""
    draw = random.Random(step)
    return [
        TrainingGroup(
            group_id=number, batch_id=step, samples=tuple(_sample(draw, number, place, step) for place in range(size))
        )
        for number, size in enumerate(SIZES)
    ]


def _sample(draw: random.Random, group: int, place: int, version: int) -> TrainingSample:
    tokens = [draw.randrange(3, 32) for _ in range(draw.randint(4, 40))]
    return TrainingSample(
        id=TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=place),
        token_ids=token_array(tokens),
        loss_mask=b"\0\0" + b"\1" * (len(tokens) - 2),
        behavior_logprobs=float_array([-3.0] * len(tokens)),
        reward=float(draw.randint(0, 3)),
        oldest_version=version,
        newest_version=version,
    )


def train(rank: int, ranks: int, folder: Path, model: str, device: str, options: dict[str, Any]) -> None:
    """One rank: two steps, then its masters in a file."""
    from streamrl.learning.options import TrainerOptions
    from streamrl.learning.trainer import TorchTrainer
    from streamrl.weights.publish.torch_tensors import start_publisher

    chosen = TrainerOptions(
        model_path=model, run_id="ranks", weights_endpoint=f"ipc://{folder}/{device}{rank}", rank=rank, ranks=ranks,
        rendezvous=f"file://{folder}/rendezvous" if ranks > 1 else "", device=device, threads=1, learning_rate=1e-3,
        micro_batch_tokens=64, compute_dtype=ComputeDtype.FLOAT32, collective_timeout_s=120.0, **options,
    )  # fmt: skip
    trainer = TorchTrainer(chosen, start_publisher)
    same_rows = chosen.ranks_per_group
    trainer.start()
    found: dict[str, Any] = {}
    for step, shares in enumerate(SHARES):
        groups = groups_of(step)
        mine = range(len(groups)) if ranks == same_rows else shares[rank // same_rows]
        for number in mine:
            trainer.train_group(groups[number])
        samples = [sample for group in groups for sample in group.samples]
        report = trainer.close_batch(
            CloseBatch(
                batch_id=step,
                policy_version=step + 1,
                groups=len(groups),
                samples=len(samples),
                trained_tokens=sum(sample.trained_tokens for sample in samples),
            )
        )
        trainer.acknowledge(step + 1)
        found |= {f"{name} of step {step}": np.array([report.metrics[name]]) for name in METRICS}
    weights = trainer._updates.weights
    masters = weights.masters.full().cpu().numpy()
    if chosen.tensor_parallel_size == 1:  # else parts are cut across rows
        found |= {f"{shard.name}@{shard.offset}": masters[shard.place] for shard in weights.master_shards}
    np.savez(folder / f"{device}{rank}.npz", **found)
    trainer.close()


def _pretend(rank: int, folder: Path, model: str, options: dict[str, Any]) -> None:
    from campaigns.pretended_gpu.cards import KNOWN
    from campaigns.pretended_gpu.devices import pretended_gpus, seen

    with pretended_gpus([KNOWN["H100"]] * RANKS):
        try:
            train(rank, RANKS, folder, model, "cuda", options)
        finally:
            (folder / f"refused{rank}.json").write_text(json.dumps(seen().refused))


def problems_of(variant: str, model: str) -> list[str]:
    """Sentences about what went wrong with a variant; none where the ranks have the masters of one rank."""
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        command = [sys.executable, "-m", "campaigns.pretended_gpu.ranks", folder, model, variant]
        tree = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        refused = [
            sentence for file in sorted(Path(folder).glob("refused*.json")) for sentence in json.loads(file.read_text())
        ]
        if refused or done.returncode:
            return refused or [f"exit code {done.returncode}: {done.stderr[-1000:]}"]
        return differences(Path(folder))


def differences(folder: Path) -> list[str]:
    """What the ranks have otherwise than the rank on the host."""
    (alone,) = folder.glob("cpu*.npz")
    expected = np.load(alone)
    problems = []
    for file in sorted(folder.glob("cuda*.npz")):
        found = np.load(file)
        for name in found.files:
            tensor, _, offset = name.rpartition("@")
            whole = expected[f"{tensor}@0" if tensor else name]
            part = whole[int(offset) if tensor else 0 :][: len(found[name])]
            if not np.allclose(found[name], part, rtol=TOLERANCE, atol=TOLERANCE):
                problems.append(f"{file.stem}: {name} is not that of one rank")
    return problems


def main() -> int:
    """Both ranks, and one rank alone on the host."""
    folder, model, variant = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_pretend, args=(rank, folder, model, VARIANTS[variant])) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    train(0, 1, folder, model, "cpu", {})
    for rank in ranks:
        rank.join()
    return int(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    sys.exit(main())

"""A rank of two on GPUs of their own, as a program: ``two_ranks.py RANK FOLDER MODEL DEVICE``.

It sums a block over both with NCCL, timed, then trains two steps under FSDP2, layer by layer. What it found goes to
``FOLDER/RANK.json``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

for folder in (".", "../learning", "..", "../.."):
    sys.path.insert(0, str((Path(__file__).parent / folder).resolve()))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_cases import samples_of  # noqa: E402
from sample_groups import close_of  # noqa: E402
from training_steps import groups_of  # noqa: E402

from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.learning.trainer import TorchTrainer  # noqa: E402
from streamrl.recipe.sections import Gathered  # noqa: E402
from streamrl.weights.publish.torch_tensors import start_publisher  # noqa: E402

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 28}
"""Bytes that are summed."""
TIMES = 5


def summed(device: torch.device) -> dict[str, float]:
    """Seconds and rate of sums over both ranks; raises where a sum is wrong."""
    block = torch.full((BLOCK[device.type] // 4,), float(dist.get_rank() + 1), device=device)
    seconds = []
    for _ in range(TIMES):
        block.fill_(float(dist.get_rank() + 1))
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(block)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    assert bool((block == 3.0).all()), "the sum over both ranks is wrong"
    return {"all_reduce_gb_s": 1e-9 * BLOCK[device.type] / min(seconds)}


def trained(rank: int, folder: Path, model: str, device: str) -> dict[str, Any]:
    """Two steps on two groups each, of which a rank has one."""
    options = TrainerOptions(
        model_path=model, run_id="two", weights_endpoint=f"ipc://{folder}/w{rank}", rank=rank, ranks=2,
        rendezvous=f"file://{folder}/rendezvous", device=device, gathered=Gathered.LAYER, micro_batch_tokens=256,
        threads=1 if device == "cpu" else 0, collective_timeout_s=60.0,
    )  # fmt: skip
    trainer = TorchTrainer(options, start_publisher)
    ready = trainer.start()
    found: dict[str, Any] = {"parameters": ready.parameters, **summed(trainer._device)}
    norms = []
    for batch in range(2):
        groups = groups_of(samples_of([64] * 4, batch=batch), batch)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        trainer.train_group(groups[rank])
        norms.append(trainer.close_batch(close_of(groups, batch + 1)).metrics["optim/grad_norm"])
        trainer.acknowledge(batch + 1)
        found["step_s"] = time.perf_counter() - began
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    trainer.close()
    return found | {"gradient_norms": norms}


if __name__ == "__main__":
    number, place, model_path, kind = sys.argv[1:]
    (Path(place) / f"{number}.json").write_text(json.dumps(trained(int(number), Path(place), model_path, kind)))

"""Two ranks that train adapters, each way of gathering in turn: ``adapter_process.py MODEL DIRECTORY``.

Every rank adds the gradients of its share of ``SAMPLES`` inputs, as the trainer does: without sync while a batch is
open, then one synced backward that adds nothing; or, layer by layer, with a sync in each of as many backwards on every
rank. The result does not depend on the number of ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM

from streamrl.learning import process_group
from streamrl.learning.model.parallel import split_of
from streamrl.learning.model.policy import PackedPolicy, set_gradient_sync, set_sharded, shard
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.state.published_weights import global_norm
from streamrl.learning.updates import make_weights
from streamrl.recipe.sections import Gathered, Lora, LoraSync

SAMPLES, STEPS = 3, 2
WAYS = (Gathered.BATCH, Gathered.LAYER)


class Losses(PackedPolicy):
    """Next-token loss of plain token rows, through the module that FSDP2 has as its root."""

    def forward(self, tokens_BT: Any) -> Any:
        logits_BTV = self.hugging_face(input_ids=tokens_BT, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


def main(
    model_path: str,
    rank: int,
    ranks: int,
    rendezvous: str,
    out: str,
    gathered: Gathered = Gathered.BATCH,
    sync: LoraSync = LoraSync.MERGED,
) -> None:
    options = TrainerOptions(
        model_path=model_path,
        run_id="",
        weights_endpoint="",
        rank=rank,
        ranks=ranks,
        rendezvous=rendezvous,
        lora=Lora(rank=3, targets=("q_proj", "down_proj"), sync=sync),
        weight_decay=0.1,
    )
    process_group.use_threads(1)
    device = torch.device("cpu")
    process_group.join(options, device)
    policy = Losses(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval())
    if ranks > 1:
        shard(policy, split_of(options, device).data, gathered, sixteen_bit=False)
    weights = make_weights(options, policy)
    optimizer = MasterOptimizer(options, weights.masters, weights.decayed_places)
    arrays: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        weights.clear_gradient()
        by_layer = gathered is Gathered.LAYER
        set_sharded(policy, by_layer)
        set_gradient_sync(policy, by_layer)
        tokens = torch.randint(0, 32, (SAMPLES, 12), generator=torch.Generator().manual_seed(step))
        for index in range(SAMPLES):
            if index % ranks == rank:
                policy(tokens[index : index + 1]).backward()
            elif by_layer:
                (policy(tokens[:1]) * 0.0).backward()
        if by_layer:
            set_sharded(policy, True)
        elif ranks > 1:
            set_gradient_sync(policy, True)
            (policy(tokens[:1]) * 0.0).backward()
            set_sharded(policy, True)
        gradient_L = weights.collect_gradient().mul_(ranks)
        arrays[f"norm.{step}"] = np.float64(global_norm(gradient_L))
        optimizer.step(gradient_L, 1e-2)
        weights.refresh_forward()
    masters = weights.as_tensors(weights.masters.full())
    arrays |= {f"master.{n}": (t.full_tensor() if ranks > 1 else t).numpy() for n, t in masters.items()}
    arrays |= {f"published.{n}": t.float().numpy() for n, t in weights.full_published().items()}  # of the first rank
    arrays |= {f"bits.{n}": bits for n, bits in weights.bits().items()}
    weights.save_adapter(Path(out).with_suffix(".adapter"))
    np.savez(out, **arrays)
    dist.barrier()
    del weights, optimizer, policy
    process_group.leave()


def run(rank: int, model: str, directory: str) -> None:
    for kind in LoraSync:
        for way in WAYS:
            name = f"{directory}/{kind}.{way}"
            main(model, rank, 2, f"file://{name}.rendezvous", f"{name}.{rank}.npz", way, kind)


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # which both would import
    start_processes(run, tuple(sys.argv[1:]), nprocs=2, start_method="fork")

"""Share of the change of logprobs that engines have after 30 steps, by learning rate: adapters that are merged, and
adapters that are served beside the base. One trainer rank on the demo's model, without engines.

    python benchmarks/adapter_updates.py [--steps 30] [--rank 16]

What engines have is what the rank publishes: its forward runs on these bits. The whole change is the one of the float32
masters, ``W0 + s B A`` without a rounding, computed in float64 by transformers' own model. The share is that of the
change along the whole one, over the tokens of prompts that are not trained on."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from streamrl.base.messages import CloseBatch
from streamrl.base.types import TrainingGroup, TrainingSample, TrajectoryId, float_array, token_array
from streamrl.learning.options import TrainerOptions
from streamrl.learning.trainer import TorchTrainer
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.sections import Lora, LoraSync
from streamrl.weights.publish.torch_tensors import start_publisher

DEMO = Path(__file__).parents[1] / "examples" / "sort"
State = dict[str, torch.Tensor]
RATES = (1e-6, 1e-5, 5e-5, 2e-4)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@contextmanager
def started(options: TrainerOptions) -> Iterator[TorchTrainer]:
    trainer = TorchTrainer(options, start_publisher)
    trainer.start()
    try:
        yield trainer
    finally:
        trainer.close()


def group_of(step: int, prompt: list[int], texts: list[list[int]], logprobs: Any) -> TrainingGroup:
    """One prompt with completions of which every second one is rewarded."""
    samples = []
    for number, text in enumerate(texts):
        tokens = token_array(prompt + text)
        mask = bytes(len(prompt)) + b"\1" * len(text)
        behavior = float_array([0.0] * len(prompt) + logprobs(prompt + text)[-len(text) :].tolist())
        identity = TrajectoryId(prompt_id=f"p{step}", group_id=step, sample=number)
        samples.append(
            TrainingSample(
                id=identity, token_ids=tokens, loss_mask=mask, behavior_logprobs=behavior, reward=float(number % 2),
                oldest_version=step, newest_version=step,
            )
        )  # fmt: skip
    return TrainingGroup(group_id=step, batch_id=step, samples=tuple(samples))


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([tokens])
        logprobs: torch.Tensor = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].double()
    return logprobs


def with_change(
    base: dict[str, torch.Tensor], weights: Any, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The base with ``s B A`` of ``tensors``, in float64."""
    changed = dict(base)
    for adapted in weights._adapted:
        a, b = tensors[adapted.a_name].double(), tensors[adapted.b_name].double()
        changed[adapted.weight] = base[adapted.weight] + adapted.scale * b @ a
    return changed


def share(rate: float, sync: LoraSync, steps: int, rank: int) -> float:
    """Along the whole change."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(DEMO / "model"))
    rows = [json.loads(line)["prompt"] for line in (DEMO / "train.jsonl").read_text().splitlines()[: steps + 64]]
    prompts = [list(tokenizer.encode(text)) for text in rows]
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    model = model.bfloat16().double().eval()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        lora = Lora(rank=rank, alpha=2.0 * rank, targets=TARGETS, sync=sync)
        options = TrainerOptions(
            model_path=str(DEMO / "model"), run_id="share", weights_endpoint=f"ipc://{name}/w", threads=1, device="cpu",
            learning_rate=rate, lora=lora, warmup_steps=0,
        )  # fmt: skip
        with started(options) as trainer:
            for step in range(steps):
                texts = [prompts[step] + random.permutation(prompts[step]).tolist() for _ in range(4)]
                group = group_of(step, prompts[step], texts, lambda tokens: logprobs_of(model, tokens))
                trainer.train_group(group)
                tokens = sum(sample.trained_tokens for sample in group.samples)
                trainer.close_batch(
                    CloseBatch(batch_id=step, policy_version=step + 1, groups=1, samples=4, trained_tokens=tokens)
                )
            weights: Any = trainer._updates.weights
            masters = weights.as_tensors(weights.masters.full())
            whole = with_change(base, weights, masters)
            if sync is LoraSync.MERGED:
                published = base | {n: t.double() for n, t in weights.full_published().items()}
            else:
                leaves = {n: leaf.detach() / weights._scales[n] for n, leaf in weights._leaves.items()}
                published = with_change(base, weights, leaves)
    changes = []
    before = torch.cat([logprobs_of(model, tokens) for tokens in prompts[steps:]])
    for state in (published, whole):
        model.load_state_dict(state)
        changes.append(torch.cat([logprobs_of(model, tokens) for tokens in prompts[steps:]]) - before)
    return float(changes[0] @ changes[1] / changes[1].square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    chosen = parser.parse_args()
    print("| rate | merged | adapter |\n|---|---|---|", flush=True)
    for rate in RATES:
        shares = [share(rate, sync, chosen.steps, chosen.rank) for sync in (LoraSync.MERGED, LoraSync.ADAPTER)]
        print(f"| {rate:g} | {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()

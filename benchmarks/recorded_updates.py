"""Record weight updates of a real AdamW run: a byte-level transformer on source text, fp32 masters, bf16 published.

    python benchmarks/recorded_updates.py --out updates                               # warm-up, then all of it
    python benchmarks/recorded_updates.py --out updates --rates 1e-6 --objective policy
    python benchmarks/bench_weights.py --model updates/RATE/0020-old.safetensors updates/RATE/0020-new.safetensors

1. Warm-up from scratch at a learning rate of 1e-3, so that the weights look trained; ``OUT/warm.safetensors``, bf16.
   It is read again by the next call.
2. For each objective and learning rate a new AdamW, as post-training starts one: masters on the bf16 grid, no weight
   decay, gradients clipped to a norm of 1. ``text`` goes on with next-byte prediction. ``policy`` samples completions
   from the published weights, four a prompt, scores them by a rule, and takes a policy-gradient step with advantages
   normalised in the group (GRPO, arXiv 2402.03300, section 4.1; one step a batch, so that nothing is clipped).
3. The published bits before and after some steps: ``OUT/OBJECTIVE-RATE/STEP-{old,new}.safetensors``.

The forward runs on the published bits (held in float32), the gradient goes to the masters: as streamrl's trainer does.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

BYTES = 256
CONTEXT = 128
PROMPT, COMPLETION, SAMPLES = 24, 40, 4
"""Bytes of a prompt and of a completion; completions a prompt."""

Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_layernorm = nn.RMSNorm(width)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=True)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.gate_up_proj = nn.Linear(width, 6 * width, bias=False)
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """``x``: [batch, time, width]; ``cache``: keys and values of earlier positions, [batch, heads, time, d]."""
        batch, length, width = x.shape
        projected = self.qkv_proj(self.input_layernorm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = torch.cat((cache[0], key), 2), torch.cat((cache[1], value), 2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = x + self.o_proj(attended.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.down_proj(functional.silu(gate) * up), (key, value)


class ByteModel(nn.Module):
    """A decoder over bytes with learned positions; 7.0 M parameters by default."""

    def __init__(self, width: int = 256, layers: int = 8, heads: int = 8) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, tokens: torch.Tensor, past: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """``tokens``: int64 [batch, time], after those in ``past``. Returns logits [batch, time, 256] and the cache."""
        start = past[0][0].shape[2] if past else 0
        x = self.embed_tokens(tokens) + self.positions.weight[start : start + tokens.shape[1]]
        kept: Cache = []
        for index, layer in enumerate(self.layers):
            x, entry = layer(x, past[index] if past else None)
            kept.append(entry)
        return self.lm_head(self.norm(x)), kept


def source_text(seed: int, megabytes: float = 24.0) -> torch.Tensor:
    """Bytes of Python files of this installation, int64 [n], in an order given by ``seed``."""
    files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    np.random.default_rng(seed).shuffle(files)
    joined = bytearray()
    for file in files:
        joined += file.read_bytes()[:60_000]
        if len(joined) > megabytes * 1e6:
            break
    return torch.frombuffer(joined, dtype=torch.uint8).long()


def cut(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` random pieces of ``text``, [count, length]."""
    starts = torch.randint(text.numel() - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


def text_loss(model: ByteModel, text: torch.Tensor, generator: torch.Generator, pieces: int) -> torch.Tensor:
    """Mean negative log likelihood of the next byte, over ``pieces`` of 128 bytes."""
    piece = cut(text, pieces, CONTEXT, generator)
    logits, _ = model(piece[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())


def policy_loss(model: ByteModel, text: torch.Tensor, generator: torch.Generator, pieces: int) -> torch.Tensor:
    """Policy-gradient loss of ``2 * pieces`` groups of four sampled completions."""
    prompts = cut(text, 2 * pieces, PROMPT, generator).repeat_interleave(SAMPLES, 0)
    rows = sample(model, prompts, generator)
    rewards = reward(rows[:, PROMPT:]).view(-1, SAMPLES)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    logits, _ = model(rows[:, :-1])
    logprobs = -functional.cross_entropy(
        logits[:, PROMPT - 1 :].flatten(0, 1), rows[:, PROMPT:].flatten(), reduction="none"
    )
    return -(logprobs.view(len(rows), -1) * advantages.view(-1, 1)).mean()


@torch.no_grad()
def sample(model: ByteModel, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Prompts [n, PROMPT] with completions at temperature 1 after them, [n, PROMPT + COMPLETION]."""
    rows = prompts
    logits, cache = model(prompts)
    for _ in range(COMPLETION):
        chosen = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator)
        rows = torch.cat((rows, chosen), 1)
        logits, cache = model(chosen, cache)
    return rows


def reward(completions: torch.Tensor) -> torch.Tensor:
    """Share of identifier bytes (a-z and underscore), [n]: something that sampling can get better at."""
    letter = (completions >= ord("a")) & (completions <= ord("z")) | (completions == ord("_"))
    return letter.float().mean(1)


OBJECTIVES = {"text": text_loss, "policy": policy_loss}


class MasterWeights:
    """fp32 masters under AdamW; the model holds what is published of them (bf16 values, in float32)."""

    def __init__(self, model: ByteModel, learning_rate: float) -> None:
        self.model = model
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)

    def step(self, loss: torch.Tensor) -> None:
        """Gradient of the published weights, clipped, one step of the masters, publish."""
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, self.masters, strict=True):
                parameter.copy_(master.bfloat16())


def published(model: ByteModel) -> dict[str, torch.Tensor]:
    """The bf16 weights by name, copied."""
    return {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def changed_share(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> float:
    """Share of elements whose bits differ."""
    changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in old)
    return changed / sum(tensor.numel() for tensor in old.values())


def warm_up(model: ByteModel, text: torch.Tensor, steps: int, pieces: int, seed: int) -> None:
    """Train from scratch: 30 steps of rising learning rate up to 1e-3, then a cosine down to 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    weights = MasterWeights(model, 1e-3)
    began = time.monotonic()
    for step in range(1, steps + 1):
        rate = min(step / 30, 0.55 + 0.45 * math.cos(math.pi * step / steps)) * 1e-3
        weights.optimizer.param_groups[0]["lr"] = rate
        loss = text_loss(model, text, generator, pieces)
        weights.step(loss)
        if step % 20 == 0 or step == steps:
            print(
                f"warm-up {step}/{steps}: loss {loss.item():.3f} nats a byte, {time.monotonic() - began:.0f} s",
                flush=True,
            )


def record(model: ByteModel, text: torch.Tensor, objective: str, rate: float, options: argparse.Namespace) -> None:
    """Train on from the warm weights, and write the bits around each kept step."""
    folder = options.out / f"{objective}-{rate:.0e}"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(options.seed + 1)
    weights = MasterWeights(model, rate)
    for step in range(1, max(options.keep) + 1):
        old = published(model) if step in options.keep else {}
        weights.step(OBJECTIVES[objective](model, text, generator, options.pieces))
        if old:
            new = published(model)
            save_file(old, folder / f"{step:04}-old.safetensors")
            save_file(new, folder / f"{step:04}-new.safetensors")
            share = changed_share(old, new)
            print(
                f"{folder.name} step {step}: {share:.3%} of {sum(t.numel() for t in new.values()):,} changed",
                flush=True,
            )


def steps_of(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Every objective with every learning rate."""
    for objective in options.objective:
        for rate in options.rates:
            yield objective, rate


def main() -> None:
    """Warm up unless that was done, then record."""
    parser = argparse.ArgumentParser(description="Record weight updates of a real AdamW run.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-7, 1e-6, 3e-6, 1e-5, 1e-4])
    parser.add_argument("--objective", nargs="+", choices=sorted(OBJECTIVES), default=["policy", "text"])
    parser.add_argument("--keep", type=int, nargs="+", default=[1, 5, 10, 20], metavar="STEP")
    parser.add_argument("--warm-up-steps", type=int, default=250)
    parser.add_argument("--pieces", type=int, default=4, help="pieces of 128 bytes a batch (default 4)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256; 128 with 5 layers: 1.2 M)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    model = ByteModel(options.width, options.layers)
    text, warm = source_text(options.seed), options.out / "warm.safetensors"
    if not warm.exists():
        warm_up(model, text, options.warm_up_steps, options.pieces, options.seed)
        save_file(published(model), warm)
    for objective, rate in steps_of(options):
        model.load_state_dict({name: bits.float() for name, bits in load_file(warm).items()})
        record(model, text, objective, rate, options)


if __name__ == "__main__":
    main()

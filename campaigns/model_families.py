"""A small model of each family on a task made for it: the dry run refuses the model, or it trains and gets better.

The task: write a word backwards (``abc:`` is answered by ``cba.``). Each model has random weights and a short warm-up
on a teacher that may stop too early at each letter, so that it can do the task and often does not. Then the dry run,
and a short run with a vLLM engine: about two minutes a family. Passed when the held-out score rises by 0.1, and also
when the model whose attention heads have 16 elements, which vLLM cannot serve on a CPU, is refused by the dry run."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

LETTERS = "abcdefgh"
TOKENS = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", ":", ".", *LETTERS])}
PAD, BOS, EOS = 0, 1, 2
LONGEST_WORD, CONTEXT = 7, 64
STOPS_EARLY = 0.2
WARM_UP_STEPS, BATCH = 1000, 64
RISE = 0.1

_SHARED: dict[str, Any] = {"vocab_size": 32, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 1}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}),
    "opt": ("OPTConfig", {**_SIZES, "ffn_dim": 192, "word_embed_proj_dim": 64}),
    "gemma": ("GemmaConfig", {**_SIZES, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1}),
    "phi3": ("Phi3Config", _SIZES),
    "phi": ("PhiConfig", _SIZES),
    "narrow": ("LlamaConfig", {**_SIZES, "num_attention_heads": 4}),
}
REFUSED = {"narrow": "attention heads of 16"}

RECIPE = """\
[run]
name = "{family}"
directory = "runs"
steps = {steps}

[model]
path = "model"

[prompts]
train = "train.jsonl"

[[rewards]]
function = "reward.py:backwards"

[rollout]
prompts_per_batch = 32
group_size = 8

[sampling]
max_tokens = 16

[training]
learning_rate = 3e-4
warmup_steps = 2

[engines]
dtype = "float32"

[evaluation]
prompts = "held_out.jsonl"
"""

REWARD = """\
async def backwards(completion: str, *, answer: str, finish_reason: str) -> float:
    return float(finish_reason == "stop" and completion == answer)
"""


class Outcome(msgspec.Struct, frozen=True):
    """One row of the table. ``refusal``: what the dry run said; empty: the model was trained."""

    family: str
    refusal: str
    before: float
    after: float
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether it is as it should be."""
        if self.family in REFUSED:
            return REFUSED[self.family] in self.refusal
        return not self.refusal and self.after >= self.before + RISE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)} (all)")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--directory", type=Path, help="where models and runs are kept (none are)")
    parser.set_defaults(work=try_families)


def try_families(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where a family failed."""
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.directory or Path(temporary)
        outcomes = [try_family(name, root / name, arguments.steps) for name in arguments.families or FAMILIES]
    print(f"{'family':8} {'held-out':>17}  outcome")
    for one in outcomes:
        scores = f"{one.before:.3f} -> {one.after:.3f}" if not one.refusal else ""
        how = f"refused by the dry run: {one.refusal}" if one.refusal else f"trained in {one.seconds:.0f} s"
        print(f"{one.family:8} {scores:>17}  {'' if one.passed else 'FAILED, '}{how}")
    return int(not all(one.passed for one in outcomes))


def try_family(family: str, directory: Path, steps: int) -> Outcome:
    """Make the model, its data and its recipe in ``directory``; dry run, then train."""
    directory.mkdir(parents=True, exist_ok=True)
    write_project(family, directory, steps)
    make_model(family, directory / "model")
    began = time.monotonic()
    looked = streamrl(directory, "train", "recipe.toml", "--dry-run")
    if looked.returncode:
        return Outcome(family, looked.stderr.strip().splitlines()[-1].strip(), 0.0, 0.0, time.monotonic() - began)
    print(looked.stdout.strip().splitlines()[-3], flush=True)
    began = time.monotonic()
    trained = streamrl(directory, "train", "recipe.toml")
    if trained.returncode:
        raise SystemExit(
            f"{family}: exit code {trained.returncode}\n{trained.stdout[-3000:]}\n{trained.stderr[-3000:]}"
        )
    files = sorted(next((directory / "runs").glob("*/evaluations")).glob("step-*.jsonl"))
    return Outcome(family, "", score(files[0]), score(files[-1]), time.monotonic() - began)


def streamrl(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, in ``directory``."""
    command = [sys.executable, "-m", "streamrl", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=900, check=False)


def score(file: Path) -> float:
    """Mean reward of the completions of one evaluation."""
    rewards = [json.loads(line)["reward"] for line in file.read_text().splitlines()]
    return fmean(reward or 0.0 for reward in rewards)


def words(seed: int) -> Iterator[str]:
    """Endless random words; those with a checksum of 0 are held out."""
    source = random.Random(seed)
    while True:
        yield "".join(source.choice(LETTERS) for _ in range(source.randint(3, LONGEST_WORD)))


def is_held_out(word: str) -> bool:
    """Whether it is never trained on."""
    return sum(map(ord, word)) % 8 == 0


def write_project(family: str, directory: Path, steps: int) -> None:
    """The recipe, the reward and both prompt files."""
    (directory / "recipe.toml").write_text(RECIPE.format(family=family, steps=steps))
    (directory / "reward.py").write_text(REWARD)
    source = words(1)
    for name, held_out, count in (("train", False, 2000), ("held_out", True, 512)):
        rows = islice((word for word in source if is_held_out(word) == held_out), count)
        lines = [json.dumps({"prompt": f"{word}:", "answer": f"{word[::-1]}."}) for word in rows]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def make_model(family: str, directory: Path) -> None:
    """Write a model with random weights, warmed up on the teacher, and its tokenizer."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, sizes = FAMILIES[family]
    config = getattr(transformers, kind)(**_SHARED, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    source = demonstrations(2)
    for step in range(WARM_UP_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 2 * (1 - step / WARM_UP_STEPS) + 0.02)
        tokens, targets = batch(next(source) for _ in range(BATCH))
        logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits[:, :-1]
        expected = torch.tensor(targets)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{family}: {count:,} parameters, loss {loss.item():.3f} after the warm-up", flush=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)


def demonstrations(seed: int) -> Iterator[tuple[list[int], int]]:
    """Token ids of a prompt and the teacher's answer, each with the length of its prompt."""
    source = random.Random(seed)
    for word in words(seed):
        if is_held_out(word):
            continue
        kept = next((n for n in range(len(word)) if source.random() < STOPS_EARLY), len(word))
        text = f"{word}:{word[::-1][:kept]}."
        yield [BOS, *(TOKENS[letter] for letter in text), EOS], len(word) + 2


def batch(rows: Iterator[tuple[list[int], int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Padded token ids, and the targets among them (-100 elsewhere)."""
    width = 2 * LONGEST_WORD + 4
    tokens, targets = [], []
    for ids, prompt in rows:
        padding = width - len(ids)
        tokens.append(ids + [PAD] * padding)
        targets.append([-100] * prompt + ids[prompt:] + [-100] * padding)
    return tokens, targets


def save_tokenizer(directory: Path) -> None:
    """One token a character, with ``<bos>`` in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(TOKENS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)

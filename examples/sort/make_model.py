"""Make the demo's starting policy: a 0.3 M-parameter Qwen2, warmed up on worked traces, in Hugging Face format.

The traces come from an impatient teacher: it knows how to sort, but before every swap may give up and claim to be
done. The policy imitates that, and sorts well under half of the lists; reinforcement learning has to find out that
patience pays. Equal seeds give equal weights (one thread).

    python make_model.py --out model            # what is shipped in ./model, 1 to 2 minutes
    python make_model.py --out other --seed 1"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from task import held_out_lists, random_lists, sorting_trace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-=:;.,> cn*/<()[]"
"""The task needs digits, colon, semicolon and full stop; the others round the vocabulary up to 32."""

VOCABULARY = {token: i for i, token in enumerate([PAD, BOS, EOS, UNKNOWN, *CHARACTERS])}
SPECIAL_IDS = {"bos_token_id": VOCABULARY[BOS], "eos_token_id": VOCABULARY[EOS], "pad_token_id": VOCABULARY[PAD]}
CONTEXT = 1024
BATCH, BATCHES_PER_BUCKET, WARMUP_STEPS, DECAY_SHARE = 64, 8, 50, 0.4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ``<bos>`` in front of every encoded text."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=CONTEXT,
    )


def make_policy(seed: int) -> Qwen2ForCausalLM:
    """A randomly initialised policy of 299,136 float32 parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **SPECIAL_IDS,
    )
    return Qwen2ForCausalLM(config).float()


def impatient_trace(digits: str, rng: random.Random, give_up: float) -> str:
    """The trace of a teacher that stops before each swap with probability ``give_up``."""
    lines = sorting_trace(digits)[:-1].split(";")
    swaps = next((i for i in range(len(lines)) if rng.random() < give_up), len(lines))
    return ";".join(lines[:swaps]) + "."


def demonstrations(seed: int, give_up: float) -> Iterator[tuple[list[int], int]]:
    """Endless token ids of ``<bos>prompt completion<eos>``, each with the length of its prompt part."""
    rng = random.Random(seed)
    for digits in random_lists(seed, excluded=frozenset(held_out_lists())):
        text = f"{digits}:{impatient_trace(digits, rng, give_up)}"
        yield [VOCABULARY[BOS], *(VOCABULARY[c] for c in text), VOCABULARY[EOS]], len(digits) + 2


def batches(seed: int, give_up: float) -> Iterator[list[tuple[list[int], int]]]:
    """Batches of demonstrations of near-equal length, in random order."""
    source, rng = demonstrations(seed, give_up), random.Random(seed)
    while True:
        pool = sorted(islice(source, BATCH * BATCHES_PER_BUCKET), key=lambda demonstration: len(demonstration[0]))
        starts = list(range(0, len(pool), BATCH))
        rng.shuffle(starts)
        for start in starts:
            yield pool[start : start + BATCH]


def imitation_loss(policy: Qwen2ForCausalLM, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    """Mean cross-entropy of the completion tokens of ``batch``."""
    width = max(len(ids) for ids, _ in batch)
    token_ids = torch.full((len(batch), width), VOCABULARY[PAD])
    targets = torch.full((len(batch), width), -100)
    for row, (ids, prompt_length) in enumerate(batch):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        targets[row, prompt_length : len(ids)] = token_ids[row, prompt_length : len(ids)]
    predicted = targets[:, 1:] != -100
    hidden = policy.model(token_ids).last_hidden_state[:, :-1][predicted]
    return cross_entropy(policy.lm_head(hidden), targets[:, 1:][predicted])


def warm_up(policy: Qwen2ForCausalLM, *, steps: int, seed: int, give_up: float) -> None:
    """Imitate worked traces for ``steps`` optimizer steps: warm up, hold, decay linearly over the last 40 %."""
    peak = 3e-3
    optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    for step, batch in enumerate(islice(batches(seed, give_up), steps)):
        rate = min(1.0, (step + 1) / WARMUP_STEPS, max(0.02, (1 - step / steps) / DECAY_SHARE))
        for group in optimizer.param_groups:
            group["lr"] = peak * rate
        loss = imitation_loss(policy, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Make, warm up and save."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    arguments.add_argument("--steps", type=int, default=480, help="warm-up steps")
    arguments.add_argument("--give-up", type=float, default=0.06, help="chance that the teacher stops before a swap")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)  # more threads sum in another order, and the weights would differ
    policy = make_policy(options.seed)
    warm_up(policy, steps=options.steps, seed=options.seed, give_up=options.give_up)
    policy.generation_config = GenerationConfig(**SPECIAL_IDS)
    policy.to(torch.bfloat16).save_pretrained(options.out)  # what trainers publish and engines hold
    make_tokenizer().save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in policy.parameters()):,} parameters")


if __name__ == "__main__":
    main()

"""Make the starting policy of the rolling task: a 0.3 M-parameter Qwen2, warmed up on worked completions.

They come from a careless teacher: it counts well and stops in time, but instead of the row's digit or letter it may
write any. The policy imitates that, and a third of its completions are right; reinforcement learning has to find out
that care pays. Equal seeds give equal weights (one thread).

    python make_rolling_model.py --out model            # what is shipped in ./model, 2 minutes
    python make_rolling_model.py --out other --seed 1"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from rolling_task import DIGITS, LETTERS, held_out_prompts, lettered, random_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = DIGITS + LETTERS + ":=." + "+-*/<>()[],"
"""The last eleven only round the vocabulary up to 32."""

VOCABULARY = {token: i for i, token in enumerate([PAD, BOS, EOS, UNKNOWN, *CHARACTERS])}
SPECIAL_IDS = {"bos_token_id": VOCABULARY[BOS], "eos_token_id": VOCABULARY[EOS], "pad_token_id": VOCABULARY[PAD]}
CONTEXT = 2048
LONGEST_ROLLS = 1600
"""A demonstration whose row is not complete by then ends there, without an answer."""

SHORT_TOKENS, SHORT_SHARE = 96, 0.5
"""The first half of the steps sees demonstrations of at most so many tokens: the rule is learned faster on them."""

BATCH_TOKENS, POOL, WARMUP_STEPS, DECAY_SHARE, ANSWER_WEIGHT = 2048, 512, 50, 0.4, 0.25


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


def careless_completion(prompt: str, rng: random.Random, carelessness: float) -> str:
    """The teacher's: with probability ``carelessness`` any digit names the row, and with the same any letter."""
    row = prompt.partition(":")[0]
    text = lettered(row, rng.choices(DIGITS, k=LONGEST_ROLLS))
    if not text.endswith(row[1]):
        return text
    digit = rng.choice(DIGITS) if rng.random() < carelessness else row[0]
    letter = rng.choice(LETTERS) if rng.random() < carelessness else row[1]
    return f"{text}={digit}{letter}."


def demonstrations(seed: int, carelessness: float) -> Iterator[tuple[list[int], int]]:
    """Endless token ids of ``<bos>prompt completion<eos>``, each with the length of its prompt part."""
    rng = random.Random(seed)
    for prompt in random_prompts(seed, excluded=frozenset(held_out_prompts())):
        completion = careless_completion(prompt, rng, carelessness)
        ids = [VOCABULARY[BOS], *(VOCABULARY[c] for c in prompt + completion)]
        yield ids + [VOCABULARY[EOS]] * completion.endswith("."), len(prompt) + 1


def batches(seed: int, carelessness: float, steps: int) -> Iterator[list[tuple[list[int], int]]]:
    """``steps`` batches of demonstrations of near-equal length and ``BATCH_TOKENS`` tokens, in random order."""
    everything, rng = demonstrations(seed, carelessness), random.Random(seed)
    short = (demonstration for demonstration in everything if len(demonstration[0]) <= SHORT_TOKENS)
    made = 0
    while made < steps:
        source = short if made < SHORT_SHARE * steps else everything
        pool = sorted(islice(source, POOL), key=lambda demonstration: len(demonstration[0]))
        full: list[list[tuple[list[int], int]]] = [[]]
        for demonstration in pool:
            if (len(full[-1]) + 1) * len(demonstration[0]) > BATCH_TOKENS:
                full.append([])
            full[-1].append(demonstration)
        rng.shuffle(full)
        yield from full[: steps - made]
        made += len(full)


def imitation_loss(policy: Qwen2ForCausalLM, batch: list[tuple[list[int], int]]) -> torch.Tensor:
    """Mean cross-entropy of the completion tokens of ``batch``, and some of that of the answers alone: they are few."""
    width = max(len(ids) for ids, _ in batch)
    token_ids = torch.full((len(batch), width), VOCABULARY[PAD])
    targets = torch.full((len(batch), width), -100)
    for row, (ids, prompt_length) in enumerate(batch):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        targets[row, prompt_length : len(ids)] = token_ids[row, prompt_length : len(ids)]
    predicted = targets[:, 1:] != -100
    hidden = policy.model(token_ids).last_hidden_state[:, :-1][predicted]
    losses = cross_entropy(policy.lm_head(hidden), targets[:, 1:][predicted], reduction="none")
    answers = (token_ids == VOCABULARY["="]).cumsum(1)[:, :-1][predicted] > 0
    return losses.mean() + ANSWER_WEIGHT * losses[answers].mean() if answers.any() else losses.mean()


def warm_up(policy: Qwen2ForCausalLM, *, steps: int, seed: int, carelessness: float) -> None:
    """Imitate worked traces for ``steps`` optimizer steps: warm up, hold, decay linearly over the last 40 %."""
    peak = 3e-3
    optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    for step, batch in enumerate(batches(seed, carelessness, steps)):
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
    arguments.add_argument("--steps", type=int, default=900, help="warm-up steps")
    arguments.add_argument(
        "--carelessness", type=float, default=0.48, help="chance of any digit for the row's, and of any letter"
    )
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)  # more threads sum in another order, and the weights would differ
    policy = make_policy(options.seed)
    warm_up(policy, steps=options.steps, seed=options.seed, carelessness=options.carelessness)
    policy.generation_config = GenerationConfig(**SPECIAL_IDS)
    policy.to(torch.bfloat16).save_pretrained(options.out)  # what trainers publish and engines hold
    make_tokenizer().save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in policy.parameters()):,} parameters")


if __name__ == "__main__":
    main()

"""Make the starting policy of the rolling task: a 0.3 M-parameter Qwen2, warmed up on worked completions.

They come from a careless teacher: it counts well and stops in time, but instead of the row's digit or letter it may
write any. The policy imitates that, and a third of its completions are right; reinforcement learning has to find out
that care pays. Equal seeds give equal weights (one thread).

    python make_rolling_model.py --out model            # what is shipped in ./model, 2 minutes
    python make_rolling_model.py --out other --seed 1"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rolling_task import DIGITS, LETTERS, held_out_prompts, lettered, random_prompts
from transformers import Qwen2Config

from streamrl.learning.small_model.characters import BOS, EOS, PAD, Characters
from streamrl.learning.small_model.imitation import Demonstration, completion_losses, imitate

CHARACTERS = Characters(DIGITS + LETTERS + ":=." + "+-*/<>()[],", context=2048)
"""The last eleven only round the vocabulary up to 32."""

LONGEST_ROLLS = 1600
"""A demonstration whose row is not complete by then ends there, without an answer."""

SHORT_TOKENS, SHORT_SHARE = 96, 0.5
"""The first half of the steps sees demonstrations of at most so many tokens: the rule is learned faster on them."""

BATCH_TOKENS, POOL, ANSWER_WEIGHT = 2048, 512, 0.25


def careless_completion(prompt: str, rng: random.Random, carelessness: float) -> str:
    """The teacher's: with probability ``carelessness`` any digit names the row, and with the same any letter."""
    row = prompt.partition(":")[0]
    text = lettered(row, rng.choices(DIGITS, k=LONGEST_ROLLS))
    if not text.endswith(row[1]):
        return text
    digit = rng.choice(DIGITS) if rng.random() < carelessness else row[0]
    letter = rng.choice(LETTERS) if rng.random() < carelessness else row[1]
    return f"{text}={digit}{letter}."


def demonstrations(seed: int, carelessness: float) -> Iterator[Demonstration]:
    """Endless token ids of ``<bos>prompt completion<eos>``, each with the length of its prompt part."""
    rng = random.Random(seed)
    for prompt in random_prompts(seed, excluded=frozenset(held_out_prompts())):
        completion = careless_completion(prompt, rng, carelessness)
        ids = [CHARACTERS.ids[token] for token in (BOS, *prompt, *completion)]
        yield ids + [CHARACTERS.ids[EOS]] * completion.endswith("."), len(prompt) + 1


def batches(seed: int, carelessness: float, steps: int) -> Iterator[list[Demonstration]]:
    """``steps`` batches of demonstrations of near-equal length and ``BATCH_TOKENS`` tokens, in random order."""
    everything, rng = demonstrations(seed, carelessness), random.Random(seed)
    short = (demonstration for demonstration in everything if len(demonstration[0]) <= SHORT_TOKENS)
    made = 0
    while made < steps:
        source = short if made < SHORT_SHARE * steps else everything
        pool = sorted(islice(source, POOL), key=lambda demonstration: len(demonstration[0]))
        full: list[list[Demonstration]] = [[]]
        for demonstration in pool:
            if (len(full[-1]) + 1) * len(demonstration[0]) > BATCH_TOKENS:
                full.append([])
            full[-1].append(demonstration)
        rng.shuffle(full)
        yield from full[: steps - made]
        made += len(full)


def imitation_loss(policy: Any, batch: Sequence[Demonstration]) -> torch.Tensor:
    """Mean cross-entropy of the completion tokens of ``batch``, and some of that of the answers alone: they are few."""
    losses, token_ids, predicted = completion_losses(policy, batch, CHARACTERS.ids[PAD])
    answers = (token_ids == CHARACTERS.ids["="]).cumsum(1)[:, :-1][predicted] > 0
    return losses.mean() + ANSWER_WEIGHT * losses[answers].mean() if answers.any() else losses.mean()


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
    policy = CHARACTERS.policy(options.seed, architecture=Qwen2Config)
    source = batches(options.seed, options.carelessness, options.steps)
    for step, loss in enumerate(imitate(policy, source, partial(imitation_loss, policy), options.steps), 1):
        if step % 50 == 0:
            print(f"step {step}/{options.steps}  loss {loss:.3f}", flush=True)
    print(f"{options.out}: {CHARACTERS.save(policy, options.out):,} parameters")


if __name__ == "__main__":
    main()

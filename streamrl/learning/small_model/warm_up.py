"""``python -m streamrl.learning.small_model.warm_up CORPUS OUT [--steps N] [--until SHARE] [--seed N]``: a small policy
in Hugging Face format, out of JSON objects with ``prompt`` and ``completion``, one a line.

It has a token for each character of the corpus, and imitates completions until ``SHARE`` of those that it samples for
prompts it has not seen are the ones shown (0: all steps): reinforcement learning has something to begin with, and
something left. Equal corpora and seeds give equal weights. Progress goes to stderr, figures as JSON to stdout."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from streamrl.learning.small_model.characters import BOS, EOS, PAD, Characters
from streamrl.learning.small_model.imitation import Demonstration, completion_losses, imitate

BATCH_TOKENS = 4096
POOL = 512
HELD_OUT = 64
EVERY = 25


def demonstrations(path: Path) -> tuple[list[Demonstration], Characters]:
    """All examples of a corpus, and the characters that are in it."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [row["prompt"] + row["completion"] for row in rows]
    characters = Characters(sorted(set("".join(texts))), context=(2 * max(map(len, texts)) // 256 + 1) * 256)
    begin = characters.ids[BOS]
    end = characters.ids[EOS]
    ids = ([begin, *(characters.ids[character] for character in text), end] for text in texts)
    return [(one, len(row["prompt"]) + 1) for one, row in zip(ids, rows, strict=True)], characters


def batches(examples: Sequence[Demonstration], rng: random.Random) -> Iterator[list[Demonstration]]:
    """Endless batches of near-equal length and at most ``BATCH_TOKENS`` tokens, in random order."""
    while True:
        pool = sorted(rng.choices(examples, k=POOL), key=lambda example: len(example[0]))
        full: list[list[Demonstration]] = [[]]
        for example in pool:
            if full[-1] and (len(full[-1]) + 1) * len(example[0]) > BATCH_TOKENS:
                full.append([])
            full[-1].append(example)
        rng.shuffle(full)
        yield from full


@torch.no_grad()
def share_right(policy: PreTrainedModel, held_out: Sequence[Demonstration], characters: Characters) -> float:
    """Share of ``held_out`` whose completion, sampled at temperature 1, is the one shown."""
    torch.manual_seed(0)
    padding = characters.ids[PAD]
    width = max(prompt_length for _, prompt_length in held_out)
    prompts = torch.full((len(held_out), width), padding)
    for row, (ids, prompt_length) in enumerate(held_out):
        prompts[row, width - prompt_length :] = torch.tensor(ids[:prompt_length])
    longest = max(len(ids) - prompt_length for ids, prompt_length in held_out)
    seen = (prompts != padding).long()
    sampled = policy.generate(prompts, attention_mask=seen, max_new_tokens=longest, do_sample=True, top_k=0)
    shown = [ids[prompt_length:] for ids, prompt_length in held_out]
    right = [one[: len(ids)] == ids for one, ids in zip(sampled[:, width:].tolist(), shown, strict=True)]
    return sum(map(int, right)) / len(right)


def main() -> None:
    """Make, warm up and save."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("corpus", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--steps", type=int, default=600)
    arguments.add_argument("--until", type=float, default=0.35)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)  # more threads sum in another order, and the weights would differ
    examples, characters = demonstrations(options.corpus)
    policy = characters.policy(options.seed)
    held_out = examples[: min(HELD_OUT, len(examples) // 8)]
    source = islice(batches(examples[len(held_out) :], random.Random(options.seed)), options.steps)
    step = 0
    share = 0.0

    def loss_of(batch: Sequence[Demonstration]) -> torch.Tensor:
        return completion_losses(policy, batch, characters.ids[PAD])[0].mean()

    for step, loss in enumerate(imitate(policy, source, loss_of, options.steps), 1):
        if step % EVERY and step < options.steps:
            continue
        share = share_right(policy, held_out, characters)
        sys.stderr.write(f"warm-up: step {step} of at most {options.steps}  loss {loss:.3f}  right {share:.0%}\n")
        if 0 < options.until <= share:
            break
    parameters = characters.save(policy, options.out)
    sys.stdout.write(json.dumps({"parameters": parameters, "steps": step, "right": share}) + "\n")


if __name__ == "__main__":
    main()

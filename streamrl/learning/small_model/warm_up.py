"""``python -m streamrl.learning.small_model.warm_up CORPUS OUT [--steps N] [--until SHARE] [--seed N]``: make a small
policy in Hugging Face format from JSON objects with ``prompt`` and ``completion``, one a line.

The policy has a token for each character of the corpus. It imitates completions until it samples the right completion
for ``SHARE`` of the prompts that are held out (0: all steps). So reinforcement learning begins with some reward, and
has more to learn. Equal corpora and seeds give equal weights. Progress goes to stderr, figures as JSON to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from streamrl.learning.small_model.characters import BOS, EOS, PAD, Characters
from streamrl.learning.small_model.imitation import Demonstration, completion_losses, imitate

BATCH_TOKENS = 4096
POOL = 512
HELD_OUT = 64
STEPS_BETWEEN_CHECKS = 25


def demonstrations(path: Path) -> tuple[list[Demonstration], Characters]:
    """Read all examples of a corpus, and the characters that it has."""
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    texts = [row["prompt"] + row["completion"] for row in rows]
    characters = Characters(sorted(set("".join(texts))), context=(2 * max(map(len, texts)) // 256 + 1) * 256)
    begin = characters.ids[BOS]
    end = characters.ids[EOS]
    ids = ([begin, *(characters.ids[character] for character in text), end] for text in texts)
    examples = [(text_ids, len(row["prompt"]) + 1) for text_ids, row in zip(ids, rows, strict=True)]
    return examples, characters


def batches(examples: Sequence[Demonstration], rng: Random) -> Iterator[list[Demonstration]]:
    """Endless batches of near-equal length and at most ``BATCH_TOKENS`` tokens, in random order."""
    while True:
        pool = sorted(rng.choices(examples, k=POOL), key=lambda example: len(example[0]))
        pool_batches: list[list[Demonstration]] = [[]]
        for example in pool:
            if pool_batches[-1] and (len(pool_batches[-1]) + 1) * len(example[0]) > BATCH_TOKENS:
                pool_batches.append([])
            pool_batches[-1].append(example)
        rng.shuffle(pool_batches)
        yield from pool_batches


@torch.no_grad()
def share_right(policy: PreTrainedModel, held_out: Sequence[Demonstration], characters: Characters) -> float:
    """Share of ``held_out`` for which the completion sampled at temperature 1 is the one of the corpus."""
    torch.manual_seed(0)
    padding = characters.ids[PAD]
    width = max(prompt_length for _, prompt_length in held_out)
    prompts = torch.full((len(held_out), width), padding)
    for row, (ids, prompt_length) in enumerate(held_out):
        prompts[row, width - prompt_length :] = torch.tensor(ids[:prompt_length])
    longest = max(len(ids) - prompt_length for ids, prompt_length in held_out)
    mask = (prompts != padding).long()
    generated = policy.generate(prompts, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0)
    completions = generated[:, width:].tolist()
    answers = [ids[prompt_length:] for ids, prompt_length in held_out]
    right = [completion[: len(ids)] == ids for completion, ids in zip(completions, answers, strict=True)]
    return sum(map(int, right)) / len(right)


def main() -> None:
    """Make a policy, warm it up and save it."""
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
    source = islice(batches(examples[len(held_out) :], Random(options.seed)), options.steps)
    step = 0
    share = 0.0

    def loss_of(batch: Sequence[Demonstration]) -> Tensor:
        return completion_losses(policy, batch, characters.ids[PAD])[0].mean()

    for step, loss in enumerate(imitate(policy, source, loss_of, options.steps), 1):
        if step % STEPS_BETWEEN_CHECKS and step < options.steps:
            continue
        share = share_right(policy, held_out, characters)
        sys.stderr.write(f"warm-up: step {step} of at most {options.steps}  loss {loss:.3f}  right {share:.0%}\n")
        if 0 < options.until <= share:
            break
    parameters = characters.save(policy, options.out)
    sys.stdout.write(json.dumps({"parameters": parameters, "steps": step, "right": share}) + "\n")


if __name__ == "__main__":
    main()

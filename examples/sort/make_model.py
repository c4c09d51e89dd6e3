"""Make the demo's starting policy: a 0.3 M-parameter Qwen2, warmed up on worked traces, in Hugging Face format.

The traces come from an impatient teacher: it knows how to sort, but before every swap may give up and claim to be
done. The policy imitates that, and sorts well under half of the lists; reinforcement learning has to find out that
patience pays. Equal seeds give equal weights (one thread).

    python make_model.py --out model            # what is shipped in ./model, 1 to 2 minutes
    python make_model.py --out other --seed 1"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from task import held_out_lists, random_lists, sorting_trace
from transformers import Qwen2Config, Qwen3_5TextConfig

from streamrl.learning.small_model.characters import BOS, EOS, PAD, Characters
from streamrl.learning.small_model.imitation import Demonstration, completion_losses, imitate

CHARACTERS = Characters("0123456789+-=:;.,> cn*/<()[]", context=1024)
"""The task needs digits, colon, semicolon and full stop; the others round the vocabulary up to 32."""

BATCH, BATCHES_PER_BUCKET = 64, 8
HYBRID = partial(
    Qwen3_5TextConfig,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    head_dim=32,
    linear_num_key_heads=1,
    linear_num_value_heads=1,
    linear_key_head_dim=64,  # vLLM's kernel of a CPU takes 64 or 128
    linear_value_head_dim=64,
)


def impatient_trace(digits: str, rng: random.Random, give_up: float) -> str:
    """The trace of a teacher that stops before each swap with probability ``give_up``."""
    lines = sorting_trace(digits)[:-1].split(";")
    swaps = next((i for i in range(len(lines)) if rng.random() < give_up), len(lines))
    return ";".join(lines[:swaps]) + "."


def demonstrations(seed: int, give_up: float) -> Iterator[Demonstration]:
    """Endless token ids of ``<bos>prompt completion<eos>``, each with the length of its prompt part."""
    rng, ids = random.Random(seed), CHARACTERS.ids
    for digits in random_lists(seed, excluded=frozenset(held_out_lists())):
        text = f"{digits}:{impatient_trace(digits, rng, give_up)}"
        yield [ids[BOS], *(ids[character] for character in text), ids[EOS]], len(digits) + 2


def batches(seed: int, give_up: float) -> Iterator[list[Demonstration]]:
    """Batches of demonstrations of near-equal length, in random order."""
    source, rng = demonstrations(seed, give_up), random.Random(seed)
    while True:
        pool = sorted(islice(source, BATCH * BATCHES_PER_BUCKET), key=lambda demonstration: len(demonstration[0]))
        starts = list(range(0, len(pool), BATCH))
        rng.shuffle(starts)
        for start in starts:
            yield pool[start : start + BATCH]


def main() -> None:
    """Make, warm up and save."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    arguments.add_argument("--steps", type=int, default=480, help="warm-up steps")
    arguments.add_argument("--give-up", type=float, default=0.06, help="chance that the teacher stops before a swap")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--hybrid", action="store_true", help="Gated DeltaNet in two of three layers, as Qwen3.5")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # more threads sum in another order, and the weights would differ
    policy = CHARACTERS.policy(options.seed, architecture=HYBRID if options.hybrid else Qwen2Config)

    def loss_of(batch: Sequence[Demonstration]) -> torch.Tensor:
        return completion_losses(policy, batch, CHARACTERS.ids[PAD])[0].mean()

    source = islice(batches(options.seed, options.give_up), options.steps)
    for step, loss in enumerate(imitate(policy, source, loss_of, options.steps), 1):
        if step % 50 == 0:
            print(f"step {step}/{options.steps}  loss {loss:.3f}", flush=True)
    print(f"{options.out}: {CHARACTERS.save(policy, options.out):,} parameters")


if __name__ == "__main__":
    main()

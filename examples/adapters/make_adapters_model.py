"""Make the starting policy of a game: a small Llama that was shown games of a teacher who knows the rules and no plan.

The teacher guesses any number that fits what the game has answered, without halving what is left. On the ice it goes
any way that is neither a wall nor a hole, twice as often to the goal as away from it. Equal seeds give equal weights
(one thread).

    python make_adapters_model.py textarena  # makes model_textarena"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from gymnasium_game import Lake
from textarena_game import GuessTheNumber

from streamrl.learning.small_model.chats import Chats, chat_text

CONTEXT = 256
FIRST_SEED = 1_000_000
"""Behind all seeds of ``train.jsonl`` and ``held_out.jsonl``."""


async def guessing(seed: int, rng: random.Random) -> str:
    """The chat of a game of GuessTheNumber."""
    game, ended, low, high = GuessTheNumber(), False, 1, 7
    messages = [{"role": "user", "content": await game.reset(seed=seed)}]
    while not ended:
        guess = rng.randint(low, high)
        answer, _, ended, _, _ = await game.step(f"[{guess}]")
        low = max(low, guess + 1) if "is higher" in answer else low
        high = min(high, guess - 1) if "is lower" in answer else high
        messages += [{"role": "assistant", "content": f"[{guess}]"}, {"role": "user", "content": answer}]
    return chat_text(messages[:-1])


async def walk(seed: int, rng: random.Random) -> str:
    """The chat of a walk on the ice."""
    lake, ended, truncated = Lake(), False, False
    messages = [{"role": "user", "content": lake.reset(seed=seed)}]
    while not (ended or truncated):
        ways = [move for move, what in lake.around().items() if what in {"ice", "goal"}]
        (move,) = rng.choices(ways, [2 if move in {"down", "right"} else 1 for move in ways])
        answer, _, ended, truncated, _ = lake.step(move)
        messages += [{"role": "assistant", "content": move}, {"role": "user", "content": answer}]
    return chat_text(messages[:-1])


GAMES = {"textarena": guessing, "gymnasium": walk}


def chats(game: str, seed: int) -> Iterator[str]:
    """Endless games."""
    rng = random.Random(seed)
    while True:
        yield asyncio.run(GAMES[game](rng.randrange(FIRST_SEED, 2 * FIRST_SEED), rng))


def main() -> None:
    """Make, warm up and save."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("game", choices=GAMES)
    arguments.add_argument("--out", type=Path, help="model_textarena or model_gymnasium beside this file by default")
    arguments.add_argument("--steps", type=int, default=400, help="warm-up steps")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)  # more threads sum in another order, and the weights would differ
    out = options.out or Path(__file__).parent / f"model_{options.game}"
    source = chats(options.game, options.seed)
    vocabulary = Chats(islice(source, 1000), CONTEXT)
    policy = vocabulary.policy(options.seed)
    for step, loss in enumerate(vocabulary.imitate(policy, source, options.steps, batch=32), 1):
        if step % 50 == 0:
            print(f"step {step}/{options.steps}  loss {loss:.3f}", flush=True)
    print(f"{out}: {vocabulary.save(policy, out):,} parameters")


if __name__ == "__main__":
    main()

"""Make the starting policy of the game: a small Llama that was shown games of a timid teacher.

Seven in ten guesses of the teacher are the smallest number that is left; the others are any number that is left, not
the one in the middle. Equal seeds give equal weights (one thread).

    python make_game_model.py --out model            # what is shipped in ./model
    python make_game_model.py --out other --seed 1"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from game import Game
from games import Row, held_out_games, random_games

from streamrl.learning.small_model.chats import Chats, chat_text

TIMIDITY = 0.7
CONTEXT = 128


def timid_game(row: Row, rng: random.Random) -> str:
    """The chat of a game that the teacher plays."""
    game, ended = Game(), False
    messages = [{"role": "user", "content": game.reset(**row)}]
    while not ended:
        guess = str(game.low if rng.random() < TIMIDITY else rng.randint(game.low, game.high))
        answer, _, ended, _, _ = game.step(guess)
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
    return chat_text(messages[:-1])


def chats(seed: int) -> Iterator[str]:
    """Endless games that are not held out."""
    rng, excluded = random.Random(seed), frozenset(tuple(row.values()) for row in held_out_games())
    return (timid_game(row, rng) for row in random_games(seed, excluded=excluded))


def main() -> None:
    """Make, warm up and save."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    arguments.add_argument("--steps", type=int, default=400, help="warm-up steps")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)  # more threads sum in another order, and the weights would differ
    source = chats(options.seed)
    vocabulary = Chats(islice(source, 1000), CONTEXT)
    policy = vocabulary.policy(options.seed)
    for step, loss in enumerate(vocabulary.imitate(policy, source, options.steps, batch=32), 1):
        if step % 50 == 0:
            print(f"step {step}/{options.steps}  loss {loss:.3f}", flush=True)
    print(f"{options.out}: {vocabulary.save(policy, options.out):,} parameters")


if __name__ == "__main__":
    main()

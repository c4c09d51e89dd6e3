"""The game as a program of its own, which knows nothing of the training: it talks to a model through the public client.
One process plays all games that are under way: a line of stdin is a game, with the key that its requests have, and its
reward is a line of stdout."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from game import Game
from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam


def play(client: OpenAI, row: dict[str, int]) -> float:
    """Play the game of a row to its end, and return its reward."""
    game = Game()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": game.reset(**row)}]
    while True:
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        answer, reward, ended, _, _ = game.step(said)
        if ended:
            return reward
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]


def answer(client: OpenAI, line: str) -> None:
    """Play the game of a line, and say how it ended."""
    task: dict[str, Any] = json.loads(line)
    try:
        task["reward"] = play(client.with_options(api_key=task["key"]), task["row"])
    except OpenAIError as error:
        task["error"] = repr(error)
    sys.stdout.write(json.dumps(task) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(partial(answer, OpenAI()), sys.stdin))

"""The game as a program of its own, which knows nothing of the training: it talks to a model through the public client,
which reads the address and the key from OPENAI_BASE_URL and OPENAI_API_KEY."""

from __future__ import annotations

import json
import sys

from game import Game
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def play(row: dict[str, int]) -> float:
    """Play the game of a row to its end, and return its reward."""
    game, client = Game(), OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": game.reset(**row)}]
    while True:
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        answer, reward, ended, _, _ = game.step(said)
        if ended:
            return reward
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]


if __name__ == "__main__":
    print(json.dumps({"reward": play(json.load(sys.stdin))}))

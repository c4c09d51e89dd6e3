"""A match: one game after the other, few or very many, against an opponent who takes a moment for each answer."""

from __future__ import annotations

import asyncio
from typing import Any

from game import Game

MOST_GAMES = 12
ANSWER_S = 0.05


async def match(model: Any, *, low: int, high: int, secret: int) -> float:
    """Play; return the share of games that were won. The number of games has a heavy tail, also among the siblings of
    a prompt: half of the matches are one game, one in nineteen is twelve. Each game is a conversation of its own."""
    games, won = min(MOST_GAMES, int(model.random.paretovariate(1.2))), 0.0
    for _ in range(games):
        game, chat, ended = Game(), model.chat(), False
        said = game.reset(low=low, high=high, secret=secret)
        while not ended:
            reply = await chat.say(said)
            await asyncio.sleep(ANSWER_S)
            said, reward, ended, _, _ = game.step(reply.text)
            won += reward
    return won / games

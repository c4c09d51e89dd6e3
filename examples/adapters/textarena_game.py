"""A single-player game of textarena as an environment: GuessTheNumber, a number from 1 to 7 in three guesses."""

from __future__ import annotations

from typing import Any

import textarena


class GuessTheNumber:
    """One game; ``reset`` begins it and ``step`` takes a turn, as in Gymnasium. An answer stands in brackets: ``[7]``.

    textarena draws from the ``random`` of the process, which it seeds at each ``reset``. The methods are coroutines, so
    that they run one after the other, and no other game takes a number between the seed and the draw."""

    async def reset(self, *, seed: int) -> str:
        """Begin the game that ``seed`` draws, and return its rules. The variant ``-raw`` gives what is new and no more;
        without it each observation repeats the whole game, which the conversation has already."""
        # textarena ends the game behind the turn that is one more than max_turns.
        self.game = textarena.make("GuessTheNumber-v0-raw", max_number=7, max_turns=2)
        self.game.reset(num_players=1, seed=seed)
        return self._news()

    async def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The answer to a turn, its reward (1 where it wins the game), whether the game has ended, whether it was cut
        off, and textarena's information. For a lost game textarena gives how near the last guess was, which is 0.7 for
        any guess in the middle."""
        ended, information = self.game.step(text)
        if not ended:
            return self._news(), 0.0, False, False, information
        rewards, _ = self.game.close()
        return "", float(rewards[0] == 1), True, False, information

    def _news(self) -> str:
        """What the game, and not the player, has said since the last turn."""
        player, messages = self.game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender != player)

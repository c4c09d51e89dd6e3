"""The game: guess a number. Each guess is answered with "Higher" or "Lower", and with the numbers that are left."""

from __future__ import annotations

GUESSES = 5
"""Enough for 31 numbers, for a player who always takes the one in the middle."""


class Game:
    """One game; ``reset`` begins it and ``step`` takes a guess, as in Gymnasium."""

    def reset(self, *, low: int, high: int, secret: int) -> str:
        """The first message to the model. The arguments are columns of the prompt files."""
        self.low, self.high, self.secret, self.guesses = low, high, secret, 0
        return f"Guess my number from {low} to {high}."

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """The answer to a guess, its reward, whether the game has ended, whether it was cut off, and nothing more."""
        self.guesses += 1
        guess = int(text) if text.strip().isdecimal() else None
        if guess == self.secret:
            return "Right.", 1.0, True, False, {}
        if guess is None:
            answer = "Say a number"
        elif guess < self.secret:
            answer, self.low = "Higher", max(self.low, guess + 1)
        else:
            answer, self.high = "Lower", min(self.high, guess - 1)
        return f"{answer}: from {self.low} to {self.high}.", 0.0, self.guesses == GUESSES, False, {}

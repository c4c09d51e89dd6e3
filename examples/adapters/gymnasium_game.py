"""An environment of Gymnasium as a conversation: FrozenLake, a way over thin ice on a map of its own for each seed."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

SIZE, MOVES = 4, ("left", "down", "right", "up")  # in the order of Gymnasium's numbers
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
NAMES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal", "W": "wall"}


class Lake:
    """One walk from the upper left corner to the goal in the lower right one; the reward is 1 there, else 0."""

    def reset(self, *, seed: int) -> str:
        """Make the map that ``seed`` draws, and return what is around the walker."""
        self.map = generate_random_map(size=SIZE, seed=seed)
        self.lake = gymnasium.make("FrozenLake-v1", desc=self.map, is_slippery=False, max_episode_steps=10)
        self.position, _ = self.lake.reset(seed=seed)
        return self._text()

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Walk: Gymnasium's five values, with a text in place of the number of the place."""
        if text not in MOVES:
            return f"Say {', '.join(MOVES)}.", 0.0, False, False, {}
        self.position, reward, ended, truncated, information = self.lake.step(MOVES.index(text))
        return self._text(), float(reward), ended, truncated, information

    def close(self) -> None:
        """Let Gymnasium's environment go."""
        self.lake.close()

    def around(self) -> dict[str, str]:
        """What each move leads to: ice, hole, goal or wall."""
        row, column = divmod(int(self.position), SIZE)
        walled = ["W" * (SIZE + 2), *(f"W{line}W" for line in self.map), "W" * (SIZE + 2)]
        return {
            move: NAMES[walled[row + 1 + down][column + 1 + right]]
            for move, (down, right) in zip(MOVES, STEPS, strict=True)
        }

    def _text(self) -> str:
        row, column = divmod(int(self.position), SIZE)
        around = ", ".join(f"{move} {what}" for move, what in self.around().items())
        return f"{around}. The goal is {SIZE - 1 - row} down and {SIZE - 1 - column} right."

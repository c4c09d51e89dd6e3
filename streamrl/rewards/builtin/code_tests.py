"""``code``: the program of a completion against test cases, in the sandbox of ``streamrl.sandbox``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from streamrl.rewards.builtin.declared import RewardCallable


def code(**options: Any) -> RewardCallable:
    """The reward function of ``streamrl.sandbox``, imported when a recipe asks for it."""
    make: Any = import_module("streamrl.sandbox.reward").code_reward
    return make(**options)  # type: ignore[no-any-return]

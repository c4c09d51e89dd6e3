"""What stands in for files of prompts, user code, signals and what only looks."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio

from campaigns.faults.fault_plan import Phase
from campaigns.faults.ledger import digest_of
from campaigns.faults.virtual_time import PROCESS
from campaigns.faults.world_state import WorldState
from streamrl.base.types import Prompt, token_array

WORLDS: list[WorldState] = []
"""The world that runs now: user code and patched classes find it here."""

TOKENIZER_DIGEST = "simulated"


class StubTokenizer:
    """Nothing is decoded."""

    digest = TOKENIZER_DIGEST
    end_notice = ""
    eos_token_ids = (1,)
    special_token_ids: frozenset[int] = frozenset()
    chat_templates: dict[str, str] = {}

    def decode(self, token_ids: Any, skip_special: bool = True) -> str:
        return ""

    def messages(self, token_ids: Any, role: str = "") -> list[tuple[str, str, int]]:
        return []


class SimulatedPrompts:
    """``p0``, ``p1``, ... from ``start`` on."""

    size = None

    def __init__(self, random: Random, start: int, limit: int) -> None:
        self._random, self._next, self._limit = random, start, limit

    async def draw(self, count: int) -> list[Prompt]:
        await anyio.sleep(self._random.expovariate(1 / 0.01))
        numbers = range(self._next, min(self._next + count, self._limit))
        self._next = numbers.stop
        return [prompt_number(number) for number in numbers]

    async def aclose(self) -> None:
        pass


def prompt_number(number: int) -> Prompt:
    tokens = [2 + (number * 31 + place) % 97 for place in range(3 + number % 4)]
    return Prompt(prompt_id=f"p{number}", token_ids=token_array(tokens))


async def score(completion: str, prompt_id: str, token_ids: list[int]) -> Any:
    """The user's reward function: a value that says which call made it, after a time of its own."""
    world = WORLDS[-1]
    world.enter(Phase.REWARD)
    try:
        world.reward_calls += 1
        mischief = world.faults.take("reward", "late", "raise", "nan", "wrong_type")
        await anyio.sleep(world.random.expovariate(1 / world.shape.reward_s))
        if mischief == "late":
            await anyio.sleep_forever()
        elif mischief == "raise":
            raise ValueError("planted: the reward raises")
        elif mischief == "nan":
            return float("nan")
        elif mischief == "wrong_type":
            return "a word"
        value = (
            digest_of(prompt_id, *token_ids, world.reward_calls) % 1000 / 1000 if world.random.random() < 0.7 else 0.5
        )
        world.ledger.rewarded(token_array(token_ids).tobytes(), value)
        return value
    finally:
        world.leave(Phase.REWARD)


class SilentSink:
    """In the place of the metrics socket."""

    def __init__(self, endpoint: str, *, run_id: str = "", **_: Any) -> None:
        self.endpoint = endpoint

    def record(self, *_: object) -> None:
        pass

    publish = close = record


class SimulatedSignals:
    """``anyio.open_signal_receiver`` for the process that calls it."""

    def __init__(self, *wanted: int) -> None:
        self.wanted = wanted
        self._came: list[int] = []
        self._changed = anyio.Event()

    def __enter__(self) -> SimulatedSignals:
        process = PROCESS.get()
        assert process is not None
        process.signals.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        process = PROCESS.get()
        assert process is not None
        process.signals.remove(self)

    def tell(self, signal: int) -> None:
        """It came."""
        self._came.append(signal)
        self._changed.set()

    def __aiter__(self) -> SimulatedSignals:
        return self

    async def __anext__(self) -> int:
        while not self._came:
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._came.pop(0)

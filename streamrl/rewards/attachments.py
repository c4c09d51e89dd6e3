"""Changing the rewards of a run from Python: ``await pipeline.rewards.replace("length", my_module.better_length)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio

from streamrl.comm.reward_changes import AttachReward, DetachReward, ReplaceReward, RewardChange, RewardsChanged
from streamrl.comm.zmq_stream import zmq_sender
from streamrl.config.rewards import Reward
from streamrl.errors import RecipeError, StreamBroken, StreamRLError
from streamrl.rewards.decorated import as_reward


class RewardAttachments:
    """The rewards of a running pipeline. Each change makes a new version of the whole set; the event log says which
    version scored what. A change returns the version once every group of which nothing has ended is scored by it;
    it raises ``RecipeError`` when the functions cannot be used, and nothing has changed then."""

    def __init__(self) -> None:
        self._give, self._take = anyio.create_memory_object_stream[RewardChange](math.inf)
        self._waiting: dict[int, tuple[anyio.Event, list[RewardsChanged]]] = {}
        self._asked = 0
        self._ended = False
        self._running = False

    async def attach(self, given: Reward | str | Callable[..., Any], **settings: Any) -> int:
        """Score with one more function."""
        return await self._ask(AttachReward(request_id=self._next_id(), reward=as_reward(given, **settings)))

    async def replace(self, name: str, given: Reward | str | Callable[..., Any], **settings: Any) -> int:
        """Score with another function in place of ``name``."""
        change = ReplaceReward(request_id=self._next_id(), name=name, reward=as_reward(given, **settings))
        return await self._ask(change)

    async def detach(self, name: str) -> int:
        """Score without ``name``."""
        return await self._ask(DetachReward(request_id=self._next_id(), name=name))

    def _next_id(self) -> int:
        self._asked += 1
        return self._asked

    async def _ask(self, change: RewardChange) -> int:
        if self._ended:
            raise StreamRLError("the run has ended: its rewards cannot be changed any more")
        done, replies = self._waiting[change.request_id] = (anyio.Event(), [])
        self._give.send_nowait(change)
        await done.wait()
        if not replies:
            raise StreamRLError("the run ended before its rewards were changed")
        if replies[0].problems:
            raise RecipeError(list(replies[0].problems))
        return replies[0].reward_version

    # ---- for the pipeline ------------------------------------------------------------------------

    async def run(self, endpoint: str) -> None:
        """Send what is asked for to the controller, which connects to ``endpoint``. Until ``close``, or cancelled."""
        self._running = True
        with self._take, suppress(anyio.EndOfStream, StreamBroken):  # the run has ended
            first = await self._take.receive()
            async with zmq_sender(RewardChange, endpoint, bind=True, name="controller.rewards") as changes:
                await changes.send(first)
                async for change in self._take:
                    await changes.send(change)

    def answered(self, reply: RewardsChanged) -> None:
        """The controller has carried out a change, or could not."""
        done, replies = self._waiting.pop(reply.request_id, (None, []))
        if done is not None:
            replies.append(reply)
            done.set()

    def close(self) -> None:
        """The run has ended: nobody waits any longer."""
        self._ended = True
        for done, _ in self._waiting.values():
            done.set()
        self._waiting.clear()
        self._give.close()
        if not self._running:
            self._take.close()

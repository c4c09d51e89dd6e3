"""Changing the rewards of a run from Python: ``await pipeline.rewards.replace("length", my_module.better_length)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
from msgspec import structs

from streamrl.base.errors import RecipeError, StreamBroken, StreamRLError
from streamrl.comm.zmq_stream import zmq_sender
from streamrl.recipe.rewards import Reward
from streamrl.recipe.user_code import spec_of
from streamrl.rewards.reward_messages import (
    AttachReward,
    DetachReward,
    ListRewards,
    ReplaceReward,
    RewardChange,
    RewardReply,
    RewardRequest,
    RewardsChanged,
    RewardsListed,
)


def as_reward(
    given: Reward | str | Callable[..., Any], named: Callable[[Any], str] = spec_of, **settings: Any
) -> Reward:
    """A reward from a function, its name as in a recipe, or a ``Reward``; ``settings`` override what it says. ``named``
    gives the name of a function. Raises ``RecipeError`` for one that another process could not import, such as a
    lambda."""
    if isinstance(given, Reward):
        return structs.replace(given, **settings)
    return Reward(function=given if isinstance(given, str) else named(given), **settings)


class RewardAttachments:
    """The rewards of a running pipeline. Each change makes a new version of the whole set; the event log says which
    version scored what. A change returns the version once every group of which nothing has ended is scored by it;
    it raises ``RecipeError`` when the functions cannot be used, and nothing has changed then."""

    def __init__(self, named: Callable[[Any], str] = spec_of) -> None:
        self._named = named
        self._sender, self._receiver = anyio.create_memory_object_stream[RewardRequest](math.inf)
        self._waiting: dict[int, tuple[anyio.Event, list[RewardReply]]] = {}
        self._asked = 0
        self._ended = False
        self._running = False
        self._conversation = anyio.CancelScope()

    async def attach(self, given: Reward | str | Callable[..., Any], **settings: Any) -> int:
        """Score with one more function."""
        return (await self.change(AttachReward(reward=as_reward(given, self._named, **settings)))).reward_version

    async def replace(self, name: str, given: Reward | str | Callable[..., Any], **settings: Any) -> int:
        """Score with another function in place of ``name``."""
        return (
            await self.change(ReplaceReward(name=name, reward=as_reward(given, self._named, **settings)))
        ).reward_version

    async def detach(self, name: str) -> int:
        """Score without ``name``."""
        return (await self.change(DetachReward(name=name))).reward_version

    async def change(self, change: RewardChange) -> RewardsChanged:
        """One of the three, as a record."""
        reply = await self._ask(change)
        assert isinstance(reply, RewardsChanged), reply
        if reply.problems:
            raise RecipeError(*reply.problems)
        return reply

    async def attached(self) -> RewardsListed:
        """Ask for the rewards that score now."""
        reply = await self._ask(ListRewards())
        assert isinstance(reply, RewardsListed), reply
        return reply

    async def _ask(self, request: RewardRequest) -> RewardReply:
        if self._ended:
            raise StreamRLError("the run has ended: its rewards cannot be changed any more")
        self._asked += 1
        number = self._asked
        done, replies = self._waiting[number] = (anyio.Event(), [])
        self._sender.send_nowait(structs.replace(request, request_id=number))
        try:
            await done.wait()
        finally:
            self._waiting.pop(number, None)
        if not replies:
            raise StreamRLError("the controller ended before it answered: look at what is attached, and ask again")
        return replies[0]

    # ---- for the pipeline ------------------------------------------------------------------------

    async def run(self, endpoint: str) -> None:
        """Send what is asked for to the controller, which connects to ``endpoint``, or to its successor. Until
        ``close``, or cancelled."""
        self._running = True
        with self._receiver, suppress(anyio.EndOfStream):  # the run has ended
            while True:
                with anyio.CancelScope() as self._conversation, suppress(StreamBroken):
                    await self._converse(endpoint)

    async def _converse(self, endpoint: str) -> None:
        first = await self._receiver.receive()
        async with zmq_sender(RewardRequest, endpoint, bind=True, name="controller.rewards") as changes:
            await changes.send(first)
            while True:
                await changes.send(await self._receiver.receive())

    def controller_replaced(self) -> None:
        """The controller died and another one takes its place: the outcome of its unanswered requests is unknown."""
        for done, _ in self._waiting.values():
            done.set()
        self._waiting.clear()
        self._conversation.cancel()

    def answered(self, reply: RewardReply) -> None:
        """The controller has carried out a change, or could not, or says what is attached."""
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
        self._sender.close()
        if not self._running:
            self._receiver.close()

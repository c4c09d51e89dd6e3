"""The controller's side of reward workers: streams to them, what it must know of their functions, and changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from streamrl.comm.reward_changes import RewardChange
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.config.recipe import Recipe
from streamrl.config.topology import Topology, rewards_endpoint
from streamrl.rewards.inspect import inspect_in_subprocess
from streamrl.stage_messages import RewardOrder, RewardResult
from streamrl.stages.attached_rewards import AttachedRewards
from streamrl.stages.reward import RewardSettings, WorkerStreams, next_ready


@asynccontextmanager
async def open_worker(topology: Topology, index: int) -> AsyncIterator[WorkerStreams]:
    """Streams to reward worker ``index`` or to its successor, once it said that it is ready."""
    name = f"reward-{index}"
    async with (
        zmq_sender(RewardOrder, topology.endpoint(name, "orders"), bind=True, name=f"{name}.orders") as orders,
        zmq_receiver(RewardResult, topology.endpoint(name, "results"), bind=True, name=f"{name}.results") as results,
    ):
        await next_ready(results)
        yield orders, results


async def reward_settings(recipe: Recipe) -> RewardSettings:
    """What the reward stage must know, from the functions' signatures."""
    inspections = await anyio.to_thread.run_sync(inspect_in_subprocess, recipe.rewards)
    return RewardSettings(
        functions="+".join(r.label for r in recipe.rewards),
        per_group=any(i.signature is not None and i.signature.per_group for i in inspections),
        time_limit_s=max(r.time_limit_s for r in recipe.rewards),
        concurrency=recipe.reward_limits.concurrency,
    )


async def change_rewards(topology: Topology, attached: AttachedRewards) -> None:
    """Carry out what the holder of the pipeline asks for."""
    endpoint = rewards_endpoint(topology)
    async with zmq_receiver(RewardChange, endpoint, bind=False, name="controller.rewards") as changes:
        await attached.run(changes)

"""A reward worker: the user's functions, in a process that can be killed."""

from __future__ import annotations

import os

from streamrl.base.stage_messages import RewardOrder, RewardResult
from streamrl.plan.topology import judge_socket
from streamrl.recipe.judge import JUDGE_MODEL, JUDGE_SOCKET
from streamrl.rewards.worker import run_reward_worker
from streamrl.run.controller_streams import controller_streams
from streamrl.supervise.child import ChildContext


async def run_reward_process(context: ChildContext) -> None:
    """Score what comes until the orders end."""
    os.environ[JUDGE_SOCKET] = str(judge_socket(context.topology) or "")
    os.environ[JUDGE_MODEL] = context.recipe.judge.model
    name = context.plan.name
    streams = controller_streams(context.topology, name, ("orders", RewardOrder), ("results", RewardResult))
    async with streams as (orders, results):
        await run_reward_worker(context.recipe, context.plan.index, orders, results)

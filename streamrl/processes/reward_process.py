"""A reward worker: the user's functions, in a process that can be killed."""

from __future__ import annotations

import logging
import os

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import StreamBroken
from streamrl.base.stage_messages import RewardOrder, RewardResult
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.plan.topology import judge_socket
from streamrl.recipe.judge import JUDGE_MODEL, JUDGE_SOCKET
from streamrl.rewards.worker import run_reward_worker
from streamrl.supervise.child import ChildContext

log = logging.getLogger(__name__)


async def run_reward_process(context: ChildContext) -> None:
    """Score what comes until the orders end. Where the run forgives the death of its controller, the next one is waited
    for, with functions that begin anew: what was under way is sent again."""
    os.environ[JUDGE_SOCKET] = str(judge_socket(context.topology) or "")
    os.environ[JUDGE_MODEL] = context.recipe.judge.model
    while True:
        try:
            await _serve_controller(context)
        except Exception as error:
            if not context.recipe.core_restarts or not isinstance(first_error(error), StreamBroken):
                raise
            log.warning("the controller is gone (%s); waiting for the next one", first_error(error))
        else:
            return


async def _serve_controller(context: ChildContext) -> None:
    name = context.plan.name
    orders_at, results_at = (context.topology.endpoint(name, stream) for stream in ("orders", "results"))
    async with (
        zmq_sender(RewardResult, results_at, bind=False, name=f"{name}.results") as results,
        zmq_receiver(RewardOrder, orders_at, bind=False, name=f"{name}.orders") as orders,
    ):
        await run_reward_worker(context.recipe, context.plan.index, orders, results)

"""The run's own judge: a vLLM engine that answers the questions of rewards."""

from __future__ import annotations

import os

from streamrl.judge.messages import JudgeEvent, JudgeOrder
from streamrl.judge.options import judge_options
from streamrl.plan.topology import judge_socket
from streamrl.run.controller_streams import controller_streams
from streamrl.supervise.child import ChildContext


async def run_judge_process(context: ChildContext) -> None:
    """Answer until the controller says that nobody will ask any more."""
    options = judge_options(context.recipe, context.socket_directory)
    os.environ.update(options.environment)  # vLLM reads it when it is imported
    from streamrl.judge.server import serve_judge
    from streamrl.vllm.engine import VllmEngine

    name = context.plan.name
    path = judge_socket(context.topology)
    assert path is not None
    streams = controller_streams(context.topology, name, ("orders", JudgeOrder), ("reports", JudgeEvent))
    async with streams as (orders, reports):
        await serve_judge(VllmEngine(options), context.recipe.judge, path, orders, reports, sleeps=options.sleeps)

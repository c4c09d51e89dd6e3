"""The run's own judge: a vLLM engine that answers the questions of rewards."""

from __future__ import annotations

import os

from streamrl.judge.messages import JudgeEvent, JudgeOrder
from streamrl.judge.options import judge_options
from streamrl.plan.topology import judge_socket
from streamrl.run.controller_streams import controller_streams
from streamrl.supervise.child import ChildContext


async def run_judge_process(context: ChildContext) -> None:
    """Answer until the controller says that nobody will ask any more. It outlives its controller, for a while."""
    options = judge_options(context.recipe, context.socket_directory)
    os.environ.update(options.environment)  # vLLM reads it when it is imported
    from streamrl.judge.server import serve_judge
    from streamrl.vllm.engine import VllmEngine

    name = context.plan.name
    path = judge_socket(context.topology)
    assert path is not None
    open_controller = controller_streams(context.topology, name, ("orders", JudgeOrder), ("reports", JudgeEvent))
    engine = VllmEngine(options)
    await serve_judge(engine, context.recipe.judge, path, open_controller, sleeps=options.sleeps)

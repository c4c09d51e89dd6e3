"""A trainer rank, served over streams."""

from __future__ import annotations

from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.config.topology import RENDEZVOUS
from streamrl.learning.trainer import TorchTrainer, trainer_options
from streamrl.messages import TrainingEvent, TrainingOrder
from streamrl.processes.child import ChildContext
from streamrl.stages.training import run_training


async def run_trainer_process(context: ChildContext) -> None:
    """Train until the batches end."""
    name, endpoint = context.plan.name, context.topology.endpoint
    options = trainer_options(
        context.recipe,
        context.plan.index,
        context.recipe.run.name,
        endpoint(name, "weights"),
        rendezvous=context.topology.endpoints[RENDEZVOUS] or f"file://{context.socket_directory / 'rendezvous'}",
    )
    async with (
        zmq_sender(TrainingEvent, endpoint(name, "reports"), bind=False, name=f"{name}.reports") as reports,
        zmq_receiver(TrainingOrder, endpoint(name, "batches"), bind=False, name=f"{name}.batches") as batches,
    ):
        await run_training(TorchTrainer(options), batches, reports)

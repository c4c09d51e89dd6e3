"""The parent's side of steering, in the process of the command: ``pipeline`` passes requests from the control socket
to the controller with it, and it adds the states of processes to the status."""

from __future__ import annotations

from math import inf

from anyio import move_on_after
from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.comm.conversation import Conversation
from streamrl.launch.control_protocol import (
    ProcessStatus,
    ReadStatus,
    SteeringReply,
    SteeringRequest,
    SteeringStatus,
    SteeringTaken,
)
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.topology import Role, Topology

STATUS_LIMIT_S = 3.0
"""How long the controller has to answer a question for the status; while it starts it answers nothing."""


def steering_endpoint(topology: Topology) -> str:
    """Endpoint at which the controller receives requests: the endpoint of ``steps`` with a suffix, on the same host."""
    return f"{topology.endpoint(Role.CONTROLLER.value, 'steps')}.steering"


class SteeringRequests(Conversation[SteeringRequest, SteeringReply]):
    """Requests to steer one run, and their answers."""

    def __init__(self) -> None:
        super().__init__(SteeringRequest, "controller.steering")

    async def carry_out(self, request: SteeringRequest, supervisor: Supervisor) -> SteeringReply:
        """Return the answer to ``request``. Raises ``RecipeError`` where it cannot be carried out, and
        ``StreamRLError`` where the controller ends meanwhile."""
        reply: SteeringReply = SteeringStatus()
        with move_on_after(STATUS_LIMIT_S if isinstance(request, ReadStatus) else inf):
            reply = await self.ask(request)
        if isinstance(reply, SteeringTaken) and reply.problems:
            raise RecipeError(*reply.problems)
        if isinstance(reply, SteeringStatus):
            return replace(reply, processes=_processes(supervisor))
        return reply


def _processes(supervisor: Supervisor) -> tuple[ProcessStatus, ...]:
    return tuple(
        ProcessStatus(
            name=name,
            pid=child.process.pid,
            started_s=round(child.uptime_s, 1),
            restarts=supervisor.starts[name] - 1,
            exit_code=child.exit_code,
        )
        for name, child in supervisor.children.items()
    )

"""Requests to a controller that dies before it answers."""

from __future__ import annotations

from pathlib import Path

import anyio

from streamrl.base.errors import StreamRLError
from streamrl.comm.zmq_stream import zmq_receiver
from streamrl.launch.control_protocol import SteeringRequest, SteeringTaken, SteerRun
from streamrl.launch.steering.steering_requests import SteeringRequests


async def test_only_requests_with_waiting_askers_survive(tmp_path: Path) -> None:
    """The next controller gets only the requests whose askers still wait."""
    steering, endpoint = SteeringRequests(), f"ipc://{tmp_path}/steering"
    unanswered: list[str] = []

    async def ask(request: SteerRun) -> None:
        try:
            await steering.ask(request)
        except StreamRLError as error:
            unanswered.append(f"{request.order}: {error}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(steering.run, endpoint)
        for _ in range(3):  # the first one waits for the controller, the others behind it
            tasks.start_soon(ask, SteerRun(order="pause"))
        await anyio.wait_all_tasks_blocked()
        steering.controller_replaced()
        with anyio.move_on_after(0):
            await steering.ask(SteerRun(order="checkpoint"))
        tasks.start_soon(ask, SteerRun(order="continue"))
        async with zmq_receiver(SteeringRequest, endpoint, bind=False, name="test") as requests:
            with anyio.fail_after(60):
                assert await requests.receive() == SteerRun(order="continue", request_id=5)
            steering.deliver_reply(SteeringTaken(request_id=5))
        steering.close()
    assert len(unanswered) == 3 and all("pause: the controller ended before" in one for one in unanswered)

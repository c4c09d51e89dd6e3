"""The controller's side of steering: requests of users become events of control, which are in the journal before the
answer. ``run_controller`` serves it in the controller's process; ``steering_requests`` sends the requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from logging import getLogger

from anyio import Event
from msgspec import msgpack

from streamrl.base.errors import RecipeError, StreamBroken
from streamrl.comm.zmq_stream import zmq_receiver
from streamrl.contracts import Observer
from streamrl.control.events import ControlEvent, Steered
from streamrl.control.run_state import RunState
from streamrl.control.steering.changes import waits_for_version
from streamrl.launch.control_protocol import (
    ChangeSettings,
    ReadStatus,
    SteeringReply,
    SteeringRequest,
    SteeringStatus,
    SteeringTaken,
    SteerRun,
    WaitingChange,
)
from streamrl.launch.steering.changed_recipe import settings_change
from streamrl.processes.watchdog import Watchdog
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import prepared_sets
from streamrl.run.journal.run_journal import RunJournal
from streamrl.run.wait_reason import RunWaits

log = getLogger(__name__)

_MOST_WAITS = 20


class SteeringService(Observer):
    """Answers requests, one after the other. ``serve`` gets ``state`` and ``notify`` of the controller. ``reply``:
    sends an answer to the parent."""

    def __init__(
        self,
        recipe: Recipe,
        journal: RunJournal,
        watch: Watchdog,
        waits: RunWaits,
        reply: Callable[[SteeringReply], Awaitable[None]],
    ) -> None:
        self._recipe = recipe
        self._journal = journal
        self._watch = watch
        self._waits = waits
        self._reply = reply
        self._pending_event: ControlEvent | None = None
        self._event_handled = Event()

    async def on_event(self, event: ControlEvent) -> None:
        """Note that control has handled the event of a request."""
        if event is self._pending_event:
            self._event_handled.set()

    async def serve(self, endpoint: str, state: RunState, notify: Callable[[ControlEvent], None]) -> None:
        """Serve requests at ``endpoint`` until the parent is gone."""
        try:
            async with zmq_receiver(SteeringRequest, endpoint, bind=False, name="controller.steering") as requests:
                async for request in requests:
                    await self._reply(await self._answer(request, state, notify))
        except StreamBroken:
            return

    async def _answer(
        self, request: SteeringRequest, state: RunState, notify: Callable[[ControlEvent], None]
    ) -> SteeringReply:
        number = request.request_id
        if isinstance(request, ReadStatus):
            return self._status(number, state)
        try:
            event, text = self._event(request, state)
            msgpack.encode(event)  # as the journal does: an integer may be too large
        except RecipeError as error:
            return SteeringTaken(request_id=number, problems=tuple(error.problems))
        except Exception as error:  # no error of a request may end the run
            log.exception("steering: %s failed", request)
            return SteeringTaken(request_id=number, problems=(f"{type(error).__name__}: {error}",))
        self._pending_event = event
        self._event_handled = Event()
        notify(event)
        await self._event_handled.wait()
        await self._journal.flushed()
        return SteeringTaken(request_id=number, text=text)

    def _event(self, request: SteerRun | ChangeSettings, state: RunState) -> tuple[ControlEvent, str]:
        """The event of ``request``, and a text for the user about its effect. Raises ``RecipeError`` where it cannot be
        carried out."""
        if state.live_version < 0 or state.ending:
            reason = "ends" if state.ending else "has not begun"
            raise RecipeError(f"the run {reason}: nothing of it can be changed now")
        if not isinstance(request, SteerRun):
            change = settings_change(self._recipe, state, request.changes, request.step)
            start = f"step {change.step}" if change.step else "the next batch that opens"
            return change, f"{change.assignments}: from {start} on"
        if request.order == "evaluate" and not self._recipe.evaluation.prompts:
            raise RecipeError("evaluation.prompts: this run has no held-out prompts")
        event = Steered(order=request.order, engine=request.engine)
        if request.engine or request.order.endswith("_engine"):
            _refuse_last_engine(self._recipe, state.steering.engines_away, event)
        later = "once the version that is made now is live"
        version = state.live_version
        done_orders = {"evaluate": state.evaluated == (version, 0), "checkpoint": state.saved_version == version}
        if done_orders.get(request.order) and not waits_for_version(state):
            return event, f"the {request.order} of version {version} was ordered already"
        effects = {
            "pause": f"nothing more is launched; {state.accounting().in_flight} trajectories are finished",
            "continue": "launches go on",
            "return_engine": f"{request.engine} serves again once it has the live weights",
            "evaluate": f"all held-out prompts are evaluated, at once or {later}",
            "checkpoint": f"a checkpoint is written, at once or {later}",
        }
        return event, effects.get(request.order, f"{request.engine} serves nothing; others sample its requests")

    def _status(self, number: int, state: RunState) -> SteeringStatus:
        """The answer to the status request ``number``."""
        steering = state.steering
        batch = state.batch
        pending = state.pending
        reason, seconds = self._waits.waits_for()
        orders = {"draw prompts": pending.draw or None, "push": pending.push, "checkpoint": pending.checkpoint}
        orders |= {"evaluation": state.evaluating, "step": pending.step.policy_version if pending.step else None}
        conditions = {"ended": state.finished, "draining": state.draining, "paused": steering.paused}
        open_orders = [f"{name} {version}" for name, version in orders.items() if version is not None]
        return SteeringStatus(
            request_id=number,
            state=next((name for name, holds in conditions.items() if holds), "running"),
            step=max(state.live_version, 0),
            steps=state.steps,
            trainer_version=state.trainer_version,
            live_version=state.live_version,
            round_kind=state.round_kind,
            group_size=batch.group_size,
            in_flight=state.accounting().in_flight,
            ready=len(state.buffer.ready),
            batch=batch.filled,
            batch_target=batch.target,
            queue=len(state.prompts.queue),
            waits_for=str(reason),
            waited_s=round(seconds, 1),
            waits=tuple(self._watch.waits.lines()[:_MOST_WAITS]),
            pending=(*open_orders, *steering.waiting_orders),
            engines_away=steering.engines_away,
            changed=steering.changed,
            waiting=tuple(WaitingChange(step=change.step, values=change.values) for change in steering.waiting_changes),
        )


def _refuse_last_engine(recipe: Recipe, engines_away: Collection[str], event: Steered) -> None:
    """Raise ``RecipeError`` where the engine of ``event`` is none of the run, or too few engines of a set would serve
    without it and ``engines_away``: every round must be able to end without these."""
    sets = [set(engine_set.engines) for engine_set in prepared_sets(recipe)]
    names = sorted(set.union(*sets))
    if event.engine not in names:
        raise RecipeError(f'there is no engine "{event.engine}": this run has {", ".join(names)}')
    serving = min(len(engines - {event.engine, *engines_away}) for engines in sets)
    if event.order != "return_engine" and serving < recipe.engines.min_serving:
        raise RecipeError(f"{event.engine} is one of the last that must serve (engines.advanced.min_serving)")

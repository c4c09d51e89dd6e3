"""The core of control: ``handle(event) -> actions``, which is ``apply`` and then ``decide``. The same core runs the
real pipeline and the simulator, and the journal of a run rebuilds it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from streamrl.control.actions import ControlAction
from streamrl.control.apply import apply
from streamrl.control.decide import decide
from streamrl.control.events import ControlEvent, RunContinued
from streamrl.control.model import SNAPSHOT_SCHEMA, Batch, RunState, Snapshot, requeue_interrupted
from streamrl.control.pending import unanswered_orders
from streamrl.control.round_policy import GroupSizer, RoundPolicy, Rules
from streamrl.control.settings import ControlSettings

Steer = Callable[[RunState, Rules, ControlEvent, list[ControlAction]], Rules]
"""Carries out what people ask for, between an event and the decisions after it; returns the rules from there on."""


def unsteered(state: RunState, rules: Rules, event: ControlEvent, out: list[ControlAction]) -> Rules:
    """The rules as they are."""
    return rules


class Control:
    """Everything that decides: the state of the run and the policies that it asks. One instance a run."""

    def __init__(
        self,
        settings: ControlSettings,
        policy: RoundPolicy,
        sizer: GroupSizer,
        snapshot: Snapshot | None = None,
        steer: Steer = unsteered,
    ) -> None:
        """Raises ``StreamRLError`` for a snapshot of another schema, ``ValueError`` where more slots were in use than
        there are by ``settings``."""
        self.rules = Rules(settings, policy, sizer)
        self._steer = steer
        self.state = RunState(steps=settings.steps, batch=Batch(batch_id=0, target=settings.batch_weight))
        if snapshot is not None:
            snapshot.check()
            self.state = snapshot.state
            policy.restore(snapshot.policy)
            sizer.restore(snapshot.sizer)
            if self.state.slots.in_use > self.rules.slots:
                raise ValueError(
                    f"{self.state.slots.in_use} slots were in use, and this recipe has {self.rules.slots}: resume with "
                    "its own"
                )

    @property
    def settings(self) -> ControlSettings:
        """The part of the recipe that decides."""
        return self.rules.settings

    def handle(self, event: ControlEvent) -> list[ControlAction]:
        """Take one event, decide, and return what is to be done, in order."""
        out: list[ControlAction] = []
        self._take(event, out)
        return out

    def _take(self, event: ControlEvent, out: list[ControlAction]) -> None:
        state = self.state
        rules = self.rules
        if state.finished and not isinstance(event, RunContinued):
            return
        if apply(state, event, rules, out) and not state.finished:
            self.rules = self._steer(state, rules, event, out)
            decide(state, self.rules, out)

    def unanswered_orders(self) -> list[ControlAction]:
        """List what was ordered and not answered (``pending``), for a shell with nothing in flight."""
        return unanswered_orders(self.state)

    def snapshot(self) -> Snapshot:
        """All of control, to be encoded before the next event."""
        return Snapshot(
            schema=SNAPSHOT_SCHEMA,
            state=self.state,
            policy=msgspec.to_builtins(self.rules.policy.snapshot()),  # copies: a policy may change what it gave
            sizer=msgspec.to_builtins(self.rules.sizer.snapshot()),
        )


def fork(snapshot: Snapshot, settings: ControlSettings) -> Snapshot:
    """Make the initial snapshot of another run that begins from a checkpoint with this one: what was under way is
    sampled again, what was deferred still waits, what policies learnt stays."""
    snapshot.check()
    before = snapshot.state
    state = RunState(steps=settings.steps, batch=Batch(batch_id=0, target=settings.batch_weight))
    state.next_group_id = before.next_group_id
    state.prompts.drawn = before.prompts.drawn
    for group in before.buffer.groups():
        requeue_interrupted(state, group)
    state.prompts.waiting += before.prompts.waiting
    sizes = settings.group_sizes
    state.prompts.queue = [
        ref if ref.group_size in sizes else msgspec.structs.replace(ref, group_size=sizes[0])
        for ref in (*state.prompts.queue, *before.prompts.queue)
    ]
    return msgspec.structs.replace(snapshot, state=state, order=None)

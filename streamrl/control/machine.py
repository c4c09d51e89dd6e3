"""The entry of control: ``Control.handle(event) -> actions``, which calls ``apply`` and then ``decide``.

The same object runs in the controller process of a real run and in the simulator; a controller that takes over rebuilds
it from the journal."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from streamrl.control.actions import ControlAction
from streamrl.control.apply import apply
from streamrl.control.decide import decide
from streamrl.control.events import ControlEvent, RunContinued
from streamrl.control.mixture import note_reward
from streamrl.control.round_policy import GroupSizer, RoundPolicy, Rules
from streamrl.control.run_state import SNAPSHOT_SCHEMA, Batch, DrawnSet, RunState, Snapshot, requeue_interrupted
from streamrl.control.settings import ControlSettings
from streamrl.control.unanswered_orders import unanswered_orders

Steer = Callable[[RunState, Rules, ControlEvent, list[ControlAction]], Rules]
"""Function that carries out orders of users, between an event and the decisions after it. Returns the rules that hold
from there on."""


def unsteered(state: RunState, rules: Rules, event: ControlEvent, out: list[ControlAction]) -> Rules:
    """Return ``rules``: a run without orders of users."""
    return rules


class Control:
    """The state of the run and its rules, which decide together. One instance a run."""

    def __init__(
        self,
        settings: ControlSettings,
        policy: RoundPolicy,
        sizer: GroupSizer,
        snapshot: Snapshot | None = None,
        steer: Steer = unsteered,
    ) -> None:
        """Start a run, or continue from ``snapshot``. Raises ``StreamRLError`` for a snapshot of another schema,
        ``ValueError`` where it uses more slots than ``settings`` have."""
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
        """Take one event and return the actions that follow from it, in order."""
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
        """Orders without an answer (``unanswered_orders``), for a shell with nothing in flight."""
        return unanswered_orders(self.state, self.settings.shares)

    def snapshot(self) -> Snapshot:
        """Complete state of control. Encode it before the next event, which changes it."""
        return Snapshot(
            schema=SNAPSHOT_SCHEMA,
            state=self.state,
            # A copy, since the policy may change its objects later.
            policy=msgspec.to_builtins(self.rules.policy.snapshot()),
            sizer=msgspec.to_builtins(self.rules.sizer.snapshot()),
        )


def fork(snapshot: Snapshot, settings: ControlSettings) -> Snapshot:
    """Make the first snapshot of another run, which begins from a checkpoint with ``snapshot``. Prompts of unfinished
    groups are sampled again, deferred prompts stay in the queue, and policies keep what they have learnt."""
    snapshot.check()
    origin = snapshot.state
    state = RunState(steps=settings.steps, batch=Batch(batch_id=0, target=settings.batch_weight))
    state.next_group_id = origin.next_group_id
    state.prompts.drawn = origin.prompts.drawn
    # The recipe may have other shares: they hold from here on.
    state.prompts.sets = {name: DrawnSet(drawn=position.drawn) for name, position in origin.prompts.sets.items()}
    if settings.tracked is not None:
        state.tracker = origin.tracker
    if settings.pools:
        for prompt_id, mean_reward in origin.prompts.rewards.items():
            note_reward(state.prompts, prompt_id, mean_reward, settings.shares)
    for group in origin.buffer.groups():
        requeue_interrupted(state, group)
    state.prompts.waiting += origin.prompts.waiting + origin.prompts.reserved
    sizes = settings.group_sizes
    state.prompts.queue = [
        ref if ref.group_size in sizes else replace(ref, group_size=sizes[0])
        for ref in (*state.prompts.queue, *origin.prompts.queue)
    ]
    return replace(snapshot, state=state, order=None)

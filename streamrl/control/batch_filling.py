"""Filling the open batch: which ready groups join it, when it is closed, what becomes of the groups that are not in it.
A part of the pure core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.base.types import DropReason, TrajectoryId
from streamrl.buffers.rollout_buffer import Group, oldest_first
from streamrl.buffers.slots import last_version
from streamrl.control import actions as do
from streamrl.control.actions import ControlAction
from streamrl.control.round_policy import Candidate, Remainder
from streamrl.control.round_supply import next_attempt
from streamrl.recipe.scheduling import SizingKind, StalePolicy

if TYPE_CHECKING:
    from streamrl.control.state import ControlState


class BatchFilling:
    """What ``ControlState`` hands to training. ``newest``: the group that became ready with the event that is being
    handled, if that is all that changed. It does not outlive its event."""

    def __init__(self, state: ControlState) -> None:
        self._state = state
        self.newest: Group | None = None

    def drop_stale(self, actions: list[ControlAction]) -> None:
        """A group whose oldest token no batch may train any more ends here, whatever the policy promised."""
        state = self._state
        # The open batch is trained by trainer_version; once it is closed the next chance is one version later.
        now = state.trainer_version + int(state.batch.closed)
        for group in state.buffer.older_than(now - state.settings.max_staleness):
            state.drop_group(group, DropReason.STALE, actions)
            if state.settings.when_stale is StalePolicy.REGENERATE:
                state.supply.waiting.push_front(next_attempt(group, -1))

    def fill(self, actions: list[ControlAction]) -> None:
        """Hand ready groups to training while the batch has seats."""
        state, batch = self._state, self._state.batch
        newest, self.newest = self.newest, None
        if batch.closed or batch.seats <= 0 or not state.buffer.ready:
            return
        # What was refused stays refused while groups only become ready (``RoundPolicy.may_join``): ask for the new one.
        asking = list(state.buffer.ready.values()) if newest is None else [newest]
        # Of mixed sizes one may be refused that has room when the seats of others are taken.
        mixed = state.settings.group_sizing.kind is not SizingKind.FIXED
        while self._ask(asking, actions) and mixed and batch.seats > 0:
            asking = list(state.buffer.ready.values())

    def _ask(self, asking: list[Group], actions: list[ControlAction]) -> bool:
        """Whether one of them joined."""
        state, batch = self._state, self._state.batch
        joined = False
        view = state.launching.view()
        for group in sorted(asking, key=oldest_first):
            if batch.seats <= 0:
                break
            candidate = Candidate(
                group_id=group.group_id,
                trajectories=group.keep,
                tokens=group.tokens,
                deadline=last_version(group.oldest_version, state.settings.max_staleness),
            )
            if not state.supply.domain_has_seat(group, batch.domains, batch.target // group.keep):
                continue
            if not state.policy.may_join(view, candidate):
                continue
            state.buffer.batch(group.group_id, batch.batch_id)
            batch.take(group)
            view = state.launching.view()
            ids = tuple(group.members)
            actions.append(do.TrainGroupNow(batch_id=batch.batch_id, group_id=group.group_id, ids=ids))
            joined = True
            if state.policy.cut_tokens and batch.tokens >= state.policy.cut_tokens:
                batch.target = batch.seats_taken
        return joined

    def close(self, actions: list[ControlAction]) -> None:
        """Settle a full batch, and let the trainer step once it may."""
        state, batch = self._state, self._state.batch
        # An exhausted source ends with one smaller batch rather than losing what was sampled.
        starved = state.supply.empty and not state.buffer.untrained
        if batch.closed or not batch.groups or (batch.seats > 0 and not starved):
            return
        if not batch.settled:
            batch.settled = True
            self._settle(actions)
        # A delta is made against the last acknowledged version: the next step waits until that one is live.
        # A checkpoint is of the version that the trainer holds; it could not step while it writes anyway.
        if state.live_version < state.trainer_version or state.due.checkpointing is not None:
            return
        batch.closed = True
        actions.append(
            do.StepOptimizer(
                batch_id=batch.batch_id,
                policy_version=state.trainer_version + 1,
                groups=batch.groups,
                samples=batch.samples,
                trained_tokens=batch.tokens,
                engines_idle=state.due.evaluating is None and all(g.held for g in state.buffer.untrained.values()),
            )
        )
        self.drop_stale(actions)

    def _settle(self, actions: list[ControlAction]) -> None:
        """The batch is full: what becomes of the groups that are not in it."""
        state = self._state
        if not state.buffer.untrained:
            return
        fate = state.policy.remainder(state.launching.view())
        losers = [g for g in state.buffer.untrained.values() if not g.held]
        if fate is Remainder.HOLD:
            stopped: list[TrajectoryId] = []
            for group in losers:
                if group.open:
                    stopped.extend(group.open_ids())
                    state.buffer.hold(group)
            if stopped:
                actions.append(do.CutTrajectories(ids=tuple(stopped)))
        elif fate is Remainder.REQUEUE:
            longest = max((g.longest for g in state.buffer.groups.values()), default=0)
            for group in losers:
                state.lengths.lost(group, longest)
                state.drop_group(group, state.policy.losing, actions)
                state.supply.requeue(group, replays=state.policy.replays, noise=state.launching.noise_of(group))

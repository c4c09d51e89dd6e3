"""Launching: asks the round policy what to launch, and makes groups of prompts. A part of the pure core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.base.types import Record, TrajectoryId
from streamrl.buffers.rollout_buffer import Group, PromptTicket
from streamrl.buffers.slots import last_version
from streamrl.control import actions as do
from streamrl.control.actions import ControlAction
from streamrl.control.open_batch import KeptBatch, OpenBatch
from streamrl.control.round_policy import Launch, RoundView, Source

if TYPE_CHECKING:
    from streamrl.control.state import ControlState


class KeptLaunching(Record, frozen=True):
    """A ``Launching`` as a record. ``next_batch``: whose round was opened in advance; ``holding``: engines are held for
    the version that is being made; ``round_groups``: of the first launch of the open round."""

    next_batch: KeptBatch | None = None
    holding: bool = False
    round_groups: int = 0


class Launching:
    """What ``ControlState`` launches. With ``rollout.advanced.presubmit`` the next round opens while the step still
    runs: its requests wait in the paused engines, and the weights that are trained now sample them."""

    def __init__(self, state: ControlState) -> None:
        self._state = state
        self._next: OpenBatch | None = None
        self._holding = False
        self._round_groups = 0

    def noise_of(self, group: Group) -> int:
        """What the seeds of ``group`` were derived from: its own number, or that of the launch that it replays."""
        return group.group_id if group.ticket.noise < 0 else group.ticket.noise

    def batch_after(self, trained: OpenBatch) -> OpenBatch:
        """The batch that follows ``trained``: the one whose round was opened in advance, or a new one."""
        batch, self._next = self._next, None
        return batch or OpenBatch(batch_id=trained.batch_id + 1, target=self._state.settings.batch_trajectories)

    def released(self) -> None:
        """The version that engines were held for is live."""
        self._holding = False

    @property
    def held_for(self) -> int | None:
        """The version that engines are held for; None: they are not."""
        return self._state.live_version + 1 if self._holding else None

    def keep(self) -> KeptLaunching:
        """All of it."""
        return KeptLaunching(
            next_batch=None if self._next is None else self._next.keep(),
            holding=self._holding,
            round_groups=self._round_groups,
        )

    def restore(self, kept: KeptLaunching) -> None:
        """The inverse."""
        self._next = None if kept.next_batch is None else OpenBatch.of(kept.next_batch)
        self._holding, self._round_groups = kept.holding, kept.round_groups

    def view(self) -> RoundView:
        """What the policy sees. In advance of a version: as if it were live already."""
        state = self._state
        settings, buffer, supply = state.settings, state.buffer, state.supply
        ahead = int(self._in_advance)
        batch = self._next_batch() if ahead else state.batch
        held = buffer.held_groups
        due = buffer.versions()
        steps_left = state.steps - state.trainer_version - int(state.batch.closed)
        due_size = 0 if batch.round_kind else supply.size_due(settings.batch_trajectories, last=steps_left == 1)
        # One size a round: a refill of another size would not fit the seats.
        size = batch.group_size or due_size or supply.cohort_size or state.sizer.size
        return RoundView(
            trainer_version=state.trainer_version + ahead,
            live_version=state.live_version + ahead,
            batch_trajectories=settings.batch_trajectories,
            group_size=size,
            target=batch.target,
            seats=batch.seats,
            joined=batch.groups,
            batch_closed=batch.closed,
            round_kind=batch.round_kind,
            untrained=len(buffer.untrained) - held,
            untrained_trajectories=sum(count for _, count in due),
            held=held,
            queued=supply.queued(
                size,
                self._round_groups if batch.round_kind else max(batch.seats // size, 1),
                batch.target // size,
                round_open=bool(batch.round_kind),
            ),
            exhausted=supply.exhausted and not len(supply.waiting),
            free_slots=state.slots.free,
            steps_left=steps_left,
            when_stale=settings.when_stale,
            due=tuple((last_version(version, settings.max_staleness), count) for version, count in due),
            unseated=self._unseated(batch),
            long_due=bool(due_size),
        )

    def _unseated(self, batch: OpenBatch) -> int:
        """Ready groups that cannot join because their domain has its share of the batch already."""
        supply = self._state.supply
        if not supply.has_domains:
            return 0
        ready = self._state.buffer.ready.values()
        return sum(not supply.domain_has_seat(group, batch.domains, batch.target // group.keep) for group in ready)

    def launch(self, actions: list[ControlAction]) -> None:
        """Ask the policy until it has nothing more to launch, or prompts must be drawn first."""
        supply = self._state.supply
        while not supply.asked and not supply.loading:
            view = self.view()
            plan = self._state.policy.launch(view)
            if plan is None or plan.groups <= 0:
                return
            if plan.because is not None:
                actions.append(plan.because)
            if plan.source is Source.COHORT:
                missing = supply.open_cohort(plan.groups, plan.copies, view.group_size)
                if missing:
                    self._ask(missing, actions)
                elif not len(supply.queue):
                    return
            elif plan.source is Source.HELD:
                if not self._resume(plan, view.group_size, actions):
                    return
            else:
                launched = self._launch_groups(plan, view.group_size, actions)
                # Of a domain the queue may have fewer than its share: fresh prompts join the others at once.
                short = launched < plan.groups and plan.source is not Source.QUEUE
                if short or not launched:
                    return

    def _launch_groups(self, plan: Launch, size: int, actions: list[ControlAction]) -> int:
        """How many groups of ``plan`` were launched; if not all, and prompts are to be had, they are asked for."""
        state = self._state
        if not 0 <= plan.keep <= plan.size or plan.size < 1:
            raise ValueError(
                f"the rounds launch groups of {plan.size} trajectories of which {plan.keep} are kept: "
                "answer a size of 1 or more, and keep as many or fewer"
            )
        wanted = min(plan.groups, state.slots.free // plan.size)
        launched = 0
        while launched < wanted:
            opens = not self._open_batch().round_kind
            if opens:
                state.supply.round_opens()
            target = (plan.target if opens else 0) or self._open_batch().target
            ticket = state.supply.take(
                plan, max(plan.groups, 0 if opens else self._round_groups), target // (plan.keep or plan.size)
            )
            if ticket is None:
                break
            self._open_round(plan, size, actions)
            self._launch_group(plan, ticket, actions)
            launched += 1
        if launched < wanted and plan.source is Source.FRESH and not state.supply.exhausted:
            overdrawn = state.supply.overdrawn()
            if overdrawn:
                state.finished = True
                actions.append(do.StopRun(message=overdrawn))
            else:
                self._ask(wanted - launched, actions)
        return launched

    def _launch_group(self, plan: Launch, ticket: PromptTicket, actions: list[ControlAction]) -> None:
        state = self._state
        version = state.live_version + int(self._in_advance)
        group = state.buffer.admit(
            ticket,
            state.next_group_id,
            plan.size,
            keep=plan.keep or plan.size,
            policy_version=version,
            round_kind=plan.round_kind,
            queued=plan.source is Source.QUEUE,
        )
        state.next_group_id += 1
        state.slots.charge(group.size)
        actions.append(
            do.LaunchGroup(
                group_id=group.group_id,
                ids=tuple(group.members),
                policy_version=version,
                noise=self.noise_of(group),
            )
        )

    def _open_round(self, plan: Launch, size: int, actions: list[ControlAction]) -> None:
        """The first launch of a round says what it is called and what fills its batch. ``size``: of its groups."""
        state = self._state
        if self._in_advance and not self._holding:
            self._holding = True
            actions.append(do.HoldEngines(policy_version=state.trainer_version + 1))
        batch = self._open_batch()
        if batch.round_kind:
            return
        batch.round_kind = plan.round_kind
        batch.target = plan.target or batch.target
        batch.group_size = size
        self._round_groups = plan.groups

    def _resume(self, plan: Launch, size: int, actions: list[ControlAction]) -> bool:
        """Whether anything was held."""
        state = self._state
        chosen = state.buffer.held()[: plan.groups]
        if not chosen:
            return False
        self._open_round(plan, size, actions)
        ids: list[TrajectoryId] = []
        for group in chosen:
            state.buffer.resume(group)
            ids.extend(group.open_ids())
        actions.append(do.ResumeTrajectories(ids=tuple(ids)))
        return True

    def _ask(self, count: int, actions: list[ControlAction]) -> None:
        self._state.supply.asked = count
        actions.append(do.DrawPrompts(count=count))

    def _open_batch(self) -> OpenBatch:
        return self._next_batch() if self._in_advance else self._state.batch

    def _next_batch(self) -> OpenBatch:
        if self._next is None:
            following = self._state.batch.batch_id + 1
            self._next = OpenBatch(batch_id=following, target=self._state.settings.batch_trajectories)
        return self._next

    @property
    def _in_advance(self) -> bool:
        """Whether what is launched now waits in the engines for the version that is being made."""
        state = self._state
        return (
            state.settings.presubmit
            and state.policy.on_policy
            and state.batch.closed
            and state.due.evaluating is None
            and all(version > state.trainer_version for version, _ in state.buffer.versions())
        )

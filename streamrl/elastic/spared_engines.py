"""Engines that come and go with the rounds, as the controller sees them: freed late in one, or exchanged for a set of
another shape. Without either, all of this does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from streamrl.base.stage_messages import EndedOutcome, TrajectoryLost
from streamrl.base.types import TrajectoryId
from streamrl.control import actions as do
from streamrl.elastic.engine_release import EngineRelease
from streamrl.elastic.engine_sets import SetPlan
from streamrl.elastic.engine_switch import EngineSwitch
from streamrl.journal.run_journal import RunJournal
from streamrl.observe.report.run_report import RunReport


class SparedEngines:
    """``release``: who frees engines late in a round; ``switch``: who changes sets. Decisions are in the journal."""

    def __init__(
        self,
        release: EngineRelease | None,
        switch: EngineSwitch | None,
        journal: RunJournal,
        report: RunReport,
        recovered: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._recovered = recovered
        self._release = release
        self._switch = switch
        self._journal = journal
        self._report = report
        self._freeing = anyio.CancelScope()
        self._served_late = 0
        self._step = 0

    @property
    def figures(self) -> dict[str, float]:
        """Of the sets, and of engines that were lost (``recovered``), for the record of a step."""
        return (dict(self._switch.figures) if self._switch else {}) | self._recovered()

    async def run(self) -> None:
        """Look at the engines until ``end``."""
        if self._release is not None:
            with self._freeing:
                await self._release.run(self._decided)

    def end(self) -> None:
        """The run is over."""
        self._freeing.cancel()

    def give_up(self) -> None:
        """The run ends: engines are neither freed nor changed, and none is waited for."""
        for part in (self._release, self._switch):
            if part is not None:
                part.give_up()

    async def launched(
        self, round_kind: str, ids: Sequence[TrajectoryId], prompt_tokens: int, policy_version: int, beside: TaskGroup
    ) -> None:
        """A group of a round of ``round_kind`` is about to be sampled by ``policy_version``."""
        self._step = policy_version + 1
        if self._release is not None:
            self._release.launched(round_kind, ids)
        if self._switch is None:
            return
        plan = self._switch.launched(round_kind, ids, prompt_tokens, policy_version)
        if plan is not None and plan.because is not None:
            self._journal.decided(plan.because, self._report.elapsed())
            await self._report.decided(plan.because, self._step)
            beside.start_soon(self._change, self._switch, plan, policy_version)

    def ended(self, outcome: EndedOutcome) -> None:
        """A trajectory came back."""
        for part in (self._release, self._switch):
            if part is not None:
                part.ended(*_end_of(outcome))

    def batch_closed(self, beside: TaskGroup, *, last: bool) -> None:
        """The trainer steps: engines that were freed are wanted soon, unless this was the ``last`` batch."""
        if self._switch is not None:
            self._switch.round_closed()
        if self._release is not None and not last:
            beside.start_soon(self._release.call_back)

    async def begin_round(self, policy_version: int, *, last: bool) -> None:
        """All engines serve again: only then is a version live everywhere. After the ``last`` one nobody needs them."""
        if self._release is None:
            return
        if last:
            self._release.give_up()
        await self._release.begin_round(policy_version)
        self._report.engines_serve(self._release.serving)

    async def _change(self, switch: EngineSwitch, plan: SetPlan, policy_version: int) -> None:
        await switch.carry_out(plan, policy_version)
        self._report.engines_serve(switch.serving)

    async def _decided(self, decision: do.Explain, done: bool) -> None:
        assert self._release is not None
        self._journal.decided(decision, self._report.elapsed())
        if not done:
            return
        serving = self._release.serving
        self._report.engines_serve(serving)
        if serving != self._served_late:  # it will be much the same in every round: people need not be told of each
            self._served_late = serving
            await self._report.decided(decision, self._step)


def _end_of(item: EndedOutcome) -> tuple[TrajectoryId, int | None]:
    """Which trajectory it is, and the length of its completion, if it has one."""
    if isinstance(item, TrajectoryLost):
        return item.id, None
    trajectory = item.outcome.trajectory
    return trajectory.id, trajectory.generated_tokens

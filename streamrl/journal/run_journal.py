"""The journal of a run as its controller keeps it: what control is told, and the content of what it knows.

Appending never waits. Before anything is done that cannot be undone (a step of the optimizer), ``settled`` waits until
everything so far is on the disk. A checkpoint that is durable makes what came before it superfluous: the journal begins
anew there, with the whole control state. What is between it and the checkpoint before stays until the next one: should
the newer one turn out to be damaged, the run goes on from the older.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from streamrl.base.stage_messages import FinishedTrajectory, RolloutOutcome, TrajectoryHeld
from streamrl.base.types import Prompt, ScoredTrajectory, TrajectoryId
from streamrl.comm.stream import SendStream, StreamStatistics
from streamrl.control.actions import Decision
from streamrl.control.events import CheckpointDone, ControlEvent, RunBegan, TrajectoryFailed
from streamrl.control.machine import Control
from streamrl.control.model import Snapshot
from streamrl.journal.journal_records import (
    JournalBase,
    JournalCodec,
    JournalDecision,
    JournalEvent,
    JournalHeld,
    JournalPrompts,
    JournalPublished,
    JournalRecord,
    sampled_record,
    scored_record,
)
from streamrl.journal.log import Journal
from streamrl.journal.recovered_run import RecoveredRun

_PROMPTS_IN_RECORD = 100
_PROMPT_BYTES_IN_RECORD = 16 << 20
"""A record of several prompts takes no more. The journal refuses one of ``log.RECORD_LIMIT``."""


class RunJournal:
    """``journal`` None: nothing is kept. ``prompts``: those that control may still ask for.
    ``recovered``: what an earlier life left in it."""

    def __init__(
        self,
        journal: Journal | None,
        prompts: Callable[[], Sequence[Prompt]],
        recovered: RecoveredRun | None = None,
    ) -> None:
        self._journal = journal
        self._prompts = prompts
        self._begun = recovered is not None
        self._codec = JournalCodec()
        self._last = 0
        self._kept: dict[TrajectoryId, dict[type, JournalRecord]] = {}
        self._events = recovered.events if recovered else 0
        self._published = recovered.published if recovered else None
        for record in recovered.records() if recovered else ():
            self._keep(record)

    # ---- what comes in ---------------------------------------------------------------------------

    def drawn(self, prompts: Sequence[Prompt]) -> None:
        """Before control is told of them."""
        if self._appends:
            for encoded in self._prompt_records(prompts):
                self._append_encoded(encoded)

    def came(self, outcome: RolloutOutcome) -> None:
        """A trajectory left the engines: whole, or stopped."""
        if isinstance(outcome, FinishedTrajectory) and not outcome.trajectory.evaluation:
            self._note(sampled_record(outcome.trajectory))
        elif isinstance(outcome, TrajectoryHeld) and outcome.done is not None:
            self._note(JournalHeld(id=outcome.id, done=outcome.done))

    def scored(self, scored: ScoredTrajectory) -> None:
        """Before control is told of it."""
        self._note(scored_record(scored))

    def published(self, policy_version: int, state_hash: int) -> None:
        """Ranks have made this version."""
        self._published = JournalPublished(policy_version=policy_version, state_hash=state_hash)
        self._append(self._published)

    def ended(self, ids: Iterable[TrajectoryId]) -> None:
        """Nobody will ask for their content again."""
        for trajectory in ids:
            self._kept.pop(trajectory, None)

    def decided(self, decision: Decision, elapsed_s: float) -> None:
        """For people: something beside control decided this, ``elapsed_s`` after the start of the run."""
        self._append(JournalDecision(decision=decision, time_s=round(elapsed_s, 4)))

    # ---- control ---------------------------------------------------------------------------------

    def told(self, event: ControlEvent, control: Control, elapsed_s: float) -> None:
        """Before control handles ``event``."""
        if isinstance(event, CheckpointDone):
            self._begin_anew(control, elapsed_s)
        self._events += 1
        self._append(JournalEvent(event=event, time_s=round(elapsed_s, 4)))
        if isinstance(event, TrajectoryFailed):
            self.ended((event.id,))

    async def handled(self, event: ControlEvent, control: Control) -> None:
        """Control took ``event``."""
        if isinstance(event, RunBegan):
            self._begin_anew(control, 0.0)
            await self.settled()  # before a checkpoint is written: without a journal nothing goes on from it

    async def settled(self) -> None:
        """Return when everything so far is on the disk. Raises ``JournalFailed``."""
        if self._journal is not None and self._last:
            await self._journal.durable(self._last)

    async def room(self) -> None:
        """Wait while more waits to be written than memory should hold."""
        if self._journal is not None:
            await self._journal.room()

    # ---- inside ----------------------------------------------------------------------------------

    def _begin_anew(self, control: Control, elapsed_s: float) -> None:
        if self._journal is not None:
            self._begun = True
            self._last = self._journal.begin_segment(self._base(control.snapshot(), elapsed_s))

    def _base(self, control: Snapshot, elapsed_s: float) -> Iterator[bytes]:
        encode = self._codec.encode
        yield encode(JournalBase(control=control, events=self._events, elapsed_s=elapsed_s))
        yield from self._prompt_records(self._prompts())
        if self._published is not None:
            yield encode(self._published)
        for records in self._kept.values():
            yield from map(encode, records.values())

    def _prompt_records(self, prompts: Sequence[Prompt]) -> Iterator[bytes]:
        for first in range(0, len(prompts), _PROMPTS_IN_RECORD):
            yield from self._cut_by_bytes(prompts[first : first + _PROMPTS_IN_RECORD])

    def _cut_by_bytes(self, prompts: Sequence[Prompt]) -> Iterator[bytes]:
        encoded = self._codec.encode(JournalPrompts(prompts=tuple(prompts)))
        if len(encoded) <= _PROMPT_BYTES_IN_RECORD or len(prompts) == 1:
            yield encoded
            return
        half = len(prompts) // 2
        yield from self._cut_by_bytes(prompts[:half])
        yield from self._cut_by_bytes(prompts[half:])

    def _note(self, record: JournalRecord) -> None:
        self._keep(record)
        self._append(record)

    def _keep(self, record: JournalRecord) -> None:
        identity = getattr(record, "id", None)
        if self._journal is not None and isinstance(identity, TrajectoryId):
            self._kept.setdefault(identity, {})[type(record)] = record

    def _append(self, record: JournalRecord) -> None:
        if self._appends:
            self._append_encoded(self._codec.encode(record))

    @property
    def _appends(self) -> bool:
        return self._journal is not None and self._begun  # the first base says what was before it

    def _append_encoded(self, encoded: bytes) -> None:
        assert self._journal is not None
        self._last = self._journal.append(encoded)


class JournalledOutcomes:
    """The stream from rollout to reward, with each outcome in the journal before it goes on."""

    def __init__(self, journal: RunJournal, outcomes: SendStream[RolloutOutcome]) -> None:
        self._journal = journal
        self._outcomes = outcomes

    async def send(self, item: RolloutOutcome) -> None:
        """See ``SendStream``. Waits while the disk is behind."""
        await self._journal.room()
        self._journal.came(item)
        await self._outcomes.send(item)

    async def aclose(self) -> None:
        """See ``SendStream``."""
        await self._outcomes.aclose()

    def statistics(self) -> StreamStatistics:
        """See ``SendStream``."""
        return self._outcomes.statistics()

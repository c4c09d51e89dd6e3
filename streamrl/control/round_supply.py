"""What the next groups are made of: waiting prompts, the queue of losers, their predicted lengths. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from streamrl.base.types import Record
from streamrl.buffers.rollout_buffer import Group, PromptTicket
from streamrl.control.events import PromptsDrawn
from streamrl.control.prompt_queue import DomainShares, LoserQueues, PromptQueue
from streamrl.control.round_policy import Launch, RoundPolicy, Source
from streamrl.control.settings import ControlSettings
from streamrl.policies.length_prediction import PromptLengthPredictor
from streamrl.recipe.scheduling import RoundKind, SizingKind

OVERDRAWN = 16
"""Batches of prompts that may wait for a domain to turn up, before the run is stopped."""


class KeptSupply(Record, frozen=True):
    """A ``RoundSupply`` as a record. ``cohort``: the prompts, copies and group size of the one that is being drawn;
    ``launched``: groups of this round by domain; ``unsorted``: the queue changed since it was sorted."""

    waiting: tuple[PromptTicket, ...] = ()
    queue: tuple[PromptTicket, ...] = ()
    predictor: dict[str, Any] = {}
    asked: int = 0
    drawn_prompts: int = 0
    exhausted: bool = False
    cohort: tuple[int, int, int] | None = None
    launched: dict[str, int] = {}
    unsorted: bool = False


class RoundSupply:
    """``asked``: prompts that were asked of the source and have not come; ``drawn_prompts``: that came; ``exhausted``:
    it has no more."""

    def __init__(self, settings: ControlSettings, policy: RoundPolicy) -> None:
        self._policy = policy
        self._domains = DomainShares(settings.tail_batching.domains)
        self.waiting = PromptQueue(self._domains)
        self.queue = LoserQueues(self._domains, _sizes_that_race(settings))
        self.predictor = PromptLengthPredictor() if policy.predicts_lengths else None
        self.asked = 0
        self.drawn_prompts = 0
        self.exhausted = False
        self._long_batches = settings.tail_batching.long_round_batches
        self._overdrawn = OVERDRAWN * settings.batch_groups
        self._cohort: tuple[int, int, int] | None = None
        self._sizes_of_cohorts = _sizes_of_cohorts(settings)
        self._launched: Counter[str] = Counter()
        self._unsorted = False

    @property
    def empty(self) -> bool:
        """Nothing waits, and nothing will come."""
        return self.exhausted and not self.asked and not len(self.waiting) and not len(self.queue)

    @property
    def has_domains(self) -> bool:
        """Whether batches keep the shares of several domains."""
        return len(self._domains.shares) > 1

    @property
    def loading(self) -> bool:
        """A cohort is being drawn: nothing is launched before it is complete."""
        return self._cohort is not None

    def drawn(self, event: PromptsDrawn) -> bool:
        """The source answered. False, and nothing changes, where it was not asked: the answer is told twice."""
        if not self.asked:
            return False
        self.asked = 0
        self.drawn_prompts += len(event.prompt_ids)
        self.exhausted = event.exhausted
        for index, prompt_id in enumerate(event.prompt_ids):
            ticket = PromptTicket(
                prompt_id=prompt_id,
                tokens=event.prompt_tokens[index] if event.prompt_tokens else 0,
                domain=event.domains[index] if event.domains else "",
            )
            self.waiting.append(ticket)
        if self._cohort is not None:
            self._load_cohort(*self._cohort)
        return True

    def keep(self) -> KeptSupply:
        """All of it, as a value that does not change with the supply."""
        return KeptSupply(
            waiting=tuple(self.waiting.tickets()),
            queue=tuple(self.queue.tickets()),
            predictor={} if self.predictor is None else self.predictor.snapshot(),
            asked=self.asked,
            drawn_prompts=self.drawn_prompts,
            exhausted=self.exhausted,
            cohort=self._cohort,
            launched=dict(self._launched),
            unsorted=self._unsorted,
        )

    def restore(self, kept: KeptSupply) -> None:
        """The inverse, on a new supply. Each domain is served in the order in which it was."""
        for queue, tickets in ((self.waiting, kept.waiting), (self.queue, kept.queue)):
            queue.clear()
            for ticket in tickets:
                queue.append(ticket)
        if self.predictor is not None and kept.predictor:
            self.predictor.restore(kept.predictor)
        self.asked, self.drawn_prompts, self.exhausted = kept.asked, kept.drawn_prompts, kept.exhausted
        self._cohort = kept.cohort
        self._launched, self._unsorted = Counter(kept.launched), kept.unsorted

    def open_cohort(self, prompts: int, copies: int, size: int) -> int:
        """Load ``prompts`` prompts into the queue, each ``copies`` times, for groups of ``size``. Returns how many must
        be drawn first."""
        self._cohort = (prompts, copies, size)
        missing = prompts - len(self.waiting)
        if missing <= 0 or self.exhausted:
            self._load_cohort(prompts, copies, size)
            return 0
        return missing

    def _load_cohort(self, prompts: int, copies: int, size: int) -> None:
        """Queue the prompts that were drawn: ``copies`` of each."""
        self._cohort = None
        for _ in range(prompts):
            ticket = self.waiting.take({}, None)
            if ticket is None:
                break
            ticket = msgspec.structs.replace(ticket, group_size=size)
            for _ in range(copies):
                self.queue.append(ticket)
        self._unsorted = True

    def requeue(self, group: Group, *, replays: bool, noise: int) -> None:
        """The prompt of a group that lost waits in the queue. ``noise``: what its seeds were derived from."""
        self.queue.append(next_attempt(group, noise if replays else -1))
        self._unsorted = True

    def sample_again(self, group: Group) -> None:
        """It was under way when the run ended: its prompt is sampled when the run goes on."""
        (self.queue if self.belongs_in_queue(group) else self.waiting).append(next_attempt(group, group.ticket.noise))

    def belongs_in_queue(self, group: Group) -> bool:
        """Whether its prompt, if it is sampled again, waits in the queue, where it was: one that has lost before, whose
        long round is still due, and one of a cohort, which the next cohort would copy again."""
        return group.queued

    def _sort(self) -> None:
        if self.predictor is not None and self._unsorted:
            predict = self.predictor.predict
            self.queue.sort({t.prompt_id: predict(t.prompt_id, t.tokens) for t in self.queue.tickets()})
        self._unsorted = False

    def round_opens(self) -> None:
        """The shares of the domains count from here."""
        self._launched.clear()

    def take(self, launch: Launch, groups_in_round: int, batch: int) -> PromptTicket | None:
        """The next prompt of ``launch``. ``groups_in_round``: what the shares of the domains refer to; ``batch``:
        groups of the batch that they fill."""
        source = self.waiting
        if launch.source is Source.QUEUE:
            self._sort()
            source = self.queue.of(launch.keep or launch.size)
        quotas = None if self.exhausted else self._domains.quota(groups_in_round, batch)
        ticket = source.take(self._launched, quotas)
        if ticket is None and launch.source is Source.QUEUE and self.exhausted:
            ticket = self.queue.take_any()
        if ticket is not None:
            self._launched[ticket.domain] += 1
        return ticket

    def size_due(self, batch_trajectories: int, *, last: bool) -> int:
        """The group size of the long round that can open now; 0: there is none, or every round has the same size.
        ``last``: no step comes after this one, so that one batch is enough."""
        return self.queue.due(batch_trajectories, 1 if last else self._long_batches)

    @property
    def cohort_size(self) -> int:
        """The group size of the cohort whose prompts wait; 0: none do, or every round has the same size."""
        first = next(iter(self.queue.tickets()), None) if self._sizes_of_cohorts else None
        return first.group_size if first is not None and first.group_size in self._sizes_of_cohorts else 0

    def queued(self, size: int, groups: int, batch: int, *, round_open: bool) -> int:
        """Prompts of the queue that a round of ``groups`` of ``size`` could take now, of which ``batch`` fill its
        batch; all once the source can give no others. Before a round opens: what the largest round could take."""
        if self.exhausted:
            return len(self.queue)
        queue = self.queue.of(size)
        if not self.has_domains:
            return len(queue)
        if round_open:
            return queue.left(self._launched, self._domains.quota(groups, batch))
        return queue.usable(groups * self._long_batches)

    def gives_back(self, group: Group) -> None:
        """A group was dropped for good: its domain may be launched once more in this round."""
        self._launched[group.ticket.domain] -= 1

    def domain_has_seat(self, group: Group, joined: Counter[str], groups: int) -> bool:
        """Whether a batch of ``groups``, of which ``joined`` are in it by domain, takes another one of its domain."""
        if self.exhausted or not self.has_domains:
            return True
        domain = group.ticket.domain
        return joined[domain] < self._domains.quota(groups)[domain]

    def overdrawn(self) -> str:
        """Why the shares of the domains cannot be met; empty when they may."""
        if not self.has_domains or len(self.waiting) < self._overdrawn:
            return ""
        waiting = Counter(ticket.domain for ticket in self.waiting.tickets())
        rare = min(self._domains.shares, key=lambda name: waiting[name])
        return (
            f'{len(self.waiting)} prompts wait and a round still lacks prompts of domain "{rare}" '
            f"(tail_batching.advanced.domains gives it {self._domains.shares[rare]:.3f}): correct the share, or the "
            f"dataset"
        )


def next_attempt(group: Group, noise: int) -> PromptTicket:
    """The prompt of ``group``, to be sampled again from its start."""
    ticket = group.ticket
    return PromptTicket(
        prompt_id=ticket.prompt_id,
        attempt=ticket.attempt + 1,
        noise=noise,
        tokens=ticket.tokens,
        domain=ticket.domain,
        group_size=group.keep,
    )


def _sizes_that_race(settings: ControlSettings) -> tuple[int, ...]:
    """Group sizes whose losers wait apart: where sizes change between the races of tail batching."""
    races = settings.rounds is RoundKind.TAIL_BATCHING
    return (races and _varying_sizes(settings)) or (settings.group_size,)


def _sizes_of_cohorts(settings: ControlSettings) -> tuple[int, ...]:
    """Group sizes of which a cohort keeps one until it is trained. At another one its last prompts, which are long,
    would weigh more or less than its first, and it would be more batches, or fewer, than it was drawn for."""
    return _varying_sizes(settings) if settings.rounds is RoundKind.LENGTH_SORTED else ()


def _varying_sizes(settings: ControlSettings) -> tuple[int, ...]:
    return () if settings.group_sizing.kind is SizingKind.FIXED else settings.group_sizing.sizes

"""Prompts that wait to be launched: fresh ones from the source, and those that lost a race, were cut, or form a cohort.

With domains every round keeps their shares: a batch of n groups takes ``quota(n)`` of each, and what a domain has too
many of waits. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from streamrl.buffers.rollout_buffer import PromptTicket

OVERFULL = 4
"""A domain whose queue holds so many times its quota opens a long round, whatever the other domains have waiting."""

WAITING_IN_ALL = 1.5
"""Once so many times the batches of a long round wait in all, those of one size have theirs, though they fill fewer: a
small long round waits for its longest completion as well, but one that never comes leaves long prompts untrained."""


class DomainShares:
    """The dataset's domains and their shares of a batch. Without domains everything is one domain, named ''."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self.shares = {name: share / total for name, share in shares.items()} if shares else {"": 1.0}

    def quota(self, groups: int, batch: int = 0) -> dict[str, int]:
        """``groups`` by domain, by largest remainder; equal remainders in the order of the recipe.

        ``batch``: groups of the batch that they must be able to fill. Largest remainders may give a domain fewer seats
        of more groups (the Alabama paradox): a race would then never have what its batch waits for."""
        if 0 < batch < groups:
            needed, more = self.quota(batch), self.quota(groups - batch)
            return {name: needed[name] + more[name] for name in self.shares}
        groups = max(groups, batch)
        exact = {name: share * groups for name, share in self.shares.items()}
        quotas = {name: math.floor(value + 1e-9) for name, value in exact.items()}
        missing = groups - sum(quotas.values())
        for name in sorted(exact, key=lambda name: quotas[name] - exact[name])[:missing]:
            quotas[name] += 1
        return quotas


class PromptQueue:
    """One queue, served first in first out within each domain."""

    def __init__(self, domains: DomainShares) -> None:
        self._domains = domains
        self._tickets: dict[str, deque[PromptTicket]] = {name: deque() for name in domains.shares}

    def __len__(self) -> int:
        return sum(len(tickets) for tickets in self._tickets.values())

    def append(self, ticket: PromptTicket) -> None:
        """At the end. Raises ``ValueError`` for a domain that the recipe does not name."""
        self._of(ticket).append(ticket)

    def push_front(self, ticket: PromptTicket) -> None:
        """At the front: it waited before."""
        self._of(ticket).appendleft(ticket)

    def usable(self, groups: int) -> int:
        """How many prompts a batch of ``groups`` could take now and keep the shares; all of them once one domain is
        overfull. Never more than the queue has where there is one domain."""
        if len(self._tickets) == 1:
            return len(self)
        quotas = self._domains.quota(groups)
        if any(0 < OVERFULL * quotas[name] < len(tickets) for name, tickets in self._tickets.items()):
            return min(len(self), groups)
        return sum(min(len(tickets), quotas[name]) for name, tickets in self._tickets.items())

    def left(self, launched: Mapping[str, int], quotas: Mapping[str, int]) -> int:
        """How many prompts an open round could still take and keep the shares."""
        if len(self._tickets) == 1:
            return len(self)
        return sum(
            min(len(tickets), max(quotas[name] - launched.get(name, 0), 0)) for name, tickets in self._tickets.items()
        )

    def take(self, launched: Mapping[str, int], quotas: Mapping[str, int] | None) -> PromptTicket | None:
        """The next prompt of a domain of which fewer than its quota were launched; None when there is none such."""
        for name, tickets in self._tickets.items():
            if tickets and (quotas is None or len(self._tickets) == 1 or launched.get(name, 0) < quotas[name]):
                return tickets.popleft()
        return None

    def sort(self, lengths: Mapping[str, float]) -> None:
        """By what ``lengths`` says of each prompt id, prompts that were launched before last. Stable."""
        for name, tickets in self._tickets.items():
            self._tickets[name] = deque(sorted(tickets, key=lambda t: (t.attempt, lengths[t.prompt_id])))

    def tickets(self) -> Iterable[PromptTicket]:
        """All of them, in the order in which each domain is served."""
        return (ticket for tickets in self._tickets.values() for ticket in tickets)

    def clear(self) -> None:
        """Forget all."""
        for tickets in self._tickets.values():
            tickets.clear()

    def _of(self, ticket: PromptTicket) -> deque[PromptTicket]:
        if len(self._tickets) == 1:
            return next(iter(self._tickets.values()))
        if ticket.domain not in self._tickets:
            known = ", ".join(f'"{name}"' for name in self._tickets)
            raise ValueError(
                f'prompt {ticket.prompt_id} is of domain "{ticket.domain}", which tail_batching.advanced.domains '
                f"does not name "
                f"(it has {known}): add it there"
            )
        return self._tickets[ticket.domain]


class LoserQueues:
    """Prompts that lost a race, one queue for each group size at which they did; other queued prompts in the first one.

    Each is trained at that size, as those are that it raced with. Were it trained at whatever size is chosen meanwhile,
    long prompts, which lose, would weigh more than short ones in a run whose sizes follow the lengths.
    """

    def __init__(self, domains: DomainShares, sizes: Sequence[int]) -> None:
        self._queues = {size: PromptQueue(domains) for size in sizes}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def of(self, size: int) -> PromptQueue:
        """The queue whose prompts a round of groups of ``size`` trains."""
        return self._queues[size] if size in self._queues else next(iter(self._queues.values()))

    def append(self, ticket: PromptTicket) -> None:
        """At the end. Raises ``ValueError`` for a domain that the recipe does not name."""
        self.of(ticket.group_size).append(ticket)

    def due(self, batch: int, batches: int) -> int:
        """The size of which most wait, where those are ``batches`` batches of trajectories, or at least one and
        ``WAITING_IN_ALL`` times as many wait in all; 0: they are not, or there is one queue."""
        waiting = {size: size * len(queue) for size, queue in self._queues.items()}
        in_all, wanted = sum(waiting.values()), batch * batches
        if len(waiting) == 1 or in_all < wanted:
            return 0
        enough = 0 if in_all >= WAITING_IN_ALL * wanted else wanted
        full = [
            size
            for size, queue in self._queues.items()
            if waiting[size] >= enough and queue.usable(batch // size) >= batch // size
        ]
        return max(full, key=lambda size: waiting[size], default=0)

    def take_any(self) -> PromptTicket | None:
        """A prompt of any size and domain; None when there is none."""
        return next(filter(None, (queue.take({}, None) for queue in self._queues.values())), None)

    def sort(self, lengths: Mapping[str, float]) -> None:
        """See ``PromptQueue.sort``."""
        for queue in self._queues.values():
            queue.sort(lengths)

    def tickets(self) -> Iterable[PromptTicket]:
        """All of them, size by size, in the order in which each domain is served."""
        return (ticket for queue in self._queues.values() for ticket in queue.tickets())

    def clear(self) -> None:
        """Forget all."""
        for queue in self._queues.values():
            queue.clear()

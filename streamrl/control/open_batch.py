"""The batch that takes groups now."""

from __future__ import annotations

from collections import Counter

import msgspec

from streamrl.base.types import Record
from streamrl.buffers.rollout_buffer import Group


class KeptBatch(Record, frozen=True):
    """An ``OpenBatch`` as a record."""

    batch_id: int
    target: int
    round_kind: str = ""
    group_size: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    seats_taken: int = 0
    domains: dict[str, int] = {}
    shown_kind: str = ""
    settled: bool = False
    closed: bool = False


class OpenBatch(msgspec.Struct, kw_only=True):
    """``target``: trajectories that fill it, ``seats_taken``: how many of them are taken (a group whose members failed
    takes the seats of a whole one); ``domains``: groups by domain. ``round_kind`` and ``group_size``: empty and 0 until
    the round's first launch; ``shown_kind``: what people are told, also where groups that were launched before fill the
    batch. ``settled``: what is not in it was dealt with; ``closed``: the trainer was told to step."""

    batch_id: int
    target: int
    round_kind: str = ""
    group_size: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    seats_taken: int = 0
    domains: Counter[str] = msgspec.field(default_factory=Counter)
    shown_kind: str = ""
    settled: bool = False
    closed: bool = False

    @property
    def seats(self) -> int:
        """Trajectories that it still takes."""
        return self.target - self.seats_taken

    def take(self, group: Group) -> None:
        """``group`` joins."""
        self.shown_kind = self.shown_kind or self.round_kind or group.round_kind
        self.groups += 1
        self.samples += len(group.members)
        self.tokens += group.tokens
        self.seats_taken += group.keep
        self.domains[group.ticket.domain] += 1

    def keep(self) -> KeptBatch:
        """All of it, as a value that does not change with the batch."""
        return KeptBatch(**(msgspec.structs.asdict(self) | {"domains": dict(self.domains)}))

    @classmethod
    def of(cls, kept: KeptBatch) -> OpenBatch:
        """The inverse."""
        return cls(**(msgspec.structs.asdict(kept) | {"domains": Counter(kept.domains)}))

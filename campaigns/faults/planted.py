"""Bugs to plant in the product, one at a time: the fault simulation must object to each (``faults planted``).

A bug that no seed objects to shows a hole in the ledger. What objects first may be another invariant than the one that
the bug breaks: a bug by which a run hangs or fails is noticed by ``progress``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import anyio
import msgspec

from streamrl.base.errors import WireError
from streamrl.base.messages import Generated, GenerationFailed
from streamrl.base.types import FinishReason, RewardFailure, ScoredTrajectory

changed = msgspec.structs.replace


class Planted(msgspec.Struct, frozen=True):
    """``breaks``: the invariant; ``place``: ``module:name`` of what ``make`` replaces, given what was there."""

    name: str
    breaks: str
    place: str
    make: Callable[[Any], Any]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The product with the bug."""
        module, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        with mock.patch.object(owner, name, self.make(getattr(owner, name))):
            yield


def every(times: int) -> Callable[[], bool]:
    """True at each so many calls."""
    seen = [0]

    def due() -> bool:
        seen[0] += 1
        return seen[0] % times == 0

    return due


def _delivers(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any], Any]:
    """The reward stage answers with what ``change`` makes of its outcomes."""

    def make(before: Any) -> Any:
        async def deliver(self: Any, answered: Any) -> None:
            await before(self, change(list(answered)))

        return deliver

    return make


def _delivers_by_chance(before: Any) -> Any:
    async def deliver(self: Any, answered: Any) -> None:
        await anyio.sleep(os.urandom(1)[0] / 10_000)
        await before(self, answered)

    return deliver


def _outcome(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def make(before: Any) -> Any:
        return lambda trajectory, reward, version: change(trajectory, before(trajectory, reward, version))

    return make


def _failure_is_zero(trajectory: Any, outcome: Any) -> Any:
    return ScoredTrajectory(trajectory=trajectory, reward=0.0) if isinstance(outcome, RewardFailure) else outcome


def _rounded(_: Any, outcome: Any) -> Any:
    scored = isinstance(outcome, ScoredTrajectory)
    return changed(outcome, reward=round(outcome.reward, 1)) if scored else outcome


def _trained_twice(before: Any) -> Any:
    due = every(5)

    async def train_group(self: Any, group: Any) -> None:
        await before(self, group)
        if due():
            await before(self, group)

    return train_group


def _acknowledged_early(before: Any) -> Any:
    async def close_batch(self: Any, close: Any) -> Any:
        gather = await before(self, close)
        await self.acknowledge(close.policy_version)
        return gather

    return close_batch


def _newest_span(before: Any) -> Any:
    def join_completions(first: Any, second: Any) -> Any:
        joined = before(first, second)
        newest = max((span.policy_version for span in joined.version_spans), default=0)
        return changed(joined, version_spans=tuple(changed(s, policy_version=newest) for s in joined.version_spans))

    return join_completions


def _drops_first_token(before: Any) -> Any:
    def join_completions(first: Any, second: Any) -> Any:
        joined = before(first, second)
        if not first.token_ids:
            return joined
        return changed(joined, token_ids=joined.token_ids[1:], behavior_logprobs=joined.behavior_logprobs[1:])

    return join_completions


def _mixed_up(before: Any) -> Any:
    last: list[Any] = []
    due = every(7)

    def accept(self: Any, event: Any) -> None:
        if isinstance(event, Generated) and event.completion.finish_reason is not FinishReason.ABORT:
            last.append(event.completion)
            if due() and len(last) > 1:
                event = changed(event, completion=last[-2])
            del last[:-4]
        before(self, event)

    return accept


def _refusal_swallowed(before: Any) -> Any:
    return lambda self, event: None if isinstance(event, GenerationFailed) else before(self, event)


def _lost_wakeup(before: Any) -> Any:
    due = every(97)
    return lambda self: None if due() else before(self)


def _undeclared(before: Any) -> Any:
    def parse_header(frame: Any) -> Any:
        try:
            return before(frame)
        except WireError as error:
            raise UnicodeError(str(error)) from error

    return parse_header


def _not_waited_for(before: Any) -> Any:
    async def flushed(self: Any) -> None:
        return

    return flushed


def _ends_nobody(before: Any) -> Any:
    async def end_all(self: Any, grace_s: float) -> None:
        self._children = {}

    return end_all


_REWARD, _RANKS = "streamrl.stages.reward:", "streamrl.run.trainer_ranks:TrainerRanks."
_REMOTE, _EPISODES = "streamrl.engines.remote_engine:RemoteEngine.", "streamrl.stages.episodes:"
PLANTED = (
    Planted("an outcome is lost", "accounting", f"{_REWARD}RewardStage._deliver", _delivers(lambda all_: all_[:-1])),
    Planted("a group is handed out twice", "once", f"{_RANKS}train_group", _trained_twice),
    Planted("a failure becomes reward 0", "rewards", f"{_REWARD}outcome_of", _outcome(_failure_is_zero)),
    Planted("a reward is rounded", "rewards", f"{_REWARD}outcome_of", _outcome(_rounded)),
    Planted("acknowledged before it is live", "weights", f"{_RANKS}close_batch", _acknowledged_early),
    Planted("version spans are not kept", "versions", f"{_EPISODES}join_completions", _newest_span),
    Planted("a joined completion loses a token", "tokens", f"{_EPISODES}join_completions", _drops_first_token),
    Planted("completions are mixed up", "tokens", f"{_REMOTE}_accept", _mixed_up),
    Planted("a refusal has no outcome", "progress", f"{_REMOTE}_accept", _refusal_swallowed),
    Planted("a wake-up is lost", "progress", "streamrl.base.notifier:Notifier.notify", _lost_wakeup),
    Planted("a decoder raises what nobody expects", "errors", "streamrl.comm.stream_protocol:parse_header",
            _undeclared),
    Planted("a step does not wait for the disk", "resume", "streamrl.run.journal.run_journal:RunJournal.flushed",
            _not_waited_for),
    Planted("processes are left behind", "residue", "streamrl.processes.supervisor:Supervisor._end_all",
            _ends_nobody),
    Planted("an order that differs from run to run", "repeatable", f"{_REWARD}RewardStage._deliver",
            _delivers_by_chance),
    Planted("slots are not given back", "slots", "streamrl.buffers.slots:Slots.version_live",
            lambda before: lambda self, policy_version: None),
    Planted("faults that do nothing", "coverage", "campaigns.faults.world_faults:Faults._do",
            lambda before: lambda self, fault: False),
)  # fmt: skip

"""Bugs that are planted in the product, one at a time: every one must be caught.

    python tests/simulation/planted_in_world.py [NAME ...] [--seeds N]

runs seeds with each bug until the ledger objects, and prints how many it took, and what objected. ``invariant``: the
one that the bug breaks (``refs/reliability.md``, section 3); what notices it first may be another one. A bug that makes
a run fail or hang which must not, is caught by I13.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from campaign import plan_of, run_seed
from world_shape import draw_shape

from streamrl.buffers.journal import Journal
from streamrl.buffers.rollout_buffer import Group, RolloutBuffer
from streamrl.buffers.slots import SlotLedger
from streamrl.comm import stream_protocol
from streamrl.comm.stream_protocol import ReceivingEnd, SendingEnd
from streamrl.comm.wakeup import Wakeup
from streamrl.control import controller as controller_module
from streamrl.control.controller import Controller
from streamrl.control.engine_steps import EngineSteps
from streamrl.control.events import CheckpointDone, StopRequested, TrajectoryScored
from streamrl.control.outstanding import Outstanding
from streamrl.control.recovered_run import RecoveredRun
from streamrl.control.run_journal import RunJournal
from streamrl.control.state import ControlState
from streamrl.control.trainer_ranks import TrainerRanks
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.messages import Generated, GenerationFailed
from streamrl.processes.supervisor import Supervisor
from streamrl.stages import reward as reward_module
from streamrl.stages import rollout as rollout_module
from streamrl.stages.reward import RewardStage
from streamrl.types import FinishReason, RewardFailure, ScoredTrajectory

Patch = tuple[Any, str, Any]


class Planted(msgspec.Struct, frozen=True):
    """One bug: what it breaks, and the names that are replaced."""

    name: str
    invariant: str
    patches: tuple[Patch, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The product with the bug."""
        patchers = [mock.patch.object(owner, name, value) for owner, name, value in self.patches]
        for patcher in patchers:
            patcher.start()
        try:
            yield
        finally:
            for patcher in patchers:
                patcher.stop()


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """``owner.name`` made of what it was."""
    return owner, name, make(getattr(owner, name))


def _every(times: int) -> Callable[[], bool]:
    """True at every so-many-th call."""
    seen = [0]

    def due() -> bool:
        seen[0] += 1
        return seen[0] % times == 0

    return due


# ---- accounting, exactly once ----------------------------------------------------------------------


def _uncounted_drop(before: Any) -> Any:
    def drop_member(self: RolloutBuffer, trajectory: Any, reason: Any, *, tokens: int = 0) -> Any:
        group = before(self, trajectory, reason, tokens=tokens)
        if group is not None:
            self.dropped[reason] -= 1
        return group

    return drop_member


def _issued_once_too_few(before: Any) -> Any:
    def admit(self: RolloutBuffer, *arguments: Any, **named: Any) -> Any:
        group = before(self, *arguments, **named)
        self.issued -= 1
        return group

    return admit


def _trained_counts_groups(before: Any) -> Any:
    def train(self: RolloutBuffer, batch_id: int) -> Any:
        trained = self.trained
        groups = before(self, batch_id)
        self.trained = trained + len(groups)
        return groups

    return train


def _lost_outcome(before: Any) -> Any:
    due = _every(9)

    async def deliver(self: RewardStage, answered: Any, scored: Any) -> None:
        await before(self, [one for one in answered if not due()], scored)

    return deliver


def _group_handed_out_twice(before: Any) -> Any:
    due = _every(5)

    async def train_group(self: TrainerRanks, group: Any) -> None:
        await before(self, group)
        if due():
            await before(self, group)

    return train_group


def _batched_stays_ready(before: Any) -> Any:
    def batch(self: RolloutBuffer, group_id: int, batch_id: int) -> Any:
        group = before(self, group_id, batch_id)
        if batch_id % 3 == 2:
            self.trained += 1
        return group

    return batch


def _skips_a_version(before: Any) -> Any:
    due = _every(3)

    async def close_batch(self: TrainerRanks, close: Any) -> Any:
        if due():
            close = msgspec.structs.replace(close, policy_version=close.policy_version + 1)
        return await before(self, close)

    return close_batch


# ---- staleness, completeness, rewards ----------------------------------------------------------------


def _never_stale(before: Any) -> Any:
    def older_than(self: RolloutBuffer, version: int) -> list[Group]:
        return []

    return older_than


def _always_room(before: Any) -> Any:
    def free(self: SlotLedger) -> int:
        return 3 * int(self.capacity) - int(self.in_use)

    return property(free)


def _loses_a_member(before: Any) -> Any:
    async def train_group(self: Controller, action: Any) -> None:
        if len(action.ids) > 1:
            action = msgspec.structs.replace(action, ids=action.ids[1:])
        await before(self, action)

    return train_group


def _ready_too_early(before: Any) -> Any:
    def batch(self: RolloutBuffer, group_id: int, batch_id: int) -> Any:
        group = before(self, group_id, batch_id)
        if len(group.members) > 1:
            group.members.pop(next(iter(group.members)))
        return group

    return batch


def _failure_is_zero(before: Any) -> Any:
    def outcome_of(trajectory: Any, reward: Any, version: int) -> Any:
        outcome = before(trajectory, reward, version)
        if isinstance(outcome, RewardFailure):
            return ScoredTrajectory(trajectory=trajectory, reward=0.0)
        return outcome

    return outcome_of


def _rewards_swapped(before: Any) -> Any:
    async def deliver(self: RewardStage, answered: Any, scored: Any) -> None:
        orders = list(answered)
        rewards = [reward for _, reward in orders]
        await before(self, [(order, reward) for (order, _), reward in zip(orders, rewards[::-1], strict=True)], scored)

    return deliver


def _reward_rounded(before: Any) -> Any:
    def outcome_of(trajectory: Any, reward: Any, version: int) -> Any:
        outcome = before(trajectory, reward, version)
        if isinstance(outcome, ScoredTrajectory):
            return msgspec.structs.replace(outcome, reward=round(outcome.reward, 1))
        return outcome

    return outcome_of


# ---- weights -------------------------------------------------------------------------------------


def _unverified_commit(before: Any) -> Any:
    async def verified_commit(self: EngineSteps, engine: Any, announced: Any) -> None:
        commit = engine.commit

        async def agreeing(version: int) -> Any:
            return msgspec.structs.replace(await commit(version), state_hash=announced.state_hash)

        with mock.patch.object(engine, "commit", agreeing):
            await before(self, engine, announced)

    return verified_commit


def _not_paused(before: Any) -> Any:
    async def pause(self: EngineSteps, engine: Any) -> None:
        self.paused_at.setdefault(engine, anyio.current_time())

    return pause


def _acknowledged_early(before: Any) -> Any:
    async def close_batch(self: TrainerRanks, close: Any) -> Any:
        gather = await before(self, close)
        await self.acknowledge(close.policy_version)
        return gather

    return close_batch


def _refusal_forgotten(before: Any) -> Any:
    async def verified_commit(self: EngineSteps, engine: Any, announced: Any) -> None:
        try:
            await before(self, engine, announced)
        except Exception:  # noqa: BLE001 - this is the bug
            return

    return verified_commit


def _spans_not_moved(before: Any) -> Any:
    def join_completions(first: Any, second: Any) -> Any:
        joined = before(first, second)
        newest = max(span.policy_version for span in joined.version_spans) if joined.version_spans else 0
        spans = tuple(msgspec.structs.replace(span, policy_version=newest) for span in joined.version_spans)
        return msgspec.structs.replace(joined, version_spans=spans)

    return join_completions


def _publishes_out_of_turn(before: Any) -> Any:
    def publish(self: ControlState, actions: Any) -> None:
        if self.publishing is None and self.trainer_version > self.live_version:
            self.due.evaluating = None
        before(self, actions)

    return publish


# ---- recovery ------------------------------------------------------------------------------------


def _not_journalled(kind: type) -> Callable[[Any], Any]:
    def make(before: Any) -> Any:
        async def told(self: RunJournal, event: Any, state: Any, elapsed_s: float) -> None:
            append = self._append
            if isinstance(event, kind):
                self._append = lambda record: None  # type: ignore[method-assign]
            try:
                await before(self, event, state, elapsed_s)
            finally:
                self._append = append  # type: ignore[method-assign]

        return told

    return make


def _not_waited_for(before: Any) -> Any:
    async def settled(self: RunJournal) -> None:
        return

    return settled


def _payload_forgotten(before: Any) -> Any:
    def payload(self: RecoveredRun, trajectory: Any) -> Any:
        return None if trajectory.sample == 1 else before(self, trajectory)

    return payload


def _groups_reversed(before: Any) -> Any:
    def training_groups(self: RecoveredRun, batch: Any) -> Any:
        return before(self, batch)[1:]

    return training_groups


def _forgets_what_was_asked(before: Any) -> Any:
    def again(self: Outstanding, state: Any) -> Any:
        return before(self, state)[1:]

    return again


def _trains_again(before: Any) -> Any:
    async def catch_up(trainer: Any, recovered: Any, held: int) -> Any:
        return await before(trainer, recovered, max(held - 1, 0))

    return catch_up


def _acknowledged_before_written(before: Any) -> Any:
    async def durable(self: Journal, sequence: int) -> None:
        return

    return durable


# ---- liveness, drain, isolation, streams, loudness -------------------------------------------------------


def _lost_wakeup(before: Any) -> Any:
    due = _every(97)

    def notify(self: Wakeup) -> None:
        if not due():
            before(self)

    return notify


def _no_credit(before: Any) -> Any:
    def take(self: ReceivingEnd) -> None:
        granted = self._granted
        transmit = self._transmit
        if self.taken > 40:
            self._transmit = lambda peer, frames: None
        try:
            before(self)
        finally:
            self._transmit = transmit
            del granted

    return take


def _not_sent_again(before: Any) -> Any:
    async def after_break(self: RewardStage, unanswered: Any, scored: Any) -> None:
        unanswered.clear()

    return after_break


def _stop_ignored(before: Any) -> Any:
    def record_stop(self: ControlState, event: StopRequested, actions: Any) -> None:
        return

    return record_stop


def _launches_while_draining(before: Any) -> Any:
    def decide(self: ControlState, actions: Any) -> None:
        before(self, actions)
        if self.stopping is not None and not self.finished and not self.buffer.groups:
            self._launching.launch(actions)

    return decide


def _completions_mixed_up(before: Any) -> Any:
    last: list[Any] = []
    due = _every(7)

    def accept(self: RemoteEngine, event: Any) -> None:
        if isinstance(event, Generated) and event.completion.finish_reason is not FinishReason.ABORT:
            last.append(event.completion)
            if due() and len(last) > 1:
                event = msgspec.structs.replace(event, completion=last[-2])
            del last[:-4]
        before(self, event)

    return accept


def _loses_a_token(before: Any) -> Any:
    def resumed_request(request: Any, partial: Any, **named: Any) -> Any:
        resumed = before(request, partial, **named)
        return msgspec.structs.replace(resumed, prefix_length=max(resumed.prefix_length - 1, 0))

    return resumed_request


def _drops_first_token(before: Any) -> Any:
    def join_completions(first: Any, second: Any) -> Any:
        joined = before(first, second)
        if not first.token_ids:
            return joined
        return msgspec.structs.replace(
            joined, token_ids=joined.token_ids[1:], behavior_logprobs=joined.behavior_logprobs[1:]
        )

    return join_completions


def _sequence_ignored(before: Any) -> Any:
    def on_stream_message(self: ReceivingEnd, header: Any, frames: Any) -> None:
        if header.kind == stream_protocol.Kind.ITEM:
            self.items.append(frames[1:])
            self.received += 1
            return
        before(self, header._replace(sequence=self.received), frames)

    return on_stream_message


def _window_ignored(before: Any) -> Any:
    def credit(self: SendingEnd) -> int:
        return int(self.phase is stream_protocol.Phase.OPEN)

    return property(credit)


def _death_overlooked(before: Any) -> Any:
    def deaths(self: Supervisor) -> list[Any]:
        return []

    return deaths


def _refused_is_swallowed(before: Any) -> Any:
    def accept(self: RemoteEngine, event: Any) -> None:
        if not isinstance(event, GenerationFailed):
            before(self, event)

    return accept


PLANTED = (
    Planted("a drop is not counted", "I1", (_replaced(RolloutBuffer, "drop_member", _uncounted_drop),)),
    Planted("one issued too few", "I1", (_replaced(RolloutBuffer, "admit", _issued_once_too_few),)),
    Planted("groups counted for trajectories", "I1", (_replaced(RolloutBuffer, "train", _trained_counts_groups),)),
    Planted("an outcome is lost", "I1", (_replaced(RewardStage, "_deliver", _lost_outcome),)),
    Planted("a group is handed out twice", "I2", (_replaced(TrainerRanks, "train_group", _group_handed_out_twice),)),
    Planted("trained counted when batched", "I1", (_replaced(RolloutBuffer, "batch", _batched_stays_ready),)),
    Planted("a version is skipped", "I2", (_replaced(TrainerRanks, "close_batch", _skips_a_version),)),
    Planted("nothing is ever stale", "I3", (
        _replaced(RolloutBuffer, "older_than", _never_stale), _replaced(SlotLedger, "free", _always_room))),
    Planted("slots without end", "I12", (_replaced(SlotLedger, "free", _always_room),)),
    Planted("a group loses a member", "I4", (_replaced(Controller, "_train_group", _loses_a_member),)),
    Planted("a member forgotten in the buffer", "I4", (_replaced(RolloutBuffer, "batch", _ready_too_early),)),
    Planted("a failure becomes reward 0", "I5", (_replaced(reward_module, "outcome_of", _failure_is_zero),)),
    Planted("rewards swapped in a message", "I5", (_replaced(RewardStage, "_deliver", _rewards_swapped),)),
    Planted("a reward is rounded", "I5", (_replaced(reward_module, "outcome_of", _reward_rounded),)),
    Planted("a commit is not verified", "I7", (_replaced(EngineSteps, "verified_commit", _unverified_commit),)),
    Planted("a refusal is forgotten", "I7", (_replaced(EngineSteps, "verified_commit", _refusal_forgotten),)),
    Planted("acknowledged before it is live", "I7", (_replaced(TrainerRanks, "close_batch", _acknowledged_early),)),
    Planted("commits without a pause", "I8", (_replaced(EngineSteps, "pause", _not_paused),)),
    Planted("version spans are not kept", "I8", (_replaced(rollout_module, "join_completions", _spans_not_moved),)),
    Planted("published during an evaluation", "I8", (_replaced(ControlState, "_publish", _publishes_out_of_turn),)),
    Planted("scores are not journalled", "I9", (
        _replaced(RunJournal, "told", _not_journalled(TrajectoryScored)),)),
    Planted("checkpoints are not journalled", "I9", (_replaced(RunJournal, "told", _not_journalled(CheckpointDone)),)),
    Planted("a step does not wait for the disk", "I10", (_replaced(RunJournal, "settled", _not_waited_for),)),
    Planted("durable before it is written", "I10", (_replaced(Journal, "durable", _acknowledged_before_written),)),
    Planted("a payload is not restored", "I10", (_replaced(RecoveredRun, "payload", _payload_forgotten),)),
    Planted("a group is not trained again", "I9", (_replaced(RecoveredRun, "training_groups", _groups_reversed),)),
    Planted("an order is not given again", "I13", (_replaced(Outstanding, "again", _forgets_what_was_asked),)),
    Planted("a version is trained again", "I2", (_replaced(controller_module, "catch_up", _trains_again),)),
    Planted("a wake-up is lost", "I13", (_replaced(Wakeup, "notify", _lost_wakeup),)),
    Planted("credit is not granted", "I13", (_replaced(ReceivingEnd, "take", _no_credit),)),
    Planted("unanswered work is not sent again", "I13", (_replaced(RewardStage, "_after_break", _not_sent_again),)),
    Planted("a refusal has no outcome", "I13", (_replaced(RemoteEngine, "_accept", _refused_is_swallowed),)),
    Planted("a stop is ignored", "I15", (_replaced(ControlState, "_record_stop", _stop_ignored),)),
    Planted("launches while it drains", "I15", (_replaced(ControlState, "_decide", _launches_while_draining),)),
    Planted("completions are mixed up", "I17", (_replaced(RemoteEngine, "_accept", _completions_mixed_up),)),
    Planted("a resumed request forgets a token", "I17", (
        _replaced(rollout_module, "resumed_request", _loses_a_token),)),
    Planted("a joined completion loses a token", "I17", (
        _replaced(rollout_module, "join_completions", _drops_first_token),)),
    Planted("sequence numbers are ignored", "I2", (
        _replaced(ReceivingEnd, "_on_stream_message", _sequence_ignored),)),
    Planted("the window is ignored", "I12", (_replaced(SendingEnd, "credit", _window_ignored),)),
    Planted("deaths are overlooked", "I20", (_replaced(Supervisor, "_deaths", _death_overlooked),)),
)  # fmt: skip


class Caught(msgspec.Struct, frozen=True):
    """``seeds``: worlds until it was caught (0: it was not); ``by``: the invariant that objected, and what it said."""

    name: str
    invariant: str
    seeds: int
    seconds: float
    by: str
    text: str


def catch(bug: Planted, seeds: int, first: int = 0) -> Caught:
    """Run seeds with ``bug`` until one objects."""
    began = time.process_time()
    for count, seed in enumerate(range(first, first + seeds), start=1):
        with bug.planted():
            outcome = run_seed(seed, faults=plan_of(seed, draw_shape(seed)))
        if outcome.violations:
            first_one = outcome.violations[0]
            seconds = time.process_time() - began
            return Caught(bug.name, bug.invariant, count, seconds, first_one.invariant, first_one.text)
    return Caught(bug.name, bug.invariant, 0, time.process_time() - began, "", "")


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=200)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    missed = 0
    print("| planted bug | breaks | caught by | after seeds | CPU s | what it said |\n|---|---|---|---|---|---|")
    for bug in PLANTED:
        if arguments.names and bug.name not in arguments.names:
            continue
        found = catch(bug, arguments.seeds)
        missed += not found.seeds
        said = found.text.splitlines()[0][:90] if found.text else "NOT CAUGHT"
        print(
            f"| {bug.name} | {bug.invariant} | {found.by} | {found.seeds} | {found.seconds:.1f} | {said} |", flush=True
        )
    print(f"\n{missed} not caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["PLANTED", "Caught", "Planted", "catch"]

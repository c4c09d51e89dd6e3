"""Bugs planted in accounting, staleness, completeness, rewards and weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import anyio
import msgspec
from streamrl.control.state import ControlState

from campaigns.faults.planted_bugs import Planted, every, replaced
from streamrl.base.types import RewardFailure, ScoredTrajectory
from streamrl.buffers.rollout_buffer import Group, RolloutBuffer
from streamrl.buffers.scored_payloads import ScoredPayloads
from streamrl.buffers.slots import SlotLedger
from streamrl.run.trainer_ranks import TrainerRanks
from streamrl.stages import reward as reward_module
from streamrl.stages import rollout as rollout_module
from streamrl.stages.reward import RewardStage
from streamrl.sync.weight_sync import WeightSync

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
    due = every(9)

    async def deliver(self: RewardStage, answered: Any, scored: Any) -> None:
        await before(self, [one for one in answered if not due()], scored)

    return deliver


def _group_handed_out_twice(before: Any) -> Any:
    due = every(5)

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
    due = every(3)

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
    def to_train(self: ScoredPayloads, action: Any) -> Any:
        if len(action.ids) > 1:
            action = msgspec.structs.replace(action, ids=action.ids[1:])
        return before(self, action)

    return to_train


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
    async def commit_only(self: WeightSync, engine: Any, announced: Any) -> None:
        commit = engine.commit

        async def agreeing(version: int) -> Any:
            return msgspec.structs.replace(await commit(version), state_hash=announced.state_hash)

        with mock.patch.object(engine, "commit", agreeing):
            await before(self, engine, announced)

    return commit_only


def _not_paused(before: Any) -> Any:
    async def pause(self: WeightSync, engine: Any) -> None:
        self._paused_at.setdefault(engine, anyio.current_time())

    return pause


def _acknowledged_early(before: Any) -> Any:
    async def close_batch(self: TrainerRanks, close: Any) -> Any:
        gather = await before(self, close)
        await self.acknowledge(close.policy_version)
        return gather

    return close_batch


def _refusal_forgotten(before: Any) -> Any:
    async def commit_only(self: WeightSync, engine: Any, announced: Any) -> None:
        try:
            await before(self, engine, announced)
        except Exception:  # noqa: BLE001 - this is the bug
            return

    return commit_only


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


IN_CONTROL = (
    Planted("a drop is not counted", "I1", (replaced(RolloutBuffer, "drop_member", _uncounted_drop),)),
    Planted("one issued too few", "I1", (replaced(RolloutBuffer, "admit", _issued_once_too_few),)),
    Planted("groups counted for trajectories", "I1", (replaced(RolloutBuffer, "train", _trained_counts_groups),)),
    Planted("an outcome is lost", "I1", (replaced(RewardStage, "_deliver", _lost_outcome),)),
    Planted("a group is handed out twice", "I2", (replaced(TrainerRanks, "train_group", _group_handed_out_twice),)),
    Planted("trained counted when batched", "I1", (replaced(RolloutBuffer, "batch", _batched_stays_ready),)),
    Planted("a version is skipped", "I2", (replaced(TrainerRanks, "close_batch", _skips_a_version),)),
    Planted("nothing is ever stale", "I3", (replaced(RolloutBuffer, "older_than", _never_stale),)),
    Planted("slots without end", "I12", (replaced(SlotLedger, "free", _always_room),)),
    Planted("a group loses a member", "I4", (replaced(ScoredPayloads, "to_train", _loses_a_member),)),
    Planted("a member forgotten in the buffer", "I4", (replaced(RolloutBuffer, "batch", _ready_too_early),)),
    Planted("a failure becomes reward 0", "I5", (replaced(reward_module, "outcome_of", _failure_is_zero),)),
    Planted("rewards swapped in a message", "I5", (replaced(RewardStage, "_deliver", _rewards_swapped),)),
    Planted("a reward is rounded", "I5", (replaced(reward_module, "outcome_of", _reward_rounded),)),
    Planted("a commit is not verified", "I7", (replaced(WeightSync, "_commit", _unverified_commit),)),
    Planted("a refusal is forgotten", "I7", (replaced(WeightSync, "_commit", _refusal_forgotten),)),
    Planted("acknowledged before it is live", "I7", (replaced(TrainerRanks, "close_batch", _acknowledged_early),)),
    Planted("commits without a pause", "I8", (replaced(WeightSync, "_pause", _not_paused),)),
    Planted("version spans are not kept", "I8", (replaced(rollout_module, "join_completions", _spans_not_moved),)),
    Planted("published during an evaluation", "I8", (replaced(ControlState, "_publish", _publishes_out_of_turn),)),
)  # fmt: skip

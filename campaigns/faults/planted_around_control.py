"""Bugs planted in recovery, streams, supervision and what is left: see ``planted_in_control``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import anyio
import msgspec
from streamrl.control.state import ControlState
from streamrl.journal.outstanding import Outstanding

from campaigns.faults.planted_bugs import Planted, every, replaced
from campaigns.faults.world_faults import Faults
from streamrl.base.errors import WireError
from streamrl.base.messages import Generated, GenerationFailed
from streamrl.base.types import FinishReason
from streamrl.base.wakeup import Wakeup
from streamrl.buffers.rollout_buffer import RolloutBuffer
from streamrl.comm import stream_protocol
from streamrl.comm.stream_protocol import ReceivingEnd, SendingEnd
from streamrl.control.events import CheckpointDone, StopRequested, TrajectoryScored
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.journal.log import Journal
from streamrl.journal.recovered_run import RecoveredRun
from streamrl.journal.run_journal import RunJournal
from streamrl.run import controller as controller_module
from streamrl.stages import rollout as rollout_module
from streamrl.stages.reward import RewardStage
from streamrl.supervise.deaths import Deaths
from streamrl.supervise.supervisor import Supervisor

# ---- recovery ------------------------------------------------------------------------------------


def _not_journalled(kind: type) -> Callable[[Any], Any]:
    def make(before: Any) -> Any:
        def told(self: RunJournal, event: Any, state: Any, elapsed_s: float) -> None:
            append = self._append
            if isinstance(event, kind):
                self._append = lambda record: None  # type: ignore[method-assign]
            try:
                before(self, event, state, elapsed_s)
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
    due = every(97)

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
            self.launching.launch(actions)

    return decide


def _completions_mixed_up(before: Any) -> Any:
    last: list[Any] = []
    due = every(7)

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
    def deaths(self: Deaths) -> list[Any]:
        return []

    return deaths


def _refused_is_swallowed(before: Any) -> Any:
    def accept(self: RemoteEngine, event: Any) -> None:
        if not isinstance(event, GenerationFailed):
            before(self, event)

    return accept


# ---- memory, residue, fencing, determinism, decoders, coverage, advantages ---------------------------------


def _keeps_what_was_trained(before: Any) -> Any:
    def train(self: RolloutBuffer, batch_id: int) -> Any:
        groups = before(self, batch_id)
        self.groups.update((group.group_id, group) for group in groups[:1])
        return groups

    return train


def _ends_nobody(before: Any) -> Any:
    async def end_all(self: Supervisor, grace_s: float) -> None:
        self._children = {}

    return end_all


def _beside_its_last_life(before: Any) -> Any:
    async def resume(self: Supervisor, first: Any) -> bool:
        with mock.patch.object(self, "_end_all", _does_nothing):
            resumed: bool = await before(self, first)
            return resumed

    return resume


async def _does_nothing(grace_s: float) -> None:
    pass


def _delivers_by_chance(before: Any) -> Any:
    async def deliver(self: RewardStage, answered: Any, scored: Any) -> None:
        await anyio.sleep(os.urandom(1)[0] / 10_000)
        await before(self, answered, scored)

    return deliver


def _undeclared(before: Any) -> Any:
    def parse_header(frame: Any) -> Any:
        try:
            return before(frame)
        except WireError as error:
            raise UnicodeError(str(error)) from error

    return parse_header


def _advantages_differ() -> str:
    import torch

    from streamrl.learning.objective import advantages
    from streamrl.recipe.objective import AdvantageKind

    random = Random(0)
    groups = [[random.choice((0.0, 0.5, random.random())) for _ in range(random.randint(2, 8))] for _ in range(100)]
    with mock.patch.object(advantages, "STD_EPSILON", 1e-3):
        for rewards in groups:
            given = advantages.group_advantages(torch.tensor(rewards), AdvantageKind.GROUP_STD).tolist()
            mean = sum(rewards) / len(rewards)
            deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            wanted = [(r - mean) / (deviation + 1e-4) if deviation else 0.0 for r in rewards]
            if max(abs(a - b) for a, b in zip(given, wanted, strict=True)) > 1e-6:
                return f"rewards {rewards[:3]} have advantages {given[:3]}, by the definition {wanted[:3]}"
    return ""


IN_WHAT_IS_AROUND = (
    Planted("scores are not journalled", "I9", (
        replaced(RunJournal, "told", _not_journalled(TrajectoryScored)),)),
    Planted("checkpoints are not journalled", "I9", (replaced(RunJournal, "told", _not_journalled(CheckpointDone)),)),
    Planted("a step does not wait for the disk", "I10", (replaced(RunJournal, "settled", _not_waited_for),)),
    Planted("durable before it is written", "I10", (replaced(Journal, "durable", _acknowledged_before_written),)),
    Planted("a payload is not restored", "I10", (replaced(RecoveredRun, "payload", _payload_forgotten),)),
    Planted("a group is not trained again", "I9", (replaced(RecoveredRun, "training_groups", _groups_reversed),)),
    Planted("an order is not given again", "I13", (replaced(Outstanding, "again", _forgets_what_was_asked),)),
    Planted("a version is trained again", "I2", (replaced(controller_module, "catch_up", _trains_again),)),
    Planted("a wake-up is lost", "I13", (replaced(Wakeup, "notify", _lost_wakeup),)),
    Planted("credit is not granted", "I13", (replaced(ReceivingEnd, "take", _no_credit),)),
    Planted("unanswered work is not sent again", "I13", (replaced(RewardStage, "_after_break", _not_sent_again),)),
    Planted("a refusal has no outcome", "I13", (replaced(RemoteEngine, "_accept", _refused_is_swallowed),)),
    Planted("a stop is ignored", "I15", (replaced(ControlState, "_record_stop", _stop_ignored),)),
    Planted("launches while it drains", "I15", (replaced(ControlState, "_decide", _launches_while_draining),)),
    Planted("completions are mixed up", "I17", (replaced(RemoteEngine, "_accept", _completions_mixed_up),)),
    Planted("a resumed request forgets a token", "I17", (
        replaced(rollout_module, "resumed_request", _loses_a_token),)),
    Planted("a joined completion loses a token", "I17", (
        replaced(rollout_module, "join_completions", _drops_first_token),)),
    Planted("sequence numbers are ignored", "I2", (
        replaced(ReceivingEnd, "_on_stream_message", _sequence_ignored),)),
    Planted("the window is ignored", "I12", (replaced(SendingEnd, "credit", _window_ignored),)),
    Planted("deaths are overlooked", "I20", (replaced(Deaths, "look", _death_overlooked),)),
    Planted("ended groups are kept", "I11", (replaced(RolloutBuffer, "train", _keeps_what_was_trained),)),
    Planted("processes are left behind", "I14", (replaced(Supervisor, "_end_all", _ends_nobody),)),
    Planted("a life is started beside the last one", "I16", (
        replaced(Supervisor, "_resume", _beside_its_last_life),)),
    Planted("an order that differs from run to run", "I18", (replaced(RewardStage, "_deliver", _delivers_by_chance),)),
    Planted("a decoder raises what nobody expects", "I19", (replaced(stream_protocol, "parse_header", _undeclared),)),
    Planted("faults that do nothing", "I21", ((Faults, "_do", lambda self, fault: False),)),
    Planted("advantages of another deviation", "I6", check=_advantages_differ),
)  # fmt: skip

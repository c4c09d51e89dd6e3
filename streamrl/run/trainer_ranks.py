"""The trainer ranks as the controller process sees them: a stream of orders and a stream of events for each rank.

``launch`` connects the ranks; the ``Controller`` sends batches and publications, ``CheckpointKeeper`` checkpoints."""

from __future__ import annotations

from asyncio import Future, Lock, get_running_loop
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from msgspec import Struct, convert, structs

from streamrl.base import messages
from streamrl.base.errors import StreamBroken, StreamEnded, StreamRLError, VersionLeft
from streamrl.base.types import TrainingGroup
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.control import actions as do

RankStreams = tuple[SendStream[messages.TrainingOrder], ReceiveStream[messages.TrainingEvent]]
Answer = TypeVar("Answer", messages.StepReport, messages.AnchorPublished, messages.CheckpointSaved)
RANKS_GONE = "the trainer ranks are gone: they answer nothing any more"


class TrainerRanks:
    """Sends orders to all ranks and gathers one answer of each rank. ``run`` is a child of the caller's task group."""

    def __init__(self, ranks: Sequence[RankStreams]) -> None:
        self._ranks = ranks
        self._open_tokens = [0] * len(ranks)
        """Tokens of the open batch by rank."""
        self._waiting_tokens = 0
        """Tokens that were sent since the last ``TrainTogether``."""
        self._together_tokens = 0
        """Tokens after which all ranks are ordered to train together (0: each rank trains a group as it comes)."""
        self._ranks_per_group = 1
        self.policy_version = 0
        """Version that the ranks hold, or were ordered to make."""
        self.holds_state = False
        """Whether a rank makes a step, for which its state is on its device, also where engines share it."""
        self.imitated_rows: Callable[[int], Awaitable[tuple[messages.ImitatedSet, ...]]] | None = None
        """Returns the rows that the step which makes a version imitates (None: no step imitates rows)."""
        self.first_probe: messages.FirstProbe | None = None
        """Logprobs of the canary by the weights with which the run began, once they are published."""
        self._answer_count = 0
        self._closed = False
        self._gone = False
        self._answers: dict[tuple[type[Struct], int], Future[messages.TrainingEvent]] = {}
        """Expected answers by kind and rank."""
        # An asyncio.Lock and none of anyio's: it is acquired without a switch to another task where it is free.
        self._order_lock = Lock()

    async def ready(self) -> list[messages.TrainerReady]:
        """Return the hello of every rank. Raises ``StreamRLError`` when ranks hold different models."""
        hellos = []
        for index, (_, reports) in enumerate(self._ranks):
            try:
                hello = await reports.receive()
            except StreamEnded as error:
                raise StreamBroken(f"trainer-{index} ended before it was ready") from error
            if not isinstance(hello, messages.TrainerReady) or hello.rank != index or hello.ranks != len(self._ranks):
                raise StreamRLError(f"trainer-{index} said hello with {hello}; {len(self._ranks)} ranks were expected")
            hellos.append(hello)
        self.policy_version = hellos[0].policy_version
        self._together_tokens = hellos[0].together_tokens
        self._ranks_per_group = hellos[0].ranks_per_group
        if len({(hello.policy_version, hello.parameters) for hello in hellos}) != 1:
            raise StreamRLError(f"trainer ranks hold different models: {hellos}")
        return hellos

    async def run(self) -> None:
        """Receive answers until every rank has ended its stream. From then on, waiting for an answer raises
        ``StreamBroken``, also in a task that cannot be cancelled."""
        try:
            async with anyio.create_task_group() as pumps:
                for index in range(len(self._ranks)):
                    pumps.start_soon(self._pump, index)
        finally:
            self._gone = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(StreamBroken(RANKS_GONE))
                    answer.exception()  # marks it as read, because there may be no task that waits for it

    def answers(self) -> int:
        """Return the number of answers until now."""
        return self._answer_count

    async def _pump(self, rank: int) -> None:
        async for event in self._ranks[rank][1]:
            answer = self._answers.pop((type(event), rank), None)
            if answer is None:
                raise StreamRLError(f"trainer-{rank} sent {type(event).__name__}, which nobody asked for")
            if not answer.done():  # else its task was cancelled, because the run is about to end for another reason
                answer.set_result(event)
            self._answer_count += 1

    async def train_group(self, group: TrainingGroup) -> None:
        """Send a group to the rank with the fewest tokens in the open batch, and to the ranks that share its groups.
        Where a row is a collective of all ranks, order them to train once enough tokens were sent."""
        size = self._ranks_per_group
        rank = min(range(0, len(self._ranks), size), key=lambda first: self._open_tokens[first])
        tokens = sum(len(sample.token_ids) for sample in group.samples)
        self._open_tokens[rank] += tokens
        self._waiting_tokens += tokens
        for orders, _ in self._ranks[rank : rank + size]:
            await orders.send(messages.TrainGroup(group=group))
        if 0 < self._together_tokens <= self._waiting_tokens:
            self._waiting_tokens = 0
            async with self._order_lock:
                for orders, _ in self._ranks:
                    await orders.send(messages.TrainTogether())

    async def close_batch(self, close: messages.CloseBatch) -> Callable[[], Awaitable[list[messages.StepReport]]]:
        """Order every rank to step, with the rows to imitate, and return once the orders are sent. The returned
        function waits for the reports, in rank order. Raises ``StreamRLError`` for a row that cannot be imitated."""
        if self.imitated_rows is not None:
            close = structs.replace(close, imitated=await self.imitated_rows(close.policy_version))
        self._open_tokens = [0] * len(self._ranks)
        self._waiting_tokens = 0
        self.policy_version = close.policy_version
        self.holds_state = True
        reports = await self._ask(close, messages.StepReport)

        async def gather() -> list[messages.StepReport]:
            answers = await reports()
            self.holds_state = False
            return answers

        return gather

    async def publish_anchor(self, policy_version: int) -> messages.WeightAnnouncement:
        """Have every rank publish its complete current weights. Raises ``VersionLeft`` after ``aclose``, and where a
        newer version was ordered already: an engine that needs weights must wait for the newer version."""
        if self._closed:
            raise VersionLeft(f"version {policy_version} is not published any more: the trainer has made its last step")
        if policy_version < self.policy_version:
            raise VersionLeft(f"version {policy_version} is not held any more: {self.policy_version} was ordered")
        gather = await self._ask(messages.PublishAnchor(policy_version=policy_version), messages.AnchorPublished)
        answers = await gather()
        self.first_probe = self.first_probe or answers[0].first_probe
        return messages.announcement_of(policy_version, answers)

    async def acknowledge(self, policy_version: int) -> None:
        """Report to all ranks that every engine holds ``policy_version`` live."""
        for orders, _ in self._ranks:
            await orders.send(messages.WeightsAcknowledged(policy_version=policy_version))

    async def engines_freed(self, count: int) -> None:
        """Report to all ranks that ``count`` engines do nothing until the next round, so that their cores are free for
        training."""
        for orders, _ in self._ranks:
            await orders.send(messages.EnginesFreed(count=count))

    async def save_checkpoint(self, order: messages.SaveCheckpoint) -> messages.CheckpointSaved:
        """Have all ranks write a checkpoint, and return the answer of rank 0."""
        gather = await self._ask(order, messages.CheckpointSaved)
        return (await gather())[0]

    async def aclose(self) -> None:
        """End the orders of every rank. A rank ends when it has carried out its orders."""
        self._closed = True
        for orders, _ in self._ranks:
            await orders.aclose()

    async def _ask(self, order: messages.TrainingOrder, kind: type[Answer]) -> Callable[[], Awaitable[list[Answer]]]:
        """Send ``order`` to all ranks. The returned function waits for their answers of the type ``kind``."""
        if self._gone:
            raise StreamBroken(RANKS_GONE)
        futures = []
        # Orders are collectives: two of them must reach all ranks in the same sequence.
        async with self._order_lock:
            for rank, (orders, _) in enumerate(self._ranks):
                if (kind, rank) in self._answers:
                    raise StreamRLError(f"trainer-{rank} still owes a {kind.__name__}")
                future = get_running_loop().create_future()
                futures.append(future)
                self._answers[kind, rank] = future
                await orders.send(order)

        async def gather() -> list[Answer]:
            answers = [await future for future in futures]
            return [answer for answer in answers if isinstance(answer, kind)]

        return gather


def announcement(reports: Sequence[messages.StepReport]) -> messages.WeightAnnouncement:
    """Return the announcement of the weights that the ranks published in one step. Raises ``StreamRLError`` when they
    published different versions."""
    versions = {(report.policy_version, report.base_version) for report in reports}
    if len(versions) != 1:
        raise StreamRLError(f"trainer ranks published different versions: {sorted(versions, key=str)}")
    return messages.announcement_of(reports[0].policy_version, reports, reports[0].probe_logprobs)


def close_of(step: do.StepOptimizer) -> messages.CloseBatch:
    """Return the order to the ranks that carries out ``step``."""
    return convert(step, messages.CloseBatch, from_attributes=True)

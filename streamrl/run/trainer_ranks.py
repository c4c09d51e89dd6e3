"""The trainer as control sees it: one stream of batches and one of reports for each rank."""

from __future__ import annotations

from asyncio import Future, Lock, get_running_loop
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from streamrl.base import messages
from streamrl.base.errors import StreamBroken, StreamEnded, StreamRLError, VersionLeft
from streamrl.base.types import TrainingGroup
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.control import actions as do

RankStreams = tuple[SendStream[messages.TrainingOrder], ReceiveStream[messages.TrainingEvent]]
Answer = TypeVar("Answer", messages.StepReport, messages.AnchorPublished, messages.CheckpointSaved, messages.FileRead)
GONE = "the trainer ranks are gone: they answer nothing any more"


class TrainerRanks:
    """Sends orders to all ranks and gathers one answer from each. ``run`` is a child of the nursery."""

    def __init__(self, ranks: Sequence[RankStreams]) -> None:
        self._ranks = ranks
        self._open_tokens = [0] * len(ranks)
        self._waiting_tokens = 0
        self._together_tokens = 0
        self._ranks_per_group = 1
        self.policy_version = 0
        """The version that ranks hold, or were ordered to make."""
        self._answered = 0
        self._ended = False
        self._gone = False
        self._answers: dict[tuple[type[msgspec.Struct], int], Future[messages.TrainingEvent]] = {}
        self._one_question = Lock()  # yields to nobody where nobody has it

    async def ready(self) -> list[messages.TrainerReady]:
        """The hello of every rank. Raises ``StreamRLError`` when ranks disagree about what they hold."""
        hellos: list[messages.TrainerReady] = []
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
        if len({(g.policy_version, g.parameters) for g in hellos}) != 1:
            raise StreamRLError(f"trainer ranks hold different models: {hellos}")
        return hellos

    async def run(self) -> None:
        """Receive answers until every rank ended its stream. A wait for another answer, also one that cannot be
        cancelled, then raises ``StreamBroken``."""
        try:
            async with anyio.create_task_group() as pumps:
                for index in range(len(self._ranks)):
                    pumps.start_soon(self._pump, index)
        finally:
            self._gone = True
            for waiting in self._answers.values():
                if not waiting.done():
                    waiting.set_exception(StreamBroken(GONE))
                    waiting.exception()  # it may be that nobody waits

    def answers(self) -> int:
        """Number of answers until now."""
        return self._answered

    async def _pump(self, rank: int) -> None:
        async for event in self._ranks[rank][1]:
            waiting = self._answers.pop((type(event), rank), None)
            if waiting is None:
                raise StreamRLError(f"trainer-{rank} sent {type(event).__name__}, which nobody asked for")
            if not waiting.done():  # the wait was cancelled: the run is about to end, of something else
                waiting.set_result(event)
            self._answered += 1

    async def train_group(self, group: TrainingGroup) -> None:
        """Give a group to the rank with the fewest tokens in the open batch, and to those that train the same. Where a
        row is a collective, order all ranks to train once enough tokens wait."""
        same = self._ranks_per_group
        rank = min(range(0, len(self._ranks), same), key=lambda r: self._open_tokens[r])
        tokens = sum(len(s.token_ids) for s in group.samples)
        self._open_tokens[rank] += tokens
        self._waiting_tokens += tokens
        for batches, _ in self._ranks[rank : rank + same]:
            await batches.send(messages.TrainGroup(group=group))
        if 0 < self._together_tokens <= self._waiting_tokens:
            self._waiting_tokens = 0
            async with self._one_question:
                for batches, _ in self._ranks:
                    await batches.send(messages.TrainTogether())

    async def close_batch(self, close: messages.CloseBatch) -> Callable[[], Awaitable[list[messages.StepReport]]]:
        """Order every rank to step. Returns when that is sent; call the result for the reports, in rank order."""
        self._open_tokens = [0] * len(self._ranks)
        self._waiting_tokens = 0
        self.policy_version = close.policy_version
        return await self._ask(close, messages.StepReport)

    async def publish_anchor(self, policy_version: int) -> messages.WeightAnnouncement:
        """Have every rank publish its current weights complete. Raises ``VersionLeft`` where a newer version was
        ordered already: the engine that asks must wait for that one; also after ``aclose``."""
        if self._ended:
            raise VersionLeft(f"version {policy_version} is not published any more: the trainer has made its last step")
        if policy_version < self.policy_version:
            raise VersionLeft(f"version {policy_version} is not held any more: {self.policy_version} was ordered")
        gather = await self._ask(messages.PublishAnchor(policy_version=policy_version), messages.AnchorPublished)
        return messages.announcement_of(policy_version, await gather())

    async def acknowledge(self, policy_version: int) -> None:
        """Every engine holds ``policy_version`` live."""
        for batches, _ in self._ranks:
            await batches.send(messages.WeightsAcknowledged(policy_version=policy_version))

    async def engines_freed(self, count: int) -> None:
        """``count`` engines do nothing until the next round: their cores are for training."""
        for batches, _ in self._ranks:
            await batches.send(messages.EnginesFreed(count=count))

    async def save_checkpoint(
        self, directory: str, policy_version: int, min_free_bytes: int = 0, beside: Mapping[str, bytes] | None = None
    ) -> messages.CheckpointSaved:
        """Write a checkpoint with all ranks; returns rank 0's answer. ``beside``: sha256 of the files, by name, that
        ``atomic_files.stage_sidecar`` left for it: of any size, where a message is not."""
        order = messages.SaveCheckpoint(
            directory=directory, policy_version=policy_version, min_free_bytes=min_free_bytes, beside=dict(beside or {})
        )
        gather = await self._ask(order, messages.CheckpointSaved)
        return (await gather())[0]

    async def refuse_other_files(self, path: Path) -> None:
        """Raise ``StreamRLError`` for a rank that does not see the file at ``path`` as this host does: at the start,
        and not at the first checkpoint, which needs one file system."""
        content = await anyio.Path(path).read_bytes()
        gather = await self._ask(messages.ReadFile(path=str(path)), messages.FileRead)
        for rank, answer in enumerate(await gather()):
            if answer.content != content:
                raise StreamRLError(
                    f"trainer-{rank} does not see {path} as the controller wrote it, and checkpoints are written "
                    "there by both: set run.directory to a folder of a file system that all hosts share"
                )

    async def aclose(self) -> None:
        """End the batches of every rank: ranks end when they have done what was sent."""
        self._ended = True
        for batches, _ in self._ranks:
            await batches.aclose()

    async def _ask(self, order: messages.TrainingOrder, kind: type[Answer]) -> Callable[[], Awaitable[list[Answer]]]:
        if self._gone:
            raise StreamBroken(GONE)
        waiting: list[Future[messages.TrainingEvent]] = []
        async with self._one_question:  # two of them must reach all ranks in one order: each is a collective
            for rank, (batches, _) in enumerate(self._ranks):
                if (kind, rank) in self._answers:
                    raise StreamRLError(f"trainer-{rank} still owes a {kind.__name__}")
                waiting.append(get_running_loop().create_future())
                self._answers[kind, rank] = waiting[-1]
                await batches.send(order)

        async def gather() -> list[Answer]:
            answers = [await future for future in waiting]
            return [answer for answer in answers if isinstance(answer, kind)]

        return gather


def announcement(reports: Sequence[messages.StepReport]) -> messages.WeightAnnouncement:
    """Announce what the ranks published in one step as one version. Raises ``StreamRLError`` when they disagree."""
    versions = {(r.policy_version, r.base_version) for r in reports}
    if len(versions) != 1:
        raise StreamRLError(f"trainer ranks published different versions: {sorted(versions, key=str)}")
    return messages.announcement_of(reports[0].policy_version, reports, reports[0].probe_logprobs)


def close_of(step: do.StepOptimizer) -> messages.CloseBatch:
    """The order to ranks that carries out ``step``."""
    return msgspec.convert(step, messages.CloseBatch, from_attributes=True)

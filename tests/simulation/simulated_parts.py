"""What stands in for vLLM, torch, files of prompts and user code. Their edges are tapped by the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import anyio
import msgspec
from fault_plan import Phase
from ledger import MODULUS, digest_of, stamp_of
from virtual_time import PROCESS

from streamrl.engines import simulated_engine
from streamrl.engines.simulated_engine import SimulatedEngine, SimulationOptions
from streamrl.errors import RequestRefused, WeightError
from streamrl.learning.durable_files import files_below, flush_and_digest, move_into_place, write_digests
from streamrl.messages import (
    AnchorPublished,
    CheckpointSaved,
    CloseBatch,
    Generate,
    OrderDone,
    SaveCheckpoint,
    StepReport,
    TrainerReady,
    WeightAnnouncement,
    WeightSource,
)
from streamrl.types import Completion, FloatArray, Prompt, TrainingGroup, float_array, token_array

if TYPE_CHECKING:
    from world import World

WORLDS: list[World] = []
"""The world that runs now: user code and patched classes find it here."""

TOKENIZER_DIGEST = "simulated"


class PublishedPart(msgspec.Struct, frozen=True):
    """One rank's part of a version, as bytes would be: what it makes of ``base`` (None: of anything)."""

    base: int | None
    content: int
    life: object


class StubTokenizer:
    """Nothing is decoded."""

    digest = TOKENIZER_DIGEST
    eos_token_ids = (1,)

    def decode(self, token_ids: Any) -> str:
        return ""


class SimulatedPrompts:
    """``p0``, ``p1``, ... from ``start`` on."""

    size = None

    def __init__(self, random: Random, start: int, limit: int) -> None:
        self._random, self._next, self._limit = random, start, limit

    async def draw(self, count: int) -> list[Prompt]:
        await anyio.sleep(self._random.expovariate(1 / 0.01))
        numbers = range(self._next, min(self._next + count, self._limit))
        self._next = numbers.stop
        return [prompt_number(number) for number in numbers]

    async def aclose(self) -> None:
        pass


def prompt_number(number: int) -> Prompt:
    tokens = [2 + (number * 31 + place) % 97 for place in range(3 + number % 4)]
    return Prompt(prompt_id=f"p{number}", token_ids=token_array(tokens))


async def score(completion: str, prompt_id: str, token_ids: list[int]) -> Any:
    """The user's reward function: a value that says which call made it, after a time of its own."""
    world = WORLDS[-1]
    world.enter(Phase.REWARD)
    try:
        world.reward_calls += 1
        mischief = world.take_mischief("reward")
        await anyio.sleep(world.random.expovariate(1 / world.shape.reward_s))
        if mischief == "late":
            await anyio.sleep_forever()
        elif mischief == "raise":
            raise ValueError("planted: the reward raises")
        elif mischief == "nan":
            return float("nan")
        elif mischief == "wrong_type":
            return "a word"
        value = (
            digest_of(prompt_id, *token_ids, world.reward_calls) % 1000 / 1000 if world.random.random() < 0.7 else 0.5
        )
        world.ledger.rewarded(token_array(token_ids).tobytes(), value)
        return value
    finally:
        world.leave(Phase.REWARD)


# ---- the trainer ---------------------------------------------------------------------------------


class RankState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of one rank."""

    version: int
    content: int


class SimulatedTrainer:
    """A ``stages.training.Trainer``. Weights are a number: the hash of all batches that made them."""

    def __init__(self, world: World, rank: int, ranks: int, directory: Path | None) -> None:
        self.world, self.rank, self.ranks = world, rank, ranks
        self.life = PROCESS.get()
        self.version, self.content = 0, digest_of("initial", rank)
        if directory is not None:
            kept = msgspec.json.decode((directory / f"rank-{rank}.json").read_bytes(), type=RankState)
            self.version, self.content = kept.version, kept.content
        self.shadow: tuple[int, int] | None = None
        self.groups: list[TrainingGroup] = []
        self._incarnation = self.life.incarnation if self.life else 0

    @property
    def idle_work(self) -> bool:
        return False

    def start(self) -> TrainerReady:
        self._publish_hash()
        return TrainerReady(
            rank=self.rank,
            ranks=self.ranks,
            policy_version=self.version,
            parameters=1000,
            state_hash=digest_of(self.content),
            tokenizer_digest=TOKENIZER_DIGEST,
        )

    def begin_again(self) -> TrainerReady:
        self.world.ledger.open_batches.pop((self.rank, self._incarnation), None)
        self.groups = []
        return self.start()

    def train_group(self, group: TrainingGroup) -> None:
        self.world.ledger.given(self.rank, self._incarnation, self.version, group)
        self.groups.append(group)

    def train_pending(self) -> None:
        pass

    def close_batch(self, close: CloseBatch) -> StepReport:
        world = self.world
        world.ledger.closed(self.rank, self._incarnation, close, self.version, self.ranks)
        # Every rank holds a part of what the whole batch made.
        made = digest_of(self.content, close.policy_version, close.groups, close.samples, close.trained_tokens)
        self.groups = []
        self.version, self.content = close.policy_version, made
        self._publish_hash()
        base, base_content = self.shadow if self.shadow is not None else (None, None)
        return StepReport(
            rank=self.rank,
            batch_id=close.batch_id,
            policy_version=self.version,
            base_version=base,
            state_hash=digest_of(self.content),
            source=self._source(base_content),
            metrics={"optim/loss": 0.5},
        )

    def acknowledge(self, policy_version: int) -> None:
        if policy_version == self.version:
            self.shadow = (self.version, self.content)

    def publish_anchor(self, policy_version: int) -> AnchorPublished:
        return AnchorPublished(
            rank=self.rank,
            policy_version=policy_version,
            state_hash=digest_of(self.content),
            source=self._source(None),
        )

    def save_checkpoint(self, order: SaveCheckpoint) -> CheckpointSaved:
        directory = Path(order.directory)
        partial = directory.with_name(f".{directory.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        state = RankState(version=self.version, content=self.content)
        (partial / f"rank-{self.rank}.json").write_bytes(msgspec.json.encode(state))
        for name, content in order.beside.items():
            (partial / name).write_bytes(content)
        if len(list(partial.glob("rank-*.json"))) == self.ranks:
            write_digests(partial, [flush_and_digest(partial, files_below(partial))])
            move_into_place(partial, directory)
        return CheckpointSaved(
            rank=self.rank, directory=order.directory, policy_version=order.policy_version, seconds=0.0
        )

    def engines_freed(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _publish_hash(self) -> None:
        """Known once every rank made it."""
        self.world.rank_made(self.rank, self.version, digest_of(self.content))

    def _source(self, base: int | None) -> WeightSource:
        key = f"{digest_of(self.rank, base, self.content):016x}"
        self.world.shelf[key] = PublishedPart(base, self.content, self.life)
        return WeightSource(
            rank=self.rank,
            endpoint=f"trainer-{self.rank}.weights",
            manifest_digest=key,
            payload_bytes=100 if base is not None else 1000,
            changed_elements=10,
            total_elements=1000,
        )


# ---- the engine ----------------------------------------------------------------------------------


class _OpenRequests(dict[str, Any]):
    """Tells each request which engine runs it."""

    def __init__(self, engine: StampedEngine) -> None:
        super().__init__()
        self._engine = engine

    def __setitem__(self, request_id: str, running: Any) -> None:
        running.engine = self._engine
        running.stamps = []
        super().__setitem__(request_id, running)


class StampedEngine(SimulatedEngine):
    """An engine whose tokens say by which weights they were sampled. Weights are numbers, one for each rank, made from
    what was fetched: nobody can claim to hold what it did not take."""

    def __init__(self, world: World, name: str, options: SimulationOptions) -> None:
        super().__init__(options, clock=world.loop.time, sleep=asyncio.sleep)
        self._open: Any = _OpenRequests(self)
        self.world, self.name = world, name
        process = PROCESS.get()
        self.life = repr(process)
        self.content = tuple(digest_of("random weights", name, rank) for rank in range(world.shape.ranks))
        self.taken: tuple[int, ...] | None = None
        self.committing = False

    @property
    def live_hash(self) -> int:
        return sum(digest_of(part) for part in self.content) % MODULUS

    async def generate(self, request: Generate) -> Completion:
        world = self.world
        phase = Phase.EVALUATION if request.request_id.startswith("-") else Phase.ROLLOUT
        world.enter(phase)
        try:
            if world.take_mischief(self.name) == "refuse_request":
                raise RequestRefused("planted: this request is refused")
            completion = await super().generate(request)
        finally:
            world.leave(phase)
        world.ledger.sampled_by(self.name, request.request_id, completion)
        return completion

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        self.world.enter(Phase.STAGE)
        try:
            return await self._stage(announcement)
        finally:
            self.world.leave(Phase.STAGE)

    async def _stage(self, announcement: WeightAnnouncement) -> OrderDone:
        world = self.world
        mischief = world.take_mischief(self.name)
        seconds = world.random.expovariate(1 / world.shape.fetch_s) * (20 if mischief == "slow_fetch" else 1)
        await asyncio.sleep(seconds)
        parts = [world.shelf[source.manifest_digest] for source in announcement.sources]
        if mischief == "refuse_delta":
            raise WeightError(f"{self.name}: planted: version {announcement.policy_version} is refused")
        if any(part.life is not None and part.life.dead for part in parts):  # type: ignore[attr-defined]
            raise WeightError(f"{self.name}: nobody serves version {announcement.policy_version} any more")
        taken = [
            part.content if part.base in (None, held) else digest_of("mixed", held, part.content)
            for held, part in zip(self.content, parts, strict=True)
        ]
        if mischief == "corrupt_delta":
            taken[0] ^= 1
        done = await super().stage(announcement)
        self.taken = tuple(taken)
        return done

    async def commit(self, policy_version: int) -> OrderDone:
        world = self.world
        world.enter(Phase.COMMIT)
        self.committing = True
        try:
            await asyncio.sleep(world.random.expovariate(1 / world.shape.commit_s))
            done = await super().commit(policy_version)
            assert self.taken is not None
            self.content = self.taken
            if policy_version in world.ledger.hash_of and self.live_hash in world.ledger.hash_of[policy_version]:
                # A controller that goes on may begin at the version before: what was not written down never was.
                world.ledger.committed(f"{self.life} of {world.machine.lives['controller'].process}", policy_version)
            return msgspec.structs.replace(done, state_hash=self.live_hash)
        finally:
            self.committing = False
            world.leave(Phase.COMMIT)


def _stamped_sample(self: Any, policy_version: int) -> None:
    before = self.sampled
    _SAMPLE(self, policy_version)
    engine: StampedEngine = self.engine
    live = engine.live_hash
    engine.world.ledger.token_by(engine.name, policy_version, live)
    if engine.committing:
        engine.world.ledger.violated("I8", f"{engine.name} sampled a token while it committed")
    self.stamps += [stamp_of(live)] * (self.sampled - before)


def _stamped_completion(self: Any, *arguments: Any) -> Completion:
    logprobs: FloatArray = float_array(self.stamps)
    return msgspec.structs.replace(_COMPLETION(self, *arguments), behavior_logprobs=logprobs)


_SAMPLE: Callable[..., None] = simulated_engine._Running.sample
_COMPLETION: Callable[..., Completion] = simulated_engine._Running.completion


@contextmanager
def stamped_tokens() -> Iterator[None]:
    with (
        mock.patch.object(simulated_engine._Running, "sample", _stamped_sample),
        mock.patch.object(simulated_engine._Running, "completion", _stamped_completion),
    ):
        yield


class SilentSink:
    """In the place of the metrics socket."""

    def __init__(self, endpoint: str, *, run_id: str = "", **_: Any) -> None:
        self.endpoint = endpoint
        self.dropped = 0

    def record_step(self, record: object) -> None:
        pass

    def record_event(self, record: object) -> None:
        pass

    def close(self) -> None:
        pass


class SilentLoopWatch:
    """In the place of the thread that looks whether the loop answers: here it always does."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> SilentLoopWatch:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    async def beat(self) -> None:
        await anyio.sleep_forever()

    def take_worst(self) -> float:
        return 0.0


class SimulatedSignals:
    """``anyio.open_signal_receiver`` for the process that calls it."""

    def __init__(self, *wanted: int) -> None:
        self.wanted = wanted
        self._came: list[int] = []
        self._changed = anyio.Event()

    def __enter__(self) -> SimulatedSignals:
        process = PROCESS.get()
        assert process is not None
        process.signals.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        process = PROCESS.get()
        assert process is not None
        process.signals.remove(self)

    def tell(self, signal: int) -> None:
        """It came."""
        self._came.append(signal)
        self._changed.set()

    def __aiter__(self) -> SimulatedSignals:
        return self

    async def __anext__(self) -> int:
        while not self._came:
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._came.pop(0)

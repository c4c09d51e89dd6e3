"""Contracts that code outside of streamrl may fill, in one place. docs/extending.md shows each in use.

================  ===================================================================  ===========================
contract          implementations in the product                                       named in
================  ===================================================================  ===========================
``RoundPolicy``   six kinds of rounds (``control``, ``control.policies``)              ``rollout.policy``
``GroupSizer``    three sizings (``control.policies.group_sizing``)                    ``group_sizing.kind``
``Engine``        vLLM, plain vLLM, simulated, in another process (``engines``)        ``engines.kind``
``Publisher``     deltas over sockets (``weights``), files (``learning.state``)        ``launch.roles``
``WeightPush``    one transaction (``engines.push``), a plain one (``run.plain_push``)  ``Controller(sync=...)``
``PromptSource``  rows, tasks, iterators (``run.prompts``)                             ``prompts.train``
``Observer``      report, elastic engines, audit, a resumed run                        ``run.advanced.observers``
``Sink``          ``metrics.jsonl``, the metrics socket (``observe.sinks``)            ``Pipeline(sinks=[...])``
================  ===================================================================  ===========================

``RoundPolicy`` and ``GroupSizer`` are defined beside what they see (``control.round_policy``). A reward is a function
(docs/rewards.md), as is an iterator of prompts. Any exception that a method does not document ends the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.base.messages import (
    EngineLoad,
    EngineReady,
    Generate,
    Message,
    OrderDone,
    PauseMode,
    Published,
    ReturnedCall,
    WeightAnnouncement,
)
from streamrl.base.stage_messages import LaunchTrajectory, SampledSoFar, Scored, TrajectoryOutcome, TurnSoFar
from streamrl.base.types import Completion, Prompt, ScoredTrajectory, Trajectory, TrajectoryId
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.machine import Control
from streamrl.control.round_policy import GroupSizer as GroupSizer
from streamrl.control.round_policy import RoundPolicy as RoundPolicy

# ---- engines -------------------------------------------------------------------------------------


class Sampler(Protocol):
    """Samples completions: one engine, or a pool of them."""

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion; returns a cut one (finish reason abort) when aborted."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask for requests to stop. Returns before the engine dropped them: the barrier is ``pause(ABORT)``."""
        ...


class Engine(Sampler, Protocol):
    """One inference engine. All methods may run concurrently unless they say otherwise.

    ``start`` is called once; ``generate`` and ``abort`` any time (requests queue while paused). A weight push is
    ``stage`` (while generating) -> ``pause`` -> ``commit`` -> ``resume``. A failure that ends the engine raises
    ``EngineError`` from every pending call. ``tests/engines/test_engine_contract.py`` checks an implementation."""

    async def start(self) -> EngineReady:
        """Load the model. Called once, before anything else."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling; after it returns no token is sampled until ``resume``."""
        ...

    async def resume(self) -> None:
        """Sample again."""
        ...

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Fetch and check a version while generating. Raises ``WeightError`` when it does not fit."""
        ...

    async def commit(self, policy_version: int) -> OrderDone:
        """Apply the staged version and verify its state hash on the live weights. Only while paused."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Return the engine's own checksum of every live parameter, by runtime name (slow; for audits)."""
        ...

    def load(self) -> EngineLoad:
        """Return how many requests run and wait, and the counters since the start."""
        ...

    async def aclose(self) -> None:
        """Stop the engine and everything it started. Idempotent."""
        ...


class WatchedEngine(Engine, Protocol):
    """An engine in the process of its host: it can be put to sleep, and says when it died."""

    async def sleep(self) -> None:
        """Give the device's memory back until ``wake``."""
        ...

    async def wake(self) -> None:
        """Take the device's memory again."""
        ...

    async def watch(self) -> None:
        """Return never; raise ``EngineError`` when the engine died."""
        ...


# ---- weights -------------------------------------------------------------------------------------


class Publisher(Protocol):
    """Gives the versions of one rank's weights to the engines. Synchronous, from one thread."""

    def publish(self, policy_version: int, values: Mapping[str, Any], /) -> Published:
        """Publish a version, newer than all before. ``values``: of this rank's shards by name, flat torch tensors in
        float32 whose values bfloat16 has, valid during the call. Raises ``StreamRLError``."""
        ...

    def publish_anchor(self, policy_version: int) -> Published:
        """Publish the newest version again, complete in itself. Raises ``StreamRLError`` for another version."""
        ...

    def acknowledge(self, policy_version: int) -> None:
        """Every engine holds this version: what only older ones need may be deleted."""
        ...

    def close(self) -> None:
        """Stop serving. Idempotent."""
        ...


class CanaryReport(msgspec.Struct, frozen=True):
    """Comparison since the report before: the latest version among it, the largest deviation from the trainer in nats
    (infinite: not a number), and the number of engines."""

    policy_version: int
    deviation: float
    engines: int


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One weight push. Seconds are of wall time. ``staged_s``: until the last engine had staged; ``paused_s``: the
    longest pause of an engine for its commit; ``reanchored``: engines that needed the version complete; ``canary``:
    what engines answered about an earlier version (None: no engine did)."""

    policy_version: int
    staged_s: float = 0.0
    paused_s: float = 0.0
    total_s: float = 0.0
    payload_bytes: int = 0
    changed_share: float = 0.0
    reanchored: int = 0
    canary: CanaryReport | None = None


class WeightPush(Protocol):
    """Makes versions live on the engines. ``on_version_left`` is called when none holds the live one any more."""

    on_version_left: Callable[[], object]

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine, and let them sample again."""
        ...

    async def pause(self) -> None:
        """Pause every engine ahead of a push."""
        ...

    async def resume(self) -> None:
        """End the pause without a push."""
        ...


# ---- what a run is given -------------------------------------------------------------------------


class PromptSource(Protocol):
    """The prompts that a run trains on, in order."""

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts; fewer mean that the source is exhausted (stored rows never are: epochs
        repeat). Raises ``StreamRLError`` naming the row and the remedy when a row is no prompt or user code fails. A
        draw that is cancelled loses nothing: the next one gets its prompts."""
        ...


TakeOutcome = Callable[[TrajectoryOutcome], Awaitable[None]]


class EpisodeRunner(Protocol):
    """Samples trajectories and has them scored (``stages.episodes``). They may be launched in the block of ``running``;
    ``take`` gets the outcome of one, and each pause before. Ids that are not being sampled are ignored."""

    def running(self) -> AbstractAsyncContextManager[None]: ...

    def launch(self, order: LaunchTrajectory, take: TakeOutcome, /) -> None: ...

    def pause(self, ids: Collection[TrajectoryId], /) -> None: ...

    def resume(self, ids: Collection[TrajectoryId], /) -> None: ...

    def cancel(self, ids: Collection[TrajectoryId], /) -> None: ...


class Scorer(Protocol):
    """Scores trajectories (``stages.reward``): each of ``group_size`` siblings is scored, or is lost."""

    async def score(self, trajectory: Trajectory, group_size: int, /) -> Scored: ...

    async def lost(self, trajectory: TrajectoryId, group_size: int, /) -> None: ...


class Observer:
    """Is called with what happens in a run. Every method does nothing until it is overridden.

    One that a recipe names (``run.advanced.observers``) is called in the controller's process on a thread of its own,
    in order: it may block, and an error of it is logged and counted. It gets the ``on_`` calls and ``end``. Observers
    of the product are called in the controller's event loop, and may ``prepare`` and ``run``, too."""

    async def prepare(self) -> None:
        """Prepare: nothing is published or sampled before this returns."""

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Run beside the rounds until ``end`` is called; ``notify`` sends an event to control."""

    def end(self) -> None:
        """End: the last round is over."""

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Called once, when the first version of this controller is live on every engine."""

    async def on_event(self, event: ControlEvent) -> None:
        """Called with each event after it is journalled and before control handles it."""

    async def on_action(self, action: ControlAction) -> None:
        """Called with each action before it is carried out."""

    def on_outcome(self, outcome: TrajectoryOutcome) -> None:
        """Called with each outcome of a training trajectory on arrival, also of one that control has dropped."""

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: dict[str, float]) -> None:
        """Called after the optimizer step on ``batch``, before control is notified. ``metrics``: the trainer's."""

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Called when every engine serves the version, before control is notified. ``last``: no round follows."""

    async def on_progress(self) -> None:
        """Called after each event and each held-out outcome."""


class Sink(Protocol):
    """Receives the events of a run (``base.run_events``): a file, a socket, a tracker. One of a user's
    (``Pipeline(sinks=[...])``) is called on a thread of its own, and an error of it is logged and counted."""

    def record(self, event: Message) -> None:
        """Record one event."""
        ...

    def close(self) -> None:
        """Write what waits, and close. Called once."""
        ...


class Journal:
    """The log that a run resumes from, written before control handles an event. This one writes nothing: a run that
    ends early starts again. ``settled`` returns when everything so far is on the disk."""

    async def begin(self, control: Control) -> None: ...

    def on_event(self, event: ControlEvent, control: Control) -> None: ...

    def drawn(self, prompts: Sequence[Prompt]) -> None: ...

    def scored(self, scored: ScoredTrajectory) -> None: ...

    def published(self, policy_version: int, state_hash: int) -> None: ...

    async def sampled(self, trajectory: Trajectory) -> None: ...

    async def paused(self, trajectory: TrajectoryId, done: SampledSoFar) -> None: ...

    async def turn(self, trajectory: TrajectoryId, number: int, turn: TurnSoFar) -> None: ...

    def returned(self, trajectory: TrajectoryId, call: ReturnedCall) -> None: ...

    async def settled(self) -> None: ...


class Evaluations:
    """Held-out runs, one at a time; these are of a recipe without held-out prompts. ``begin`` returns at once; ``run``
    when all of it has ended, with what then stores it, and calls ``ended`` after each outcome. ``cancel`` does
    nothing where none is open; ``why`` is said in a warning."""

    def begin(self, policy_version: int, limit: int) -> None: ...

    async def run(self, episodes: EpisodeRunner, ended: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        raise RecipeError("evaluation.prompts: this run has no held-out runs")

    async def cancel(self, episodes: EpisodeRunner, why: str = "") -> None: ...

    async def warn_cancelled(self, policy_version: int, why: str) -> None: ...

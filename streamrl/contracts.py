"""Protocols between the parts of a run, which code outside of streamrl may implement. docs/python.md shows each in
use. The controller calls all of them but ``Publisher``, which a trainer rank calls, and the ``Engine`` of an engine
process.

================  ===================================================================  ===========================
contract          implementations in the product                                       named in
================  ===================================================================  ===========================
``RoundPolicy``   six kinds of rounds (``control``, ``control.policies``)              ``rollout.policy``
``GroupSizer``    three sizings (``control.policies.group_sizing``)                    ``group_sizing.kind``
``Engine``        vLLM, simulated, in another process (``engines``)                    ``engines.kind``
``Publisher``     deltas over sockets (``weights``), files (``learning.state``)        ``launch.roles``
``WeightPush``    one transaction over the engines (``engines.push``)                  ``Controller(sync=...)``
``PromptSource``  rows, tasks, iterators (``run.prompts``)                             ``prompts.train``
``Observer``      report, elastic engines, audit, a resumed run                        ``run.advanced.observers``
``Sink``          ``metrics.jsonl``, the metrics socket (``observe.sinks``)            ``Pipeline(sinks=[...])``
================  ===================================================================  ===========================

``RoundPolicy`` and ``GroupSizer`` are defined beside their arguments (``control.round_policy``). A reward is a function
(docs/rewards.md), and so is an iterator of prompts. An exception that a method does not document ends the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.messages import (
    EngineLoad,
    EngineReady,
    FirstProbe,
    Generate,
    Message,
    OrderDone,
    PauseMode,
    Published,
    ReturnedCall,
    WeightAnnouncement,
)
from streamrl.base.stage_messages import LaunchTrajectory, SampledSoFar, Scored, TrajectoryOutcome, TurnSoFar
from streamrl.base.types import (
    Completion,
    Metrics,
    Prompt,
    ScoredTrajectory,
    Texts,
    TextsByName,
    TokenArray,
    Trajectory,
    TrajectoryId,
    Turn,
)
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.machine import Control
from streamrl.control.round_policy import GroupSizer as GroupSizer
from streamrl.control.round_policy import RoundPolicy as RoundPolicy

# ---- engines -------------------------------------------------------------------------------------


class Sampler(Protocol):
    """Samples completions: one engine, or a pool of engines."""

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion. Returns the tokens so far, with finish reason abort, where it is aborted."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests. Returns before the engine has dropped them; ``pause(ABORT)`` waits for that."""


class TurnSampler(Protocol):
    """Samples the turns of one trajectory. ``stages.episodes.OpenTrajectory`` does so in the controller, and
    ``run.environments.turns.OpenEpisode`` in an environment worker, where the code of an episode calls it."""

    async def sample(
        self, appended: TokenArray, *, after: int | None = None, max_tokens: int = 0, stop: Texts = ()
    ) -> Turn:
        """Sample a turn after ``appended``, token ids that are not trained. A turn that an engine aborts is requested
        again.

        ``after``: number of the turn whose token sequence is continued (None: the newest turn; -1: no turn, it follows
        the prompt);
        ``max_tokens``: limit of the turn's tokens (0: the limit of the recipe);
        ``stop``: texts that end the turn, besides those of the recipe; their tokens are the last ones of the turn."""


class Engine(Sampler, Protocol):
    """One inference engine. All methods may run concurrently, except where their documentation says otherwise.

    ``start`` is called once; ``generate`` and ``abort`` any time (requests queue while paused). A weight push is
    ``stage`` (while generating) -> ``pause`` -> ``commit`` -> ``resume``. A failure that ends the engine raises
    ``EngineError`` from every pending call. ``tests/engines/test_engine_contract.py`` checks an implementation."""

    async def start(self) -> EngineReady:
        """Load the model. Called once, before all other methods."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling: from the return of this method until ``resume`` no token is sampled."""

    async def resume(self) -> None:
        """Continue sampling after ``pause``."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Fetch and check a version while generating. Raises ``WeightError`` where it does not fit the engine's
        weights."""

    async def commit(self, policy_version: int) -> OrderDone:
        """Apply the staged version and verify its state hash on the live weights. Only while paused."""

    async def checksums(self) -> TextsByName:
        """Return the engine's own checksum of every live parameter, by runtime name (slow; for audits)."""

    def load(self) -> EngineLoad:
        """Return the numbers of running and waiting requests, and the counters since the start."""

    async def aclose(self) -> None:
        """Stop the engine and all processes that it started. Idempotent."""


class WatchedEngine(Engine, Protocol):
    """An engine in its engine process, which can put it to sleep and watch for its death."""

    async def sleep(self) -> None:
        """Abort the requests, pause, and release the device's memory until ``wake``."""

    async def wake(self) -> None:
        """Allocate the device's memory again. The engine stays paused until ``resume``."""

    async def watch(self) -> None:
        """Never return; raise ``EngineError`` when the engine died."""


# ---- weights -------------------------------------------------------------------------------------


class Publisher(Protocol):
    """Publishes the versions of one trainer rank's weights to the engines. Synchronous, called from one thread."""

    def publish(self, policy_version: int, values: Mapping[str, Any], /) -> Published:
        """Publish a version, newer than all before. ``values``: weights of this rank's shards by name, flat torch
        tensors in float32 that are exact in bfloat16, valid during the call. Raises ``StreamRLError``."""

    def publish_anchor(self, policy_version: int) -> Published:
        """Publish the newest version again, as an anchor. Raises ``StreamRLError`` for another version."""

    def acknowledge(self, policy_version: int) -> None:
        """Note that every engine has this version: data that only older versions need may be deleted."""

    def close(self) -> None:
        """Stop serving. Idempotent."""


class CanaryReport(Struct, frozen=True):
    """Comparison of the engines' logprobs of the canary tokens with the trainer's, since the last report.

    ``policy_version``: newest version among the comparisons;
    ``deviation``: largest deviation of an engine in nats (infinite where a logprob is not a number);
    ``engines``: number of engines that were compared."""

    policy_version: int
    deviation: float
    engines: int


class PushReport(Struct, frozen=True, kw_only=True):
    """One weight push, made by ``WeightPush`` and given to observers in the controller. Seconds are wall time.

    ``staged_s``: time until the last engine had staged the version;
    ``paused_s``: longest pause of an engine for its commit;
    ``payload_bytes``: bytes that the engines fetched;
    ``changed_share``: share of the weights that differ from the base version;
    ``reanchored``: number of engines that needed an anchor;
    ``from_memory``: number of engines that took the version from the trainer's memory;
    ``canary``: comparison of an earlier version (None: no engine answered)."""

    policy_version: int
    staged_s: float = 0.0
    paused_s: float = 0.0
    total_s: float = 0.0
    payload_bytes: int = 0
    changed_share: float = 0.0
    reanchored: int = 0
    from_memory: int = 0
    canary: CanaryReport | None = None


class WeightPush(Protocol):
    """Makes versions live on the engines. ``on_version_left``: callback for the time when no engine has the live
    version any more."""

    on_version_left: Callable[[], object]

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine; the engines then sample again."""

    async def check_first_tokens(self, probe: FirstProbe) -> None:
        """Compare what an engine computes with the trainer's logprobs, before the first step. Raises ``EngineError``
        where they differ by more than rounding does."""

    async def pause(self) -> None:
        """Pause every engine ahead of a push."""

    async def resume(self) -> None:
        """End the pause without a push."""


class Turns:
    """Turns of engines and trainer ranks (``engines.elastic.turns``). This base class is for engines and ranks that
    have memory of their own."""

    @property
    def figures(self) -> Metrics:
        """Metrics of the last switches."""
        return {}

    async def train(self) -> None:
        """Free the engines' memory for the ranks. Nothing may be sampled. Does nothing in the turn of the ranks."""

    async def sample(self) -> None:
        """Make the last pushed version live on engines that slept. The ranks must have given their memory back."""


# ---- prompts, episodes, rewards, observers, sinks ------------------------------------------------


class PromptSource(Protocol):
    """The prompts that a run trains on, in order."""

    async def draw(self, count: int, sets: Sequence[str] = ()) -> list[Prompt]:
        """Return the next ``count`` prompts, or fewer where the source is exhausted (stored rows never are: epochs
        repeat). ``sets``: training set of each of them (empty: there is a single source). Raises ``StreamRLError`` with
        the row and the remedy where a row is no prompt or user code fails. Where a draw is cancelled, the next draw
        returns its prompts."""


TakeOutcome = Callable[[TrajectoryOutcome], Awaitable[None]]


class EpisodeRunner(Protocol):
    """Samples trajectories and has them scored (``stages.episodes``). Trajectories may be launched within the block of
    ``running``. ``take``: coroutine function that gets the outcome of the trajectory, and before it each pause. Unknown
    ids are ignored."""

    def running(self) -> AbstractAsyncContextManager[None]: ...

    def launch(self, order: LaunchTrajectory, take: TakeOutcome, /) -> None: ...

    def pause(self, ids: Collection[TrajectoryId], /) -> None: ...

    def resume(self, ids: Collection[TrajectoryId], /) -> None: ...

    def cancel(self, ids: Collection[TrajectoryId], /) -> None: ...


class Scorer(Protocol):
    """Scores trajectories (``stages.reward``). For each of the ``group_size`` siblings of a group, either ``score`` or
    ``lost`` is called."""

    async def score(self, trajectory: Trajectory, group_size: int, /) -> Scored: ...

    async def lost(self, trajectory: TrajectoryId, group_size: int, /) -> None: ...


class Observer:
    """Gets the events of a run. Every method does nothing by default.

    A user's observer (``run.advanced.observers``) gets the ``on_`` calls and ``end``, in order, on its own thread in
    the controller's process: it may block, and its errors are logged and counted. Observers of streamrl itself are
    called in the controller's event loop, also with ``prepare`` and ``run``."""

    async def prepare(self) -> None:
        """Prepare for the run: nothing is published or sampled before this returns."""

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Run concurrently with the rounds until ``end`` is called. ``notify``: function that sends an event to
        control."""

    def end(self) -> None:
        """Called after the last round."""

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Called once, when the first version of this controller process is live on every engine."""

    async def on_event(self, event: ControlEvent) -> None:
        """Called with each event after it is in the journal and before control handles it."""

    async def on_action(self, action: ControlAction) -> None:
        """Called with each action before it is carried out."""

    def on_outcome(self, outcome: TrajectoryOutcome) -> None:
        """Called with each outcome of a training trajectory on arrival, also where control has dropped the
        trajectory."""

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: Metrics) -> None:
        """Called after the optimizer step on ``batch``, before control is notified. ``metrics``: metrics of the
        trainer."""

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Called when every engine serves the version, before control is notified. ``last``: whether no round
        follows."""

    async def on_progress(self) -> None:
        """Called after each event and each held-out outcome."""


class Sink(Protocol):
    """Receives the events of a run (``base.run_events``), such as a file, a socket or a tracker. A user's sink
    (``Pipeline(sinks=[...])``) is called on its own thread, and its errors are logged and counted."""

    def record(self, event: Message) -> None:
        """Record one event."""

    def close(self) -> None:
        """Write all recorded events, and close. Called once."""


class Journal:
    """Log from which a killed run resumes, written before control handles an event (``run.journal``). This base class
    writes nothing: without a journal a killed run begins again. ``flushed`` returns when all records so far are on the
    disk."""

    async def begin(self, control: Control) -> None: ...

    def on_event(self, event: ControlEvent, control: Control) -> None: ...

    def on_prompts(self, prompts: Sequence[Prompt]) -> None: ...

    def on_scored(self, scored: ScoredTrajectory) -> None: ...

    def on_published(self, policy_version: int, state_hash: int) -> None: ...

    async def on_sampled(self, trajectory: Trajectory) -> None: ...

    async def on_paused(self, trajectory: TrajectoryId, completion: SampledSoFar) -> None: ...

    async def on_turn(self, trajectory: TrajectoryId, number: int, turn: TurnSoFar) -> None: ...

    def on_call(self, trajectory: TrajectoryId, call: ReturnedCall) -> None: ...

    async def flushed(self) -> None: ...


class Evaluations:
    """Held-out evaluations, one at a time (``run.evaluate``). This base class is for a recipe without held-out prompts.

    ``begin`` starts an evaluation and returns at once. ``run`` returns when it has ended, with the function that stores
    it, and calls ``on_outcome`` after each outcome. ``cancel`` does nothing where no evaluation is open; ``why``:
    reason for the warning."""

    def begin(self, policy_version: int, limit: int) -> None: ...

    async def run(
        self, episodes: EpisodeRunner, on_outcome: Callable[[], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        raise RecipeError("evaluation.prompts: this run has no held-out runs")

    async def cancel(self, episodes: EpisodeRunner, why: str = "") -> None: ...

    async def warn_cancelled(self, policy_version: int, why: str) -> None: ...

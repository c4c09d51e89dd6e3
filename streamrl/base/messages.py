"""Messages on the ZeroMQ streams between the controller's process and the engine processes, the trainer ranks and the
environment workers; ``launch.run_controller`` lists the streams. The heading above the messages has sender and
receiver. A record that is no ``Message`` travels as a field of one. Tagged unions: the tag names the kind on the
wire."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from streamrl.base.types import (
    ClosedBatch,
    Completion,
    EnvironmentResult,
    FinishReason,
    JsonObject,
    Metrics,
    Record,
    RewardFailureKind,
    SamplingSettings,
    Texts,
    TextsByName,
    TokenArray,
    TrainingGroup,
    TrainingSample,
    Turn,
)


class Message(Record, frozen=True, tag=True):
    """Base of every item of a stream."""


# ---- weights: trainer rank -> controller -> engine -----------------------------------------------

HASH_MODULUS = 2**64
"""The state hash of a version is the sum of the state hashes of its parts, modulo this number."""


class MemoryHandle(Record, frozen=True):
    """Shared memory in which a trainer rank has the bits of its newest version (``weights.pull.trainer_memory``).

    ``host``: identity of the host, and of its table of processes, in which ``pid`` is a number;
    ``pid``, ``descriptor``: the rank's process, and the number of the memory's file in it;
    ``inode``, ``size``: identity of this file, and its bytes;
    ``device``: UUID of the GPU that has the bits, too (empty: none)."""

    host: str
    pid: int
    descriptor: int
    inode: int
    size: int
    device: str = ""


class WeightSource(Record, frozen=True):
    """One trainer rank's part of a weight version, and the place to fetch it from. Made by the rank's publisher
    (``weights.publish``), read by the engines.

    ``endpoint``: address at which the rank serves the manifest and the payload;
    ``manifest_digest``: digest of the manifest's bytes, which an engine fetches from ``endpoint`` (empty: the part is
    in ``memory`` only);
    ``payload_bytes``: bytes of the part on the wire;
    ``changed_elements``: number of weights that differ from the base version;
    ``total_elements``: number of weights of the part;
    ``memory``: memory of the rank with the version, for engines of the same host (None: the rank shares none)."""

    rank: int
    endpoint: str
    manifest_digest: str
    payload_bytes: int
    changed_elements: int
    total_elements: int
    memory: MemoryHandle | None = None


class Published(Record, frozen=True):
    """One rank's part of a published version. Returned by ``contracts.Publisher`` in the trainer rank, whose report
    (``StepReport``, ``AnchorPublished``) takes the fields to the controller.

    ``base_version``: version that a delta builds on; None: the part is an anchor, complete in itself;
    ``state_hash``: 64-bit additive hash of the rank's weights."""

    source: WeightSource
    base_version: int | None
    state_hash: int


class WeightAnnouncement(Record, frozen=True):
    """A version that engines may stage. Made in the controller from the reports of all ranks (``announcement_of``),
    sent to engines as an argument of ``EngineCall``.

    ``base_version``: version that a delta builds on; None: the version is an anchor, complete in itself;
    ``state_hash``: 64-bit additive hash of all weights at ``policy_version`` (sum over ranks modulo ``HASH_MODULUS``);
    ``sources``: parts of all ranks, by rank;
    ``probe_logprobs``: the trainer's logprobs of the canary tokens by the version before this one (empty: not
    computed);
    ``peers``: endpoints of engines that have the version or are receiving it; an engine fetches from these, in this
    order, before it fetches from ``sources`` (``weights.relay``)."""

    policy_version: int
    base_version: int | None
    state_hash: int
    sources: tuple[WeightSource, ...]
    probe_logprobs: tuple[float, ...] = ()
    peers: Texts = ()


def announcement_of(
    policy_version: int,
    parts: Sequence[Published | StepReport | AnchorPublished],
    probe_logprobs: tuple[float, ...] = (),
) -> WeightAnnouncement:
    """Return the announcement of a version that every trainer rank has published. ``parts``: reports of the ranks, by
    rank."""
    return WeightAnnouncement(
        policy_version=policy_version,
        base_version=parts[0].base_version,
        state_hash=sum(part.state_hash for part in parts) % HASH_MODULUS,
        sources=tuple(part.source for part in parts),
        probe_logprobs=probe_logprobs,
    )


# ---- controller -> engine ------------------------------------------------------------------------


class PauseMode(StrEnum):
    """Handling of requests in flight, in vLLM's words: ``abort`` returns their tokens with finish reason abort,
    ``keep`` freezes the requests until ``resume``."""

    ABORT = "abort"
    KEEP = "keep"


class Generate(Message, SamplingSettings, frozen=True, kw_only=True):
    """Sample one completion by the sampling settings of the recipe. Made by ``stages.episodes`` and by the canary
    (``engines.push.verify``); the engine process answers with ``Generated`` or ``GenerationFailed``.

    ``token_ids``: the prompt, then tokens of earlier requests for the same completion;
    ``max_tokens``, ``min_tokens``: limits of the completion, ``prefix_length`` included;
    ``temperature``: may be 0 here, for greedy evaluations;
    ``prefix_length``: number of tokens at the end of ``token_ids`` that are the first part of the same completion (of a
    trajectory that was paused or moved to another engine);
    ``unverified_tokens``: number of tokens at the end of ``token_ids`` that other weights sampled with this seed; the
    engine need not decode those that its own weights choose, too;
    ``scored_tokens``: number of tokens at the end of ``token_ids`` to answer with their logprobs at temperature 1;
    nothing is sampled after them (0: sample);
    ``priority``: rank among the requests that wait in an engine, the least first (in runs with an environment);
    ``routed_tokens``: number of tokens at the start of ``token_ids`` whose experts the controller has; an engine that
    returns experts answers with those of the other tokens (None: with none)."""

    request_id: str
    token_ids: TokenArray
    seed: int
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    prefix_length: int = 0
    unverified_tokens: int = 0
    scored_tokens: int = 0
    priority: int = 0
    routed_tokens: int | None = 0


class Abort(Message, frozen=True):
    """Stop these requests; each still answers with ``Generated`` (finish reason abort)."""

    request_ids: Texts


EngineMethod = Literal["pause", "resume", "sleep", "wake", "stage", "commit", "checksums"]


class EngineCall(Message, frozen=True):
    """Call ``method`` of the engine (``contracts.WatchedEngine``) with ``arguments``. Made by
    ``engines.remote_engine``, answered with ``OrderDone`` or ``OrderFailed`` of the same ``order_id``."""

    order_id: int
    method: EngineMethod
    arguments: dict[str, WeightAnnouncement | PauseMode | int | bool] = {}


EngineOrder = Generate | Abort | EngineCall


# ---- engine -> controller ------------------------------------------------------------------------


class EngineReady(Message, frozen=True):
    """First message of an engine process: the model is loaded.

    ``engine``: name, such as ``engine-0``;
    ``policy_version``: version of the weights that the engine has;
    ``max_model_len``: tokens of the longest request, prompt and completion;
    ``max_num_seqs``: requests that run at once;
    ``tokenizer_digest``: ``Tokenizer.digest`` of the engine's model folder (empty: the engine has no tokenizer);
    ``kv_tokens``: tokens that the KV cache holds;
    ``pid``: process id of the engine process (0: unknown)."""

    engine: str
    policy_version: int
    max_model_len: int
    max_num_seqs: int
    tokenizer_digest: str = ""
    kv_tokens: int = 0
    pid: int = 0


class Generated(Message, frozen=True):
    """Completion of a ``Generate`` request, without the tokens of its prefix. ``seconds``: time of the request in the
    engine process."""

    request_id: str
    completion: Completion
    seconds: float


class GenerationFailed(Message, frozen=True):
    """Failure of a ``Generate`` request; the engine serves the other requests."""

    request_id: str
    reason: str


class OrderDone(Message, frozen=True):
    """Success of an ``EngineCall``. ``contracts.Engine.stage`` and ``commit`` return it inside of a process, too.

    ``state_hash``: hash that a commit computed from the live weights (0: another order);
    ``payload_bytes``: bytes that a stage fetched;
    ``checksums``: the answer of ``checksums``, by name of the parameter;
    ``mover``: way on which a stage got the version (``weights.distance.Mover``; empty: another engine of the host had
    it, or another order)."""

    order_id: int
    seconds: float
    state_hash: int = 0
    payload_bytes: int = 0
    checksums: TextsByName = {}
    mover: str = ""


class OrderFailed(Message, frozen=True):
    """Failure of an ``EngineCall``; the weights of the engine are unchanged."""

    order_id: int
    reason: str


class EngineLoad(Message, frozen=True):
    """Load and counters of an engine, sent a few times a second and on every change of state. ``contracts.Engine.load``
    returns it, and a pool returns the sum over its engines. The fields from ``generated_tokens`` on count since the
    start.

    ``running``, ``waiting``: numbers of requests;
    ``kv_cache_usage``: used share of the KV cache;
    ``preemptions``: requests that lost their KV cache because it was full;
    ``decode_steps``, ``decode_s``: number of decode steps, and their time;
    ``decode_tokens``: tokens of the decode steps, one for each running request, without accepted drafts;
    ``drafted_tokens``, ``accepted_tokens``: tokens that speculative decoding drafted, and those that were accepted;
    ``prefilled_tokens``, ``prefill_s``: tokens of prefills, and the time by which they lengthened steps."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    generated_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefilled_tokens: int = 0
    prefill_s: float = 0.0


EngineEvent = EngineReady | Generated | GenerationFailed | OrderDone | OrderFailed | EngineLoad


# ---- controller -> trainer rank ------------------------------------------------------------------


class TrainGroup(Message, frozen=True):
    """One group of the open batch, with all its rewards. The rank may train it before the batch is closed
    (streaming)."""

    group: TrainingGroup


class ImitatedSet(Record, frozen=True):
    """Rows of one set that a step imitates. ``weight``: weight of the mean cross-entropy of their imitated tokens."""

    name: str
    weight: float
    samples: tuple[TrainingSample, ...]


class CloseBatch(ClosedBatch, Message, frozen=True):
    """Close the open batch: step the optimizer and publish ``policy_version``; every rank answers with ``StepReport``.

    ``imitated``: rows to imitate of all ranks."""

    imitated: tuple[ImitatedSet, ...] = ()


class WeightsAcknowledged(Message, frozen=True):
    """Notice that ``policy_version`` is live on every engine: the next delta may build on it."""

    policy_version: int


class PublishAnchor(Message, frozen=True):
    """Publish the current version as an anchor, complete in itself; answered with ``AnchorPublished``."""

    policy_version: int


class EnginesFreed(Message, frozen=True):
    """Number of engines that are idle until the next round, whose cores the ranks may use (0: all engines serve)."""

    count: int


class TrainTogether(Message, frozen=True):
    """Train the groups that wait, on every rank in the same number of rows (the largest of any rank): each row is a
    collective."""


class SaveCheckpoint(Message, frozen=True):
    """Write the trainer's state and a Hugging Face directory under ``directory`` (atomic: a rename at the end);
    answered with ``CheckpointSaved``.

    ``min_free_bytes``: bytes that must be free on the disk afterwards, or the rank refuses;
    ``sidecar_digests``: SHA-256 by name of the controller's own files for the checkpoint, which may be larger than a
    message; the rank moves them from the place where ``atomic_files.write_sidecar`` put them."""

    directory: str
    policy_version: int
    min_free_bytes: int = 0
    sidecar_digests: dict[str, bytes] = {}


TrainingOrder = (
    TrainGroup | TrainTogether | CloseBatch | WeightsAcknowledged | PublishAnchor | EnginesFreed | SaveCheckpoint
)


# ---- trainer rank -> controller ------------------------------------------------------------------


class TrainerReady(Message, frozen=True):
    """First message of a trainer rank: the model is loaded.

    ``rank``, ``ranks``: number of this rank, and number of all ranks;
    ``policy_version``: version of the weights that the rank has (0: the initial weights);
    ``parameters``: number of parameters of the model;
    ``tokenizer_digest``: ``Tokenizer.digest`` of the rank's model folder;
    ``trained_parameters``: number of parameters of the adapters (0: all parameters are trained);
    ``together_tokens``: waiting tokens, over all ranks, at which the controller is to send ``TrainTogether`` (0:
    never);
    ``ranks_per_group``: number of consecutive ranks that train the same groups."""

    rank: int
    ranks: int
    policy_version: int
    parameters: int
    tokenizer_digest: str = ""
    trained_parameters: int = 0
    together_tokens: int = 0
    ranks_per_group: int = 1


class StepReport(Message, frozen=True):
    """One optimizer step of one rank, answer to ``CloseBatch``.

    ``base_version``, ``state_hash``, ``source``: the published part of the rank, as in ``Published``;
    ``metrics``: metrics of the step, reduced over the ranks and equal on each;
    ``probe_logprobs``: logprobs of the canary tokens by the weights before the step (empty: this rank computed
    none)."""

    rank: int
    batch_id: int
    policy_version: int
    base_version: int | None
    state_hash: int
    source: WeightSource
    metrics: Metrics
    probe_logprobs: tuple[float, ...] = ()


class FirstProbe(Message, frozen=True):
    """Logprobs by which engines are checked before the first step. ``logprobs``: the trainer's, of the canary tokens,
    by the weights that it publishes. ``rounding``: median difference, in nats, from those of a forward in bfloat16."""

    logprobs: tuple[float, ...]
    rounding: float


class AnchorPublished(Message, frozen=True):
    """Answer to ``PublishAnchor``. ``base_version``: None for an anchor. The first answer of a run may be a delta
    instead: on the checkpoint that engines load (-1), or on the version before; with it come ``first_probe``."""

    rank: int
    policy_version: int
    state_hash: int
    source: WeightSource
    base_version: int | None = None
    first_probe: FirstProbe | None = None


class CheckpointSaved(Message, frozen=True):
    """Answer to ``SaveCheckpoint``."""

    rank: int
    directory: str
    policy_version: int
    seconds: float


TrainingEvent = TrainerReady | StepReport | AnchorPublished | CheckpointSaved


# ---- controller <-> environment worker -----------------------------------------------------------
# The controller numbers the episodes. The worker of an episode requests one turn after the other (TurnRequest, answered
# with TurnReply) and ends with EpisodeEnd.


class ReturnedCall(Record, frozen=True):
    """A tool call that has returned. Made by the environment worker; the controller writes it to the journal, and gives
    it to a later run of the same episode (``BeginEpisode``).

    ``turn``: number of the turn that has the call;
    ``place``: index of the call among the calls of the turn;
    ``call``: name and arguments as JSON;
    ``text``: result for the model;
    ``end``: outcome, a value of ``run.environments.tools.ToolEnd``."""

    turn: int
    place: int
    call: str
    text: str
    end: str
    seconds: float = 0.0


class BeginEpisode(Message, frozen=True):
    """Run an episode. Controller to environment worker.

    ``episode``: number of the episode, which all its messages have;
    ``trajectory``: id of the trajectory, as text;
    ``columns``: row of the prompt;
    ``environment``: name of the environment in ``Environment.by_name``;
    ``seed``: seed of the environment's own randomness;
    ``evaluation``: whether the prompt is held out;
    ``returned``: tool calls of an earlier run of the episode, which are not made again."""

    episode: int
    trajectory: str
    prompt_id: str
    columns: JsonObject
    seed: int
    environment: str = ""
    evaluation: bool = False
    returned: tuple[ReturnedCall, ...] = ()


class TurnReply(Message, frozen=True):
    """The complete turn that the episode requested with ``TurnRequest``; None: it was dropped. Controller to
    environment worker."""

    episode: int
    turn: Turn | None


class StopEpisode(Message, frozen=True):
    """Cancel the episode. Controller to environment worker, which need not answer."""

    episode: int


EnvironmentOrder = BeginEpisode | TurnReply | StopEpisode


class EnvironmentReady(Message, frozen=True):
    """First message of an environment worker, also after a restart."""

    worker: int


class TurnRequest(Message, frozen=True):
    """Request for the next turn. Environment worker to controller.

    ``appended``: token ids that the environment adds before the turn, which are not trained;
    ``after``: number of the turn to continue from (None: the newest; -1: the prompt);
    ``max_tokens``: limit of the turn's tokens that the user's code asks for (0: none);
    ``stop``: texts that end the turn, besides those of the recipe;
    ``room``: tokens that the recipe leaves for the turn in its conversation (0: any number)."""

    episode: int
    appended: TokenArray
    after: int | None = None
    max_tokens: int = 0
    stop: Texts = ()
    room: int = 0


class DropTurn(Message, frozen=True):
    """Drop turn number ``turn`` from the trajectory, and abort it where it is being sampled: nobody waits for it.
    Environment worker to controller; the turn's ``TurnReply`` comes all the same."""

    episode: int
    turn: int


class CallReturned(Message, frozen=True):
    """A tool call that has returned. Environment worker to controller: a later run of the episode does not make it
    again."""

    episode: int
    call: ReturnedCall


class EpisodeEnd(Message, frozen=True):
    """End of an episode. Environment worker to controller; ``stages`` also make it, of episodes that no worker ended.

    ``episode``: number of the episode (0: no worker ran it);
    ``result``: result of the environment (None: the run has none);
    ``kind``: kind of failure (None: the episode succeeded), with its ``message``;
    ``finish``: finish reason of the trajectory (None: that of the last turn);
    ``turns``: number of turns that the episode received, and that belong to the trajectory (None: all turns);
    ``policy``: the recipe's policy for failed episodes, as in ``RewardFailure``."""

    episode: int = 0
    result: EnvironmentResult | None = None
    kind: RewardFailureKind | None = None
    message: str = ""
    finish: FinishReason | None = None
    turns: int | None = None
    policy: str = "drop_sample"


EnvironmentEvent = EnvironmentReady | TurnRequest | DropTurn | CallReturned | EpisodeEnd

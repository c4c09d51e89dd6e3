"""Messages on the streams between processes, which ``launch.run_controller`` lists. Tagged unions: the tag names the
kind on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

from streamrl.base.types import (
    Completion,
    EnvironmentResult,
    FinishReason,
    FloatArray,
    Record,
    RewardFailureKind,
    TokenArray,
    TrainingGroup,
)


class Message(Record, frozen=True, tag=True):
    """Base of everything that travels alone on a stream."""


# ---- weights -------------------------------------------------------------------------------------

HASH_MODULUS = 2**64  # state hashes of the parts of a version add up modulo this


class WeightSource(Record, frozen=True):
    """One trainer rank's part of a weight version, and the endpoint that serves it. ``manifest_digest`` identifies the
    manifest bytes; the manifest itself is fetched from ``endpoint``."""

    rank: int
    endpoint: str
    manifest_digest: str
    payload_bytes: int
    changed_elements: int
    total_elements: int


class Published(Record, frozen=True):
    """One rank's part of a published version. ``base_version`` None: an anchor. ``state_hash``: the rank's part."""

    source: WeightSource
    base_version: int | None
    state_hash: int


class WeightAnnouncement(Record, frozen=True):
    """A version that engines may stage. ``base_version`` None: an anchor, complete in itself.

    ``state_hash`` is the 64-bit additive hash of all weights at ``policy_version`` (sum over ranks mod 2**64).
    ``probe_logprobs``: what the trainer found for the tokens of ``config.canary`` by the version before this one
    (empty: it was not asked). ``peers``: endpoints of engines that have the version or are receiving it, which
    are to be asked before ``sources``, in this order (``weights.relay``)."""

    policy_version: int
    base_version: int | None
    state_hash: int
    sources: tuple[WeightSource, ...]
    probe_logprobs: tuple[float, ...] = ()
    peers: tuple[str, ...] = ()


def announcement_of(
    policy_version: int,
    parts: Sequence[Published | StepReport | AnchorPublished],
    probe_logprobs: tuple[float, ...] = (),
) -> WeightAnnouncement:
    """The announcement to engines of a version that every trainer rank has published; ``parts``: one of each rank."""
    return WeightAnnouncement(
        policy_version=policy_version,
        base_version=parts[0].base_version,
        state_hash=sum(part.state_hash for part in parts) % HASH_MODULUS,
        sources=tuple(part.source for part in parts),
        probe_logprobs=probe_logprobs,
    )


# ---- controller -> engine ------------------------------------------------------------------------


class PauseMode(StrEnum):
    """Handling of requests in flight (vLLM's words): abort returns them cut, keep freezes them."""

    ABORT = "abort"
    KEEP = "keep"


class Generate(Message, frozen=True):
    """Sample one completion. ``prefix_length`` tokens at the end of ``token_ids`` are an earlier part of
    the same completion (a resumed trajectory): they count against ``max_tokens`` already. ``kept`` tokens there were
    sampled with this seed by other weights: what of them these weights choose, too, need not be decoded. ``scored``: so
    many tokens there are answered, with their logprobs at temperature 1, and nothing is sampled after them.
    ``min_tokens``: of the whole completion, as ``max_tokens``. ``priority``: of requests that wait in an engine, the
    one with the least goes first (in runs with an environment). ``routed``: tokens at the start of ``token_ids`` whose
    experts are known; those of the others are answered by an engine that returns experts (None: of none)."""

    request_id: str
    token_ids: TokenArray
    max_tokens: int
    seed: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    prefix_length: int = 0
    kept: int = 0
    scored: int = 0
    priority: int = 0
    routed: int | None = 0


class Abort(Message, frozen=True):
    """Stop these requests; each still answers with ``Generated`` (finish reason abort)."""

    request_ids: tuple[str, ...]


EngineMethod = Literal["pause", "resume", "sleep", "wake", "stage", "commit", "checksums"]


class EngineCall(Message, frozen=True):
    """Call ``method`` of the engine (see ``contracts.WatchedEngine``) with these arguments."""

    order_id: int
    method: EngineMethod
    arguments: dict[str, WeightAnnouncement | PauseMode | int | bool] = {}


EngineOrder = Generate | Abort | EngineCall


# ---- engine -> controller ------------------------------------------------------------------------


class EngineReady(Message, frozen=True):
    """An engine's first message: what it is. ``kv_tokens``: room of its KV cache, ``pid``: of its host (0: unknown)."""

    engine: str
    policy_version: int
    max_model_len: int
    max_num_seqs: int
    tokenizer_digest: str = ""
    kv_tokens: int = 0
    pid: int = 0


class Generated(Message, frozen=True):
    """The completion of one request; with ``prefix_length`` only the new tokens."""

    request_id: str
    completion: Completion
    seconds: float


class GenerationFailed(Message, frozen=True):
    """One request could not be served; the engine goes on."""

    request_id: str
    reason: str


class OrderDone(Message, frozen=True):
    """Success of an order. ``state_hash``: after a commit, computed from the live weights."""

    order_id: int
    seconds: float
    state_hash: int = 0
    payload_bytes: int = 0
    checksums: dict[str, str] = {}


class OrderFailed(Message, frozen=True):
    """Failure of an order; the engine still holds what it held."""

    order_id: int
    reason: str


class EngineLoad(Message, frozen=True):
    """Sent a few times a second, and on change of state. From ``generated_tokens`` on counters since the start:
    ``preemptions`` for want of KV; ``decode_steps`` took ``decode_s`` and sampled ``decode_tokens``, one for each
    request that ran, and ``accepted_tokens`` more of those that speculative decoding drafted, ``drafted_tokens``."""

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


EngineEvent = EngineReady | Generated | GenerationFailed | OrderDone | OrderFailed | EngineLoad


# ---- controller -> trainer rank ------------------------------------------------------------------


class TrainGroup(Message, frozen=True):
    """A whole scored group of the open batch. May be trained on at once (streaming)."""

    group: TrainingGroup


class CloseBatch(Message, frozen=True):
    """The open batch is complete: step the optimizer and publish ``policy_version``.

    The totals are over all ranks, so every rank can check what it reduced. ``batches``: that are closed at once; as
    many steps are taken along their mean gradient, so that each sample moves the policy as far as any other (one step
    that is longer would move it along the momentum of earlier batches instead). ``engines_idle``: nothing is sampled
    until the next version is live, so the trainer may take the engines' cores. ``steps``: of the run, with which the
    schedule ends; ``learning_rate``: where it is not the recipe's."""

    batch_id: int
    policy_version: int
    groups: int
    samples: int
    trained_tokens: int
    batches: int = 1
    engines_idle: bool = False
    steps: int = 0
    learning_rate: float | None = None


class WeightsAcknowledged(Message, frozen=True):
    """Every engine holds ``policy_version`` live: the baseline of deltas may advance to it."""

    policy_version: int


class PublishAnchor(Message, frozen=True):
    """Publish the current version complete, whatever engines hold."""

    policy_version: int


class EnginesFreed(Message, frozen=True):
    """``count`` engines do nothing until the next round (0: all serve again): their cores are for training."""

    count: int


class TrainTogether(Message, frozen=True):
    """Every rank trains what waits, in as many rows as any of them has: each row is a collective."""


class SaveCheckpoint(Message, frozen=True):
    """Write trainer state and a Hugging Face directory under ``directory`` (atomic: a rename at the end).

    ``min_free_bytes``: refuse where less would be left on the disk. ``beside``: sha256 by name of files that control
    left for it on the file system (``atomic_files.stage_sidecar``): they may be larger than a message."""

    directory: str
    policy_version: int
    min_free_bytes: int = 0
    beside: dict[str, bytes] = {}


class ReadFile(Message, frozen=True):
    """Read the file at ``path``: a rank on another host must see what the controller wrote."""

    path: str


TrainingOrder = (
    TrainGroup
    | TrainTogether
    | CloseBatch
    | WeightsAcknowledged
    | PublishAnchor
    | EnginesFreed
    | SaveCheckpoint
    | ReadFile
)


# ---- trainer rank -> controller ------------------------------------------------------------------


class TrainerReady(Message, frozen=True):
    """First message of a rank. ``policy_version`` is what it holds (0: the initial weights). ``trained_parameters``:
    of adapters; 0: all are trained. ``together_tokens``: of all ranks, when they want to be ordered to train together
    before the close; 0: never. ``ranks_per_group``: number of consecutive ranks that train the same groups."""

    rank: int
    ranks: int
    policy_version: int
    parameters: int
    tokenizer_digest: str = ""
    trained_parameters: int = 0
    together_tokens: int = 0
    ranks_per_group: int = 1


class StepReport(Message, frozen=True):
    """One optimizer step, from one rank. ``metrics`` are reduced over ranks (equal on each). ``probe_logprobs``: by the
    weights before the step (empty: this rank was not asked, or trained nothing)."""

    rank: int
    batch_id: int
    policy_version: int
    base_version: int | None
    state_hash: int
    source: WeightSource
    metrics: dict[str, float]
    probe_logprobs: tuple[float, ...] = ()


class AnchorPublished(Message, frozen=True):
    """Answer to ``PublishAnchor``. ``base_version``: None where it is complete. The first answer may be a delta:
    on the checkpoint that engines load (-1), or on the version before it."""

    rank: int
    policy_version: int
    state_hash: int
    source: WeightSource
    base_version: int | None = None


class CheckpointSaved(Message, frozen=True):
    """Answer to ``SaveCheckpoint``."""

    rank: int
    directory: str
    policy_version: int
    seconds: float


class FileRead(Message, frozen=True):
    """Answer to ``ReadFile``. ``content``: of the file; None: it cannot be read."""

    content: bytes | None


TrainingEvent = TrainerReady | StepReport | AnchorPublished | CheckpointSaved | FileRead


# ---- controller <-> environment worker -----------------------------------------------------------
# An episode is numbered by the controller; its worker asks for turns, one after the other, and says once how it ended.


class ReturnedCall(Record, frozen=True):
    """A call of a tool that has returned ``text``. ``call``: its name and arguments as JSON; ``turn`` and ``place``: of
    the turn that wrote it, and among the calls of that turn; ``end``: a value of ``run.environments.tools.ToolEnd``."""

    turn: int
    place: int
    call: str
    text: str
    end: str
    seconds: float = 0.0


class BeginEpisode(Message, frozen=True):
    """Run an episode for a prompt with these ``columns``. ``trajectory``: its id, as text; ``seed``: of its own
    randomness; ``returned``: calls of an earlier run of the episode, which are not made again."""

    episode: int
    trajectory: str
    prompt_id: str
    columns: dict[str, Any]
    seed: int
    evaluation: bool = False
    returned: tuple[ReturnedCall, ...] = ()


class TurnSampled(Message, frozen=True):
    """The turn that the episode asked for, whole. ``turn``: its number, from 0; ``logprobs``: float32, of each token.
    Versions stay with the controller."""

    episode: int
    turn: int
    token_ids: TokenArray
    finish_reason: FinishReason
    logprobs: FloatArray


class StopEpisode(Message, frozen=True):
    """Cancel the episode: nothing is sampled for it any more, and nothing is expected of it."""

    episode: int


EnvironmentOrder = BeginEpisode | TurnSampled | StopEpisode


class EnvironmentReady(Message, frozen=True):
    """First message of an environment worker (again after a restart)."""

    worker: int


class SampleTurn(Message, frozen=True):
    """Sample a turn. ``appended``: token ids before it that are not trained; ``after``: the number of the turn that it
    goes on from (None: the newest; -1: none, it begins at the prompt); ``most_tokens``: of the turn (0: the recipe's
    ``sampling.max_tokens``)."""

    episode: int
    appended: TokenArray
    after: int | None = None
    most_tokens: int = 0


class CallReturned(Message, frozen=True):
    """A tool has returned: an episode that begins again does not call it again."""

    episode: int
    call: ReturnedCall


class EpisodeEnded(Message, frozen=True):
    """The end of an episode. ``kind``: it failed, as a reward function may, and ``message`` says why; ``finish``: the
    trajectory's finish reason, where that is not the one of its last turn; ``turns``: that the episode has taken."""

    episode: int
    result: EnvironmentResult = EnvironmentResult()
    kind: RewardFailureKind | None = None
    message: str = ""
    finish: FinishReason | None = None
    turns: int = 0


EnvironmentEvent = EnvironmentReady | SampleTurn | CallReturned | EpisodeEnded

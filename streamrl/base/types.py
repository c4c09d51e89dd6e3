"""Records of prompts, completions, trajectories and training samples, which every room uses. They travel between the
controller's process, the engine processes, the reward workers and the trainer ranks, and the journal stores them.

All structs are frozen. A step of the pipeline makes a record of another type (``Trajectory`` -> ``ScoredTrajectory`` ->
``TrainingSample``) and never sets a field later. Token ids and logprobs are ``array.array`` values: they compare by
value, cost four bytes an element, and travel as raw frames."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, field

if TYPE_CHECKING:
    TokenArray = array[int]
    FloatArray = array[float]
    ExpertArray = array[int]
    CountArray = array[int]
else:  # array.array cannot be subscripted at run time in Python 3.11, and msgspec reads annotations
    TokenArray = array
    FloatArray = array
    ExpertArray = array
    CountArray = array


def token_array(values: Any = ()) -> TokenArray:
    """Token ids as int32."""
    return array("i", values)


def count_array(values: Any = ()) -> CountArray:
    """Counts as uint16."""
    return array("H", values)


def float_array(values: Any = ()) -> FloatArray:
    """Logprobs as float32, with the bits that the engine computed."""
    return array("f", values)


JsonObject = dict[str, Any]
"""A decoded JSON object or table of TOML."""

JsonMapping = Mapping[str, Any]
"""A ``JsonObject`` that is only read."""

JsonObjects = Sequence[JsonMapping]
"""JSON objects that are only read: messages of a chat, or schemas of tools."""

Texts = tuple[str, ...]
"""Names, lines or keys in their order."""

TextsByName = dict[str, str]
"""A text for each name."""

TextMapping = Mapping[str, str]
"""``TextsByName`` that are only read."""

Shape = tuple[int, ...]
"""Sizes of the sides of a tensor."""

AnyFunction = Callable[..., Any]
"""A function with any parameters, such as one of the user's."""

Clock = Callable[[], float]
"""Returns a time in seconds."""

Metrics = dict[str, float]
"""Values of metrics by name."""

MetricsMapping = Mapping[str, float]
"""``Metrics`` that are only read."""

WeightedRewards = dict[str, tuple[float, float]]
"""(weight, value) of rewards by name."""


class FinishReason(StrEnum):
    """Reason to stop sampling: the engine's, or ``turns`` for an episode that reached ``environment.max_turns``.
    ``DropReason`` is the reason not to train."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TURNS = "turns"


class DropReason(StrEnum):
    """Control's reason not to train a trajectory. ``lost_race``: enough siblings, or enough prompts, were faster.
    ``cut``: the batch was full without the group of the trajectory, which is sampled again from its start."""

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    REWARD_FAILED = "reward_failed"
    ENGINE_FAILED = "engine_failed"
    LOST_RACE = "lost_race"
    BATCH_FULL = "cut"
    CANCELLED = "cancelled"
    DRAINED = "drained"


class TokenDistribution(Struct, frozen=True, kw_only=True):
    """Settings that change the probabilities of the next token, with the names and values of vLLM's ``SamplingParams``.

    The engine samples by them, and ``learning.objective.logprobs`` computes the same distribution in the trainer."""

    temperature: Annotated[float, Meta(gt=0), "sampling temperature, which training uses, too"] = 1.0
    top_p: Annotated[
        float, Meta(gt=0, le=1), "sample from the most likely tokens that together have this probability"
    ] = 1.0
    top_k: Annotated[int, Meta(ge=0), "sample from this number of the most likely tokens (0: all)"] = 0
    min_p: Annotated[
        float,
        Meta(ge=0, lt=1),
        "sample from tokens with at least this share of the probability of the most likely token",
    ] = 0.0

    @property
    def removes_tokens(self) -> bool:
        """Whether some tokens of a step are never sampled (``removed_tokens``)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


UNCHANGED = TokenDistribution()
"""The model's own distribution: temperature 1, and no token is removed."""


class SamplingSettings(TokenDistribution, frozen=True, kw_only=True):
    """All settings by which a completion is sampled: ``TokenDistribution``, and where a completion ends.

    The recipe's ``[sampling]`` and a request to an engine (``messages.Generate``) inherit the fields, vLLM's
    ``SamplingParams`` get each of them by name, and the trainer ranks have them in ``TrainerOptions.sampling``."""

    max_tokens: Annotated[int, Meta(gt=0), "limit of the tokens of a completion"] = 512
    min_tokens: Annotated[int, Meta(ge=0), "number of tokens before which a completion does not end"] = 0
    stop: Annotated[Texts, "texts that end a completion; their tokens are its last ones, and are trained"] = ()


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of records on a stream or in the journal: add a field with a default at the end, never reorder or reuse a
    name."""


class Prompt(Record, frozen=True):
    """One row of the prompts: token ids, and the columns for rewards and environments.

    ``set``: name of its training set (empty: the run has a single source);
    ``rewards``: names of the rewards that score it (empty: all);
    ``max_tokens``: limit of the tokens of a completion, besides that of the run (0: none);
    ``environment``: name of its environment in ``Environment.by_name``, where an environment writes it."""

    prompt_id: str
    token_ids: TokenArray
    columns: JsonObject = {}
    set: str = ""
    rewards: Texts = ()
    max_tokens: int = 0
    environment: str = ""

    def token_limit(self, limit: int) -> int:
        """Return the limit of the tokens of a completion. ``limit``: limit of the run."""
        return min(self.max_tokens or limit, limit)


class TrajectoryId(Record, frozen=True, order=True):
    """Identity of one trajectory. ``sample``: number within the group, from 0; ``attempt``: number of earlier launches
    of the prompt."""

    prompt_id: str
    group_id: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.group_id}.{self.sample}.{self.attempt}"


class VersionSpan(Record, frozen=True):
    """Tokens ``[start, end)`` of a completion, sampled under one policy version."""

    start: int
    end: int
    policy_version: int


class Turn(Record, frozen=True):
    """A turn of the model, as the code of an episode gets it. Policy versions of the tokens stay in the controller.

    ``number``: number of the turn in its trajectory, from 0;
    ``token_ids``: sampled token ids, the end token included;
    ``logprobs``: float32 logprobs of the token ids (empty: they are not known here)."""

    number: int
    token_ids: TokenArray
    finish_reason: FinishReason
    logprobs: FloatArray = field(default_factory=float_array)


class RoutedTokens(Record, frozen=True):
    """Experts that the routers of an engine chose for the tokens ``[start, stop)`` of a sequence. Positions count from
    the start of the prompt. ``shape``: (layers, top_k), with all layers of the model; ``experts``: [tokens, layers,
    top_k], uint8 (uint16 for a model of more than 256 experts), 0 in layers without experts."""

    start: int
    shape: tuple[int, int]
    experts: ExpertArray

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.experts) // (self.shape[0] * self.shape[1])


def routed_within(routed: Iterable[RoutedTokens], first: int, stop: int, *, moved: int) -> tuple[RoutedTokens, ...]:
    """The parts of ``routed`` within ``[first, stop)``, with ``moved`` added to their positions."""
    parts = []
    for span in routed:
        begin = max(span.start, first)
        end = min(span.stop, stop)
        width = span.shape[0] * span.shape[1]
        if begin < end:
            experts = span.experts[(begin - span.start) * width : (end - span.start) * width]
            parts.append(RoutedTokens(start=begin + moved, shape=span.shape, experts=experts))
    return tuple(parts)


class KeptSets(Record, frozen=True):
    """Kept set of each sampled token: the tokens that top-k, top-p and min-p left to choose from.

    ``counts``: uint16, size of the set of each token (0: the engine did not return it). It may be shorter than the
    tokens: the remaining tokens have no set;
    ``token_ids``: the tokens of all sets, one set after the other."""

    counts: CountArray = field(default_factory=count_array)
    token_ids: TokenArray = field(default_factory=token_array)

    def followed_by(self, following: KeptSets, tokens: int) -> KeptSets:
        """Return these sets with ``following`` appended. ``tokens``: number of tokens that these sets stand for."""
        if not following.counts:
            return self
        missing = count_array([0]) * (tokens - len(self.counts))
        return KeptSets(counts=self.counts + missing + following.counts, token_ids=self.token_ids + following.token_ids)

    def within(self, first: int, stop: int) -> KeptSets:
        """Return the sets of the sampled tokens with the numbers ``[first, stop)``."""
        start = sum(self.counts[:first])
        counts = self.counts[first:stop]
        return KeptSets(counts=counts, token_ids=self.token_ids[start : start + sum(counts)])


NO_KEPT_SETS = KeptSets()


class CachedPrefix(Record, frozen=True):
    """Tokens of a request's prompt that the prefix cache of its engine held, in blocks of ``block_tokens``. ``pauses``:
    number of pauses of the engine before the request; blocks that were cached before a pause are not used after it."""

    tokens: int
    block_tokens: int
    pauses: int


class Replayed(Record, frozen=True, kw_only=True):
    """Decisions of the engine that the trainer reuses: fields of ``Completion``, ``Segment`` and ``TrainingSample``.

    ``routed``: experts that the engine's router chose for each token (empty: the engine returns no experts);
    ``kept_sets``: kept set of each sampled token."""

    routed: tuple[RoutedTokens, ...] = ()
    kept_sets: KeptSets = NO_KEPT_SETS


class Completion(Replayed, frozen=True):
    """Tokens that an engine sampled for one request, or the joined tokens of several requests for one completion.

    ``behavior_logprobs``: logprob of each of ``token_ids``;
    ``version_spans``: policy version of each token, as spans in order;
    ``cached``: prompt tokens from the prefix cache (None: not reported by the engine, or several requests);
    ``routed``: experts of the prompt's tokens and of the sampled tokens (empty: the engine returns no experts);
    ``kept_sets``: kept set of each of ``token_ids``."""

    token_ids: TokenArray
    behavior_logprobs: FloatArray
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cached: CachedPrefix | None = None


class Segment(Replayed, frozen=True):
    """One turn of the model or of the environment in a trajectory.

    ``trained``: loss mask of the turn, True for a turn of the model;
    ``behavior_logprobs``: logprob of each token; empty for a turn of the environment;
    ``follows``: index of the segment that this one continues (None: the segment before; -1: the prompt);
    ``routed``: experts that the engine returned with this turn, of its tokens and of earlier ones;
    ``kept_sets``: kept set of each token; empty for a turn of the environment."""

    token_ids: TokenArray
    trained: bool
    behavior_logprobs: FloatArray = field(default_factory=float_array)
    version_spans: tuple[VersionSpan, ...] = ()
    follows: int | None = None


TurnTimes = tuple[int, float, int, float]
"""(tokens that the environment appended before a turn, seconds in the environment, sampled tokens of the turn, seconds
of its sampling). The last entry of a trajectory has the seconds in the environment after the last turn, and no tokens.
"""


class EnvironmentResult(Record, frozen=True):
    """Result of an episode. Made by the environment worker; the controller adds ``turns``.

    ``reward``: reward of the environment (None: the environment gives none);
    ``seconds``: time of the episode outside of the engines;
    ``calls``: number of tool calls, by their outcome (``run.environments.tools.ToolEnd``);
    ``notes``: further counts by name, such as special tokens that were broken;
    ``turn_rewards``: parts of ``reward``, by turn (empty: no turn has a reward of its own);
    ``turns``: times of the turns, by the controller's clock;
    ``remark``: words about ``reward``, such as the reason why there is none."""

    reward: float | None = None
    seconds: float = 0.0
    calls: dict[str, int] = {}
    notes: dict[str, int] = {}
    turn_rewards: tuple[float, ...] = ()
    turns: tuple[TurnTimes, ...] = ()
    remark: str = ""


class SampledTrajectory(Record, frozen=True):
    """Tokens of one complete attempt at a prompt: base of ``Trajectory`` and of its record in the journal.

    ``segments``: turns in the order of sampling. They make one sequence, or, by ``Segment.follows``, a tree: each path
    from the prompt to a leaf is a training sequence. If an environment wrote the first segment, it is not trained;
    ``rollout_seconds``: time in the engines;
    ``environment``: result of the episode (None: the run has no environment)."""

    id: TrajectoryId
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    rollout_seconds: float = 0.0
    environment: EnvironmentResult | None = None


class Trajectory(SampledTrajectory, frozen=True, kw_only=True):
    """A complete attempt at a prompt. Made by ``stages.episodes`` in the controller, sent to a reward worker.
    ``evaluation``: whether the prompt is held out."""

    prompt: Prompt
    evaluation: bool = False

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.trained)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Rewards that the environment gave the turns; empty: no turn has one."""
        if self.environment is None:
            return ()
        return self.environment.turn_rewards

    @property
    def oldest_version(self) -> int:
        """Smallest policy version that sampled a token of the trajectory."""
        return min((span.policy_version for segment in self.segments for span in segment.version_spans), default=0)

    @property
    def newest_version(self) -> int:
        """Largest policy version that sampled a token of the trajectory."""
        return max((span.policy_version for segment in self.segments for span in segment.version_spans), default=0)


class RewardFailureKind(StrEnum):
    """Kind of a failed reward call. The sample is not trained; a failure never becomes a reward of 0."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WRONG_TYPE = "wrong_type"


class RewardCall(Record, frozen=True):
    """Outcome of one reward function for one sample. Made in the reward worker.

    ``function``: name of the reward;
    ``waited_s``: seconds between the request and the start of the call;
    ``limit_s``: time limit of the call;
    ``adapted``: whether the limit was learnt from earlier calls;
    ``value``: value of the reward (None: not applicable, or ``failure`` is set);
    ``failure``: kind of failure (None: the call succeeded)."""

    function: str
    seconds: float
    waited_s: float = 0.0
    limit_s: float = 0.0
    adapted: bool = False
    value: float | None = None
    failure: RewardFailureKind | None = None


class RewardRun(Record, frozen=True, kw_only=True):
    """Cost of the calls of the reward functions on one trajectory: base of its reward and of a failure.

    ``reward_seconds``: time of the reward functions;
    ``calls``: calls of the reward functions;
    ``reward_version``: version of the set of reward functions, which can be changed while the run goes on."""

    reward_seconds: float = 0.0
    calls: tuple[RewardCall, ...] = ()
    reward_version: int = 0


class TrajectoryReward(RewardRun, frozen=True):
    """Reward of a trajectory.

    ``reward``: combined reward, from which the advantage is computed;
    ``reward_parts``: value of each function by name; a function that returns named parts adds ``function.part``;
    ``separate_rewards``: (weight, value) of each reward that is normalised on its own within the group (GDPO);
    ``turn_rewards``: parts of ``reward``, by turn (empty: no turn has a reward of its own);
    ``token_values``: values of the sampled tokens by name, such as the logprobs of a teacher, or the numbers that a
    reward gave to steps or tokens (``number_names``): float32, an entry for each token of the sampled segments, in
    their order."""

    reward: float
    reward_parts: dict[str, float] = {}
    separate_rewards: WeightedRewards = {}
    turn_rewards: tuple[float, ...] = ()
    token_values: dict[str, FloatArray] = {}


class ScoredTrajectory(TrajectoryReward, frozen=True, kw_only=True, tag=True):
    """A trajectory with its reward. Made by ``stages.reward`` in the controller from the answers of reward workers."""

    trajectory: Trajectory


class RewardFailure(RewardRun, frozen=True, tag=True):
    """A trajectory whose reward could not be computed. Made where ``ScoredTrajectory`` is made.

    ``function``: name of the reward that failed;
    ``kind``, ``message``: reason of the failure;
    ``policy``: the recipe's ``on_failure`` or ``on_timeout`` (``drop_sample``, ``drop_group`` or ``stop``)."""

    trajectory: Trajectory
    function: str
    kind: RewardFailureKind
    message: str
    policy: str = "drop_sample"


TRAINED = b"\1"
IMITATED = b"\2"


class TrainingSample(Replayed, frozen=True):
    """One trajectory as the trainer gets it: prompt and segments joined, with a loss mask. Made in the controller
    (``to_training_sample``), sent to a trainer rank within a ``TrainingGroup``.

    ``token_ids``: int32 [T], the prompt first;
    ``loss_mask``: uint8 [T], 1 (``TRAINED``) for a token that is trained, 2 (``IMITATED``) for one whose cross-entropy
    is a part of the loss;
    ``behavior_logprobs``: float32 [T], 0 for a token that is not trained;
    ``oldest_version``, ``newest_version``: bounds of the policy versions of the trained tokens;
    ``truncated``: whether the trajectory reached its limit of tokens;
    ``separate_rewards``: (weight, value) of each reward that is compared alone (empty: ``reward`` is compared);
    ``version_spans``: policy version of each trained token, by position (empty: all have the same);
    ``temperature``: sampling temperature (None: the recipe's);
    ``sequence_starts``: position at which each sequence of a tree begins, with the prompt again (empty: one sequence);
    ``turn_rewards``: reward of each turn, by number of the turn; later turns earned 0;
    ``turns``: (number, sampled tokens) of each turn, in the order of ``token_ids``;
    ``routed``: experts by position; where two entries have the same token, the first counts;
    ``token_values``: values of the trained tokens by name, an entry for each, in the order of ``token_ids``;
    ``max_tokens``: limit of its sampled tokens (0: that of the run);
    ``kept_sets``: kept set of each trained token, in the order of ``token_ids``."""

    id: TrajectoryId
    token_ids: TokenArray
    loss_mask: bytes
    behavior_logprobs: FloatArray
    reward: float
    oldest_version: int
    newest_version: int
    truncated: bool = False
    separate_rewards: WeightedRewards = {}
    version_spans: tuple[VersionSpan, ...] = ()
    temperature: float | None = None
    sequence_starts: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()
    token_values: dict[str, FloatArray] = {}
    max_tokens: int = 0

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens under the loss."""
        return self.loss_mask.count(TRAINED)

    @property
    def imitated_tokens(self) -> int:
        """Number of tokens whose cross-entropy is a part of the loss."""
        return self.loss_mask.count(IMITATED)


class ClosedBatch(Record, frozen=True):
    """A batch to which no further group comes, and the optimizer step that trains it.

    ``policy_version``: version that the trainer holds after the step;
    ``groups``, ``samples``, ``trained_tokens``: totals over all ranks, which every rank compares with the sums that it
    has reduced;
    ``batches``: number of regular batches that are closed at once, more than 1 only for a long round; the rank takes so
    many optimizer steps with their mean gradient (in one step of so many times the rate, the momentum of earlier
    batches would be scaled as well);
    ``engines_idle``: whether engines wait for the next version; the trainer may then use their CPU cores;
    ``steps``: total steps of the run, for the schedule of the learning rate;
    ``learning_rate``: learning rate in place of the recipe's (None: the recipe's)."""

    batch_id: int
    policy_version: int
    groups: int
    samples: int
    trained_tokens: int
    batches: int = 1
    engines_idle: bool = False
    steps: int = 0
    learning_rate: float | None = None


class Baseline(Record, frozen=True):
    """Discounted mean of the earlier rewards of a prompt, before a group of it is trained.

    ``total``, ``weight``: discounted sum of the rewards, and discounted number of them;
    ``deviation``: standard deviation of the differences between rewards and their baselines in earlier batches, above
    0."""

    total: float
    weight: float
    deviation: float


class TrainingGroup(Record, frozen=True):
    """The samples of one prompt, whose rewards are compared. Groups of a batch may differ in size. ``baseline``:
    earlier rewards of the prompt, where the objective tracks them."""

    group_id: int
    batch_id: int
    samples: tuple[TrainingSample, ...]
    baseline: Baseline | None = None


def to_training_sample(
    scored: ScoredTrajectory, temperature: float | None = None, *, imitates_observations: bool = False
) -> TrainingSample:
    """Join prompt and segments of a scored trajectory, sequence after sequence, with a loss mask. Raises ``ValueError``
    for a segment that follows a later one.

    ``temperature``: sampling temperature (None: the recipe's);
    ``imitates_observations``: whether tokens that the environment wrote behind a sampled turn are ``IMITATED``, in the
    first sequence that has them."""
    trajectory = scored.trajectory
    prompt = scored.trajectory.prompt.token_ids
    token_ids = token_array()
    logprobs = float_array()
    loss_mask = bytearray()
    spans: list[VersionSpan] = []
    starts: list[int] = []
    turns: list[tuple[int, int]] = []
    routed: list[RoutedTokens] = []
    kept_sets = NO_KEPT_SETS
    numbers = list(accumulate(segment.trained for segment in trajectory.segments))
    lengths = (len(segment.token_ids) if segment.trained else 0 for segment in trajectory.segments)
    places = list(accumulate(lengths, initial=0))
    token_values = {name: float_array() for name in scored.token_values}
    sampled = {index for index, segment in enumerate(trajectory.segments) if segment.trained and segment.token_ids}
    observed: set[int] = set()
    for path, trained in paths_of(trajectory):
        starts.append(len(token_ids))
        token_ids.extend(prompt)
        loss_mask.extend(bytes(len(prompt)))
        logprobs.extend(float_array([0.0]) * len(prompt))
        for place, index in enumerate(path):
            segment = trajectory.segments[index]
            before = len(token_ids)
            count = len(segment.token_ids)
            token_ids.extend(segment.token_ids)
            if index not in trained:
                imitated = (
                    imitates_observations
                    and not segment.trained
                    and index not in observed
                    and any(earlier in sampled for earlier in path[:place])
                )
                observed.add(index)
                loss_mask.extend(count * (IMITATED if imitated else bytes(1)))
                logprobs.extend(float_array([0.0]) * count)
                continue
            loss_mask.extend(TRAINED * count)
            logprobs.extend(segment.behavior_logprobs)
            kept_sets = kept_sets.followed_by(segment.kept_sets, sum(tokens for _, tokens in turns))
            turns.append((numbers[index] - 1, count))
            for name, values in scored.token_values.items():
                token_values[name].extend(values[places[index] : places[index] + count])
            spans += [
                VersionSpan(start=before + span.start, end=before + span.end, policy_version=span.policy_version)
                for span in segment.version_spans
            ]
        routed += routed_within(
            (part for index in path for part in trajectory.segments[index].routed),
            0,
            len(token_ids) - starts[-1],
            moved=starts[-1],
        )
    if trajectory.oldest_version == trajectory.newest_version:
        spans = []
    if len(starts) == 1:
        starts = []
    return TrainingSample(
        id=trajectory.id,
        token_ids=token_ids,
        loss_mask=bytes(loss_mask),
        behavior_logprobs=logprobs,
        reward=scored.reward,
        oldest_version=trajectory.oldest_version,
        newest_version=trajectory.newest_version,
        truncated=trajectory.finish_reason is FinishReason.LENGTH,
        separate_rewards=scored.separate_rewards,
        version_spans=tuple(spans),
        temperature=temperature,
        sequence_starts=tuple(starts),
        turn_rewards=scored.turn_rewards,
        turns=tuple(turns),
        routed=tuple(routed),
        token_values=token_values,
        # The prompt of an episode has no tokens, and its limit is of a turn.
        max_tokens=trajectory.prompt.max_tokens if prompt else 0,
        kept_sets=kept_sets,
    )


def paths_of(trajectory: Trajectory) -> list[tuple[list[int], set[int]]]:
    """Indices of the segments from the prompt to each leaf, and the subset that is trained in this sequence: a sampled
    segment is trained in the first sequence that has it. A sequence that trains nothing is left out, unless it is the
    only one.

    Sequences are in the order of their last sampled turn, so that the last turn of the trajectory ends the last one."""
    parents = [
        index - 1 if segment.follows is None else segment.follows for index, segment in enumerate(trajectory.segments)
    ]
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise ValueError(
                f"segment {index} of trajectory {trajectory.id} follows {parent}: name an earlier one, or -1"
            )
    sampled = {index for index, segment in enumerate(trajectory.segments) if segment.trained and segment.token_ids}
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    sequences: list[tuple[list[int], set[int]]] = []
    untrained = set(sampled)
    for path in sorted(paths, key=lambda path: max(sampled.intersection(path), default=-1)):
        if trained := untrained.intersection(path):
            sequences.append((path, trained))
            untrained -= trained
    if not sequences:
        sequences.append((next(iter(paths), []), set()))
    return sequences

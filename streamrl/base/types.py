"""The vocabulary: every record that crosses a stage, a stream or a process.

All structs are frozen. A stage changes the type (``Trajectory`` -> ``ScoredTrajectory`` ->
``TrainingSample``); it never fills in blanks. Token ids and logprobs are ``array.array``
values: they compare by value, cost four bytes an element, and travel as raw frames."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    TokenArray = array[int]
    FloatArray = array[float]
    ExpertArray = array[int]
else:  # array.array cannot be subscripted at run time in Python 3.11, and msgspec reads annotations
    TokenArray = array
    FloatArray = array
    ExpertArray = array


def token_array(values: Any = ()) -> TokenArray:
    """Token ids as int32."""
    return array("i", values)


def float_array(values: Any = ()) -> FloatArray:
    """Logprobs as float32: what the engine computed, bit for bit."""
    return array("f", values)


class FinishReason(StrEnum):
    """The reason to stop sampling: the engine's, or ``turns``, where an episode had as many as it may have. Never mixed
    with ``DropReason``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TURNS = "turns"


class DropReason(StrEnum):
    """Control's reason not to train a trajectory. ``lost_race``: enough siblings, or enough prompts, were faster.
    ``cut``: its group was not in the batch when that was full; it is sampled again from its start."""

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    REWARD_FAILED = "reward_failed"
    ENGINE_FAILED = "engine_failed"
    LOST_RACE = "lost_race"
    CUT = "cut"
    CANCELLED = "cancelled"
    DRAINED = "drained"


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the records on a wire: append fields with defaults, never reorder or reuse a name."""


class Prompt(Record, frozen=True):
    """One task instance: token ids and the dataset columns its reward needs."""

    prompt_id: str
    token_ids: TokenArray
    columns: dict[str, Any] = {}


class TrajectoryId(Record, frozen=True, order=True):
    """Identity of one trajectory: the attempt at one sample of one group of one prompt. ``sample`` counts
    0..group_size-1 inside the group; ``attempt`` grows when a trajectory is drawn again from its start."""

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


class RoutedTokens(Record, frozen=True):
    """Experts that the routers of an engine chose for the tokens ``[start, stop)`` of a sequence, whose prompt comes
    first. ``shape``: (layers, top_k), of all layers of the model; ``experts``: [tokens, layers, top_k], uint8 (uint16
    of models with more than 256 experts), 0 in layers without experts."""

    start: int
    shape: tuple[int, int]
    experts: ExpertArray

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.experts) // (self.shape[0] * self.shape[1])


def routed_within(routed: Iterable[RoutedTokens], first: int, stop: int, *, moved: int) -> tuple[RoutedTokens, ...]:
    """The parts of ``routed`` in ``[first, stop)``, ``moved`` by so many positions."""
    found = []
    for one in routed:
        begin = max(one.start, first)
        end = min(one.stop, stop)
        width = one.shape[0] * one.shape[1]
        if begin < end:
            experts = one.experts[(begin - one.start) * width : (end - one.start) * width]
            found.append(RoutedTokens(start=begin + moved, shape=one.shape, experts=experts))
    return tuple(found)


class CachedPrefix(Record, frozen=True):
    """Tokens of a request's prompt that the prefix cache of its engine held, in blocks of ``block_tokens``. ``pauses``:
    of the engine, before the request: nothing that was cached before a pause is used after it."""

    tokens: int
    block_tokens: int
    pauses: int


class Completion(Record, frozen=True):
    """One sampled continuation. ``behavior_logprobs[i]`` belongs to ``token_ids[i]``. ``cached``: None: the engine does
    not say, or it was sampled in parts. ``routed``: of the request's tokens and of these, by their position in both;
    empty: the engine returns no experts."""

    token_ids: TokenArray
    behavior_logprobs: FloatArray
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cached: CachedPrefix | None = None
    routed: tuple[RoutedTokens, ...] = ()


class Segment(Record, frozen=True):
    """One turn of a trajectory. ``trained`` is its loss mask: model turns True, environment turns False.
    ``behavior_logprobs`` is empty for an environment turn. ``follows``: index of the segment that it goes on from
    (None: the one before it; -1: the prompt). ``routed``: experts that became known with it, of its own tokens and of
    those before it, by their position in the sequence from the prompt on."""

    token_ids: TokenArray
    trained: bool
    behavior_logprobs: FloatArray = msgspec.field(default_factory=float_array)
    version_spans: tuple[VersionSpan, ...] = ()
    follows: int | None = None
    routed: tuple[RoutedTokens, ...] = ()


TurnTimes = tuple[int, float, int, float]
"""Tokens that the environment appended, seconds in it, tokens that were sampled then, and seconds of that. The last of
a trajectory is of what the environment did after its last turn: no tokens."""


class EnvironmentResult(Record, frozen=True):
    """The result of an episode. ``reward``: None: it gives none; ``seconds``: in which the
    episode was not in the engines; ``calls``: of tools, counted by their end; ``notes``: what was counted beside, such
    as special tokens that were broken. ``turn_rewards``: parts of ``reward``, by turn; empty: no turn has one;
    ``turns``: by the controller's clock."""

    reward: float | None = None
    seconds: float = 0.0
    calls: dict[str, int] = {}
    notes: dict[str, int] = {}
    turn_rewards: tuple[float, ...] = ()
    turns: tuple[TurnTimes, ...] = ()


class Trajectory(Record, frozen=True):
    """The whole attempt at a prompt: one or more segments in the order of sampling. They are one sequence, or, where
    ``Segment.follows`` says so, a tree with a sequence to each leaf. The first is not trained where an environment
    wrote it. ``environment``: None: the run has none."""

    id: TrajectoryId
    prompt: Prompt
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    rollout_seconds: float = 0.0
    evaluation: bool = False
    environment: EnvironmentResult | None = None

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(s.token_ids) for s in self.segments if s.trained)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Rewards that its environment gave its turns; empty: none has one."""
        return self.environment.turn_rewards if self.environment else ()

    @property
    def oldest_version(self) -> int:
        """Smallest policy version that sampled one of its tokens."""
        return min((v.policy_version for s in self.segments for v in s.version_spans), default=0)

    @property
    def newest_version(self) -> int:
        """Largest policy version that sampled one of its tokens."""
        return max((v.policy_version for s in self.segments for v in s.version_spans), default=0)


class RewardFailureKind(StrEnum):
    """Kinds of failed reward calls. A failure is absent from training; it never becomes a 0."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WRONG_TYPE = "wrong_type"


class RewardCall(Record, frozen=True):
    """Outcome of one reward function for one sample. ``value`` None: not applicable, or ``failure`` says why.
    ``waited_s``: between the request and the start of the call; ``limit_s``: its time limit, ``adapted`` if that was
    learnt from earlier calls."""

    function: str
    seconds: float
    waited_s: float = 0.0
    limit_s: float = 0.0
    adapted: bool = False
    value: float | None = None
    failure: RewardFailureKind | None = None


class ScoredTrajectory(Record, frozen=True, tag=True):
    """A trajectory with the reward that the user's functions returned for it. ``reward_parts``: by function, and by
    ``function.part`` where one returned named parts. ``separate_rewards``: weight and value of each, where each is
    compared with its siblings' alone. ``reward_version``: of the set of functions that scored it. ``turn_rewards``:
    parts of ``reward``, by turn; empty: no turn has one."""

    trajectory: Trajectory
    reward: float
    reward_parts: dict[str, float] = {}
    reward_seconds: float = 0.0
    calls: tuple[RewardCall, ...] = ()
    reward_version: int = 0
    separate_rewards: dict[str, tuple[float, float]] = {}
    turn_rewards: tuple[float, ...] = ()


class RewardFailure(Record, frozen=True, tag=True):
    """A trajectory whose reward could not be computed, with the reason. ``policy``: what the recipe wants then
    (``drop_sample``, ``drop_group`` or ``stop``)."""

    trajectory: Trajectory
    function: str
    kind: RewardFailureKind
    message: str
    reward_seconds: float = 0.0
    calls: tuple[RewardCall, ...] = ()
    reward_version: int = 0
    policy: str = "drop_sample"


class TrainingSample(Record, frozen=True):
    """Input of the trainer: one trajectory, prompt and segments joined, with a loss mask.

    ``token_ids``: int32 [T] (prompt first); ``loss_mask``: uint8 [T], 1 where the token is trained;
    ``behavior_logprobs``: float32 [T], 0 where ``loss_mask`` is 0. ``oldest_version`` and ``newest_version`` bound the
    policy versions of its trained tokens; where they differ, ``version_spans`` says which of ``token_ids`` is of which.
    ``separate_rewards``: weight and value of each reward that is compared alone; empty: ``reward`` is compared.
    ``temperature``: that sampled it, where it is not the recipe's. ``sequence_starts``: where each of several sequences
    begins in ``token_ids``, with the prompt again; empty: there is one. ``turns``: number and sampled tokens of each
    turn, in the order of ``token_ids``. ``turn_rewards``: by number of the turn; a turn past its end earned 0.
    ``routed``: by position in ``token_ids``; of a token that is in two, the first holds."""

    id: TrajectoryId
    token_ids: TokenArray
    loss_mask: bytes
    behavior_logprobs: FloatArray
    reward: float
    oldest_version: int
    newest_version: int
    truncated: bool = False
    separate_rewards: dict[str, tuple[float, float]] = {}
    version_spans: tuple[VersionSpan, ...] = ()
    temperature: float | None = None
    sequence_starts: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()
    routed: tuple[RoutedTokens, ...] = ()

    @property
    def trained_tokens(self) -> int:
        """Number of tokens under the loss."""
        return self.loss_mask.count(1)


class TrainingGroup(Record, frozen=True):
    """The samples of one prompt that share a baseline. Group sizes may differ within a batch."""

    group_id: int
    batch_id: int
    samples: tuple[TrainingSample, ...]


def to_training_sample(scored: ScoredTrajectory, temperature: float | None = None) -> TrainingSample:
    """Join prompt and segments of a scored trajectory, sequence after sequence, with a loss mask. Raises
    ``ValueError`` where a segment follows one that does not come before it."""
    trajectory = scored.trajectory
    prompt = scored.trajectory.prompt.token_ids
    token_ids = token_array()
    logprobs = float_array()
    loss_mask = bytearray()
    spans: list[VersionSpan] = []
    starts: list[int] = []
    turns: list[tuple[int, int]] = []
    routed: list[RoutedTokens] = []
    numbers = list(accumulate(segment.trained for segment in trajectory.segments))
    for path, trained in _sequences(trajectory):
        starts.append(len(token_ids))
        token_ids.extend(prompt)
        loss_mask.extend(bytes(len(prompt)))
        logprobs.extend(float_array([0.0]) * len(prompt))
        for index in path:
            segment = trajectory.segments[index]
            before = len(token_ids)
            count = len(segment.token_ids)
            token_ids.extend(segment.token_ids)
            loss_mask.extend((b"\x01" if index in trained else b"\x00") * count)
            logprobs.extend(segment.behavior_logprobs if index in trained else float_array([0.0]) * count)
            turns += [(numbers[index] - 1, count)] if index in trained else ()
            spans += [
                VersionSpan(start=before + span.start, end=before + span.end, policy_version=span.policy_version)
                for span in segment.version_spans
                if index in trained
            ]
        known = (one for index in path for one in trajectory.segments[index].routed)
        routed += routed_within(known, 0, len(token_ids) - starts[-1], moved=starts[-1])
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
        version_spans=tuple(spans) if trajectory.oldest_version < trajectory.newest_version else (),
        temperature=temperature,
        sequence_starts=tuple(starts) if len(starts) > 1 else (),
        turn_rewards=scored.turn_rewards,
        turns=tuple(turns),
        routed=tuple(routed),
    )


def _sequences(trajectory: Trajectory) -> list[tuple[list[int], set[int]]]:
    """Segments from the prompt to each leaf, and those among them that are trained there: each sampled one in the first
    sequence that holds it. A sequence that trains nothing is left out, unless there is no other.

    In the order of the last turn that was sampled in each: the last one of the trajectory ends the last sequence."""
    before = [index - 1 if one.follows is None else one.follows for index, one in enumerate(trajectory.segments)]
    for index, parent in enumerate(before):
        if not -1 <= parent < index:
            raise ValueError(
                f"segment {index} of trajectory {trajectory.id} follows {parent}: name an earlier one, or -1"
            )
    sampled = {index for index, one in enumerate(trajectory.segments) if one.trained and one.token_ids}
    paths = []
    for leaf in sorted(set(range(len(before))) - set(before)):
        path = [leaf]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        paths.append(path[::-1])
    found: list[tuple[list[int], set[int]]] = []
    for path in sorted(paths, key=lambda path: max(sampled.intersection(path), default=-1)):
        if trained := sampled.intersection(path).difference(*(own for _, own in found)):
            found.append((path, trained))
    return found or [(paths[0] if paths else [], set())]

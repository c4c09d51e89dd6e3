"""Packing of training samples into rows of tokens, in an order that does not depend on arrival.

``updates`` and ``scoring`` call it in each trainer rank. Only tokens that a trained token is predicted from are packed:
the last trained token and all tokens behind it are left out. Siblings that follow each other in a row share their
longest common beginning without trained tokens: the beginning becomes a sequence (the prefix), whose last token
predicts the first token of each sibling. This is exact: every token sees the same tokens at the same positions as in a
row of its sequence alone. A trajectory of several sequences is split: each of its sequences is like one more sibling,
in any row where it fits, unless the objective compares whole trajectories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import ceil, isnan
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ReduceOp

from streamrl.base.errors import StreamRLError
from streamrl.base.types import IMITATED, TRAINED, FloatArray, TokenArray, TrainingSample, VersionSpan, routed_within
from streamrl.learning import process_group
from streamrl.learning.batches.routed_experts import RoutedSpan, routed_row
from streamrl.learning.model.attention import PackedSequence, packed_layout
from streamrl.learning.model.context_parallel import ContextGroup
from streamrl.learning.model.policy import ImitatedTokens, MicroBatch, empty_micro_batch
from streamrl.learning.objective.advantages import FloatVector
from streamrl.learning.objective.objectives import TokenInputs, needs_whole_sequences
from streamrl.learning.options import TrainerOptions

CHEAP_COPY = 16
"""A group may continue in the next row when a copy of its prefix is at most 1/16 of the budget."""


class PreparedSample(Struct, frozen=True):
    """A sample with advantages, critic values, and proximal, reference and teacher logprobs of its trained tokens.

    Arrays are float32, one entry for each trained token, in order.
    ``weight``: weight of each trained token in the un-normalised sum.
    ``imitation``: weight of the cross-entropy of each imitated token in that sum.
    ``token_advantages``: advantage of each token; None: ``advantage`` for every token.
    ``sequence``: number of the sequence within its trajectory, where the sample is one of several sequences.
    ``beginning``: number of the sequence's beginning within the group; sequences with the same number share it."""

    sample: TrainingSample
    advantage: float = 0.0
    weight: float = 1.0
    imitation: float = 0.0
    token_advantages: FloatVector | None = None
    proximal: FloatVector | None = None
    reference: FloatVector | None = None
    teacher: FloatVector | None = None
    old_values: FloatVector | None = None
    returns: FloatVector | None = None
    sequence: int = 0
    beginning: int = 0

    @property
    def name(self) -> str:
        """Unique name of the sequence."""
        return f"{self.sample.id}/{self.sequence}" if self.sequence else str(self.sample.id)


VECTORS = ("token_advantages", "proximal", "reference", "teacher", "old_values", "returns")
Unit = list[PreparedSample]
"""Sequences that stay in one row: a single sequence, or all sequences of a trajectory."""


def sequences_of(item: PreparedSample) -> list[PreparedSample]:
    """Split a trajectory into its sequences, each a sample with the vectors of its own trained tokens."""
    sample = item.sample
    sequences = []
    if not sample.sequence_starts:
        return [item]
    for number, (start, end) in enumerate(pairwise((*sample.sequence_starts, len(sample.token_ids)))):
        first = sample.loss_mask.count(TRAINED, 0, start)
        last = sample.loss_mask.count(TRAINED, 0, end)
        vectors = {name: getattr(item, name) for name in VECTORS}
        spans = [span for span in sample.version_spans if start <= span.start < end]
        sequence = replace(
            sample,
            token_ids=sample.token_ids[start:end],
            loss_mask=sample.loss_mask[start:end],
            behavior_logprobs=sample.behavior_logprobs[start:end],
            version_spans=tuple(
                VersionSpan(span.start - start, span.end - start, span.policy_version) for span in spans
            ),
            routed=routed_within(sample.routed, start, end, moved=-start),
            sequence_starts=(),
            token_values={},
            kept_sets=sample.kept_sets.within(first, last),
        )
        parts = {name: None if vector is None else vector[first:last] for name, vector in vectors.items()}
        sequences.append(replace(item, sample=sequence, sequence=number, **parts))
    return sequences


def plan_micro_batches(
    samples: Sequence[PreparedSample], budget: int, *, whole_trajectories: bool = False
) -> list[list[PreparedSample]]:
    """Split samples into rows of about equal size and at most ``budget`` tokens (a longer sequence has its own row).

    Siblings are neighbours, so that ``pack`` lays their prompt down once; where a group continues in another row, the
    other row has a copy. The plan is canonical: the same samples give the same rows in whatever order they arrived.
    Groups are sorted by their longest sample, as attention is cheapest among nearly equal lengths.

    ``whole_trajectories``: whether all sequences of a trajectory stay in one row, even above the budget."""
    trajectories = [sequences_of(item) for item in samples]
    units = trajectories
    if not whole_trajectories:
        units = [[item] for item in _with_beginnings(trajectories)]
    groups: dict[tuple[str, int, int], list[Unit]] = {}
    for unit in sorted(units, key=lambda unit: (_needed(unit), unit[0].sample.id, unit[0].sequence)):
        groups.setdefault(group_key(unit[0]), []).append(unit)
    ordered = sorted(groups.items(), key=lambda entry: (_needed(entry[1][-1]), entry[0]))
    prefixes = [shared_prefix([item.sample for unit in siblings for item in unit]) for _, siblings in ordered]
    sizes = [
        prefix + sum(_needed(unit) - prefix * len(unit) for unit in siblings)
        for (_, siblings), prefix in zip(ordered, prefixes, strict=True)
    ]
    copies = [_copied_tokens(size, prefix, budget) for size, prefix in zip(sizes, prefixes, strict=True)]
    total = sum(sizes) + sum(copies)
    # A small last row costs almost as much as a full one: spread the tokens evenly.
    even_tokens = total / max(1, ceil(total / budget))
    rows: list[list[PreparedSample]] = []
    row_tokens = 0
    planned_tokens = 0
    for (_, siblings), prefix, size in zip(ordered, prefixes, sizes, strict=True):
        may_continue = CHEAP_COPY * prefix <= budget or size > budget
        prefix_is_laid = False
        starts_row = not may_continue and row_tokens + size > budget
        for unit in siblings:
            unit_tokens = _needed(unit) - prefix * len(unit)
            cost = unit_tokens if prefix_is_laid else unit_tokens + prefix
            share_is_full = planned_tokens >= even_tokens * len(rows) and (may_continue or not prefix_is_laid)
            if starts_row or share_is_full or row_tokens + cost > budget or not rows:
                rows.append([])
                row_tokens = 0
                starts_row = False
                cost = unit_tokens + prefix
            rows[-1] += unit
            row_tokens += cost
            planned_tokens += cost
            prefix_is_laid = True
    return rows


def packed_rows(
    samples: Sequence[PreparedSample],
    options: TrainerOptions,
    version: int,
    device: torch.device,
    *,
    together: bool,
    context: ContextGroup | None = None,
) -> Iterator[MicroBatch]:
    """Pack the rows of ``plan_micro_batches``, one after the other.

    ``together``: whether every rank yields as many rows, with empty rows at the end where another rank has more; then
    it is collective.
    ``context``: ranks that share each row, which has the budget of all of them."""
    prompt = max((0, *(item.sample.loss_mask.find(TRAINED) for item in samples)))
    whole_trajectories = needs_whole_sequences(options.objective, options.off_policy)
    budget = options.row_tokens(device.type, options.parameters, prompt) * options.context_parallel_size
    planned = plan_micro_batches(samples, budget, whole_trajectories=whole_trajectories)
    rows = len(planned)
    if together:
        rows = round(process_group.all_reduce([float(rows)], device, ReduceOp.MAX)[0])
    for row in planned:
        yield pack(row, version, device, context)
    for _ in range(rows - len(planned)):
        yield empty_micro_batch(device)


def _with_beginnings(trajectories: Sequence[Unit]) -> list[PreparedSample]:
    """Return all sequences, each with the number of its beginning.

    A single prefix for a whole group would be short where, say, a solver and a checker have different prompts. In the
    order of tokens, a sequence gets the same number as the ones before it if the prefix of all of them is at least half
    as long as the longest prefix that the shortest of them allows."""
    sequences = [item for unit in trajectories for item in unit]
    if len(sequences) == len(trajectories):
        return sequences
    number = 0
    common = 0
    shortest = 0
    previous: PreparedSample | None = None
    sequences.sort(key=lambda item: (group_key(item), item.sample.token_ids))
    for index, item in enumerate(sequences):
        untrained = item.sample.loss_mask.find(TRAINED)
        same_group = previous is not None and group_key(item) == group_key(previous)
        if previous is not None and same_group:
            common = min(common, shared_prefix([previous.sample, item.sample]))
            shortest = min(shortest, untrained)
        if not same_group or 2 * common < shortest:
            number = number + 1 if same_group else 0
            common = untrained
            shortest = untrained
        previous = item
        sequences[index] = replace(item, beginning=number)
    return sequences


def group_key(item: PreparedSample) -> tuple[str, int, int]:
    """Key that is equal for sequences that share a prefix where they are neighbours in a row."""
    return item.sample.id.prompt_id, item.sample.id.group_id, item.beginning


def _needed(unit: Unit) -> int:
    return sum(needed_tokens(item.sample) for item in unit)


def _copied_tokens(size: int, prefix: int, budget: int) -> int:
    """Tokens of further copies of the prefix, for a group that is too large for one row."""
    if size <= budget:
        return 0
    return (size - prefix - 1) // max(1, budget - prefix) * prefix


def pack(
    row: Sequence[PreparedSample], policy_version: int, device: torch.device, context: ContextGroup | None = None
) -> MicroBatch:
    """Make the tensors of one row, or of this rank's slice of it. Neighbours of one group share their prompt.

    Raises ``StreamRLError`` for a sample without trained tokens, or whose first token is trained: no token predicts
    it."""
    samples = [item.sample for item in row]
    trained = [trained_indices(sample) for sample in samples]
    groups = [[item.sample for item in siblings] for _, siblings in groupby(row, group_key)]
    laid = lay_row(groups, context.size if context else 1)
    counts = [len(indices) for indices in trained]
    trajectories = {identity: index for index, identity in enumerate(dict.fromkeys(sample.id for sample in samples))}

    def of_trained(arrays: Sequence[TokenArray | FloatArray | NDArray[Any]], dtype: type) -> Tensor:
        """Entries of the trained tokens in each sample's array, joined."""
        entries: list[NDArray[Any]] = [
            np.asarray(values, dtype=dtype)[indices] for values, indices in zip(arrays, trained, strict=True)
        ]
        return torch.from_numpy(np.concatenate(entries)).to(device)

    def per_token(values: list[float] | list[int], dtype: type) -> Tensor:
        """The value of each sample, repeated for its trained tokens."""
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

    def joined(vectors: list[FloatVector | None]) -> Tensor | None:
        """One vector for the row. None where the samples have no vectors: either all samples have one, or no sample."""
        present = [vector for vector in vectors if vector is not None]
        return torch.from_numpy(np.concatenate(present)).to(device) if present else None

    # Groups of a row may differ: a reward gives numbers to the tokens of some alone.
    advantages = [
        np.full(count, item.advantage, dtype=np.float32) if item.token_advantages is None else item.token_advantages
        for item, count in zip(row, counts, strict=True)
    ]
    temperatures = [math.nan if sample.temperature is None else sample.temperature for sample in samples]
    batch = MicroBatch(
        tokens_T=torch.from_numpy(laid.tokens_T).to(device),
        positions_T=torch.from_numpy(laid.positions_T).to(device),
        layout=packed_layout(laid.sequences, device, context),
        predictors_N=torch.from_numpy(laid.predictors_N).to(device),
        targets_N=of_trained([sample.token_ids for sample in samples], np.int64),
        inputs=TokenInputs(
            behavior_N=of_trained([sample.behavior_logprobs for sample in samples], np.float32),
            advantages_N=torch.from_numpy(np.concatenate(advantages)).to(device),
            weights_N=per_token([item.weight for item in row], np.float32),
            staleness_N=policy_version - of_trained([token_versions(sample) for sample in samples], np.int64),
            sequence_N=per_token([trajectories[sample.id] for sample in samples], np.int64),
            sequences=len(trajectories),
            proximal_N=joined([item.proximal for item in row]),
            reference_N=joined([item.reference for item in row]),
            teacher_N=joined([item.teacher for item in row]),
            old_values_N=joined([item.old_values for item in row]),
            returns_N=joined([item.returns for item in row]),
        ),
        sample_ids=tuple(item.name for item in row),
        counts=tuple(counts),
        places_N=torch.from_numpy(_places_in_turns(trained)).to(device),
        temperature_N=None if all(map(isnan, temperatures)) else per_token(temperatures, np.float32),
        routed=routed_row(laid.routed, device),
        kept_NK=kept_set_rows(samples, counts, device),
        imitated=_imitated_tokens(row, laid, device),
    )
    return batch.slice_of_rank(context) if context else batch


def _imitated_tokens(row: Sequence[PreparedSample], laid: LaidRow, device: torch.device) -> ImitatedTokens | None:
    """The imitated tokens of a row; None: it has none, or they have no weight."""
    if not any(item.imitation for item in row):
        return None
    indices = [imitated_indices(item.sample) for item in row]
    targets = [
        np.asarray(item.sample.token_ids, dtype=np.int64)[places] for item, places in zip(row, indices, strict=True)
    ]
    weights = np.repeat(np.array([item.imitation for item in row], dtype=np.float32), list(map(len, indices)))
    return ImitatedTokens(
        torch.from_numpy(laid.imitated_predictors_M).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
        torch.from_numpy(weights).to(device),
    )


def kept_set_rows(samples: Sequence[TrainingSample], counts: Sequence[int], device: torch.device) -> Tensor | None:
    """Kept set of each trained token of a row, with -1 behind its last token: int64 [N, K]. None where no engine
    returned a set. ``counts``: number of trained tokens of each sample."""
    if not any(sample.kept_sets.token_ids for sample in samples):
        return None
    sizes = [
        np.pad(np.asarray(sample.kept_sets.counts, dtype=np.int64), (0, count - len(sample.kept_sets.counts)))
        for sample, count in zip(samples, counts, strict=True)
    ]
    sizes_N = np.concatenate(sizes)
    width = int(sizes_N.max())
    kept_NK = np.full((len(sizes_N), width), -1)
    kept_NK[np.arange(width) < sizes_N[:, None]] = np.concatenate([sample.kept_sets.token_ids for sample in samples])
    return torch.from_numpy(kept_NK).to(device)


def token_versions(sample: TrainingSample) -> NDArray[np.int64]:
    """Policy version of each token of a sample; the sample's oldest version for a token outside of version spans."""
    versions = np.full(len(sample.token_ids), sample.oldest_version, dtype=np.int64)
    for span in sample.version_spans:
        versions[span.start : span.end] = span.policy_version
    return versions


Tokens = NDArray[np.int64]


class LaidRow(NamedTuple):
    """A row of ``T`` tokens.

    ``predictors_N``: index of the token that predicts each of the ``N`` trained tokens, sample after sample.
    ``imitated_predictors_M``: the same of the ``M`` imitated tokens.
    ``routed``: experts that engines returned for each stretch of tokens."""

    tokens_T: Tokens
    positions_T: Tokens
    sequences: list[PackedSequence]
    predictors_N: Tokens
    imitated_predictors_M: Tokens
    routed: list[RoutedSpan]


def trained_indices(sample: TrainingSample) -> Tokens:
    """Return the indices of the trained tokens. Raises ``StreamRLError`` where no token or the first token is trained
    or imitated."""
    in_loss = np.flatnonzero(np.frombuffer(sample.loss_mask, dtype=np.uint8))
    indices = _indices_of(sample, TRAINED)
    lengths = len(sample.token_ids), len(sample.loss_mask), len(sample.behavior_logprobs)
    if len(set(lengths)) > 1 or not len(in_loss) or in_loss[0] == 0:
        raise StreamRLError(
            f"sample {sample.id} cannot be trained: it has {lengths[0]} token ids, a loss mask of {lengths[1]} and "
            f"{lengths[2]} logprobs; at least one token must be trained, and not the first (trained: {indices[:3]})"
        )
    return indices


def imitated_indices(sample: TrainingSample) -> Tokens:
    """Return the indices of the imitated tokens."""
    return _indices_of(sample, IMITATED)


def _indices_of(sample: TrainingSample, kind: bytes) -> Tokens:
    return np.flatnonzero(np.frombuffer(sample.loss_mask, dtype=np.uint8) == kind[0])


def _places_in_turns(trained: Sequence[Tokens]) -> Tokens:
    """Number of each trained token in its turn, from 0. A turn ends with its sequence, or at a token that is not
    trained."""
    trained = [indices for indices in trained if len(indices)]
    if not trained:  # all samples of the row are only imitated
        return np.zeros(0, dtype=np.int64)
    order = np.arange(sum(map(len, trained)))
    begins = np.diff(np.concatenate(trained), prepend=-1) != 1
    begins[np.cumsum([0, *map(len, trained[:-1])])] = True
    places: Tokens = order - np.maximum.accumulate(np.where(begins, order, 0))
    return places


def needed_tokens(sample: TrainingSample) -> int:
    """Number of tokens that the loss is computed from: all tokens before the last trained or imitated one."""
    return max(0, sample.loss_mask.rfind(TRAINED), sample.loss_mask.rfind(IMITATED))


def shared_prefix(siblings: Sequence[TrainingSample]) -> int:
    """Length of the longest beginning without trained tokens that all these samples share; 0 for a single sample."""
    if len(siblings) < 2:
        return 0
    length = min(sample.loss_mask.find(TRAINED) for sample in siblings)
    first = np.asarray(siblings[0].token_ids[:length])
    for sample in siblings[1:]:
        differ = np.flatnonzero(np.asarray(sample.token_ids[:length]) != first[:length])
        if len(differ):
            length = int(differ[0])
    return length


def lay_row(groups: Sequence[Sequence[TrainingSample]], multiple: int = 1) -> LaidRow:
    """Lay ``groups`` of siblings into one row. Every sample has a trained token.

    ``multiple``: number of which the length of the row is a multiple; a sequence of zeros fills the row up."""
    tokens: list[Tokens] = []
    positions: list[Tokens] = []
    predictors: list[Tokens] = []
    imitated: list[Tokens] = []
    sequences: list[PackedSequence] = []
    routed: list[RoutedSpan] = []
    row_tokens = 0

    def lay(samples: Sequence[TrainingSample], first_position: int, stop: int, prefix: int) -> None:
        """Append a sequence: tokens ``[first_position, stop)``, which are the same in all ``samples``."""
        nonlocal row_tokens
        ids = np.asarray(samples[0].token_ids[first_position:stop], dtype=np.int64)
        if len(ids):
            tokens.append(ids)
            positions.append(np.arange(first_position, stop))
            routed.append(RoutedSpan(row_tokens, first_position, stop, [sample.routed for sample in samples]))
            sequences.append(PackedSequence(row_tokens, len(ids), prefix))
            row_tokens += len(ids)

    for siblings in groups:
        length = shared_prefix(siblings)
        prefix_start = row_tokens
        prefix = len(sequences) if length else -1
        lay(siblings, 0, length, -1)
        for sample in siblings:
            sample_start = row_tokens
            lay([sample], length, needed_tokens(sample), prefix)
            places = trained_indices(sample) - 1, imitated_indices(sample) - 1
            for predicting, row_places in zip(places, (predictors, imitated), strict=True):
                in_prefix = predicting < length
                row_places.append(np.where(in_prefix, prefix_start + predicting, sample_start + predicting - length))
    if padding := -row_tokens % multiple:
        tokens.append(np.zeros(padding, dtype=np.int64))
        positions.append(np.arange(padding))
        sequences.append(PackedSequence(row_tokens, padding, -1))
    return LaidRow(
        np.concatenate(tokens),
        np.concatenate(positions),
        sequences,
        np.concatenate(predictors),
        np.concatenate(imitated),
        routed,
    )

"""Packing of training samples into rows of tokens, in an order that does not depend on arrival.

Only tokens that a trained token is predicted from are packed: tokens from the last trained one on are left out.
Siblings that follow each other in a row share their longest common beginning without trained tokens: it becomes a
sequence of its own (the prefix), whose last token predicts the first token of each sibling. Exact: every token sees the
same tokens at the same positions as in a sequence alone. A trajectory of several sequences is cut into them: each is
like one more sibling, in whichever row it fits, unless the objective compares whole trajectories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from streamrl.base.errors import StreamRLError
from streamrl.base.types import FloatArray, TokenArray, TrainingSample, VersionSpan, routed_within
from streamrl.learning import process_group
from streamrl.learning.batches.routed_experts import RoutedSpan, routed_row
from streamrl.learning.model.attention import PackedSequence, packed_layout
from streamrl.learning.model.context import Context
from streamrl.learning.model.policy import MicroBatch, empty_micro_batch
from streamrl.learning.objective.advantages import FloatVector
from streamrl.learning.objective.objectives import TokenInputs, needs_whole_sequences
from streamrl.learning.options import TrainerOptions

CHEAP_COPY = 16
"""A group is cut at the end of a row when a copy of its prefix is at most this part of the budget."""


class PreparedSample(msgspec.Struct, frozen=True):
    """A sample with what its batch, its group, the reference model and the critic say about its trained tokens.

    Arrays are float32, one entry for each trained token, in order. ``weight``: of each trained token in the
    un-normalised sum. ``token_advantages`` None: ``advantage`` for every token. ``sequence``: number of the one of
    several sequences that this is a cut of; ``beginning``: number of its beginning, which siblings share."""

    sample: TrainingSample
    advantage: float = 0.0
    weight: float = 1.0
    token_advantages: FloatVector | None = None
    proximal: FloatVector | None = None
    reference: FloatVector | None = None
    old_values: FloatVector | None = None
    returns: FloatVector | None = None
    sequence: int = 0
    beginning: int = 0

    @property
    def name(self) -> str:
        """Unique name of the sequence."""
        return f"{self.sample.id}/{self.sequence}" if self.sequence else str(self.sample.id)


VECTORS = ("token_advantages", "proximal", "reference", "old_values", "returns")
Unit = list[PreparedSample]
"""What is not split over rows: a sequence, or all of a trajectory."""


def sequences_of(item: PreparedSample) -> list[PreparedSample]:
    """The sequences of a trajectory, each a sample of its own with its trained tokens' part of the vectors."""
    sample = item.sample
    found = []
    if not sample.sequence_starts:
        return [item]
    for number, (start, end) in enumerate(pairwise((*sample.sequence_starts, len(sample.token_ids)))):
        first = sample.loss_mask.count(1, 0, start)
        last = sample.loss_mask.count(1, 0, end)
        vectors = {name: getattr(item, name) for name in VECTORS}
        spans = [span for span in sample.version_spans if start <= span.start < end]
        cut = msgspec.structs.replace(
            sample,
            token_ids=sample.token_ids[start:end],
            loss_mask=sample.loss_mask[start:end],
            behavior_logprobs=sample.behavior_logprobs[start:end],
            version_spans=tuple(VersionSpan(s.start - start, s.end - start, s.policy_version) for s in spans),
            routed=routed_within(sample.routed, start, end, moved=-start),
            sequence_starts=(),
        )
        own = {name: None if vector is None else vector[first:last] for name, vector in vectors.items()}
        found.append(msgspec.structs.replace(item, sample=cut, sequence=number, **own))
    return found


def plan_micro_batches(
    samples: Sequence[PreparedSample], budget: int, *, whole: bool = False
) -> list[list[PreparedSample]]:
    """Split into rows of about equal size and at most ``budget`` tokens (a longer sequence has a row of its own).
    ``whole``: all sequences of a trajectory are in one row, however long it gets.

    Siblings are neighbours, so that ``pack`` lays their prompt down once; where a group is cut, each part has a copy.
    Canonical: the same set gives the same rows however it arrived. Groups are sorted by their longest sample, as
    attention is cheapest among nearly equal lengths."""
    trajectories = [sequences_of(item) for item in samples]
    units = trajectories if whole else [[item] for item in _with_beginnings(trajectories)]
    groups: dict[tuple[str, int, int], list[Unit]] = {}
    for unit in sorted(units, key=lambda unit: (_needed(unit), unit[0].sample.id, unit[0].sequence)):
        groups.setdefault(group_key(unit[0]), []).append(unit)
    ordered = sorted(groups.items(), key=lambda entry: (_needed(entry[1][-1]), entry[0]))
    prefixes = [shared_prefix([item.sample for unit in siblings for item in unit]) for _, siblings in ordered]
    sizes = [_laid_tokens(siblings, prefix) for (_, siblings), prefix in zip(ordered, prefixes, strict=True)]
    total = sum(sizes) + sum(_copied_tokens(*laid, budget) for laid in zip(sizes, prefixes, strict=True))
    # A small last row costs almost as much as a full one: share the tokens out.
    wanted = total / max(1, math.ceil(total / budget))
    rows: list[list[PreparedSample]] = []
    used = 0
    taken = 0
    for (_, siblings), prefix, size in zip(ordered, prefixes, sizes, strict=True):
        cut_anywhere = CHEAP_COPY * prefix <= budget or size > budget
        laid = False
        full = not cut_anywhere and used + size > budget
        for unit in siblings:
            own = _needed(unit) - prefix * len(unit)
            shared_out = taken >= wanted * len(rows) and (cut_anywhere or not laid)
            if full or shared_out or used + own + (0 if laid else prefix) > budget or not rows:
                rows.append([])
                used = 0
                laid = False
                full = False
            rows[-1] += unit
            cost = own if laid else own + prefix
            used = used + cost
            taken = taken + cost
            laid = True
    return rows


def packed_rows(
    samples: Sequence[PreparedSample],
    options: TrainerOptions,
    version: int,
    device: torch.device,
    *,
    together: bool,
    context: Context | None = None,
) -> Iterator[MicroBatch]:
    """The rows of ``plan_micro_batches``, packed. ``together``: as many on every rank, with empty ones at the end where
    another rank has more. Collective then. ``context``: ranks over which each row is cut, so that it has the budget of
    all of them."""
    prompt = max((item.sample.loss_mask.find(b"\1") for item in samples), default=0)
    whole = needs_whole_sequences(options.objective, options.off_policy)
    budget = options.row_tokens(device.type, options.parameters, prompt) * options.context_parallel_size
    planned = plan_micro_batches(samples, budget, whole=whole)
    rows = len(planned)
    if together:
        rows = round(process_group.all_reduce([float(rows)], device, dist.ReduceOp.MAX)[0])
    for index in range(rows):
        yield pack(planned[index], version, device, context) if index < len(planned) else empty_micro_batch(device)


def _with_beginnings(trajectories: Sequence[Unit]) -> list[PreparedSample]:
    """All sequences, with the number of their beginning: one prefix for a whole group would be short where a solver and
    a checker are asked in different words. A sequence is among those before it, in the order of tokens, if the prefix
    of all is at least half of what the shortest of them could share."""
    found = [item for unit in trajectories for item in unit]
    if len(found) == len(trajectories):
        return found
    number = 0
    common = 0
    shortest = 0
    before: PreparedSample | None = None
    found.sort(key=lambda item: (group_key(item), item.sample.token_ids))
    for place, item in enumerate(found):
        untrained = item.sample.loss_mask.find(b"\1")
        alike = before is not None and group_key(item) == group_key(before)
        if before is not None and alike:
            common = min(common, shared_prefix([before.sample, item.sample]))
            shortest = min(shortest, untrained)
        if not alike or 2 * common < shortest:
            number = number + 1 if alike else 0
            common = untrained
            shortest = untrained
        before = item
        found[place] = msgspec.structs.replace(item, beginning=number)
    return found


def group_key(item: PreparedSample) -> tuple[str, int, int]:
    """Equal for sequences that share a prefix where they are neighbours in a row."""
    return item.sample.id.prompt_id, item.sample.id.group_id, item.beginning


def _needed(unit: Unit) -> int:
    return sum(needed_tokens(item.sample) for item in unit)


def _laid_tokens(siblings: Sequence[Unit], prefix: int) -> int:
    return prefix + sum(_needed(unit) - prefix * len(unit) for unit in siblings)


def _copied_tokens(size: int, prefix: int, budget: int) -> int:
    """Further copies of the prefix of a group that no row can hold."""
    return (size - prefix - 1) // max(1, budget - prefix) * prefix if size > budget else 0


def pack(
    row: Sequence[PreparedSample], policy_version: int, device: torch.device, context: Context | None = None
) -> MicroBatch:
    """One row as tensors, or this rank's piece of it. Neighbours of one group share their prompt. Raises
    ``StreamRLError`` for a sample without trained tokens, or whose first one is trained: nothing predicts it."""
    samples = [item.sample for item in row]
    trained = [trained_indices(sample) for sample in samples]
    groups = [[item.sample for item in siblings] for _, siblings in groupby(row, group_key)]
    laid = lay_row(groups, context.size if context else 1)
    counts = [len(indices) for indices in trained]
    trajectories = {identity: index for index, identity in enumerate(dict.fromkeys(s.id for s in samples))}

    def of_trained(arrays: Sequence[TokenArray | FloatArray | NDArray[Any]], dtype: type) -> Tensor:
        """Entries of the trained tokens of each sample's array, joined."""
        chosen: list[NDArray[Any]] = [
            np.asarray(values, dtype=dtype)[where] for values, where in zip(arrays, trained, strict=True)
        ]
        return torch.from_numpy(np.concatenate(chosen)).to(device)

    def per_token(values: list[float] | list[int], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

    def joined(vectors: list[FloatVector | None]) -> Tensor | None:
        """One vector for the row; None where the samples have none (they all have it, or none has)."""
        present = [vector for vector in vectors if vector is not None]
        return torch.from_numpy(np.concatenate(present)).to(device) if present else None

    advantages = joined([item.token_advantages for item in row])
    temperatures = [sample.temperature or 0.0 for sample in samples]
    whole = MicroBatch(
        tokens_T=torch.from_numpy(laid.tokens_T).to(device),
        positions_T=torch.from_numpy(laid.positions_T).to(device),
        layout=packed_layout(laid.sequences, device, context),
        predictors_N=torch.from_numpy(laid.predictors_N).to(device),
        targets_N=of_trained([sample.token_ids for sample in samples], np.int64),
        inputs=TokenInputs(
            behavior_N=of_trained([sample.behavior_logprobs for sample in samples], np.float32),
            advantages_N=per_token([i.advantage for i in row], np.float32) if advantages is None else advantages,
            weights_N=per_token([item.weight for item in row], np.float32),
            staleness_N=policy_version - of_trained([token_versions(sample) for sample in samples], np.int64),
            sequence_N=per_token([trajectories[sample.id] for sample in samples], np.int64),
            sequences=len(trajectories),
            proximal_N=joined([item.proximal for item in row]),
            reference_N=joined([item.reference for item in row]),
            old_values_N=joined([item.old_values for item in row]),
            returns_N=joined([item.returns for item in row]),
        ),
        sample_ids=tuple(item.name for item in row),
        counts=tuple(counts),
        places_N=torch.from_numpy(_places_in_turns(trained)).to(device),
        temperature_N=per_token(temperatures, np.float32) if any(temperatures) else None,
        routed=routed_row(laid.routed, device),
    )
    return whole.piece(context) if context else whole


def token_versions(sample: TrainingSample) -> NDArray[np.int64]:
    """Policy version of each token, where it is sampled: the oldest one for a token of which nothing else is said."""
    versions = np.full(len(sample.token_ids), sample.oldest_version, dtype=np.int64)
    for span in sample.version_spans:
        versions[span.start : span.end] = span.policy_version
    return versions


Tokens = NDArray[np.int64]


class LaidRow(NamedTuple):
    """A row of ``T`` tokens; ``predictors_N``: where its ``N`` trained ones are predicted, sample after sample;
    ``routed``: whose tokens they are."""

    tokens_T: Tokens
    positions_T: Tokens
    sequences: list[PackedSequence]
    predictors_N: Tokens
    routed: list[RoutedSpan]


def trained_indices(sample: TrainingSample) -> Tokens:
    """Return the indices at which the loss mask is set. Raises ``StreamRLError`` where none is, or the first token
    is."""
    indices = np.flatnonzero(np.frombuffer(sample.loss_mask, dtype=np.uint8))
    lengths = len(sample.token_ids), len(sample.loss_mask), len(sample.behavior_logprobs)
    if len(set(lengths)) > 1 or not len(indices) or indices[0] == 0:
        raise StreamRLError(
            f"sample {sample.id} cannot be trained: it has {lengths[0]} token ids, a loss mask of {lengths[1]} and "
            f"{lengths[2]} logprobs; at least one token must be trained, and not the first (trained: {indices[:3]})"
        )
    return indices


def _places_in_turns(trained: Sequence[Tokens]) -> Tokens:
    """Number of each trained token in its turn, from 0. A turn ends with its sequence, or at a token that is not
    trained."""
    order = np.arange(sum(map(len, trained)))
    begins = np.diff(np.concatenate(trained), prepend=-1) != 1
    begins[np.cumsum([0, *map(len, trained[:-1])])] = True
    places: Tokens = order - np.maximum.accumulate(np.where(begins, order, 0))
    return places


def needed_tokens(sample: TrainingSample) -> int:
    """Tokens that a trained one is predicted from: all before the last trained one."""
    return max(0, sample.loss_mask.rfind(b"\1"))


def shared_prefix(siblings: Sequence[TrainingSample]) -> int:
    """Length of the longest beginning without trained tokens that these samples share; 0 for one sample alone."""
    if len(siblings) < 2:
        return 0
    length = min(sample.loss_mask.find(b"\1") for sample in siblings)
    first = np.asarray(siblings[0].token_ids[:length])
    for sample in siblings[1:]:
        differ = np.flatnonzero(np.asarray(sample.token_ids[:length]) != first[:length])
        length = int(differ[0]) if len(differ) else length
    return length


def lay_row(groups: Sequence[Sequence[TrainingSample]], multiple: int = 1) -> LaidRow:
    """One row of these samples; those of one inner sequence are siblings. Every sample has a trained token. A sequence
    of zeros fills the row to a ``multiple`` of tokens."""
    tokens: list[Tokens] = []
    positions: list[Tokens] = []
    predictors: list[Tokens] = []
    sequences: list[PackedSequence] = []
    routed: list[RoutedSpan] = []
    used = 0

    def lay(whose: Sequence[TrainingSample], first_position: int, stop: int, prefix: int) -> None:
        nonlocal used
        ids = np.asarray(whose[0].token_ids[first_position:stop], dtype=np.int64)
        if len(ids):
            tokens.append(ids)
            positions.append(np.arange(first_position, stop))
            routed.append(RoutedSpan(used, first_position, stop, [sample.routed for sample in whose]))
            sequences.append(PackedSequence(used, len(ids), prefix))
            used += len(ids)

    for siblings in groups:
        length = shared_prefix(siblings)
        prefix_start = used
        prefix = len(sequences) if length else -1
        lay(siblings, 0, length, -1)
        for sample in siblings:
            own_start = used
            lay([sample], length, needed_tokens(sample), prefix)
            before = trained_indices(sample) - 1
            predictors.append(np.where(before < length, prefix_start + before, own_start + before - length))
    if filled := -used % multiple:
        tokens.append(np.zeros(filled, dtype=np.int64))
        positions.append(np.arange(filled))
        sequences.append(PackedSequence(used, filled, -1))
    return LaidRow(np.concatenate(tokens), np.concatenate(positions), sequences, np.concatenate(predictors), routed)

"""Rows: canonical, within the budget, every trained token predicted from exactly its own past."""

from __future__ import annotations

import random
from itertools import count, groupby

import msgspec
import numpy as np
import pytest
from builders.base import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from sample_groups import make_groups  # noqa: E402

from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.base.types import (  # noqa: E402
    ScoredTrajectory,
    Segment,
    TrainingSample,
    TrajectoryId,
    VersionSpan,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.learning.batches.packing import (  # noqa: E402
    LaidRow,
    PreparedSample,
    group_key,
    lay_row,
    needed_tokens,
    pack,
    packed_rows,
    plan_micro_batches,
    shared_prefix,
)
from streamrl.learning.options import TrainerOptions  # noqa: E402

CPU = torch.device("cpu")


def sample_of(tokens: list[int], trained: list[int], *, index: int = 0, group: int = 0) -> TrainingSample:
    """A sample with these tokens, of which those at ``trained`` are."""
    mask = bytes(int(place in trained) for place in range(len(tokens)))
    return TrainingSample(
        id=TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=index),
        token_ids=token_array(tokens),
        loss_mask=mask,
        behavior_logprobs=float_array([-float(place) if mask[place] else 0.0 for place in range(len(tokens))]),
        reward=0.0,
        oldest_version=0,
        newest_version=0,
    )


def random_samples(seed: int = 0, sizes: tuple[int, ...] = (4, 3, 1, 9, 2)) -> list[PreparedSample]:
    return [PreparedSample(sample) for group in make_groups(0, list(sizes), seed=seed) for sample in group.samples]


def laid_tokens(row: list[PreparedSample]) -> int:
    return pack(row, 0, CPU).tokens_T.numel()


@pytest.mark.parametrize("budget", [20, 64, 128, 100000])
def test_rows_do_not_depend_on_arrival_and_keep_to_the_budget(budget: int) -> None:
    samples = random_samples()
    rows = plan_micro_batches(samples, budget)
    for order in range(3):
        shuffled = random.Random(order).sample(samples, len(samples))
        assert plan_micro_batches(shuffled, budget) == rows
    assert sorted(str(item.sample.id) for row in rows for item in row) == sorted(str(i.sample.id) for i in samples)
    assert all(laid_tokens(row) <= budget or len(row) == 1 for row in rows)
    assert len(rows) <= 2 + 1.6 * sum(map(laid_tokens, rows)) / budget or budget == 20
    for row in rows:
        groups = [item.sample.id.group_id for item in row]
        assert len([g for i, g in enumerate(groups) if not i or groups[i - 1] != g]) == len(set(groups))


def test_only_unpackable_groups_are_split() -> None:
    """A group with a long prompt is split only when no row can hold it."""

    def group_of(index: int, completions: int) -> list[PreparedSample]:
        prompt = [3 + place % 7 for place in range(50)]
        made = [
            sample_of([*prompt, *range(3, 14)], list(range(50, 61)), index=i, group=index) for i in range(completions)
        ]
        return [PreparedSample(sample) for sample in made]

    small = plan_micro_batches(group_of(0, 4) + group_of(1, 4) + group_of(2, 4), 200)
    assert [[item.sample.id.group_id for item in row] for row in small] == [[0] * 4 + [1] * 4, [2] * 4]
    large = plan_micro_batches(group_of(0, 40), 200)
    assert [laid_tokens(row) for row in large] == [50 + 10 * len(row) for row in large]
    assert [len(row) for row in large] == [14, 13, 13]


@pytest.mark.parametrize(("given", "prompt", "device", "row"), [
    (0, 20, "cpu", 512), (0, 60, "cpu", 960), (0, 300, "cpu", 2048), (700, 20, "cpu", 700),
    (0, 20, "cuda", 2048), (700, 20, "cuda", 700),
])  # fmt: skip
def test_default_rows_on_a_cpu_are_small(given: int, prompt: int, device: str, row: int) -> None:
    """Rows whose size nobody set are small on a CPU, and repeat few prompts."""
    options = TrainerOptions(model_path="", run_id="", weights_endpoint="", micro_batch_tokens=given)
    assert options.row_tokens(device, 299_136, prompt) == row
    assert msgspec.structs.replace(options, device="cpu").row_tokens("cuda", 15 << 20) == (given or 960)
    if device == "cpu":
        tokens = [3 + place % 7 for place in range(prompt + 50)]
        places = list(range(prompt, len(tokens)))
        samples = [PreparedSample(sample_of(tokens, places, index=i, group=i % 9)) for i in range(216)]
        laid = [one.tokens_T.numel() for one in packed_rows(samples, options, 0, CPU, together=False)]
        assert row / 2 < max(laid) <= row


def pasts(laid: LaidRow) -> list[list[int]]:
    """Walk the layout: what the predictor of each trained token attends to, in order."""
    found = []
    for predictor in laid.predictors_N.tolist():
        sequence = next(s for s in laid.sequences if s.start <= predictor < s.start + s.length)
        seen = list(range(sequence.start, predictor + 1))
        if sequence.prefix >= 0:
            before = laid.sequences[sequence.prefix]
            seen = [*range(before.start, before.start + before.length), *seen]
        assert laid.positions_T[seen].tolist() == list(range(len(seen)))
        found.append(laid.tokens_T[seen].tolist())
    return found


def test_every_trained_token_is_predicted_from_its_own_past() -> None:
    rng = random.Random(5)
    groups = [list(group.samples) for group in make_groups(0, [4, 1, 3], seed=7)]
    for siblings in groups:  # an environment's turn in the middle, and one token trained only
        holed = [bytes(m if rng.random() < 0.7 or not i else 0 for i, m in enumerate(s.loss_mask)) for s in siblings]
        siblings[:] = [
            msgspec.structs.replace(s, loss_mask=mask if any(mask) else s.loss_mask)
            for s, mask in zip(siblings, holed, strict=True)
        ]
        siblings[0] = msgspec.structs.replace(
            siblings[0],
            loss_mask=bytes(int(place == siblings[0].loss_mask.find(1)) for place in range(len(siblings[0].token_ids))),
        )
    laid = lay_row(groups)
    expected = [
        list(sample.token_ids[:place])
        for siblings in groups
        for sample in siblings
        for place in np.flatnonzero(np.frombuffer(sample.loss_mask, dtype=np.uint8)).tolist()
    ]
    assert pasts(laid) == expected
    assert len(laid.tokens_T) < sum(needed_tokens(sample) for siblings in groups for sample in siblings)


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [
        (sample_of([3, 4, 5, 6], [2, 3]), sample_of([3, 4, 9, 6], [2, 3]), 2),
        (sample_of([3, 4, 5, 6], [2, 3]), sample_of([3, 4, 5, 6], [3]), 2),
        (sample_of([3, 4, 5, 6], [3]), sample_of([3, 8, 5, 6], [3]), 1),
        (sample_of([3, 4], [1]), sample_of([5, 4], [1]), 0),
    ],
    ids=["a prompt", "until the first trained token", "until tokens differ", "nothing in common"],
)
def test_shared_prefix_is_the_common_untrained_beginning(
    first: TrainingSample, second: TrainingSample, length: int
) -> None:
    assert shared_prefix([first, second]) == shared_prefix([second, first]) == length
    assert shared_prefix([first]) == 0


def test_packed_tensors_are_the_samples() -> None:
    row = [
        PreparedSample(sample_of([3, 4, 5, 6], [2, 3], index=0), advantage=1.0, weight=0.5),
        PreparedSample(sample_of([3, 4, 7], [2], index=1), advantage=-2.0, weight=1.0),
    ]
    batch = pack(row, 3, CPU)
    assert batch.tokens_T.tolist() == [3, 4, 5]
    assert batch.positions_T.tolist() == [0, 1, 2]
    assert batch.predictors_N.tolist() == [1, 2, 1]
    assert batch.targets_N.tolist() == [5, 6, 7]
    assert batch.inputs.behavior_N.tolist() == [-2.0, -3.0, -2.0]
    assert batch.inputs.advantages_N.tolist() == [1.0, 1.0, -2.0]
    assert batch.inputs.weights_N.tolist() == [0.5, 0.5, 1.0]
    assert batch.inputs.staleness_N.tolist() == [3, 3, 3]
    assert batch.inputs.sequence_N.tolist() == [0, 0, 1]
    assert batch.temperature_N is None


def test_a_temperature_that_is_not_given_is_no_number() -> None:
    """Nothing that a sample could have been drawn at stands for the temperature of the recipe."""
    samples = [msgspec.structs.replace(sample_of([3, n], [1], index=n), temperature=n or None) for n in (0, 2)]
    batch = pack([PreparedSample(sample, advantage=1.0, weight=1.0) for sample in samples], 3, CPU)
    assert batch.temperature_N is not None
    assert batch.temperature_N.isnan().tolist() == [True, False] and batch.temperature_N[1] == 2


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[tuple[bool, int, int | None]]]:
    """A prompt, and whether each segment is sampled, its number of tokens, and the segment that it goes on from."""
    sizes = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(-1, 7) | st.none()), max_size=8))
    tree = [
        (trained, size, follows if follows is None or follows < n else -1)
        for n, (trained, size, follows) in enumerate(sizes)
    ]
    return draw(st.sampled_from([[], [7], [7, 8, 9]])), tree


@settings(max_examples=150, deadline=None)
@given(members=st.lists(trees(), min_size=1, max_size=4), budget=st.integers(4, 60), whole=st.booleans())
def test_each_token_of_a_tree_is_trained_once(
    members: list[tuple[list[int], list[tuple[bool, int, int | None]]]], budget: int, whole: bool
) -> None:
    """Each sampled token of any tree is trained once, behind its own context. Sampled tokens are numbered from 100,
    each once; contexts are alike, so that there is much to share."""
    number, prepared, expected = count(100), [], {}
    for member, (prompt, tree) in enumerate(members):
        paths, segments = {-1: prompt}, []
        for place, (sampled, size, follows) in enumerate(tree):
            context = paths[place - 1 if follows is None else follows]
            sampled = sampled and bool(context)  # nothing can be sampled from nothing
            ids = [next(number) if sampled else 10 + len(context) + n for n in range(size)]
            paths[place] = [*context, *ids]
            expected |= {one: (member, paths[place][: len(context) + n]) for n, one in enumerate(ids) if sampled}
            spans = tuple(VersionSpan(n, n + 1, one % 5) for n, one in enumerate(ids) if sampled)
            logprobs = float_array([-one for one in ids] if sampled else [])
            segments.append(Segment(token_array(ids), sampled, logprobs, spans, follows))
        made = trajectory(member, member // 3, prompt=prompt, segments=tuple(segments))
        sample = to_training_sample(ScoredTrajectory(trajectory=made, reward=1.0))
        assert sample.trained_tokens == made.generated_tokens
        trained = [one for one, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
        if trained:
            prepared.append(PreparedSample(sample, reference=np.array(trained, np.float32)))
            last = max(place for place, segment in enumerate(segments) if segment.trained and segment.token_ids)
            assert trained[-1] == segments[last].token_ids[-1]  # a reward at the end is behind all that was sampled
    rows, found, members_of = plan_micro_batches(prepared, budget, whole_trajectories=whole), {}, []
    for row in rows:
        packed = pack(row, 9, CPU)
        targets, inputs = packed.targets_N.tolist(), packed.inputs
        assert not found.keys() & set(targets) and len(set(targets)) == len(targets)
        laid = lay_row([[item.sample for item in siblings] for _, siblings in groupby(row, group_key)])
        ids = list(dict.fromkeys(item.sample.id.sample for item in row))
        found |= zip(targets, zip([ids[index] for index in inputs.sequence_N], pasts(laid), strict=True), strict=True)
        assert inputs.behavior_N.tolist() == [-target for target in targets] == (-inputs.reference_N).tolist()
        assert inputs.staleness_N.tolist() == [9 - target % 5 for target in targets]
        members_of += ids
    assert found == expected
    assert not whole or len(set(members_of)) == len(members_of)


def test_a_solver_and_a_checker_share_contexts() -> None:
    """A solver and a checker share their contexts with their siblings."""
    contexts, prepared = ([3] * 20, [4] * 30), []
    for member in range(4):
        segments = [Segment(token_array(context), trained=False, follows=-1) for context in contexts]
        for follows in (0, 1):
            ids, logprobs = token_array([5 + member] * 2), float_array([-1.0] * 2)
            segments.append(Segment(ids, trained=True, behavior_logprobs=logprobs, follows=follows))
        made = trajectory(member, prompt=(), segments=tuple(segments))
        prepared.append(PreparedSample(to_training_sample(ScoredTrajectory(trajectory=made, reward=1.0))))
    (row,) = plan_micro_batches(prepared, 1000)
    assert laid_tokens(row) == 20 + 30 + 8


@pytest.mark.parametrize(
    "sample",
    [
        sample_of([3, 4, 5], [0, 2]),
        sample_of([3, 4, 5], []),
        msgspec.structs.replace(sample_of([3, 4, 5], [2]), loss_mask=b"\0\0\1\1"),
    ],
    ids=["first token trained", "nothing trained", "arrays of different length"],
)
def test_sample_that_cannot_be_trained_is_refused_by_name(sample: TrainingSample) -> None:
    with pytest.raises(StreamRLError, match=str(sample.id)):
        pack([PreparedSample(sample)], 0, CPU)


def test_each_token_is_as_stale_as_the_version_that_sampled_it() -> None:
    """A trajectory over two weight updates, with a turn of an environment between its own."""

    def turn(tokens: list[int], *spans: tuple[int, int, int]) -> Segment:
        return Segment(
            token_ids=token_array(tokens),
            trained=bool(spans),
            behavior_logprobs=float_array([-1.0] * len(tokens) if spans else []),
            version_spans=tuple(VersionSpan(start=s, end=e, policy_version=v) for s, e, v in spans),
        )

    def sample(*turns: Segment) -> PreparedSample:
        made = trajectory(len(turns), prompt=[3, 4], segments=turns)
        return PreparedSample(to_training_sample(ScoredTrajectory(trajectory=made, reward=1.0)))

    one = sample(turn([5, 6], (0, 2, 4)))
    assert one.sample.version_spans == ()  # nothing to tell apart
    mixed = sample(turn([5, 6, 7], (0, 1, 2), (1, 3, 4)), turn([8, 9]), turn([10, 11], (0, 1, 4), (1, 2, 5)))
    assert pack([one, mixed], 5, CPU).inputs.staleness_N.tolist() == [1, 1, 3, 1, 1, 1, 0]

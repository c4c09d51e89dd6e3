"""Rows: canonical, within the budget, every trained token predicted from exactly its own past."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from sample_groups import make_groups  # noqa: E402

from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.base.types import (  # noqa: E402
    FinishReason,
    Prompt,
    ScoredTrajectory,
    Segment,
    TrainingSample,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.learning.batches.packing import (  # noqa: E402  # noqa: E402
    PreparedSample,
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


def test_group_with_a_long_prompt_is_cut_only_when_no_row_can_hold_it() -> None:
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
def test_rows_that_nobody_sized_are_small_on_a_cpu_and_repeat_few_prompts(
    given: int, prompt: int, device: str, row: int
) -> None:
    options = TrainerOptions(model_path="", run_id="", weights_endpoint="", micro_batch_tokens=given)
    assert options.row_tokens(device, 299_136, prompt) == row
    assert msgspec.structs.replace(options, device="cpu").row_tokens("cuda", 15 << 20) == (given or 960)
    if device == "cpu":
        tokens = [3 + place % 7 for place in range(prompt + 50)]
        places = list(range(prompt, len(tokens)))
        samples = [PreparedSample(sample_of(tokens, places, index=i, group=i % 9)) for i in range(216)]
        laid = [one.tokens_T.numel() for one in packed_rows(samples, options, 0, CPU, together=False)]
        assert row / 2 < max(laid) <= row


def test_every_trained_token_is_predicted_from_its_own_past() -> None:
    """Walks the layout: what a predictor attends to, in order, is the sample up to the trained token."""
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
    found = []
    for predictor in laid.predictors_N.tolist():
        index = next(i for i, s in enumerate(laid.sequences) if s.start <= predictor < s.start + s.length)
        sequence = laid.sequences[index]
        seen = list(range(sequence.start, predictor + 1))
        if sequence.prefix >= 0:
            before = laid.sequences[sequence.prefix]
            seen = [*range(before.start, before.start + before.length), *seen]
        assert laid.positions_T[seen].tolist() == list(range(len(seen)))
        found.append(laid.tokens_T[seen].tolist())
    expected = [
        list(sample.token_ids[:place])
        for siblings in groups
        for sample in siblings
        for place in np.flatnonzero(np.frombuffer(sample.loss_mask, dtype=np.uint8)).tolist()
    ]
    assert found == expected
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
    prompt = Prompt(prompt_id="p", token_ids=token_array([3, 4]))

    def turn(tokens: list[int], *spans: tuple[int, int, int]) -> Segment:
        return Segment(
            token_ids=token_array(tokens),
            trained=bool(spans),
            behavior_logprobs=float_array([-1.0] * len(tokens) if spans else []),
            version_spans=tuple(VersionSpan(start=s, end=e, policy_version=v) for s, e, v in spans),
        )

    def sample(*turns: Segment) -> PreparedSample:
        trajectory = Trajectory(
            id=TrajectoryId(prompt_id="p", group_id=0, sample=len(turns)),
            prompt=prompt,
            segments=turns,
            finish_reason=FinishReason.STOP,
        )
        return PreparedSample(to_training_sample(ScoredTrajectory(trajectory=trajectory, reward=1.0)))

    one = sample(turn([5, 6], (0, 2, 4)))
    assert one.sample.version_spans == ()  # nothing to tell apart
    mixed = sample(turn([5, 6, 7], (0, 1, 2), (1, 3, 4)), turn([8, 9]), turn([10, 11], (0, 1, 4), (1, 2, 5)))
    assert pack([one, mixed], 5, CPU).inputs.staleness_N.tolist() == [1, 1, 3, 1, 1, 1, 0]

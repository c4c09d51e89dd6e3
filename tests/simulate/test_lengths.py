"""Completion lengths: the distribution, the correlation, and which draws are equal."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
from oracle.trace_header import trace_header

from streamrl.observe.report.trajectory_trace import RecordedRun, TrajectoryLine
from streamrl.simulate.calibrate import fit_lengths
from streamrl.simulate.fleet import DEMO, HEAVY, PRESETS
from streamrl.simulate.lengths import LengthModel, ModelledLengths, RecordedLengths, recorded_rows

# Measured on the demo, and of RollPacker (arXiv 2509.21009): quantiles, and the share at the cap.
EXPECTED = [
    (DEMO.lengths, {0.5: 45, 0.9: 214}, 0.041),
    (HEAVY.lengths, {0.5: 45, 0.95: 315}, 0.02),
    (PRESETS["rollpacker-14b-16k"].lengths, {0.25: 414, 0.5: 660, 0.75: 1128, 0.9: 2553, 0.95: 4089}, 0.0099),
]


@pytest.mark.parametrize(("model", "quantiles", "cap_share"), EXPECTED)
def test_quantiles_and_cap_share_are_those_of_the_reference(
    model: LengthModel, quantiles: dict[float, int], cap_share: float
) -> None:
    drawn = np.array([ModelledLengths(model, seed=1).draw(prompt, 0, 1, 0) for prompt in range(2)])
    source = ModelledLengths(model, seed=1)
    drawn = np.array([source.draw(prompt, 0, 1, 0)[0] for prompt in range(40_000)])
    for share, expected in quantiles.items():
        assert np.quantile(drawn, share) == pytest.approx(expected, rel=0.07), share
    assert np.mean(drawn == model.cap) == pytest.approx(cap_share, rel=0.12)
    assert drawn.min() >= 1 and drawn.max() == model.cap


def test_siblings_are_as_correlated_as_asked() -> None:
    model = LengthModel(cap=10**6, weights=(1.0,), mus=(6.0,), sigmas=(0.8,), correlation=0.6)
    source = ModelledLengths(model, seed=3)
    pairs = np.log(np.array([source.draw(prompt, 0, 2, 0) for prompt in range(20_000)]))
    assert np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1] == pytest.approx(0.6, abs=0.02)
    assert pairs.std() == pytest.approx(0.8, rel=0.03)


def test_a_replayed_draw_is_equal_and_a_new_one_is_not() -> None:
    """A replayed draw is equal, and a regenerated one keeps only the prompt."""
    source = ModelledLengths(PRESETS["rollpacker-14b-16k"].lengths, seed=5)
    again = ModelledLengths(PRESETS["rollpacker-14b-16k"].lengths, seed=5)
    assert source.draw(7, 11, 8, 0) == again.draw(7, 11, 8, 3)
    assert source.draw(7, 11, 8, 0)[:4] == source.draw(7, 11, 4, 0)
    assert source.draw(7, 11, 8, 0) != source.draw(7, 12, 8, 0)
    first = np.log([source.draw(prompt, prompt, 1, 0)[0] for prompt in range(20_000)])
    second = np.log([source.draw(prompt, 10**6 + prompt, 1, 0)[0] for prompt in range(20_000)])
    assert 0.25 < np.corrcoef(first, second)[0, 1] < 0.45  # 0.35 in normal units, less in tailed logs


def test_drift_scales_what_is_below_the_cap() -> None:
    model = msgspec.structs.replace(DEMO.lengths, drift_per_step=0.01, drift_steps=50)
    source = ModelledLengths(model)
    before, after, later = (
        np.array([source.draw(prompt, 0, 1, version)[0] for prompt in range(4000)]) for version in (0, 50, 500)
    )
    free = (before > 20) & (after < model.cap)
    assert np.mean(after[free] / before[free]) == pytest.approx(math.exp(0.5), rel=0.02)
    assert (after[before == model.cap] == model.cap).all()
    assert (later == after).all()


@pytest.mark.parametrize("wrong", [{"weights": (0.5, 0.4)}, {"mus": (1.0,)}, {"correlation": 1.0}, {"cap_share": -0.1}])
def test_impossible_models_are_refused(wrong: dict[str, object]) -> None:
    values: dict[str, object] = {"cap": 100, "weights": (0.5, 0.5), "mus": (1.0, 2.0), "sigmas": (1.0, 1.0)}
    with pytest.raises(ValueError, match="lengths"):
        LengthModel(**{**values, **wrong})  # type: ignore[arg-type]


def recorded_run(attempts: list[tuple[str, list[int]]]) -> RecordedRun:
    """One group each, in the order of their launch; a length below 0: stopped after so many tokens."""
    lines = [
        TrajectoryLine(
            prompt_id=prompt, group=group, sample=sample, attempt=0, prompt_tokens=3, tokens=abs(tokens),
            finish_reason="stop" if tokens > 0 else "", outcome="trained", round_kind="synchronous", launched_s=0.0,
            ended_s=1.0, rollout_s=1.0,
        )
        for group, (prompt, values) in enumerate(attempts)
        for sample, tokens in enumerate(values)
    ]  # fmt: skip
    # Lines come in the order in which trajectories ended, which is any.
    return RecordedRun(header=trace_header(), trajectories=tuple(reversed(lines)), steps=(), engines=())


def test_recorded_lengths_return_in_order_or_resampled_by_prompt() -> None:
    run = recorded_run([("b", [5, 6, 0]), ("a", [70, 80])])
    in_order = RecordedLengths(run, resample=False)
    assert [in_order.draw(prompt, prompt, 2, 0) for prompt in range(3)] == [[5, 6], [70, 80], [5, 6]]
    drawn = [tuple(RecordedLengths(run).draw(prompt, 1, 4, 0)) for prompt in range(40)]
    assert {value for draw in drawn for value in draw} == {5, 6, 70, 80}, "what never ran has no length"
    assert all(set(draw) <= {5, 6} or set(draw) <= {70, 80} for draw in drawn), "siblings of one prompt"
    assert drawn == [tuple(RecordedLengths(run).draw(prompt, 1, 4, 0)) for prompt in range(40)]


def test_a_group_keeps_its_longest_when_prompts_are_resampled() -> None:
    rows = [[1, 2, 3, 50 + number] for number in range(40)]
    run = recorded_run([(f"p{number}", row) for number, row in enumerate(rows)])
    source = RecordedLengths(run, seed=3)
    drawn = [source.draw(prompt, prompt, 4, 0) for prompt in range(8000)]
    assert all(sorted(lengths) in rows for lengths in drawn), "whole recorded groups"
    counts = Counter(max(lengths) for lengths in drawn)
    assert all(0.7 < counts[50 + number] / 200 < 1.3 for number in range(40)), "every prompt about as often"
    for seed in range(4, 8):
        other = RecordedLengths(run, seed=seed)
        counts.update(max(other.draw(prompt, prompt, 4, 0)) for prompt in range(8000))
    assert (counts[50] + counts[89]) / 2000 == pytest.approx(1, abs=0.08), "the shortest and the longest too"
    blocks = [len({max(lengths) for lengths in drawn[first : first + 40]}) / 40 for first in range(0, 8000, 40)]
    assert np.mean(blocks) == pytest.approx(1 - math.exp(-1), abs=0.015), "drawn independently of each other"


def test_prompts_beyond_the_record_resemble_their_neighbours() -> None:
    """A prompt beyond its record has lengths as its neighbours have."""
    run = recorded_run([(f"p{number}", [10 + number, 12 + number]) for number in range(60)])
    source = RecordedLengths(run, resample=False)
    assert source.draw(30, 7, 2, 0) == [40, 42], "its own at first"
    again = {tuple(source.draw(30, seed_base, 2, 0)) for seed_base in range(100, 200)}
    assert len(again) > 3 and all(36 <= value <= 46 for lengths in again for value in lengths)
    assert source.draw(30, 7, 2, 0) == [40, 42], "a replayed prompt keeps them"
    longer = source.draw(30, 7, 5, 0)
    assert longer[:2] == [40, 42] and all(37 <= value <= 47 for value in longer), "more samples than were recorded"


def test_deferred_prompts_count_once() -> None:
    """Deferred prompts are counted once, and stopped samples are longer."""
    run = recorded_run(
        [("late", [5, -20, -8]), ("winner", [6, 7, 30]), ("late", [5, 25, 9]), ("open", [4, -28]), ("last", [-60])]
    )
    rows = [[length for length, _ in row] for row in recorded_rows(run)]
    assert rows[:2] == [[5, 25, 9], [6, 7, 30]], "of two attempts the whole one"
    assert rows[2] == [4, 30], "the only recorded length beyond 28"
    assert rows[3] == [99], "none is beyond 60: the cap"


def test_a_mixture_of_prompt_classes_is_fitted() -> None:
    source = np.random.default_rng(5)
    rows = []
    for number in range(500):
        mean, spread = (math.log(12), 0.1) if number % 2 else (math.log(60), 0.3)
        level = source.normal(mean, spread)
        rows.append((f"p{number}", [min(round(math.exp(source.normal(level, 0.1))), 99) for _ in range(4)]))
    model = fit_lengths(recorded_run(rows))
    assert len(model.weights) == 2 and model.weights[0] == pytest.approx(0.5, abs=0.06)
    assert np.exp(model.mus) == pytest.approx([12, 58], rel=0.08)
    assert model.cap_share == pytest.approx(np.mean([value == 99 for _, row in rows for value in row]))
    assert model.correlation > 0.85, "nearly all that differs is the prompt"
    drawn = ModelledLengths(model, 2)
    lengths = np.array([value for prompt in range(2000) for value in drawn.draw(prompt, 0, 4, 0)])
    recorded = np.array([value for _, row in rows for value in row])
    for share in (0.1, 0.25, 0.75, 0.9):
        assert np.quantile(lengths, share) == pytest.approx(np.quantile(recorded, share), rel=0.1)

"""Predicted lengths: what is learned from prompt length and from earlier attempts."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from streamrl.control.policies.length_prediction import PromptLengthPredictor


def test_says_nothing_before_the_first_group() -> None:
    predictor = PromptLengthPredictor()
    assert predictor.predict("p", 12) == 0
    predictor.observe("p", 12, 100)
    assert predictor.predict("other", 99) == pytest.approx(100)


def feed(
    predictor: PromptLengthPredictor, *, persistence: float, epochs: int, prompts: int = 60, seed: int = 1
) -> None:
    """Log lengths of spread 1, of which ``persistence`` belongs to the prompt; prompt lengths say nothing."""
    chance = random.Random(seed)
    own = [chance.gauss(0, math.sqrt(persistence)) for _ in range(prompts)]
    for _ in range(epochs):
        for prompt in chance.sample(range(prompts), prompts):
            log_length = 5 + own[prompt] + chance.gauss(0, math.sqrt(1 - persistence))
            predictor.observe(f"p{prompt}", chance.randrange(8, 64), max(round(math.exp(log_length)), 1))


def test_longer_prompts_are_predicted_longer_when_they_are() -> None:
    chance = random.Random(3)
    predictor = PromptLengthPredictor()
    for step in range(400):
        digits = chance.randrange(1, 8)
        length = round(math.exp(3 + 0.4 * digits + chance.gauss(0, 0.4)))
        predictor.observe(f"p{step}", 10 + 2 * digits, length)
    known = [predictor.predict("new", 10 + 2 * digits) for digits in range(1, 8)]
    assert known == sorted(known)
    assert known[6] / known[0] == pytest.approx(math.exp(2.4), rel=0.3)


def test_own_history_is_believed_as_far_as_it_repeats_itself() -> None:
    repeats, draws = PromptLengthPredictor(), PromptLengthPredictor()
    feed(repeats, persistence=0.8, epochs=8)
    feed(draws, persistence=0.0, epochs=8)
    assert repeats.persistence == pytest.approx(0.8, abs=0.2)
    assert draws.persistence < 0.2
    spread = [max(predictor.predict(f"p{i}", 30) for i in range(60)) for predictor in (repeats, draws)]
    assert spread[0] > 3 * spread[1]
    assert spread[1] < 1.5 * math.exp(5), "an average of mere draws is no knowledge"


def test_a_cut_group_is_longer_than_where_it_was_cut() -> None:
    predictor = PromptLengthPredictor()
    feed(predictor, persistence=0.8, epochs=4)
    before = predictor.predict("deferred", 30)
    predictor.observe("deferred", 30, round(2 * before), stopped=True)
    assert predictor.predict("deferred", 30) > 1.5 * before
    # Cut where it says little: the prediction stays, instead of falling to the short length that was seen.
    predictor.observe("early", 30, 2, stopped=True)
    assert predictor.predict("early", 30) == pytest.approx(before, rel=0.15)


def test_predictions_of_truncated_groups_stay_in_range() -> None:
    """Where every group is truncated, predictions stay within the lengths that were seen."""
    predictor = PromptLengthPredictor()
    for step in range(20_000):
        predictor.observe(f"p{step % 500}", step % 40, 50 + 37 * step % 400, stopped=True)
    assert 1 <= max(predictor.predict(f"p{n}", n % 40) for n in range(500)) < 2 * 450


def test_follows_a_drift_and_keeps_what_it_knows_of_prompts() -> None:
    predictor = PromptLengthPredictor()
    feed(predictor, persistence=0.9, epochs=6)
    order = sorted(range(60), key=lambda i: predictor.predict(f"p{i}", 30))
    for _ in range(200):  # completions of other prompts become three times as long
        predictor.observe("others", 30, 3 * round(math.exp(5)))
    assert predictor.predict("unseen", 30) == pytest.approx(3 * math.exp(5), rel=0.2)
    assert sorted(range(60), key=lambda i: predictor.predict(f"p{i}", 30)) == order


def test_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    predictor = PromptLengthPredictor(prompts_remembered=10)
    for step in range(200):
        predictor.observe(f"p{step}", step, 1000 if step < 195 else 10)
        predictor.observe("kept", 5, 10)
    assert len(predictor.prompts) == 10
    assert list(predictor.prompts)[-1] == "kept"
    assert predictor.prompts["kept"].count == 200, "seen all the time, it was never forgotten"


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_restored_it_answers_as_before(encoding: str) -> None:
    codec = getattr(msgspec, encoding)
    whole = PromptLengthPredictor(prompts_remembered=40)
    feed(whole, persistence=0.5, epochs=3)
    built = codec.decode(codec.encode(msgspec.to_builtins(whole)))
    restored = msgspec.convert(built, PromptLengthPredictor, str_keys=True)
    for predictor in (whole, restored):
        feed(predictor, persistence=0.5, epochs=2, seed=2)
    assert restored == whole
    assert [restored.predict(f"p{i}", i) for i in range(60)] == [whole.predict(f"p{i}", i) for i in range(60)]

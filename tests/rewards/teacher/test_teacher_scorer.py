"""A served teacher, asked beside the rewards: another process at an address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from builders.base import trajectory
from builders.teacher_address import Address, logprobs_of
from msgspec.structs import replace

from streamrl.base.stage_messages import Scored
from streamrl.base.types import (
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.contracts import Scorer
from streamrl.recipe.objectives.teacher import TeacherAddress
from streamrl.recipe.rewards import FailurePolicy
from streamrl.rewards.teacher.scorer import TeacherScorer
from streamrl.run.journal.records import JournalCodec, sampled_record, scored_record, scored_trajectory, trajectory_of


class Rewards(Scorer):
    """Rewards that are known at once: half of the number of the sample; ``lost`` samples are kept."""

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        return Scored(outcome=ScoredTrajectory(trajectory=trajectory, reward=trajectory.id.sample / 2))

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None: ...


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    """An address that answers."""
    served = Address(tmp_path / "log")
    yield served
    served.kill()


def branched() -> Trajectory:
    """Two turns behind each other, then a third that begins after the prompt again."""
    turns = [
        ((7, 8), True, None),
        ((9,), False, None),
        ((11, 12, 13), True, None),
        ((3,), False, -1),
        ((5,), True, None),
    ]
    segments = tuple(
        Segment(
            token_ids=token_array(ids),
            trained=trained,
            behavior_logprobs=float_array([-1.0] * len(ids) if trained else []),
            follows=follows,
        )
        for ids, trained, follows in turns
    )
    return trajectory(prompt=(4, 6), segments=segments)


async def test_each_token_has_the_logprob_of_its_own_sequence(address: Address) -> None:
    """Also over turns and forks, through the journal, and in the order in which the trainer has the tokens."""
    scorer = TeacherScorer(Rewards(), address.teacher())
    scored = (await scorer.score(branched(), 1)).outcome
    await scorer.aclose()
    assert isinstance(scored, ScoredTrajectory)
    first = logprobs_of([4, 6, 7, 8, 9, 11, 12, 13])
    second = logprobs_of([4, 6, 3, 5])
    assert scored.token_values["teacher"].tolist() == [*first[1:3], *first[4:7], second[2]]
    codec = JournalCodec()
    sampled, reward = (
        codec.decode(codec.encode(record)) for record in (sampled_record(scored.trajectory), scored_record(scored))
    )
    restored = scored_trajectory(trajectory_of(sampled, scored.trajectory.prompt), reward)  # type: ignore[arg-type]
    assert restored == scored
    sample = to_training_sample(restored)
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    by_token = dict(zip((7, 8, 11, 12, 13, 5), scored.token_values["teacher"], strict=True))
    assert sample.token_values["teacher"].tolist() == [by_token[token] for token in trained]


async def test_a_teacher_without_an_answer_is_a_failed_reward(address: Address) -> None:
    """With its own policy; a row that names no teacher, a model that is not served, one that is away for too long."""
    further = TeacherAddress(name="maths", endpoint=address.teacher().endpoint, model="other", tokenizer="t")
    teacher = address.teacher(column="who", further=(further,), on_failure=FailurePolicy.DROP_GROUP, timeout_s=1.5)
    scorer = TeacherScorer(Rewards(), teacher)
    found = {}
    for who in ("", "maths", "nobody"):
        found[who] = (await scorer.score(trajectory(columns={"who": who}), 1)).outcome
    address.kill()
    found["away"] = (await scorer.score(trajectory(), 1)).outcome
    await scorer.aclose()
    assert isinstance(found.pop(""), ScoredTrajectory)
    texts = {}
    for who, outcome in found.items():
        assert isinstance(outcome, RewardFailure) and outcome.policy == "drop_group" and outcome.function == "teacher"
        texts[who] = outcome.kind, outcome.message
    assert "answered 404" in texts["maths"][1] and '"nobody" in column who, and there are "maths"' in texts["nobody"][1]
    assert texts["away"][0] is RewardFailureKind.TIMED_OUT


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("full", RewardFailureKind.TIMED_OUT, 'no answer within 1 s (it answered 503: {"error": "no memory"})'),
        ("packed", RewardFailureKind.TIMED_OUT, "no answer within 1 s (DecodingError"),
        ("cut", RewardFailureKind.RAISED, "the probability 0"),
    ],
)
async def test_a_failure_says_what_the_teacher_answered(
    address: Address, model: str, kind: RewardFailureKind, text: str
) -> None:
    """The message has the last answer when time is over; what cannot be decoded, or is no logprob, ends no run."""
    started = TeacherScorer(Rewards(), address.teacher())
    await started.score(trajectory(), 1)
    await started.aclose()
    scorer = TeacherScorer(Rewards(), replace(address.teacher(timeout_s=1), model=model))
    outcome = (await scorer.score(trajectory(), 1)).outcome
    await scorer.aclose()
    assert isinstance(outcome, RewardFailure) and outcome.kind is kind
    assert text in outcome.message


async def test_time_is_counted_from_the_first_request(address: Address) -> None:
    """Not from the wait for earlier questions, of which only so many are asked at once."""
    started = TeacherScorer(Rewards(), address.teacher())
    await started.score(trajectory(), 1)
    await started.aclose()
    scorer = TeacherScorer(Rewards(), replace(address.teacher(concurrency=1, timeout_s=1.0), model="slow"))
    outcomes: list[Scored] = []

    async def score() -> None:
        outcomes.append(await scorer.score(trajectory(), 1))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(score)
    await scorer.aclose()
    assert [type(scored.outcome) for scored in outcomes] == [ScoredTrajectory] * 3


async def test_held_out_samples_ask_no_teacher(address: Address) -> None:
    scorer = TeacherScorer(Rewards(), address.teacher())
    outcome = (await scorer.score(replace(trajectory(), evaluation=True), 1)).outcome
    await scorer.aclose()
    assert isinstance(outcome, ScoredTrajectory) and not outcome.token_values
    assert not address.log.exists()


@pytest.mark.long
@pytest.mark.seconds(60)
async def test_twenty_kills_of_a_teacher_lose_nothing(address: Address) -> None:
    """Samples that are asked about while the teacher dies again and again all have one outcome, with its logprobs."""
    scorer = TeacherScorer(Rewards(), address.teacher(concurrency=4, timeout_s=120))
    outcomes: list[Scored] = []

    async def score(number: int) -> None:
        outcomes.append(await scorer.score(trajectory(number, tokens=tuple(range(3, 4 + number % 50))), 1))

    async with anyio.create_task_group() as tasks:
        kills = 0
        while kills < 20:
            for number in range(8 * kills, 8 * kills + 8):
                tasks.start_soon(score, number)
            await anyio.sleep(0.15)
            await anyio.to_thread.run_sync(address.kill)
            kills += 1
            await anyio.sleep(0.05)
            address.start()
    await scorer.aclose()
    assert sorted(scored.outcome.trajectory.id.sample for scored in outcomes) == list(range(160))
    for scored in outcomes:
        assert isinstance(scored.outcome, ScoredTrajectory)
        ids = [4, 5, *scored.outcome.trajectory.segments[0].token_ids]
        assert scored.outcome.token_values["teacher"].tolist() == logprobs_of(ids)[1:]

"""The prompts that control may ask for are there, and not many more. Which those are: ``oracle.control_world``."""

from __future__ import annotations

from builders.base import trajectory

from streamrl.base.types import Prompt, ScoredTrajectory, Segment, VersionSpan, float_array, token_array
from streamrl.buffers.trajectory_store import FEW_PROMPTS, TrajectoryStore
from streamrl.run.journal.records import JournalCodec, content_records, scored_trajectory, trajectory_of


def prompts(first: int, count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{n}", token_ids=token_array([n])) for n in range(first, first + count)]


def test_what_nobody_needs_is_forgotten_and_asked_for_rarely() -> None:
    store, asked = TrajectoryStore(), []

    def needed() -> set[str]:
        asked.append(len(store.prompts))
        return {f"p{n}" for n in range(newest - 40, newest)}

    for newest in range(0, 20 * FEW_PROMPTS, 8):
        store.add_prompts(prompts(newest, 8))
        store.forget_other_prompts(needed)
        assert len(store.prompts) <= FEW_PROMPTS + 8
        for n in range(max(newest - 40, 0), newest + 8):  # those of the last draw, too: control was not told of them
            assert store.prompts[f"p{n}"].token_ids[0] == n
    assert 15 < len(asked) < 30


def test_all_stay_where_all_are_needed() -> None:
    store, asked = TrajectoryStore(), 0

    def needed() -> set[str]:
        nonlocal asked
        asked += 1
        return {prompt.prompt_id for prompt in store.prompts.values()}

    for first in range(0, 64 * FEW_PROMPTS, 100):
        store.add_prompts(prompts(first, 100))
        store.forget_other_prompts(needed)
    assert len(store.prompts) >= 64 * FEW_PROMPTS and asked < 10


def test_a_tree_of_turns_in_the_journal_is_one_sample() -> None:
    """A trajectory whose turns form a tree is read back from the journal, and is one sample."""
    turns = tuple(
        Segment(token_array([7, index]), True, float_array([-1.0] * 2), (VersionSpan(0, 2, index),), follows)
        for index, follows in enumerate((None, 0, 0, -1))
    )
    earned = (1.0, 0.0, 2.0, -2.0)
    scored = ScoredTrajectory(trajectory=trajectory(segments=turns), reward=1.0, turn_rewards=earned)
    codec, store = JournalCodec(), TrajectoryStore()
    sampled, reward = (codec.decode(codec.encode(record)) for record in content_records(scored.trajectory.id, scored))
    store.add(scored_trajectory(trajectory_of(sampled, scored.trajectory.prompt), reward))
    assert store.scored([scored.trajectory.id]) == [scored]
    (sample,) = store.training_group(0, 0, [scored.trajectory.id], None, None).samples
    assert (sample.trained_tokens, sample.oldest_version, sample.newest_version) == (8, 0, 3)
    assert list(sample.token_ids) == [4, 5, 7, 0, 7, 1, 4, 5, 7, 0, 7, 2, 4, 5, 7, 3]
    assert sample.loss_mask == bytes([0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1])
    assert sample.sequence_starts == (0, 6, 12)
    assert (sample.turn_rewards, sample.turns) == (earned, ((0, 2), (1, 2), (2, 2), (3, 2)))


def test_what_environments_wrote_is_marked_where_it_is_imitated() -> None:
    """Tokens behind a sampled turn, once; never the prompt, nor what another conversation begins with."""

    def wrote(token: int, follows: int | None = None) -> Segment:
        return Segment(token_array([token]), False, follows=follows)

    def sampled(token: int) -> Segment:
        return Segment(token_array([token]), True, float_array([-1.0]), (VersionSpan(0, 1, 0),))

    turns = (wrote(7), sampled(8), wrote(9), sampled(10), wrote(11, 2), sampled(12), wrote(13, -1), sampled(14))
    scored = ScoredTrajectory(trajectory=trajectory(segments=turns), reward=1.0)
    store = TrajectoryStore()
    store.add(scored)
    (sample,) = store.training_group(0, 0, [scored.trajectory.id], None, None).samples
    assert list(sample.token_ids) == [4, 5, 7, 8, 9, 10, 4, 5, 7, 8, 9, 11, 12, 4, 5, 13, 14]
    assert list(sample.loss_mask) == [0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    store.imitates_observations = True
    (sample,) = store.training_group(0, 0, [scored.trajectory.id], None, None).samples
    assert list(sample.loss_mask) == [0, 0, 0, 1, 2, 1, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 1]
    assert (sample.trained_tokens, sample.imitated_tokens) == (4, 2)

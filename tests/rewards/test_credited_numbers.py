"""Numbers of steps and tokens: from what a reward returns to the tokens that they are for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.base.stage_messages import Scored
from streamrl.base.types import (
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    Segment,
    Trajectory,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.observe.terminal.step_line import sample_block
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rewards import Reward, RewardCredit
from streamrl.recipe.sections import Recipe
from streamrl.rewards.credited_numbers import compared_numbers, place_numbers
from streamrl.rewards.values import CallFailure, CheckedValue, NumberedSpan
from streamrl.run.evaluate.sample_files import sample_line, sample_of
from streamrl.run.journal.records import JournalCodec, sampled_record, scored_record, scored_trajectory, trajectory_of
from tests.rewards.conftest import tokens
from tests.rewards.test_scoring import scoring, with_rewards

MakeTrajectory = Callable[..., Trajectory]
STEPS, TOKENS = RewardCredit.STEPS, RewardCredit.TOKENS
FUNCTIONS = """
def returns(completion, *, given, **columns):
    return eval(given, {"nan": float("nan"), "completion": completion, **columns})

def of_group(completions, *, given, turn_texts):
    assert all(texts[-1] == completion for texts, completion in zip(turn_texts, completions))
    return [eval(text) for text in given]

def of_turns(completion, *, turn_texts):
    assert completion == turn_texts[-1]
    return [(0, len(text), len(text) / 10, turn) for turn, text in enumerate(turn_texts)]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "numbering.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def scored(make_recipe: Callable[..., Recipe], functions: Path) -> Callable[..., Any]:
    """Outcomes of ``trajectories`` by functions of ``FUNCTIONS`` and by the rewards given."""

    async def score(*trajectories: Trajectory, name: str = "returns", beside: tuple[Reward, ...] = (), **options: Any):
        settings = {"trusted": True} | options
        reward = Reward(function=f"{functions}:{name}", **settings)
        async with scoring(with_rewards(make_recipe("length"), reward, *beside)) as rewards:
            return await rewards.score(trajectories)

    return score


def numbers_of(outcome: Any, name: str = "steps/returns") -> list[float | None]:
    assert isinstance(outcome, ScoredTrajectory), outcome
    return [None if math.isnan(number) else round(number, 6) for number in outcome.token_values[name]]


def in_turns(make: MakeTrajectory, *texts: str, **columns: Any) -> Trajectory:
    """A trajectory of turns with a word of the environment between them; each turn ends with the end token."""
    segments: list[Segment] = []
    for text in texts:
        segments += [Segment(token_ids=token_array(tokens("env")), trained=False)] if segments else []
        segments.append(make(text).segments[0])
    return msgspec.structs.replace(make("a", **columns), segments=tuple(segments))


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    ("given", "credit", "numbers"),
    [
        ("[(0, 2, 0.5), (2, 4, -1)]", STEPS, [None, 0.5, None, None, -1.0]),  # the last one has the end token, too
        ("[(0, 2, 0.5), (2, 3, -1)]", TOKENS, [0.5, 0.5, -1.0, None, None]),
        ("[(0, 2, 0.5), (1, 4, True)]", TOKENS, [0.5, 1.5, 1.0, 1.0, 1.0]),
        ("[0.25, None, 0, 1, None]", STEPS, [0.25, None, 0.0, 1.0, None]),
        ("__import__('numpy').arange(5) / 4", TOKENS, [0.0, 0.25, 0.5, 0.75, 1.0]),
    ],
)
async def test_numbers_are_at_the_tokens_that_they_are_for(
    scored: Any, make_trajectory: MakeTrajectory, given: str, credit: RewardCredit, numbers: list[Any], trusted: bool
) -> None:
    (outcome,) = await scored(make_trajectory("abcd", given=given), credit=credit, trusted=trusted)
    assert numbers_of(outcome, f"{credit}/returns") == numbers
    assert outcome.reward == outcome.reward_parts["returns"]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("0.5", "wrong_type", "a float: with rewards.advanced.credit it returns a list"),
        ("{'a': 1}", "wrong_type", "a dict: with rewards.advanced.credit it returns a list"),
        ("[1, 2]", "wrong_type", "2 numbers for 5 sampled tokens"),
        ("[1, 2, 'x', 4, 5]", "wrong_type", "entry 2 is no number and no span"),
        ("[(0, 1)]", "wrong_type", "entry 0 is no number and no span"),
        ("[(0, 1.5, 2)]", "wrong_type", "entry 0 is no number and no span"),
        ("[(0, 1, 2), 3]", "wrong_type", "1 spans and 1 numbers of tokens"),
        ("[(0, 5, 2)]", "wrong_type", "the span (0, 5), and the text of its turn has 4 characters"),
        ("[(2, 2, 2)]", "wrong_type", "the span (2, 2)"),
        ("[(-1, 2, 2)]", "wrong_type", "the span (-1, 2)"),
        ("[(0, 2, 2, 1)]", "wrong_type", "a span of turn 1, and the completion has 1"),
        ("[(0, 2, nan)]", "not_finite", "entry 0: returned nan"),
        ("[(0, 2, 1e39)]", "not_finite", "above 3.4e38"),
        ("[None] * 5", "wrong_type", "not applicable"),
        ("[None, None]", "wrong_type", "returned 2 numbers for 5 sampled tokens"),
        ("[]", "wrong_type", "not applicable"),
        ("None", "wrong_type", "not applicable"),
    ],
)
async def test_numbers_for_no_token_are_failures_of_the_reward(
    scored: Any, make_trajectory: MakeTrajectory, given: str, kind: str, message: str
) -> None:
    (outcome,) = await scored(make_trajectory("abcd", given=given), credit=STEPS)
    assert isinstance(outcome, RewardFailure) and (outcome.kind, outcome.function) == (kind, "returns")
    assert message in outcome.message


async def test_a_list_without_credit_is_refused_with_the_remedy(scored: Any, make_trajectory: MakeTrajectory) -> None:
    (outcome,) = await scored(make_trajectory("abcd", given="[1, 2, 3, 4, 5]"))
    assert isinstance(outcome, RewardFailure) and outcome.kind is RewardFailureKind.WRONG_TYPE
    assert 'credit = "steps"' in outcome.message


async def test_numbers_reach_turns(scored: Any, make_trajectory: MakeTrajectory) -> None:
    """Spans of turns and numbers of all turns' tokens; the trainer gets them in the order of its tokens."""
    trajectory = in_turns(make_trajectory, "ab", "cde", given="[n and n / 8 for n in range(7)]")
    (outcome,) = await scored(trajectory, credit=STEPS, name="of_turns")
    assert numbers_of(outcome, "steps/of_turns") == [None, None, 0.2, None, None, None, 0.3]
    (outcome,) = await scored(trajectory, credit=TOKENS)
    assert numbers_of(outcome, "tokens/returns") == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75]
    # The second turn begins again behind the prompt: its sequence is the last one, and both are trained once.
    first, between, second = trajectory.segments
    forked = (first, msgspec.structs.replace(between, follows=-1), second)
    sample = to_training_sample(
        msgspec.structs.replace(outcome, trajectory=msgspec.structs.replace(trajectory, segments=forked))
    )
    assert sample.token_values["tokens/returns"] == outcome.token_values["tokens/returns"]
    assert len(sample.sequence_starts) == 2


async def test_a_group_function_numbers_each_sibling(scored: Any, make_trajectory: MakeTrajectory) -> None:
    siblings = [make_trajectory(text, sample=i, given="[(0, 1, 1), (1, 2, 3)]") for i, text in enumerate(("ab", "abc"))]
    outcomes = await scored(*siblings, name="of_group", credit=STEPS)
    assert [numbers_of(outcome, "steps/of_group") for outcome in outcomes] == [[1.0, None, 3.0], [1.0, 3.0, None, None]]


async def test_whole_rewards_are_compared_beside_numbers(
    scored: Any, make_trajectory: MakeTrajectory, functions: Path
) -> None:
    """The sum of rewards of whole completions has a name of its own, and there is one where none applies."""
    whole = tuple(
        Reward(function=f"{functions}:returns", name=name, weight=weight, trusted=True, options={"given": value})
        for name, weight, value in (("length", 2.0, "len(completion)"), ("half", 1.0, "0.5"))
    )
    shadow = Reward(
        function=f"{functions}:returns", name="seen", shadow=True, trusted=True, credit=TOKENS,
        options={"given": "[7] * 4"},
    )  # fmt: skip
    trajectory = make_trajectory("abc", given="[(0, 1, 1), (1, 2, 3)]")
    (outcome,) = await scored(trajectory, beside=(*whole, shadow), credit=STEPS, weight=0.5)
    assert outcome.reward == 2.0 * 3 + 0.5 + 0.5 * 4
    assert outcome.separate_rewards == {"/whole": (1.0, 6.5), "returns": (0.5, 4.0)}
    assert numbers_of(outcome, "tokens/seen") == [7.0] * 4
    (outcome,) = await scored(trajectory, credit=STEPS)
    assert outcome.separate_rewards == {"/whole": (1.0, 0.0), "returns": (1.0, 4.0)}


async def test_a_journal_and_readers_have_the_numbers(
    scored: Any, make_trajectory: MakeTrajectory, make_recipe: Any
) -> None:
    tokenizer = load_tokenizer(make_recipe("length").model.path)
    trajectory = make_trajectory("abcd", given="[(0, 2, 0.5), (2, 4, -1)]")
    (outcome,) = await scored(trajectory, credit=STEPS)
    codec = JournalCodec()
    sampled, reward = (
        codec.decode(codec.encode(record)) for record in (sampled_record(trajectory), scored_record(outcome))
    )
    again = scored_trajectory(trajectory_of(sampled, trajectory.prompt), reward)
    assert again.token_values["steps/returns"].tobytes() == outcome.token_values["steps/returns"].tobytes()
    assert msgspec.json.encode(sample_line(Scored(outcome=outcome), tokenizer)["numbers"]) == (
        b'[["returns",0.5,"ab"],["returns",-1.0,"cd"]]'
    )
    assert [line.split() for line in sample_block("", sample_of(outcome, tokenizer, step=1, choice=""))[-2:]] == [
        ["returns", "+0.5", "ab"], ["returns", "-1", "cd"]
    ]  # fmt: skip
    (outcome,) = await scored(make_trajectory("abcd", given="[(0, 2, 0.5), (3, 4, 0.5)]"), credit=TOKENS)
    texts = sample_line(Scored(outcome=outcome), tokenizer)["numbers"]
    assert [(entry.number, entry.text) for entry in texts] == [(0.5, "ab"), (0.5, "d")]


def test_tokens_of_parts_of_characters_belong_to_their_text() -> None:
    """Each byte is a token: those of a span are all bytes of its characters, of its first one and its last one, too."""
    text = "aé€b€"
    token_ids = token_array(list(text.encode()))

    def decode(ids: Any) -> str:
        return bytes(ids.tolist()).decode(errors="replace")

    for start, end, first, stop in ((0, 1, 0, 1), (1, 2, 1, 3), (2, 3, 3, 6), (2, 4, 3, 7), (4, 5, 7, 10)):
        checked = CheckedValue(1.0, spans=(NumberedSpan(start, end, 1.0),))
        numbers = place_numbers(checked, [token_ids], TOKENS, decode)
        assert not isinstance(numbers, CallFailure)
        assert [place for place, number in enumerate(numbers) if number == 1.0] == list(range(first, stop))


def test_a_long_text_is_decoded_block_by_block() -> None:
    """Spans cost a few decodings of the text, however many there are, also where blocks would cut characters; tokens
    whose text depends on those before it are decoded from the beginning, and have the same spans."""
    decoded = 0

    def decode(tokens: Sequence[int], *, strips: bool = False) -> str:
        nonlocal decoded
        decoded += len(tokens)
        text = bytes(list(tokens)).decode("utf-8", "replace")
        return text.lstrip() if strips else text

    text = "a \u6f22\U0001f642" * 200
    token_ids = token_array(list(text.encode()))
    spans = tuple(NumberedSpan(start, start + 4, float(start)) for start in range(0, len(text), 4))
    checked = CheckedValue(1.0, spans=spans)
    numbers = place_numbers(checked, [token_ids], STEPS, decode)
    assert not isinstance(numbers, CallFailure)
    assert [place % 9 for place, number in enumerate(numbers) if not math.isnan(number)] == [8] * 200
    assert decoded < 60 * len(token_ids)
    whole = place_numbers(checked, [token_ids], STEPS, partial(decode, strips=True))
    assert not isinstance(whole, CallFailure)
    assert whole.tobytes() == numbers.tobytes()


def test_control_sees_which_numbers_have_a_gradient(make_trajectory: MakeTrajectory) -> None:
    """Equal totals of a group are a signal where numbers differ, within a completion or between siblings."""

    def compared(**values: list[float]) -> Any:
        scored = ScoredTrajectory(
            trajectory=make_trajectory(),
            reward=2.0,
            separate_rewards={"/whole": (1.0, 2.0), "judge": (0.5, 2.0), "form": (1.0, 0.0), "off": (0.0, 1.0)},
            token_values={name.replace("_", "/"): float_array(numbers) for name, numbers in values.items()},
        )
        return compared_numbers(scored)

    nan = math.nan
    one, two = compared(steps_judge=[nan, 2.0]), compared(steps_judge=[1.0, 1.0])
    assert one == ({"/whole": 2.0, "judge": 2.0, "form": 0.0}, False)
    assert two[0]["judge"] == 1.0 and not two[1]
    assert compared(steps_judge=[0.0, 2.0])[1]
    assert not compared(tokens_form=[nan, 0.0])[1] and compared(tokens_form=[nan, 0.5])[1]
    assert not compared(tokens_shadow=[3.0], steps_off=[1.0, 2.0])[1]

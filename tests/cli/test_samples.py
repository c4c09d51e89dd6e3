"""``streamrl samples``: what training and evaluations leave of their completions, and what is shown of it."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from builders.base import trajectory
from msgspec.structs import replace

from streamrl.base.stage_messages import EndedOutcome, Scored, TrajectoryLost
from streamrl.base.types import EnvironmentResult, ScoredTrajectory, Segment, TrajectoryId
from streamrl.cli.main import main
from streamrl.cli.try_rewards.trial_completions import PlainText
from streamrl.observe.dashboard.run_view import RunView
from streamrl.observe.dashboard.sample_rows import SampleFilter, sample_rows
from streamrl.observe.run_files.run_reader import RunFiles
from streamrl.run.evaluate.sample_files import PromptWords, TrainingSamples, sample_line, write_evaluation


def scored(number: int, text: str, reward: float, *, group: int = 1, **parts: float) -> ScoredTrajectory:
    question = f"question {number}".encode()
    made = trajectory(number, group, prompt_id=f"p{number}", prompt=list(question), tokens=list(text.encode()))
    return ScoredTrajectory(trajectory=made, reward=reward, reward_parts=parts or {"exact": reward})


BATCH = [
    scored(1, "so so", 0.5),
    scored(2, "good\x1b[2J\nand short", 0.73, exact=1.0, brief=-0.27),
    scored(3, "bad", -1.0),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed in the middle of a line after step 1, went on, and was evaluated after step 2."""
    (tmp_path / "recipe.toml").write_text("")
    for step, batch in ((1, BATCH[:1]), (2, BATCH)):
        samples = TrainingSamples(tmp_path / "samples.jsonl", PlainText())
        samples.take(step, batch)
        samples.close()
        with (tmp_path / "samples.jsonl").open("a") as file:
            file.write('{"type":"Compl')
    outcomes: list[EndedOutcome] = [Scored(outcome=scored(n, f"held out {n}", n / 10, group=-1 - n)) for n in range(4)]
    one = TrajectoryId(prompt_id="p9", group_id=-9, sample=0)
    outcomes.append(TrajectoryLost(id=one, cancelled=False, reason="too long"))
    anyio.run(write_evaluation, tmp_path / "evaluations", PlainText(), 2, outcomes)
    return tmp_path


def test_completions_are_shown_with_their_facts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Completions of training and evaluation are shown with all that is known about them."""
    assert main(["samples", str(run), "--best", "--worst"]) == 0
    best = "reward 0.730 (exact 1.000, brief -0.270), 18 tokens, stop\n  prompt  question 2\n"
    assert capsys.readouterr().out.split("\n\n") == [
        f"training, step 2, best: {best}  text    good\\x1b[2J\n          and short",
        "training, step 2, worst: reward -1.000, 3 tokens, stop\n  prompt  question 3\n  text    bad",
        "evaluation, step 2, best: reward 0.300, 10 tokens, stop\n  prompt  question 3\n  text    held out 3",
        "evaluation, step 2, worst: reward 0.000, 10 tokens, stop\n  prompt  question 0\n  text    held out 0\n",
    ]
    assert main(["samples", str(run), "--step", "1,2"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    which = ("training, step 1", "training, step 2", "evaluation, step 2")
    kinds = ("best", "worst", "random")
    assert [block.partition(":")[0] for block in blocks] == [f"{one}, {kind}" for one in which for kind in kinds]


def test_each_set_has_samples_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several training sets, and of several held-out sets, each shows its best completion."""
    (tmp_path / "recipe.toml").write_text("")
    samples = TrainingSamples(tmp_path / "samples.jsonl", PlainText())
    samples.take(1, [of_set(scored(n, f"text {n}", n / 10), "low" if n < 3 else "high") for n in range(6)])
    samples.close()
    outcomes: list[EndedOutcome] = [Scored(outcome=scored(n, f"held out {n}", n / 10, group=-1 - n)) for n in range(4)]
    sets = {"first": range(2), "last": range(2, 4)}
    anyio.run(write_evaluation, tmp_path / "evaluations", PlainText(), 1, outcomes, sets)
    assert main(["samples", str(tmp_path), "--best"]) == 0
    heads = [block.partition(" tokens")[0] for block in capsys.readouterr().out.split("\n\n")]
    assert heads == [
        "training of high, step 1, best: reward 0.500, 6",
        "training of low, step 1, best: reward 0.200, 6",
        "evaluation of first, step 1, best: reward 0.100, 10",
        "evaluation of last, step 1, best: reward 0.300, 10",
    ]


def of_set(sample: ScoredTrajectory, name: str) -> ScoredTrajectory:
    prompt = replace(sample.trajectory.prompt, set=name)
    return replace(sample, trajectory=replace(sample.trajectory, prompt=prompt))


def test_samples_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--best", "--json"]) == 0
    found = [(one["of"], one["sample"]["text"]) for one in json.loads(capsys.readouterr().out)]
    assert found == [("training", "good\x1b[2J\nand short"), ("evaluation", "held out 3")]


def test_what_is_not_there_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--step", "7"]) == 2
    assert "training has steps 1 to 2, evaluations 2" in capsys.readouterr().err
    assert main(["samples", str(tmp_path / "none")]) == 2
    assert "none is not the directory of a run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["samples", str(run), "--step", "seven"])
    assert "'seven' is no list of integers: write it as 0,20" in capsys.readouterr().err


def test_steps_of_a_life_that_was_given_up_are_not_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run went back to step 1 and has trained step 2 anew, not yet step 3."""
    for step in (3, 2):
        samples = TrainingSamples(run / "samples.jsonl", PlainText())
        samples.take(step, BATCH[:1])
        samples.close()
    assert main(["samples", str(run)]) == 0
    assert capsys.readouterr().out.startswith("training, step 2, best")
    assert main(["samples", str(run), "--step", "3"]) == 2


def test_a_run_samples_completions_into_a_small_file(tmp_path: Path) -> None:
    """A run stores a completion now and then, and its file stays small."""
    samples = TrainingSamples(tmp_path / "samples.jsonl", PlainText(), most_bytes=20_000)
    shown = [step for step in range(1, 41) if samples.take(step, [scored(1, "x" * 50_000, 1.0)])]
    samples.close()
    assert shown == [1, 10, 20, 30, 40]
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"samples.jsonl", "older-samples.jsonl"} and max(sizes.values()) < 20_000 + 3 * 9_000


def test_each_prompt_that_was_answered_has_words_once(tmp_path: Path) -> None:
    """Pages name a prompt by its first words, also where no completion of it was kept."""
    words = PromptWords(tmp_path / "prompts.jsonl", PlainText())
    for sample in (*BATCH, *BATCH):
        words.take(Scored(outcome=sample))
    words.close()
    lines = [f'{{"prompt_id":"p{number}","words":"question {number}"}}' for number in (1, 2, 3)]
    assert (tmp_path / "prompts.jsonl").read_text().splitlines() == lines
    assert RunView(0, RunFiles(tmp_path)).words() == {f"p{number}": f"question {number}" for number in (1, 2, 3)}


def test_stored_tokens_have_text_logprob_and_version(tmp_path: Path) -> None:
    """A stored completion has the text, the logprob and the version of each sampled token."""

    def turn(text: str, version: int) -> Segment:
        (segment,) = trajectory(tokens=list(text.encode()), logprob=-0.5, version=version).segments
        return segment

    turns = (turn("ab", 3), Segment(token_ids=turn("tool", 0).token_ids, trained=False), turn("c", 5))
    made = trajectory(segments=turns, environment=EnvironmentResult(turn_rewards=(0.5, 0.0)))
    samples = TrainingSamples(tmp_path / "samples.jsonl", PlainText())
    samples.take(2, [scored := ScoredTrajectory(trajectory=made, reward=1.0)])
    samples.close()
    assert '"turn_rewards":[0.5,0.0]' in (tmp_path / "samples.jsonl").read_text()
    assert sample_line(Scored(outcome=scored), None)["turn_rewards"] == (0.5, 0.0)
    (row, *_) = sample_rows(RunFiles(tmp_path), SampleFilter(), 0, 3)["rows"]
    assert (row["token_texts"], row["logprobs"], row["versions"]) == (["a", "b", "c"], [-0.5] * 3, [3, 3, 5])

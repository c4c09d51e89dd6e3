"""``streamrl reward test``: the whole command on files, and the report's numbers by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders.files import SORT_MODEL as MODEL

from streamrl.base.types import token_array
from streamrl.cli.main import main
from streamrl.cli.try_rewards.trial_completions import PlainText
from streamrl.cli.try_rewards.trial_report import histogram, signal_of, spread

REWARD = """
import os
def right(completion, *, answer):
    if completion == "boom":
        raise LookupError("no such answer")
    return float(completion == answer)
def parts(completion, *, answer):
    return {"right": float(completion == answer), "short": -len(completion) / 10}
def group(completions, *, answer):
    return [len(completion) for completion in completions]
def hangs(completion):
    while True:
        pass
def tokens(completion, *, token_ids):
    return len(token_ids)
def nothing(completion):
    return None
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts a and b; of a two completions are right, of b none and one raises."""
    (tmp_path / "mine.py").write_text(REWARD)
    prompts = [{"prompt": "a", "answer": "A", "prompt_id": "1"}, {"prompt": "b", "answer": "B"}, {"prompt": "c"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    completions: list[dict[str, Any]] = [
        {"prompt_id": 1, "completion": "A"},
        {"prompt_id": "1", "completion": "x\ud83d\ude00"},
        {"prompt": "b", "completions": ["x", "boom"]},
        {"prompt": 0, "prompt_id": "1", "text": "A", "token_ids": [9, 9, 9, 9], "finish_reason": "length"},
        {"prompt": "b", "completion": "x"},
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in completions))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["reward", "test", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


FILES = ("--prompts", "p.jsonl", "--completions", "c.jsonl")


@pytest.mark.started
def test_the_report_of_a_reward(work: Path, capfd) -> None:
    code, out, _ = run(capfd, "mine.py:right", *FILES, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["prompts"], report["completions"], report["scored"]) == (2, 6, 5)
    assert report["values"]["mean"] == pytest.approx(0.4)
    assert report["histogram"] == [{"low": 0, "high": 0, "count": 3}, {"low": 1, "high": 1, "count": 2}]
    assert report["signal"] == {
        "groups": 2, "flat": 1, "flat_low": 1, "flat_high": 0, "mean_std": pytest.approx(0.2357, abs=1e-4),
    }  # fmt: skip
    (failure,) = report["failures"]
    assert (failure["kind"], failure["count"]) == ("raised", 1)
    assert "LookupError: no such answer (mine.py:5)" in failure["message"]
    assert report["seconds"]["most"] >= report["seconds"]["p50"] > 0


def test_the_picture_for_people(work: Path, capfd) -> None:
    code, out, _ = run(capfd, "mine.py:right", *FILES)
    assert code == 0
    assert "5 of 6 completions scored" in out
    assert "1 of 2 carry signal (50%); 1 flat (1 all at the least value, 0 all at the greatest)" in out
    zero, one = (line for line in out.splitlines() if "█" in line)
    assert zero.count("█") > one.count("█") > 0
    assert "LookupError: no such answer" in out
    assert "-> 17% of the calls failed: those samples would not be trained" in out


def test_parts_groups_and_a_built_in_with_an_option(work: Path, capfd) -> None:
    report = json.loads(run(capfd, "mine.py:parts", *FILES, "--json")[1])
    assert report["parts"] == {"right": pytest.approx(1 / 3), "short": pytest.approx(-1 / 6)}
    report = json.loads(run(capfd, "mine.py:group", *FILES, "--json")[1])
    assert report["scored"] == 6
    report = json.loads(run(capfd, "exact", *FILES, "--option", "ignore_case=true", "-n", "1", "--json")[1])
    assert (report["reward"], report["prompts"], report["values"]["mean"]) == ("exact", 1, pytest.approx(2 / 3))


def test_a_hanging_function_is_ended_with_an_exit_code(work: Path, capfd) -> None:
    """A function that hangs is ended, and the exit code says that no completion was scored."""
    code, out, _ = run(capfd, "mine.py:hangs", *FILES, "--timeout", "0.1", "-n", "1")
    assert code == 1
    assert "every call failed: nothing would be trained" in out
    assert "timed_out" in out


def test_tokens_without_a_tokenizer_are_bytes(work: Path, capfd) -> None:
    """Tokens without a tokenizer are bytes, and the report says so."""
    out = run(capfd, "mine.py:tokens", *FILES)[1]
    assert "-> its token_ids were the bytes of the text: give --tokenizer MODEL" in out
    assert "bytes" not in run(capfd, "mine.py:right", *FILES)[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("mine.py:write", *FILES), 'has no "write"'),
        (("exat", *FILES), 'there is no built-in reward "exat"'),
        (("exact", *FILES, "--option", "colum=x"), 'option "colum" is unknown; did you mean "column"?'),
        (("exact", *FILES, "--option", "column=solution"), 'prompt 1 has no column "solution", which the reward exact'),
        (("exact", *FILES, "--option", "column"), "write --option key=value"),
        (("mine.py:right", *FILES, "-n", "0"), "must be above 0"),
        (("mine.py:right", "--prompts", "p.jsonl", "--completions", "none.jsonl"), "none.jsonl cannot be read"),
        (("mine.py:right", "--prompts", "p.jsonl", "--completions", "p.jsonl"), 'line 1 has no "completion"'),
        (("mine.py:right", "--prompts", "c.jsonl", "--completions", "c.jsonl"), "line 1 has no column"),
        (("mine.py:right", "--prompts", "p.jsonl", "--completions", "o.jsonl"), "no line belongs to a prompt of the 3"),
        (("mine.py:right", "--prompts", "p.jsonl", "--completions", "u.jsonl"), 'has no "prompt_id" and no "prompt"'),
    ],
)
def test_wrong_input_is_named_with_the_remedy(work: Path, capfd, arguments: tuple[str, ...], problem: str) -> None:
    (work / "o.jsonl").write_text('{"prompt_id": "zz", "completion": "x"}\n')
    (work / "u.jsonl").write_text('{"completion": "x"}\n')
    code, out, err = run(capfd, *arguments)
    assert (code, out) == (1 if "c.jsonl" in arguments[2] else 2, "")  # a bad row is met while it is read
    assert problem in err


def test_completions_must_come_from_somewhere(work: Path, capfd) -> None:
    code, out, err = run(capfd, "exact", "--prompts", "p.jsonl")
    assert (code, out) == (2, "")
    assert "name --completions FILE, --engine MODEL or --recipe RECIPE, or start this in a directory with a rec" in err


def test_completions_are_sampled_by_the_recipes_model(work: Path, capfd) -> None:
    """Completions come from the recipe of the current directory, and some of them are shown. As the README writes it:
    FUNCTION and --prompts alone. Simulated engines sample here, in the model's tokens."""
    (work / "recipe.toml").write_text(
        f'[model]\npath = "{MODEL}"\n[prompts]\ntrain = "p.jsonl"\n[[rewards]]\nfunction = "mine.py:right"\n'
        '[engines]\nkind = "simulated"\n[sampling]\nmax_tokens = 24\n'
    )
    (work / "sorting.jsonl").write_text('{"prompt": "312:"}\n{"prompt": "21:"}\n')
    (work / "mine.py").write_text("def length(completion):\n    return len(completion) / 100\n")
    code, out, _ = run(capfd, "mine.py:length", "--prompts", "sorting.jsonl", "--samples", "16")
    assert code == 0 and "reward length: 32 of 32 completions scored, 2 prompts of sorting.jsonl" in out
    sample = r"^reward (\d\.\d{3}), (\d+) tokens, (?:stop|length)\n  prompt  (?:312|21):\n  text    "
    shown = [(float(value), int(tokens)) for value, tokens in re.findall(sample, out, re.MULTILINE)]
    assert len(shown) == 5 and shown == sorted(shown) and shown[-1][1] <= 24
    report = json.loads(run(capfd, "mine.py:length", "--prompts", "sorting.jsonl", "--max-tokens", "7", "--json")[1])
    assert len(report["examples"]) == 5 and all(sample["tokens"] <= 7 for sample in report["examples"])


# ---- the numbers, by hand ------------------------------------------------------------------------


def test_histograms_have_a_bin_a_value_or_ten() -> None:
    """A histogram has one bin for each of a few values, and ten bins for many."""
    assert [(b.low, b.count) for b in histogram([1.0, 0.5, 1.0])] == [(0.5, 1), (1.0, 2)]
    bins = histogram([float(value) for value in range(101)])
    assert [b.count for b in bins] == [10] * 9 + [11]
    assert (bins[0].low, bins[-1].high) == (0.0, 100.0)
    assert sum(b.count for b in histogram([*map(float, range(20)), 1e308, -1e308])) == 22
    assert histogram([]) == ()


def test_spread_takes_values_that_occurred() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.least, found.p50, found.p95, found.most) == (2.5, 1.0, 2.0, 4.0, 4.0)
    assert found.std == pytest.approx(1.118, abs=1e-3)
    assert spread([]) is None


def test_flat_and_lone_groups_are_counted() -> None:
    """A group with equal values is flat, and a group with one value is alone."""
    signal = signal_of([[0, 0], [1, 1], [0, 1], [0.5], [0.5, 0.5], []])
    assert (signal.groups, signal.flat, signal.flat_low, signal.flat_high) == (4, 3, 1, 1)
    same = signal_of([[0.0, 0.0], [0.0, 0.0]])
    assert (same.flat, same.flat_low, same.flat_high) == (2, 0, 0)


def test_bytes_of_any_text_come_back() -> None:
    text = "a\nß\U0001f600\ud800"
    assert PlainText().decode(PlainText().encode(text)) == text
    assert PlainText().encode("ab") == token_array([97, 98])

"""Lines of the dry run about rows, and rewards that it calls: what a run would find out after minutes, or never."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders.files import ROOT

from streamrl.base.errors import RecipeError
from streamrl.cli.main import main
from streamrl.prepare.called_rewards import call_rewards
from streamrl.prepare.data_summary import data_lines
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.run.prompts.open_prompts import check_prompts
from streamrl.run.prompts.prompt_rows import read_prompt
from streamrl.run.prompts.prompt_spec import prompt_sources
from streamrl.run.prompts.row_notes import RowNotes

MODEL = ROOT / "examples" / "sort" / "model"
Write = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows to a file, and return its path."""

    def rows_to(name: str, rows: list[dict[str, Any]]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return rows_to


def lines(train: str, tokenizer: Tokenizer, **sections: Any) -> list[str]:
    """The lines of a recipe whose reward needs the column ``answer``."""
    table = {"model": {"path": str(MODEL)}, "prompts": {"train": train}, "rewards": [{"function": "m:f"}]}
    held_out = [f"evaluation.prompts.{name}={file}" for name, file in sections.pop("held_out", {}).items()]
    recipe = load_recipe(table | {"rollout": {"prompts_per_batch": 4}, "run": {"steps": 8}} | sections, held_out)
    notes = {}
    for path, spec in prompt_sources(recipe).items():
        notes[path] = RowNotes()
        assert check_prompts(spec, tokenizer, {"f": ("answer",)}, notes=notes[path]) == []
    return list(data_lines(recipe, notes))


def test_rows_passes_and_columns_without_values(tokenizer: Tokenizer, write: Write) -> None:
    rows = [{"prompt": f"{n}{n + 1}:", "answer": None if n % 3 == 2 else str(n)} for n in range(9)]
    file = write("rows.jsonl", [*rows, {"prompt": "12:", "answer": ""}])
    assert lines(file, tokenizer) == [
        "prompts.train: 10 rows; 32 prompts, 4 a step: 3.2 passes",
        "  warning: answer is null in 3 of 10 rows, the first is line 3",
        "  warning: answer is empty in 1 of 10 rows, the first is line 10",
        "  warning: the prompt is that of an earlier row in 1 of 10 rows, the first is line 10",
    ]
    large = lines(file, tokenizer, rollout={"prompts_per_batch": 25})
    assert large[0].endswith(
        "200 prompts, 25 a step: 20 passes; warning: a batch is larger than all rows, and has each 2.5 times"
    )


def test_held_out_prompts_that_are_trained_on(tokenizer: Tokenizer, write: Write) -> None:
    train = write("train.jsonl", [{"prompt": f"{n}:", "answer": "1"} for n in range(9)])
    other = write("other.jsonl", [{"prompt": f"{n}:", "answer": "2", "more": n} for n in range(7, 30)])
    held_out = {"same": train, "other": other, "own": write("own.jsonl", [{"prompt": "99:", "answer": "1"}])}
    assert lines(train, tokenizer, held_out=held_out)[1:] == [
        "evaluation.prompts.same: 9 rows",
        "  warning: 9 of its 9 different prompts are in prompts.train too",
        "evaluation.prompts.other: 23 rows",
        "  warning: 2 of its 23 different prompts are in prompts.train too",
        "evaluation.prompts.own: 1 rows",
    ]


@pytest.mark.parametrize(("closed", "rows"), [(8, "all 8"), (3, "3 of 8")])
def test_chats_that_end_with_their_answer(closed: int, rows: str, write: Write, tmp_path: Path) -> None:
    """As data sets for supervised training have them: the model is asked to go on behind the answer."""
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}:")
    answer = {"role": "assistant", "content": "1"}
    chats = [[{"role": "user", "content": str(n)}, *[answer] * (n < closed)] for n in range(8)]
    file = write("chats.jsonl", [{"messages": chat, "answer": "1"} for chat in chats])
    [_, line] = lines(file, load_tokenizer(tmp_path))
    note = f"the last message is the assistant's, which is continued, not answered, in {rows} rows, the first is line 1"
    assert line == f"  warning: {note}"


REWARDS = """
import time
def right(completion, *, answer): return float(completion == answer)
def text(completion, **columns): return "1.0"
def nothing(completion, **columns): print("scored")
def raises(completion, **columns): return 1.0 / 0
def blocks(completion, **columns): time.sleep(60)
def infinite(completion, **columns): return float("inf")
def first_letter(completion, **columns): return float(completion[0] == "1")
def short(completions, **columns): return [1.0]
async def patient(completion, **columns): return 1
def punishes(completion, *, answer): return 1.0 if completion == answer else -2.0
def keyed(completion, *, info): return info["level"]
"""


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("right", ""),
        ("patient", ""),
        ("text", "wrong_type: "),
        ("raises", "raised: ZeroDivisionError"),
        ("blocks", "timed_out: "),
        ("infinite", "not_finite: "),
        ("short", "wrong_type: "),
        ("keyed", "raised: TypeError"),
    ],
)
def test_each_reward_is_called(name: str, failure: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARDS)
    reward = {"function": f"{tmp_path}/reward.py:{name}", "timeout_s": 1.0, "retries": 3}
    table = {"model": {"path": str(MODEL)}, "prompts": {"train": "t.jsonl"}, "rewards": [{"function": "exact"}, reward]}
    prompt = read_prompt({"prompt": "12:", "answer": "12", "info": None}, 1, tokenizer)
    problems, notes = call_rewards(load_recipe(table), prompt, tokenizer)
    if failure:
        [problem] = problems
        assert problem.startswith(f"rewards: the reward \"{name}\" fails for the completion '12' of the first row (")
        assert failure in problem and problem.endswith(": correct it; `streamrl reward test` calls it alone")
    assert notes == [] and len(problems) == bool(failure)


def test_a_reward_below_0_is_refused_where_it_divides(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """By the sum of all rewards, and only where all of them can be called."""
    (tmp_path / "reward.py").write_text(REWARDS)
    rewards = [{"function": f"{tmp_path}/reward.py:punishes"}, {"function": "exact"}]
    table = {"model": {"path": str(MODEL)}, "prompts": {"train": "t.jsonl"}, "rewards": rewards}
    prompt = read_prompt({"prompt": "12:", "answer": "12"}, 1, tokenizer)
    assert call_rewards(load_recipe(table), prompt, tokenizer) == ([], [])
    table["objective"] = {"algorithm": "maxrl"}
    (problem,), _ = call_rewards(load_recipe(table), prompt, tokenizer)
    assert 'has the reward -2, and objective.advantages = "group_ratio" divides by the mean reward' in problem
    rewards.append({"function": "reward_model", "options": {"path": "m"}})
    assert call_rewards(load_recipe(table), prompt, tokenizer) == ([], [])


def test_a_reward_that_fails_for_an_empty_completion_is_noted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARDS)
    rewards = [{"function": f"{tmp_path}/reward.py:first_letter"}]
    rewards += [{"function": "reward_model", "options": {"path": "m"}}]
    recipe = load_recipe({"model": {"path": str(MODEL)}, "prompts": {"train": "t.jsonl"}, "rewards": rewards})
    problems, notes = call_rewards(recipe, read_prompt({"prompt": "12:", "answer": "12"}, 1, tokenizer), tokenizer)
    assert problems == [] and len(notes) == 1
    assert notes[0].startswith('the reward "first_letter" fails for an empty completion of the first row (raised: ')


@pytest.mark.parametrize("alone", [True, False])
def test_a_reward_without_a_value_is_noted(alone: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """None stands for a reward that is not applicable; where no other has a value, nothing can be trained."""
    (tmp_path / "reward.py").write_text(REWARDS)
    rewards = [{"function": f"{tmp_path}/reward.py:nothing"}, {"function": "exact"}][: 1 if alone else 2]
    recipe = load_recipe({"model": {"path": str(MODEL)}, "prompts": {"train": "t.jsonl"}, "rewards": rewards})
    problems, notes = call_rewards(recipe, read_prompt({"prompt": "12:", "answer": "12"}, 1, tokenizer), tokenizer)
    if alone:
        assert "not applicable: every reward function returned None" in problems[0]
    else:
        assert notes == ['the reward "nothing" returns no value (None) for the first row: it is left out there']


def test_the_dry_run_says_all_of_it(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(REWARDS)
    train = write("train.jsonl", [{"prompt": f"{n}:", "answer": None if n else "1"} for n in range(9)])
    (tmp_path / "recipe.toml").write_text(
        f'[model]\npath = "{MODEL}"\n[prompts]\ntrain = "{train}"\n[[rewards]]\nfunction = "reward.py:right"\n'
        '[[rewards]]\nfunction = "reward.py:raises"\n'
        f'[[rewards]]\nfunction = "reward.py:nothing"\n[engines]\nkind = "simulated"\n[run]\ndirectory = "{tmp_path}"\n'
        f'[evaluation]\nprompts = "{train}"\n[metrics]\nreport_to = ["prometheus?port=99999"]\n'
    )
    assert main(["train", str(tmp_path / "recipe.toml"), "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert "warning: answer is null in 8 of 9 rows, the first is line 2" in captured.out
    assert "warning: 9 of its 9 different prompts are in prompts.train too" in captured.out
    assert 'metrics.report_to: prometheus?port="99999" is no port: write a number up to 65535' in captured.err
    assert 'warning: the reward "nothing" returns no value (None) for the first row' in captured.out
    assert 'rewards: the reward "raises" fails for the completion' in captured.err


def test_the_dry_run_lists_rows_to_imitate(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """And their prompts count as trained; a file that is missing is in no line. A judge that compares is left out of
    evaluations without siblings."""
    train = write("train.jsonl", [{"prompt": f"{n}:", "answer": "1"} for n in range(9)])
    demo = write("demo.jsonl", [{"prompt": f"{n}:", "completion": "1"} for n in range(20, 24)])
    (tmp_path / "recipe.toml").write_text(
        f'[model]\npath = "{MODEL}"\n[prompts.train]\nsums = "{train}"\ngone = "gone.jsonl"\n'
        f'demo = {{ prompts = "{demo}", imitate = 0.5 }}\n[[rewards]]\nfunction = "exact"\n[[rewards]]\n'
        'function = "judge"\noptions = { endpoint = "http://h/v1", model = "m", compare = "pairs" }\n'
        f'[engines]\nkind = "simulated"\n[run]\ndirectory = "{tmp_path}"\nsteps = 6\n'
        f'[rollout]\nprompts_per_batch = 4\n[evaluation]\nprompts = "{demo}?answer=completion"\n'
    )
    assert main(["train", str(tmp_path / "recipe.toml"), "--dry-run"]) == 2
    captured = capsys.readouterr()
    rows = captured.out.partition("# the rows\n\n")[2].partition("\n\n")[0].splitlines()
    assert rows == [
        "prompts.train.sums: 9 rows; share 0.5; 12 prompts, 2 a step: 1.33 passes",
        "evaluation.prompts: 4 rows",
        "  warning: 4 of its 4 different prompts are in prompts.train too",
        "prompts.train.demo: 4 rows; imitated, 12 in 6 steps: 3 passes",
    ]
    assert "; without judge, which compares siblings: evaluation.samples = 1 has none" in captured.out
    assert "gone.jsonl" in captured.err


def test_a_missing_column_is_named_in_a_chat_too(tokenizer: Tokenizer, write: Write) -> None:
    file = write("rows.jsonl", [{"question": "12", "answer": "1"}] * 2)
    for options in ("?chat=true", "?system=Sort"):
        [problem] = check_prompts(f"{file}{options}", tokenizer, {})
        assert 'line 1 has no column "prompt" (it has question, answer): name the one with ?prompt=COLUMN' in problem
    [problem] = check_prompts(file, tokenizer, {})
    assert 'or "prompt_token_ids" (it has question, answer): add one, or ?prompt=COLUMN' in problem


def test_a_pasted_address_is_answered_with_the_name() -> None:
    """Of pages and files as browsers have them, and of pandas."""
    for address, name in {
        "https://huggingface.co/datasets/org/rows": "hf:org/rows",
        "https://huggingface.co/datasets/org/rows/viewer/default/train": "hf:org/rows",
        "https://hf.co/datasets/org/rows/blob/v2/data/a.parquet": "hf:org/rows@v2?files=data/a.parquet",
        "huggingface.co/datasets/org/rows/tree/main": "hf:org/rows",
        "hf://datasets/org/rows@v2/data/*.parquet": "hf:org/rows@v2?files=data/*.parquet",
        "s3://bucket/rows.jsonl": "download the file, and name the copy",
        "https://example.org/rows.jsonl": "download the file, and name the copy",
    }.items():
        with pytest.raises(RecipeError) as error:
            load_recipe({"model": {"path": "m"}, "prompts": {"train": address}, "rewards": [{"function": "m:f"}]})
        assert name in str(error.value) and "prompts.train" in str(error.value)
    with pytest.raises(RecipeError, match=r'is an address of the Hub: write "hf:org/tiny"'):
        table = {"model": {"path": "https://huggingface.co/org/tiny"}, "prompts": {"train": "t.jsonl"}}
        load_recipe(table | {"rewards": [{"function": "m:f"}]})

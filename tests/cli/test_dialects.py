"""Settings, files and command lines of TRL, verl, prime-rl and AReaL: answers, translations, mistakes."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from builders.files import rows_of_table
from builders.pretrained import MODEL_CONFIG, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from lint.coming_from_page import PAGE, page
from streamrl.base.errors import RecipeError
from streamrl.cli.command import parse_command
from streamrl.cli.dialects.conversions import CONVERSIONS
from streamrl.cli.dialects.setting_files import Foreign, read_settings
from streamrl.cli.dialects.translation import DEFAULT, translated
from streamrl.cli.main import main
from streamrl.cli.train import Train
from streamrl.recipe.dialects.foreign_keys import assigned, dialects, foreign_answer, switches
from streamrl.recipe.field_types import paths_in_view
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import parse_toml

HERE = Path(__file__).parent
PATHS = set(paths_in_view(Recipe, with_advanced=True))
GOOD = '[model]\npath = "m"\n[prompts]\ntrain = "t.jsonl"\n[[rewards]]\nfunction = "a:b"\n'


# ---- keys and values -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows_of_table(HERE / "foreign.txt"))
def test_a_foreign_setting_is_translated_or_answered(row: str) -> None:
    """What is set passes the check of a recipe; what is answered names the system whose key it is. What the rules say
    of the recipe is in the report."""
    written, _, expected = row.partition(" -> ")
    dialect, _, assignment = written.partition(" ")
    key, _, value = assignment.partition(" = ")
    settings = {key: parse_toml(f"value = {value}")["value"]}
    made = translated(Foreign("TRL" if dialect == "vLLM" else dialect, "settings", settings))
    (one,) = [one for one in made.settings if one.key == key and one.outcome != DEFAULT]
    assert f"{one.outcome}: {one.here}" == expected
    assert {f"{dialect}'s", "vLLM's"} & set(foreign_answer(key).split()) or key in PATHS
    said = [""]
    try:
        load_recipe(parse_toml(made.recipe))
    except RecipeError as error:
        said = error.problems
    assert {problem.removeprefix("recipe: ") for problem in said} <= {"", *(one.here for one in made.settings)}


def test_every_key_that_the_table_names_is_one_of_a_recipe() -> None:
    sections = {path.partition(".")[0] for path in PATHS}
    for dialect, table in dialects().items():
        assert len(table) >= 15, dialect
        for row in table.values():
            for effect in (row.here, *row.values.values()):
                named = [m[0].replace("N.", "") for m in re.finditer(r"\b[a-z_]+(\.(N|[a-z_0-9]+))+\b", effect)]
                named = [
                    name
                    for name in named
                    if name.partition(".")[0] in sections and not re.search("args[.]|_options[.]", name)
                ]
                assert set(named) <= PATHS | {"metrics.jsonl", "metrics.md"}, (row.key, effect)
                copies = effect[0] not in "-=~!" and row.key not in CONVERSIONS.get(dialect, {})
                assert not copies or assigned(effect, 1), (row.key, effect)
    assert all(key in dialects()[dialect] for dialect, table in CONVERSIONS.items() for key in table)
    assert all(any(key in table for table in dialects().values()) for key in switches())


def test_the_page_is_of_now() -> None:
    assert PAGE.read_text() == page(), (
        "run: python lint/coming_from_page.py > page; mv page docs/this_or_trl_verl_prime_rl.md"
    )


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows_of_table(HERE / "mistakes.txt"))
def test_a_mistake_is_answered_with_key_value_and_remedy(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written, _, expected = row.partition(" -> ")
    kind, _, text = written.partition(" ")
    lines = text.replace(" ; ", "\n") + "\n" if kind == "file" else ""
    Path("recipe.toml").write_text(GOOD + lines if lines.startswith("[") else lines + GOOD)
    words = {"set": ["--set", text], "line": shlex.split(text), "file": []}[kind]
    try:
        code = main(["train", "recipe.toml", *words])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2 and expected in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml"]


# ---- forms of a command line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("recipe.toml rollout.group_size=4", ["rollout.group_size=4"]),
        ("@ recipe.toml --rollout.group-size 4", ["rollout.group_size=4"]),
        ("@recipe.toml --rollout.group-size=4", ["rollout.group_size=4"]),
        ("--config recipe.toml --run.deterministic --dry-run", ["run.deterministic=true"]),
        ("--config=recipe.toml --no-run.deterministic", ["run.deterministic=false"]),
        ("+evaluation.limit=-1 recipe.toml --evaluation.every -1", ["evaluation.limit=-1", "evaluation.every=-1"]),
        ("recipe.toml --rewards.0.options.my-key 1", ["rewards.0.options.my-key=1"]),
        ("recipe.toml rollout.group-size=4 --set run.steps=3", ["rollout.group_size=4", "run.steps=3"]),
    ],
)
def test_a_command_line_as_others_write_it(line: str, overrides: list[str]) -> None:
    command = parse_command(Train, "train", shlex.split(line))
    assert (command.recipe, list(command.overrides)) == (Path("recipe.toml"), overrides)


def test_a_plus_is_taken_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    parse_command(Train, "train", ["recipe.toml", "+run.steps=3"])
    assert capsys.readouterr().err == "note: run.steps needs no +: a recipe knows all of its keys\n"


# ---- files ---------------------------------------------------------------------------------------

FILES = {path.name.removesuffix(".txt"): path.read_text() for path in (HERE / "dialects").iterdir()}
"""A file of each system, after their public examples."""
WANTED = """
verl.yaml verl model.path=Qwen/Qwen3-8B rollout.group_size=5 rollout.prompts_per_batch=64 training.updates_per_batch=4 \
    objective.kl_coefficient=0.001 objective.kl_estimator=k3 objective.algorithm=grpo run.steps=30 \
    objective.dual_clip=3.0 training.weight_decay=0.01 engines.gpu_memory_utilization=0.6 checkpoint.every=20 \
    rewards.0.function=my_reward.py:compute_score prompts.train=~/data/gsm8k/train.parquet
rl.toml prime-rl model.path=PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT rollout.group_size=16 \
    rollout.prompts_per_batch=8 rollout.rounds=continuous rollout.max_staleness=1 objective.advantages=group_mean \
    run.steps=20 sampling.max_tokens=128 engines.max_model_len=2048 run.name=reverse-text run.project=reverse-text
config.yaml AReaL model.path=Qwen/Qwen2.5-1.5B-Instruct rollout.group_size=4 rollout.prompts_per_batch=256 \
    rollout.max_staleness=2 off_policy.proximal=decoupled objective.clip_high=0.4 training.warmup_steps=3 \
    rewards.0.function=reward.py:reward
trl.yaml TRL rollout.group_size=4 rollout.prompts_per_batch=2 training.learning_rate=1e-06 training.epochs=3
"""


@pytest.mark.parametrize("row", WANTED.split("\n")[1:-1])
def test_a_file_of_another_system_becomes_a_recipe_that_dry_runs(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, dialect, *values = row.split()
    (tmp_path / name).write_text(FILES[name])
    made = translated(read_settings(tmp_path / name))
    assert made.dialect == dialect
    (tmp_path / "recipe.toml").write_text(made.recipe)
    table = parse_toml(made.recipe)
    for path, _, value in (text.partition("=") for text in values):
        assert str(_at(table, path)) == value, path
    assert not [one for one in made.settings if one.outcome == "not read"]
    # The model and the rows of somebody who has no network, and the rewards of what was in no file.
    write_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL_CONFIG | {"max_position_embeddings": 1 << 16}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 2 3", "answer": "1"}\n')
    for file, function in (("reward.py", "reward"), ("my_reward.py", "compute_score")):
        (tmp_path / file).write_text(f"def {function}(completion, *, answer):\n    return 1.0\n")
    own = f"model.path={tmp_path}/model prompts.train={tmp_path}/train.jsonl run.directory={tmp_path}/runs"
    own += " engines.kind=simulated evaluation.prompts= lora.targets=[]"
    assert main(["train", str(tmp_path / "recipe.toml"), "--dry-run", *own.split()]) == 0, capsys.readouterr().err
    assert "all checks passed" in capsys.readouterr().out


def _at(table: object, path: str) -> object:
    """The value of ``a.0.b``, or below ``advanced``."""
    for part in path.split("."):
        if isinstance(table, list):
            table = table[int(part)]
        else:
            assert isinstance(table, dict)
            table = table[part] if part in table else table["advanced"][part]
    return table


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("absent.yaml", None, "no such file: give a Python script of TRL, a .yaml of TRL or AReaL"),
        ("a.toml", "[prompts]\ntrain = 1\n", "is a recipe of streamrl already: streamrl train"),
        ("a.toml", "\n[trainer\nx=1", "a.toml:2: not valid TOML: Expected ']'"),
        ("a.yaml", "a: 1\nb: [1\n\nc: 2\n", "a.yaml:4: not valid YAML: "),
        ("a.yaml", "- 1\n", "has no settings: give"),
        ("a.yaml", "\nb: {c: 1, d: 2, c: 3}\n", 'a.yaml:2: not valid YAML: line 2: the key "c" is there 2 times'),
        (
            "a.yaml",
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n",
            "a.yaml is a configuration of accelerate, which says where a script runs and not what it trains",
        ),
        ("a.sh", "trl grpo --config c.yaml\n", "command lines and shell scripts are not read: give a Python script"),
        ("a.yaml", "a: &a [*a]\n", "not valid YAML: values inside of values"),
    ],
)
def test_what_is_not_read_is_refused(name: str, text: str | None, expected: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_settings(tmp_path / name)
    assert expected in caught.value.problems[0]


def test_without_pyyaml_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(FILES["trl.yaml"])
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RecipeError, match="reading YAML needs PyYAML: pip install pyyaml"):
        read_settings(tmp_path / "a.yaml")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.integers(0, 2000), st.integers(0, 40), st.text(max_size=4))
def test_a_damaged_file_is_refused_or_becomes_a_recipe(name: str, at: int, cut: int, junk: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(FILES[name][:at] + junk.encode(errors="replace").decode() + FILES[name][at + cut :])
        try:
            made = translated(read_settings(path))
        except RecipeError:
            return
    assert parse_toml(made.recipe) and made.lines()


def test_keys_for_one_thing_come_first_and_the_text_is_toml() -> None:
    """A key that sets one thing comes before a key that sets two, and the written text is TOML."""
    written = {"epsilon_high": 0.28, "epsilon": 0.1, "output_dir": "a\x07\nb", "adam\x07_epsilon\n": 1}
    table = parse_toml(translated(Foreign("TRL", "x", written)).recipe)
    assert table["objective"] == {"clip_low": 0.1, "clip_high": 0.28} and table["run"]["directory"] == "a\x07\nb"


def test_init_from_a_file_writes_a_folder_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trl.yaml").write_text(FILES["trl.yaml"])
    words = ["init", str(tmp_path / "task"), "--from", str(tmp_path / "trl.yaml")]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert (
        "translated:\n  model_name_or_path" in told and "  num_generations = 4\n      rollout.group_size = 4\n" in told
    )
    assert "default that differs:\n  seed = 42\n      run.seed = 42\n" in told
    assert told.endswith(
        f"next:\n  cd {tmp_path}/task\n  streamrl train recipe.toml --dry-run\n  streamrl try recipe.toml\n"
    )
    assert sorted(path.name for path in (tmp_path / "task").iterdir()) == ["recipe.toml"]
    assert main(words) == 2 and "is not empty" in capsys.readouterr().err
    words[1] = str(tmp_path / "other")
    assert main([*words, "--task", "math"]) == 2 and "--task: --from says it" in capsys.readouterr().err
    assert main([*words[:3], str(tmp_path / "absent.toml")]) == 2 and "no such file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["task", "trl.yaml"]
    (tmp_path / "my_reward.py").touch()
    (tmp_path / "verl.yaml").write_text(FILES["verl.yaml"])
    assert main(["init", str(tmp_path / "verl"), "--from", str(tmp_path / "verl.yaml")]) == 0
    assert f'function = "{tmp_path}/my_reward.py:compute_score"' in (tmp_path / "verl" / "recipe.toml").read_text()
    capsys.readouterr()
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["system"] == "TRL"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "packing: true\nlearning_rate: 1e-5\n", "a.yaml: packing = true: a setting of supervised"),
        ("a.yaml", "loss_type: vespo\n", 'a.yaml: loss_type = "vespo": it is none of the losses'),
        ("a.yaml", "gconfig: {n_samples: 4}\ntrain_dataset: {type: sft}\n", 'train_dataset.type = "sft": a setting'),
        ("a.toml", '[data]\nname = "rows"\n', 'data.name = "rows": a setting of supervised'),
        ("a.yaml", "algorithm: {adv_estimator: gpg}\n", 'adv_estimator = "gpg": it is none of the losses'),
        ("a.yaml", "data: {shuffle: true}\nnew: {a: 1}\n", "new is no section of verl that is known here"),
    ],
)
def test_another_method_or_section_is_refused(name: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as caught:
        translated(read_settings(tmp_path / name))
    assert expected in "\n".join(caught.value.problems)


VERL = (
    "algorithm: {adv_estimator: grpo}\nactor_rollout_ref:\n  rollout: {val_kwargs: %s}\ndata: {val_files: b.parquet}\n"
)
AREAL = "gconfig: {n_samples: 4}\nactor: {path: org/tiny}\n"


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (VERL % "{do_sample: false, temperature: 1.0}", "evaluation.temperature", "0.0"),
        (VERL % "{temperature: 1.0, do_sample: true}", "evaluation.temperature", "1.0"),
        ("algorithm: {adv_estimator: gae}\n", "objective.value_clip", "0.5"),
        (AREAL, "objective.kl_coefficient", "0.1"),
        ("use_vllm: true\n", "off_policy.correct_mismatch", "True"),
        ("use_vllm: true\n", "off_policy.mask_high", "3.0"),
        ("use_peft: true\n", "lora.alpha", "32.0"),
        (
            "dataset_name: org/rows\ndataset_train_split: 'train[:20]'\n",
            "prompts.train",
            "hf:org/rows?split=train&limit=20",
        ),
        ("steps_per_generation: 4\nmax_steps: 400\nwarmup_steps: 40\n", "training.warmup_steps", "10"),
        ("steps_per_generation: 4\nmax_steps: 400\nsave_steps: 100\n", "checkpoint.every", "25"),
        ("max_steps: 400\ngradient_accumulation_steps: 4\nsteps_per_generation: 1\n", "rollout.prompts_per_batch", "4"),
    ],
)
def test_a_setting_has_the_effect_that_it_has_there(text: str, path: str, value: str, tmp_path: Path) -> None:
    """Defaults of the other system, keys that another key switches, and units."""
    (tmp_path / "a.yaml").write_text(text)
    made = translated(read_settings(tmp_path / "a.yaml"))
    assert str(_at(parse_toml(made.recipe), path)) == value


def test_two_keys_for_one_value_are_decided_by_hand(tmp_path: Path) -> None:
    for sections in (
        "saver: {freq_steps: 100}\nrecover: {freq_steps: 10}\n",
        "recover: {freq_steps: 10}\nsaver: {freq_steps: 100}\n",
    ):
        (tmp_path / "a.yaml").write_text(AREAL + sections)
        refused = translated(read_settings(tmp_path / "a.yaml")).refused()
        assert any(line.startswith("checkpoint.every is 1") and line.endswith("choose one") for line in refused)

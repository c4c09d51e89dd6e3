"""What a run was started with, and who runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.recipe.load import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.run import run_inputs
from streamrl.run.run_inputs import changed_inputs, refuse_changes, write_inputs
from streamrl.run.run_lock import RunLock


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(4 << 20))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "score.py").write_text("def score(completion): return 1.0\n")
    (tmp_path / "recipe.toml").write_text(
        f"""
        [model]
        path = "{model}"
        [prompts]
        train = "{tmp_path}/rows.jsonl"
        [[rewards]]
        function = "{tmp_path}/score.py:score"
        """
    )
    return load_recipe(tmp_path / "recipe.toml")


def test_every_change_is_named(recipe: Recipe, tmp_path: Path) -> None:
    write_inputs(tmp_path, recipe)
    assert refuse_changes(tmp_path, recipe, force=False) == []
    (tmp_path / "rows.jsonl").write_text("{} \n")
    (tmp_path / "score.py").write_text("def score(completion): return 0.5\n")
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "added.json").write_text("{}")
    found = "\n".join(changed_inputs(tmp_path, recipe))
    assert found.count("\n") == 3
    for part in ("rows.jsonl is not as it was", "score.py is not", "config.json is not there", "added.json was not"):
        assert part in found
    with pytest.raises(RecipeError, match="--force") as refused:
        refuse_changes(tmp_path, recipe, force=False)
    assert refused.value.outcome == "the run was not resumed"
    assert len(refuse_changes(tmp_path, recipe, force=True)) == 4


def test_every_changed_setting_is_named(recipe: Recipe, tmp_path: Path) -> None:
    write_inputs(tmp_path, recipe)
    other = structs.replace(
        recipe,
        rollout=structs.replace(recipe.rollout, group_size=recipe.rollout.group_size + 1),
        rewards=(structs.replace(recipe.rewards[0], weight=0.5),),
    )
    assert changed_inputs(tmp_path, other) == [
        "rewards.0.weight was 1.0, now 0.5",
        f"rollout.group_size was {recipe.rollout.group_size}, now {recipe.rollout.group_size + 1}",
    ]
    longer = structs.replace(other, run=structs.replace(recipe.run, steps=recipe.run.steps + 5))
    chosen = frozenset({"run.steps", "rollout.group_size"})
    assert len(changed_inputs(tmp_path, longer)) == 3
    assert changed_inputs(tmp_path, longer, chosen) == changed_inputs(tmp_path, other), (
        "of these steps alone may change"
    )
    assert changed_inputs(tmp_path, structs.replace(recipe, rewards=recipe.rewards * 2))[0].startswith(
        "rewards.1.function was not set, now "
    )


def test_what_an_older_streamrl_did_not_note_is_not_asked_for(recipe: Recipe, tmp_path: Path) -> None:
    write_inputs(tmp_path, recipe)
    path = tmp_path / run_inputs.INPUTS_FILE
    noted = msgspec.json.decode(path.read_bytes())
    del noted["recipe"]
    path.write_bytes(msgspec.json.encode(noted))
    assert changed_inputs(tmp_path, recipe) == []


def test_all_code_of_the_user_is_looked_at(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine" / "scores"
    package.mkdir(parents=True)
    files = [package / "short.py", tmp_path / "together.py", tmp_path / "in_turn.py"]
    for file in [package / "__init__.py", *files]:
        file.write_text("raise SystemExit  # nobody imports it\n")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    chosen = structs.replace(
        recipe,
        rewards=(structs.replace(recipe.rewards[0], function="scores.short:score"),),
        reward_limits=structs.replace(recipe.reward_limits, combine=f"{files[1]}:both"),
        rollout=structs.replace(recipe.rollout, policy=f"{files[2]}:Rounds"),
    )
    write_inputs(tmp_path, chosen)
    assert changed_inputs(tmp_path, chosen) == []
    for file in files:
        file.write_text("")
    assert changed_inputs(tmp_path, chosen) == [f"{file} is not as it was when the run was started" for file in files]


def test_a_package_of_another_version_is_named(recipe: Recipe, tmp_path: Path) -> None:
    write_inputs(tmp_path, recipe)
    path = tmp_path / run_inputs.INPUTS_FILE
    then = msgspec.json.decode(path.read_bytes(), type=run_inputs.RunInputs)
    path.write_bytes(msgspec.json.encode(structs.replace(then, packages=then.packages | {"torch": "1.0"})))
    (found,) = changed_inputs(tmp_path, recipe)
    assert found.startswith("torch was 1.0, now ")


def test_large_files_are_known_by_size_head_and_tail(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_inputs, "_WHOLE_BYTES", 1 << 20)
    write_inputs(tmp_path, recipe)
    weights = tmp_path / "model" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert len(changed_inputs(tmp_path, recipe)) == 1
    with weights.open("ab") as file:
        file.truncate(3 << 20)
    assert len(changed_inputs(tmp_path, recipe)) == 1


def test_what_is_no_run_is_said(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(StreamRLError, match="not the directory of a run"):
        changed_inputs(tmp_path, recipe)


HOLD = """
import signal, sys
from pathlib import Path
from streamrl.run.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""


def test_one_process_runs_a_run_and_a_killed_one_lets_it_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RecipeError, match=f"process {other.pid}"):
            RunLock(tmp_path)
        other.kill()
    lock = RunLock(tmp_path)
    with pytest.raises(RecipeError, match="runs already"):
        RunLock(tmp_path)
    lock.release()
    lock.release()
    RunLock(tmp_path).release()

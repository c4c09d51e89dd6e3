"""What a run was started with, and who runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.launch.run_directory import INPUTS_FILE, RunInputs, changed_inputs, lock_run, refuse_changes, write_inputs
from streamrl.recipe.objective import Objective
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe


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


def test_settings_that_only_earlier_runs_recorded_are_no_change(recipe: Recipe, tmp_path: Path) -> None:
    write_inputs(tmp_path, recipe)
    file = tmp_path / INPUTS_FILE
    inputs = msgspec.json.decode(file.read_bytes(), type=RunInputs)
    earlier = inputs.recipe.replace("[transport]\n", '[transport]\nengines = "local"\ntraining = "local"\n')
    assert earlier != inputs.recipe
    file.write_bytes(msgspec.json.encode(structs.replace(inputs, recipe=earlier)))
    assert changed_inputs(tmp_path, recipe) == []


def test_every_change_is_named(recipe: Recipe, tmp_path: Path) -> None:
    write_inputs(tmp_path, recipe)
    assert refuse_changes(tmp_path, recipe, force=False) == []
    (tmp_path / "rows.jsonl").write_text("{} \n")
    (tmp_path / "score.py").write_text("def score(completion): return 0.25\n")
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "added.json").write_text("{}")
    found = "\n".join(changed_inputs(tmp_path, recipe))
    assert found.count("\n") == 3
    for part in (
        "rows.jsonl was 3 bytes, now 4 bytes",
        "score.py was 34 bytes, now 35 bytes",
        "config.json was 2 bytes, now not there",
        "added.json was not there, now 2 bytes",
    ):
        assert part in found
    with pytest.raises(RecipeError, match="--force") as refused:
        refuse_changes(tmp_path, recipe, force=False)
    assert refused.value.outcome == "the run was not resumed"
    assert len(refuse_changes(tmp_path, recipe, force=True)) == 4


def test_another_reference_is_no_resumed_run(recipe: Recipe, tmp_path: Path) -> None:
    """A run that resumes with another reference is refused: by its path, and by its files."""
    reference = tmp_path / "reference" / "model.safetensors"
    reference.parent.mkdir()
    reference.write_bytes(b"weights")
    compared = structs.replace(recipe, objective=Objective(kl_coefficient=0.1, reference=str(reference.parent)))
    write_inputs(tmp_path, compared)
    reference.write_bytes(b"other weights")
    assert changed_inputs(tmp_path, compared) == [f"{reference} was 7 bytes, now 13 bytes"]
    other = structs.replace(recipe, objective=Objective(kl_coefficient=0.1, reference=str(tmp_path / "other")))
    with pytest.raises(RecipeError, match=r"objective\.reference was"):
        refuse_changes(tmp_path, other, force=False, overridden={"objective.reference"})


def test_a_changed_loss_of_ones_own_is_named(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text("def loss(ratio, advantages): return -ratio * advantages\n")
    own = structs.replace(recipe, objective=Objective(function=f"{file}:loss"))
    write_inputs(tmp_path, own)
    assert changed_inputs(tmp_path, own) == []
    file.write_text("def loss(ratio, advantages): return -ratio\n")
    assert changed_inputs(tmp_path, own) == [f"{file} was 56 bytes, now 43 bytes"]


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


def test_a_package_of_another_version_is_named(recipe: Recipe, tmp_path: Path) -> None:
    write_inputs(tmp_path, recipe)
    path = tmp_path / INPUTS_FILE
    then = msgspec.json.decode(path.read_bytes(), type=RunInputs)
    path.write_bytes(msgspec.json.encode(structs.replace(then, packages=then.packages | {"torch": "1.0"})))
    (found,) = changed_inputs(tmp_path, recipe)
    assert found.startswith("torch was 1.0, now ")


def test_what_is_no_run_is_said(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(StreamRLError, match="not the directory of a run"):
        changed_inputs(tmp_path, recipe)


HOLD = """
import signal, sys
from pathlib import Path
from streamrl.launch.run_directory import lock_run
lock = lock_run(Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""


def test_one_process_runs_a_run_and_a_killed_one_lets_it_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RecipeError, match=f"process {other.pid}"):
            lock_run(tmp_path)
        other.kill()
    lock = lock_run(tmp_path)
    with pytest.raises(RecipeError, match="runs already"):
        lock_run(tmp_path)
    lock.close()
    lock.close()
    lock_run(tmp_path).close()

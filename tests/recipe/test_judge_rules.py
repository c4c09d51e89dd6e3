"""The recipe's ``[judge]`` and the rewards that ask it; and paths among the options of rewards."""

from __future__ import annotations

import shutil
from pathlib import Path

from builders.files import SORT_MODEL

from streamrl.base.run_process import usable_cores
from streamrl.learning.threads import served_threads, trainer_threads
from streamrl.recipe.rewards import reward_traits
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.topology import Role, model_socket, plan_topology
from streamrl.rewards.builtin.catalog import BUILTIN
from streamrl.rewards.judge.reward import JUDGE as JUDGE_REWARD
from streamrl.rewards.served.options import served_model_problems, served_options

HEAD = '[model]\npath = "m"\n[prompts]\ntrain = "t.jsonl"\n'
ASKING = '[[rewards]]\nfunction = "judge"\n'
OWN = '[judge]\nmodel = "j"\n'


def load(directory: Path, text: str, *overrides: str):
    path = directory / "demo.toml"
    path.write_text(HEAD + text)
    return load_recipe(path, overrides)


def test_the_judge_is_one_more_process_with_restarts_of_its_own(tmp_path: Path) -> None:
    recipe = load(tmp_path, OWN + "[judge.advanced]\nrestarts = 5\n" + ASKING, "transport.kind=tcp")
    assert recipe.judge.model == str(tmp_path / "j")
    topology = plan_topology(recipe, Path("/s"))
    (judge,) = [process for process in topology.processes if process.role is Role.JUDGE]
    assert (judge.name, judge.restarts) == ("judge-0", 5)
    assert model_socket(topology, Role.JUDGE) == Path("/s/judge-0.http")  # never a port, whatever the transport
    without = plan_topology(load(tmp_path, '[[rewards]]\nfunction = "a:b"\n'), Path("/s"))
    assert model_socket(without, Role.JUDGE) is None and not any(
        process.role is Role.JUDGE for process in without.processes
    )


def test_its_threads_are_taken_from_the_trainer(tmp_path: Path) -> None:
    recipe = load(tmp_path, OWN + ASKING)
    assert [served_threads(recipe.judge, cores) for cores in (1, 2, 8)] == [1, 1, 2]
    assert trainer_threads(recipe, 8, engines_on_cpu=True) == 2  # 4 for the engine
    assert trainer_threads(recipe, 2, engines_on_cpu=True) == 1
    assert served_threads(load(tmp_path, OWN + "[judge.advanced]\nthreads = 3\n" + ASKING).judge, 8) == 3
    assert served_threads(load(tmp_path, '[[rewards]]\nfunction = "a:b"\n').judge, 8) == 0


def test_a_model_that_cannot_judge_is_found_before_the_start(tmp_path: Path) -> None:
    recipe = load(tmp_path, OWN + ASKING)

    def problem(device: str = "cpu") -> str:
        (found,) = served_model_problems(recipe, device=device)
        return found

    assert "judge.model: " in problem() and "is not a directory: give a Hugging Face model directory" in problem()
    (tmp_path / "j").mkdir()
    assert "judge.model: " in problem() and "has no config.json" in problem()


def test_the_sort_model_of_the_demo_takes_no_chats(tmp_path: Path) -> None:
    model = SORT_MODEL
    own = f'[judge]\nmodel = "{model}"\n'
    (problem,) = served_model_problems(load(tmp_path, own + ASKING), device="cpu")
    assert "has no chat template, so it takes no chats: set chat = false" in problem
    shutil.copytree(model, tmp_path / "copy")  # with the template of a processor, which text models have none of
    (tmp_path / "copy" / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    copied = load(tmp_path, f'[judge]\nmodel = "{tmp_path / "copy"}"\n' + ASKING)
    assert "has no chat template" in next(served_model_problems(copied, device="cpu"))
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert not list(served_model_problems(copied, device="cpu"))
    recipe = load(tmp_path, own + ASKING + "[rewards.options]\nchat = false\n")
    assert not list(served_model_problems(recipe, device="cpu"))
    assert list(
        served_model_problems(load(tmp_path, own + "[judge.advanced]\nmax_model_len = 2048\n" + ASKING), device="cpu")
    ) == ["judge.advanced.max_model_len: 2048 is more than the model's 1024 positions: lower it"]
    options = served_options(recipe, Role.JUDGE, "/s", device="cpu")
    assert (options.max_model_len, options.pushed, options.sleeps) == (1024, False, False)
    assert options.variables["OMP_NUM_THREADS"] == str(served_threads(recipe.judge, usable_cores()))


def test_paths_among_options_are_relative_to_the_recipe(tmp_path: Path) -> None:
    text = (
        OWN
        + ASKING
        + '[rewards.options]\ncache = "answers.sqlite"\nquestion = "./{completion}"\n'
        + '[[rewards]]\nfunction = "reward_model"\n[rewards.options]\npath = "../classifier"\n'
        + '[[rewards]]\nfunction = "mine:own"\n[rewards.options]\nwords = "./words.txt"\n'
        + 'level = "../x"\nname = "path"\n'
    )
    recipe = load(tmp_path, text)
    judge, classifier, mine = (reward.options for reward in recipe.rewards)
    assert judge == {"cache": str(tmp_path / "answers.sqlite"), "question": "./{completion}"}
    assert classifier == {"path": str(tmp_path.parent / "classifier")}
    assert mine == {"words": str(tmp_path / "words.txt"), "level": str(tmp_path.parent / "x"), "name": "path"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "recipe.toml").write_text(dump_recipe(recipe))
    assert load_recipe(elsewhere / "recipe.toml") == recipe


def test_the_options_that_are_paths_are_there() -> None:
    declared = {name: {reward_traits(name).file, reward_traits(name).model} - {""} for name in BUILTIN}
    assert {name for name, options in declared.items() if options} == {"reward_model", "judge"}
    for name in ("reward_model", "judge"):
        reward = {**BUILTIN, "judge": JUDGE_REWARD}[name]
        assert declared[name] <= set(reward.options.__struct_fields__)  # type: ignore[attr-defined]

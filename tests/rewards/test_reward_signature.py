"""What a reward may look like, and what a user reads when it does not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from streamrl.base.errors import RecipeError
from streamrl.recipe.rewards import AdaptiveTimeout, Reward
from streamrl.rewards.calls.inspect import inspect_in_subprocess
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.signature import RewardSignature, needed_columns


def inspect_reward(spec: str, **options: object) -> RewardSignature:
    return load_reward(Reward(function=spec, options=options)).signature


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(
        textwrap.dedent("""
            from helper_beside import LIMIT
            def plain(completion): ...
            async def full(completion, answer, *, level=1, prompt, token_ids, **columns): ...
            def group(completions, *, answer): ...
            def nothing(): ...
            def only_named(*, completion): ...
            def only_kwargs(**columns): ...
            def anything(*args, **kwargs): ...
            def positional(completion, answer, /): ...
            def trl(prompts, completions, **kwargs): ...
            def both_forms(completion, completions): ...
            def prompt_first(prompt, answer): ...
            def single_values(completions: list[str], answer: str): ...
            def single_prompt(completions, prompt): ...
            def messages(completion: "list[dict]", answer): ...
            def either(completion: "list[dict] | str", answer): ...
            def either_column(completions, answer: str | list[str]): ...
            def verl(data_source, solution_str, ground_truth, extra_info): ...
            def generator(completion):
                yield 1.0
            class Scorer:
                def __call__(self, completion, answer): ...
            scorer = Scorer()
            number = 3""")
    )
    (tmp_path / "helper_beside.py").write_text("LIMIT = 3\n")
    return path


def test_signatures(module: Path) -> None:
    plain = inspect_reward(f"{module}:plain")
    assert (plain.per_group, plain.is_async, plain.wants_all, plain.columns) == (False, False, False, ())
    full = inspect_reward(f"{module}:full")
    assert (full.per_group, full.is_async, full.wants_all, full.columns) == (False, True, True, ("answer",))
    assert (full.optional_columns, full.provided, full.first) == (("level",), ("prompt", "token_ids"), "completion")
    group = inspect_reward(f"{module}:group")
    assert (group.per_group, group.columns, group.name) == (True, ("answer",), "group")
    trl = inspect_reward(f"{module}:trl")
    assert (trl.per_group, trl.first, trl.provided) == (True, "completions", ("prompts", "completion_ids"))
    verl = inspect_reward(f"{module}:verl")
    assert (verl.per_group, verl.first) == (False, "solution_str")
    assert (verl.columns, verl.optional_columns) == (("data_source", "ground_truth"), ("extra_info",))
    assert not inspect_reward(f"{module}:either").per_group
    assert inspect_reward(f"{module}:either_column").per_group
    assert inspect_reward(f"{module}:only_named").first == "completion"
    assert inspect_reward(f"{module}:anything").wants_all
    assert inspect_reward(f"{module}:scorer").columns == ("answer",)
    assert needed_columns([plain, full]) == {"plain": (), "full": ("answer",)}


def test_the_column_that_time_limits_follow_is_needed_too(module: Path) -> None:
    def needed(function: str, key: str) -> tuple[str, ...]:
        reward = Reward(function=f"{module}:{function}", name="r", adaptive_timeout=AdaptiveTimeout(key=key))
        (inspection,) = inspect_in_subprocess([reward])
        assert inspection.signature is not None, inspection
        assert "task" not in inspection.signature.columns  # the function is not called with it
        return needed_columns([inspection.signature])["r"]

    assert needed("plain", "prompt_id") == ()
    assert needed("plain", "task") == ("task",)
    assert needed("full", "answer") == ("answer",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "takes no completion"),
        ("only_kwargs", "takes no completion"),
        ("positional", 'parameter "answer" is positional-only'),
        ("both_forms", 'takes "completion" and "completions": keep'),
        ("prompt_first", '"prompt" gets something else, so name the one that gets it "completion"'),
        ("single_values", '"answer" is annotated str, and would get a list with one value for each completion'),
        ("single_prompt", 'asks for "prompt" beside "completions": a function of a group gets "prompts"'),
        ("messages", '"completion" is annotated list[dict], and would get the text of one completion'),
        ("generator", "return the reward instead of yielding it"),
        ("Scorer", "is a class"),
        ("number", "is a int, not a function"),
        ("absent", 'has no "absent" (it has '),
    ],
)
def test_wrong_signature_is_a_problem_with_a_remedy(module: Path, name: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        inspect_reward(f"{module}:{name}")
    assert words in str(caught.value)
    assert f"my_rewards.py:{name}" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_colon", "there is no built-in reward"),
        ("nowhere/reward.py:f", "there is no file"),
        ("no_such_module_here:f", 'there is no module "no_such_module_here"'),
        ("json:no_such_function", 'has no "no_such_function"'),
    ],
)
def test_what_cannot_be_found(spec: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        inspect_reward(spec)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_module_that_does_not_import(tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "broken_reward.py"
    path.write_text(body)
    with pytest.raises(RecipeError) as caught:
        inspect_reward(f"{path}:f")
    assert "cannot be imported" in str(caught.value)
    assert words in str(caught.value)


def test_file_named_like_an_imported_module_does_not_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "textwrap.py"
    path.write_text("def reward(completion): return 1.0")
    assert inspect_reward(f"{path}:reward").name == "reward"
    assert textwrap.__file__ != str(path)


@pytest.mark.long
def test_subprocess_survives_what_a_module_does(tmp_path: Path) -> None:
    bodies = {
        "prints": "print('noise')\ndef f(completion, answer): ...",
        "exits": "import os\nos._exit(7)",
        "hangs": "import re\nre.match(r'(a+)+b', 'a' * 60)",
        "after": "def f(completions): ...",
    }
    specs = []
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body)
        specs.append(f"{tmp_path / name}.py:f")
    found = inspect_in_subprocess([Reward(function=specs[i]) for i in (0, 1, 3, 2)], timeout_s=10.0)
    prints, exits, after, hangs = found
    assert prints.signature is not None
    assert prints.signature.columns == ("answer",)
    assert "exit code 7" in exits.problems[0]
    assert after.signature is not None
    assert after.signature.per_group
    assert "was not imported within" in hangs.problems[0]


def test_options_are_bound_and_no_columns_any_more(module: Path) -> None:
    full = inspect_reward(f"{module}:full", level=3)
    assert (full.columns, full.optional_columns, full.bound) == (("answer",), (), ("level",))
    with pytest.raises(RecipeError, match=r'takes no option "levle".*it takes answer'):
        inspect_reward(f"{module}:group", levle=3)


def test_a_name_without_a_colon_is_a_built_in_reward() -> None:
    with pytest.raises(RecipeError, match='no built-in reward "no_such_reward"'):
        inspect_reward("no_such_reward")


def test_process_that_inspects_ends_with_the_one_that_asked(tmp_path: Path) -> None:
    """Also one that a module has stopped: no timer of its own would end that."""
    module = tmp_path / "stops.py"
    module.write_text(
        "import os, signal\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    script = (
        "from streamrl.recipe.rewards import Reward\n"
        "from streamrl.rewards.calls.inspect import inspect_in_subprocess\n"
        f"inspect_in_subprocess([Reward(function={str(module) + ':reward'!r})])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as asking:
        while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
            time.sleep(0.01)
        inspecting = psutil.Process(int(pid))
        while inspecting.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        asking.kill()
    try:
        inspecting.wait(300)
    finally:
        if inspecting.is_running():
            inspecting.kill()

"""``rollout.system``: one line is what a paper sets, keys beside it override, and the recorded recipe says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.files import EXAMPLES
from tiers import quick_only

from streamrl.base.errors import RecipeError
from streamrl.cli.main import main
from streamrl.recipe.objective import Proximal
from streamrl.recipe.rules.explain import explain
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe, read_recipe
from streamrl.recipe.scheduling import DeferredPrompts, Rollout, RoundKind, SizingKind, System
from streamrl.recipe.sections import ReleaseKind

CODE = {"model": {"path": "m"}, "prompts": {"train": "t.jsonl"}, "rewards": [{"function": "a:b"}, {"function": "code"}]}


@pytest.mark.parametrize("system", quick_only(System, [System.ROLLPACKER, System.FASTEST]))
def test_an_example_is_the_line_alone_and_passes_the_dry_run(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / "systems" / f"{system}.toml"
    recipe, lines = read_recipe(path)
    assert recipe == load_recipe(
        EXAMPLES / "systems" / "synchronous.toml", [f"rollout.system={system}", f"run.name={system}"]
    )
    (tmp_path / "recorded.toml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recorded.toml") == recipe, "a resumed run has what the first life had"
    assert main(["train", str(path), "--dry-run", "--set", "engines.kind=simulated"]) == 0
    printed = capsys.readouterr().out
    assert "# what rollout.system sets\n\n" + "\n".join(lines) + "\n" in printed
    explained = "\n".join(explain("rollout.system"))
    assert all(f"{line.split()[0]} " in explained for line in lines) and len(lines) >= 3


def test_keys_beside_a_system_override_it(tmp_path: Path) -> None:
    """Each key beside a system overrides it, also with the default value of the key."""
    own = {"response_oversampling": 1.0, "prompt_oversampling": 1.5, "deferred_prompts": "replay"}
    table = {**CODE, "rollout": {"system": "rollpacker"}, "tail_batching": own, "engines": {"count": 2}}
    recipe, lines = read_recipe(table)
    tail = recipe.tail_batching
    assert (tail.prompt_oversampling, tail.response_oversampling, tail.deferred_prompts) == (1.5, 1.0, "replay")
    assert recipe.rollout.rounds is RoundKind.TAIL_BATCHING and recipe.engines.release is ReleaseKind.DRAIN
    assert [one.late_is_wrong for one in recipe.rewards] == [False, True], "limits of sandboxed code adapt, no others"
    assert sum("(yours, not 1.25)" in line for line in lines) == 2
    (tmp_path / "recorded.toml").write_text(dump_recipe(recipe))
    again = load_recipe(tmp_path / "recorded.toml")
    assert again.tail_batching == tail and again.rollout == recipe.rollout, "nothing is overridden a second time"
    alone = load_recipe(CODE, ["rollout.system=rollpacker"])
    assert alone.engines.release is ReleaseKind.NEVER, "there is no other engine to go on"
    assert alone.tail_batching.deferred_prompts is DeferredPrompts.REGENERATE


def test_what_follows_from_a_key_follows_from_that_of_the_recipe() -> None:
    partial = load_recipe(CODE, ["rollout.system=sortedrl_partial", "length_sorted.cohort_batches=3"])
    assert partial.rollout.max_staleness == 2 and partial.off_policy.proximal is Proximal.BEHAVIOR
    on_policy = load_recipe(CODE, ["rollout.system=sortedrl", "objective.algorithm=ppo"])
    assert on_policy.length_sorted.single and on_policy.objective.algorithm == "ppo"
    assert load_recipe(CODE, ["rollout.system=sagc"]).group_sizing.kind is SizingKind.SAGC


def test_a_struct_cannot_say_which_keys_were_written() -> None:
    with pytest.raises(RecipeError, match=r'rollout.system: "sagc" is applied while a recipe is read: give a file or '):
        Rollout(system=System.SAGC)


def test_a_problem_with_what_the_line_set_points_at_the_line(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text((EXAMPLES / "systems" / "sortedrl.toml").read_text() + '\n[objective]\nalgorithm = "grpo"\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith("system"))
    [problem] = caught.value.problems
    assert problem.startswith(f'{path}:{line} (system = "sortedrl"): length_sorted.advanced.single: true takes groups')

"""Learning rates by version, run length by epochs, and several held-out sets in a recipe."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from streamrl.base.errors import RecipeError
from streamrl.prepare.run_length import with_steps_of_epochs
from streamrl.prepare.summary import arithmetic_lines
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.schedules.schedule import SCHEDULES, changed_rate_notices, rate_factor
from streamrl.recipe.sections import Training

SMALL = {"model": {"path": "m"}, "prompts": {"train": "t.jsonl"}, "rewards": [{"function": "a:b"}]}
STEPS = 40


Options = dict[str, float | str]
CASES: list[tuple[str, Options]] = [
    *((name, {}) for name in ("constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt")),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.0}),
    ("polynomial", {"power": 2.0, "min_lr_rate": 0.2}),
    ("inverse_sqrt", {"timescale": 7}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "min_lr_ratio": 0.05}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "decay_type": "1-sqrt"}),
]


def rates_of_transformers(name: str, options: Options, warmup: int) -> list[float]:
    """Of each step, with a base rate of 1. A polynomial ends with a rate there, which is its share of 1."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if name == "polynomial":
        options = {"power": options["power"], "lr_end": options["min_lr_rate"]}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(name, optimizer, warmup, STEPS, scheduler_specific_kwargs=dict(options))
    rates = []
    for _ in range(STEPS):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.torch
@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_rates_equal_transformers_behind_the_warm_up(name: str, options: Options, warmup: int) -> None:
    """Rates equal those of transformers behind a warm-up that begins above zero."""
    training = Training(schedule=name, schedule_options=options, warmup_steps=warmup)
    rates = [rate_factor(training, version, STEPS) for version in range(1, STEPS + 1)]
    assert rates[:warmup] == [(step + 1) / 5 for step in range(warmup)]
    assert rates[warmup:] == pytest.approx(rates_of_transformers(name, options, warmup)[warmup:], abs=1e-12)
    assert {name for name, _ in CASES} == set(SCHEDULES), "every schedule is compared"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_rate_depends_on_its_version_and_ends_flat(name: str) -> None:
    """A rate depends on its version alone, and stays at the end of the schedule."""
    training = Training(schedule=name, warmup_steps=3, schedule_steps=STEPS)
    there, back = range(1, 2 * STEPS), range(2 * STEPS - 1, 0, -1)
    rates = [rate_factor(training, version, 2 * STEPS) for version in there]
    assert rates == [rate_factor(training, version, 2 * STEPS) for version in back][::-1]
    assert all(0 <= rate <= 1 for rate in rates) and rates[0] == 1 / 3
    assert name == "inverse_sqrt" or len(set(rates[STEPS:])) == 1, "a cosine does not rise again"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["training.schedule=cosine"], ["ends with step 200 now and ended with step 100", "from 2.47e-10 to 5.0"]),
        (["training.schedule=cosine", "training.advanced.schedule_steps=400"], []),
        (["training.schedule=inverse_sqrt"], []),
        ([], []),
    ],
)
def test_more_steps_say_what_becomes_of_the_rates(settings: list[str], said: list[str]) -> None:
    before, after = (load_recipe(SMALL, [f"run.steps={steps}", *settings]) for steps in (100, 200))
    notices = changed_rate_notices(before, after)
    assert len(notices) == bool(said) and all(part in notices[0] for part in said), notices
    assert changed_rate_notices(after, after) == []


def test_the_dry_run_shows_the_rates_the_project_and_the_tags() -> None:
    chosen = ["training.schedule=linear", "training.warmup_steps=2", "training.learning_rate=1e-5", "run.steps=10"]
    lines = arithmetic_lines(load_recipe(SMALL, [*chosen, "run.project=sums", 'run.tags=["a", "b"]']))
    assert "schedule    linear: learning rate 5e-06 at 1, 1e-05 at 3, 7.5e-06 at 5, 1.25e-06 at 10" in lines
    assert "record      project sums; tags a, b" in lines


@pytest.mark.parametrize(("epochs", "limit", "steps"), [(1, "", 5), (2.5, "", 13), (0.01, "", 1), (3, "?limit=8", 3)])
def test_epochs_are_as_many_steps_as_draw_every_prompt(epochs: float, limit: str, steps: int, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "1"}\n' * 40)
    named = [f"prompts.train={tmp_path}/t.jsonl{limit}", f"training.epochs={epochs}", "rollout.prompts_per_batch=8"]
    recipe, text = with_steps_of_epochs(load_recipe(SMALL, named))
    size = 8 if limit else 40
    prompts = math.ceil(epochs * size)
    assert (recipe.run.steps, recipe.run.prompts, recipe.training.epochs) == (steps, prompts, 0)
    assert text == f"epochs      {float(epochs)} of {size} prompts: run.prompts = {prompts}, {steps} steps of 8"
    assert load_recipe(SMALL, ["run.steps=7"]) == with_steps_of_epochs(load_recipe(SMALL, ["run.steps=7"]))[0]
    endless = load_recipe(SMALL, ["prompts.train=task.py:rows", "training.epochs=1"])
    with pytest.raises(RecipeError, match=r"an iterator, which has no length: set run\.steps in its place"):
        with_steps_of_epochs(endless)


def test_held_out_sets_take_omitted_keys_from_the_section(tmp_path: Path) -> None:
    """Held-out sets have names, and take the keys that they omit from the section."""
    sets = '{a = "a.jsonl", b = {prompts = "b.jsonl?limit=9", every = 6}, c = {prompts = "c.jsonl", limit = 3}}'
    made = load_recipe(SMALL, [f"evaluation.prompts={sets}", "evaluation.every=4", "evaluation.limit=5"])
    found = {name: (Path(one.prompts).name, one.every, one.limit) for name, one in made.evaluation.sets.items()}
    assert found == {"a": ("a.jsonl", 4, 5), "b": ("b.jsonl?limit=9", 6, 5), "c": ("c.jsonl", 4, 3)}
    assert made.evaluation.regular == (2, 5), "control counts in steps that all have in common"
    assert all(Path(one.prompts).is_absolute() for one in made.evaluation.sets.values())
    (tmp_path / "again.toml").write_text(dump_recipe(made))
    assert load_recipe(tmp_path / "again.toml") == made
    assert load_recipe(SMALL, ["evaluation.prompts.a=a.jsonl"]).evaluation.regular == (0, 0)
    assert load_recipe(SMALL).evaluation.sets == {}

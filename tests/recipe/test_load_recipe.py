"""Reading recipes: every error at once with its place and remedy; overrides; paths; the round trip."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders.files import SORT_RECIPE as DEMO
from builders.recipe import small_recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import RecipeError
from streamrl.recipe.objective import Objective
from streamrl.recipe.objectives.catalog import METHODS
from streamrl.recipe.rules.load_recipe import check_recipe, dump_recipe, load_recipe
from streamrl.recipe.scheduling import InFlight, Rollout, RoundKind
from streamrl.recipe.sections import Engines, Evaluation, Model, Prompts, Recipe, Reward, Sampling, Training

GOOD = """\
[model]
path = "model"

[prompts]
train = "train.jsonl"

[[rewards]]
function = "reward.py:score"
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "demo.toml"
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return [problem.replace(f"{path}", "demo.toml") for problem in caught.value.problems]


def test_minimal_recipe_takes_defaults_and_resolves_paths(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.model.path == str(tmp_path / "model")
    assert recipe.prompts.train == str(tmp_path / "train.jsonl")
    assert recipe.rewards[0].function == f"{tmp_path / 'reward.py'}:score"
    assert recipe.evaluation.prompts == ""
    assert recipe.run.directory == "runs", "stays relative to the current directory"
    assert recipe.rollout == Rollout()


def test_a_recipe_that_an_earlier_run_recorded_is_read(tmp_path: Path) -> None:
    """Every run wrote who starts engines and ranks, when a person could; a recipe that names a person is refused.
    Variables of a reward were its ``environment``."""
    text = f'{GOOD}environment = ["KEY"]\n\n[transport]\nengines = "local"\ntraining = "local"\n'
    recorded = load_recipe(write(tmp_path, text))
    assert recorded == load_recipe(write(tmp_path, f'{GOOD}variables = ["KEY"]\n'))
    (problem,) = problems_of(write(tmp_path, f'{GOOD}\n[transport]\nengines = "external"\n'))
    assert "transport.engines: unknown key" in problem


def test_files_of_an_mcp_command_are_beside_the_recipe(tmp_path: Path) -> None:
    """Files in the command of an MCP server are relative to the recipe."""
    (tmp_path / "my server.py").touch()
    text = f"{GOOD}\n[environment]\ntools = ['mcp:python -u \"my server.py\" rows.csv', 'tools.py:add']\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.environment.servers == (["python", "-u", str(tmp_path / "my server.py"), "rows.csv"],)
    assert recipe.environment.tools[1] == f"{tmp_path / 'tools.py'}:add"
    text += "[[environment.advanced.further]]\nname = 'game'\nenv = 'game.py:Game'\n"
    game = load_recipe(write(tmp_path, text)).environment.by_name["game"]
    assert game.env == f"{tmp_path / 'game.py'}:Game" and not game.tools


def test_module_specs_and_absolute_paths_stay(tmp_path: Path) -> None:
    text = GOOD.replace('"reward.py:score"', '"package.module:score"').replace('"train.jsonl"', '"package.rows:stream"')
    recipe = load_recipe(write(tmp_path, text.replace('"model"', '"/models/tiny"')))
    assert recipe.rewards[0].function == "package.module:score"
    assert recipe.prompts.train == "package.rows:stream"
    assert recipe.model.path == "/models/tiny"


BAD = """\
[run]
stepz = 3

[modle]
path = "m"

[prompts]
train = "train.jsonl"
temperature = 3

[[rewards]]
function = "no-name"
weight = "a"

[rollout]
group_size = 0
rounds = "async"
max_staleness = 2

[sampling]
top_p = 1.5
temperature = true

[training]
learning_rate = inf
"device" = "tpu"

[evaluation]
every = 5
"""

GOLDEN = [
    (
        'demo.toml:2: run.stepz: unknown key; did you mean "steps"? Keys of [run]: name, project, tags, directory, '
        "seed, steps, journal, deterministic; below [run.advanced]: prompts, restarts, observers, stall_timeout_s"
    ),
    (
        'demo.toml:4: modle: unknown section; did you mean "model"? Sections: model, prompts, rewards, environment, '
        "run, rollout, tail_batching, length_sorted, kv_admission, group_sizing, "
        "sampling, reward_limits, judge, teacher, objective, off_policy, training, lora, engines, weights, evaluation, "
        "checkpoint, transport, cluster, metrics"
    ),
    (
        'demo.toml:9: prompts.temperature: unknown key; did you mean "sampling.temperature" or '
        '"evaluation.temperature"? Keys of [prompts]: train, template, answer, template_arguments, shuffle, '
        "skip_solved, pools"
    ),
    'demo.toml:13: rewards.0.weight: "a" is not allowed: must be a number',
    "demo.toml:16: rollout.group_size: 0 is not allowed: must be an integer > 0",
    (
        'demo.toml:17: rollout.rounds: "async" is not allowed: must be one of "synchronous", "tail_batching", '
        '"length_sorted", "continuous", "auto", "custom"'
    ),
    "demo.toml:21: sampling.top_p: 1.5 is not allowed: must be a number > 0 and <= 1",
    "demo.toml:22: sampling.temperature: true is not allowed: must be a number > 0",
    "demo.toml:25: training.learning_rate: inf is not allowed: must be finite",
    'demo.toml: model: missing: add [model] with "path"',
    (
        'demo.toml:12: rewards.0.function: "no-name" does not name a function: write "module:function", '
        '"path/to/file.py:function" or the name of a built-in reward'
    ),
    "demo.toml:28: evaluation.prompts: is empty, but evaluation.every = 5: name held-out prompts, or set every = 0",
    (
        'demo.toml:26: training.device: "tpu" is not allowed: must be one of "auto", "cpu", "cuda", "cuda:0", '
        '"cuda:1", ...'
    ),
]


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    # training.device is checked by a rule, which comes with the other rules after the fields.
    assert sorted(problems_of(write(tmp_path, BAD))) == sorted(GOLDEN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout = 3\n" + GOOD, "demo.toml:1: rollout: 3 is not a section: write [rollout] and its keys below"),
        (GOOD.replace("[[rewards]]", "[rewards]"), "demo.toml:7: rewards: must be a list of tables: write [[rewards]]"),
        ("steps = 3\n" + GOOD, 'demo.toml:1: steps: unknown key outside a section; did you mean "run.steps"?'),
        (GOOD.replace('path = "model"', ""), "demo.toml:1: model.path: missing: must be a string"),
        (GOOD.partition("[[")[0] + "rewards = []\n", "prompts.rewards: unknown key"),
        (GOOD.replace("[model]", "[model"), "demo.toml:1: not valid TOML: "),
        (GOOD + 'name = "', "demo.toml:9: not valid TOML: Unterminated string"),
        (GOOD + '[run]\nname = """\n\n', "demo.toml:11: not valid TOML: Unterminated string"),
        (GOOD + "[run]\nsteps = \x003\n", "demo.toml:10: not valid TOML: "),
        (GOOD + "[model]\n", "demo.toml:9: not valid TOML: Cannot declare"),
    ],
)
def test_messages(tmp_path: Path, text: str, expected: str) -> None:
    assert any(expected in problem for problem in problems_of(write(tmp_path, text))), problems_of(
        write(tmp_path, text)
    )


def test_a_checkpoint_is_named_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link ``latest`` must be followed when the recipe is read: the run that begins then moves it."""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("first")
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(write(tmp_path / "recipes", GOOD), ["checkpoint.resume_from=runs/latest"])
    assert recipe.checkpoint.resume_from == str(tmp_path / "runs" / "first")


def test_recipes_made_in_python_meet_the_same_rules() -> None:
    with pytest.raises(RecipeError, match="does not fit rounds"):
        check_recipe(small_recipe(rollout=Rollout(max_staleness=3)))
    with pytest.raises(RecipeError, match='algorithm: "grpoo" is not allowed: must be one of "grpo"'):
        check_recipe(small_recipe(objective=Objective(algorithm="grpoo")))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path)


# ---- overrides -----------------------------------------------------------------------------------


def test_overrides(tmp_path: Path) -> None:
    overrides = [
        "rollout.group_size=4",
        "run.name = try-2",
        "run.tags=one, two",
        "rewards.0.weight=2",
        "rewards.1.function=other:length",
        'engines.cores=["0-1"]',
        "rollout.rounds=continuous",
        "rollout.max_staleness=1",
        "prompts.shuffle=false",
        "sampling.temperature=1",
        'evaluation.prompts="held.jsonl"',
    ]
    recipe = load_recipe(write(tmp_path, GOOD), overrides)
    assert recipe.rollout.group_size == 4
    assert (recipe.run.name, recipe.run.tags) == ("try-2", ("one", "two"))
    assert [reward.weight for reward in recipe.rewards] == [2.0, 1.0]
    assert recipe.rewards[1].function == "other:length"
    assert recipe.engines.cores == ("0-1",)
    assert recipe.rollout.rounds is RoundKind.CONTINUOUS
    assert not recipe.prompts.shuffle
    assert isinstance(recipe.sampling.temperature, float)
    assert recipe.evaluation.prompts == str(tmp_path / "held.jsonl")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_size", "--set rollout.group_size: write --set section.key=value"),
        ("=3", "--set =3: write --set section.key=value"),
        ("rewards.5.weight=3", "--set rewards.5.weight=3: rewards.5 is not there to be set"),
        ("rewards.weight=3", "--set rewards.weight=3: name a key of the item"),
        ("model.path.x=3", "--set model.path.x=3: model.path is not there to be set"),
        ("rollout.group_sise=3", '--set: rollout.group_sise: unknown key; did you mean "group_size"?'),
        ("run.seed=1\nsteps=2", '--set: run.seed: "1\\nsteps=2" is not allowed'),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, expected: str) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD), override)
    assert problem.startswith(expected)


# ---- round trip ----------------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), max_size=20)
positive_float = st.floats(1e-300, 1e300)


@settings(max_examples=100, deadline=None)
@given(
    recipe=st.builds(
        Recipe,
        model=st.builds(Model, path=st.just('/models/\u00e4 "q" \\ \t\x7f#')),
        prompts=st.builds(Prompts, train=st.just("/data/rows.jsonl"), shuffle=st.booleans()),
        rewards=st.lists(st.floats(-9, 9).filter(bool), min_size=1, max_size=3).map(
            lambda weights: tuple(Reward(function=f"module:f{i}", weight=w) for i, w in enumerate(weights))
        ),
        rollout=st.builds(
            Rollout,
            prompts_per_batch=st.integers(1, 99),
            group_size=st.integers(2, 99),
            rounds=st.just(RoundKind.CONTINUOUS),
            max_staleness=st.integers(1, 99),
            in_flight=st.sampled_from(InFlight),
        ),
        sampling=st.builds(Sampling, temperature=st.floats(0.01, 2), top_p=st.floats(1e-9, 1)),
        objective=st.builds(
            Objective,
            algorithm=st.sampled_from(sorted({*METHODS} - {"distillation"})),  # which needs a teacher
            entropy_coefficient=st.floats(-1, 1),
        ),
        training=st.builds(Training, learning_rate=st.floats(0, 1)),
        engines=st.integers(1, 4).map(lambda n: Engines(count=n, cores=tuple(f"{i}-{i + 1}" for i in range(n)))),
        evaluation=st.builds(Evaluation, temperature=st.none() | st.floats(1e-9, 2)),
    )
)
def test_dump_and_load_round_trip(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.mktemp("round") / "recipe.toml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


@settings(max_examples=200, deadline=None)
@given(value=text, number=st.floats(allow_nan=False))
def test_written_values_are_toml(value: str, number: float) -> None:
    class Section(msgspec.Struct):
        text: str
        number: float

    class Document(msgspec.Struct):
        section: Section

    from streamrl.recipe.toml_text import toml_document

    parsed: Any = tomllib.loads(toml_document(Document(Section(value, number))))
    assert parsed == {"section": {"text": value, "number": number}}


@settings(max_examples=100, deadline=None)
@given(
    junk=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | text,
        lambda children: st.lists(children, max_size=3) | st.dictionaries(text, children, max_size=3),
        max_leaves=6,
    ),
    section=st.sampled_from(["model", "rewards", "rollout", "training", "nonsense", ""]),
)
def test_any_file_gives_problems_and_no_other_exception(
    tmp_path_factory: pytest.TempPathFactory, junk: Any, section: str
) -> None:
    """A file with any content leads to problems and never to another exception."""
    from streamrl.recipe.check_fields import CheckedTable
    from streamrl.recipe.dialects.foreign_keys import foreign_answer
    from streamrl.recipe.problems import Origin

    table = tomllib.loads(GOOD) | {section: junk}
    checked = CheckedTable(table, Origin("demo.toml", {}), foreign_answer)
    assert checked.problems or msgspec.convert(checked.values, Recipe)


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"\xef\xbb\xbf" + DEMO.read_bytes())
    assert load_recipe(tmp_path / "recipe.toml").run.name == "sort"


def test_lists_of_tables_have_advanced_keys_below_advanced(tmp_path: Path) -> None:
    """Also where a recipe is written again, as the run's own recipe is, and in the place that a problem names."""
    text = f"{GOOD}\n[environment]\nenv = 'game.py:Game'\n[[environment.advanced.further]]\nname = 'chess'\n"
    written = text + "env = 'game.py:Chess'\nadvanced.history = 'template'\n"
    recipe = load_recipe(write(tmp_path, written))
    assert recipe.environment.further[0].history == "template"
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe
    (problem,) = problems_of(write(tmp_path, text + "env = 'game.py:Chess'\nhistory = 'template'\n"))
    assert "environment.advanced.further.0.history: belongs into [environment.advanced.further.advanced]" in problem
    (problem,) = problems_of(write(tmp_path, text + "env = 'game.py:Chess'\nadvanced.tool_seconds = -1\n"))
    assert "environment.advanced.further.0.advanced.tool_seconds: -1 is not allowed" in problem

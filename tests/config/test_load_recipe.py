"""Reading recipes: every error at once with its place and remedy; overrides; paths; the round trip."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config.load import check_recipe, dump_recipe, load_recipe
from streamrl.config.recipe import (
    Engines,
    Evaluation,
    InFlight,
    Model,
    Prompts,
    Recipe,
    Reward,
    Rollout,
    RoundKind,
    Sampling,
    Training,
)
from streamrl.errors import RecipeError

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
function = "noname"
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
    'demo.toml:2: run.stepz: unknown key; did you mean "steps"? Keys of [run]: name, directory, seed, steps',
    (
        'demo.toml:4: modle: unknown section; did you mean "model"? Sections: model, prompts, rewards, run, rollout, '
        "sampling, reward_limits, training, engines, weights, evaluation, checkpoint, transport, metrics"
    ),
    (
        'demo.toml:9: prompts.temperature: unknown key; did you mean "sampling.temperature"? '
        "Keys of [prompts]: train, shuffle"
    ),
    'demo.toml:13: rewards.0.weight: "a" is not allowed: must be a number',
    "demo.toml:16: rollout.group_size: 0 is not allowed: must be an integer > 0",
    'demo.toml:17: rollout.rounds: "async" is not allowed: must be one of "synchronous", "continuous"',
    "demo.toml:21: sampling.top_p: 1.5 is not allowed: must be a number > 0 and <= 1",
    "demo.toml:22: sampling.temperature: true is not allowed: must be a number > 0",
    "demo.toml:25: training.learning_rate: inf is not allowed: must be finite",
    'demo.toml: model: missing: add [model] with "path"',
    (
        'demo.toml:12: rewards.0.function: "noname" does not name a function: write "module:function" or '
        '"path/to/file.py:function"'
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


def test_a_rule_that_reads_a_bad_value_is_not_judged(tmp_path: Path) -> None:
    text = GOOD + '[rollout]\nrounds = "oops"\nmax_staleness = 3\n'
    assert [line.split(": ")[1] for line in problems_of(write(tmp_path, text))] == ["rollout.rounds"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout = 3\n" + GOOD, "demo.toml:1: rollout: 3 is not a section: write [rollout] and its keys below"),
        (GOOD.replace("[[rewards]]", "[rewards]"), "demo.toml:7: rewards: must be a list of tables: write [[rewards]]"),
        ("steps = 3\n" + GOOD, 'demo.toml:1: steps: unknown key outside a section; did you mean "run.steps"?'),
        (GOOD.replace('path = "model"', ""), "demo.toml:1: model.path: missing: must be a string"),
        (GOOD.partition("[[")[0] + "rewards = []\n", "prompts.rewards: unknown key"),
        (GOOD.replace("[model]", "[model"), "demo.toml: not valid TOML: "),
        (
            GOOD + '[engines]\ncores = ["0", 1]\n',
            'demo.toml:10: engines.cores: ["0", 1] is not allowed: must be a list',
        ),
        (GOOD + "[evaluation]\ntemperature = -1\n", "evaluation.temperature: -1 is not allowed: must be a number > 0"),
        (
            GOOD + "[transport]\nport = 80\n",
            "transport.port: 80 is not allowed: must be an integer >= 1024 and <= 65000",
        ),
        (GOOD + "[run]\nseed = 1.5\n", "run.seed: 1.5 is not allowed: must be an integer >= 0"),
    ],
)
def test_messages(tmp_path: Path, text: str, expected: str) -> None:
    assert any(expected in problem for problem in problems_of(write(tmp_path, text))), problems_of(
        write(tmp_path, text)
    )


RULES = [
    ("[rollout]\nmax_staleness = 2\n", 'rollout.max_staleness: 2 does not fit rounds = "synchronous"'),
    ('[rollout]\nrounds = "continuous"\n', 'rollout.max_staleness: 0 does not fit rounds = "continuous"'),
    ('[rollout]\nin_flight = "resume"\n', 'rollout.in_flight: "resume" has no effect'),
    ('[rollout]\nwhen_stale = "drop"\n', 'rollout.when_stale: "drop" has no effect'),
    ("[rollout]\ngroup_size = 1\n", 'rollout.group_size: 1 with advantage_normalization = "std"'),
    (
        '[rollout]\ngroup_size = 1\n[training]\nadvantage_normalization = "none"\n',
        "rollout.group_size: 1 makes every advantage 0",
    ),
    ("weight = 0\n", "rewards: every weight is 0"),
    ('[[rewards]]\nfunction = "other.py:score"\n', 'rewards.1.function: "score" is the name of an earlier reward'),
    ("[evaluation]\nevery = 5\n", "evaluation.prompts: is empty, but evaluation.every = 5"),
    ('[training]\ndevice = "cuda:0"\nranks = 2\n', 'training.device: "cuda:0" puts all 2 ranks on one device'),
    ('[engines]\ndtype = "int8"\n', 'engines.dtype: "int8" is not allowed: must be one of "auto", "float32"'),
    ('[engines]\ncount = 2\ncores = ["0"]\n', "engines.cores: has 1 entries for 2 engines"),
    ('[engines]\ncores = ["all"]\n', 'engines.cores.0: "all" is not a list of cores'),
    ("[engines]\nmax_context = 512\n", "engines.max_context: 512 leaves no room for a prompt"),
    ('[transport]\nengines = "external"\n', 'transport.engines: "external" needs endpoints'),
    ('[metrics]\nendpoint = "5690"\n', 'metrics.endpoint: "5690" is not an endpoint'),
    ('[run]\nname = "a/b"\n', 'run.name: "a/b" cannot name a directory'),
]


@pytest.mark.parametrize(("addition", "expected"), RULES)
def test_rules_between_fields(tmp_path: Path, addition: str, expected: str) -> None:
    problems = problems_of(write(tmp_path, GOOD + addition))
    assert len(problems) == 1
    assert expected in problems[0]
    assert problems[0].startswith("demo.toml:"), "a rule points at the line too"


def test_recipes_made_in_python_meet_the_same_rules() -> None:
    recipe = Recipe(
        model=Model(path="m"),
        prompts=Prompts(train="t.jsonl"),
        rewards=(Reward(function="a:b"),),
        rollout=Rollout(max_staleness=3),
    )
    with pytest.raises(RecipeError, match="does not fit rounds"):
        check_recipe(recipe)


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
    assert recipe.run.name == "try-2"
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
        ("rollout.group_size=many", '--set: rollout.group_size: "many" is not allowed: must be an integer > 0'),
        ("run.seed=1\nsteps=2", '--set: run.seed: "1\\nsteps=2" is not allowed'),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, expected: str) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD), override)
    assert problem.startswith(expected)


# ---- round trip ----------------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), max_size=20)
positive = st.integers(1, 1 << 40)
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
            prompts_per_batch=positive,
            group_size=st.integers(2, 99),
            rounds=st.just(RoundKind.CONTINUOUS),
            max_staleness=positive,
            in_flight=st.sampled_from(InFlight),
        ),
        sampling=st.builds(Sampling, temperature=positive_float, top_p=st.floats(1e-9, 1)),
        training=st.builds(Training, learning_rate=st.floats(0, 1)),
        engines=st.integers(1, 4).map(lambda n: Engines(count=n, cores=tuple(f"{i}-{i + 1}" for i in range(n)))),
        evaluation=st.builds(Evaluation, temperature=st.none() | positive_float),
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

    from streamrl.config.toml_text import toml_document

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
def test_whatever_is_in_the_file_gives_problems_and_never_another_exception(
    tmp_path_factory: pytest.TempPathFactory, junk: Any, section: str
) -> None:
    from streamrl.config.check_fields import check_recipe_table
    from streamrl.config.problems import Origin

    table = tomllib.loads(GOOD) | {section: junk}
    checked = check_recipe_table(table, Origin("demo.toml", {}))
    assert checked.problems or msgspec.convert(checked.values, Recipe)

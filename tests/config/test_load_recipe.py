"""Reading recipes: every error at once with its place and remedy; overrides; paths; the round trip."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import RecipeError
from streamrl.recipe.load import check_recipe, dump_recipe, load_recipe
from streamrl.recipe.objective import Algorithm, Objective
from streamrl.recipe.scheduling import InFlight, Rollout, RoundKind
from streamrl.recipe.sections import Engines, Evaluation, Model, Prompts, Recipe, Reward, Sampling, Training

DEMO = Path(__file__).parents[2] / "examples" / "sort" / "recipe.toml"

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
        'demo.toml:2: run.stepz: unknown key; did you mean "steps"? Keys of [run]: name, directory, seed, steps, '
        "journal, deterministic; below [run.advanced]: restarts, stall_timeout_s"
    ),
    (
        'demo.toml:4: modle: unknown section; did you mean "model"? Sections: model, prompts, rewards, run, rollout, '
        "tail_batching, length_sorted, group_sizing, "
        "sampling, reward_limits, judge, objective, off_policy, training, lora, engines, weights, evaluation, "
        "checkpoint, transport, metrics"
    ),
    (
        'demo.toml:9: prompts.temperature: unknown key; did you mean "sampling.temperature" or '
        '"evaluation.temperature"? Keys of [prompts]: train, shuffle'
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
    ("[sampling]\ntemperature = 0.005\n", "sampling.temperature: 0.005 is not what vLLM would sample with, which"),
    ("[sampling]\ntemperature = 2.5\n", "refuses more than 2: set it from 0.01 to 2"),
    ("[evaluation]\ntemperature = 2.5\n", "evaluation.temperature: 2.5 is refused by vLLM: set it to 2 or less"),
    ("[rollout]\nmax_staleness = 2\n", 'rollout.max_staleness: 2 does not fit rounds = "synchronous"'),
    ('[rollout]\nrounds = "continuous"\n', 'rollout.max_staleness: 0 does not fit rounds = "continuous"'),
    ('[rollout]\nin_flight = "resume"\n', 'rollout.in_flight: "resume" has no effect'),
    ('[rollout]\nwhen_stale = "drop"\n', 'rollout.when_stale: "drop" has no effect'),
    ("[rollout]\ngroup_size = 1\n", 'rollout.group_size: 1 with objective.advantages = "group_std" makes every'),
    (
        '[rollout]\ngroup_size = 1\ndynamic_sampling = true\n[objective]\nalgorithm = "ppo"\n',
        "rollout.dynamic_sampling: true drops groups of equal rewards",
    ),
    ("weight = 0\n", "rewards: every weight is 0"),
    ('[[rewards]]\nfunction = "other.py:score"\n', 'rewards.1.function: "score" is the name of an earlier reward'),
    ("[evaluation]\nevery = 5\n", "evaluation.prompts: is empty, but evaluation.every = 5"),
    ("[evaluation]\nsamples = 4\n", "evaluation.prompts: is empty, but evaluation.samples = 4"),
    (
        '[evaluation]\nprompts = "h.jsonl"\nlimit = 64\n',
        "evaluation.limit: 64 has no effect while evaluation.every = 0",
    ),
    (
        "[checkpoint.advanced]\nkeep_every = 4\n",
        "checkpoint.advanced.keep_every: 4 has no effect while checkpoint.every = 0",
    ),
    (
        "[checkpoint]\nevery = 3\n[checkpoint.advanced]\nkeep_every = 4\n",
        "checkpoint.advanced.keep_every: 4 is no multiple of checkpoint.every = 3",
    ),
    (
        '[checkpoint]\nevery = 3\nkeep_best = 1\n[evaluation]\nprompts = "h.jsonl"\n',
        "checkpoint.keep_best: 1 needs held-out scores",
    ),
    (
        '[checkpoint]\nevery = 30\nkeep_best = 1\n[evaluation]\nprompts = "h.jsonl"\nevery = 40\n',
        "checkpoint.keep_best: 1 has nothing to compare: no step is both a multiple of checkpoint.every = 30",
    ),
    ("[training]\nupdates_per_batch = 33\n", "training.updates_per_batch: 33 steps do not fit a batch of"),
    ("[lora]\nalpha = 32.0\n", "lora.alpha: 32.0 has no effect while lora.rank = 0"),
    (
        '[training]\ndevice = "cpu"\noptimizer = "adamw_offloaded"\n',
        'training.optimizer: "adamw_offloaded" has no effect on device = "cpu"',
    ),
    ('[engines]\ndtype = "int8"\n', 'engines.dtype: "int8" is not allowed: must be one of "auto", "float32"'),
    ('[engines]\ncount = 2\ncores = ["0"]\n', "engines.cores: has 1 entries for 2 engines"),
    ('[engines]\ncores = ["all"]\n', 'engines.cores.0: "all" is not a list of cores'),
    ("[engines]\nmax_model_len = 512\n", "engines.max_model_len: 512 leaves no room for a prompt"),
    ('[transport]\nengines = "external"\n', 'transport.engines: "external" needs endpoints'),
    ('[metrics]\nendpoint = "5690"\n', 'metrics.endpoint: "5690" is not an endpoint'),
    ('[run]\nname = "a/b"\n', 'run.name: "a/b" cannot name a directory'),
    (f'[run]\nname = "{"a" * 46}"\n', f'run.name: "{"a" * 46}" is longer than 45 characters: choose a shorter one'),
]


OBJECTIVE_RULES = [
    ('[objective]\nalgorithm = "rloo"\nclip_low = 0.1\n', "objective.clip_low: 0.1 has no effect: surrogate ="),
    ("[objective.advanced]\ndual_clip = 0.9\n", "objective.advanced.dual_clip: 0.9 clips on-policy tokens"),
    (
        '[objective]\nalgorithm = "cispo"\n[objective.advanced]\ndual_clip = 3.0\n',
        "objective.advanced.dual_clip: 3.0 has no effect: surrogate =",
    ),
    (
        '[objective.advanced]\nkl_estimator = "k2"\n',
        'objective.advanced.kl_estimator: "k2" has no effect while kl_coefficient = 0',
    ),
    (
        (
            '[objective]\nalgorithm = "ppo"\nkl_coefficient = 0.1\n'
            '[objective.advanced]\nkl_in = "loss"\nkl_estimator = "k1"\n'
        ),
        "objective.advanced.kl_estimator: k1 in the loss has a gradient of mean 0",
    ),
    (
        "[objective]\nkl_coefficient = 0.1\n[sampling]\ntop_p = 0.9\n",
        "objective.kl_coefficient: 0.1 has no KL to estimate with sampling.top_p = 0.9",
    ),
    (
        "[objective.advanced]\ngae_lambda = 0.9\n",
        'objective.advanced.gae_lambda: 0.9 has no effect with advantages = "group_std"',
    ),
    (
        "[objective.advanced]\ncohort_batches = 2\n",
        "objective.advanced.cohort_batches: 2 has no effect with advantages =",
    ),
    (
        '[objective]\nalgorithm = "ppo"\n[objective.advanced]\nvalue_coefficient = 0\n',
        "objective.advanced.value_coefficient: 0 never trains the value",
    ),
    ("[objective]\noverlong_buffer = 512\n", "objective.overlong_buffer: 512 leaves no length unpunished"),
    (
        "[objective]\noverlong_buffer = 64\n[objective.advanced]\noverlong_penalty = 0\n",
        "objective.advanced.overlong_penalty: 0 makes overlong_buffer",
    ),
    (
        "[objective.advanced]\noverlong_penalty = 2.0\n",
        "objective.advanced.overlong_penalty: 2.0 has no effect while overlong_buffer = 0",
    ),
]

CONTINUOUS = '[rollout]\nrounds = "continuous"\nmax_staleness = 2\n[off_policy]\n'
OFF_POLICY_RULES = [
    ('truncate = "none"\ncap = 3.0\n', 'off_policy.cap: 3.0 has no effect with truncate = "none"'),
    ("cap = 0.9\n", "off_policy.cap: 0.9 would shrink the weight of on-policy tokens"),
    ("[off_policy.advanced]\nmask_high = 3.0\n", 'off_policy.advanced.mask_high: 3.0 has no effect with mask = "none"'),
    (
        'mask = "token"\n[off_policy.advanced]\nmask_low = 1.1\n',
        "off_policy.advanced.mask_low: 1.1 masks on-policy tokens",
    ),
    (
        'mask = "token"\n[off_policy.advanced]\nmask_high = 0.9\n',
        "off_policy.advanced.mask_high: 0.9 masks on-policy tokens",
    ),
    (
        'mask = "token"\n[off_policy.advanced]\nmask_low = 1.0\nmask_high = 1.0\n',
        "off_policy.advanced.mask_low: 1.0 is not below mask_high = 1.0",
    ),
    ('proximal = "behavior"\nmask = "token"\n', 'off_policy.mask: "token" has no effect: proximal = "behavior"'),
]
RULES += OBJECTIVE_RULES
RULES += [(CONTINUOUS + addition, expected) for addition, expected in OFF_POLICY_RULES]
RULES += [
    ('[off_policy]\nmask = "geometric"\n', 'off_policy.mask: "geometric" has no effect: synchronous rounds'),
    (
        "[off_policy.advanced]\nstaleness_discount = 0.9\n",
        "off_policy.advanced.staleness_discount: 0.9 has no effect: synchronous",
    ),
    ('[off_policy]\nproximal = "behavior"\n', 'off_policy.proximal: "behavior" has no effect: synchronous rounds'),
]


@pytest.mark.parametrize(("addition", "expected"), RULES)
def test_rules_between_fields(tmp_path: Path, addition: str, expected: str) -> None:
    problems = problems_of(write(tmp_path, GOOD + addition))
    assert len(problems) == 1
    assert expected in problems[0]
    assert problems[0].startswith("demo.toml:"), "a rule points at the line too"


@pytest.mark.parametrize(
    "addition",
    [
        "[sampling]\ntemperature = 2.0\n[evaluation]\ntemperature = 1e-6\n",
        "[sampling]\ntemperature = 9.0\n[engines]\nkind = 'simulated'\n",
        *(f'[objective]\nalgorithm = "{algorithm}"\nkl_coefficient = 0.01\n' for algorithm in Algorithm),
        '[rollout]\ngroup_size = 1\n[objective]\nalgorithm = "ppo"\n',
        "[objective]\noverlong_buffer = 64\ntrain_truncated = false\n",
        '[off_policy]\ntruncate = "none"\n',
        CONTINUOUS + 'proximal = "behavior"\nmask = "token"\ncorrect_mismatch = true\n',
        '[off_policy]\nmask = "token"\ncorrect_mismatch = true\n',
        CONTINUOUS + 'proximal = "behavior"\ntruncate = "none"\n[off_policy.advanced]\nstaleness_discount = 0.9\n',
        CONTINUOUS + 'mask = "sequence"\n[off_policy.advanced]\nmask_low = 0\n',
        "[training]\nupdates_per_batch = 4\n",
        (
            "[checkpoint]\nevery = 2\nkeep_best = 1\n[checkpoint.advanced]\nkeep_every = 4\n[evaluation]\nprompts = "
            '"h.jsonl"\nevery = 2\n'
        ),
    ],
)
def test_what_is_asked_for_together_and_allowed(tmp_path: Path, addition: str) -> None:
    load_recipe(write(tmp_path, GOOD + addition))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('objective = "grpo"', "training.objective: unknown key: that is objective.algorithm here"),
        ("clip_high = 0.28", 'training.clip_high: unknown key; did you mean "objective.clip_high"?'),
        ('loss_normalization = "constant"', 'unknown key; did you mean "objective.loss_normalization"?'),
        ("importance_cap = 3.0", "training.importance_cap: unknown key: that is off_policy.cap here"),
        ("lr = 1e-5", "training.lr: unknown key: that is training.learning_rate here"),
        ('report_to = "wandb"', "training.report_to: unknown key: there is no such key here: ten lines of Python hand"),
    ],
)
def test_a_key_of_another_place_or_trainer_says_where_it_is_here(tmp_path: Path, line: str, expected: str) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD + f"[training]\n{line}\n"))
    assert expected in problem


def test_a_checkpoint_is_named_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link ``latest`` must be followed when the recipe is read: the run that begins then moves it."""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("first")
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(write(tmp_path / "recipes", GOOD), ["checkpoint.resume_from=runs/latest"])
    assert recipe.checkpoint.resume_from == str(tmp_path / "runs" / "first")


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
        (
            "engines.advanced.sets=[{count=1, workers=2}]",
            (
                "--set: engines.advanced.sets: [{count = 1, workers = 2}] is not allowed: must be a list of tables "
                "with keys out of"
            ),
        ),
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
        objective=st.builds(Objective, algorithm=st.sampled_from(Algorithm), entropy_coefficient=st.floats(-1, 1)),
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
def test_whatever_is_in_the_file_gives_problems_and_never_another_exception(
    tmp_path_factory: pytest.TempPathFactory, junk: Any, section: str
) -> None:
    from streamrl.recipe.check_fields import CheckedTable
    from streamrl.recipe.problems import Origin
    from streamrl.rules.foreign_keys import foreign_answer

    table = tomllib.loads(GOOD) | {section: junk}
    checked = CheckedTable(table, Origin("demo.toml", {}), foreign_answer)
    assert checked.problems or msgspec.convert(checked.values, Recipe)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("engines.count=1000000", "engines.count: 1000000 is not allowed: must be an integer > 0 and <= 4096"),
        ("training.ranks=1000000", "training.ranks: 1000000 is not allowed: must be an integer > 0 and <= 4096"),
        ("rollout.group_size=100000000", "rollout: 3200000000 completions would be in flight at once, at most 1048576"),
        ("rollout.max_staleness=1000000000", "completions would be in flight at once"),
        ('engines.cores=["3-1"]', 'engines.cores.0: "3-1" is not a list of cores'),
        ('engines.cores=["0-99999999999"]', 'engines.cores.0: "0-99999999999" is not a list of cores'),
        ('judge.advanced.cores="3-1"', 'judge.advanced.cores: "3-1" is not a list of cores'),
    ],
)
def test_counts_that_no_machine_has_are_refused(override: str, problem: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(DEMO, [override])
    assert problem in str(refused.value)


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"\xef\xbb\xbf" + DEMO.read_bytes())
    assert load_recipe(tmp_path / "recipe.toml").run.name == "sort"

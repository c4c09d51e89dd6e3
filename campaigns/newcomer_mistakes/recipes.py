"""Keys, values and TOML of a recipe."""

from __future__ import annotations

from campaigns.newcomer_mistakes.mistake import Mistake, recipe, written

LORA = "[lora]\nrank = 8\n"

MISTAKES: dict[str, Mistake] = {
    "a misspelt key": recipe(
        "group_size", "groupsize", "recipe.toml:16: rollout.groupsize: unknown key", '"group_size"'
    ),
    "a misspelt section": recipe("[rollout]", "[rolout]", "recipe.toml:14: rolout: unknown section", '"rollout"'),
    "a key below the wrong section": recipe(
        "= 64", "= 64\ngroup_size = 8", "recipe.toml:20: sampling.group_size:", '"rollout.group_size"'
    ),
    "a key of TRL": recipe(
        "learning_rate", "per_device_train_batch_size", "recipe.toml:22:", "TRL's", "rollout.prompts_per_batch"
    ),
    "a key of verl": recipe(
        "", "[actor_rollout_ref.rollout]\nn = 8\n", "recipe.toml:30:", "verl's rollout.n: rollout.group_size here"
    ),
    "a section twice": recipe(
        "", "[training]\nwarmup_steps = 5\n", "recipe.toml:29:", "twice", "put its keys together"
    ),
    "a key twice": recipe(
        "group_size = 4", "group_size = 4\ngroup_size = 8", "recipe.toml:17:", "is there twice", "remove one"
    ),
    "a text without quotes": recipe('"first"', "first", "recipe.toml:2:", "in double quotes"),
    "curly quotes": recipe('"first"', "“first”", "recipe.toml:2:", "in double quotes"),
    "YAML in a recipe": recipe("group_size = 4", "group_size: 4", "recipe.toml:16:", "KEY = VALUE"),
    "a bracket left open": recipe("[rollout]", "[rollout", "recipe.toml:14:", "close the brackets"),
    "brackets that are one pair too few": recipe("[[rewards]]", "[rewards]", "recipe.toml:11: rewards:", "[[rewards]]"),
    "a quote left open": recipe('"first"', '"first', "recipe.toml:2:", "close the quotes"),
    "backslashes of Windows": recipe(
        '"train.jsonl"', '"C:\\Users\\me\\train.jsonl"', "recipe.toml:9:", "in single quotes"
    ),
    "True of Python": recipe("learning_rate = 2e-4", "compile = True", "recipe.toml:22:", "true or false"),
    "None of Python": recipe("= 128", "= None", "recipe.toml:25:", "leave the key out"),
    "a number in quotes": recipe("group_size = 4", 'group_size = "4"', "recipe.toml:16:", '"4"', "an integer > 0"),
    "a decimal comma": recipe("2e-4", "0,0002", "recipe.toml:22:", "a number with a point"),
    "a rate in quotes": recipe("2e-4", '"2e-4"', "recipe.toml:22:", '"2e-4"', "a number >= 0"),
    "half a step": recipe("steps = 2", "steps = 2.5", "recipe.toml:3: run.steps: 2.5", "an integer > 0"),
    "a negative rate": recipe("2e-4", "-2e-4", "recipe.toml:22: training.learning_rate: -0.0002", "a number >= 0"),
    "an infinite rate": recipe("2e-4", "inf", "recipe.toml:22: training.learning_rate: inf", "must be finite"),
    "a group of none": recipe("group_size = 4", "group_size = 0", "recipe.toml:16: rollout.group_size: 0", "> 0"),
    "a group of one": recipe("group_size = 4", "group_size = 1", "recipe.toml:16:", "set group_size = 2 or more"),
    "temperature 0": recipe("= 64", "= 64\ntemperature = 0", "recipe.toml:20: sampling.temperature: 0", "> 0"),
    "top_p of 90": recipe("= 64", "= 64\ntop_p = 90", "recipe.toml:20: sampling.top_p: 90", "<= 1"),
    "an unknown algorithm": recipe(
        "", '[objective]\nalgorithm = "ppo2"\n', 'recipe.toml:30: objective.algorithm: "ppo2"', 'did you mean "ppo"'
    ),
    "steps and epochs": recipe("learning_rate", "epochs = 3\nlearning_rate", "training.epochs: 3.0", "remove one"),
    "no rewards": recipe(
        '[[rewards]]\nfunction = "reward.py:sorted_trace"\n', "", "rewards: missing", "add [[rewards]]"
    ),
    "no model": recipe('[model]\npath = "model"\n', "", "recipe.toml: model: missing", 'add [model] with "path"'),
    "no prompts": recipe('[prompts]\ntrain = "train.jsonl"\n', "", "recipe.toml: prompts: missing", "add [prompts]"),
    "an empty path of the model": recipe('"model"', '""', "recipe.toml:6: model.path: is empty", "name a directory"),
    "staleness in synchronous rounds": recipe(
        "group_size = 4", "max_staleness = 2", "recipe.toml:16: rollout.max_staleness: 2", "set max_staleness = 0"
    ),
    "continuous rounds without staleness": recipe(
        "group_size = 4", 'rounds = "continuous"', "recipe.toml:14: rollout.max_staleness: 0", "set max_staleness = 1"
    ),
    "a schedule that is none": recipe("2e-4", '2e-4\nschedule = "cosin"', 'recipe.toml:23: training.schedule: "cosin"'),
    "an optimizer that is none": recipe("2e-4", '2e-4\noptimizer = "adam"', "recipe.toml:23:", '"adam"', '"adamw"?'),
    "more warm-up than steps": recipe(
        "2e-4", '2e-4\nwarmup_steps = 5\nschedule = "cosine"', "recipe.toml:23: training.warmup_steps: 5", "lower it"
    ),
    "a name with a slash": recipe('"first"', '"me/first"', 'recipe.toml:2: run.name: "me/first"', "use letters"),
    "a name with a blank": recipe('"first"', '"my run"', 'recipe.toml:2: run.name: "my run"', "use letters"),
    "max_tokens above the engine's length": recipe(
        "max_tokens = 64", "max_tokens = 4096", "recipe.toml:25: engines.max_model_len: 128", "4096", "lower max_tokens"
    ),
    "max_tokens that leave no room for a prompt": recipe(
        "max_tokens = 64", "max_tokens = 128", "recipe.toml:25: engines.max_model_len: 128", "lower max_tokens"
    ),
    "a length that the model has not": recipe("= 128", "= 100000", "engines.max_model_len: 100000", "1024", "lower it"),
    "an engine argument that is ours": recipe(
        "max_model_len = 128", "args = { model = 'other' }", "recipe.toml:25: engines.args.model:", "model.path"
    ),
    "an engine argument that vLLM has not": recipe(
        "max_model_len = 128", "args = { max_model_length = 128 }", "engines.args.max_model_length", '"max_model_len"?'
    ),
    "bf16": recipe("= 128", '= 128\ndtype = "bf16"', 'recipe.toml:26: engines.dtype: "bf16"', '"bfloat16"'),
    "fp8 without correction": recipe(
        "max_model_len = 128", "args = { kv_cache_dtype = 'fp8' }", "recipe.toml:25:", '"fp8"',
        "correct_mismatch = true"
    ),
    "more workers than cores": recipe(
        "= 128", "= 128\ntensor_parallel_size = 3", "engines: 1", "3 cores", "lower count"
    ),
    "a device that is not there": recipe(
        "2e-4", '2e-4\ndevice = "cuda"', "training.device:", "no CUDA", 'write "auto"'
    ),
    "cores that are not there": recipe(
        "= 128", '= 128\ncores = ["900-901"]', "engines.cores: this machine has no core 901", "some of 0-"
    ),
    "alpha without a rank": recipe("", "[lora]\nalpha = 32\n", "recipe.toml:30: lora.alpha: 32", "or set rank"),
    "adapters of no such module": recipe("", f'{LORA}targets = ["query"]\n', 'lora.targets: "query"', "q_proj"),
    "targets as a text": recipe("", f'{LORA}targets = "q_proj"\n', "recipe.toml:31:", '"q_proj"', "a list of strings"),
    "a system that is none": recipe(
        "group_size = 4", 'system = "verl"', 'recipe.toml:16: rollout.system: "verl"', "must be one of"
    ),
    "a recipe in JSON": Mistake(
        written("recipe.toml", '{"run": {}}'), ("recipe.toml:1:", "KEY = VALUE")
    ),
    "a recipe in YAML": Mistake(
        written("recipe.yaml", "run:\n  name: first\n"), ("recipe.yaml:1:", "a recipe is TOML", "--from recipe.yaml"),
        "train recipe.yaml --dry-run"
    ),
    "a recipe in UTF-16": Mistake(
        written("recipe.toml", '[run]\nname = "first"\n'.encode("utf-16")), ("recipe.toml:", "byte 0",
        "save it as UTF-8")
    ),
    "a recipe in Latin-1": Mistake(
        written("recipe.toml", '[run]\nname = "\u00dc"\n'.encode("latin-1")), ("recipe.toml:", "byte 14", "as UTF-8")
    ),
    "a list for one reward": recipe(
        '"reward.py:sorted_trace"', '["reward.py:sorted_trace"]', "recipe.toml:12: rewards.0.function:", "a string"
    ),
    "checkpoints kept below one": recipe("", "[checkpoint]\nkeep = -1\n", "recipe.toml:30: checkpoint.keep: -1", "> 0"),
    "a misspelt key of a reward": recipe(
        "sorted_trace\"", 'sorted_trace"\nwieght = 2', "recipe.toml:13: rewards.0.wieght", 'did you mean "weight"?'
    ),
}  # fmt: skip

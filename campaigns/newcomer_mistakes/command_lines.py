"""Words of command lines."""

from __future__ import annotations

from campaigns.newcomer_mistakes.mistake import Mistake, command, overridden, removed, written

INIT = "init new --task own --model model --corpus rows.jsonl"
NO_RUN = ("is not the directory of a run", "runs/latest")

MISTAKES: dict[str, Mistake] = {
    "a misspelt command": command("trian recipe.toml", 'no command "trian"', 'did you mean "train"?'),
    "no recipe": command("train", "required: RECIPE"),
    "a recipe that is not there": command("train recipes.toml", "recipes.toml: no such file", "give the path"),
    "a folder without a recipe": command("train model", "model/recipe.toml: no such file", "give the path"),
    "a program for a recipe": command("train reward.py", "reward.py:1:", "KEY = VALUE"),
    "two recipes": command("train recipe.toml recipe.toml", "arguments: recipe.toml", "there is one recipe"),
    "an unknown flag": command("train recipe.toml --dryrun", "--dryrun", 'did you mean "--dry-run"?'),
    "a misspelt flag": command("export model out --verson 2", "--verson", 'did you mean "--version"?'),
    "a flag of TRL": overridden("--learning_rate 1e-6", "--learning_rate:", "training.learning_rate=1e-6"),
    "an override without a value": overridden("--set rollout.group_size", "--set rollout.group_size:", "=value"),
    "an override with blanks": overridden("rollout.group_size = 4", "rollout.group_size = 4", "SECTION.KEY=VALUE"),
    "an override without its section": overridden("group_size=4", "group_size=4:", "rollout.group_size=4"),
    "an override of no type": overridden("rollout.group_size=four", "rollout.group_size:", '"four"', "an integer > 0"),
    "an override of a reward that is not there": overridden("rewards.3.weight=2", "rewards.3", "from rewards.0"),
    "a misspelt key in an override": overridden("rewards.0.weigth=2", "--set: rewards.0.weigth:", '"weight"?'),
    "an explanation of a misspelt key": command("explain rollout.group_sise", "rollout.group_sise:", '"group_size"?'),
    "init without a task": command("init new", "--task is not given", "name one of own, math"),
    "init of a task that is none": command("init new --task maths", '--task "maths"', "none of own, math"),
    "init over a folder": command("init model --task own --model model", "model is not empty", "not there yet"),
    "rows that are not there": command(INIT, "--corpus:", "rows.jsonl", "correct the path"),
    "no rows": command(INIT, "--corpus:", "rows.jsonl is empty", "add rows", change=written("rows.jsonl", "")),
    "one row": command(
        INIT, "--corpus", "1 distinct", "give 8", change=written("rows.jsonl", '{"prompt": "a", "answer": "b"}\n')
    ),
    "rows without answers": command(
        INIT, "--corpus rows.jsonl, line 1", '"answer"',
        "add it", change=written("rows.jsonl", '{"prompt": "a"}\n' * 30)
    ),
    "a misspelt task of reasoning-gym": command(
        "init new --task reasoning-gym:leg_count --model model", '"leg_count"', '"leg_counting"?'
    ),
    "a model that is no folder": command("init new --task math --model ./modle", '--model "./modle"', "correct it"),
    "a script that is not there": command("init new --from grpo.py", "grpo.py: no such file", "give a Python script"),
    "settings in prose": command(
        "init new --from notes.txt", "notes.txt:", "give a Python script", change=written("notes.txt", "rate 1e-6\n")
    ),
    "no steps of warm-up": command("init new --task own --warm-up-steps 0", "--warm-up-steps 0", "above 0"),
    "status of a recipe": command("status recipe.toml", "recipe.toml", *NO_RUN),
    "status of a folder": command("status model", "model", *NO_RUN),
    "status of nothing": command("status runs/latest", "runs/latest", *NO_RUN),
    "drain of a folder": command("drain model", "model", *NO_RUN),
    "resume of a recipe": command("resume recipe.toml", "recipe.toml has no journal", "name the directory of a run"),
    "resume of nothing": command("resume runs/latest", "runs/latest has no journal", "name the directory of a run"),
    "show of nothing": command("show runs/first", "runs/first", *NO_RUN),
    "samples of a folder": command("samples model", "model", *NO_RUN),
    "watch of a folder": command("watch model", "model", *NO_RUN),
    "watch of an address without a port": command("watch tcp://localhost", "tcp://localhost", "write tcp://HOST:PORT"),
    "report of a folder": command("report model", "model", *NO_RUN),
    "trace of a folder": command("trace model", "model", *NO_RUN),
    "dashboard of nothing": command("dashboard runs", "runs", *NO_RUN),
    "dashboard at a port that is none": command("dashboard . --port 99999", '--port: "99999"', "up to 65535"),
    "runs of a folder": command("runs model", "model has no runs", "name a directory"),
    "export of a folder": command("export model out", "model", *NO_RUN),
    "push of a folder": command("push model me/mine", "model", *NO_RUN),
    "eval of a model alone": command("eval model", "model is no run", "name the recipe too"),
    "eval of nothing": command("eval modle recipe.toml", "modle is no model", "give a folder"),
    "eval with a bad limit": command("eval model recipe.toml -n -3", "-n -3", "write a number"),
    "eval with prompts that are not there": command(
        "eval model recipe.toml --prompts held-out.jsonl", "held-out.jsonl cannot be read", "correct the path"
    ),
    "settings with a key twice": command(
        "init new --from trl.yaml", "trl.yaml:1:", '"beta" is there 2 times', "leave one",
        change=written("trl.yaml", "beta: 0.1\nlr: 1e-6\nbeta: 0.2\n"),
    ),
    "completions in no folder": command(
        "eval model recipe.toml --out done/rows.jsonl", "--out done/rows.jsonl: there is no directory", "make it"
    ),
    "a report in no folder": command("report model --out pages/a.html", "--out pages/a.html", "make it"),
    "a trace in no folder": command("trace model --out pages/a.json", "--out pages/a.json", "make it"),
    "less than a group": command("try recipe.toml --completions 2", "--completions 2", "give as many at least"),
    "a page in no folder": command("try recipe.toml --page out/page.html", "--page out/page.html", "make it"),
    "a reward that is not there": command(
        "reward test reward.py:sorted --prompts train.jsonl", 'no "sorted"', "correct the name"
    ),
    "completions that are not there": command(
        "reward test reward.py:sorted_trace --prompts train.jsonl --completions done.jsonl", "done.jsonl", "correct"
    ),
    "no prompts to test with": command(
        "reward test reward.py:sorted_trace --prompts train.jsonl -n 0", "-n", "above 0", "correct"
    ),
    "a reward for a folder": command("reward attach model reward.py:sorted_trace", "model", *NO_RUN),
    "a change of a folder": command("set model training.learning_rate=1e-6", "model", *NO_RUN),
    "a system that is none": command("compare recipe.toml --systems grpo", "--systems: 'grpo'", "choose from"),
    "a fleet that is not there": command("simulate recipe.toml --fleet h100", "'h100'", "neither a file nor one of"),
    "calibration by a folder": command("calibrate model", "model has no trace.jsonl", "give the directory of a run"),
    "a shell that is none": command("completion powershell", "'powershell'", "choose from 'bash'"),
    "keys in a folder of everybody": command("keys model", "model is open to other users", "chmod go= model"),
    "no nodes": command("launch slurm recipe.toml --nodes 0", "--nodes 0", "give 1 or more"),
    "Slurm on no cluster": command("launch slurm recipe.toml --nodes 2", "sbatch", "add --print"),
    "no hosts": command("launch ssh recipe.toml", "name the hosts by --hosts"),
    "a file of hosts that is not there": command(
        "launch ssh recipe.toml --hostfile hosts", "--hostfile hosts: there is no such file", "correct it"
    ),
    "a host twice": command("launch ssh recipe.toml --hosts a,a", "a is named twice", "name each once"),
    "a port of Ray that is none": command(
        "launch ssh recipe.toml --hosts a,b --port 70000", '--port: "70000"', "up to 65535"
    ),
    "a variable that is not set": command(
        "launch slurm recipe.toml --nodes 2 --print --env MY_TOKEN", "--env MY_TOKEN", "--env MY_TOKEN=VALUE"
    ),
    "a template over a file": command("launch template slurm reward.py", "reward.py is there", "name another file"),
    "a run without its data": command(
        "train recipe.toml", "prompts.train: prompts", "train.jsonl", "correct the path", change=removed("train.jsonl")
    ),
    "a run without its reward": command(
        "train recipe.toml", "rewards.0.function:", "reward.py", "correct the path", change=removed("reward.py")
    ),
    "a run without its weights": command(
        "train recipe.toml", "model.path:", "no *.safetensors", "copy", change=removed("model/model.safetensors")
    ),
}  # fmt: skip

"""Every command of the CLI, with secrets in its environment and its recipe, an escape sequence in its tags, a link out
of a run, umask 022 and a second user: arguments and variables of processes, what is printed, who may read the files.

One run with simulated engines is looked at from all sides. A command that needs a terminal, the Hub or a cluster runs
as far as it gets without them: what it prints and leaves is looked at all the same."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from builders.files import SORT

from streamrl.cli.main import COMMANDS

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.long]

ESCAPES = "\\u001b]0;title\\u0007\\u001b[2J"
SECRETS = {
    "HF_TOKEN": "hf_canaryofthehub0123456789",
    "WANDB_API_KEY": "canaryofthetracker0123456789abcdef0123456",
    "AWS_SECRET_ACCESS_KEY": "canary+of+the+cloud/0123456789",
}
OPTION = "sk-canary-of-an-option-0123456789"
OF_THE_READER = "canary of a file of the reader"
ROOT = Path(__file__).parents[2]
SMALL = (
    "engines.kind=simulated run.steps=2 rollout.prompts_per_batch=4 rollout.group_size=4 sampling.max_tokens=32 "
    "evaluation.prompts= training.advanced.threads=1"
)
# Commands in their order: RUN is the run of `train`, DIR the folder of the test, LIVE a run that goes on.
LINES = f"""
init DIR/made --task sort --model tiny
check
explain rollout.group_size
train DIR/recipe.toml {SMALL}
runs DIR/runs
show RUN
samples RUN
report RUN
report RUN --out DIR/report.html
trace RUN --out DIR/trace.json
sync RUN --to tensorboard
reward test reward.py:scored --prompts DIR/train.jsonl --limit 8
simulate DIR/recipe.toml {SMALL}
calibrate RUN --out DIR/cluster.toml
what-if RUN
compare DIR/recipe.toml {SMALL} --systems synchronous,sagc --repeats 1 --samples 16 --out DIR/compared
export RUN DIR/exported
push RUN nobody/nothing
eval RUN DIR/recipe.toml --samples 1 -n 2 --no-greedy
try DIR/recipe.toml {SMALL}
resume RUN --set run.steps=3
completion bash
keys DIR/keys
memory DIR/recipe.toml --cards 24
families --list
objective test {ROOT}/examples/custom_loss.py:gmpo
launch template slurm DIR/slurm.sh
launch slurm DIR/recipe.toml --nodes 2 --print
launch kubernetes DIR/recipe.toml --image i --pvc p --nodes 2 --print
launch ssh DIR/recipe.toml --hosts a,b --print
status LIVE
pause LIVE
engine pause LIVE engine-0
engine withdraw LIVE engine-0
engine return LIVE engine-0
continue LIVE
set LIVE training.learning_rate=1e-4
checkpoint LIVE
evaluate LIVE
reward list LIVE
reward attach LIVE reward.py:other
reward replace LIVE other reward.py:third
reward detach LIVE third
watch LIVE
dashboard RUN --port 0
top RUN
drain LIVE
"""
NOT_ENDING = {"watch", "dashboard", "top"}
REWARD = '''
def scored(text, **columns):
    """How many digits there are."""
    return sum(letter.isdigit() for letter in text) / (len(text) or 1)

other = third = scored
'''


class Surroundings:
    """The folder of the sweep, which others may enter; what commands printed; arguments and variables of processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outputs: dict[str, str] = {}
        self.arguments: set[str] = set()
        self.variables: dict[str, dict[str, str]] = {}
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        self.environment = os.environ | SECRETS | {"HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}

    def _look(self) -> None:
        own = psutil.Process()
        while not self._ended.wait(0.05):
            for process in own.children(recursive=True):
                try:
                    arguments = " ".join(process.cmdline())
                    self.arguments.add(arguments)
                    self.variables[arguments] = process.environ()
                except psutil.Error:
                    continue  # the process has ended meanwhile

    def start(self, words: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "streamrl", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=self.environment, cwd=self.folder, umask=0o022,
        )  # fmt: skip

    def run(self, line: str) -> None:
        words = shlex.split(line)
        began = time.monotonic()
        process = self.start(words)
        try:
            output, _ = process.communicate(timeout=6 if words[0] in NOT_ENDING else 180)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=60)
        self.outputs[line] = output.decode()
        print(f"{time.monotonic() - began:6.1f} s {line}")

    def close(self) -> None:
        self._ended.set()
        self._watch.join()


@pytest.fixture(scope="module")
def swept() -> Iterator[Surroundings]:
    folder = Path(tempfile.mkdtemp(prefix="streamrl-swept-"))
    folder.chmod(0o755)
    surroundings = Surroundings(folder)
    try:
        (folder / "home").mkdir(0o700)
        (folder / "reward.py").write_text(REWARD)
        for name in ("train.jsonl", "held_out.jsonl", "model"):
            (folder / name).symlink_to(SORT / name)
        tags = f'tags = ["t{ESCAPES}"]\ndirectory = "{folder}/runs"\n'
        options = f'function = "reward.py:scored"\noptions = {{ api_key = "{OPTION}" }}'
        recipe = (SORT / "recipe.toml").read_text().replace("steps = 80\n", f"steps = 80\n{tags}")
        (folder / "recipe.toml").write_text(recipe.replace('function = "reward.py:sorted_trace"', options))
        own = folder / "own.txt"
        own.write_text(f"first line\n{OF_THE_READER}\n")
        own.chmod(0o600)
        live = None
        for line in filter(None, LINES.splitlines()):
            if "LIVE" in line and live is None:
                live = surroundings.start(shlex.split(f"train recipe.toml {SMALL} run.steps=400 run.name=live"))
                _wait_for(folder / "runs", "live-", live)
            runs = folder / "runs"
            run = next(runs.glob("sort-*"), runs / "none")
            going_on = next(runs.glob("live-*"), runs / "none")
            surroundings.run(line.replace("RUN", str(run)).replace("DIR", str(folder)).replace("LIVE", str(going_on)))
            if line.startswith("train"):
                linked = next(runs.glob("sort-*")) / "logs" / "linked.log"
                linked.symlink_to(own)
        if live is not None:
            output, _ = live.communicate(timeout=120)
            surroundings.outputs["train of the run that goes on"] = output.decode()
        yield surroundings
    finally:
        surroundings.close()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(runs: Path, start: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if any((run / "metrics.jsonl").exists() for run in runs.glob(f"{start}*")):
            return
        if process.poll() is not None:
            break
        threading.Event().wait(0.2)
    raise AssertionError(f"the run that goes on has no metrics: {process.communicate(timeout=30)[0].decode()[-2000:]}")


@pytest.mark.seconds(200)
def test_the_sweep_runs_every_command(swept: Surroundings) -> None:
    """Each command is there, none ends with a traceback, and those that need nothing from outside do their work."""
    run_names = {" ".join(shlex.split(line)[: len(name.split())]) for line in swept.outputs for name in COMMANDS}
    assert set(COMMANDS) <= run_names
    assert [line for line, output in swept.outputs.items() if "Traceback" in output] == []
    assert "finished: 2 of 2 steps" in next(text for line, text in swept.outputs.items() if line.startswith("train "))
    for path in ("report.html", "trace.json", "compared/comparison.html", "exported/config.json"):
        assert (swept.folder / path).is_file(), path


def test_no_command_prints_a_secret_or_an_escape(swept: Surroundings) -> None:
    for line, output in swept.outputs.items():
        assert "\x1b" not in output and "\x07" not in output, line
        assert OF_THE_READER not in output, line
        assert [secret for secret in SECRETS.values() if secret in output] == [], line


def test_no_argument_of_a_process_is_a_secret(swept: Surroundings) -> None:
    """The secrets of the environment and of the recipe stand in no arguments, which every user of the host may read."""
    assert len(swept.arguments) > 20
    secrets = (*SECRETS.values(), OPTION)
    assert [text for text in swept.arguments if any(secret in text for secret in secrets)] == []


def test_user_code_gets_no_token(swept: Surroundings) -> None:
    """Processes of rewards have none of the caller's tokens."""
    workers = {text: variables for text, variables in swept.variables.items() if "streamrl.rewards" in text}
    assert workers
    for text, variables in workers.items():
        assert SECRETS.keys() & variables.keys() == set(), text


def test_what_is_left_is_for_this_user_alone(swept: Surroundings) -> None:
    """Another user finds no prompt, completion, secret or weight in what the commands left."""
    if os.getuid() != 0:
        pytest.skip("another user can be tried as root only")
    script = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                file.read(1)
        except OSError:
            continue
        print(os.path.relpath(os.path.join(folder, name), sys.argv[1]))
"""
    command = [shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-c", script, str(swept.folder)]
    other = subprocess.run(command, user=65534, group=65534, capture_output=True, text=True, timeout=60, check=True)
    # Inputs of this test, folders that a person publishes, and files without anything of a run.
    open_to_all = ("recipe.toml", "reward.py", "train.jsonl", "held_out.jsonl", "model/", "made/", "exported/")
    open_to_all += ("slurm.sh", "cluster.toml", "__pycache__/")
    readable = [path for path in other.stdout.splitlines() if not path.startswith(open_to_all)]
    assert readable == []
    assert "reward.py" in other.stdout, "the other user can look into the folder at all"


def test_reports_of_the_sweep_have_no_secret(swept: Surroundings) -> None:
    for name in ("report.html", "trace.json", "compared/comparison.html"):
        content = (swept.folder / name).read_bytes().decode()
        assert OPTION not in content and OF_THE_READER not in content, name
        assert [secret for secret in SECRETS.values() if secret in content] == [], name

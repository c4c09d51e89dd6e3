"""The systems that are compared, each run once as its user would run it, and what is read off the run.

streamrl runs through ``streamrl train``. The peers are scripts in a folder that the caller names: ``grpo.py`` (a
plain PyTorch loop: sample, then train, in one process) and ``trl_grpo.py`` (TRL's GRPOTrainer), which share
``tasks.py`` and ``common.py``. All of them print ``SUMMARY`` and ``HIST`` lines.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from process_tree import sampled_memory
from training_run import pinned, timed_run

MAX_TOKENS, EVALUATION_PROMPTS, EVALUATION_SEED = 448, 512, 12345
"""The peer scripts' own: fixed in ``tasks.py`` and ``common.evaluate``."""

COIN_REWARD = "float(len(completion) % 2)"
"""Throughput runs of a model that knows nothing: a reward with variance inside groups, so that all systems train."""

IDLE_SHARES = ("util/trainer_idle_ratio", "util/engine_idle_ratio", "util/bubble_ratio")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What every system is given. ``coin``: a random model, no evaluation, and a reward that is a parity."""

    model: Path
    steps: int
    prompts_per_batch: int
    group_size: int
    learning_rate: float
    threads: int
    seed: int
    evaluate_every: int
    target: float
    timeout_s: float
    peer_scripts: Path
    trl_python: Path
    trl_micro_batch: int
    cores: tuple[int, ...] = ()
    coin: bool = False

    @property
    def completions(self) -> int:
        """Completions in the whole run."""
        return self.steps * self.prompts_per_batch * self.group_size


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one system. ``seconds``: its steps, without start-up and evaluations. ``history``: (step, seconds,
    accuracy). ``phases``: seconds of the whole run, under the system's own names."""

    system: str
    repeat: int
    completions_per_s: float
    tokens_per_s: float
    seconds: float
    wall_s: float
    peak_pss_bytes: int
    time_to_target_s: float | None
    history: list[tuple[int, float, float]]
    phases: dict[str, float]


def first_time_at(history: list[tuple[int, float, float]], target: float) -> float | None:
    """Seconds at the first evaluation that reached ``target``."""
    return next((seconds for _, seconds, accuracy in history if accuracy >= target), None)


def write_recipe(job: Job, folder: Path) -> Path:
    """A recipe with the peers' batch, optimizer and evaluation set, and the prompts of ``grpo.py`` in its order."""
    tasks = _load_tasks(job.peer_scripts)
    training, held_out = random.Random(1000 + job.seed), random.Random(EVALUATION_SEED)
    _write_prompts(folder / "train.jsonl", [tasks.prompt(training) for _ in range(job.steps * job.prompts_per_batch)])
    _write_prompts(folder / "held_out.jsonl", [tasks.prompt(held_out) for _ in range(EVALUATION_PROMPTS)])
    reward = f"    return {COIN_REWARD}\n" if job.coin else _SORT_REWARD
    (folder / "reward.py").write_text(f"async def reward(completion, *, prompt, answer, finish_reason):\n{reward}")
    evaluated = "" if job.coin else f'[evaluation]\nprompts = "held_out.jsonl"\nevery = {job.evaluate_every}\n'
    recipe = folder / "recipe.toml"
    # No thread count: the peers' torch threads are the whole machine's cores, streamrl shares the same cores out.
    recipe.write_text(
        f'[run]\nsteps = {job.steps}\nseed = {job.seed}\n[model]\npath = "{job.model.resolve()}"\n'
        f'[prompts]\ntrain = "train.jsonl"\nshuffle = false\n[[rewards]]\nfunction = "reward.py:reward"\n'
        f"[rollout]\nprompts_per_batch = {job.prompts_per_batch}\ngroup_size = {job.group_size}\n"
        f"[sampling]\nmax_tokens = {MAX_TOKENS}\n"
        f"[training]\nlearning_rate = {job.learning_rate}\nwarmup_steps = 5\n[training.advanced]\nbeta2 = 0.95\n"
        f'[engines]\ndtype = "float32"\n{evaluated}[checkpoint]\nat_end = false\n'
    )
    return recipe


_SORT_REWARD = """    if finish_reason != "stop" or not completion.endswith("."):
        return 0.0
    return float((completion[:-1].split(";")[-1] or prompt[:-1]) == answer)
"""


def run_streamrl(job: Job, repeat: int, folder: Path) -> Outcome:
    """``streamrl train``, synchronous rounds. Step times come from its ``metrics.jsonl``."""
    recipe = write_recipe(job, folder)
    began = time.monotonic()
    steps, evaluations, memory = timed_run(recipe, {}, timeout_s=job.timeout_s, cores=job.cores)
    wall = time.monotonic() - began
    at = [0.0]
    for step in steps:
        at.append(at[-1] + step["time/step_s"])
    history = [(line["step"], at[line["step"]], _accuracy(line)) for line in evaluations]
    tokens = sum(step["completion/length_mean"] * job.prompts_per_batch * job.group_size for step in steps)
    return Outcome(
        system="streamrl",
        repeat=repeat,
        completions_per_s=job.completions / at[-1],
        tokens_per_s=tokens / at[-1],
        seconds=at[-1],
        wall_s=wall,
        peak_pss_bytes=memory.peak_bytes,
        time_to_target_s=first_time_at(history, job.target),
        history=history,
        phases=_step_phases(steps),
    )


def _step_phases(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Total seconds of every ``time/*`` metric that adds up over steps, and the mean of the idle shares."""
    timed = sorted({name for step in steps for name in step if re.fullmatch(r"time/(?!.*_p\d\d_s$).*", name)})
    phases = {name: sum(step.get(name) or 0.0 for step in steps) for name in timed}
    return phases | {name: fmean(step[name] for step in steps) for name in IDLE_SHARES if name in steps[0]}


def _accuracy(evaluation: dict[str, Any]) -> float:
    return next(float(value) for name, value in evaluation.items() if re.fullmatch(r"eval/.+/avg@1", name))


def run_plain(job: Job, repeat: int, folder: Path) -> Outcome:
    """The plain PyTorch loop."""
    return _run_script(job, repeat, "plain", "grpo.py", sys.executable, ["--neval", str(EVALUATION_PROMPTS)], folder)


def run_trl_transformers(job: Job, repeat: int, folder: Path) -> Outcome:
    """GRPOTrainer, generating with transformers."""
    return _run_trl(job, repeat, "trl-transformers", ["--mode", "hf"], folder)


def run_trl_vllm(job: Job, repeat: int, folder: Path) -> Outcome:
    """GRPOTrainer with vLLM colocated, patched so that vLLM's CPU weights can be loaded again."""
    return _run_trl(job, repeat, "trl-vllm", ["--mode", "colocate", "--patch"], folder)


SYSTEMS: dict[str, Callable[[Job, int, Path], Outcome]] = {
    "streamrl": run_streamrl,
    "plain": run_plain,
    "trl-transformers": run_trl_transformers,
    "trl-vllm": run_trl_vllm,
}


def _run_trl(job: Job, repeat: int, system: str, arguments: list[str], folder: Path) -> Outcome:
    micro_batch = ["--mb", str(job.trl_micro_batch)] if job.trl_micro_batch else []
    output = ["--out", str(folder / "trl_out")]
    return _run_script(
        job, repeat, system, "trl_grpo.py", str(job.trl_python), [*arguments, *micro_batch, *output], folder
    )


def _run_script(
    job: Job, repeat: int, system: str, script: str, python: str, arguments: list[str], folder: Path
) -> Outcome:
    """Run a peer script in its own process and read its ``SUMMARY`` and ``HIST`` lines."""
    launcher = folder / f"launch_{script}"
    launcher.write_text(_LAUNCHER.format(scripts=str(job.peer_scripts.resolve()), script=script, patch=_patch(job)))
    command = [python, str(launcher), "sort", str(_peer_model(job.model, folder))]
    command += ["--steps", str(job.steps), "--lr", str(job.learning_rate), "--mini", "1", "--seed", str(job.seed)]
    command += ["--P", str(job.prompts_per_batch), "--G", str(job.group_size), "--threads", str(job.threads)]
    command += ["--eval_every", str(job.evaluate_every), *(["--secs", str(job.timeout_s)]), *arguments]
    log = folder / "output.txt"
    environment = {**os.environ, "VLLM_PLUGINS": "", "PYTHONUNBUFFERED": "1"}  # streamrl's plugin is not for the peers
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            pinned(command, job.cores), stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
        with sampled_memory(process.pid) as memory:
            try:
                code = process.wait(2 * job.timeout_s)
            finally:
                process.kill()
    text = log.read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"{system} ended with exit code {code}:\n{text[-3000:]}")
    return _read_output(text, job, repeat, system, time.monotonic() - began, memory.peak_bytes)


def _read_output(text: str, job: Job, repeat: int, system: str, wall_s: float, peak: int) -> Outcome:
    summary = next(line for line in text.splitlines() if line.startswith("SUMMARY"))
    history = [tuple(entry) for entry in json.loads(re.findall(r"^HIST (.*)$", text, re.MULTILINE)[-1])]
    numbers = dict(re.findall(r"(steps/min|compl/s|tok/s|gen_frac|train_frac) ([\d.]+)", summary))
    steps = int(float(re.findall(r"steps ([\d.]+)", summary)[0]))
    seconds = steps / float(numbers["steps/min"]) * 60
    phases = {name: float(numbers[name]) * seconds for name in ("gen_frac", "train_frac") if name in numbers}
    if written := re.search(r"phases ({.*?})", summary):
        phases |= json.loads(written[1].replace("'", '"'))
    return Outcome(
        system=system,
        repeat=repeat,
        completions_per_s=float(numbers["compl/s"]),
        tokens_per_s=float(numbers["tok/s"]),
        seconds=seconds,
        wall_s=wall_s,
        peak_pss_bytes=peak,
        time_to_target_s=None if job.coin else first_time_at(history, job.target),
        history=history,
        phases=phases,
    )


_LAUNCHER = """import runpy, sys
if __name__ == "__main__":
    sys.path.insert(0, {scripts!r})
{patch}
    sys.argv[0] = {script!r}
    runpy.run_path({scripts!r} + "/" + {script!r}, run_name="__main__")
"""


def _patch(job: Job) -> str:
    """What a throughput run changes in the peers: the reward, and no evaluation."""
    if not job.coin:
        return ""
    return f"""    import common, tasks
    tasks.Sort.check = lambda self, prompt, completion, ended: {COIN_REWARD}
    common.evaluate = lambda *a, **k: (0.0, {{}}, 0.0)"""


def _peer_model(model: Path, folder: Path) -> Path:
    """The model with a tokenizer that adds no ``<bos>``: the peer scripts write it themselves."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    return copy


def _write_prompts(path: Path, prompts: list[str]) -> None:
    rows = ({"prompt": prompt, "answer": "".join(sorted(prompt[:-1]))} for prompt in prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _load_tasks(peer_scripts: Path) -> Any:
    """The sorting task of the peers' ``tasks.py``."""
    spec = importlib.util.spec_from_file_location("peer_tasks", peer_scripts / "tasks.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{peer_scripts}/tasks.py: name the folder of the peer scripts with --peer-scripts")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TASKS["sort"]()

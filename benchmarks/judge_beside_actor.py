"""The run's own judge beside the actor: a short run of the demo whose completions a second vLLM engine judges.

    python benchmarks/judge_beside_actor.py                    # 4 steps of 8 prompts x 8
    python benchmarks/judge_beside_actor.py --yields never --actor-share 1
    python benchmarks/judge_beside_actor.py --kill             # the judge is killed in the middle, and comes back

Judge and actor are the demo's model; the judge gives each completion one digit. Prints what rewards took, what the
judge was asked and how often it was woken, memory (PSS) of the judge, the engine and all, and what was left behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from process_tree import MARK, describe, marked_processes, process_tree, pss_bytes
from training_run import TrainingRun, training_run

SORT = Path(__file__).parents[1] / "examples" / "sort"
MIB = 1 << 20
RECIPE = """\
[model]
path = "{model}"
[prompts]
train = "{sort}/train.jsonl"
[[rewards]]
function = "{sort}/reward.py:sorted_trace"
[[rewards]]
function = "judge"
trusted = true
timeout_s = 120
weight = 0.1
[rewards.options]
chat = false
question = "{{completion}}:"
score = '(\\d)'
highest = 9
max_tokens = 1
request = {{ allowed_token_ids = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13] }}  # the digits
[judge]
model = "{model}"
when_idle = "{yields}"
[judge.advanced]
batch = {batch}
actor_share = {actor_share}
[rollout]
prompts_per_batch = 8
group_size = 8
[sampling]
max_tokens = 448
[training]
learning_rate = 2e-4
[engines]
dtype = "float32"
max_model_len = 512
[checkpoint]
at_end = false
"""


def main() -> int:
    """Exit code 1 when a completion was not judged or something was left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--yields", choices=("never", "pause", "sleep"), default="pause")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--actor-share", type=float, default=0.5)
    parser.add_argument("--kill", action="store_true", help="kill the judge after the second step")
    parser.add_argument("--timeout-s", type=float, default=220.0)
    options = parser.parse_args()
    segments = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="streamrl-judged-") as name:
        recipe = Path(name) / "recipe.toml"
        recipe.write_text(
            RECIPE.format(
                model=SORT / "model",
                sort=SORT,
                when_idle=options.yields,
                batch=options.batch,
                actor_share=options.actor_share,
            )
        )
        with training_run(recipe, {"run.steps": options.steps}) as run:
            memory = measured(run, options)
            steps = run.steps()
            left = left_behind(run.mark, memory.pop("sockets"), segments)
    report(steps, memory)
    good = len(steps) == options.steps and all("judge/questions_total" in step for step in steps) and not left
    sys.stdout.write(f"left behind: {', '.join(left) or 'nothing'}\n")
    return 0 if good else 1


def measured(run: TrainingRun, options: argparse.Namespace) -> dict[str, Any]:
    """Wait for the end, killing the judge on the way where that is asked for. Peaks of memory, by kind of process."""
    deadline = time.monotonic() + options.timeout_s
    peak: dict[str, Any] = {"judge": 0, "engine": 0, "all": 0, "sockets": ""}
    to_kill = options.kill
    while run.process.poll() is None and time.monotonic() < deadline:
        for role in ("judge", "engine"):
            if pid := process_of(run, role):
                peak[role] = max(peak[role], pss_bytes(process_tree(pid)))
        peak["all"] = max(peak["all"], pss_bytes(process_tree(run.process.pid)))
        peak["sockets"] = peak["sockets"] or sockets_of(run)
        if to_kill and len(run.steps()) >= 2 and (pid := process_of(run, "judge")):
            os.kill(pid, signal.SIGKILL)
            to_kill = False
        time.sleep(1.0)
    run.wait(timeout_s=1.0)
    return peak


def process_of(run: TrainingRun, role: str) -> int:
    """Pid of a process of the run by its role; 0 while there is none."""
    for process in process_tree(run.process.pid):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[1:4] == ["-m", "streamrl.launch", role]:
            return int(process.pid)
    return 0


def sockets_of(run: TrainingRun) -> str:
    """The directory of the run's sockets, which its children have for temporary files."""
    pid = process_of(run, "controller")
    try:
        return psutil.Process(pid).environ().get("TMPDIR", "") if pid else ""
    except psutil.Error:
        return ""


def left_behind(mark: str, sockets: str, segments: set[str]) -> list[str]:
    """Processes, shared memory and sockets of a run that has ended."""
    left = [describe(process) for process in marked_processes(mark) if MARK in process.environ()]
    ours = ("psm_", "sem.mp-", "torch_", "vllm_dist_")
    left += [name for name in set(os.listdir("/dev/shm")) - segments if name.startswith(ours)]
    return left + [path for path in [sockets] if path and Path(path).exists()]


def report(steps: list[dict[str, Any]], memory: dict[str, Any]) -> None:
    """A line for each step, and a summary."""
    for step in steps:
        latency = [step.get(f"reward/func/judge/latency_{p}_s", float("nan")) for p in ("p50", "p95")]
        asked, batches = step.get("judge/questions_total", 0), step.get("judge/batches_total", 0)
        sys.stdout.write(
            f"step {step['step']}: judge P50 {latency[0]:.3f} s, P95 {latency[1]:.3f} s; {asked:.0f} questions in "
            f"{batches:.0f} batches; waited {step.get('judge/waited_mean_s', 0):.3f} s on average; "
            f"awake {step.get('judge/awake_s_total', 0):.2f} s; step {step.get('time/step_s', 0):.2f} s\n"
        )
    if steps:
        samples = sum(step.get("batch/samples", 64) for step in steps)
        asked = steps[-1].get("judge/questions_total", 0)
        sys.stdout.write(f"{samples:.0f} samples, {asked:.0f} questions: the cache answered the others\n")
    names = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in memory.items())
    sys.stdout.write(f"peak memory: {names}\n")


if __name__ == "__main__":
    sys.exit(main())

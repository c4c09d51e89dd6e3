"""Answers a second of a tool environment: verifiers 0.4 with a plain vLLM server against streamrl.

    python benchmarks/turns_against_verifiers.py --python examples/verifiers/venv/bin/python

The same model, questions, tool and sampling, as many answers at once, in turns: verifiers alone; its taskset as an
agent of a run (examples/verifiers/tool.toml), whose harness is verifiers', too; the tool as one of streamrl's
(examples/calculator). The runs have a learning rate of 0 and are read after their first step."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from training_run import ROOT, training_run

MODEL = ROOT / "examples" / "calculator" / "model"
ALONE = """
import asyncio, sys, time
import verifiers.v1 as vf
async def main(url, answers, at_once):
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "sums_with_tool"}, "agent": seat}))
    tasks, room = list(env.taskset)[:answers], asyncio.Semaphore(at_once)
    client = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    async def one(task):
        async with room:
            return await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    async with env.serving():
        await one(tasks[0])
        began = time.monotonic()
        episodes = await asyncio.gather(*map(one, tasks))
    rate = len(tasks) / (time.monotonic() - began)
    for error in [error for episode in episodes for part in (episode, *episode.traces) for error in part.errors]:
        raise SystemExit(f"an answer of verifiers failed: {error.type}: {error.message}")
    print(rate)
asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def verifiers_alone(python: str, port: int, answers: int, at_once: int) -> float:
    """Answers a second of verifiers with ``vllm serve``."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(MODEL)]
    command += ["--port", str(port), "--served-model-name", "policy", "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    here = str(ROOT / "examples" / "verifiers")
    environment = os.environ | {"OPENAI_API_KEY": "none", "PYTHONPATH": here, "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(300):
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health").close()
                break
            time.sleep(1.0)
        command = [python, "-c", ALONE, f"{url}/v1", str(answers), str(at_once)]
        said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return float(said.stdout.split()[-1])
    finally:
        server.terminate()
        server.wait()


def of_a_run(recipe: str, overrides: dict[str, object], answers: int, at_once: int) -> float:
    """Answers a second of a run of ``recipe`` with ``at_once`` in a batch."""
    shape = {"rollout.prompts_per_batch": at_once // 8, "rollout.group_size": 8, "run.steps": 1 + answers // at_once}
    rest = {"training.learning_rate": 0.0, "training.warmup_steps": 0, "checkpoint.at_end": False}
    with training_run(ROOT / "examples" / recipe, {**shape, **rest, **overrides}) as run:
        run.wait(timeout_s=900.0)
        steps = [step for step in run.steps() if step["step"] > 1]
    return len(steps) * at_once / float(sum(step["time/step_s"] for step in steps))


def main() -> int:
    """Print each round and the median ratios to verifiers alone; 1 where one is below 1."""
    arguments = argparse.ArgumentParser(description="Compare tool environments with verifiers and a plain vLLM server.")
    arguments.add_argument("--python", required=True, help="of a virtual environment with verifiers")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--answers", type=int, default=64)
    arguments.add_argument("--at-once", type=int, default=16)
    arguments.add_argument("--port", type=int, default=5950)
    options = arguments.parse_args()
    amount, python = (options.answers, options.at_once), str(Path(options.python).absolute())
    os.environ["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"  # its uv, for the harness
    agent: dict[str, object] = {"environment.agent": [python, "verifiers_agent.py", "sums_with_tool"]}
    ratios: list[tuple[float, float]] = []
    for _ in range(options.rounds):
        alone = verifiers_alone(python, options.port, *amount)
        through = of_a_run("verifiers/tool.toml", agent, *amount)
        own = of_a_run(
            "calculator/recipe.toml",
            {"evaluation.every": 0, "evaluation.at_start": False, "evaluation.at_end": False},
            *amount,
        )
        print(f"answers a second: verifiers {alone:.2f}, as an agent {through:.2f}, own tool {own:.2f}", flush=True)
        ratios.append((through / alone, own / alone))
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    print(f"median ratio to verifiers: as an agent {medians[0]:.2f}, own tool {medians[1]:.2f}")
    return int(min(medians) < 1)


if __name__ == "__main__":
    sys.exit(main())

"""Tasks of a verifiers 0.4 taskset as an agent of streamrl. It runs in verifiers' own virtual environment, and knows of
streamrl the lines that it reads and writes: `agent = ["venv/bin/python", "verifiers_agent.py", "TASKSET"]`.

A row is `{"task": 17}`, the place of a task in the taskset. verifiers plays it with its own harness, and its rewards,
each times its weight, are added."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

HERE, SERVER = str(Path(__file__).parent), os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


async def play(env: vf.Env, tasks: list[vf.Task], line: str) -> None:
    """Run an episode of the task of a line, and say its reward."""
    said: dict[str, Any] = json.loads(line)
    client = vf.EvalClientConfig(base_url=f"{SERVER}/sessions/{said['key']}/v1", api_key_var="OPENAI_API_KEY")
    episode = await env.run_episode(tasks[said["row"]["task"]], vf.ModelContext(model="policy", client=client))
    errors = [error for part in (episode, *episode.traces) for error in part.errors]
    said["error"] = "; ".join(f"{error.type}: {error.message}" for error in errors)
    said["reward"] = sum(trace.reward for trace in episode.traces)
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


async def main(taskset: str, harness: str = "null") -> None:
    """Play tasks until stdin ends."""
    os.environ["PYTHONPATH"] = HERE  # servers of tools are processes that import the taskset
    seat = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, "agent": seat}))
    tasks = list(env.taskset)
    async with env.serving(), asyncio.TaskGroup() as episodes:
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(play(env, tasks, line))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

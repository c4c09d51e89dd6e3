"""A process of a run that notes which GPUs it sees: ``shows_gpus.py <role> --index i --run-directory DIR``.

Everything is the real process up to what the role would start. It notes in ``DIR/seen/<name>``: the GPUs of a process
that it starts itself, those of a reward's processes, and an engine's share of their memory."""

from __future__ import annotations

import contextlib
import json
import os
import sys

import anyio

from streamrl.engines.vllm.options import EngineOptions
from streamrl.launch import roles
from streamrl.processes import run_role
from streamrl.recipe.topology import Role
from streamrl.rewards.user_variables import variables_of_user_code


async def show(setup: run_role.ChildSetup) -> None:
    shares: list[float] = []
    if setup.plan.role is Role.ENGINE:
        roles._vllm = lambda options: note(options, shares)  # type: ignore[assignment, return-value]
        with contextlib.suppress(NotStarted):
            await roles.run_engine(setup)
    variables = dict(os.environ)
    if setup.plan.role is Role.REWARD:
        variables = variables_of_user_code(setup.recipe.rewards)
    script = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('CUDA_DEVICE_ORDER'))"
    seen = (await anyio.run_process([sys.executable, "-c", script], env=variables)).stdout.decode()
    partial = setup.run_directory / f"seen-{setup.plan.name}"
    partial.write_text(json.dumps([*seen.split(), *shares]))
    partial.rename(setup.run_directory / "seen" / setup.plan.name)
    await anyio.sleep_forever()


class NotStarted(Exception):
    pass


def note(options: EngineOptions, shares: list[float]) -> None:
    shares.append(options.gpu_memory_utilization)
    raise NotStarted


def main() -> None:
    plan, directory, sockets, resumes = run_role.parse_arguments()
    run_role.leave(
        plan, directory, lambda: run_role.run_role(run_role.load_setup(plan, directory, sockets, resumes=resumes), show)
    )


if __name__ == "__main__":
    main()

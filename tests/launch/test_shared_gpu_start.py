"""On a GPU with a trainer rank an engine starts when the rank has taken what it keeps, and has given back the rest."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from builders.recipe import small_recipe
from msgspec.structs import replace

from streamrl.base.errors import EngineError
from streamrl.engines.vllm.visible_gpus import Gpu
from streamrl.launch import roles
from streamrl.prepare.gpu_placement import Demand, place
from streamrl.processes.run_role import ChildSetup
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import Role, plan_topology


def engine_on(gpus: int, folder: Path, recipe: Recipe) -> ChildSetup:
    there = [Gpu(str(n), 80 << 30) for n in range(gpus)]
    topology = place(recipe, there, dict.fromkeys(there, Demand())).placed(plan_topology(recipe, folder))
    (plan,) = (plan for plan in topology.processes if plan.name == "engine-0")
    return ChildSetup(
        plan=plan, topology=topology, recipe=recipe, run_directory=folder, socket_directory=folder, resumes=False
    )


async def test_an_engine_waits_for_the_rank_on_its_gpu(tmp_path: Path) -> None:
    setup = engine_on(1, tmp_path, small_recipe())
    states = []

    async def wait() -> None:
        await roles._ranks_have_loaded(setup)
        states.append("engine")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.sleep(3 * roles.LOADED_POLL_S)
        states.append("rank")
        roles._loaded_file(setup, "trainer-0").touch()
    assert states == ["rank", "engine"]
    await roles._ranks_have_loaded(engine_on(2, tmp_path / "apart", small_recipe()))


async def test_gpus_of_other_hosts_are_others(tmp_path: Path) -> None:
    """An engine does not wait for a rank of another host, whose GPUs have the same names."""
    setup = engine_on(1, tmp_path, small_recipe())
    hosts = {Role.ENGINE: "first", Role.TRAINER: "second"}
    plans = tuple(replace(plan, host=hosts.get(plan.role, "")) for plan in setup.topology.processes)
    (plan,) = (plan for plan in plans if plan.role is Role.ENGINE)
    setup = replace(setup, plan=plan, topology=replace(setup.topology, processes=plans))
    with anyio.fail_after(10):
        await roles._ranks_have_loaded(setup)


async def test_a_rank_that_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "LOAD_TIMEOUT_S", 0.1)
    setup = engine_on(1, tmp_path, small_recipe())
    with pytest.raises(EngineError, match=r"engine-0 shares a GPU with trainer-0, which had not loaded within 0.1 s"):
        await roles._ranks_have_loaded(setup)

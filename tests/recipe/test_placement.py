"""Which GPUs engines, ranks, judge and reward workers get, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.recipe import small_recipe

from streamrl.engines.vllm.visible_gpus import Gpu
from streamrl.prepare.gpu_placement import Demand, GpuPlacement, place
from streamrl.recipe.judge import Judge
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.sections import Engines, EngineShape, Recipe, Training
from streamrl.recipe.topology import plan_topology

GIB = 1 << 30
SMALL = Demand(engine=2 * GIB, rank=8 * GIB)


def gpus(count: int) -> list[Gpu]:
    return [Gpu(str(number), 80 * GIB) for number in range(count)]


def recipe(count: int = 1, ranks: int = 1, *, device: str = "auto", judge: str = "", **engines: Any) -> Recipe:
    return small_recipe(
        judge=Judge(model=judge),
        reward_limits=RewardLimits(workers=2),
        training=Training(ranks=ranks, device=device),
        engines=Engines(count=count, **engines),
    )


def names(found: GpuPlacement) -> dict[str, str]:
    assert found.problems == []
    return {name: ",".join(gpu.name for gpu in one.gpus) for name, one in found.tenants.items()}


@pytest.mark.parametrize(
    ("made", "there", "engines", "ranks"),
    [
        (recipe(4, 4), 8, "0 1 2 3", "4 5 6 7"),
        (recipe(3, 2, tensor_parallel_size=2), 8, "0,1 2,3 4,5", "6 7"),
        (recipe(1, 2, tensor_parallel_size=2, args={"pipeline_parallel_size": 3}), 8, "0,1,2,3,4,5", "6 7"),
        (recipe(1, 1), 8, "0", "1"),
        (recipe(1, 1), 2, "0", "1"),
        (recipe(1, 1), 1, "0", "0"),
        (recipe(2, 1), 1, "0 0", "0"),
        (recipe(2, 1), 2, "0 1", "0"),
        (recipe(3, 1), 2, "0 1 0", "0"),
        (recipe(6, 4), 8, "0 1 2 3 4 5", "6 7 0 1"),
        (recipe(1, 1, device="cpu"), 1, "0", ""),
        (recipe(1, 1, device="cuda:0"), 2, "0", "0"),
    ],
)
def test_gpus_are_shared_only_where_there_are_too_few(made: Recipe, there: int, engines: str, ranks: str) -> None:
    """Engines and ranks share a GPU only where there are too few."""
    expected = {f"engine-{number}": name for number, name in enumerate(engines.split())}
    expected |= {f"trainer-{number}": name for number, name in enumerate(ranks.split())}
    assert names(place(made, gpus(there), SMALL)) == expected


def test_engines_of_one_gpu_divide_its_share() -> None:
    """Engines of one GPU divide its share, and their processes know it."""
    made = recipe(2, 1)
    found = place(made, gpus(1), SMALL)
    assert found.lines() == ["  GPU 0      76.0 of 80.0 GiB: engine-0 34.0, engine-1 34.0, trainer-0 8.0"]
    assert place(made, gpus(1), Demand(rank=20 * GIB)).lines() == [
        "  GPU 0      76.8 of 80.0 GiB: engine-0 28.4, engine-1 28.4, trainer-0 20.0"
    ]
    plans = {one.name: one for one in found.placed(plan_topology(made, Path("/s"))).processes}
    assert [
        (plans[name].gpus, plans[name].gpu_memory_utilization) for name in ("engine-0", "engine-1", "trainer-0")
    ] == [(("0",), 0.425), (("0",), 0.425), (("0",), 0.0)]
    assert plans["controller"].gpus == plans["reward-0"].gpus == ()


def test_judge_and_reward_models_have_gpus() -> None:
    """The judge and reward models have GPUs of their own, or the one with the most room."""
    demand = Demand(rank=20 * GIB, rewards=16 * GIB, reward_gpus=1)
    made = recipe(1, 1, judge="j")
    wide = names(place(made, gpus(8), demand))
    assert wide == {"engine-0": "0", "trainer-0": "1", "judge-0": "2", "reward-0": "3", "reward-1": "4"}
    narrow = place(made, gpus(2), demand)
    assert names(narrow) == wide | {"judge-0": "1", "reward-0": "1", "reward-1": "1"}
    assert (
        narrow.lines()[1] == "  GPU 1      76.0 of 80.0 GiB: trainer-0 20.0, judge-0 24.0, reward-0 16.0, reward-1 16.0"
    )


@pytest.mark.parametrize(
    ("function", "options", "declared", "worker_gpus", "model"),
    [
        ("reward_model", {"path": "/m"}, None, 1, "/m"),
        ("reward_model", {"path": "/m", "device": "cpu"}, None, 0, ""),
        ("reward_model", {"path": "/m"}, 2, 2, "/m"),
        ("reward_model", {"path": "/m"}, 0, 0, "/m"),
        ("reward_model.py:score", {"path": "/m"}, None, 0, ""),
        ("mine.py:reward_model", {"path": "/m", "device": "cuda"}, None, 0, ""),
        ("mine.py:score", {}, 1, 1, ""),
        ("judge", {"cache": "/c"}, None, 0, ""),
        ("math", {"path": "/m"}, None, 0, ""),
    ],
)
def test_gpus_of_a_reward_are_declared(
    function: str, options: dict[str, str], declared: int | None, worker_gpus: int, model: str
) -> None:
    """GPUs of a reward are declared by the recipe or by the built-in reward, never guessed from a name of the user."""
    reward = Reward(function=function, options=options, gpus=declared)
    assert (reward.worker_gpus, reward.model) == (worker_gpus, model)


def test_a_reward_worker_may_have_several_gpus() -> None:
    """Each worker has the number of GPUs that its most demanding reward declares, or the run is refused."""
    made = recipe(1, 1)
    demand = Demand(rank=20 * GIB, rewards=GIB, reward_gpus=2)
    assert names(place(made, gpus(6), demand)) == {
        "engine-0": "0", "trainer-0": "1", "reward-0": "2,3", "reward-1": "4,5"
    }  # fmt: skip
    assert place(made, gpus(1), demand).problems[0] == (
        "rewards.advanced.gpus: a reward worker needs 2, and there are 1: lower it"
    )


def test_prepared_sets_share_gpus_and_memory() -> None:
    """Prepared sets have the same GPUs and the memory of one set."""
    found = place(recipe(4, 4, sets=(EngineShape(count=2, tensor_parallel_size=2),)), gpus(8), SMALL)
    expected = {f"engine-{number}": str(number) for number in range(4)} | {"engine-4": "0,1", "engine-5": "2,3"}
    assert names(found) == expected | {f"trainer-{number}": str(number + 4) for number in range(4)}
    assert found.used(found.gpus[0]) == int(0.85 * 80 * GIB)


@pytest.mark.parametrize(
    ("made", "there", "demand", "problem"),
    [
        (
            recipe(2, 1, gpu_memory_utilization=0.85),
            1,
            Demand(rank=20 * GIB),
            (
                "memory: GPU 0 has 80.0 GiB, and engine-0 34.0, engine-1 34.0, trainer-0 20.0 need 88.0: "
                "set engines.gpu_memory_utilization = 0.75 or less, or remove it"
            ),
        ),
        (
            recipe(1, 0, judge="j", device="cpu", gpu_memory_utilization=0.85),
            1,
            SMALL,
            (
                "memory: GPU 0 has 80.0 GiB, and engine-0 68.0, judge-0 24.0 need 92.0: "
                "set engines.gpu_memory_utilization = 0.7 or less, or remove it"
            ),
        ),
        (
            recipe(1, 1),
            2,
            Demand(rank=99 * GIB),
            (
                "memory: GPU 1 has 80.0 GiB, and trainer-0 99.0 need 99.0: use more GPUs or fewer engines, a smaller "
                'model, lora.rank, or training.optimizer = "adamw_offloaded"'
            ),
        ),
        (
            recipe(2, 1, device="cpu"),
            1,
            Demand(engine=38 * GIB),
            (
                "memory: engine-0 may take 34.0 GiB of GPU 0, and its weights and one request need 38.0: raise "
                "engines.gpu_memory_utilization or tensor_parallel_size, or lower count"
            ),
        ),
        (
            recipe(1, 3),
            2,
            SMALL,
            'training.ranks: 3 need a GPU each, and device = "auto" leaves 2 of 2: lower it, or write "cuda"',
        ),
        (
            recipe(1, 1, device="cuda:4"),
            2,
            SMALL,
            'training.ranks: 1 need a GPU each, and device = "cuda:4" leaves 0 of 2: lower it, or write "cuda"',
        ),
        (
            recipe(3, 1, tensor_parallel_size=2),
            4,
            SMALL,
            (
                "engines.tensor_parallel_size: engines 3x2 need 3 x 2 GPUs, and there are 4: "
                "lower count or tensor_parallel_size"
            ),
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_a_remedy(
    made: Recipe, there: int, demand: Demand, problem: str
) -> None:
    assert place(made, gpus(there), demand).problems == [problem]


def test_a_gpu_of_unknown_memory_is_used() -> None:
    """A GPU whose memory is unknown is used and does not count in the arithmetic."""
    assert names(place(recipe(), [Gpu("0", 0)], SMALL)) == {"engine-0": "0", "trainer-0": "0"}


def test_engines_take_what_other_processes_leave() -> None:
    """Engines beside a rank get the rest of its GPU where the recipe names no share, those on other GPUs 0.85."""
    wide = place(recipe(3, 1), gpus(3), Demand(engine=GIB, rank=50 * GIB))
    assert wide.problems == []
    assert all(wide.used(gpu) <= gpu.memory for gpu in wide.gpus)
    assert [wide.tenants[f"engine-{number}"].share for number in range(3)] == [0.33, 0.85, 0.85]
    both = place(recipe(1, 1, tensor_parallel_size=2), gpus(2), Demand(engine=GIB, rank=50 * GIB))
    assert both.tenants["engine-0"].share == 0.33
    # Processes stay where they are placed first: the judge, with 24 GiB, on the GPU without the rank.
    judged = place(recipe(2, 1, judge="j"), gpus(2), Demand(engine=GIB, rank=10 * GIB))
    assert names(judged) == {"engine-0": "0", "engine-1": "1", "trainer-0": "0", "judge-0": "1"}
    tight = place(recipe(1, 1), gpus(1), Demand(engine=10 * GIB, rank=75 * GIB))
    (problem,) = tight.problems
    assert problem.startswith("memory: engine-0 may take 1.6 GiB of GPU 0, and its weights and one request need 10.0: ")
    assert problem.endswith('a smaller model, lora.rank, or training.optimizer = "adamw_offloaded"')

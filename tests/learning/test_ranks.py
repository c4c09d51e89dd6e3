"""1, 2 and 4 ranks as real processes: equal weights and metrics for any split of the groups, also after a resume."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from builders.recipe import small_recipe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rank_process import Phase, odd_weights  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors  # noqa: E402

from streamrl.learning import process_group  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.learning.state import checkpoint, durable_files  # noqa: E402
from streamrl.learning.state.optimizer import MasterOptimizer  # noqa: E402
from streamrl.prepare.memory import rank_bytes  # noqa: E402
from streamrl.pretrained.model_facts import read_model_facts  # noqa: E402
from streamrl.recipe.objective import Objective, objective_settings  # noqa: E402
from streamrl.recipe.objectives.ppo import ValueModel  # noqa: E402
from streamrl.recipe.sections import ComputeDtype, Gathered, Training  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.long]
SCRIPT = Path(__file__).parent / "rank_process.py"
STEPS, HALF = 8, 4
HANG_S = 20.0  # more than a step of two ranks takes on a busy machine
WHOLE, NARROW = ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16
ROWS = {"micro_batch_tokens": 64, "activation_checkpointing": True, "gathered": Gathered.LAYER, "compute_dtype": WHOLE}
MEASURED: dict[str, dict[str, Any]] = {
    "bytes-one": {"ranks": 1, "gathered": Gathered.BATCH},
    "bytes-two-whole": {"ranks": 2, "gathered": Gathered.BATCH},
    "bytes-two": {"ranks": 2},
    "bytes-two-narrow": {"ranks": 2, "compute_dtype": NARROW},
    "bytes-four": {"ranks": 4},
    "bytes-two-copies": {"ranks": 2, "replicas": 2},
    "bytes-four-copies": {"ranks": 4, "replicas": 2},
    "bytes-two-tensors": {"ranks": 2, "tensor_parallel_size": 2},
    "bytes-four-tensors": {"ranks": 4, "tensor_parallel_size": 2},
    "bytes-four-pieces": {"ranks": 4, "context_parallel_size": 2},
}
WIDE: dict[str, Any] = {
    "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4,
    "layer_types": ["full_attention"] * 6,
}  # fmt: skip
PPO_WITH_KL = Objective(algorithm="ppo", kl_coefficient=0.1)
# By number of ranks: the groups of each rank in even and in odd steps. Uneven on purpose; some ranks get none.
SHARES = {
    1: [[[0, 1, 2, 3, 4]]],
    2: [[[0], [0, 1, 2, 3, 4]], [[1, 2, 3, 4], []]],
    4: [[[0], []], [[1, 2], [4]], [[3, 4], [0, 1, 2]], [[], [3]]],
}

Outputs = list[dict[str, np.ndarray]]


class Trainers:
    """Phases of processes, and what they wrote."""

    def __init__(self, model: str, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.phases: dict[int, list[Phase]] = {}

    def add(
        self, name: str, processes: list[int], *, steps: int = STEPS, ends: tuple[str, ...] = (), **more: object
    ) -> None:
        """A trainer ``name`` with one rank in each of these processes."""
        checkpoints = more.pop("checkpoints", {})
        measured = more.pop("measured", False)
        for rank, process in enumerate(processes):
            options = {
                "model_path": self.model,
                "run_id": "ranks",
                "weights_endpoint": f"ipc://{self.directory}/{name}{rank}",
                "rank": rank,
                "ranks": len(processes),
                "rendezvous": f"file://{self.directory}/{name}.rendezvous" if len(processes) > 1 else "",
                "device": "cpu",
                "threads": 1,
                "learning_rate": 1e-3,
                "micro_batch_tokens": 64,
                "collective_timeout_s": 200.0,
            }
            whole = TrainerOptions(**options | more)  # type: ignore[arg-type]
            phase = Phase(
                options=whole,
                shares=SHARES[len(processes) // whole.ranks_per_group][rank // whole.ranks_per_group],
                steps=steps,
                out=str(self.out(name, rank)),
                checkpoints=checkpoints,  # type: ignore[arg-type]
                end=ends[rank] if ends else "",
                measured=measured,  # type: ignore[arg-type]
            )
            self.phases.setdefault(process, []).append(phase)

    def out(self, name: str, rank: int) -> Path:
        return self.directory / f"{name}.{rank}.npz"

    def run(self) -> None:
        """Start the processes and wait for them; those that hang are killed at the end."""
        (self.directory / "model").mkdir()
        (self.directory / "model" / "config.json").write_text('{"model_type": "odd"}')
        save_file({}, self.directory / "model" / "model.safetensors")  # every tensor of the odd weights is trained
        phases = [phases for _, phases in sorted(self.phases.items())]
        (self.directory / "phases.json").write_bytes(msgspec.json.encode(phases))
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # as torchrun sets it, and where two are used
        with (self.directory / "log").open("wb") as log:
            ranks = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.directory)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | threads,
                start_new_session=True,
            )
            try:
                ranks.wait(timeout=1500)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(ranks.pid, signal.SIGKILL)
        logged = (self.directory / "log").read_text()
        assert ranks.returncode == 0, logged
        codes = msgspec.json.decode((self.directory / "codes.json").read_bytes())
        expected = {"die": -signal.SIGKILL, "hang": None}
        assert codes == [expected.get(each[-1].end, 0) for each in phases], logged

    def outputs(self, name: str) -> Outputs:
        return [dict(np.load(path)) for path in sorted(self.directory.glob(f"{name}.?.npz"))]


@pytest.fixture(scope="module")
def wide_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six layers, so that weights are most of the memory."""
    directory = tmp_path_factory.mktemp("wide")
    config = transformers.AutoConfig.from_pretrained(tiny_model, **WIDE)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    shutil.copy(Path(tiny_model) / "tokenizer.json", directory)
    return str(directory)


@pytest.fixture(scope="module")
def launch(tiny_model: str, wide_model: str, tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    """Every trainer of this module, in four processes."""
    directory = tmp_path_factory.mktemp("r")
    two, four = str(directory / "two.ckpt"), str(directory / "four.ckpt")
    launch = Trainers(tiny_model, directory)
    launch.add("one", [0])
    launch.add("two", [2, 3], checkpoints={HALF: two})
    launch.add("one-resumed", [1], steps=STEPS - HALF, resume_from=two)
    launch.add("four", [0, 1, 2, 3])
    launch.add("layers", [0, 1], gathered=Gathered.LAYER)
    launch.add("layers-resumed", [0, 1, 2, 3], steps=STEPS - HALF, resume_from=two, gathered=Gathered.LAYER)
    models = {"objective": objective_settings(PPO_WITH_KL), "streaming": False, "steps": 2}
    launch.add("one-models", [2], **models)
    launch.add("layers-models", [0, 1], gathered=Gathered.LAYER, **models)
    for name, sizes in MEASURED.items():
        launch.add(name, list(range(sizes["ranks"])), model_path=wide_model, measured=True, steps=1, **ROWS | sizes)
    launch.add("four-resumed", [0, 1, 2, 3], steps=STEPS - HALF, resume_from=two, checkpoints={HALF: four})
    apart = {"updates_per_batch": 2, "streaming": False}
    launch.add("one-updates", [2], steps=1, **apart)
    launch.add("four-updates", [0, 1, 2, 3], steps=1, **apart)
    own = objective_settings(Objective(algorithm="ppo", value_model=ValueModel.OWN))
    ordered = apart | {"objective": own, "shortest_first": True, "epochs_per_batch": 2, "steps": 2}
    launch.add("one-ordered", [1], **ordered)
    launch.add("four-ordered", [0, 1, 2, 3], **ordered)
    launch.add("death", [0, 1], steps=1, ends=("survive", "die"), threads=2)
    launch.add("hang", [2, 3], steps=1, ends=("survive", "hang"), collective_timeout_s=HANG_S)
    launch.run()
    return launch


def joined_masters(outputs: Outputs) -> dict[str, np.ndarray]:
    """Full flat masters from the shards of all ranks, placed by their published offsets."""
    joined = {}
    for name in [key.removeprefix("master/") for key in outputs[0] if key.startswith("master/")]:
        parts = sorted((int(o[f"offset/{name}"]), rank) for rank, o in enumerate(outputs) if o[f"master/{name}"].size)
        shards = [outputs[rank][f"master/{name}"] for _, rank in parts]
        assert [start for start, _ in parts] == list(np.cumsum([0] + [shard.size for shard in shards])[:-1])
        joined[name] = np.concatenate(shards)
    return joined


def distance(left: Outputs, right: Outputs) -> float:
    """Norm of the difference of two sets of weights, relative to the norm of the second."""
    lefts, rights = joined_masters(left), joined_masters(right)
    assert lefts.keys() == rights.keys()
    flat, other = (np.concatenate([m[name] for name in sorted(m)]).astype(np.float64) for m in (lefts, rights))
    return float(np.linalg.norm(flat - other) / np.linalg.norm(other))


def metrics_of(output: dict[str, np.ndarray], version: int) -> dict[str, float]:
    """Metrics of the step to ``version`` that are about the batch, not about the time it took."""
    prefixes = (f"{version}/optim/", f"{version}/policy/")
    return {name: float(value) for name, value in output.items() if name.startswith(prefixes)}


def assert_same_curve(outputs: Outputs, expected: Outputs, first: int) -> None:
    for version in range(first + 1, STEPS + 1):
        wanted = metrics_of(expected[0], version)
        assert len(wanted) > 10
        for output in outputs:
            assert metrics_of(output, version) == metrics_of(outputs[0], version)  # reduced: equal on every rank
        assert metrics_of(outputs[0], version) == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["two", "four", "layers"])
def test_ranks_equal_one_over_8_steps(launch: Trainers, name: str) -> None:
    one = launch.outputs("one")
    assert distance(launch.outputs(name), one) < 4e-6
    assert_same_curve(launch.outputs(name), one, 0)


@pytest.mark.parametrize("name", ["one-resumed", "four-resumed", "layers-resumed"])
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_four(launch: Trainers, name: str) -> None:
    """A checkpoint of two ranks goes on with one rank and with four."""
    through = launch.outputs("two")
    assert distance(launch.outputs(name), through) < 4e-6
    assert_same_curve(launch.outputs(name), through, HALF)


@pytest.mark.parametrize(("kind", "steps"), [("updates", 1), ("ordered", 2)])
def test_updates_take_equal_groups_on_any_number_of_ranks(launch: Trainers, kind: str, steps: int) -> None:
    """Updates on one batch take the same groups on any number of ranks. In turn; or by length, in two passes, with
    values of a model whose gradients come from all ranks."""
    one, four = launch.outputs(f"one-{kind}"), launch.outputs(f"four-{kind}")
    for version in range(1, steps + 1):
        assert metrics_of(four[0], version) == pytest.approx(metrics_of(one[0], version), rel=1e-3, abs=1e-5)
        edges = [[float(o[f"{version}/length/{edge}_update"]) for edge in ("first", "last")] for o in (*one, *four)]
        assert edges == [edges[0]] * 5 and (kind == "updates" or edges[0][0] < edges[0][1])
    assert distance(four, one) < 4e-6


def test_reference_and_critic_score_layer_by_layer(launch: Trainers) -> None:
    one, layers = launch.outputs("one-models"), launch.outputs("layers-models")
    for version in (1, 2):
        wanted, found = metrics_of(one[0], version), metrics_of(layers[0], version)
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5) and wanted[f"{version}/optim/grad_norm"] > 0
    assert distance(layers, one) < 4e-6


def test_bytes_of_a_rank_are_those_predicted(launch: Trainers, wide_model: str) -> None:
    """Weights, gradients, optimizer and what is gathered, at the peak of the first step; starting takes no more."""
    facts = read_model_facts(Path(wide_model))
    whole = 4 * facts.parameters
    peaks: dict[str, float] = {}
    for name, sizes in MEASURED.items():
        training = Training(**ROWS | sizes)
        predicted = rank_bytes(small_recipe(wide_model, training=training), facts, 64, training.gathered)
        steps, starts = ([int(output[key]) for output in launch.outputs(name)] for key in ("step", "start"))
        assert max(steps) == pytest.approx(predicted.total, rel=0.1), name
        assert max(starts) <= max(steps), name
        peaks[name] = max(steps) / whole
        weights_and_gradients = (max(steps) - predicted.optimizer) / whole
        assert (weights_and_gradients < 2.3) == (training.gathered is Gathered.LAYER and training.replicas == 1), name
    assert peaks["bytes-one"] > peaks["bytes-two"] > peaks["bytes-four"]
    assert 2 * peaks["bytes-four"] < peaks["bytes-one"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_number_of_ranks_holds_the_same_bits(launch: Trainers) -> None:
    """Masters and moments that four ranks saved as soon as they had loaded what two ranks wrote."""
    loaded = []
    for name in ("two", "four"):
        directory = launch.directory / f"{name}.ckpt"
        durable_files.verify(directory)
        reader = HuggingFaceStorageReader(str(directory / "trainer"))
        tensors = {key: torch.empty(entry.size) for key, entry in reader.read_metadata().state_dict_metadata.items()}
        load_tensors(tensors, storage_reader=reader, no_dist=True)
        loaded.append(tensors)
        assert len(list((directory / "trainer").iterdir())) == {"two": 2, "four": 4}[name]
    two, four = loaded
    assert {key.partition(".")[0] for key in two} == {"master", "exp_avg", "exp_avg_sq"}
    assert two.keys() == four.keys() and all(torch.equal(two[key], four[key]) for key in two)


def test_what_four_ranks_cut_unevenly_is_loaded_whole_by_one(launch: Trainers) -> None:
    options = TrainerOptions(model_path="", run_id="", weights_endpoint="")
    process_group.join(options, torch.device("cpu"))
    weights, wanted = odd_weights(2), odd_weights(1).masters.full()
    optimizer = MasterOptimizer(options, weights.masters, weights.decayed_places)
    extra = {"replicated": torch.zeros(3)}
    assert checkpoint.load(launch.directory / "odd", weights, optimizer, extra=extra).policy_version == 9
    process_group.leave()
    assert torch.equal(weights.masters.full(), wanted)
    assert torch.equal(optimizer.moments()["exp_avg"], 2 * wanted)
    assert torch.equal(optimizer.moments()["exp_avg_sq"], wanted**2)
    assert optimizer.steps == 9 and extra["replicated"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["death", "hang"])
def test_the_other_rank_ends_with_a_reason(launch: Trainers, name: str) -> None:
    """Its peer was killed, or hung, after the groups of a batch and before its close: it waits neither for the time
    limit of a killed one's collectives (200 s) nor for the end of one that hangs (1,000 s)."""
    found = msgspec.json.decode(launch.out(name, 0).read_bytes())
    assert found["error"].startswith("StreamBroken: trainer rank 0 of 2 was closing a batch when rank 1 ended"), found
    assert found["noticed"] < 150 and found["closed"] < 150, found
    if name == "death":
        assert found["threads"] == 2  # what the options say, not OMP_NUM_THREADS

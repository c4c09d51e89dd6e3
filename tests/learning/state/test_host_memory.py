"""A rank that takes turns with engines: its state is on the device only during a step, with the same bits. On a
pretended GPU, whose device is a mark of a storage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")  # which peft imports: its kernels of CUDA are not pretended

from safetensors.torch import load_file  # noqa: E402
from sample_groups import make_groups, published_bits, train_batch  # noqa: E402

from campaigns.pretended_gpu.devices import device_of, pretended_gpus  # noqa: E402
from streamrl.base.messages import SaveCheckpoint  # noqa: E402
from streamrl.learning.state.host_memory import HostMemory  # noqa: E402
from streamrl.recipe.objective import ObjectiveSettings  # noqa: E402
from streamrl.recipe.sections import Lora  # noqa: E402

pytestmark = pytest.mark.torch
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters": {"lora": Lora(rank=4, targets=("q_proj", "v_proj"))},
    "critic": {"objective": ObjectiveSettings(advantages="gae", value_model="separate")},
}


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretended_gpus():
        yield


def on_device() -> list[torch.Size]:
    """Shapes of the tensors of this process that take memory of the device."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    places = [(tensor, device_of(tensor)) for tensor in tensors if tensor.numel()]
    return [tensor.shape for tensor, place in places if place is not None and place.type == "cuda"]


@pytest.mark.seconds(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("gpu")
def test_state_is_on_the_device_only_during_a_step(
    start_trainer: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    """Between steps nothing is on the device, checkpoints are written meanwhile, and all bits are those of a rank whose
    state stays."""
    before = len(on_device())
    common = {"device": "cuda", "compute_dtype": "float32", "streaming": False, "canary": True, **KINDS[kind]}
    ends = []
    for in_turns in (False, True):
        trainer = start_trainer(in_turns=in_turns, **common)
        trainer.publish_anchor(0)
        reports = []
        for version in (1, 2):
            assert not in_turns or len(on_device()) == before
            groups = [msgspec.structs.replace(g, batch_id=version - 1) for g in make_groups(0, [4, 3], seed=version)]
            reports.append(train_batch(trainer, groups, version))
            trainer.acknowledge(version)
        folder = tmp_path / f"{in_turns}"
        trainer.save_checkpoint(SaveCheckpoint(directory=str(folder), policy_version=2))
        assert not in_turns or len(on_device()) == before
        files = {path.relative_to(folder): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
        ends.append((files, published_bits(trainer), [report.probe_logprobs for report in reports]))
        assert ("time/state_in_s" in reports[0].metrics) is in_turns
    (files, bits, probes), (moved_files, moved_bits, moved_probes) = ends
    assert probes == moved_probes and all(probes)
    assert all((bits[name] == moved_bits[name]).all() for name in bits)
    assert files.keys() == moved_files.keys() and files
    for name, tensors in files.items():
        assert all(torch.equal(tensor, moved_files[name][key]) for key, tensor in tensors.items())


@pytest.mark.usefixtures("gpu")
def test_pinned_memory_is_used_again_and_not_kept_for_nothing() -> None:
    """A tensor that shrinks has its block again. One that grows gets a larger one, and the old one is given back."""
    memory = HostMemory(torch.device("cuda"))
    blocks = []
    for length in (1000, 900, 2000):
        tensor = torch.arange(length, device="cuda")
        memory.offload()
        (block,) = (moved.block for moved in memory._moved if moved.tensors[0] is tensor)
        blocks.append((block.data_ptr(), block.numel()))
        assert not memory._free
        memory.reload()
        assert torch.equal(tensor.cpu(), torch.arange(length))
    assert blocks[0] == blocks[1] == (blocks[0][0], 8000) and blocks[2][1] == 16000

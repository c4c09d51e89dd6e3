"""Push random versions into vLLM's model of a checkpoint, and compare it with models that load the result.

The model gets no request. Publisher, transport, load plan and commits are those of a run. ``streamrl families`` calls
this in a throw-away process for each checkpoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement, announcement_of
from streamrl.engines.vllm.load_plan_probe import load_context, published_tensors
from streamrl.engines.vllm.options import EngineOptions
from streamrl.weights import engine_variables
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.pull.replica import TensorSpecs
from streamrl.weights.vllm.post_load_changes import bytes_of

_CHANGED_SHARE = 0.02
_TORCH_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_VERSIONS = 20
_WHOLE_CHAIN = 1 << 40


def push_problem(options: EngineOptions) -> str:
    """Push ``_VERSIONS`` random changes of what a run publishes into the model of ``options``, then the last one into a
    model that was loaded later, as after the death of an engine.

    Returns the first parameter or buffer of the two that is not, bit for bit, that of a model loaded from a checkpoint
    with the last version, or the error of a push; empty without one. The function changes the state of its process,
    which must be used for nothing else."""
    os.environ.update(options.variables)
    os.environ.update(engine_variables())
    checkpoint = Path(options.model_path)
    tensors = published_tensors(options.model_path)
    bits = published_bits(checkpoint, tensors)
    with tempfile.TemporaryDirectory(prefix="streamrl-") as folder:
        publisher = open_publisher(f"ipc://{folder}/weights", checkpoint, tensors)
        try:
            live = _LoadedModel(options)
            bases = []
            for version in range(_VERSIONS):
                bits = changed(bits, version)
                published = publisher.publish(version, bits)
                live.commit(announcement_of(version, [published]))
                publisher.acknowledge(version)
                bases.append(published.base_version)
            if None in bases:  # the checkpoint has other dtypes than what is published
                published = publisher.publish_anchor(version)
            restarted = _LoadedModel(options)
            restarted.commit(announcement_of(version, [published]))
        except WeightError as error:
            return str(error)
        finally:
            publisher.close()
        last = Path(folder) / "last"
        write_version(checkpoint, last, bits, tensors)
        expected = _LoadedModel(replace(options, model_path=str(last)))
    return live.difference(expected) or restarted.difference(expected)


def open_publisher(endpoint: str, checkpoint: Path, tensors: TensorSpecs) -> WeightPublisher:
    """Return a publisher of ``tensors``, which serves every version since the ``checkpoint``."""
    shards = [ShardSpec(name, spec.dtype, spec.shape, 0, spec.elements) for name, spec in tensors.items()]
    publisher = WeightPublisher(
        endpoint, run_id="families", rank=0, shards=shards, checkpoint=checkpoint, chain_bytes=_WHOLE_CHAIN
    )
    publisher.start()
    return publisher


class _LoadedModel:
    """vLLM's model of a checkpoint, and the receiver of its weights."""

    def __init__(self, options: EngineOptions) -> None:
        with load_context(options) as config:
            from vllm.model_executor.model_loader import get_model
            from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

            from streamrl.weights.vllm.weight_receiver import StreamrlWeightTransfer

            _set_torch_accelerator_to_noop()  # as vLLM's worker does on a CPU
            self._model: nn.Module = get_model(vllm_config=config)
            transfer = config.weight_transfer_config
            self._receiver = StreamrlWeightTransfer(transfer, config, torch.device("cpu"), self._model)

    def commit(self, announcement: WeightAnnouncement) -> None:
        """Fetch a version and write it to the model. Raises ``WeightError``, also for another state hash."""
        transaction = self._receiver.transaction
        transaction.begin_stage(announcement)
        report = transaction.finish_stage(self._receiver.record_live)
        if report.error:
            raise WeightError(report.error)
        transaction.apply(announcement.policy_version)
        transaction.finish()
        live_hash = transaction.live_report().state_hash
        if live_hash != announcement.state_hash:
            raise WeightError(f"version {announcement.policy_version} has another state hash in the model")

    def difference(self, expected: _LoadedModel) -> str:
        """Return the first tensor that differs from that of ``expected``; empty: none."""
        tensors = dict(tensors_of(self._model))
        fresh = dict(tensors_of(expected._model))
        for name in sorted(tensors.keys() | fresh.keys()):
            if name not in tensors or name not in fresh:
                return f"{name} is in one of the models only"
            different = int(bytes_of(tensors[name]).ne(bytes_of(fresh[name])).count_nonzero())
            if different:
                return f"{name}: {different} bytes differ from a fresh load"
        return ""


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and further tensors that modules and their kernels of attention have, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for attribute, value in (vars(module) | vars(getattr(module, "impl", module))).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield f"{name}:{attribute}", value


def published_bits(checkpoint: Path, tensors: TensorSpecs) -> dict[str, BitArray]:
    """Return the bits of the tensors as they are published, flat."""
    stored = _stored(checkpoint)
    return {name: _bits_of(stored[name].to(_TORCH_TYPES[spec.dtype])) for name, spec in tensors.items()}


def _bits_of(tensor: Tensor) -> BitArray:
    flat = tensor.contiguous().view(-1)
    bits: BitArray
    if tensor.element_size() == 2:
        bits = flat.view(torch.int16).numpy().view(np.uint16)
    else:
        bits = flat.view(torch.int32).numpy().view(np.uint32)
    return bits


def _stored(checkpoint: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def changed(bits: Mapping[str, BitArray], seed: int) -> dict[str, BitArray]:
    """Return ``bits`` with some elements of each tensor a few units in the last place away."""
    random = np.random.default_rng(seed)
    new = {name: values.copy() for name, values in bits.items()}
    for values in new.values():
        places = random.choice(values.size, max(1, int(values.size * _CHANGED_SHARE)), replace=False)
        values[places] ^= random.integers(1, 4, places.size).astype(values.dtype)
    return new


def write_version(checkpoint: Path, directory: Path, bits: Mapping[str, BitArray], tensors: TensorSpecs) -> None:
    """Write a copy of ``checkpoint`` that has ``bits`` in the dtypes of its files."""
    shutil.copytree(checkpoint, directory)
    stored = _stored(checkpoint)
    for name, spec in tensors.items():
        values = torch.from_numpy(bits[name].view(f"i{bits[name].itemsize}")).view(_TORCH_TYPES[spec.dtype])
        stored[name] = values.view(spec.shape).to(stored[name].dtype)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})

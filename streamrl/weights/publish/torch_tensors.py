"""Publishing from a trainer rank's torch tensors. The trainer gets ``start_publisher`` from ``launch/roles.py``.

Weights on a GPU are compared there, and only the changes are copied to the CPU, to be encoded. ``encode_on_device``
yields the same changes as ``weights.codec`` with torch alone: a comparison, a running count of each exponent class, and
gathers at the changed positions. On a CPU the compiled loops of ``weights.codec`` are many times faster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import msgpack
from torch import Tensor

from streamrl.base.errors import WeightError
from streamrl.learning.model.local_shards import LocalShard
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.published_weights import bit_array, upper_halves
from streamrl.weights.codec.bits import BitArray, BitType, bit_type, exponent_field, move_symbols
from streamrl.weights.codec.codec import Changes, EncodedPatch, ExponentClasses, WeightPatch, by_class, encode_changes
from streamrl.weights.distance import Mover
from streamrl.weights.manifest import ShardSpec, WorkUnit
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.publish.tensor_source import CpuTensors


def start_publisher(
    options: TrainerOptions,
    shards: Sequence[LocalShard],
    device: torch.device,
    movers: Collection[Mover] = (Mover.ENCODED,),
) -> WeightPublisher:
    """Make and start the publisher of a rank's shards. Weights on a GPU are compared there with a second baseline, of 2
    bytes an element. ``movers``: movers of the engines. Raises ``WeightError`` when the endpoint cannot be
    bound."""
    publisher = WeightPublisher(
        options.weights_endpoint,
        run_id=options.run_id,
        rank=options.rank,
        shards=shard_specs(shards),
        checkpoint=Path(options.model_path),
        source=TorchOnCpu() if device.type == "cpu" else DeviceTensors(device),
        movers=movers,
    )
    publisher.start()
    return publisher


def shard_specs(shards: Sequence[LocalShard]) -> list[ShardSpec]:
    """Return the specs of the shards that a rank publishes."""
    return [ShardSpec(s.name, s.dtype, s.shape, s.offset, s.stop - s.start, s.run, s.stride) for s in shards]


class TorchOnCpu(CpuTensors):
    """Reads float32 tensors in CPU memory, whose values are published in the dtype of their shard."""

    def checked(self, tensor: Any, shard: ShardSpec) -> Any:
        return super().checked(bit_array(tensor, shard.dtype), shard)


class DeviceTensors(CpuTensors):
    """Reads float32 tensors on a device, whose values are published in the dtype of their shard. The device has a
    baseline to compare them with, 2 bytes an element of bfloat16, besides the publisher's baseline in CPU memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline: dict[int, Tensor] = {}

    def share(self, units: Sequence[WorkUnit]) -> tuple[str, bytes]:
        """Make the baseline one tensor, and export it. Engines get what torch's own reduction of a tensor has, without
        pickle."""
        counts = [unit.count for unit in units]
        flat, uuid, handle = self._new_memory(sum(counts))
        self._baseline = dict(enumerate(torch.split(flat, counts)))
        return uuid, handle

    def _new_memory(self, count: int) -> tuple[Tensor, str, bytes]:
        """Return memory of ``count`` elements, the UUID of its GPU, and its encoded handle."""
        flat = torch.empty(count, dtype=torch.int16, device=self._device)
        _, *handle = flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return flat, uuid, msgpack.encode(handle)

    def hold(self, units: Sequence[BitArray]) -> None:
        for unit, baseline in self._baseline.items():
            baseline.copy_(_from_cpu(units[unit], baseline.device))
        self._finish()

    def patch(self, unit: int, slices: Sequence[Any], baseline: BitArray, dtype: str) -> EncodedPatch | None:
        """Compare on the device, and copy what differs."""
        new = _concatenated(slices)
        positions = torch.nonzero(self._base_of(unit, baseline, new.device) != new).flatten()
        if not positions.numel():
            return None
        values = _to_cpu(new[positions], bit_type(dtype, "on the device"))
        return EncodedPatch(WeightPatch(positions.cpu().numpy(), values), b"")

    def checked(self, tensor: Any, shard: ShardSpec) -> Tensor:
        """Return the published bits of ``tensor`` (float32, flat) as an int16 view, of float32 as an int32 view."""
        values: Tensor = tensor
        is_known = shard.dtype in ("bfloat16", "float32")
        if not is_known or values.dtype != torch.float32 or values.numel() != shard.count:
            raise WeightError(
                f"tensor {shard.name!r} ({shard.dtype}) was given as {values.numel()} elements of {values.dtype} on "
                f"{values.device}; its shard is {shard.count} of bfloat16 or float32, given as float32 values"
            )
        return values.view(torch.int32) if shard.dtype == "float32" else upper_halves(values)

    def complete(self, slices: Sequence[Any], dtype: str) -> BitArray:
        return _to_cpu(_concatenated(slices), bit_type(dtype, "on the device"))

    def changes(self, unit: int, slices: Sequence[Any], baseline: BitArray, dtype: str) -> EncodedPatch | None:
        """Encode on the device (``encode_on_device``). The first call for a unit copies its baseline from the CPU."""
        new = _concatenated(slices)
        return encode_on_device(new, self._base_of(unit, baseline, new.device), dtype)

    def _base_of(self, unit: int, baseline: BitArray, device: torch.device) -> Tensor:
        """Return the baseline on the device, which is copied from the CPU in the first call for a unit."""
        base = self._baseline.get(unit)
        if base is None:
            base = self._baseline[unit] = _from_cpu(baseline, device).clone()
        return base

    @torch.no_grad()
    def advance(self, patches: Mapping[int, WeightPatch]) -> None:
        """Write the patches to the baseline on the device, in time proportional to the number of changes."""
        for unit, patch in patches.items():
            baseline = self._baseline.get(unit)
            if baseline is not None and patch.positions is not None:
                positions = torch.from_numpy(patch.positions).to(baseline.device)
                baseline[positions] = _from_cpu(patch.values, baseline.device)
        self._finish()

    def _finish(self) -> None:
        """Wait until the baseline is written: engines read it when it has its version."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(self._device)


@torch.no_grad()
def encode_on_device(new: Tensor, base: Tensor, dtype: str) -> EncodedPatch | None:
    """Encode a patch to the same bytes as ``codec.encode_patch``. ``new``, ``base``: bits of the published ``dtype`` as
    int16 or int32 [n] on one device (``tensor.view(torch.int16)``). Returns None when nothing differs."""
    bits = bit_type(dtype, "on the device")
    positions = torch.nonzero(base != new).flatten()
    if not positions.numel():
        return None
    lowest, exponents = exponent_field(dtype)
    kinds = (base >> lowest) & (exponents - 1)  # exponents; the classes of the elements replace them below
    classes = ExponentClasses.from_counts(torch.bincount(kinds, minlength=exponents).cpu().numpy())
    kinds = torch.from_numpy(classes.class_at.astype(np.int16)).to(base.device)[kinds.to(torch.int32)]
    old = base[positions]
    new_values = new[positions]
    changed_kinds = kinds[positions]
    gaps = torch.empty_like(positions)
    for kind in torch.unique(changed_kinds).tolist():
        in_class = changed_kinds == kind
        ranks = (kinds == kind).cumsum(0, dtype=torch.int32)[positions[in_class]].to(torch.int64)
        gaps[in_class] = torch.diff(ranks, prepend=ranks.new_zeros(1)) - 1
    values_on_cpu = _to_cpu(new_values, bits)
    moves = move_symbols(_to_cpu(old, bits), values_on_cpu)
    gaps_on_cpu = gaps.to(torch.int32).cpu().numpy().view(np.uint32)
    streams = by_class(changed_kinds.cpu().numpy().view(np.uint16), gaps_on_cpu, moves)
    changes = Changes(positions.cpu().numpy(), values_on_cpu, streams)
    return encode_changes(changes, new.numel(), lambda: _to_cpu(new, bits))


def _concatenated(slices: Sequence[Any]) -> Tensor:
    tensor: Tensor = slices[0] if len(slices) == 1 else torch.cat(list(slices))
    return tensor


def _from_cpu(bits: BitArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}")).to(device)


def _to_cpu(bits: Tensor, dtype: BitType) -> BitArray:
    array: BitArray = bits.cpu().numpy().view(dtype)
    return array

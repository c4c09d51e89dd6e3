"""A trainer rank's torch tensors, published (``start_publisher``). Changes of weights on a GPU are found there: only
changes come to the host, to be encoded.

The same changes as ``weights.codec`` finds, element for element, with torch only: a comparison, a running count of each
exponent, and gathers at the places that changed. On a CPU the compiled loops are many times faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.base.errors import WeightError
from streamrl.learning.model.local_shards import LocalShard
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.published_weights import bit_array, upper_halves
from streamrl.weights.codec.bits import BitArray, BitType, bit_type, exponent_field, step_symbols
from streamrl.weights.codec.codec import Changes, EncodedPatch, ExponentClasses, WeightPatch, by_class, encode_changes
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.publish.tensor_source import HostTensors


def start_publisher(options: TrainerOptions, shards: Sequence[LocalShard], device: torch.device) -> WeightPublisher:
    """Serve a rank's shards to engines as deltas. Raises ``WeightError`` when the endpoint cannot be bound. Changes are
    found where the weights lie: on a GPU by torch, with a baseline of 2 bytes an element there."""
    publisher = WeightPublisher(
        options.weights_endpoint,
        run_id=options.run_id,
        rank=options.rank,
        shards=shard_specs(shards),
        checkpoint=Path(options.model_path),
        source=TorchOnHost() if device.type == "cpu" else DeviceTensors(),
    )
    publisher.start()
    return publisher


def shard_specs(shards: Sequence[LocalShard]) -> list[ShardSpec]:
    """Specs of the shards that a rank publishes."""
    return [ShardSpec(s.name, "bfloat16", s.shape, s.offset, s.stop - s.start, s.run, s.stride) for s in shards]


class TorchOnHost(HostTensors):
    """Reads float32 values of published bfloat16 bits in host memory."""

    def checked(self, given: Any, shard: ShardSpec) -> Any:
        return super().checked(bit_array(given), shard)


class DeviceTensors(HostTensors):
    """Reads float32 values of published bfloat16 bits on their device. The baseline that they are compared with lies
    there too, 2 bytes an element, beside the publisher's own in host memory."""

    def __init__(self) -> None:
        self._baseline: dict[int, Tensor] = {}

    def checked(self, given: Any, shard: ShardSpec) -> Tensor:
        """The bits of ``given``, flat float32: int16, and a view of it."""
        values: Tensor = given
        if shard.dtype != "bfloat16" or values.dtype != torch.float32 or values.numel() != shard.count:
            raise WeightError(
                f"tensor {shard.name!r} ({shard.dtype}) was given as {values.numel()} elements of {values.dtype} on "
                f"{values.device}; its shard is {shard.count} of bfloat16, given as float32 values"
            )
        return upper_halves(values)

    def complete(self, parts: Sequence[Any], dtype: str) -> BitArray:
        return _to_host(_together(parts), bit_type(dtype, "on the device"))

    def changes(self, unit: int, parts: Sequence[Any], baseline: BitArray, dtype: str) -> EncodedPatch | None:
        """Encode on the device (``encode_on_device``). The first time, the baseline comes from the host."""
        new = _together(parts)
        base = self._baseline.get(unit)
        if base is None:
            base = self._baseline[unit] = _from_host(baseline, new.device).clone()
        return encode_on_device(new, base, dtype)

    @torch.no_grad()
    def advance(self, patches: Mapping[int, WeightPatch]) -> None:
        """Write the patches into the baseline, in time proportional to what changed."""
        for unit, patch in patches.items():
            baseline = self._baseline.get(unit)
            if baseline is not None and patch.positions is not None:
                places = torch.from_numpy(patch.positions).to(baseline.device)
                baseline[places] = _from_host(patch.values, baseline.device)


@torch.no_grad()
def encode_on_device(new: Tensor, base: Tensor, dtype: str) -> EncodedPatch | None:
    """Encode a patch to the same bytes as ``codec.encode_patch``. ``new``, ``base``: bits as int16 or int32 [n] on one
    device, of the published dtype ``dtype``, which is what ``tensor.view(torch.int16)`` gives. None when nothing
    differs."""
    bits = bit_type(dtype, "on the device")
    positions = torch.nonzero(base != new).flatten()
    if not positions.numel():
        return None
    lowest, exponents = exponent_field(dtype)
    kinds = (base >> lowest) & (exponents - 1)
    classes = ExponentClasses.of(torch.bincount(kinds, minlength=exponents).cpu().numpy())
    kinds = torch.from_numpy(classes.class_at.astype(np.int16)).to(base.device)[kinds.to(torch.int32)]
    old = base[positions]
    values = new[positions]
    changed = kinds[positions]
    gaps = torch.empty_like(positions)
    for kind in torch.unique(changed).tolist():
        chosen = changed == kind
        ranks = (kinds == kind).cumsum(0, dtype=torch.int32)[positions[chosen]].to(torch.int64)
        gaps[chosen] = torch.diff(ranks, prepend=ranks.new_zeros(1)) - 1
    values_there = _to_host(values, bits)
    steps = step_symbols(_to_host(old, bits), values_there)
    gaps_there = gaps.to(torch.int32).cpu().numpy().view(np.uint32)
    streams = by_class(changed.cpu().numpy().view(np.uint16), gaps_there, steps)
    changes = Changes(positions.cpu().numpy(), values_there, streams)
    return encode_changes(changes, new.numel(), lambda: _to_host(new, bits))


def _together(parts: Sequence[Any]) -> Tensor:
    """One after the other."""
    joined: Tensor = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return joined


def _from_host(bits: BitArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}")).to(device)


def _to_host(bits: Tensor, wanted: BitType) -> BitArray:
    array: BitArray = bits.cpu().numpy().view(wanted)
    return array

"""Adapters that engines serve separately from the base (``lora.sync = "adapter"``): the forward is
``y = W0 x + B' (A x)``.

``updates.make_weights`` makes them in each trainer rank. The bfloat16 bits of A and of ``B' = s B``, which vLLM's
kernels take as B, are published under the names of peft (for an adapter with ``lora_alpha = rank``). The forward runs
on the same bits, and the backward passes the rounding straight through: A has the gradient of its bits, and
``dB = s dB'``. The base is the one of the model's files and is never sent.

Every rank has the full A and B, and their gradients are summed over the ranks at the close. Masters, moments and
published tensors are ranges of rows of A and B, as with merged adapters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce, get_world_size
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear

from streamrl.base.types import Shape
from streamrl.learning.model.loading import empty_policy
from streamrl.learning.model.local_shards import LocalShard, local_part
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.lora import Adapted, AdapterWeights, peft_adapters
from streamrl.learning.state.masters import Tensors
from streamrl.learning.state.published_weights import PEFT_PREFIX, PUBLISHED_DTYPE
from streamrl.recipe.sections import Lora


class UnmergedAdapters(AdapterWeights):
    """Weights whose masters are the adapters, as in ``AdapterWeights``, and that publish only the adapters."""

    def __init__(self, options: TrainerOptions, policy: PackedPolicy) -> None:
        self._policy = policy
        self._leaves: Tensors = {}
        self._scales: dict[str, float] = {}
        super().__init__(options, policy)
        self._elements = super().total_elements
        self.shards = [shard._replace(name=f"{PEFT_PREFIX}{shard.name}") for shard in self.master_shards]
        _freeze_gathered(policy)
        if options.compile:
            torch._dynamo.reset()  # layers that were compiled without adapters are compiled again

    @property
    def total_elements(self) -> int:
        return self._elements

    def values(self) -> Tensors:
        return {
            f"{PEFT_PREFIX}{shard.name}": _local_range(self._leaves[shard.name].detach(), shard)
            for shard in self.master_shards
        }

    def _base_of(self, parameter: Parameter) -> Tensor:
        return local_part(parameter.detach())

    def _connect(self, adapted: Adapted) -> None:
        for name, scale in ((adapted.a_name, 1.0), (adapted.b_name, adapted.scale)):
            shape = self._master_tensors[name].shape
            device = adapted.base.device
            self._leaves[name] = torch.zeros(shape, dtype=torch.float32, device=device, requires_grad=True)
            self._scales[name] = scale
        a_RM = self._leaves[adapted.a_name]
        b_NR = self._leaves[adapted.b_name]

        def add_adapter(_module: Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + linear(linear(inputs[0], a_RM), b_NR)

        module = self._policy.hugging_face.get_submodule(adapted.weight.removesuffix(".weight"))
        module.register_forward_hook(add_adapter)

    @torch.no_grad()
    def refresh_forward(self) -> None:
        for name, tensor in self._master_tensors.items():
            full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            self._leaves[name].copy_((full_tensor * self._scales[name]).to(PUBLISHED_DTYPE))

    @torch.no_grad()
    def collect_gradient(self) -> Tensor:
        gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self._leaves.values()]
        if dist.is_initialized() and get_world_size() > 1:
            joined = torch.cat([gradient.flatten() for gradient in gradients])
            all_reduce(joined)
            joined /= get_world_size()  # as FSDP2 does
            gradients = list(torch.split(joined, [gradient.numel() for gradient in gradients]))
        for shard, gradient in zip(self.master_shards, gradients, strict=True):
            self.gradient_L[shard.place] += self._scales[shard.name] * _local_range(gradient, shard)
        return self.gradient_L

    def clear_gradient(self) -> None:
        self.gradient_L.zero_()
        for leaf in self._leaves.values():
            leaf.grad = None

    def _saved(self, parameter: str) -> Tensor:
        base = super()._saved(parameter)
        for adapted in self._adapted:
            if adapted.weight == parameter:
                base = base.clone()
                rows = next(shard for shard in self.master_shards if shard.name == adapted.b_name)
                b_NR = _local_range(self._leaves[adapted.b_name].detach(), rows).view(rows.local_shape)
                local_part(base).addmm_(b_NR, self._leaves[adapted.a_name].detach())
        return base


def adapter_shapes(lora: Lora, model_path: str) -> dict[str, Shape]:
    """Shapes, by name, of the adapters that a run publishes for the model of a directory. Weights are not read. Raises
    ``StreamRLError``."""
    layers, _ = peft_adapters(lora, empty_policy(model_path).hugging_face, model_path, 0)
    shapes = {}
    for name, (lora_a, lora_b, _) in layers.items():
        shapes[f"{PEFT_PREFIX}{name}.lora_A.weight"] = tuple(lora_a.shape)
        shapes[f"{PEFT_PREFIX}{name}.lora_B.weight"] = tuple(lora_b.shape)
    return shapes


def _local_range(tensor: Tensor, shard: LocalShard) -> Tensor:
    """This rank's part of a full tensor, flat."""
    return tensor.reshape(-1)[shard.offset :][: shard.stop - shard.start]


def _freeze_gathered(policy: PackedPolicy) -> None:
    """Freeze gathered parameters, too: FSDP2 gathered them before the sharded parameters were frozen. Collective."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                parameter.requires_grad_(False)
            module.reshard()

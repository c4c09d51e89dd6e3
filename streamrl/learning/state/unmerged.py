"""Adapters that engines serve beside the base (``lora.sync = "adapter"``): the forward is ``y = W0 x + B' (A x)``.

Published are the bfloat16 bits of A and of ``B' = s B``, which vLLM's kernels take as B, under the names of peft (as of
an adapter with ``lora_alpha = rank``). The forward runs on the same bits, and the rounding is passed straight through:
A has the gradient of its bits, and ``dB = s dB'``. The base is that of the model's files and is never sent.

A and B are whole on every rank, which adds up their gradients at the close; masters, moments and what is published are
ranges of rows of each, as where adapters are merged."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from streamrl.learning.model.loading import empty_policy
from streamrl.learning.model.local_shards import LocalShard, local_part
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.lora import Adapted, AdapterWeights, chosen_by_peft
from streamrl.learning.state.published_weights import PUBLISHED_DTYPE
from streamrl.recipe.sections import Lora

PEFT_PREFIX = "base_model.model."


class UnmergedAdapters(AdapterWeights):
    """Masters are the adapters, as in ``AdapterWeights``; ``shards`` and ``values`` are those of the adapters alone."""

    def __init__(self, options: TrainerOptions, policy: PackedPolicy) -> None:
        self._policy = policy
        self._leaves: dict[str, Tensor] = {}
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

    def values(self) -> dict[str, Tensor]:
        return {f"{PEFT_PREFIX}{s.name}": _range(self._leaves[s.name].detach(), s) for s in self.master_shards}

    def _base_of(self, parameter: nn.Parameter) -> Tensor:
        return local_part(parameter.detach())

    def _connect(self, adapted: Adapted) -> None:
        for name, scale in ((adapted.a, 1.0), (adapted.b, adapted.scale)):
            shape = self._master_tensors[name].shape
            device = adapted.base.device
            self._leaves[name] = torch.zeros(shape, dtype=torch.float32, device=device, requires_grad=True)
            self._scales[name] = scale
        a_RM = self._leaves[adapted.a]
        b_NR = self._leaves[adapted.b]

        def add_adapter(_module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + linear(linear(given[0], a_RM), b_NR)

        module = self._policy.hugging_face.get_submodule(adapted.weight.removesuffix(".weight"))
        module.register_forward_hook(add_adapter)

    @torch.no_grad()
    def refresh_forward(self) -> None:
        for name, tensor in self._master_tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            self._leaves[name].copy_((whole * self._scales[name]).to(PUBLISHED_DTYPE))

    @torch.no_grad()
    def collect_gradient(self) -> Tensor:
        gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self._leaves.values()]
        if dist.is_initialized() and dist.get_world_size() > 1:
            together = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(together)
            together /= dist.get_world_size()  # as FSDP2 does
            gradients = list(torch.split(together, [gradient.numel() for gradient in gradients]))
        for shard, gradient in zip(self.master_shards, gradients, strict=True):
            self.gradient_L[shard.place] += self._scales[shard.name] * _range(gradient, shard)
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
                rows = next(shard for shard in self.master_shards if shard.name == adapted.b)
                b_NR = _range(self._leaves[adapted.b].detach(), rows).view(rows.local_shape)
                local_part(base).addmm_(b_NR, self._leaves[adapted.a].detach())
        return base


def adapter_shapes(lora: Lora, model_path: str) -> dict[str, tuple[int, ...]]:
    """Shapes of what would be published for the model in a directory, by name, without its weights. Raises
    ``StreamRLError``."""
    layers, _ = chosen_by_peft(lora, empty_policy(model_path).hugging_face, model_path, 0)
    both = {f"{n}.lora_{part}.weight": pair[index] for n, pair in layers.items() for index, part in enumerate("AB")}
    return {f"{PEFT_PREFIX}{name}": tuple(cast("Tensor", tensor).shape) for name, tensor in both.items()}


def _range(whole: Tensor, shard: LocalShard) -> Tensor:
    """This rank's part of a whole tensor, flat."""
    return whole.reshape(-1)[shard.offset :][: shard.stop - shard.start]


def _freeze_gathered(policy: PackedPolicy) -> None:
    """Parameters that were gathered before they were frozen: none of them is to have a gradient. Collective."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                parameter.requires_grad_(False)
            module.reshard()

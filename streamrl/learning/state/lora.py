"""Low-rank adapters that are merged: peft chooses the targets and initialises, forward and engines get merged weights.

``updates.make_weights`` makes them in each trainer rank. Hu et al., "LoRA" (2021), section 4.1: ``W = W0 + s B A`` with
``s = alpha / rank``. ``W0`` is the base in the published format (bfloat16), and ``bfloat16(W0 + s B A)`` is published.
The forward runs on these bits, so the policy that is differentiated is the one that sampled. The backward passes the
rounding straight through: with ``G = dL/dW``, ``dA = s B^T G`` and ``dB = s G A^T``.

With ``lora.dora`` (Liu et al., "DoRA", 2024) ``W = m V / |V|`` by row, where ``V = W0 + s B A``: the length m of each
row is trained, too. As in section 4.3 of the paper the norm counts as a constant: ``dV = m / |V| G``.

The ranks have ranges of rows of A and B, and B is split like its weight. A merge gathers the full A. A dense gradient
exists only from its own backward to its projection without FSDP2, and until the close of the batch with FSDP2.

Bytes: 4 an element of the model (forward), 2 an adapted element (the base); masters and gradient 8 an adapter element.
"""

from __future__ import annotations

import warnings
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import all_reduce, get_rank
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from streamrl.base.errors import StreamRLError
from streamrl.base.seeds import derive_seed
from streamrl.learning.model.architecture import linear_modules, refuse_targets
from streamrl.learning.model.hugging_face import PreTrainedModel
from streamrl.learning.model.local_shards import local_part, local_shards
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.masters import Masters, Tensors, WholeMasters
from streamrl.learning.state.published_weights import ADAPTER_TENSORS, PEFT_PREFIX, PUBLISHED_DTYPE, PublishedWeights
from streamrl.recipe.remote_names import cached_name
from streamrl.recipe.sections import Lora

_BITS_AT_A_TIME = 1 << 22


class Adapted(NamedTuple):
    """One adapted weight ``[N, M]``.

    ``weight``: name of the weight.
    ``base``: rows of the base weight on this rank.
    ``scale``: factor ``s`` of ``B A``.
    ``a_name``, ``b_name``: names of A and B.
    ``lengths_name``: name of the lengths of the rows; empty without DoRA."""

    weight: str
    parameter: Parameter
    base: Tensor
    scale: float
    a_name: str
    b_name: str
    lengths_name: str = ""


class AdapterWeights(PublishedWeights):
    """Weights of which only the adapters are trained: masters are A ``[rank, M]`` and B ``[N, rank]`` of each target.

    The constructor raises ``StreamRLError`` for targets that the model does not have or that are not plain linear
    modules."""

    def __init__(self, options: TrainerOptions, policy: PackedPolicy) -> None:
        super().__init__(policy.trained_parameters(), policy.entries, policy.float32_parameters())
        self.model_path = options.model_path
        layers, self.config = peft_adapters(options.lora, policy.hugging_face, options.model_path, options.seed)
        self._master_tensors: Tensors = {}
        self._adapted: list[Adapted] = []
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(False)
            part = local_part(parameter.detach())
            part.copy_(part.to(self._dtype_of(name)))
        self.base_part = self._sum_of_bits()
        for module, (lora_a, lora_b, scale) in layers.items():
            self._adapt(module, lora_a, lora_b, scale)
        self.master_shards = local_shards(self._master_tensors)
        self.adapter_elements = sum(prod(shard.shape) for shard in self.master_shards)
        self.masters: Masters = WholeMasters(
            torch.cat([local_part(tensor).flatten() for tensor in self._master_tensors.values()])
        )
        self.gradient_L = torch.zeros_like(self.masters.full())
        self._master_tensors = self.as_tensors(self.masters.full())
        gradients = self.as_tensors(self.gradient_L)
        self._gradients = {name: local_part(tensor) for name, tensor in gradients.items()}
        self._full_a: Tensors = {}
        self._norms: Tensors = {}
        self.refresh_forward()

    def _sum_of_bits(self) -> int:
        """This rank's part of a sum over the bits of the base, each weighted by its name and place. The sum is exact,
        and the same for any number of ranks."""
        total = 0
        for shard, (name, parameter) in zip(self._parameter_shards, self._parameters.items(), strict=True):
            key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
            flat = local_part(parameter.detach()).reshape(-1)
            if not shard.owned:
                continue
            for first in range(0, flat.numel(), _BITS_AT_A_TIME):
                bits = flat[first : first + _BITS_AT_A_TIME].to(PUBLISHED_DTYPE).view(torch.int16).long()
                places = torch.arange(1, len(bits) + 1, device=bits.device) + shard.offset + first
                total += key * int((bits * places).sum())
        return total % (1 << 64)

    def _base_of(self, parameter: Parameter) -> Tensor:
        return local_part(parameter.detach()).to(PUBLISHED_DTYPE)

    def _adapt(self, module: str, lora_a: Tensor, lora_b: Tensor, scale: float) -> None:
        weight = f"{module}.weight"
        parameter = self._parameters[weight]
        base = self._base_of(parameter)
        adapted = Adapted(weight, parameter, base, scale, f"{module}.lora_A.weight", f"{module}.lora_B.weight")
        for name, tensor in ((adapted.a_name, lora_a), (adapted.b_name, lora_b)):
            if isinstance(parameter.data, DTensor):
                tensor = distribute_tensor(tensor, parameter.data.device_mesh, parameter.data.placements)
            self._master_tensors[name] = tensor
        if self.config.use_dora:
            adapted = adapted._replace(lengths_name=f"{module}.lora_magnitude_vector")
            lengths_N = torch.linalg.vector_norm(base.float(), dim=1)
            if isinstance(parameter.data, DTensor):
                mesh = parameter.data.device_mesh
                placements = parameter.data.placements
                shape = torch.Size([parameter.shape[0]])
                lengths_N = DTensor.from_local(lengths_N, mesh, placements, shape=shape, stride=(1,))
            self._master_tensors[adapted.lengths_name] = lengths_N
        self._adapted.append(adapted)
        self._connect(adapted)

    def _connect(self, adapted: Adapted) -> None:
        """Let the forward run with the adapter, and the backward compute the adapter's gradient."""
        adapted.parameter.requires_grad_(True)
        if not self._sharded:

            def project(parameter: Tensor) -> None:
                assert parameter.grad is not None
                self._project(adapted, parameter.grad, self._gradients[adapted.a_name])
                parameter.grad = None

            cast("Any", adapted.parameter).register_post_accumulate_grad_hook(project)

    @torch.no_grad()
    def _project(self, adapted: Adapted, gradient_NM: Tensor, gradient_RM: Tensor) -> None:
        """Add the gradients of this rank's rows of B, and add to ``gradient_RM`` the part of the gradient of the full A
        that comes from this rank's rows of the weight."""
        b_NR = local_part(self._master_tensors[adapted.b_name])
        if adapted.lengths_name:
            gradient_NM = gradient_NM / self._norms[adapted.weight][:, None]
            self._gradients[adapted.lengths_name] += (gradient_NM * self._merged(adapted)).sum(1)
            gradient_NM = gradient_NM * local_part(self._master_tensors[adapted.lengths_name])[:, None]
        gradient_RM.addmm_(b_NR.T, gradient_NM, alpha=adapted.scale)
        self._gradients[adapted.b_name].addmm_(gradient_NM, self._full_a[adapted.a_name].T, alpha=adapted.scale)

    def _merged(self, adapted: Adapted) -> Tensor:
        """``W0 + s B A`` for this rank's rows, not rounded."""
        b_NR = local_part(self._master_tensors[adapted.b_name])
        return torch.addmm(adapted.base.float(), b_NR, self._full_a[adapted.a_name], alpha=adapted.scale)

    @torch.no_grad()
    def refresh_forward(self) -> None:
        for adapted in self._adapted:
            a_RM = self._master_tensors[adapted.a_name]
            self._full_a[adapted.a_name] = a_RM.full_tensor() if isinstance(a_RM, DTensor) else a_RM
            merged_NM = self._merged(adapted)
            if adapted.lengths_name:
                norms_N = self._norms[adapted.weight] = torch.linalg.vector_norm(merged_NM, dim=1)
                merged_NM *= (local_part(self._master_tensors[adapted.lengths_name]) / norms_N)[:, None]
            local_part(adapted.parameter.detach()).copy_(merged_NM.to(PUBLISHED_DTYPE))

    @torch.no_grad()
    def collect_gradient(self) -> Tensor:
        if self._sharded:
            a_shards = {shard.name: shard for shard in self.master_shards}
            for adapted in self._adapted:
                gradient_RM = torch.zeros_like(self._full_a[adapted.a_name])
                if adapted.parameter.grad is not None:
                    self._project(adapted, local_part(adapted.parameter.grad), gradient_RM)
                    adapted.parameter.grad = None
                all_reduce(gradient_RM)
                shard = a_shards[adapted.a_name]
                self.gradient_L[shard.place] += gradient_RM.flatten()[shard.offset :][: shard.stop - shard.start]
        return self.gradient_L

    def clear_gradient(self) -> None:
        self.gradient_L.zero_()
        for adapted in self._adapted:
            adapted.parameter.grad = None

    def save_adapter(self, directory: Path) -> None:
        tensors: Tensors = {}
        for name, tensor in self._master_tensors.items():  # a collective on every rank
            complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            tensors[f"{PEFT_PREFIX}{name}"] = complete.to("cpu", copy=True)
        if dist.is_initialized() and get_rank() != 0:
            return
        directory.mkdir(parents=True)
        base = cached_name(self.model_path)  # the name of the Hub, by which others find the base
        self.config.base_model_name_or_path = base.repository if base else self.model_path
        self.config.revision = base.revision if base else None
        self.config.inference_mode = True
        self.config.save_pretrained(str(directory))
        save_file(tensors, directory / ADAPTER_TENSORS, metadata={"format": "pt"})


def peft_adapters(
    lora: Lora, model: PreTrainedModel, model_path: str, seed: int
) -> tuple[dict[str, tuple[Tensor, Tensor, float]], LoraConfig]:
    """Let peft make adapters. Returns A, B and scale by the name of their module, and peft's configuration.

    The model does not change. The values of A follow from the run's seed. Raises ``StreamRLError``."""
    names = list(lora.named_targets)
    if (
        lora.targets and not names
    ):  # peft's own "all-linear" takes experts and routers, too, which are no linear modules
        names = linear_modules(model)
    refuse_targets(model, names)
    targets = lora.pattern or names or None
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM", use_rslora=lora.rslora
    )
    device = next(model.parameters()).device
    layers: dict[str, tuple[Tensor, Tensor, float]] = {}
    devices_with_generator = []
    if device.type == "cuda":
        devices_with_generator.append(device)
    with torch.random.fork_rng(devices_with_generator), warnings.catch_warnings():
        # The warning that tied weights cannot be merged: ``refuse_targets`` refuses them.
        warnings.simplefilter("ignore")
        torch.manual_seed(derive_seed(seed, "lora") % (1 << 32))
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise StreamRLError(
                f"lora.targets {list(lora.targets)} do not fit {model_path!r}: {error}; name modules of the "
                'model, such as ["q_proj", "v_proj"], or ["all-linear"]'
            ) from error
        modules = adapted.base_model.model.named_modules()
        lora_layers = {name: module for name, module in modules if isinstance(module, LoraLayer)}
        adapted.unload()
    config.use_dora = lora.dora  # set after the adapters are made: peft would compute lengths of sharded rows
    refuse_targets(model, list(lora_layers))
    for name, layer in lora_layers.items():
        lora_a = layer.lora_A["default"].weight.detach()
        lora_b = layer.lora_B["default"].weight.detach()
        layers[name] = (lora_a.float(), lora_b.float(), float(layer.scaling["default"]))
    return layers, config

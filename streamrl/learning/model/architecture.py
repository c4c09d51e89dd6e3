"""Differences between causal language models outside of their layers: logits, layer lists, names in the checkpoint.

``policy``, ``loading`` and ``state`` call it in each trainer rank, ``loading.published_shapes`` also in a check before
a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import Linear, Module, ModuleList
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Shape
from streamrl.learning.model.hugging_face import PreTrainedModel, revert_weight_conversion
from streamrl.pretrained.trainable_models import is_target


class LogitScaling(NamedTuple):
    """Transformation of a head's output into logits: times ``factor``, then ``softcap * tanh(logits / softcap)``."""

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Turn outputs of the head, of any shape, into logits."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def logit_scaling(config: Any) -> LogitScaling:
    """Read the scaling by the names of transformers' configs: Cohere multiplies, Granite divides, HyperCLOVA X
    multiplies under Granite's name, Gemma caps."""
    text = config.get_text_config()
    factor, scaling = (float(getattr(text, name, None) or 1.0) for name in ("logit_scale", "logits_scaling"))
    factor = factor * scaling if text.model_type == "hyperclovax" else factor / scaling
    return LogitScaling(factor, getattr(text, "final_logit_softcapping", None))


def longest_exact_sequence(config: Any) -> int | None:
    """Number of tokens up to which rotary angles of a sequence do not depend on the other sequences of a row; None: no
    limit. The rope types ``dynamic`` and ``longrope`` choose angles by the longest position of the whole forward."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [
        int(kind.get("original_max_position_embeddings") or text.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def decoder_layers(model: PreTrainedModel) -> list[Module]:
    """The repeated layers: the longest module list that is not inside another one (lists of experts are inside
    layers)."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, ModuleList)}
    outermost = [layers for name, layers in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    if not outermost:
        raise StreamRLError(f"model type {model.config.model_type!r} has no list of layers: it cannot be sharded")
    return max((list(layers) for layers in outermost), key=len)


_NAMES_IN_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that peft takes for parameters of fused experts, also where another module has them."""


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Return the full names of the linear modules that can have adapters: all but the output head, and of a model with
    experts those whose names peft does not take for the experts' own. Raises ``StreamRLError`` where there is none, as
    in GPT-2."""
    head = model.get_output_embeddings()
    without_convolutions = [module for module in model.modules() if not isinstance(module, nn.Conv1d)]
    has_experts = any(
        parameter.dim() == 3 for module in without_convolutions for parameter in module.parameters(recurse=False)
    )
    linear = [name for name, module in model.named_modules() if isinstance(module, Linear) and module is not head]
    if has_experts:
        linear = [name for name in linear if name.rpartition(".")[2] not in _NAMES_IN_EXPERTS]
    if not linear:
        raise StreamRLError(
            f"lora: model type {model.config.model_type!r} has no linear modules (torch.nn.Linear) that could have "
            "adapters: remove lora.rank, and train all weights"
        )
    return linear


def refuse_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise ``StreamRLError`` unless each name of ``targets``, as peft reads names, matches linear modules only, which
    share their weights with no other module."""
    with_own_weight = {name.removesuffix(".weight") for name, _ in model.named_parameters()}
    modules = dict(model.named_modules())
    for target in targets:
        matches = {name: module for name, module in modules.items() if is_target(name, target)}
        problem = _why_not_adapted(matches, with_own_weight)
        if problem:
            names = ", ".join(sorted({name.rpartition(".")[2] for name in linear_modules(model)}))
            raise StreamRLError(f'lora.targets: {target!r} {problem}: name modules among {names}, or ["all-linear"]')


def _why_not_adapted(matches: dict[str, Module], with_own_weight: set[str]) -> str:
    """Return why the modules that a target matches cannot have adapters; empty where they can."""
    if not matches:
        return "is no module of this model"
    for module in matches.values():
        if not isinstance(module, Linear):
            return f"is a module of kind {type(module).__name__}, and only linear ones can be adapted"
    if not matches.keys() <= with_own_weight:
        return "shares its weight with another module, so it cannot have an adapter of its own"
    return ""


class CheckpointEntry(NamedTuple):
    """One tensor of the checkpoint, which is a part of a model's parameter: it has ``shape``, and begins at element
    ``start`` of the flattened ``parameter``."""

    name: str
    parameter: str
    shape: Shape
    start: int


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes ``contiguous()`` return the strided view, so that every result still has its offset in the parameter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def checkpoint_entries(model: PreTrainedModel) -> list[CheckpointEntry]:
    """Locate each tensor of the checkpoint in the parameters, tied ones once, by parameter and position.

    transformers renames and fuses weights at load (experts of one layer become one parameter); engines use the names
    and shapes of the file. So transformers' own conversion is run backwards over meta tensors. Every result must be one
    contiguous part of a parameter; otherwise the function raises ``StreamRLError``."""
    parameters = {name: torch.empty(parameter.shape, device="meta") for name, parameter in model.named_parameters()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in parameters.items()}
    with _WithoutCopies():  # type: ignore[no-untyped-call]
        converted = revert_weight_conversion(model, dict(parameters))
    entries = []
    for name, tensor in converted.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None or not tensor.is_contiguous():
            raise StreamRLError(
                f"model type {model.config.model_type!r} computes parameters from {name!r} when it is loaded: "
                "engines cannot be given trained weights under the names of the checkpoint"
            )
        entries.append(CheckpointEntry(name, owner, tuple(tensor.shape), int(tensor.storage_offset())))
    order = {name: index for index, name in enumerate(parameters)}
    entries.sort(key=lambda entry: (order[entry.parameter], entry.start))
    _check_complete(entries, parameters)
    return entries


def _check_complete(entries: list[CheckpointEntry], parameters: dict[str, Tensor]) -> None:
    """Raise ``StreamRLError`` unless the entries of each parameter follow each other without a gap and fill it."""
    ends = dict.fromkeys(parameters, 0)
    for entry in entries:
        if entry.start == ends[entry.parameter]:
            ends[entry.parameter] += torch.Size(entry.shape).numel()
    broken = [name for name, tensor in parameters.items() if ends[name] != tensor.numel()]
    if broken:
        raise StreamRLError(f"parameters {broken[:3]} are not made of tensors of the checkpoint one after the other")


def saved_constants(model: PreTrainedModel) -> dict[str, str]:
    """Return the saved tensors that are not parameters, such as the expert bias of DeepSeek-V3: names in the checkpoint
    by names of the model's buffers."""
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = sorted(set(cast("dict[str, Tensor]", model.state_dict())) - trained)
    buffers = {name: torch.empty(1, device="meta") for name in names}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in buffers.items()}
    with _WithoutCopies():  # type: ignore[no-untyped-call]
        stored = revert_weight_conversion(model, dict(buffers))
    return {owners[tensor.untyped_storage()._cdata]: name for name, tensor in stored.items()}

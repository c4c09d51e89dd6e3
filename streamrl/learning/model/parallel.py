"""Split of parameters over the ranks, which ``loading`` applies in each trainer rank.

Tensor and expert parallel plans of transformers, for the model's family, come first. FSDP2 then splits over the data
parallel ranks (``policy.shard``), with a copy on each replica (HSDP)."""

from __future__ import annotations

from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.options import TrainerOptions

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""transformers' name for a full parameter that each rank uses on its own heads; its gradients are summed over ranks."""


class Split(NamedTuple):
    """Device meshes of this rank.

    ``data``: mesh of ranks that have different rows; None: there is only one such rank.
    ``tensor``: mesh of ranks that have the same rows, and parts of the weights.
    ``experts``: whether these parts are whole experts rather than parts of each expert."""

    data: DeviceMesh | None
    tensor: DeviceMesh | None = None
    experts: bool = False


UNSPLIT = Split(None)


def split_of(options: TrainerOptions, device: torch.device) -> Split:
    """Make the meshes of ``options``: ranks count first along tensors, then shards, then replicas. Collective."""
    if options.ranks == 1:
        return UNSPLIT
    inner = options.replicas * options.tensor_parallel_size
    sizes = (options.replicas, options.ranks // inner, options.tensor_parallel_size)
    if prod(sizes) != options.ranks:
        raise StreamRLError(f"{options.ranks} ranks are not replicas x shards x tensor parallel ranks {sizes}")
    all_have_the_same_rows = options.ranks == options.tensor_parallel_size
    # The names matter: with others, peft takes layers for tensor parallel ones, and makes adapters of local shape.
    size_of = dict(zip(("replicate", "fsdp", "tensor"), sizes, strict=True))
    # A dimension of one rank is left out: it would be a group with connections of its own.
    dimensions = {
        name: size for name, size in size_of.items() if size > 1 or (name == "fsdp" and not all_have_the_same_rows)
    }
    mesh = init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    for group in mesh.get_all_groups():  # torch's own timeout is half an hour under gloo
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=options.collective_timeout_s), group)
    data: DeviceMesh | None = None
    if options.replicas > 1:
        data = mesh["replicate", "fsdp"]
    elif not all_have_the_same_rows:
        data = mesh["fsdp"]
    tensor = mesh["tensor"] if "tensor" in dimensions else None
    return Split(data, tensor, options.expert_parallel_size > 1)


def split_tensors(policy: PackedPolicy, split: Split) -> None:
    """Replace parameters of an empty policy by this rank's parts, and install the hooks that join the parts in its
    forward. Call it before ``shard``. Raises ``StreamRLError`` for a family without a plan and sizes that do not
    divide."""
    if split.tensor is None:
        return
    from transformers.distributed import DistributedConfig  # imported here: it imports torch's compiler
    from transformers.distributed.tensor_parallel import (
        apply_expert_parallelism,
        apply_tensor_parallelism,
        resolve_parallel_plans,
    )

    model: Any = policy.hugging_face
    size = split.tensor.size()
    refuse_without_plan(model, experts=split.experts)
    try:
        plans = resolve_parallel_plans(model, DistributedConfig(tp_size=size, ep_size=size if split.experts else 1))
        tensors, experts = (dict(plan) for plan in plans)
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
            # A head that is tied to the embedding is not split: most plans do not split the embedding.
            both = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
            for name in [name for name, module in model.named_modules() if id(module) in both]:
                tensors.pop(name, None)
        # transformers sums ``grad`` over the ranks after each backward: that is wrong once it holds several rows. These
        # gradients are summed once, at the close (``PublishedWeights.collect_gradient``).
        partial = {name for name, style in tensors.items() if style == PARTIAL_GRADIENT}
        tensors = {name: style for name, style in tensors.items() if name not in partial}
        apply_tensor_parallelism(model, split.tensor, tensors)
        if "ep_dispatch_experts" in experts.values():  # tokens are sent to the ranks that have their experts
            apply_expert_parallelism(model, split.tensor, split.tensor, experts)
        elif experts:
            apply_tensor_parallelism(model, split.tensor, experts)
    except ValueError as error:
        raise StreamRLError(f"training.advanced.tensor_parallel_size: {error}") from error
    policy.partial_gradients = frozenset(
        name for name, _ in model.named_parameters() if _in_plan(name.rpartition(".")[0]) in partial
    )
    policy.tensor_group = split.tensor.get_group()


def refuse_without_plan(model: Any, *, experts: bool) -> None:
    """Raise ``StreamRLError`` for a family without a tensor parallel plan, or without one for experts."""
    config = model.config.get_text_config()
    kind = f"model type {model.config.model_type!r}"
    if not (getattr(config, "base_model_tp_plan", None) or getattr(model.config, "base_model_tp_plan", None)):
        raise StreamRLError(
            f"{kind} has no tensor parallel plan in transformers: set training.advanced.tensor_parallel_size = 1 and "
            "use more ranks"
        )
    if experts and not model.ep_plan:
        raise StreamRLError(
            f"{kind} has no expert parallel plan in transformers: set training.advanced.expert_parallel_size = 1"
        )


def _in_plan(name: str) -> str:
    """The name of a module as plans write it: ``*`` for numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))

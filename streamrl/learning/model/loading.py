"""Load the models of one rank (policy, reference, critic) from a Hugging Face directory of any architecture.

``updates`` calls ``load_models`` in each trainer rank; ``prepare.recipe_probe`` calls ``published_shapes`` before a
run.

Decoder layers may trade time for memory (activation checkpointing) or start-up time for speed (``torch.compile``). Both
change layers in place, keep parameter names, and are called once, before ``shard`` and before the first forward; with
both, checkpointing comes last. Gradients are the same as with the plain layers: bit for bit with checkpointing, to
rounding with compiled layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Shape
from streamrl.learning import process_group
from streamrl.learning.model.architecture import decoder_layers, refuse_targets
from streamrl.learning.model.attention import register_packed_attention, register_uncompiled_attention
from streamrl.learning.model.context_parallel import context_of
from streamrl.learning.model.critic import Critic
from streamrl.learning.model.hugging_face import AutoConfig, disable_progress_bar, init_empty_weights, without_compiler
from streamrl.learning.model.local_shards import LocalShard, local_part, local_shards, published_shards
from streamrl.learning.model.packing_check import check_packing
from streamrl.learning.model.parallel import UNSPLIT, Split, refuse_without_plan, split_of, split_tensors
from streamrl.learning.model.policy import (
    PackedPolicy,
    card_of,
    computes_in_sixteen_bits,
    gather_once,
    set_sharded,
    shard,
)
from streamrl.learning.model.text_part import make_model
from streamrl.learning.options import TrainerOptions
from streamrl.learning.rank_memory import choose_gathered, training_sizes
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.trainable_models import refuse_untrainable
from streamrl.pretrained.weight_files import float32_tensors, stored_tensors
from streamrl.recipe.sections import Gathered

log = getLogger(__name__)
_PLAIN_TYPES = ("BF16", "F16", "F32", "F64")
"""Types of weights in safetensors files that are not quantised."""


def empty_policy(model_path: str) -> PackedPolicy:
    """Make the model of ``load_policy`` with parameters on the meta device, which ``load_policy`` fills."""
    directory = Path(model_path)
    with _training_errors(model_path):
        refuse_untrainable(directory)
    disable_progress_bar()
    with _load_errors(model_path), without_compiler():
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with init_empty_weights(include_buffers=False):
            model = make_model(config, dtype=torch.float32, attn_implementation="eager")
        model.tie_weights()
    class_name = type(model).__name__
    if config.architectures and class_name not in config.architectures:
        raise StreamRLError(
            f"the config.json of {model_path!r} names {', '.join(config.architectures)}, which vLLM follows, and "
            f"model_type {config.model_type!r}, which transformers makes a {class_name} of: correct one of the two"
        )
    with _training_errors(model_path):
        return PackedPolicy(model.eval())


def load_policy(
    model_path: str,
    device: torch.device,
    split: Split = UNSPLIT,
    gathered: Gathered = Gathered.BATCH,
    *,
    sixteen_bit: bool = False,
) -> PackedPolicy:
    """Load the model of a Hugging Face directory in float32, without dropout, and check it on a few packed tokens. With
    a ``split``, each rank reads and holds only its part of every tensor, and the call is collective.

    Packing is checked in float32, and with ``sixteen_bit`` the flash kernel, before the bfloat16 model (with several
    ranks only) is made. A model with tensors that are published in float32 stays in float32.
    Raises ``StreamRLError`` for a directory that is not a complete model or holds code or pickles, for quantised
    weights, and for a model whose packed rows or published weights would be wrong. Auxiliary losses of routers
    (mixtures of experts) are not trained."""
    policy = _empty_on_device(model_path, device, split)
    if split.data is not None:
        shard(policy, split.data, gathered, sixteen_bit=False)
    with _training_errors(model_path):
        with _load_errors(model_path):
            files = _check_names(policy, Path(model_path))
            parameters = _read_parameters(policy, files, device)
            _read_constants(policy, files)
        _assign(policy, parameters)
        check_packing(policy, sixteen_bit=sixteen_bit)
    set_sharded(policy, True)
    if split.data is None or not sixteen_bit or policy.float32:  # what is published in float32 is gathered in it
        return policy
    sixteen_bit_policy = _empty_on_device(model_path, device, split)
    sixteen_bit_policy.recurrent.like(sixteen_bit_policy.hugging_face, policy.recurrent)
    shard(sixteen_bit_policy, split.data, gathered, sixteen_bit=True)
    _assign(sixteen_bit_policy, policy.trained_parameters())
    _read_constants(sixteen_bit_policy, files)
    return sixteen_bit_policy


def _empty_on_device(model_path: str, device: torch.device, split: Split = UNSPLIT) -> PackedPolicy:
    """The empty model with its buffers on the device and its layers split."""
    policy = empty_policy(model_path)
    split_tensors(policy, split)
    policy.set_attention(register_packed_attention())
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return policy


def _assign(policy: PackedPolicy, parameters: Mapping[str, Tensor]) -> None:
    """Assign ``parameters`` to the policy; they name a tied parameter once."""
    policy.hugging_face.load_state_dict(parameters, strict=False, assign=True)
    if isinstance(policy, FSDPModule):
        gather_once(policy)
    else:
        policy.hugging_face.tie_weights()


@torch.no_grad()
def _read_parameters(policy: PackedPolicy, files: Mapping[str, Path], device: torch.device) -> dict[str, Tensor]:
    """Read the parameters, or this rank's part of them, from files: float32 tensors by name, tied parameters once."""
    parameters = policy.trained_parameters()
    open_files: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in set(files.values())}
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for part in local_shards(parameters):
        parameter = cast("Any", parameters[part.name])
        tensor = torch.empty(part.local_shape, dtype=torch.float32, device=device)
        if isinstance(parameter, DTensor):
            tensor = cast("Any", DTensor)(tensor, parameter._spec, requires_grad=False)
        tensors[part.name] = tensor
        starts[part.name] = part.start
    for entry, part in zip(policy.entries, published_shards(local_shards(parameters), policy.entries), strict=True):
        stored = open_files[files[entry.name]].get_slice(entry.name)
        first = part.start - starts[entry.parameter]
        flat = local_part(tensors[entry.parameter]).view(-1)
        flat[first : first + part.stop - part.start] = _stored_part(stored, part)
    return tensors


@torch.no_grad()
def _read_constants(policy: PackedPolicy, files: Mapping[str, Path]) -> None:
    """Fill the buffers that are saved with the model with the values of the files. They are not trained, and engines
    keep what they have loaded."""
    buffers = policy.hugging_face.state_dict()
    for buffer, name in policy.constants.items():
        with safe_open(files[name], framework="pt") as file:
            buffers[buffer].copy_(file.get_tensor(name))


def _stored_part(stored: Any, part: LocalShard) -> Tensor:
    """Elements of a stored tensor, flat. Only the rows that have them are read, and of a matrix only the columns."""
    width = torch.Size(part.shape[1:]).numel()
    count = part.stop - part.start
    if part.run:
        row, column = divmod(part.offset, part.stride)
        lines = count // part.run
        if len(part.shape) == 2:
            columns: Tensor = stored[row : row + lines, column : column + part.run]
        else:
            columns = stored[...].reshape(-1, part.stride)[row : row + lines, column : column + part.run]
        return columns.flatten()
    first_row = part.offset // width
    end_row = -(-(part.offset + count) // width)
    rows = stored[first_row:end_row] if part.shape else stored[...]
    flat: Tensor = rows.flatten()[part.offset % max(1, width) :][:count]
    return flat


@contextmanager
def _load_errors(model_path: str) -> Iterator[None]:
    try:
        yield
    except StreamRLError:
        raise
    except Exception as error:  # transformers raises errors of any class while it makes a model
        reason, _, _ = str(error).partition("\n")
        raise StreamRLError(f"cannot load the model of {model_path!r}: {reason}") from error


@contextmanager
def _training_errors(model_path: str) -> Iterator[None]:
    try:
        yield
    except StreamRLError as error:
        raise StreamRLError(f"model {model_path!r} cannot be trained: {error}") from error


def published_shapes(model_path: str, targets: Sequence[str] = (), split: tuple[int, int] = (1, 1)) -> dict[str, Shape]:
    """Shapes, by name, of the tensors that a run publishes for the model of a directory. Weights are not read.

    ``split``: numbers of tensor and of expert parallel ranks, for which transformers must have a plan.
    Raises ``StreamRLError`` as ``load_policy`` does, except for errors that only a forward shows."""
    policy = empty_policy(model_path)
    with _training_errors(model_path):
        _check_names(policy, Path(model_path))
    refuse_targets(policy.hugging_face, targets)
    if split[0] > 1:
        refuse_without_plan(policy.hugging_face, experts=split[1] > 1)
    return {entry.name: entry.shape for entry in policy.entries}


def published_dtypes(model_path: str, names: Iterable[str]) -> dict[str, str]:
    """Return the dtype, ``bfloat16`` or ``float32``, in which a run publishes each of the tensors ``names``
    (``published_shapes``) of a directory."""
    stored = stored_tensors(Path(model_path))
    tensors = {name: stored[name] for name in names}
    in_float32 = float32_tensors(tensors)
    return {name: "float32" if name in in_float32 else "bfloat16" for name in tensors}


def _check_names(policy: PackedPolicy, directory: Path) -> dict[str, Path]:
    """Check that the directory has exactly the tensors that will be published, with the same names and shapes: engines
    load the same directory. Returns the file of each tensor."""
    stored = stored_tensors(directory)
    model = policy.hugging_face
    unknown = sorted(entry.name for entry in policy.entries if entry.name not in stored)
    if unknown:
        raise StreamRLError(
            f"model type {model.config.model_type!r} has no weights for {len(unknown)} parameters "
            f"({', '.join(unknown[:3])}) under the names that engines load: save it again"
        )
    constants = sorted(name for name in policy.constants.values() if name not in stored)
    if constants:
        raise StreamRLError(
            f"model type {model.config.model_type!r} needs {', '.join(constants[:3])}, which the files do not have: "
            "copy or save the model again"
        )
    for entry in policy.entries:
        if stored[entry.name].dtype not in _PLAIN_TYPES:
            raise StreamRLError(
                f"{entry.name} is stored as {stored[entry.name].dtype}: training needs plain weights; give a copy in "
                "bfloat16"
            )
        shape = stored[entry.name].shape
        if shape != entry.shape and (*shape[:-2], *shape[:-3:-1]) == entry.shape:
            raise StreamRLError(
                f"{entry.name} is stored as {list(shape)} and computed as {list(entry.shape)}: such experts would be "
                "published transposed, which engines are not; this family is not trained yet"
            )
        if shape != entry.shape:
            raise StreamRLError(
                f"{entry.name} is {list(shape)} in {stored[entry.name].file.name} and {list(entry.shape)} by "
                "config.json: they are not of one model; copy or save it again"
            )
    policy.float32 = float32_tensors({entry.name: stored[entry.name] for entry in policy.entries})
    return {name: tensor.file for name, tensor in stored.items()}


def load_models(
    options: TrainerOptions, device: torch.device
) -> tuple[PackedPolicy, PackedPolicy | None, Critic | None, bool]:
    """Load policy, reference and critic, as ``options`` require. The last result is whether parameters are gathered
    layer by layer, so that every forward is a collective. Collective with several ranks. Raises ``StreamRLError``."""
    split = split_of(options, device)
    gathered = Gathered.BATCH if options.ranks == 1 else Gathered.LAYER
    # Ranks that share rows compute every forward together, so they can gather layer by layer.
    if options.ranks > 1 and options.ranks_per_group == 1:
        gathered = _choose_gathered(options, device)
    load = partial(_load, options, device, gathered, split)
    policy = load(options.model_path)
    if policy.experts is not None and options.routing_demanded:
        policy.experts.demand_replay()
    reference = None
    critic = None
    policy.context = context_of(options)
    if policy.context is not None and policy.recurrent.names:
        raise StreamRLError(
            f"training.advanced.context_parallel_size: {policy.recurrent.names[0]} carries a state over the splits of "
            "a row: set it to 1"
        )
    trunk = load_policy(options.model_path, device) if options.objective.has_value_model else None
    trained_models = [policy]
    if trunk is not None:
        trained_models.append(trunk)
    for model in trained_models:
        if options.compile:
            compile_policy(model)
        if options.activation_checkpointing:
            checkpoint_activations(model)
    by_layer = gathered is Gathered.LAYER
    if options.objective.has_reference:
        # Unless every forward is a collective, ranks score different numbers of rows, and each needs the full model.
        path = options.objective.reference or options.model_path
        reference = _freeze(load(path) if by_layer else load_policy(path, device))
        # A larger model of the family may have more padding behind the tokens that the policy samples from.
        reference.logits = policy.hugging_face.config.get_text_config().vocab_size
    if options.objective.has_critic:
        critic = Critic(options, policy.hugging_face.config.get_text_config().hidden_size, device, trunk)
    return policy, reference, critic, by_layer


def _load(
    options: TrainerOptions, device: torch.device, gathered: Gathered, split: Split, model_path: str
) -> PackedPolicy:
    sixteen_bit = computes_in_sixteen_bits(options, device)
    return load_policy(model_path, device, split, gathered, sixteen_bit=sixteen_bit)


@torch.no_grad()
def _freeze(policy: PackedPolicy) -> PackedPolicy:
    """Freeze a reference at its published bits: for the initial model, those of version 0."""
    policy.requires_grad_(False)
    in_float32 = policy.float32_parameters()
    for name, parameter in policy.trained_parameters().items():
        if name not in in_float32:
            part = local_part(parameter)
            part.copy_(part.to(torch.bfloat16))
    return policy


def _choose_gathered(options: TrainerOptions, device: torch.device) -> Gathered:
    """Choose gathering by batch or by layer by the memory that each rank has free. Collective; rank 0 logs why."""
    facts = read_model_facts(Path(options.model_path))
    sizes = training_sizes(
        options,
        options.lora,
        options.objective,
        facts,
        context=options.context,
        distribution=options.sampling,
        card=card_of(device),
    )
    free_bytes = process_group.all_reduce([_free_bytes(device, options.ranks)], device, ReduceOp.MIN)[0]
    gathered, reason = choose_gathered(options.gathered, sizes, round(free_bytes))
    if options.rank == 0:
        log.info("%s", reason)
    return gathered


def _free_bytes(device: torch.device, ranks: int) -> float:
    """Free memory that this rank may take: memory of its GPU, or its share of the host's memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available) / ranks


def checkpoint_activations(policy: PackedPolicy) -> None:
    """Store only the input of each decoder layer in forward, and run the layer again in backward. transformers' own
    option is not used: it works in training mode only, and the policy is in evaluation mode."""
    for layer in decoder_layers(policy.hugging_face):
        # The policy has no dropout, so the second run does not need the state of the random generator.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def compile_policy(policy: PackedPolicy) -> None:
    """Compile the decoder layers for any row length. Attention is not compiled: it runs between two compiled halves of
    a layer. Layers of equal shapes share the code, which is compiled once, at the first row."""
    policy.set_attention(register_uncompiled_attention())
    policy.recurrent.leave_uncompiled()
    for layer in decoder_layers(policy.hugging_face):
        layer.forward = torch.compile(layer.forward, dynamic=True)

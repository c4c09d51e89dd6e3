"""The model of a Hugging Face directory as a packed policy, whatever its architecture."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from streamrl.base.errors import StreamRLError
from streamrl.base.model_folder import unsafe_content
from streamrl.learning.model.architecture import persistent_buffers
from streamrl.learning.model.attention import register_packed_attention
from streamrl.learning.model.hugging_face import (
    AutoConfig,
    AutoModelForCausalLM,
    disable_progress_bar,
    empty_parameters,
    without_compiler,
)
from streamrl.learning.model.policy import PackedPolicy, gather_once, set_sharded, shard
from streamrl.learning.model.probe import check_packing
from streamrl.learning.state.published_weights import local_shards, published_shards
from streamrl.recipe.sections import Gathered
from streamrl.weights.pull.mirror import TensorSpec

log = logging.getLogger(__name__)


def load_policy(model_path: str, device: torch.device) -> PackedPolicy:
    """The model of a Hugging Face directory in float32, without dropout, checked on a few packed tokens.

    Raises ``StreamRLError`` for a directory that is not a whole model or holds code or pickles, for quantised weights,
    and for a model that packed rows or published weights would get wrong. Auxiliary losses of routers (mixtures of
    experts) are not trained.
    """
    directory = _checked(model_path)
    with _load_errors(model_path), without_compiler():
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise StreamRLError(
            f"model {model_path!r} has no weights for {len(names)} parameters ({', '.join(names[:3])}): save it again"
        )
    with _training_errors(model_path):
        # Dropout would make the policy that is differentiated another one than the policy that sampled.
        policy = PackedPolicy(model.eval().to(device))
        _check_names(policy, directory)
        check_packing(policy)
    return policy


def empty_policy(model_path: str) -> PackedPolicy:
    """The same model without memory for its parameters, which ``load_sharded`` fills."""
    directory = _checked(model_path)
    with _load_errors(model_path), without_compiler():
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with empty_parameters():
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
        model.tie_weights()
    with _training_errors(model_path):
        return PackedPolicy(model.eval())


def load_sharded(
    model_path: str, device: torch.device, over: DeviceMesh, gathered: Gathered, *, sixteen_bit: bool
) -> PackedPolicy:
    """As ``load_policy``, sharded: each rank reads its own part of every tensor, and holds no more of it. Collective.

    Packing is checked in float32 before the bfloat16 model (``sixteen_bit``) is set up.
    """
    policy = _sharded(model_path, device, over, gathered, sixteen_bit=False)
    with _training_errors(model_path):
        files = _check_names(policy, Path(model_path))
        with _load_errors(model_path):
            parameters = _read_shards(policy, files, device)
        policy.hugging_face.load_state_dict(parameters, strict=False, assign=True)  # tied ones come once
        gather_once(policy)
        check_packing(policy)
    set_sharded(policy, True)
    if not sixteen_bit:
        return policy
    narrow = _sharded(model_path, device, over, gathered, sixteen_bit=True)
    narrow.hugging_face.load_state_dict(policy.trained_parameters(), strict=False, assign=True)
    gather_once(narrow)
    return narrow


def _sharded(
    model_path: str, device: torch.device, over: DeviceMesh, gathered: Gathered, *, sixteen_bit: bool
) -> PackedPolicy:
    policy = empty_policy(model_path)
    policy.hugging_face.set_attn_implementation(register_packed_attention())
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    shard(policy, over, gathered, sixteen_bit=sixteen_bit)
    return policy


@torch.no_grad()
def _read_shards(policy: PackedPolicy, files: Mapping[str, Path], device: torch.device) -> dict[str, Tensor]:
    """Parameters with this rank's part of what the files hold, float32, by name; tied ones once."""
    parameters = policy.trained_parameters()
    read: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for part in local_shards(parameters):
        like = cast("Any", parameters[part.name])
        local = torch.empty(part.local_shape, dtype=torch.float32, device=device)
        read[part.name] = cast("Any", DTensor)(local, like._spec, requires_grad=False)
        starts[part.name] = part.start
    for piece, part in zip(policy.pieces, published_shards(local_shards(parameters), policy.pieces), strict=True):
        with safe_open(files[piece.name], framework="pt") as tensors:
            stored = tensors.get_slice(piece.name)
            if tuple(stored.get_shape()) != piece.shape:
                raise ValueError(f"{piece.name} has shape {stored.get_shape()}, the model wants {list(piece.shape)}")
            width = torch.Size(piece.shape[1:]).numel()
            stop = part.offset + part.stop - part.start
            rows = stored[part.offset // width : -(-stop // width)].flatten()
        first = part.start - starts[piece.parameter]
        flat = cast("DTensor", read[piece.parameter]).to_local().view(-1)
        flat[first : first + part.stop - part.start] = rows[part.offset % width :][: part.stop - part.start]
    return read


def _checked(model_path: str) -> Path:
    directory = Path(model_path)
    if unsafe := unsafe_content(directory):
        raise StreamRLError(f"model {model_path!r} {unsafe}")
    _refuse_quantised(directory)
    disable_progress_bar()
    return directory


@contextmanager
def _load_errors(model_path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StreamRLError(f"cannot load the model of {model_path!r}: {error}") from error


@contextmanager
def _training_errors(model_path: str) -> Iterator[None]:
    try:
        yield
    except StreamRLError as error:
        raise StreamRLError(f"model {model_path!r} cannot be trained: {error}") from error


def published_tensors(model_path: str) -> dict[str, TensorSpec]:
    """What engines would be given of the model in a directory, by its name, without its weights. Raises
    ``StreamRLError`` as ``load_policy`` does, except errors only a forward can show."""
    policy = empty_policy(model_path)
    with _training_errors(model_path):
        _check_names(policy, Path(model_path))
    return {piece.name: TensorSpec(piece.name, "bfloat16", piece.shape) for piece in policy.pieces}


def _refuse_quantised(directory: Path) -> None:
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StreamRLError(
            f"cannot load the model of {str(directory)!r}: config.json cannot be read: {error}"
        ) from error
    for part in (config, config.get("text_config") or {}):
        if part.get("quantization_config"):
            kind = part["quantization_config"].get("quant_method", "unknown method")
            raise StreamRLError(
                f"model {str(directory)!r} is quantised ({kind}): training needs plain weights; give the original model"
            )


def _check_names(policy: PackedPolicy, directory: Path) -> dict[str, Path]:
    """Engines load the same directory: what is published must have the names of its files, and nothing may be lost.
    Returns the file of each tensor."""
    stored: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            stored |= dict.fromkeys(tensors.keys(), file)
    model = policy.hugging_face
    unknown = [piece.name for piece in policy.pieces if piece.name not in stored]
    if unknown:
        raise StreamRLError(
            f"model type {model.config.model_type!r} is trained under names that its files do not have "
            f"({', '.join(unknown[:3])}): engines could not load what is published"
        )
    buffers = [name for name in persistent_buffers(model) if name in stored]
    if buffers:
        raise StreamRLError(
            f"model type {model.config.model_type!r} has stored tensors that are no parameters "
            f"({', '.join(buffers[:3])}): they are neither trained nor published"
        )
    return stored

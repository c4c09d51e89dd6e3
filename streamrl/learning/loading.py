"""The model of a Hugging Face directory as a packed policy, whatever its architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from streamrl.comm.weights.mirror import TensorSpec
from streamrl.config.model_folder import unsafe_content
from streamrl.errors import StreamRLError
from streamrl.learning.architecture import persistent_buffers
from streamrl.learning.hugging_face import AutoConfig, AutoModelForCausalLM, disable_progress_bar, without_compiler
from streamrl.learning.policy import PackedPolicy
from streamrl.learning.probe import check_packing


def load_policy(model_path: str, device: torch.device) -> PackedPolicy:
    """The model of a Hugging Face directory in float32, without dropout, checked on a few packed tokens.

    Raises ``StreamRLError`` for a directory that is not a whole model or holds code or pickles, for quantised weights,
    and for a model that packed rows or published weights would get wrong. Auxiliary losses of routers (mixtures of
    experts) are not trained.
    """
    directory = Path(model_path)
    if unsafe := unsafe_content(directory):
        raise StreamRLError(f"model {model_path!r} {unsafe}")
    _refuse_quantised(directory)
    disable_progress_bar()
    try:
        with without_compiler():
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise StreamRLError(f"cannot load the model of {model_path!r}: {error}") from error
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise StreamRLError(
            f"model {model_path!r} has no weights for {len(names)} parameters ({', '.join(names[:3])}): save it again"
        )
    try:
        # Dropout would make the policy that is differentiated another one than the policy that sampled.
        policy = PackedPolicy(model.eval().to(device))
        _check_names(policy, directory)
        check_packing(policy)
    except StreamRLError as error:
        raise StreamRLError(f"model {model_path!r} cannot be trained: {error}") from error
    return policy


def published_tensors(model_path: str) -> dict[str, TensorSpec]:
    """What engines would be given of the model in a directory, by its name, without its weights. Raises
    ``StreamRLError`` as ``load_policy`` does, but for what only a forward shows."""
    _refuse_quantised(Path(model_path))
    try:
        with without_compiler(), torch.device("meta"):
            config = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise StreamRLError(f"cannot load the model of {model_path!r}: {error}") from error
    policy = PackedPolicy(model)
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


def _check_names(policy: PackedPolicy, directory: Path) -> None:
    """Engines load the same directory: what is published must have the names of its files, and nothing may be lost."""
    stored: set[str] = set()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            stored.update(tensors.keys())
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


@torch.no_grad()
def load_reference(model_path: str, device: torch.device) -> PackedPolicy:
    """The published bits of version 0, frozen: what the policy is held close to. Every rank holds all of it."""
    reference = load_policy(model_path, device).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    return reference

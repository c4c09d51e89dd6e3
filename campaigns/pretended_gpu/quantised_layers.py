"""Layers of vLLM's quantisation methods on a pretended GPU, rebuilt from new weights.

    python -m campaigns quantised_layers [--card H100]

For each method a linear layer is made, loaded and finished as vLLM does for a GPU of this capability, then rebuilt by
``RebuiltLayer`` from weights in host memory, as a push does, and compared with a layer that loaded these weights. The
Python of vLLM is run, and the choice of the kernel is vLLM's. Kernels that have no CPU build are replaced by plain
torch (quantising) or by another order of the same words (Marlin's repacking): their numbers are not those of a GPU."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from campaigns.pretended_gpu.cards import Card, cards_of
from campaigns.pretended_gpu.devices import pretended_gpus

METHODS = ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "mxfp4")
"""Methods that quantise linear layers while they load; ``int8_per_channel_weight_only`` and ``nvfp4_per_token`` are of
experts alone."""
OUTPUTS, INPUTS = 512, 256
_FP8_MAX = 448.0


class _Absent(ModuleType):
    """A module of CUDA kernels, of which every function says False."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


def pretend_platform(card: Card) -> None:
    """Let vLLM of this process believe in a CUDA platform with ``card``. Call it before vLLM is imported."""
    for name in ("_C_stable_libtorch", "vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
        sys.modules[f"vllm.{name}"] = _Absent(f"vllm.{name}")
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Platform(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*card.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return card.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return card.memory

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    CpuPlatform.import_kernels()  # those that this processor can run
    platforms._current_platform = Platform()
    capability = 10 * card.capability[0] + card.capability[1]
    least = {"fp8": 89, "block_fp8": 90, "fp4": 100}
    for kind, needed in least.items():
        _define(f"cutlass_scaled_mm_supports_{kind}(int capability) -> bool", capability >= needed)
    _define("cutlass_group_gemm_supported(int capability) -> bool", capability >= 90)
    replace_kernels()


_library: Any = None


def _define(signature: str, answer: bool) -> None:
    global _library
    _library = _library or torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    _library.define(signature)
    _library.impl(signature.partition("(")[0], lambda capability: answer, "CompositeExplicitAutograd")


def replace_kernels() -> None:
    """Put plain torch in the place of kernels without a CPU build."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.online import mxfp4, mxfp8

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    _custom_ops.gptq_marlin_repack = repacked
    mxfp8.mxfp8_e4m3_quantize = lambda weight, *_, **__: _by_groups(weight, 32, torch.float8_e4m3fn)
    mxfp4.mxfp4_quantize = lambda weight, *_, **__: _packed(weight)


def scaled_fp8_quant(
    input: torch.Tensor, scale: Any = None, *_: Any, use_per_token_if_dynamic: bool = False, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's kernel of this name does."""
    values = input.float()
    if scale is None:
        largest = values.abs().amax(1, keepdim=True) if use_per_token_if_dynamic else values.abs().max().reshape(1)
        scale = (largest / _FP8_MAX).clamp_min(1e-12)
    return (values / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scale


def repacked(b_q_weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Another order of the same words, as Marlin wants one."""
    return b_q_weight.flip(0).contiguous()


def _by_groups(weight: torch.Tensor, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().reshape(weight.shape[0], -1, size)
    exponents = groups.abs().amax(-1).clamp_min(1e-30).log2().floor()
    quantised = (groups / exponents.exp2()[..., None]).to(dtype).reshape(weight.shape)
    return quantised, (exponents + 127).to(torch.uint8)


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantised, scale = _by_groups(weight, 32, torch.float32)
    halves = (quantised * 2).round().clamp(-7, 7).to(torch.int8).view(torch.uint8) & 15
    return halves[:, ::2] | halves[:, 1::2] << 4, scale


@contextmanager
def configuration() -> Iterator[None]:
    """vLLM's configuration of one worker, without a model."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False, enforce_eager=True, quantization=None)
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel(1)
        yield


def loaded(method: str, weight: torch.Tensor) -> Any:
    """A model of one layer that has loaded ``weight`` and was finished by vLLM's method."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS, QuantizationConfigArgs
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from streamrl.weights.vllm.post_load_changes import record_post_load_changes

    model = torch.nn.Module()
    arguments = QuantizationConfigArgs(linear=_ONLINE_SHORTHANDS[method].linear)
    model.layer = ColumnParallelLinear(
        INPUTS, OUTPUTS, bias=False, quant_config=OnlineQuantizationConfig(arguments), prefix="layer"
    )
    record_metadata_for_reloading(model)
    layer: Any = model.layer
    layer._parameters["weight"] = torch.nn.Parameter(weight.to("cuda"), requires_grad=False)
    record_post_load_changes(model, lambda: layer.quant_method.process_weights_after_loading(layer))
    return model


def kernel_of(model: Any) -> str:
    """The class of the kernel that vLLM chose."""
    method = model.layer.quant_method
    return type(getattr(method, "fp8_linear", None) or getattr(method, "kernel", None)).__name__


def rebuild(method: str) -> str:
    """Try one method. Returns a line for people."""
    from streamrl.base.errors import WeightError
    from streamrl.weights.vllm.rebuilt_layers import rebuilt_layers

    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(OUTPUTS, INPUTS, generator=generator, dtype=torch.float32).bfloat16() for _ in range(2))
    try:
        model = loaded(method, old)
    except Exception as error:  # noqa: BLE001 - of vLLM, whatever it is
        return f"{method}: not run ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    kernel = kernel_of(model)
    found = rebuilt_layers(model)
    if list(found) != ["layer"]:
        return f"{method}: {kernel}: no rebuilt layer"
    layer = found["layer"]
    try:
        layer.compare({"weight": old})
        layer.rebuild({"weight": new})
    except WeightError as error:
        return f"{method}: {kernel}: refused: {error}"
    expected = dict(loaded(method, new).layer.named_parameters())
    for name, parameter in model.layer.named_parameters():
        same = torch.equal(parameter.detach().view(torch.uint8), expected[name].detach().view(torch.uint8))
        if parameter.device.type != "cuda" or not same:
            return f"{method}: {kernel}: WRONG, {name} on {parameter.device}"
    return f"{method}: {kernel}: rebuilt"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the campaign."""
    command.add_argument("--card", default="H100", help="a card of campaigns/pretended_gpu/cards.py")
    command.set_defaults(work=lambda arguments: run(arguments.card))


def run(name: str) -> int:
    """Print a line for each method. Returns 1 where a layer was not rebuilt, otherwise 0."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    (card,) = cards_of(name)
    pretend_platform(card)
    failed = False
    with configuration(), pretended_gpus([card]):
        for method in METHODS:
            answer = rebuild(method)
            failed = failed or not answer.endswith(("rebuilt", ")"))
            print(answer, flush=True)
    return int(failed)

"""Check that vLLM serves a model and that trained weights have a place in it. Tensors are on the meta device: no
weights are read.

``prepare.recipe_probe`` runs it before a run, in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import environ
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.nn import Module, Parameter

from streamrl.base.errors import ModelRefused
from streamrl.engines.vllm.arguments import checked_arguments
from streamrl.engines.vllm.options import EngineOptions
from streamrl.learning.model.loading import published_dtypes, published_shapes
from streamrl.recipe.sections import PIPELINE_PARALLEL
from streamrl.weights import engine_variables
from streamrl.weights.pull.loaded_checkpoint import constant_tensors
from streamrl.weights.pull.replica import TensorSpec, TensorSpecs
from streamrl.weights.vllm.adapter import add_adapters, record_adapter_plan
from streamrl.weights.vllm.load_plan import record_load_plan, run_loader, without_values
from streamrl.weights.vllm.post_load_changes import record_post_load_changes


def published_tensors(model_path: str, targets: Sequence[str] = (), split: tuple[int, int] = (1, 1)) -> TensorSpecs:
    """Return the tensors that a run publishes, by name. Arguments and errors are those of ``published_shapes``."""
    shapes = published_shapes(model_path, targets, split)
    dtypes = published_dtypes(model_path, shapes)
    return {name: TensorSpec(name, dtypes[name], shape) for name, shape in shapes.items()}


def probe_engine(options: EngineOptions, tensors: TensorSpecs, adapter: TensorSpecs) -> None:
    """Make the model of an engine with one worker, and record the load plans of the trained ``tensors`` and of the
    ``adapter``, by name.

    Raises ``ModelRefused`` when vLLM rejects the configuration, and ``WeightError`` when trained weights have no place
    in its model. Another error is a limit of this check, and proves no fault of an engine with weights. The function
    changes the state of its process, which must be used for nothing else."""
    environ.update(options.variables)  # vLLM reads the variables when it is imported
    environ.update(engine_variables())
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.interfaces import supports_pp

    pipeline_size = checked_arguments(options.args, on_cpu=options.on_cpu).get(PIPELINE_PARALLEL, 1)
    args = {
        name: value
        for name, value in options.args.items()
        if name not in (PIPELINE_PARALLEL, "decode_context_parallel_size")
    }
    with load_context(replace(options, workers=1, args=args)) as config:
        config.device_config.device = torch.device("meta")  # the transformers backend makes its parameters on it
        try:
            with torch.device("meta"):
                model: Any = initialize_model(vllm_config=config)
        except (ImportError, ValueError) as error:  # the package of a class, or the class itself, is missing
            kind = config.model_config.hf_text_config.model_type
            raise ModelRefused(
                f"vLLM cannot serve {options.model_path}, of type {kind!r}, on this machine: {error}"
            ) from error
        _drop_values(model)
        if pipeline_size > 1 and not supports_pp(model):
            raise ModelRefused(
                f"engines.args.{PIPELINE_PARALLEL}: vLLM serves {type(model).__qualname__} in one stage: remove it"
            )
        constants = constant_tensors(Path(options.model_path), tensors)
        with torch.no_grad():
            # As an engine does at its start; the loader may add parameters.
            run_loader(model, without_values({**constants, **tensors}))
        record_post_load_changes(model, lambda: None)
        record_load_plan(model, tensors, constants)
        if adapter:
            add_adapters(model, config)
            record_adapter_plan(model, adapter)


def _drop_values(model: Module) -> None:
    """Replace the parameters that vLLM makes on a device by its name, as the norms of Gated DeltaNet, by parameters on
    the meta device, to which the loader can copy."""
    replaced: dict[Parameter, Parameter] = {}  # a tied parameter is one parameter afterwards
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                empty = replaced.setdefault(parameter, Parameter(parameter.to("meta"), requires_grad=False))
                vars(empty).update(vars(parameter))  # vLLM's loader of this parameter
                setattr(module, name, empty)


@contextmanager
def load_context(options: EngineOptions) -> Iterator[Any]:
    """Set what vLLM has around the loading of the model of an engine with one worker, in a process without an engine.
    Yields vLLM's configuration. Raises ``ModelRefused`` when vLLM rejects it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    from streamrl.engines.vllm.engine import engine_config

    config = engine_config(options)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        if not model_parallel_is_initialized():
            with tempfile.NamedTemporaryFile() as file:
                init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
                initialize_model_parallel(1)
        yield config

"""Check of the arguments of vLLM in a recipe (``engines.args``) against the installed version.

An engine process calls it when it starts, the process of the model probe (``load_plan_probe``) before a run; both have
imported vllm. ``recipe.rules.engine_arguments`` refuses arguments that no version could take, without vllm."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, get_args

from streamrl.base.errors import ModelRefused
from streamrl.base.types import JsonMapping
from streamrl.recipe.problems import did_you_mean, short_toml
from streamrl.recipe.sections import PIPELINE_PARALLEL

ON_CPU = ("enforce_eager", "enable_chunked_prefill")
"""Arguments that an engine on a CPU sets itself and that a recipe may not change."""
CUDA_ONLY = {PIPELINE_PARALLEL: 1, "enable_expert_parallel": False}
"""Arguments that have an effect on CUDA only, with their values of no effect. With other values vLLM 0.32 on a CPU dies
at the first request: its model runner has no buffer for the output of the pipeline stage before, and its kernel for
experts computes any expert, even one of another worker."""
_NESTED = "speculative_config"


def checked_arguments(arguments: JsonMapping, *, on_cpu: bool) -> dict[str, Any]:
    """Return the values of ``arguments`` in the types of ``AsyncEngineArgs``, by name. Raises ``ModelRefused`` for
    names that the installed vLLM lacks, for values of another type, and for values that an engine on a CPU cannot
    have."""
    if not arguments:
        return {}
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    if on_cpu:
        _refuse_on_cpu(arguments)
    converted = _checked("engines.args", arguments, AsyncEngineArgs)
    speculation = arguments.get(_NESTED)
    if speculation:
        _checked(f"engines.args.{_NESTED}", speculation, SpeculativeConfig)
    return converted


def _refuse_on_cpu(arguments: JsonMapping) -> None:
    for name in ON_CPU:
        if name in arguments:
            raise ModelRefused(f"engines.args.{name}: an engine on a CPU has it as it must be: remove it")
    for name, unset in CUDA_ONLY.items():
        if arguments.get(name, unset) != unset:
            text = "vLLM on a CPU dies with it at the first request: remove it, or set engines.tensor_parallel_size"
            raise ModelRefused(f"engines.args.{name}: {text}")


def _checked(path: str, arguments: JsonMapping, dataclass: type[Any]) -> dict[str, Any]:
    """Convert ``arguments`` to the types of the fields of ``dataclass``. ``path``: key of the recipe, for errors."""
    import pydantic
    from vllm.version import __version__

    hints = {field.name: field.type for field in dataclasses.fields(dataclass) if not field.name.startswith("_")}
    converted = {}
    for name, value in arguments.items():
        if name not in hints:
            hint = did_you_mean(name, hints, ": remove it")
            raise ModelRefused(f"{path}.{name}: vLLM {__version__} has no such argument{hint}")
        try:
            converted[name] = _converted(hints[name], value)
        except pydantic.ValidationError as error:
            reason = error.errors()[0]["msg"]
            text = f"{short_toml(value)} is not what vLLM {__version__} takes there ({reason}): correct or remove it"
            raise ModelRefused(f"{path}.{name}: {text}") from error
    return converted


def _converted(hint: Any, value: Any) -> Any:
    """Return ``value`` in the type ``hint``; a name of an enumeration's member becomes the member. Raises
    ``pydantic.ValidationError``."""
    import pydantic

    if isinstance(hint, str):  # a type that exists for type checkers only: vLLM itself checks the value
        return value
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, enum.EnumType) and isinstance(value, str) and value.upper() in kind.__members__:
            return kind[value.upper()]
    try:
        adapter: Any = pydantic.TypeAdapter(hint)
    except pydantic.errors.PydanticUserError:  # pydantic has no schema for some types, such as torch.dtype
        return value
    return adapter.validate_python(value)

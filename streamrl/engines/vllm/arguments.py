"""Arguments of vLLM that the recipe gives (``engines.args``), checked against the installed version. For a process
that has imported vllm; ``recipe.rules.engine_arguments`` refuses what no version could take."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, get_args

from streamrl.base.errors import ModelRefused
from streamrl.recipe.problems import did_you_mean, shown
from streamrl.recipe.sections import STAGES

ON_CPU = ("enforce_eager", "enable_chunked_prefill")
"""Arguments that an engine on a CPU needs as they are."""
CUDA_ONLY = {STAGES: 1, "enable_expert_parallel": False}
"""Arguments and their values of no effect. With others vLLM 0.32 on a CPU dies at the first request: its model runner
has no buffer for what the stage before sends, and its kernel for experts takes any expert for its own."""
_NESTED = "speculative_config"


def checked_arguments(given: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Values of ``given`` as ``AsyncEngineArgs`` takes them, by name. Raises ``ModelRefused`` for names that the
    installed vLLM lacks, for values of another type, and for what a CPU engine needs otherwise."""
    if not given:
        return {}
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    for name in ON_CPU if on_cpu else ():
        if name in given:
            raise ModelRefused(f"engines.args.{name}: an engine on a CPU has it as it must be: remove it")
    for name, unset in CUDA_ONLY.items() if on_cpu else ():
        if given.get(name, unset) != unset:
            text = "vLLM on a CPU dies with it at the first request: remove it, or set engines.tensor_parallel_size"
            raise ModelRefused(f"engines.args.{name}: {text}")
    made = _checked("engines.args", given, AsyncEngineArgs)
    if drafts := given.get(_NESTED):
        _checked(f"engines.args.{_NESTED}", drafts, SpeculativeConfig)
    return made


def _checked(path: str, given: Mapping[str, Any], taken_by: type[Any]) -> dict[str, Any]:
    import pydantic
    from vllm.version import __version__

    hints = {field.name: field.type for field in dataclasses.fields(taken_by) if not field.name.startswith("_")}
    made = {}
    for name, value in given.items():
        if name not in hints:
            hint = did_you_mean(name, hints, ": remove it")
            raise ModelRefused(f"{path}.{name}: vLLM {__version__} has no such argument{hint}")
        try:
            made[name] = _converted(hints[name], value)
        except pydantic.ValidationError as error:
            said = error.errors()[0]["msg"]
            text = f"{shown(value)} is not what vLLM {__version__} takes there ({said}): correct or remove it"
            raise ModelRefused(f"{path}.{name}: {text}") from error
    return made


def _converted(hint: Any, value: Any) -> Any:
    """``value`` as the type ``hint``; members of enumerations by their names. Raises ``pydantic.ValidationError``."""
    import pydantic

    if isinstance(hint, str):  # its name is not there at run time: vLLM checks it
        return value
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, enum.EnumType) and isinstance(value, str) and value.upper() in kind.__members__:
            return kind[value.upper()]
    try:
        adapter: Any = pydantic.TypeAdapter(hint)
    except pydantic.errors.PydanticUserError:  # a type that pydantic has no schema for, as torch.dtype
        return value
    return adapter.validate_python(value)

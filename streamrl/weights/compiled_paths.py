"""When the compiled forms are worth their compiler, and which form that makes it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_FROM_ELEMENTS = 1 << 19
_FROM_ELEMENTS_WHEN_LOADED = 1 << 6
_LOADED_WITH = "streamrl.weights.codec.compiled_split"


def worth_compiling(elements: int) -> bool:
    """Whether work on so many elements should be done by numba, which takes 70 MiB and a second to load: a process with
    a small model only is spared it (its tensors are joined, so there is no larger unit: ``work_units``). The first use
    on a machine compiles for 15 s more, and keeps the result beside the source; so it does not matter whether something
    else (vLLM, say) has loaded numba."""
    return elements >= (_FROM_ELEMENTS_WHEN_LOADED if _LOADED_WITH in sys.modules else _FROM_ELEMENTS)


def split_form(elements: int) -> ModuleType:
    """``compiled_split``, or its plain form."""
    form = "compiled_split" if worth_compiling(elements) else "class_split"
    return importlib.import_module(f"streamrl.weights.codec.{form}")


def stream_form(elements: int) -> ModuleType:
    """``adaptive_streams``, or its plain form."""
    form = "adaptive_streams" if worth_compiling(elements) else "plain_streams"
    return importlib.import_module(f"streamrl.weights.codec.{form}")

"""Imports from transformers and accelerate without the compiler: a rank saves 25 MiB and a second of its start.

Every other module of ``learning`` imports transformers' names from here. transformers and the initialisation of a model
on the meta device import ``torch._dynamo`` only to mark functions for ``torch.compile``. Inside ``without_compiler`` a
stand-in takes these marks and drops them; any other attribute of it imports the real module. A policy that is compiled
loses nothing: transformers marks fp8 kernels, the cache of its own serving loop and mask building, and packed rows use
none of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_DYNAMO = "torch._dynamo"
_GET_ITEM = "torch._dynamo._trace_wrapped_higher_order_op"


@contextmanager
def _late_transform() -> Iterator[None]:
    """Import and enter the real ``TransformGetItemToIndex`` when this one is entered."""
    with importlib.import_module(_GET_ITEM).TransformGetItemToIndex():
        yield


def _unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Accept ``@mark`` and ``@mark(...)``, and mark nothing."""
    if function is None:
        return lambda decorated: decorated
    return function


class _StandIn(ModuleType):
    """Stand-in for ``torch._dynamo`` that has its decorators only; any other attribute imports the real module."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        self.disable = self.allow_in_graph = self.assume_constant_result = _unmarked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        _remove()
        return getattr(importlib.import_module(_DYNAMO), name)


def _remove() -> None:
    if isinstance(sys.modules.get(_DYNAMO), _StandIn):
        del sys.modules[_DYNAMO], sys.modules[_GET_ITEM]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let imports of ``torch._dynamo`` inside the context get the stand-in, unless the real module is imported already.
    Not thread-safe."""
    if _DYNAMO in sys.modules:
        yield
        return
    getter = ModuleType(_GET_ITEM)
    getter.TransformGetItemToIndex = _late_transform  # type: ignore[attr-defined]
    sys.modules[_DYNAMO] = _StandIn()
    sys.modules[_GET_ITEM] = getter
    try:
        yield
    finally:
        _remove()
        if isinstance(torch.__dict__.get("_dynamo"), _StandIn):
            del torch._dynamo


with without_compiler():
    import transformers as transformers
    from accelerate import init_empty_weights as init_empty_weights
    from transformers import AttentionInterface as AttentionInterface
    from transformers import AutoConfig as AutoConfig
    from transformers import AutoModelForCausalLM as AutoModelForCausalLM
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion as revert_weight_conversion
    from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
    from transformers.utils.logging import disable_progress_bar as disable_progress_bar

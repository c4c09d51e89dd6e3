"""Lets vLLM import the class of a composite model where torchvision is not installed.

The files of such classes import functions for images, which no engine here calls: towers are not loaded, and prompts
are text. On a CPU package indices have torchvision as a CUDA build only, which breaks torch. vLLM's plugin
(``engines/vllm/plugin.py``) calls ``import_without_torchvision`` in each process of an engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from types import ModuleType
from typing import Any

log = getLogger(__name__)

PACKAGE = "torchvision"
_MODULES = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


class _AbsentNames(type):
    """The metaclass of ``_Absent``: attributes of a stand-in, as of ``transforms.Compose``, are stand-ins, too."""

    def __getattr__(cls, name: str) -> Any:
        return _absent_name(name)


class _Absent(metaclass=_AbsentNames):
    """A stand-in for one name of torchvision. Raises ``ImportError`` when it is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(f"{type(self).__name__} is in {PACKAGE}, which is not installed: images cannot be processed")


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _absent_name(name)


def _absent_name(name: str) -> _AbsentNames:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AbsentNames(name, (_Absent,), {})


def import_without_torchvision() -> None:
    """From now on, import classes of vLLM's models with a torchvision whose names are there and cannot be called. Does
    nothing where torchvision is installed."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    original = _LazyRegisteredModel.load_model_cls
    if hasattr(original, "streamrl_original") or importlib.util.find_spec(PACKAGE) is not None:
        return

    def load_model_cls(model: Any) -> Any:
        if model.module_name in sys.modules:
            return original(model)
        with _absent_torchvision():
            return original(model)

    load_model_cls.streamrl_original = original  # type: ignore[attr-defined]
    _LazyRegisteredModel.load_model_cls = load_model_cls
    log.info("%s is not installed: classes of models are imported without it; engines take text only", PACKAGE)


@contextmanager
def _absent_torchvision() -> Iterator[None]:
    """Let imports of torchvision inside the context succeed. Not thread-safe."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # which transformers remembers: not there
    names = [f"{PACKAGE}{name}" for name in _MODULES]
    for name in names:
        module = _AbsentModule(name)
        module.__path__ = []
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]

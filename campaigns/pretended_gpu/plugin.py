"""Plugin of pytest: a session on pretended GPUs.

    FAKE_GPUS=H100 PRETENDED_DTYPE=float32 pytest -p campaigns.pretended_gpu.plugin tests/learning

A trainer that no test gives a device has ``cuda``, and one without a precision that of PRETENDED_DTYPE: in bfloat16
(where it is not set) rows go through the flash kernel, in float32 gradients can be compared with exact ones. At the end
the session prints what was refused."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest

from campaigns.pretended_gpu.cards import VARIABLE, cards_of
from campaigns.pretended_gpu.devices import pretended_gpus, seen

_open = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Enter before the tests are imported: some ask for a device while they are."""
    with suppress(ImportError):
        # It chooses its kernels while it is imported, and has none of a pretended GPU.
        importlib.import_module("bitsandbytes")
    from streamrl.learning import trainer
    from streamrl.recipe.sections import ComputeDtype

    _open.enter_context(pretended_gpus(cards_of(os.environ.get(VARIABLE, "H100"))))
    begin = trainer.TorchTrainer.__init__
    precision = ComputeDtype(os.environ.get("PRETENDED_DTYPE", "auto"))

    def on_the_gpu(self: Any, options: Any, *rest: Any, **named: Any) -> None:
        changes: dict[str, Any] = {}
        if options.device == "auto":
            changes["device"] = "cuda"
        if options.compute_dtype is ComputeDtype.AUTO:
            changes["compute_dtype"] = precision
        begin(self, msgspec.structs.replace(options, **changes), *rest, **named)

    _open.callback(setattr, trainer.TorchTrainer, "__init__", begin)
    trainer.TorchTrainer.__init__ = on_the_gpu  # type: ignore[method-assign]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the process back."""
    _open.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was refused, and which kernels were called."""
    found = seen()
    for refused in dict.fromkeys(found.refused):
        terminalreporter.write_line(f"refused: {refused}")
    for name, count in found.calls.items():
        terminalreporter.write_line(f"called: {name} {count} times")
    for line, count in found.waits.most_common(10):
        terminalreporter.write_line(f"the host waits: {line} {count} times")

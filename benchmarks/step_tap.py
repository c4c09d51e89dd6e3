"""Writes down each step of vLLM's engine core; streamrl knows nothing of it.

``step_accounting.py`` makes this the ``sitecustomize`` of the processes of a run, which Python imports by itself, and
names a file in ``STREAMRL_STEP_TAP``. A line of it is a step: when it began and ended (``time.time()``), how many
requests were in it, and how many tokens."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CORE = "vllm.v1.engine.core"


def _tap(core: type, file: int) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, seen = Scheduler.schedule, []

    def scheduled(self: Any, *given: Any, **named: Any) -> Any:
        seen.append(schedule(self, *given, **named))
        return seen[-1]

    def timed(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(method)
        def step(self: Any) -> Any:
            seen.clear()
            began = time.time()
            result = method(self)
            if seen and (tokens := seen[-1].total_num_scheduled_tokens):
                os.write(file, f"{began} {time.time()} {len(seen[-1].num_scheduled_tokens)} {tokens}\n".encode())
            return result

        return step

    Scheduler.schedule = scheduled
    for name in ("step", "step_with_batch_queue"):
        setattr(core, name, timed(getattr(core, name)))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != CORE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(CORE)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _tap(module.EngineCore, os.open(os.environ["STREAMRL_STEP_TAP"], os.O_WRONLY | os.O_APPEND))

        spec.loader.exec_module = exec_module
        return spec  # type: ignore[no-any-return]


if "STREAMRL_STEP_TAP" in os.environ:
    sys.meta_path.insert(0, _Finder())

"""Writes down what the processes of a run really do: Python imports this by itself, the product knows nothing of it.

``python -m campaigns chaos`` puts this directory on ``PYTHONPATH``, and names a file in ``STREAMRL_CHAOS_TAP``. A line
of it is one JSON object, appended in one write: ``t`` (monotonic seconds, one clock for the machine), ``born`` (when
the process began), ``pid``, ``role`` (``engine-0``), ``kind``, and what is known of it. Nothing of streamrl is imported
here: a few methods are wrapped as their module is imported."""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

BORN = time.monotonic()
TAPPED = {
    "streamrl.learning.trainer": ("TorchTrainer", ("train_group", "close_batch", "save_checkpoint")),
    "streamrl.engines.simulated.engine": ("SimulatedEngine", ("generate", "stage", "commit")),
    "streamrl.engines.vllm.engine": ("RunEngine", ("generate", "stage", "commit")),
    "streamrl.run.journal.run_journal": ("RunJournal", ("on_event",)),
    "streamrl.rewards.served.gate": ("QuestionBatcher", ("_admit",)),
}


def _role() -> str:
    arguments = sys.orig_argv
    if "streamrl.launch" not in arguments:
        return ""
    role = arguments[arguments.index("streamrl.launch") + 1 :][:1]
    index = arguments[arguments.index("--index") + 1] if "--index" in arguments else "0"
    return f"{role[0]}-{index}" if role and role[0] != "controller" else "".join(role)


class _Tap:
    def __init__(self, path: str, role: str) -> None:
        self.role, self.born = role, BORN
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **known: object) -> None:
        line = {"t": time.monotonic(), "born": self.born, "pid": os.getpid(), "role": self.role, "kind": kind, **known}
        os.write(self.file, json.dumps(line).encode() + b"\n")


def _known(kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, object]:
    """Say what the first argument tells, also where it is passed by name."""
    first = [*arguments, *options.values()][:1]
    return _before(kind, first[0]) if first else {}


def _before(kind: str, argument: Any) -> dict[str, object]:
    if kind == "train_group":
        ids = [
            [s.id.prompt_id, s.id.group_id, s.id.sample, s.id.attempt, _digest(s), s.reward] for s in argument.samples
        ]
        taught = [len(s.token_values.get("teacher", ())) == s.trained_tokens for s in argument.samples]
        return {"batch": argument.batch_id, "group": argument.group_id, "ids": ids, "untaught": taught.count(False)}
    if kind in ("close_batch", "save_checkpoint", "stage"):
        return {"version": argument.policy_version}
    if kind == "commit":
        return {"version": argument}
    if kind == "on_event":
        return {"event": type(argument).__name__}
    return {}


def _after(kind: str, result: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in ("state_hash", "batch_id"):
        if hasattr(result, name):
            found[name] = getattr(result, name)
    if kind == "generate":
        found["tokens"] = len(result.token_ids)
    return found


def _digest(sample: Any) -> str:
    tokens = [token for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained]
    return hashlib.blake2b(repr(tokens).encode(), digest_size=12).hexdigest()


def _wrapped(tap: _Tap, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def waited_for(self: object, *arguments: Any, **options: Any) -> Any:
            known = _known(kind, arguments, options)
            if kind != "generate":
                tap.write(kind, **known)
            result = await method(self, *arguments, **options)
            tap.write(f"{kind} done", **known, **_after(kind, result))
            return result

        return waited_for

    @functools.wraps(method)
    def tapped(self: object, *arguments: Any, **options: Any) -> Any:
        known = _known(kind, arguments, options)
        tap.write(kind, **known)
        result = method(self, *arguments, **options)
        if kind in ("close_batch", "save_checkpoint"):
            tap.write(f"{kind} done", **known, **_after(kind, result))
        return result

    return tapped


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, tap: _Tap) -> None:
        self.tap = tap

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in TAPPED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = functools.partial(self._execute, spec.loader.exec_module)
                spec.loader.exec_module = execute  # type: ignore[method-assign]
                return spec
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        class_name, methods = TAPPED[module.__name__]
        tapped = getattr(module, class_name, None)
        for method in methods:
            if tapped is not None and hasattr(tapped, method):
                setattr(tapped, method, _wrapped(self.tap, method, getattr(tapped, method)))


if os.environ.get("STREAMRL_CHAOS_TAP") and _role():
    sys.meta_path.insert(0, _Finder(_Tap(os.environ["STREAMRL_CHAOS_TAP"], _role())))

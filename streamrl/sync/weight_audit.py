"""Audits: what the engines say that they hold, by checksums of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from streamrl.base.errors import EngineError
from streamrl.base.whole_files import append_whole


class AuditedEngine(Protocol):
    """The part of ``streamrl.engines.engine.Engine`` that an audit needs."""

    async def checksums(self) -> dict[str, str]: ...


class WeightAudit:
    """Every ``interval`` versions (0: never) appends a line to ``path``:
    ``{"policy_version", "checksums": {engine: {parameter: digest}}}``. ``serving``: names of the engines that hold what
    is live (None: all do)."""

    def __init__(
        self,
        engines: Mapping[str, AuditedEngine],
        path: Path,
        interval: int,
        serving: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._engines = engines
        self._serving = serving
        self._path = path
        self._interval = interval

    async def after_push(self, policy_version: int) -> None:
        """Audit ``policy_version`` when it is due. It is live, and nothing newer is pushed meanwhile."""
        if not self._interval or policy_version % self._interval:
            return
        checksums = {}
        for name, engine in list(self._engines.items()):
            if self._serving is None or name in self._serving():
                with suppress(EngineError):  # it died meanwhile, which others see to
                    checksums[name] = await engine.checksums()
        line = msgspec.json.encode({"policy_version": policy_version, "checksums": checksums})
        with self._path.open("ab", buffering=0) as file:
            append_whole(file, line + b"\n")

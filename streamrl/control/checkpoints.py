"""Which checkpoints exist: names them and keeps the last few."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from streamrl.control.trainer_ranks import TrainerRanks


class CheckpointKeeper:
    """Names checkpoint directories and keeps the last ``keep`` of them."""

    def __init__(
        self, trainer: TrainerRanks, directory: Path, keep: int, forget: Callable[[Path], Awaitable[None]]
    ) -> None:
        self._trainer = trainer
        self._directory = directory
        self._keep = keep
        self._forget = forget
        self._written: list[Path] = []

    async def save(self, policy_version: int) -> None:
        """Write ``step-N`` and remove what is older than the last ``keep``."""
        path = self._directory / f"step-{policy_version:06d}"
        await self._trainer.save_checkpoint(str(path), policy_version)
        if path not in self._written:
            self._written.append(path)
        while len(self._written) > self._keep:
            await self._forget(self._written.pop(0))

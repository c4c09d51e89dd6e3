"""Trainers of TRL as runs of streamrl: in a script of TRL, write ``from streamrl.trl import GRPOTrainer`` in place of
``from trl import GRPOTrainer``. Other names, such as ``GRPOConfig``, are TRL's own. The script's process imports this
module and becomes the supervisor of the run."""

from __future__ import annotations

from typing import Any

from streamrl.cli.dialects.trl_trainers import ONLY_BY_REWARDS, GRPOTrainer, RLOOTrainer

__all__ = ["GRPOTrainer", "RLOOTrainer"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'streamrl.trl' has no attribute {name!r}")
    if name.endswith("Trainer"):
        # Not AttributeError: ``from streamrl.trl import SFTTrainer`` would lose the sentence.
        raise ImportError(f"streamrl.trl has no {name}: {ONLY_BY_REWARDS}")
    import trl

    return getattr(trl, name)

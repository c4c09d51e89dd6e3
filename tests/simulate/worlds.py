"""Settings and fleets that the simulator tests share."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import msgspec
from oracle.control_world import control_settings as any_settings

from streamrl.simulate.engines import EngineModel
from streamrl.simulate.fleet import FleetEngines, FleetModel
from streamrl.simulate.lengths import LengthModel
from streamrl.simulate.stages import TrainerModel

TINY = FleetModel(
    engine=EngineModel(base_s=1e-3, per_running_s=1e-4, max_num_seqs=64),
    trainer=TrainerModel(token_s=1e-5, optimizer_s=0.01),
    lengths=LengthModel(cap=400, weights=(1.0,), mus=(math.log(40),), sigmas=(1.0,), cap_share=0.04, correlation=0.5),
    engines=FleetEngines(count=2, prompt_tokens=10),
)

control_settings = partial(any_settings, steps=1, batch_groups=4, group_size=4)


def with_part(model: FleetModel, part: str, **changes: Any) -> FleetModel:
    """``model`` with fields of one of its parts replaced."""
    return msgspec.structs.replace(model, **{part: msgspec.structs.replace(getattr(model, part), **changes)})

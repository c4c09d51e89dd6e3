"""Llama 4: layers without rotary angles scale their queries by the place of the token, in steps of ``floor_scale``.
transformers counts places from the start of the row; here they are those of the token in its sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


class PlaceScaling:
    """The scaling of one model's queries. ``positions_T``: places of the tokens of the current row in their sequences;
    None: a single sequence. A model that does not scale queries has ``count`` 0."""

    def __init__(self, model: Any) -> None:
        self.positions_T: Tensor | None = None
        self.count = 0
        for module in model.modules():
            if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
                self._take(module)

    def _take(self, attention: Any) -> None:
        """Scale what the projection of the queries gives, and turn off the module's own scaling, which comes next."""
        floor = float(attention.floor_scale)
        factor = float(attention.attn_scale)
        attention.attn_temperature_tuning = False
        self.count += 1

        def scale(_module: Module, inputs: tuple[Tensor, ...], queries: Tensor) -> Tensor:
            places_T = self.positions_T
            if places_T is None:
                places_T = torch.arange(inputs[0].shape[1], device=queries.device)
            scales_T = torch.log1p(torch.floor((places_T.float() + 1.0) / floor)) * factor + 1.0
            return (queries * scales_T[:, None]).to(queries.dtype)

        attention.q_proj.register_forward_hook(scale)

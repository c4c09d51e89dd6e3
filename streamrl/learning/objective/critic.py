"""PPO's critic: one linear value of each position, on the hidden states of the policy."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streamrl.learning.options import TrainerOptions

VALUE_STEP = 0.04
"""About how far the default rate moves a value in a step: 0.04 / 4,096 is 1e-5, the rate of verl's critic."""


class ValueHead:
    """``[N, D] -> [N]``, starting at 0. Every rank holds all of it; gradients are summed over the ranks at the close.

    It is trained and saved with the policy and never published. A step of AdamW moves a value by about its rate times
    ``D``, so that rates for the layers of a policy would leave the head at 0: it has one of its own, not warmed up.
    """

    def __init__(self, options: TrainerOptions, hidden: int, device: torch.device) -> None:
        self._linear = nn.Linear(hidden, 1, device=device)
        nn.init.zeros_(self._linear.weight)
        nn.init.zeros_(self._linear.bias)
        self._optimizer = torch.optim.AdamW(
            self._linear.parameters(),
            lr=options.objective.value_learning_rate or VALUE_STEP / hidden,
            betas=(options.beta1, options.beta2),
            weight_decay=0.0,
        )
        # Moments exist from the start, so that a checkpoint always has the same tensors.
        for parameter in self._linear.parameters():
            parameter.grad = torch.zeros_like(parameter)
            zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            self._optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """Values before each predicted token, float32 [N]."""
        # Outside autocast, which would compute, and return, bfloat16.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            values_N: Tensor = self._linear(hidden_ND.float())[:, 0]
        return values_N

    def reduce(self) -> float:
        """Sum gradients over the ranks; returns their norm."""
        square = 0.0
        for parameter in self._linear.parameters():
            assert parameter.grad is not None
            if dist.get_world_size() > 1:
                dist.all_reduce(parameter.grad)
            square += float(parameter.grad.double().square().sum())
        return math.sqrt(square)

    def step(self, scale: float, times: int = 1) -> None:
        """Move so many times by the gradient times ``scale``, and clear it."""
        for parameter in self._linear.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        for _ in range(times):
            self._optimizer.step()
        self.clear_gradient()

    def clear_gradient(self) -> None:
        """Before the next batch."""
        self._optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint keeps, as views: loading writes into them."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._linear.named_parameters():
            found[f"critic.{name}"] = parameter.data
            found |= {f"critic.{name}.{key}": value for key, value in self._optimizer.state[parameter].items()}
        return found

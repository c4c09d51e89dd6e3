"""PPO's critic: one linear value of each position, on the hidden states of the policy or of a separate model.

``loading`` makes it in each trainer rank; ``updates`` trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce, get_world_size

from streamrl.learning.model.policy import MicroBatch, PackedPolicy
from streamrl.learning.model.text_part import text_decoder
from streamrl.learning.options import TrainerOptions

VALUE_STEP = 0.04
"""Approximate change of a value in one step of the head's default rate: 0.04 / 4,096 is 1e-5, the rate of verl's
critic."""
TRUNK_RATE = 1e-5
"""Default rate of a separate value model below its head: the rate of verl's critic."""


class Critic:
    """A linear head ``[N, D] -> [N]``, which starts at 0, and the model below it. Every rank holds all parameters of
    both, and gradients are summed over the ranks at the close.

    It is trained and saved with the policy and never published. A step of AdamW moves a value by about its rate times
    ``D``, and the rates of a policy's layers would leave the head at 0: the head has a separate rate, without warm-up.

    ``trunk``: separate model below the head; None: the policy, which the value loss then trains, too."""

    def __init__(
        self, options: TrainerOptions, hidden: int, device: torch.device, trunk: PackedPolicy | None = None
    ) -> None:
        self.trunk = trunk
        self._copies = options.tensor_parallel_size
        self._linear = nn.Linear(hidden, 1, device=device)
        nn.init.zeros_(self._linear.weight)
        nn.init.zeros_(self._linear.bias)
        self._parameters = dict(self._linear.named_parameters())
        rate = options.objective.value_learning_rate
        groups = [{"params": list(self._parameters.values()), "lr": rate or VALUE_STEP / hidden}]
        if trunk is not None:
            trunk.requires_grad_(False)  # a value does not depend on its output head
            inner = text_decoder(trunk.hugging_face).requires_grad_(True)
            self._parameters |= {f"trunk.{name}": parameter for name, parameter in inner.named_parameters()}
            groups.append({"params": list(inner.parameters()), "lr": rate or TRUNK_RATE})
        self._optimizer = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), weight_decay=0.0)
        # Moments exist from the start, so that a checkpoint always has the same tensors.
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
            zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            self._optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}

    def __call__(self, row: MicroBatch, hidden_ND: Tensor | None) -> Tensor:
        """Values before each predicted token, float32 [N]. ``hidden_ND``: hidden states of the policy; None with a
        ``trunk``."""
        if self.trunk is not None:
            hidden_ND = self.trunk(row)
        assert hidden_ND is not None
        # Without autocast, which would compute and return bfloat16.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            values_N: Tensor = self._linear(hidden_ND.float())[:, 0]
        return values_N

    def reduce(self) -> float:
        """Sum gradients over the ranks, and return their norm. Collective."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if get_world_size() > 1:
            for gradient in gradients:
                all_reduce(gradient)
                gradient.div_(self._copies)  # ranks with the same rows have the same gradient
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def step(self, scale: float, times: int = 1) -> None:
        """Take ``times`` optimizer steps with the gradient times ``scale``, and clear it."""
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        for _ in range(times):
            self._optimizer.step()
        self.clear_gradient()

    def clear_gradient(self) -> None:
        """Set gradients to 0 for the next batch."""
        self._optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint saves, as views: loading writes into them."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[f"critic.{name}"] = parameter.data
            tensors |= {f"critic.{name}.{key}": value for key, value in self._optimizer.state[parameter].items()}
        return tensors

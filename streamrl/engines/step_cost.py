"""Time of one decode step as a function of the running requests and their context.

The simulated engine (an engine process), the choice of the set of engines (``elastic.engine_sets``, controller) and
``streamrl simulate`` (the command's own process) share this model."""

from __future__ import annotations

from math import sqrt

from msgspec import Struct


class StepCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one decode step: ``base_s + per_running_s b + per_root_running_s sqrt(b) +
    per_context_token_s K`` for ``b`` running requests with ``K`` tokens of context in total."""

    base_s: float
    per_running_s: float
    per_context_token_s: float = 0.0
    per_root_running_s: float = 0.0

    def step_s(self, running: float, context: float = 0.0) -> float:
        """Return the seconds of a step of ``running`` requests with ``context`` tokens."""
        root_s = self.per_root_running_s * sqrt(running) if self.per_root_running_s else 0.0
        return self.base_s + self.per_running_s * running + root_s + self.per_context_token_s * context

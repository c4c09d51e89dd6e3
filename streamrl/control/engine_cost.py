"""What a round costs in seconds: a decode step by the requests that run, a request by its arrival, a round by its end.

    step = a + c * running            rollout = a * longest + c * tokens + arrival * requests + fixed

Two straight lines are fitted online by least squares with fading weights: the step from what the engines report, and
what is left of the rollout's wall time against its requests. With several engines ``running`` and ``tokens`` are those
of all of them together, so that c is the cost of one more request spread over all.
"""

from __future__ import annotations

import msgspec

from streamrl.control.events import EnginesMeasured, RoundTimed
from streamrl.control.length_prediction import FadingMean

_KEPT_PER_MEASUREMENT = 0.998  # a few hundred measurements, which is some dozens of rounds
_KEPT_PER_ROUND = 0.97
_RIDGE = 1e-3  # of the lines through rounds, whose loads may differ by a few percent only
_STEP_RIDGE = 1e-6  # of decode steps, which are measured at every load of a round
_FEWEST_MEASUREMENTS = 8


class FadingLine(msgspec.Struct, array_like=True):
    """Least squares of ``y = intercept + slope * x`` with fading weights.

    A little ridge decides what the observations leave open: where ``x`` hardly varies, the slope takes it all. Costs
    are then taken to grow with the load, so that a race, which adds load, is not chosen on a guess.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    count: int = 0

    def add(self, x: float, y: float, kept: float) -> None:
        """Take one observation; the earlier ones keep ``kept`` of their weight."""
        self.weight = self.weight * kept + 1
        self.x = self.x * kept + x
        self.y = self.y * kept + y
        self.xx = self.xx * kept + x * x
        self.xy = self.xy * kept + x * y
        self.count += 1

    def fit(self, ridge: float = _RIDGE) -> tuple[float, float]:
        """Intercept and slope; a slope below 0 is taken to be 0."""
        if self.weight == 0:
            return 0.0, 0.0
        ridge *= self.weight
        ww, xx = self.weight + ridge, self.xx + ridge
        slope = (ww * self.xy - self.x * self.y) / (ww * xx - self.x * self.x)
        if slope <= 0:
            return self.y / self.weight, 0.0
        return (xx * self.y - self.x * self.xy) / (ww * xx - self.x * self.x), slope


class RoundLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a round asked of the engines: its longest completion that was waited for, all tokens sampled in it, its
    requests, and the tokens of it that were trained."""

    longest: float
    tokens: float
    requests: float
    trained_tokens: float


class _State(msgspec.Struct):
    """What ``snapshot`` gives."""

    step: FadingLine
    arrivals: FadingLine
    training: FadingLine
    push: FadingMean


class EngineCost:
    """Learns from ``EnginesMeasured``, and from each round's load with its ``RoundTimed``."""

    def __init__(self) -> None:
        self._step = FadingLine()
        self._arrivals = FadingLine()
        self._training = FadingLine()
        self._push = FadingMean()

    @property
    def ready(self) -> bool:
        """Whether there is enough to predict from: some measurements and a round."""
        return self._step.count >= _FEWEST_MEASUREMENTS and self._arrivals.count > 0

    @property
    def step_s(self) -> float:
        """a: seconds of a decode step without load."""
        return max(self._step.fit(_STEP_RIDGE)[0], 0.0)

    @property
    def request_s(self) -> float:
        """c: seconds that one more running request adds to a decode step."""
        return self._step.fit(_STEP_RIDGE)[1]

    def observe_engines(self, seen: EnginesMeasured) -> None:
        """A measurement without running requests or without a step time says nothing."""
        if seen.token_s > 0 and seen.running > 0:
            self._step.add(seen.running, seen.token_s, _KEPT_PER_MEASUREMENT)

    def observe_round(self, load: RoundLoad, timed: RoundTimed) -> None:
        """A round of ``load`` took that long. Observe the engines first: what they explain is taken off."""
        decoding = self.step_s * load.longest + self.request_s * load.tokens
        self._arrivals.add(load.requests, timed.rollout_s - decoding, _KEPT_PER_ROUND)
        self._training.add(load.trained_tokens, timed.training_s, _KEPT_PER_ROUND)
        self._push.add(timed.push_s, 1 - _KEPT_PER_ROUND)

    def seconds(self, load: RoundLoad) -> float:
        """Expected wall time of a round of ``load``: rollout, exposed training, push."""
        fixed, arrival = self._arrivals.fit()
        rollout = self.step_s * load.longest + self.request_s * load.tokens + fixed + arrival * load.requests
        once, per_token = self._training.fit()
        return max(rollout, 0.0) + once + per_token * load.trained_tokens + self._push.mean

    def figures(self) -> dict[str, float]:
        """The constants, for an explanation: seconds."""
        fixed, arrival = self._arrivals.fit()
        return {"step_s": self.step_s, "request_s": self.request_s, "arrival_s": arrival, "fixed_s": fixed}

    def snapshot(self) -> dict[str, object]:
        """All that was learned, as values that msgspec encodes."""
        state = _State(step=self._step, arrivals=self._arrivals, training=self._training, push=self._push)
        built: dict[str, object] = msgspec.to_builtins(state)
        return built

    def restore(self, state: dict[str, object]) -> None:
        """The inverse: from here on this cost model answers as the one that gave ``state``."""
        known = msgspec.convert(state, _State)
        self._step, self._arrivals, self._training = known.step, known.arrivals, known.training
        self._push = known.push

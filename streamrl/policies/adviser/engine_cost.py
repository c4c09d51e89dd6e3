"""What a round costs in seconds: a decode step by the requests that run, a request by its arrival, a round by its end.

    step = a + c * running + d * sqrt(running)
    rollout = a * longest + c * tokens + d * root_tokens + arrival * requests + fixed

``root_tokens`` is the sum of the root of the running requests over the steps of the round, as ``tokens`` is the sum of
the requests themselves. The root is the simulator's (``simulate/engine_fit.py``): front end and small matrix products
make the first requests dearer than the later ones, and a straight line, fitted where rounds spend their time, then
promises the tail too little gain and a larger load too much cost. No constant is negative, so a step never gets
cheaper with load, and each further request never dearer than the one before.

The curve is fitted online by least squares with fading weights from what the engines report; what is left of the
rollout's wall time is fitted by a line against its requests. What neither explains is remembered for each kind of round
apart (``pace``): a race that takes longer than was promised is promised less afterwards. With several engines
``running`` and ``tokens`` are those of all of them together, so that c is the cost of one more request spread over all.
"""

from __future__ import annotations

import math
from itertools import combinations

import msgspec

from streamrl.control.events import EnginesMeasured, RoundTimed
from streamrl.policies.length_prediction import FadingMean

SHORT, LONG = "short", "long"
"""Kinds of round of a race: the race itself, and the one in which its losers are waited for."""

_KEPT_PER_MEASUREMENT = 0.998  # a few hundred measurements, which is some dozens of rounds
_KEPT_PER_ROUND = 0.97
_RIDGE = 1e-3  # of the lines through rounds, whose loads may differ by a few percent only
_STEP_RIDGE = 1e-6  # of decode steps, which are measured at every load of a round
_FEWEST_MEASUREMENTS = 8
_MOST_STEPS = 20.0  # a measurement weighs so many times the mean one at most
# More than so many times of what is expected is a hiccup of the machine, and counts as so much.
_SURPRISING_STEP = 4.0
_SURPRISING_ROUND = 2.0
_KEPT_PER_PACE = 0.9
_PACE_PRIOR = 4.0  # rounds that were as expected, before the first was seen
_SUPPORTS = [support for size in (1, 2, 3) for support in combinations(range(3), size)]


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


class StepCurve(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a decode step: ``base_s + per_running_s * running + per_root_running_s * sqrt(running)``."""

    base_s: float = 0.0
    per_running_s: float = 0.0
    per_root_running_s: float = 0.0

    def seconds(self, running: float) -> float:
        """Of one step."""
        return self.base_s + self.per_running_s * running + self.per_root_running_s * math.sqrt(running)


class FadingCurve(msgspec.Struct, array_like=True):
    """Least squares of a ``StepCurve`` without negative constants, with fading weights. Memory: ten numbers.

    ``products``: sums of the products of (1, x, sqrt x) with each other, rows of the symmetric matrix one after the
    other; ``moments``: of each of them with y. The ridge is that of ``FadingLine``, and to the same end: at one load
    alone, the largest of the three columns, which is x, takes nearly all.
    """

    products: list[float] = msgspec.field(default_factory=lambda: [0.0] * 9)
    moments: list[float] = msgspec.field(default_factory=lambda: [0.0] * 3)
    count: int = 0

    def add(self, x: float, y: float, weight: float, kept: float) -> None:
        """Take one observation of ``weight``; the earlier ones keep ``kept`` of theirs."""
        row = (1.0, x, math.sqrt(x))
        for i in range(3):
            for j in range(3):
                self.products[3 * i + j] = self.products[3 * i + j] * kept + weight * row[i] * row[j]
            self.moments[i] = self.moments[i] * kept + weight * row[i] * y
        self.count += 1

    @property
    def mean(self) -> float:
        """Weighted mean of y; 0 without observations."""
        return self.moments[0] / self.products[0] if self.products[0] else 0.0

    def fit(self) -> StepCurve:
        """Exact for three columns: the best of all supports whose constants are not negative."""
        ridge = _STEP_RIDGE * self.products[0]
        best, least = (0.0, 0.0, 0.0), 0.0
        for support in _SUPPORTS:
            found = _solve(
                [[self.products[3 * i + j] + ridge * (i == j) for j in support] for i in support],
                [self.moments[i] for i in support],
            )
            if min(found, default=-1.0) < 0:
                continue
            # The sum of squares at the solution, but for what does not depend on it.
            left = -sum(value * self.moments[i] for value, i in zip(found, support, strict=True))
            if left < least:
                least = left
                whole = [0.0, 0.0, 0.0]
                for value, i in zip(found, support, strict=True):
                    whole[i] = value
                best = (whole[0], whole[1], whole[2])
        return StepCurve(*best)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss without pivoting: the matrices are positive definite. Empty where one is not, numerically."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        if rows[i][i] <= 0:
            return []
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [high - factor * low for high, low in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found


class RoundLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a round asked of the engines: its longest completion that was waited for, all tokens sampled in it, the sum
    over its decode steps of the root of the running requests, its requests, and the tokens of it that were trained."""

    longest: float
    tokens: float
    root_tokens: float
    requests: float
    trained_tokens: float


class Pace(msgspec.Struct, array_like=True):
    """Seconds that rounds of one kind took, and that were expected of them before; fading."""

    taken_s: float = 0.0
    expected_s: float = 0.0
    rounds: float = 0.0

    def add(self, taken_s: float, expected_s: float) -> None:
        self.taken_s = self.taken_s * _KEPT_PER_PACE + taken_s
        self.expected_s = self.expected_s * _KEPT_PER_PACE + expected_s
        self.rounds = self.rounds * _KEPT_PER_PACE + 1

    @property
    def factor(self) -> float:
        """By which such rounds take longer than expected; few rounds say little."""
        if self.expected_s <= 0:
            return 1.0
        prior = _PACE_PRIOR * self.expected_s / self.rounds
        return (self.taken_s + prior) / (self.expected_s + prior)


class _State(msgspec.Struct):
    """What ``snapshot`` gives."""

    step: FadingCurve
    arrivals: FadingLine
    training: FadingLine
    push: FadingMean
    paces: dict[str, Pace]


class EngineCost:
    """Learns from ``EnginesMeasured``, and from each round's load with its ``RoundTimed``."""

    def __init__(self) -> None:
        self._step = FadingCurve()
        self._curve = StepCurve()
        self._arrivals = FadingLine()
        self._training = FadingLine()
        self._push = FadingMean()
        self._paces: dict[str, Pace] = {}

    @property
    def ready(self) -> bool:
        """Whether there is enough to predict from: some measurements and a round."""
        return self._step.count >= _FEWEST_MEASUREMENTS and self._arrivals.count > 0

    @property
    def step(self) -> StepCurve:
        """Of all engines together."""
        return self._curve

    def observe_engines(self, seen: EnginesMeasured) -> None:
        """A measurement without running requests or without a step time says nothing.

        Measurements come at equal intervals of time, so one weighs as many steps as it stands for: the total time of
        the steps is kept. By the *expected* time of a step, or chance would weigh with its own sign.
        """
        if seen.token_s <= 0 or seen.running <= 0:
            return
        token_s, weight = seen.token_s, 1.0
        if self._step.count >= _FEWEST_MEASUREMENTS:
            expected = self._curve.seconds(seen.running)
            token_s = min(token_s, _SURPRISING_STEP * expected)
            weight = min(self._step.mean / expected, _MOST_STEPS)
        self._step.add(seen.running, token_s, weight, _KEPT_PER_MEASUREMENT)
        self._curve = self._step.fit()

    def observe_round(self, load: RoundLoad, timed: RoundTimed, kind: str = "") -> None:
        """A round of ``load`` took that long. Observe the engines first: what they explain is taken off."""
        taken = timed.rollout_s + timed.training_s + timed.push_s
        rollout = timed.rollout_s
        if self._arrivals.count:
            expected = self._expected(load)
            surplus = max(taken - _SURPRISING_ROUND * expected, 0.0)
            rollout -= min(surplus, rollout)
            self._paces.setdefault(kind, Pace()).add(taken - surplus, expected)
        self._arrivals.add(load.requests, rollout - self._decoding(load), _KEPT_PER_ROUND)
        self._training.add(load.trained_tokens, timed.training_s, _KEPT_PER_ROUND)
        self._push.add(timed.push_s, 1 - _KEPT_PER_ROUND)

    def seconds(self, load: RoundLoad, kind: str = "") -> float:
        """Expected wall time of a round of ``load``: rollout, exposed training, push. ``kind``: of which rounds what is
        known of them apart is used."""
        return self._expected(load) * self._paces.get(kind, Pace()).factor

    def _decoding(self, load: RoundLoad) -> float:
        curve = self._curve
        return (
            curve.base_s * load.longest
            + curve.per_running_s * load.tokens
            + curve.per_root_running_s * load.root_tokens
        )

    def _expected(self, load: RoundLoad) -> float:
        fixed, arrival = self._arrivals.fit()
        rollout = self._decoding(load) + fixed + arrival * load.requests
        once, per_token = self._training.fit()
        return max(rollout, 0.0) + once + per_token * load.trained_tokens + self._push.mean

    def figures(self) -> dict[str, float]:
        """The constants, for an explanation: seconds, and the pace of each kind of round (1: as expected)."""
        fixed, arrival = self._arrivals.fit()
        curve = self._curve
        constants = {
            "step_s": curve.base_s,
            "request_s": curve.per_running_s,
            "root_request_s": curve.per_root_running_s,
            "arrival_s": arrival,
            "fixed_s": fixed,
        }
        return constants | {f"pace {kind}": pace.factor for kind, pace in sorted(self._paces.items()) if kind}

    def snapshot(self) -> dict[str, object]:
        """All that was learned, as values that msgspec encodes."""
        state = _State(
            step=self._step, arrivals=self._arrivals, training=self._training, push=self._push, paces=self._paces
        )
        built: dict[str, object] = msgspec.to_builtins(state)
        return built

    def restore(self, state: dict[str, object]) -> None:
        """The inverse: from here on this cost model answers as the one that gave ``state``."""
        known = msgspec.convert(state, _State)
        self._step, self._arrivals, self._training = known.step, known.arrivals, known.training
        self._push, self._paces = known.push, known.paces
        self._curve = self._step.fit()

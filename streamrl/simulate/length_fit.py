"""The distribution of lengths in a recorded run, as a ``LengthModel``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.observe.report.trajectory_trace import RecordedRun
from streamrl.simulate.lengths import LengthModel, recorded_rows

Floats = NDArray[np.float64]
MOST_PARTS = 3
NARROWEST = 0.05
"""Least standard deviation of the logarithms in a part: a spike of equal lengths is no distribution."""

_ROUNDS = 200
_NORMAL = NormalDist()


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """Normals of the logarithms of lengths, by ascending mean; ``log_likelihood`` of what they were fitted to."""

    weights: tuple[float, ...]
    mus: tuple[float, ...]
    sigmas: tuple[float, ...]
    log_likelihood: float

    def penalised(self, count: int) -> float:
        """Bayesian information criterion over ``count`` lengths: less is better."""
        return (3 * len(self.weights) - 1) * math.log(count) - 2 * self.log_likelihood


def fit_lengths(run: RecordedRun) -> LengthModel:
    """A mixture of log-normals below the cap (as many as the Bayesian information criterion allows: classes of prompts
    differ in length), a mass at the cap, and the correlation of two completions of a prompt."""
    cap = run.header.max_tokens
    rows = [[min(length, cap) for length in row] for row in recorded_rows(run)]
    lengths = np.array([length for row in rows for length in row], dtype=float)
    below = lengths < cap
    logs = np.log(lengths[below]) if below.any() else np.log(lengths)
    mixture = min(
        (_fitted(logs, parts) for parts in range(1, MOST_PARTS + 1)), key=lambda one: one.penalised(len(logs))
    )
    return LengthModel(
        cap=cap,
        weights=mixture.weights,
        mus=mixture.mus,
        sigmas=mixture.sigmas,
        cap_share=float(np.mean(~below)),
        correlation=_correlation(rows),
    )


def _fitted(logs: Floats, parts: int) -> Mixture:
    """By expectation maximisation, from parts of equal numbers of lengths."""
    quantiles = np.quantile(logs, (np.arange(parts) + 0.5) / parts)
    mus, sigmas = quantiles, np.full(parts, max(float(logs.std()) / parts, NARROWEST))
    weights = np.full(parts, 1 / parts)
    before = -math.inf
    for _ in range(_ROUNDS):
        densities = weights * np.exp(-0.5 * ((logs[:, None] - mus) / sigmas) ** 2) / (sigmas * math.sqrt(2 * math.pi))
        total = np.maximum(densities.sum(axis=1), 1e-300)
        likelihood = float(np.log(total).sum())
        if likelihood - before < 1e-6 * len(logs):
            break
        before = likelihood
        shares = densities / total[:, None]
        counts = np.maximum(shares.sum(axis=0), 1e-9)
        weights = counts / counts.sum()
        mus = (shares * logs[:, None]).sum(axis=0) / counts
        spread = (shares * (logs[:, None] - mus) ** 2).sum(axis=0) / counts
        sigmas = np.maximum(np.sqrt(spread), NARROWEST)
    order = np.argsort(mus)
    return Mixture(
        weights=tuple(weights[order].tolist()),
        mus=tuple(mus[order].tolist()),
        sigmas=tuple(sigmas[order].tolist()),
        log_likelihood=likelihood,
    )


def _correlation(rows: Sequence[Sequence[int]]) -> float:
    """Of two completions of a prompt, in normal scores, which is how ``LengthModel`` draws them: intraclass
    correlation by one way analysis of variance."""
    groups = [row for row in rows if len(row) > 1]
    if len(groups) < 2:
        return 0.0
    scores = _normal_scores(np.array([length for row in groups for length in row], dtype=float))
    sizes = np.array([len(row) for row in groups])
    parts = np.split(scores, np.cumsum(sizes)[:-1])
    means = np.array([part.mean() for part in parts])
    within = sum(float(((part - mean) ** 2).sum()) for part, mean in zip(parts, means, strict=True))
    within /= max(float(sizes.sum()) - len(groups), 1.0)
    between = float((sizes * (means - scores.mean()) ** 2).sum()) / (len(groups) - 1)
    size = (float(sizes.sum()) - float((sizes**2).sum() / sizes.sum())) / (len(groups) - 1)
    variance = max((between - within) / size, 0.0)
    return min(variance / max(variance + within, 1e-12), 0.99)


def _normal_scores(values: Floats) -> Floats:
    """The standard normal value of each rank; equal values share the mean of theirs."""
    ascending = np.sort(values)
    ranks = (np.searchsorted(ascending, values, "left") + np.searchsorted(ascending, values, "right")) / 2
    return np.array([_NORMAL.inv_cdf(share) for share in (ranks / len(values)).clip(1e-6, 1 - 1e-6).tolist()])

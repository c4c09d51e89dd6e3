"""Prediction of the longest completion of a group, before the group is launched.

``length_sorted`` rounds launch prompts in order of these predictions. Only the *order* matters, so the predictor learns
logarithms of lengths, in three nested averages:

1. the level of all recent groups, which follows a policy whose completions grow or shrink;
2. the offset of prompts with about as many tokens (a longer task often has a longer answer);
3. the offset of the prompt itself, from an earlier epoch or an attempt that was deferred.

An offset is shrunk towards the average above it. The offset of a prompt is shrunk by the share of the spread that a
prompt keeps from one attempt to the next, which is measured (the moment estimator of a random effect). Pure, without
clock or random numbers: the same observations give the same predictions."""

from __future__ import annotations

import math

from msgspec import Struct, field

PROMPTS_REMEMBERED = 65_536
"""Number of prompts with an offset of their own (about 10 MB). The prompt observed longest ago is forgotten first."""

_LEVEL_STEP = 0.01  # the level averages about the last 100 groups
_BUCKET_STEP = 0.02
_HISTORY_MOST = 5  # the offset of a prompt averages about this many attempts
_MOMENT_STEP = 0.01
_BUCKET_PRIOR = 4.0  # after this many observations the offset of a bucket counts by half
_BUCKETS_PER_OCTAVE = 8
_PRIOR_VARIANCE = 0.5  # variance of log lengths within a bucket, before any observation
_PRIOR_PERSISTENCE = 0.5  # share of the variance that belongs to the prompt, before any prompt was observed twice
_PRIOR_COUNT = 8  # weight of the two priors, in observations


class FadingMean(Struct, array_like=True):
    """Running mean that forgets old values: the first values have equal weights, each later one the weight ``step``."""

    mean: float = 0.0
    count: int = 0

    def add(self, value: float, step: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) * max(step, 1 / self.count)


class PromptLengthPredictor(Struct, kw_only=True):
    """Predictor that learns from groups that ended, in the order of the events. A call takes a few microseconds.

    Its fields have everything that it learnt, so that a decoded copy predicts the same. All lengths are logarithms.

    ``level``: mean of all groups;
    ``buckets``: offset from the level, by the bucket of a prompt's length;
    ``prompts``: offset from the bucket by prompt, in order of the last observation;
    ``variance``, ``persistent``: variance within a bucket, and the part of it that belongs to the prompt;
    ``longest``: longest completion of any group."""

    level: FadingMean = field(default_factory=FadingMean)
    buckets: dict[int, FadingMean] = {}
    prompts: dict[str, FadingMean] = {}
    variance: FadingMean = field(default_factory=lambda: FadingMean(_PRIOR_VARIANCE, _PRIOR_COUNT))
    persistent: FadingMean = field(
        default_factory=lambda: FadingMean(_PRIOR_VARIANCE * _PRIOR_PERSISTENCE, _PRIOR_COUNT)
    )
    longest: float = 0.0
    prompts_remembered: int = PROMPTS_REMEMBERED

    def predict(self, prompt_id: str, prompt_tokens: int) -> float:
        """Expected longest completion of a group of this prompt in tokens (a geometric mean); 0 before any observation.
        ``prompt_tokens``: length of the prompt, 0 when unknown."""
        return math.exp(self._log_length(prompt_id, prompt_tokens)) if self.level.count else 0.0

    def observe(self, prompt_id: str, prompt_tokens: int, longest: int, *, stopped: bool = False) -> None:
        """Learn from a group of the prompt, whose longest completion has ``longest`` tokens.

        ``stopped``: whether the group was stopped, so that its longest completion would have been *above* ``longest``.
        Such a group counts with the conditional mean of a normal log length above this bound; without it long prompts
        would seem short. The mean is limited to the longest length of any group so far: where every group is stopped,
        each mean would otherwise raise the next one without end."""
        bucket = _bucket(prompt_tokens)
        predicted = self._log_length(prompt_id, prompt_tokens)
        observed = math.log(max(longest, 1))
        self.longest = max(self.longest, observed)
        if stopped:
            mean = predicted if self.level.count else observed
            observed = min(_mean_above(observed, mean, math.sqrt(self.variance.mean)), self.longest)
        offset = self.prompts.pop(prompt_id, None)
        deviation = observed - self._expected(bucket)
        if self.level.count:
            self._learn_moments(deviation, offset)
            self.buckets.setdefault(bucket, FadingMean()).add(observed - self.level.mean, _BUCKET_STEP)
        self.level.add(observed, _LEVEL_STEP)
        offset = offset or FadingMean()
        offset.add(deviation, 1 / _HISTORY_MOST)
        self.prompts[prompt_id] = offset  # at the end: the order is that of the last observation
        if len(self.prompts) > self.prompts_remembered:
            del self.prompts[next(iter(self.prompts))]

    @property
    def persistence(self) -> float:
        """Share (0..1) of the variance of log lengths within a bucket that belongs to the prompt."""
        variance = self.variance.mean
        return min(max(self.persistent.mean / variance, 0.0), 1.0) if variance > 0 else 0.0

    def _expected(self, bucket: int) -> float:
        """Log length of an unknown prompt in ``bucket``."""
        offset = self.buckets.get(bucket)
        if offset is None:
            return self.level.mean
        return self.level.mean + offset.mean * offset.count / (offset.count + _BUCKET_PRIOR)

    def _log_length(self, prompt_id: str, prompt_tokens: int) -> float:
        expected = self._expected(_bucket(prompt_tokens))
        offset = self.prompts.get(prompt_id)
        if offset is None:
            return expected
        attempts = min(offset.count, _HISTORY_MOST)
        share = self.persistence
        return expected + offset.mean * attempts * share / (1 + (attempts - 1) * share)

    def _learn_moments(self, deviation: float, offset: FadingMean | None) -> None:
        """Learn the variance within a bucket and the part that two attempts at a prompt share. This part is the mean of
        the product of a deviation and the offset of earlier attempts, whatever the number of these attempts."""
        self.variance.add(deviation * deviation, _MOMENT_STEP)
        if offset is not None:
            self.persistent.add(deviation * offset.mean, _MOMENT_STEP)


def _bucket(prompt_tokens: int) -> int:
    """Number of a prompt's bucket by its length: one a token below 2 * 8 tokens, above that eight an octave."""
    if prompt_tokens < 2 * _BUCKETS_PER_OCTAVE:
        return prompt_tokens
    return 2 * _BUCKETS_PER_OCTAVE + int(_BUCKETS_PER_OCTAVE * math.log2(prompt_tokens / (2 * _BUCKETS_PER_OCTAVE)))


def _mean_above(bound: float, mean: float, deviation: float) -> float:
    """E[X | X > bound] of a normal X."""
    if deviation <= 0:
        return max(bound, mean)
    z = (bound - mean) / deviation
    share_above = 0.5 * math.erfc(z / math.sqrt(2))
    if share_above < 1e-9:  # far out in the tail the mean is just above the bound
        return bound + deviation / z
    return mean + deviation * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / share_above

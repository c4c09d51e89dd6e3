"""Prediction of a group's longest completion, made before the group is launched.

``length_sorted`` rounds launch prompts in order of it. Only the *order* matters there, so everything is learned on the
logarithm of the length, in three nested averages:

1. the level of all recent groups, which follows a policy whose completions grow or shrink;
2. the offset of prompts with about as many tokens (a longer task is often a longer answer);
3. the offset of the prompt itself when it was seen before (an earlier epoch, or an attempt that lost its race).

Each is shrunk towards the one above by what it has proved to be worth: the third by the share of the spread that a
prompt keeps from one attempt to the next, which is measured (the moment estimator of a random effect), never assumed.
Pure: no clock, no chance; the same observations give the same predictions."""

from __future__ import annotations

import math

import msgspec

PROMPTS_REMEMBERED = 65_536
"""Prompts with a history of their own; the one that was seen longest ago is forgotten first (about 10 MB)."""

_LEVEL_STEP = 0.01  # the level averages about the last 100 groups
_BUCKET_STEP = 0.02
_HISTORY_MOST = 5  # the offset of a prompt averages about so many attempts
_MOMENT_STEP = 0.01
_BUCKET_PRIOR = 4.0  # a bucket is believed by half once it was seen so often
_BUCKETS_PER_OCTAVE = 8
_PRIOR_VARIANCE = 0.5  # of log lengths within a bucket, before anything was seen
_PRIOR_PERSISTENCE = 0.5  # share of it that belongs to the prompt, before any prompt was seen twice
_PRIOR_COUNT = 8  # observations that the two priors weigh


class FadingMean(msgspec.Struct, array_like=True):
    """A running mean that forgets: the first values weigh equally, later ones ``step``."""

    mean: float = 0.0
    count: int = 0

    def add(self, value: float, step: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) * max(step, 1 / self.count)


class PromptLengthPredictor(msgspec.Struct, kw_only=True):
    """Learns from groups that ended, in the order of the events. Costs a few microseconds a call. Its fields are all
    that it learnt: a decoded copy answers as it does. ``level``, ``longest``: of logarithms of lengths; ``buckets``: by
    about how many tokens a prompt has; ``prompts``: in order of their last observation."""

    level: FadingMean = msgspec.field(default_factory=FadingMean)
    buckets: dict[int, FadingMean] = {}
    prompts: dict[str, FadingMean] = {}
    variance: FadingMean = msgspec.field(default_factory=lambda: FadingMean(_PRIOR_VARIANCE, _PRIOR_COUNT))
    persistent: FadingMean = msgspec.field(
        default_factory=lambda: FadingMean(_PRIOR_VARIANCE * _PRIOR_PERSISTENCE, _PRIOR_COUNT)
    )
    longest: float = 0.0
    prompts_remembered: int = PROMPTS_REMEMBERED

    def predict(self, prompt_id: str, prompt_tokens: int) -> float:
        """Expected longest completion of a group of this prompt in tokens (a geometric mean); 0 before any was seen.
        ``prompt_tokens``: 0 when unknown."""
        return math.exp(self._log_length(prompt_id, prompt_tokens)) if self.level.count else 0.0

    def observe(self, prompt_id: str, prompt_tokens: int, longest: int, *, cut: bool = False) -> None:
        """A group of the prompt ended with a longest completion of ``longest`` tokens.

        ``cut``: it was stopped, so that its longest completion is *above* ``longest``: the conditional mean of a
        normal log length above that point is learned in its place, since to ignore it would make long prompts look
        short. At most the longest length of any group so far: where every group is cut, each mean above a cut would
        raise the next one without end."""
        bucket = _bucket(prompt_tokens)
        predicted = self._log_length(prompt_id, prompt_tokens)
        observed = math.log(max(longest, 1))
        self.longest = max(self.longest, observed)
        if cut:
            mean = predicted if self.level.count else observed
            observed = min(_mean_above(observed, mean, math.sqrt(self.variance.mean)), self.longest)
        known = self.prompts.pop(prompt_id, None)
        deviation = observed - self._expected(bucket)
        if self.level.count:
            self._learn_moments(deviation, known)
            self.buckets.setdefault(bucket, FadingMean()).add(observed - self.level.mean, _BUCKET_STEP)
        self.level.add(observed, _LEVEL_STEP)
        known = known or FadingMean()
        known.add(deviation, 1 / _HISTORY_MOST)
        self.prompts[prompt_id] = known
        if len(self.prompts) > self.prompts_remembered:
            del self.prompts[next(iter(self.prompts))]

    @property
    def persistence(self) -> float:
        """Share of the spread of log lengths, among prompts of about one length, that belongs to the prompt: 0..1."""
        variance = self.variance.mean
        return min(max(self.persistent.mean / variance, 0.0), 1.0) if variance > 0 else 0.0

    def _expected(self, bucket: int) -> float:
        """Log length without knowing the prompt."""
        offset = self.buckets.get(bucket)
        if offset is None:
            return self.level.mean
        return self.level.mean + offset.mean * offset.count / (offset.count + _BUCKET_PRIOR)

    def _log_length(self, prompt_id: str, prompt_tokens: int) -> float:
        expected = self._expected(_bucket(prompt_tokens))
        known = self.prompts.get(prompt_id)
        if known is None:
            return expected
        attempts = min(known.count, _HISTORY_MOST)
        share = self.persistence
        return expected + known.mean * attempts * share / (1 + (attempts - 1) * share)

    def _learn_moments(self, deviation: float, known: FadingMean | None) -> None:
        """The variance around the bucket, and the part of it that two attempts at a prompt share. The product of two
        attempts' deviations has that part as its mean, however many attempts the older is of."""
        self.variance.add(deviation * deviation, _MOMENT_STEP)
        if known is not None:
            self.persistent.add(deviation * known.mean, _MOMENT_STEP)


def _bucket(prompt_tokens: int) -> int:
    """Prompts of about one length: below 2 * 8 tokens each length by itself, above that eight buckets an octave."""
    if prompt_tokens < 2 * _BUCKETS_PER_OCTAVE:
        return prompt_tokens
    return 2 * _BUCKETS_PER_OCTAVE + int(_BUCKETS_PER_OCTAVE * math.log2(prompt_tokens / (2 * _BUCKETS_PER_OCTAVE)))


def _mean_above(cut: float, mean: float, deviation: float) -> float:
    """E[X | X > cut] of a normal X."""
    if deviation <= 0:
        return max(cut, mean)
    z = (cut - mean) / deviation
    above = 0.5 * math.erfc(z / math.sqrt(2))
    if above < 1e-9:  # far out in the tail the mean is just beyond the cut
        return cut + deviation / z
    return mean + deviation * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / above

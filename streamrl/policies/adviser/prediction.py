"""What would a schedule bring? Goodput, bias and waiting of synchronous rounds and of races, in closed form.

With e = (prompts launched in a short round) / P0:

    t(round) = a * longest + c * tokens + d * root_tokens + arrivals + training + push
    time per P0 groups = (t_short + (e - 1) * t_long) / e

The longest completion of a short round is the P0-th smallest of e * P0 group maxima; that of a long round the largest
of P0 groups that lost. Groups of few prompts are far from their quantiles, so the expected order statistics are
taken, and the tokens of a group go with its maximum. Only prompts race here, not the responses of a prompt.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from streamrl.policies.adviser.engine_cost import LONG, SHORT, EngineCost, RoundLoad
from streamrl.policies.adviser.length_estimate import Curve, LengthEstimate
from streamrl.policies.adviser.load_profile import LoadProfile

_FEW_AGAIN = 8  # groups of long rounds, from which on what they have is believed
_PRIOR_PERSISTENCE = 0.8  # share of the excess tokens of a losing group that its prompt has again when drawn anew


class Form(StrEnum):
    """How rounds are formed, as far as there is a prediction for it."""

    SYNCHRONOUS = "synchronous"
    TAIL_BATCHING = "tail_batching"


class Schedule(msgspec.Struct, frozen=True):
    """A form of rounds with its constants.

    ``prompt_oversampling``: of a short round; ``long_batches``: batches that one long round trains.
    """

    form: Form = Form.SYNCHRONOUS
    prompt_oversampling: float = 1.0
    long_batches: int = 1

    @property
    def name(self) -> str:
        """For people and for the figures of an explanation: ``tail_batching 1.25``, ``tail_batching 1.25 x2``."""
        if self.form is Form.SYNCHRONOUS:
            return str(self.form)
        elastic = f" x{self.long_batches}" if self.long_batches > 1 else ""
        return f"{self.form} {self.prompt_oversampling:g}{elastic}"


class BatchShape(msgspec.Struct, frozen=True, kw_only=True):
    """P0 prompts of ``group_size`` trajectories a batch. ``replays``: losers are drawn with the same noise again."""

    prompts: int
    group_size: int
    replays: bool = True

    def launched(self, schedule: Schedule) -> int:
        """Groups of a short round."""
        return math.ceil(schedule.prompt_oversampling * self.prompts)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule brings in the long run.

    ``seconds``: per P0 trained groups; ``goodput``: trained tokens a second; ``length_share``: mean trained length
    over the unbiased one; ``generated``: tokens sampled per token trained; ``staleness``: optimizer steps, at most;
    ``wait``: optimizer steps from a prompt's first launch to its training, at most.
    """

    schedule: Schedule
    seconds: float
    goodput: float
    length_share: float
    generated: float
    staleness: int = 0
    wait: int = 0


def predict(schedule: Schedule, lengths: LengthEstimate, cost: EngineCost, shape: BatchShape) -> Prediction:
    """The closed form. Raises ``ValueError`` before any group was complete."""
    profile = LoadProfile(lengths, shape.group_size)
    if schedule.form is Form.TAIL_BATCHING and shape.launched(schedule) > shape.prompts:
        return _race(schedule, profile, cost, shape)
    return _synchronous(schedule, profile, cost, shape)


def _synchronous(schedule: Schedule, profile: LoadProfile, cost: EngineCost, shape: BatchShape) -> Prediction:
    groups = profile.lengths.groups
    tokens = shape.prompts * groups.mean_tokens
    load = RoundLoad(
        longest=groups.order_statistic(shape.prompts, shape.prompts),
        tokens=tokens,
        root_tokens=profile.expected(groups, shape.prompts, tokens),
        requests=shape.prompts * shape.group_size,
        trained_tokens=tokens,
    )
    seconds = cost.seconds(load, Form.SYNCHRONOUS)
    return Prediction(schedule=schedule, seconds=seconds, goodput=tokens / seconds, length_share=1.0, generated=1.0)


def _race(schedule: Schedule, profile: LoadProfile, cost: EngineCost, shape: BatchShape) -> Prediction:
    lengths, size, p0 = profile.lengths, shape.group_size, shape.prompts
    groups = lengths.groups
    launched = shape.launched(schedule)
    cut = groups.order_statistic(p0, launched)
    winners, losers = _raced(groups, p0, launched)
    won, share = winners.mean_tokens, p0 / launched
    lost = (groups.mean_tokens - share * won) / (1 - share)  # nothing is lost: the two make up all groups
    sampled = lengths.members.cut_mean(cut) * size * launched
    short = RoundLoad(
        longest=cut,
        tokens=sampled,
        root_tokens=profile.expected(groups, launched, sampled, cut=cut),
        requests=launched * size,
        trained_tokens=p0 * won,
    )
    long = _long_round(losers, lost, schedule.long_batches * p0, profile, shape)
    excess = launched / p0 - 1
    per_long = excess / schedule.long_batches
    seconds = (cost.seconds(short, SHORT) + per_long * cost.seconds(long, LONG)) / (1 + excess)
    trained = (short.trained_tokens + per_long * long.trained_tokens) / (1 + excess)
    generated = (short.tokens + per_long * long.tokens) / (1 + excess)
    return Prediction(
        schedule=schedule,
        seconds=seconds,
        goodput=trained / seconds,
        length_share=trained / (p0 * groups.mean_tokens),
        generated=generated / trained,
        wait=math.ceil(schedule.long_batches / excess),
    )


def _long_round(losers: Curve, lost: float, prompts: int, profile: LoadProfile, shape: BatchShape) -> RoundLoad:
    """``prompts`` groups of the curve of those that lost, of ``lost`` tokens each when they did."""
    tokens = prompts * _tokens_again(lost, profile.lengths, shape)
    return RoundLoad(
        longest=losers.order_statistic(prompts, prompts),
        tokens=tokens,
        root_tokens=profile.expected(losers, prompts, tokens),
        requests=prompts * shape.group_size,
        trained_tokens=tokens,
    )


def _raced(groups: Curve, winners: int, launched: int) -> tuple[Curve, Curve]:
    """The curves of groups that win and that lose a race of ``launched`` for ``winners`` places.

    A group at the ``u``-quantile loses when at least ``winners`` of the others are shorter: a binomial tail.
    """
    losing = []
    for share, below in zip(groups.shares, groups.below, strict=True):
        losing.append(_binomial_tail(winners, launched - 1, min(max(below - share / 2, 0.0), 1.0)))
    lost = [share * chance for share, chance in zip(groups.shares, losing, strict=True)]
    won = [share - part for share, part in zip(groups.shares, lost, strict=True)]
    return groups.weighted(won), groups.weighted(lost)


def _binomial_tail(least: int, count: int, chance: float) -> float:
    """P(at least ``least`` of ``count``)."""
    if least <= 0 or chance >= 1:
        return 1.0
    if chance <= 0 or least > count:
        return 0.0
    if least < count * chance:  # sum the side that falls from its first term: no term that counts underflows
        return 1.0 - _binomial_tail(count - least + 1, count, 1 - chance)
    log_term = (
        math.lgamma(count + 1)
        - math.lgamma(least + 1)
        - math.lgamma(count - least + 1)
        + least * math.log(chance)
        + (count - least) * math.log1p(-chance)
    )
    total, term, odds = 0.0, math.exp(log_term), chance / (1 - chance)
    for hits in range(least, count + 1):
        total += term
        term *= (count - hits) / (hits + 1) * odds
    return min(total, 1.0)


def _tokens_again(losing: float, lengths: LengthEstimate, shape: BatchShape) -> float:
    """Tokens of a group that lost and is sampled again: drawn anew it is shorter than what was cut, a bias."""
    if shape.replays:
        return losing
    if lengths.again.count >= _FEW_AGAIN:
        return min(lengths.again.mean, losing)
    mean = lengths.groups.mean_tokens
    return mean + _PRIOR_PERSISTENCE * (losing - mean)

"""What an evaluation says about a version: pure functions from outcomes to ``eval/held_out/*`` (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean

from streamrl.control.step_metrics import completion_metrics
from streamrl.stage_messages import EndedOutcome, Scored
from streamrl.types import ScoredTrajectory

SUCCESS_REWARD = 1.0
"""A sample with at least this total reward counts as solved in pass@k."""
ROUNDING = 1e-9
"""How much less it may be: weights of 0.7, 0.2 and 0.1 add up to 0.9999999999999999."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples solves a prompt, from ``samples`` >= k
    independent ones of which ``solved`` did: 1 - C(n - c, k) / C(n, k) (Codex, arXiv 2107.03374, equation 1)."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {solved} solved is not defined")
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def pass_sizes(samples: int) -> list[int]:
    """The k of pass@k that are reported: powers of two up to ``samples``, and ``samples`` itself."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()))})


def evaluation_metrics(
    outcomes: Iterable[EndedOutcome], samples: int, success_reward: float = SUCCESS_REWARD
) -> dict[str, float]:
    """Figures of an evaluation with ``samples`` completions of each prompt.

    avg@k: the mean over prompts of the mean reward of their samples. pass@j: the mean over prompts of ``pass_at_k``. A
    sample without a reward is counted as failed and is in neither; a prompt with fewer than j rewards is not in pass@j.
    """
    rewarded: list[ScoredTrajectory] = []
    failed = 0
    for outcome in outcomes:
        if isinstance(outcome, Scored) and isinstance(outcome.outcome, ScoredTrajectory):
            rewarded.append(outcome.outcome)
        else:
            failed += 1
    rewards = _rewards_by_prompt(rewarded)
    metrics = {"eval/held_out/prompts": float(len(rewards)), "eval/held_out/failed": float(failed)}
    if not rewarded:
        return metrics
    metrics[f"eval/held_out/avg@{samples}"] = fmean(fmean(values) for values in rewards)
    least = success_reward - ROUNDING
    for k in pass_sizes(samples):
        solved = [(len(values), sum(v >= least for v in values)) for values in rewards if len(values) >= k]
        if solved:
            metrics[f"eval/held_out/pass@{k}"] = fmean(pass_at_k(n, c, k) for n, c in solved)
    return metrics | {
        f"eval/held_out/{name.removeprefix('completion/')}": value
        for name, value in completion_metrics(rewarded).items()
        if name.startswith("completion/")
    }


def _rewards_by_prompt(rewarded: Sequence[ScoredTrajectory]) -> list[list[float]]:
    rewards: dict[int, list[float]] = {}
    for scored in rewarded:
        rewards.setdefault(scored.trajectory.id.group_id, []).append(scored.reward)
    return list(rewards.values())

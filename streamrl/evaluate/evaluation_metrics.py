"""What an evaluation says about a version: pure functions from outcomes to ``eval/held_out/*`` (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb, sqrt
from statistics import fmean, stdev

from streamrl.base.stage_messages import EndedOutcome, Scored
from streamrl.base.types import ScoredTrajectory
from streamrl.observe.report.step_metrics import completion_metrics

SUCCESS_REWARD = 1.0
"""A sample with at least this score counts as solved in pass@k."""
ROUNDING = 1e-9
"""How much less it may be: parts of 0.7, 0.2 and 0.1 add up to 0.9999999999999999."""


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
    outcomes: Iterable[EndedOutcome], samples: int, success_reward: float = SUCCESS_REWARD, *, reward: str = ""
) -> dict[str, float]:
    """Figures of an evaluation with ``samples`` completions of each prompt. ``reward``: the name of the reward that is
    the score (empty: the total), so that rewards which only shape training do not change it.

    avg@k: the mean over prompts of the mean score of their samples. pass@j: the mean over prompts of ``pass_at_k``. A
    sample without a reward is counted as failed and is in neither, nor is one that the named reward does not apply to;
    a prompt with fewer than j scores is not in pass@j.
    """
    rewarded: list[ScoredTrajectory] = []
    failed = 0
    for outcome in outcomes:
        if isinstance(outcome, Scored) and isinstance(outcome.outcome, ScoredTrajectory):
            rewarded.append(outcome.outcome)
        else:
            failed += 1
    scores = _scores_by_prompt(rewarded, reward)
    metrics = {"eval/held_out/prompts": float(len(scores)), "eval/held_out/failed": float(failed)}
    if not rewarded:
        return metrics
    for name in sorted({name for scored in rewarded for name in scored.reward_parts}):
        values = [scored.reward_parts[name] for scored in rewarded if name in scored.reward_parts]
        metrics[f"eval/held_out/func/{name}/mean"] = fmean(values)
    if scores:
        means = [fmean(values) for values in scores]
        metrics[f"eval/held_out/avg@{samples}"] = fmean(means)
        metrics["eval/held_out/standard_error"] = stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0
    least = success_reward - ROUNDING
    for k in pass_sizes(samples):
        solved = [(len(values), sum(v >= least for v in values)) for values in scores if len(values) >= k]
        if solved:
            metrics[f"eval/held_out/pass@{k}"] = fmean(pass_at_k(n, c, k) for n, c in solved)
    return metrics | {
        f"eval/held_out/{name.removeprefix('completion/')}": value
        for name, value in completion_metrics(rewarded).items()
        if name.startswith("completion/")
    }


def _scores_by_prompt(rewarded: Sequence[ScoredTrajectory], reward: str) -> list[list[float]]:
    scores: dict[int, list[float]] = {}
    for scored in rewarded:
        score = scored.reward_parts.get(reward) if reward else scored.reward
        if score is not None:
            scores.setdefault(scored.trajectory.id.group_id, []).append(score)
    return list(scores.values())

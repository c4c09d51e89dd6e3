"""Calls the rewards of a recipe once, as a run does: in child processes, with the same limits and checks of results.
The dry run calls it in the process of the command, since a function that can be imported may still return nothing."""

from __future__ import annotations

import anyio
from msgspec.structs import replace

from streamrl.base.types import (
    FinishReason,
    FloatArray,
    Prompt,
    RewardFailure,
    ScoredTrajectory,
    Segment,
    TextsByName,
    TokenArray,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.sections import Recipe
from streamrl.rewards.calls.reward_set import opened_rewards
from streamrl.rewards.scoring import Outcome

_MODELS = ("judge", "reward_model")
"""Built-in rewards that ask a model, which is not there before a run."""


def call_rewards(recipe: Recipe, prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Return the problems of rewards that fail for two completions of ``prompt`` (its answer and the empty one), and
    notes about those that fail for one of them. Rewards that ask a model, and those of an environment, are not called.
    Blocking: as long as the slowest reward, at most its time limit. Raises ``RecipeError`` for a reward that cannot be
    loaded."""
    rewards = [replace(reward, retries=0) for reward in recipe.rewards if reward.function not in _MODELS]
    rewards = [reward for reward in rewards if not prompt.rewards or reward.label in prompt.rewards]
    if recipe.environment.configured or not rewards:
        return [], []
    answer = prompt.columns.get("answer")
    text = answer if isinstance(answer, str) and answer else "1"
    texts = {f"the completion {text!r:.80}": text, "an empty completion": ""}
    end = tokenizer.eos_token_ids[:1]
    trajectories = [
        trajectory_of(prompt, token_array([*tokenizer.encode_fragment(completion), *end]), sample=sample)
        for sample, completion in enumerate(texts.values())
    ]

    async def score() -> tuple[Outcome, ...]:
        async with opened_rewards(rewards, recipe.reward_limits, tokenizer) as reward_set:
            return await reward_set.score(trajectories)

    failures: dict[str, TextsByName] = {}
    outcomes = anyio.run(score)
    for completion, outcome in zip(texts, outcomes, strict=True):
        for name, failure in _failures(outcome).items():
            failures.setdefault(name, {})[completion] = failure
    problems = []
    valued = {call.function for outcome in outcomes for call in outcome.calls if call.value is not None}
    silent = [reward.label for reward in rewards if reward.label not in {*valued, *failures}]
    notes = [f'the reward "{name}" returns no value (None) for the first row: it is left out there' for name in silent]
    values = [outcome.reward for outcome in outcomes if isinstance(outcome, ScoredTrajectory)]
    settings = recipe.objective_settings
    if len(rewards) == len(recipe.rewards) and settings.estimator.positive_rewards and min(values, default=0.0) < 0:
        problems.append(
            f"rewards: a completion of the first row has the reward {min(values):g}, and objective.advantages = "
            f'"{settings.advantages}" divides by the mean reward: give rewards of 0 or more, or set "group_std"'
        )
    for name, by_completion in failures.items():
        completion, failure = next(iter(by_completion.items()))
        sentence = f'the reward "{name}" fails for {completion} of the first row ({failure})'
        if len(by_completion) == len(texts):
            problems.append(f"rewards: {sentence}: correct it; `streamrl reward test` calls it alone")
        else:
            notes.append(f"{sentence}: such a completion is not trained")
    return problems, notes


def trajectory_of(
    prompt: Prompt,
    token_ids: TokenArray,
    *,
    group: int = 0,
    sample: int = 0,
    finish_reason: FinishReason = FinishReason.STOP,
    logprobs: FloatArray | None = None,
) -> Trajectory:
    """Return a trajectory of one turn, for a reward that is called outside of a run. ``logprobs``: logprobs of
    the tokens, float32 [T] (None: zeros)."""
    logprobs = float_array([0.0]) * len(token_ids) if logprobs is None else logprobs
    return Trajectory(
        id=TrajectoryId(prompt_id=prompt.prompt_id, group_id=group, sample=sample),
        prompt=prompt,
        segments=(Segment(token_ids=token_ids, trained=True, behavior_logprobs=logprobs),),
        finish_reason=finish_reason,
    )


def _failures(outcome: Outcome) -> TextsByName:
    """Return the failure of each reward that failed, by its name. The reason is known of the first one."""
    failures = {call.function: call.failure.value for call in outcome.calls if call.failure}
    if isinstance(outcome, RewardFailure):
        failures[outcome.function] = f"{outcome.kind.value}: {outcome.message}"
    return failures

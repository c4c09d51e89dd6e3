"""Rules of ``[[rewards]]``, ``[reward_limits]`` and ``[judge]``."""

from __future__ import annotations

from streamrl.recipe.judge import CALLS_AT_ONCE, JUDGE_REWARD, Judge, asks_own_judge
from streamrl.recipe.problems import short_toml
from streamrl.recipe.rewards import COMBINE_SEPARATE, COMBINE_WEIGHTS, FailurePolicy, Reward
from streamrl.recipe.rules.engine_rules import are_cores
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, rule, unless
from streamrl.recipe.sections import Recipe

has_no_effect(
    " ".join(f"judge.{name}" for name in Judge.__struct_fields__ if name != "model"),
    unless(lambda recipe: recipe.judge.model, " without judge.model: name a model, or remove it"),
)


@rule("rewards.function", "rewards.name")
def rewards_are_named(recipe: Recipe) -> Broken:
    """Every reward must name a function or a built-in reward, and have a name of its own for metrics."""
    if not recipe.rewards:
        yield Problem(
            "rewards", 'is empty: add [[rewards]] with function = "module:function" or "path/to/file.py:function"'
        )
    for index, reward in enumerate(recipe.rewards):
        module, colon, function = reward.function.rpartition(":")
        if (colon and not module) or not function.isidentifier():
            yield Problem(
                f"rewards.{index}.function",
                f'"{reward.function}" does not name a function: write "module:function", '
                '"path/to/file.py:function" or the name of a built-in reward',
            )
    names = [reward.label for reward in recipe.rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(
                f"rewards.{index}.function",
                f'"{name}" is the name of an earlier reward too, so their metrics would mix: give one of them '
                'another name = "..."',
            )
        if "/" in name:
            yield Problem(f"rewards.{index}.name", f'"{name}" would break the names of metrics: write it without "/"')


@rule("rewards.weight", "rewards.shadow")
def some_reward_counts(recipe: Recipe) -> Broken:
    """At least one reward must be trained."""
    trained = [reward for reward in recipe.rewards if not reward.shadow]
    if recipe.rewards and not trained:
        yield Problem(
            "rewards", "every reward is a shadow, so there is nothing to train on: set shadow = false for one"
        )
    elif recipe.rewards and all(reward.weight == 0 for reward in trained):
        yield Problem(
            "rewards", "every weight is 0, so every reward would be 0: give at least one a weight that is not 0"
        )


@rule("rewards")
def limits_fit(recipe: Recipe) -> Broken:
    """The smallest adaptive limit must not exceed the time limit."""
    for index, reward in enumerate(recipe.rewards):
        adaptive = reward.adaptive_timeout
        if adaptive is not None and adaptive.min_s > reward.timeout_s:
            yield Problem(
                f"rewards.{index}.adaptive_timeout",
                f"min_s = {adaptive.min_s:g} is above the ceiling timeout_s = {reward.timeout_s:g}, so "
                "nothing adapts: lower the floor, or raise the ceiling",
            )


@rule("rewards")
def failures_have_one_meaning(recipe: Recipe) -> Broken:
    """A late call is either wrong, with a value, or failed; a failure of a shadow reward has no policy."""
    for index, reward in enumerate(recipe.rewards):
        if reward.late_is_wrong and reward.on_timeout is not None:
            yield Problem(
                f"rewards.{index}.on_timeout",
                f'"{reward.on_timeout}" never happens with late_is_wrong = true, where a late call has the value '
                f"{reward.wrong_value:g}: leave one of them out",
            )
        if reward.wrong_value and not reward.late_is_wrong:
            yield Problem(
                f"rewards.{index}.wrong_value",
                f"{reward.wrong_value:g} has no effect without late_is_wrong = true: set that, or leave it out",
            )
        policies = {reward.on_failure, reward.on_timeout} - {None, FailurePolicy.DROP_SAMPLE}
        if reward.shadow and policies:
            yield Problem(
                f"rewards.{index}.on_failure",
                f'"{policies.pop()}" on a shadow reward, whose failures are only counted: leave it out',
            )


@rule("rewards", "reward_limits.combine", "objective")
def combination(recipe: Recipe) -> Broken:
    """``combine`` must name a way to combine rewards, or a function."""
    combine = recipe.reward_limits.combine
    if combine == COMBINE_WEIGHTS:
        return
    if combine == COMBINE_SEPARATE:
        settings = recipe.objective_settings
        if not settings.estimator.compares_siblings:
            yield Problem(
                "reward_limits.combine",
                f'"{combine}" compares siblings, and objective.advantages = "{settings.advantages}" does not: '
                f'write combine = "{COMBINE_WEIGHTS}", or advantages = "group_std"',
            )
        return
    module, colon, function = combine.rpartition(":")
    if not colon or not module or not function.isidentifier():
        yield Problem(
            "reward_limits.combine",
            f'"{combine}" is no way to combine rewards: write "{COMBINE_WEIGHTS}", "{COMBINE_SEPARATE}", '
            'or a function as "module:function"',
        )


@rule("rewards", "judge")
def judges_are_there(recipe: Recipe) -> Broken:
    """A reward that sends questions needs a judge, and a judge needs such a reward."""
    asking = [index for index, reward in enumerate(recipe.rewards) if asks_own_judge(reward)]
    if recipe.judge.model:
        if not asking:
            yield Problem(
                "judge.model",
                f'{short_toml(recipe.judge.model)} is asked by nobody: add a reward with function = "{JUDGE_REWARD}" '
                "that names no endpoint, or leave [judge] out",
            )
        return
    for index in asking:
        yield Problem(
            f"rewards.{index}.options",
            f'function = "{JUDGE_REWARD}" has nobody to ask: set endpoint in [rewards.options], such as '
            '"http://host:8000/v1", or model in [judge], which this run then starts itself',
        )


@rule("rewards", "judge")
def questions_come_in_time(recipe: Recipe) -> Broken:
    """The longest wait of a question, for a batch or for the actor, must end before the time limit of its reward."""
    judge = recipe.judge
    if not judge.model:
        return
    if judge.batch_wait_s > judge.max_wait_s:
        yield Problem(
            "judge.batch_wait_s",
            f"{judge.batch_wait_s:g} is above max_wait_s = {judge.max_wait_s:g}: lower it, or raise that",
        )
    for index, reward in enumerate(recipe.rewards):
        if asks_own_judge(reward) and reward.timeout_s <= judge.max_wait_s:
            yield Problem(
                f"rewards.{index}.timeout_s",
                f"{reward.timeout_s:g} is over before a question that may wait for judge.max_wait_s = "
                f"{judge.max_wait_s:g} is asked: raise it, or lower max_wait_s",
            )


@rule("rewards", "judge", "reward_limits")
def batches_come_together(recipe: Recipe) -> Broken:
    """A batch of the judge must not exceed the number of calls that can be open at once."""
    judge = recipe.judge
    limits = recipe.reward_limits
    asking = [reward for reward in recipe.rewards if asks_own_judge(reward)]
    if not judge.model or not asking:
        return
    calls = [min(reward.concurrency or limits.concurrency, _open_questions(reward)) for reward in asking]
    at_once = limits.workers * sum(calls)
    if judge.batch > at_once:
        yield Problem(
            "judge.batch",
            f"{judge.batch} questions never wait at once, because its rewards have {at_once} calls at once: "
            "lower it, or raise concurrency in [reward_limits] and in the reward's options",
        )


def _open_questions(reward: Reward) -> int:
    """Limit of the open questions of a judge reward in each worker."""
    concurrency = reward.options.get("concurrency", CALLS_AT_ONCE)
    return concurrency if isinstance(concurrency, int) else CALLS_AT_ONCE


@rule("judge")
def judge_cores(recipe: Recipe) -> Broken:
    """``cores`` must be a list of cores; it sets the number of threads, too."""
    judge = recipe.judge
    if judge.cores and not are_cores(judge.cores):
        yield Problem("judge.cores", f'"{judge.cores}" is not a list of cores: write "0", "0-3" or "0,2,4-7"')
    if judge.cores and judge.threads:
        yield Problem(
            "judge.threads", f"{judge.threads} beside judge.cores, which say how many there are: leave one out"
        )

"""Rules of ``[[rewards]]``, ``[reward_limits]`` and ``[judge]``, and those that ``[teacher]`` has in common with it."""

from __future__ import annotations

from streamrl.recipe.objectives.distillation import NO_REWARD
from streamrl.recipe.problems import short_toml
from streamrl.recipe.rewards import COMBINE_SEPARATE, COMBINE_WEIGHTS, FailurePolicy, Reward, RewardCredit
from streamrl.recipe.rules.engine_rules import are_cores
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, rule, unless
from streamrl.recipe.sections import Recipe
from streamrl.recipe.served_models import CALLS_AT_ONCE, JUDGE_REWARD, Judge, asks_own_judge, compares_siblings
from streamrl.recipe.topology import Role, served_models

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


@rule("rewards", "objective", "prompts.train")
def some_reward_counts(recipe: Recipe) -> Broken:
    """At least one reward must be trained, and of each set that names its rewards."""
    trained = [reward for reward in recipe.rewards if not reward.shadow]
    taught = recipe.objective_settings.distils or not recipe.objective_settings.estimator.of_rewards
    zero = {reward.label for reward in trained if reward.weight == 0 or (reward.function == NO_REWARD and not taught)}
    if recipe.rewards and not trained:
        yield Problem(
            "rewards", "every reward is a shadow, so there is nothing to train on: set shadow = false for one"
        )
    elif recipe.rewards and len(zero) == len(trained):
        yield Problem(
            "rewards",
            f'every weight is 0, or the reward "{NO_REWARD}" without a teacher, so every reward would be 0: give at '
            "least one a weight that is not 0",
        )
    elif not taught:
        for name, training_set in recipe.prompts.sets.items():
            counted = {reward.label for reward in trained if reward.label in training_set.rewards}
            if counted and counted <= zero:
                text = f"has only {', '.join(sorted(counted))}, which is always 0: add a reward with a weight"
                yield Problem(f"prompts.train.{name}.rewards", text)


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


@rule("rewards.credit", "reward_limits.combine", "objective")
def numbers_reach_their_tokens(recipe: Recipe) -> Broken:
    """Numbers of steps and tokens need a method that compares siblings within their group, and does not change
    advantages with the batch; nothing may make one number of them."""
    settings = recipe.objective_settings
    combine = recipe.reward_limits.combine
    for index, reward in enumerate(recipe.rewards):
        if reward.credit is RewardCredit.COMPLETION:
            continue
        key = f"rewards.{index}.credit"
        credit = f'"{reward.credit}" gives numbers to {reward.credit}'
        estimator = settings.estimator
        if estimator.whole_batch or estimator.positive_rewards or not estimator.compares_siblings:
            yield Problem(
                key,
                f'{credit}, and objective.advantages = "{settings.advantages}" takes one reward a completion: set '
                'advantages = "group_std", or credit = "completion"',
            )
        if settings.token_surrogate.whole_sequences:
            yield Problem(
                key,
                f'{credit}, which objective.surrogate = "{settings.surrogate}" averages over the trajectory: set '
                'surrogate = "token_clip", or credit = "completion"',
            )
        if combine not in (COMBINE_WEIGHTS, COMBINE_SEPARATE):
            yield Problem(
                key,
                f'{credit}, and reward_limits.combine = "{combine}" makes one number of them: set combine = '
                f'"{COMBINE_WEIGHTS}", or credit = "completion"',
            )
        if reward.late_is_wrong:
            yield Problem(
                f"rewards.{index}.late_is_wrong",
                f'true gives a completion one number, and credit = "{reward.credit}": remove one of them',
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


@rule("rewards", "rollout.group_size", "rollout.prompts_per_batch", "group_sizing", "evaluation", "prompts.train")
def judged_siblings_and_steps(recipe: Recipe) -> Broken:
    """A judge that compares needs siblings, also where it is the score of held-out prompts, and one that judges steps
    gives numbers to them."""
    key_of_size = "group_sizing.sizes has 1" if recipe.group_sizing.varies else "rollout.group_size = 1"
    for index, reward in enumerate(recipe.rewards):
        key = f"rewards.{index}.options"
        if compares_siblings(reward) and any(size < 2 for _, size in recipe.batch_shapes):
            yield Problem(key, f"compare needs siblings, and {key_of_size}: raise it, or remove compare")
        judges_steps = reward.function == JUDGE_REWARD and bool(reward.options.get("steps"))
        if judges_steps and reward.credit is not RewardCredit.STEPS:
            yield Problem(key, 'steps gives numbers to steps: set credit = "steps" below [rewards.advanced]')
    for name in recipe.evaluation.sets:
        score = recipe.score_of(name)
        if score and compares_siblings(score) and recipe.evaluation.samples < 2:
            text = f'1 has no siblings, and "{score.label}", the score of {name}, compares them: raise it to 2 or more'
            yield Problem("evaluation.samples", f"{text}, or name a reward that does not in evaluation.reward")
            return


@rule("rewards", "judge", "teacher")
def questions_come_in_time(recipe: Recipe) -> Broken:
    """The longest wait of a question, for a batch or for the actor, must end before the time limit of who asks."""
    limits: dict[Role, dict[str, float]] = {Role.JUDGE: {}, Role.TEACHER: {}}
    limits[Role.TEACHER]["teacher.timeout_s"] = recipe.teacher.timeout_s
    for index, reward in enumerate(recipe.rewards):
        if asks_own_judge(reward):
            limits[Role.JUDGE][f"rewards.{index}.timeout_s"] = reward.timeout_s
    for role, settings in served_models(recipe).items():
        if settings.batch_wait_s > settings.max_wait_s:
            yield Problem(
                f"{role}.batch_wait_s",
                f"{settings.batch_wait_s:g} is above max_wait_s = {settings.max_wait_s:g}: lower it, or raise that",
            )
        for key, timeout_s in limits[role].items():
            if timeout_s <= settings.max_wait_s:
                yield Problem(
                    key,
                    f"{timeout_s:g} is over before a question that may wait for {role}.max_wait_s = "
                    f"{settings.max_wait_s:g} is asked: raise it, or lower max_wait_s",
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


@rule("judge", "teacher")
def cores_of_served_models(recipe: Recipe) -> Broken:
    """``cores`` must be a list of cores; it sets the number of threads, too."""
    for role, settings in served_models(recipe).items():
        if settings.cores and not are_cores(settings.cores):
            yield Problem(f"{role}.cores", f'"{settings.cores}" is not a list of cores: write "0", "0-3" or "0,2,4-7"')
        if settings.cores and settings.threads:
            yield Problem(
                f"{role}.threads",
                f"{settings.threads} beside {role}.cores, which say how many there are: leave one out",
            )

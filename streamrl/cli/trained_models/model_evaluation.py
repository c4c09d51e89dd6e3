"""The held-out evaluation of any model, without a trainer. Called by ``streamrl eval`` in the command's own process,
which starts one engine; ``reward test`` and ``try`` use ``started_engine`` alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import anyio
from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import EngineError, raise_problems
from streamrl.base.notifier import Notifier
from streamrl.base.run_process import redirected
from streamrl.base.stage_messages import EndedOutcome, Scored
from streamrl.base.types import Metrics, ScoredTrajectory, Trajectory, TrajectoryId
from streamrl.contracts import Journal, Sampler, WatchedEngine
from streamrl.engines.vllm.options import max_model_len, model_config
from streamrl.launch.roles import engine_of
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.sections import Evaluation, Recipe
from streamrl.recipe.topology import ProcessPlan, Role
from streamrl.rewards.calls.reward_set import RewardSet, opened_rewards
from streamrl.rewards.signature import needed_columns
from streamrl.run.environments.local_worker import local_worker
from streamrl.run.evaluate.evaluation import EvaluationRun, HeldOut, read_held_out, scores_by_prompt, values_by_prompt
from streamrl.run.prompts.open_prompts import check_prompts
from streamrl.run.prompts.prompt_spec import columns_of_set, environment_writes, held_out_sources
from streamrl.stages.environment import EnvironmentStage
from streamrl.stages.episodes import Episode, Episodes, completion_or, one_completion

_WIDTH = NormalDist().inv_cdf(0.975)
OnCompletion = Callable[[EvaluationRun], None]
"""Called after each completion with the evaluation of that completion."""


class ScoreOfPrompts(Struct, frozen=True):
    """A mean over prompts and its 95 % interval over prompts (None: one prompt has none)."""

    value: float
    low: float | None
    high: float | None


class EvaluationPass(Struct, frozen=True, kw_only=True):
    """``samples`` completions of each prompt at ``temperature``. ``scores``: ``avg@k`` and ``pass@j`` of each held-out
    set; ``figures``: metrics of an evaluation of a run (docs/metrics.md)."""

    samples: int
    temperature: float
    scores: dict[str, dict[str, ScoreOfPrompts]]
    figures: Metrics


EvaluatedPass = tuple[EvaluationPass, Sequence[EndedOutcome]]


async def evaluate_model(
    recipe: Recipe,
    version: int,
    tokenizer: Tokenizer,
    *,
    greedy: bool,
    on_start: Callable[[], None],
    on_completion: OnCompletion,
) -> list[EvaluatedPass]:
    """Evaluate the model of ``recipe`` on the first ``evaluation.limit`` prompts of its held-out sets (0: all): with
    ``evaluation.samples`` completions of each, and if ``greedy`` with the likeliest one. Prompts, seeds and rewards are
    those of an evaluation of ``version`` in a run. ``on_start`` is called before the engine starts. Returns each pass
    with its outcomes. Raises ``RecipeError`` for prompts and rewards that cannot be used, ``EngineError`` where the
    engine does not start or dies."""
    passes = [recipe.evaluation]
    if greedy:
        passes.append(replace(recipe.evaluation, samples=1, temperature=0.0))
    longest = max_model_len(recipe, model_config(recipe.model.path)) - recipe.sampling.max_tokens
    async with opened_rewards(recipe.rewards, recipe.reward_limits, tokenizer) as rewards:
        columns = needed_columns(rewards.signatures)
        problems = []
        for name, source in held_out_sources(recipe).items():
            settings = recipe.settings_of_held_out(name)
            reader = None if environment_writes(recipe, settings) else tokenizer
            problems += check_prompts(source, reader, columns_of_set(recipe, settings, columns), longest)
        raise_problems(problems)
        held_out = await read_held_out(recipe, tokenizer, in_flight=recipe.engines.max_num_seqs)
        limited = {"every": 1, "limit": recipe.evaluation.limit}  # the limits of sets apply to the steps of a run
        sets = {name: (replace(settings, **limited), size) for name, (settings, size) in held_out.sets.items()}
        held_out = replace(held_out, sets=sets)
        on_start()
        async with started_engine(recipe) as engine, _episode(recipe, tokenizer) as episode:
            return [
                await _pass(
                    recipe, replace(held_out, settings=settings), version, engine, rewards, on_completion, episode
                )
                for settings in passes
            ]


@contextlib.asynccontextmanager
async def _episode(recipe: Recipe, tokenizer: Tokenizer) -> AsyncIterator[Episode]:
    """The episode of a recipe, whose environment runs in this process."""
    if not recipe.environment.configured:
        yield one_completion
        return
    async with anyio.create_task_group() as nursery:
        stage = EnvironmentStage([partial(local_worker, recipe.environment, tokenizer, nursery)])
        async with stage.running():
            yield completion_or(stage.episode)


class _RewardsHere:
    """A ``Scorer`` of functions in this process. Functions of groups score all siblings, once the last one has ended:
    ``siblings`` has those that wait, by group, with None for one that is lost."""

    def __init__(self, rewards: RewardSet) -> None:
        self._rewards = rewards
        self._siblings: defaultdict[int, list[Trajectory | None]] = defaultdict(list)
        self._scored: dict[TrajectoryId, Scored] = {}
        self._changed = Notifier()

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        await self._member_ended(trajectory.id, trajectory, group_size)
        while trajectory.id not in self._scored:
            await self._changed.wait()
        return self._scored.pop(trajectory.id)

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None:
        await self._member_ended(trajectory, None, group_size)

    async def _member_ended(self, identity: TrajectoryId, trajectory: Trajectory | None, group_size: int) -> None:
        siblings = self._siblings[identity.group_id]
        siblings.append(trajectory)
        if self._rewards.per_group and len(siblings) < group_size:
            return
        del self._siblings[identity.group_id]
        sampled = [sibling for sibling in siblings if sibling is not None]
        if sampled:
            for outcome in await self._rewards.score(sampled):
                self._scored[outcome.trajectory.id] = Scored(outcome=outcome)
            self._changed.notify()


async def _pass(
    recipe: Recipe,
    held_out: HeldOut,
    version: int,
    engine: Sampler,
    rewards: RewardSet,
    on_completion: OnCompletion,
    episode: Episode,
) -> EvaluatedPass:
    """Run the episodes of one pass, as a run does but without a controller."""
    settings = held_out.settings
    sampling = recipe.sampling
    evaluation = EvaluationRun(held_out, version, limit=settings.limit, seed=recipe.run.seed)
    episodes = Episodes(engine, sampling, _RewardsHere(rewards), Journal(), episode=episode)

    async def progressed() -> None:
        on_completion(evaluation)

    async with episodes.running():
        figures = await evaluation.run(episodes, progressed)
    scores = {}
    for name, numbers in evaluation.sets.items():
        trajectories = [
            end.outcome
            for end in evaluation.outcomes_of(numbers)
            if isinstance(end, Scored) and isinstance(end.outcome, ScoredTrajectory)
        ]
        scores[name] = scores_of(scores_by_prompt(trajectories, held_out.scores.get(name, "")), settings)
    temperature = sampling.temperature if settings.temperature is None else settings.temperature
    result = EvaluationPass(samples=settings.samples, temperature=temperature, scores=scores, figures=figures)
    return result, evaluation.outcomes


def scores_of(by_prompt: Sequence[Sequence[float]], settings: Evaluation) -> dict[str, ScoreOfPrompts]:
    """``avg@k`` and ``pass@1``, ``pass@2`` ... ``pass@k`` of the scores of each prompt, with their intervals."""
    metrics = values_by_prompt(by_prompt, settings.samples, settings.success_reward)
    return {name: _score_of(values) for name, values in metrics.items()}


def _score_of(values: Sequence[float]) -> ScoreOfPrompts:
    """Return the mean of one value a prompt with its interval: Wilson's where all values are 0 or 1, so that 20 of 20
    is not certain; else by the standard error of the mean."""
    mean = fmean(values)
    count = len(values)
    if set(values) <= {0.0, 1.0}:
        scale = 1 + _WIDTH**2 / count
        spread = mean * (1 - mean) / count + _WIDTH**2 / (4 * count**2)
        middle = (mean + _WIDTH**2 / (2 * count)) / scale
        half = _WIDTH * sqrt(spread) / scale
        return ScoreOfPrompts(mean, max(middle - half, 0.0), min(middle + half, 1.0))
    if count == 1:
        return ScoreOfPrompts(mean, None, None)
    half = _WIDTH * stdev(values) / sqrt(count)
    return ScoreOfPrompts(mean, mean - half, mean + half)


@contextlib.asynccontextmanager
async def started_engine(recipe: Recipe) -> AsyncIterator[WatchedEngine]:
    """An engine of ``recipe``, vLLM's or a simulated one, with the weights of the model's folder, open for the block.
    Its own output is shown only where it fails. Raises ``RecipeError`` for a model that cannot be used, ``EngineError``
    when it does not start or dies."""
    single = replace(recipe, engines=replace(recipe.engines, count=1, sets=()))
    with tempfile.TemporaryDirectory(prefix="streamrl-") as sockets, tempfile.TemporaryFile("w+") as output:
        engine = engine_of(single, ProcessPlan(role=Role.ENGINE, index=0), Path(sockets))
        try:
            with redirected(1, output.fileno()), redirected(2, output.fileno()):
                await engine.start()
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(engine.watch())
                yield engine
                watching.cancel()
        except* EngineError:
            output.seek(0)
            sys.stderr.write(output.read())
            raise
        finally:
            logging.getLogger("vllm").setLevel(logging.CRITICAL)  # vLLM logs its shutdown as an error
            await engine.aclose()

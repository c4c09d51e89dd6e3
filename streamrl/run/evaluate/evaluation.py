"""Held-out evaluation: completions of prompts that are never trained on, scored by the same rewards.

The ``Controller`` begins evaluations of a run in the controller process; ``streamrl eval`` runs one in the process of
the command. An evaluation shares the engines with the rollout of the next batch. It has at most ``in_flight`` open
requests, as many as the engines run at once, so that a rollout request never waits for a complete evaluation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import comb, sqrt
from statistics import fmean, stdev

import anyio
from msgspec import Struct

from streamrl.base.notifier import Notifier
from streamrl.base.run_events import EvaluationFinished, RunEvent, RunWarning
from streamrl.base.seeds import derive_seed
from streamrl.base.stage_messages import (
    EndedOutcome,
    LaunchTrajectory,
    Scored,
    TrajectoryLost,
    TrajectoryOutcome,
    TrajectoryPaused,
)
from streamrl.base.types import Metrics, Prompt, ScoredTrajectory, TrajectoryId
from streamrl.contracts import EpisodeRunner, Evaluations
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe import sections
from streamrl.run.prompts.open_prompts import open_prompts
from streamrl.run.prompts.prompt_spec import environment_writes, held_out_sources, with_settings
from streamrl.run.step_metrics import completion_metrics, part_values

MOST_HELD_OUT = 10_000
ROUNDING = 1e-9
"""Distance below ``success_reward`` at which a prompt counts as solved: 0.7 + 0.2 + 0.1 is 0.9999999999999999."""


class HeldOut(Struct, frozen=True, kw_only=True):
    """The held-out prompts, and the settings of their evaluation.

    ``prompts``: prompts of all sets, one set after the other;
    ``sets``: settings and number of prompts of each set; empty where there is only the set ``held_out``;
    ``scores``: name of the reward that is the score of each set (None: it has no score; the total for sets that are
    not there);
    ``in_flight``: largest number of open requests of an evaluation: the number of sequences that the engines run."""

    prompts: Sequence[Prompt] = ()
    sets: Mapping[str, tuple[sections.EvaluationSet, int]] = {}
    settings: sections.Evaluation = sections.Evaluation()
    scores: Mapping[str, str | None] = {}
    in_flight: int = 256

    def prompts_to_evaluate(self, policy_version: int, limit: int) -> dict[str, range]:
        """Return the places in ``prompts`` that an evaluation of ``policy_version`` covers, by set. ``limit``: number
        of prompts of a single set; 0: all prompts of all sets, whether the sets are due or not."""
        if not self.sets:
            return {sections.HELD_OUT: range(len(self.prompts[: limit or None]))}
        places = {}
        first = 0
        for name, (settings, size) in self.sets.items():
            if not limit:
                places[name] = range(first, first + size)
            elif settings.every and policy_version % settings.every == 0:
                places[name] = range(first, first + min(settings.limit or size, size))
            first += size
        return places


async def read_held_out(recipe: sections.Recipe, tokenizer: Tokenizer, in_flight: int) -> HeldOut:
    """Read all held-out prompts, in file order; at most ``MOST_HELD_OUT`` of an iterator. ``in_flight``: largest number
    of open requests of an evaluation."""
    prompts: list[Prompt] = []
    sets: dict[str, tuple[sections.EvaluationSet, int]] = {}
    scores: dict[str, str | None] = {}
    for name, spec in held_out_sources(recipe).items():
        settings = recipe.evaluation.sets[name]
        scope = recipe.settings_of_held_out(name)
        source = open_prompts(spec, None if environment_writes(recipe, scope) else tokenizer, seed=0, shuffle=False)
        try:
            set_prompts = await source.draw(source.size or MOST_HELD_OUT)
        finally:
            await source.aclose()
        prompts += [with_settings(prompt, scope) for prompt in set_prompts]
        sets[name] = settings, len(set_prompts)
        score = recipe.score_of(name)
        scores[name] = None if score is None else score.label
    if not sets.keys() - {sections.HELD_OUT}:
        sets = {}
    return HeldOut(prompts=prompts, sets=sets, settings=recipe.evaluation, scores=scores, in_flight=in_flight)


class EvaluationRun:
    """One evaluation of one policy version, on the first ``limit`` prompts (0: all). ``run`` may be called once. The
    samples of a held-out prompt are a group, for rewards that compare them. It has the negative group id ``-1 -
    place``, which no group of the run has. ``sets``: places of its prompts by set; ``outcomes``: outcomes so far."""

    def __init__(self, held_out: HeldOut, policy_version: int, *, limit: int, seed: int) -> None:
        self.policy_version = policy_version
        self.limit = limit
        self.cancelled = False
        self.outcomes: list[EndedOutcome] = []
        self._held_out = held_out
        self.sets = held_out.prompts_to_evaluate(policy_version, limit)
        self._seed = seed
        self._open: set[TrajectoryId] = set()
        # Rewards of a group wait for all of its samples.
        self._room = anyio.Semaphore(max(held_out.in_flight, held_out.settings.samples))
        self._settled = Notifier()

    @property
    def completions(self) -> int:
        """Number of completions of this evaluation."""
        return sum(map(len, self.sets.values())) * self._held_out.settings.samples

    async def run(self, episodes: EpisodeRunner, on_outcome: Callable[[], Awaitable[None]]) -> Metrics:
        """Launch all completions, wait for their outcomes, and return the figures ``eval/SET/*``. ``on_outcome``:
        function that is called after each outcome."""

        async def take(outcome: TrajectoryOutcome) -> None:
            assert not isinstance(outcome, TrajectoryPaused), "control never pauses what is held out"
            self._add(outcome)
            await on_outcome()

        started = anyio.current_time()
        for launch in self._launches():
            await self._room.acquire()
            if self.cancelled and not launch.id.sample:
                break
            self._open.add(launch.id)
            episodes.launch(launch, take)
            if self.cancelled:  # between siblings, for all of which the rewards of a group wait
                episodes.cancel([launch.id])
        while self._open:
            await self._settled.wait()
        settings = self._held_out.settings
        figures = {"time/eval_s": anyio.current_time() - started}
        for name, numbers in self.sets.items():
            figures[f"eval/{name}/size"] = float(len(numbers))
            reward = self._held_out.scores.get(name, "")
            figures |= evaluation_metrics(
                self.outcomes_of(numbers), settings.samples, settings.success_reward, reward=reward, collection=name
            )
        return figures

    def outcomes_of(self, numbers: range) -> list[EndedOutcome]:
        """Return the outcomes of the prompts at the places ``numbers``."""
        return [outcome for outcome in self.outcomes if -1 - identity(outcome).group_id in numbers]

    def _add(self, outcome: EndedOutcome) -> None:
        self.outcomes.append(outcome)
        self._open.discard(identity(outcome))
        self._room.release()
        if not self._open:
            self._settled.notify()

    def cancel(self, episodes: EpisodeRunner) -> None:
        """Launch no more completions and stop the running ones. ``run`` returns when they have ended."""
        self.cancelled = True
        episodes.cancel(self._open)

    def _launches(self) -> Iterator[LaunchTrajectory]:
        temperature = self._held_out.settings.temperature
        sampling: dict[str, int | float] = {}
        if temperature is not None:
            sampling["temperature"] = temperature
        samples = self._held_out.settings.samples
        for index in chain.from_iterable(self.sets.values()):
            prompt = self._held_out.prompts[index]
            for sample in range(samples):
                yield LaunchTrajectory(
                    id=TrajectoryId(
                        prompt_id=prompt.prompt_id, group_id=-1 - index, sample=sample, attempt=self.policy_version
                    ),
                    prompt=prompt,
                    group_size=samples,
                    seed=derive_seed(self._seed, "evaluation", prompt.prompt_id, self.policy_version, sample),
                    evaluation=True,
                    sampling=sampling,
                )


def identity(outcome: EndedOutcome) -> TrajectoryId:
    """Return the id of an outcome's trajectory."""
    return outcome.id if isinstance(outcome, TrajectoryLost) else outcome.outcome.trajectory.id


class HeldOutEvaluations(Evaluations):
    """The evaluations of a run, one at a time.

    ``seed``: seed of the run;
    ``emit``: function that gets the figures of an evaluation, or a warning with the reason of its cancellation;
    ``on_scored``: function that gets version, figures and limit of an evaluation;
    ``store``: function that writes the outcomes, with the places of the prompts of each set (None: they are not
    written)."""

    def __init__(
        self,
        held_out: HeldOut,
        seed: int,
        *,
        emit: Callable[[RunEvent], Awaitable[None]],
        on_scored: Callable[[int, Metrics, int], Awaitable[None]],
        store: Callable[[int, Sequence[EndedOutcome], Mapping[str, range]], Awaitable[None]] | None = None,
    ) -> None:
        self._held_out = held_out
        self._seed = seed
        self._emit = emit
        self._on_scored = on_scored
        self._store_outcomes = store
        self.running: EvaluationRun | None = None

    def begin(self, policy_version: int, limit: int) -> None:
        """Let the next ``run`` evaluate this version, on the first ``limit`` prompts (0: all)."""
        self.running = EvaluationRun(self._held_out, policy_version, limit=limit, seed=self._seed)

    async def run(
        self, episodes: EpisodeRunner, on_outcome: Callable[[], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        """Run the evaluation that was begun. The returned function stores the outcomes, which may be slow."""
        evaluation = self.running
        assert evaluation is not None
        figures = await evaluation.run(episodes, on_outcome)
        version = evaluation.policy_version
        self.running = None
        finished = not evaluation.cancelled and bool(evaluation.sets)  # empty where no set is due
        if finished:
            await self._emit(EvaluationFinished(step=version, policy_version=version, metrics=figures))

        async def store() -> None:
            if finished:
                await self._on_scored(version, figures, evaluation.limit)
                if self._store_outcomes is not None:
                    await self._store_outcomes(version, evaluation.outcomes, evaluation.sets)

        return store

    async def cancel(self, episodes: EpisodeRunner, why: str = "") -> None:
        """Cancel the running evaluation, if there is one. ``why``: reason for a warning (empty: no warning)."""
        evaluation = self.running
        if evaluation is None or (why and evaluation.cancelled):
            return
        if why:
            await self.warn_cancelled(evaluation.policy_version, why)
        evaluation.cancel(episodes)

    async def warn_cancelled(self, policy_version: int, why: str) -> None:
        """Emit a warning that the evaluation of ``policy_version`` has no figures."""
        message = f"evaluation of version {policy_version} given up: {why}"
        await self._emit(RunWarning(step=policy_version, message=message))


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of ``k`` samples solves a prompt, where
    ``solved`` of ``samples`` >= k independent samples solve it: 1 - C(n - c, k) / C(n, k) (Codex, arXiv 2107.03374,
    equation 1)."""
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {solved} solved is not defined")
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def pass_sizes(samples: int) -> list[int]:
    """Return the k of each pass@k that is reported: powers of two up to ``samples``, and ``samples`` itself."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()))})


def evaluation_metrics(
    outcomes: Iterable[EndedOutcome],
    samples: int,
    success_reward: float = 1.0,
    *,
    reward: str | None = "",
    collection: str = sections.HELD_OUT,
) -> Metrics:
    """Return the figures of an evaluation with ``samples`` completions of each prompt. ``reward``: name of the reward
    that is the score (empty: the total; None: there is no score), so that rewards which only shape training do not
    change it; ``collection``: name of the set, for the names of the figures.

    avg@k is the mean over prompts of the mean score of their samples, and pass@j the mean over prompts of
    ``pass_at_k``. A sample without a reward counts as failed and is in neither figure. A sample to which the named
    reward does not apply is in neither figure, and a prompt with fewer than j scores is not in pass@j."""
    rewarded: list[ScoredTrajectory] = []
    failed = 0
    for outcome in outcomes:
        if isinstance(outcome, Scored) and isinstance(outcome.outcome, ScoredTrajectory):
            rewarded.append(outcome.outcome)
        else:
            failed += 1
    scores = scores_by_prompt(rewarded, reward)
    metrics = {f"eval/{collection}/prompts": float(len(scores)), f"eval/{collection}/failed": float(failed)}
    if not rewarded:
        return metrics
    for name, values in part_values(rewarded).items():
        metrics[f"eval/{collection}/func/{name}/mean"] = fmean(values)
    for name, prompt_values in values_by_prompt(scores, samples, success_reward).items():
        metrics[f"eval/{collection}/{name}"] = fmean(prompt_values)
        if name.startswith("avg@"):
            error = stdev(prompt_values) / sqrt(len(prompt_values)) if len(prompt_values) > 1 else 0.0
            metrics[f"eval/{collection}/standard_error"] = error
    return metrics | {
        f"eval/{collection}/{name.removeprefix('completion/')}": value
        for name, value in completion_metrics(rewarded).items()
        if name.startswith(("completion/", "environment/"))
    }


def values_by_prompt(
    scores: Sequence[Sequence[float]], samples: int, success_reward: float
) -> dict[str, Sequence[float]]:
    """Return ``avg@samples`` and ``pass@1``, ``pass@2`` ... of each prompt, from its scores. A prompt with fewer than j
    scores is not in ``pass@j``; a figure that no prompt has is left out."""
    threshold = success_reward - ROUNDING
    solved = [(len(values), sum(value >= threshold for value in values)) for values in scores]
    figures = {f"avg@{samples}": [fmean(values) for values in scores]}
    figures |= {f"pass@{k}": [pass_at_k(n, c, k) for n, c in solved if n >= k] for k in pass_sizes(samples)}
    return {name: values for name, values in figures.items() if values}


def scores_by_prompt(rewarded: Sequence[ScoredTrajectory], reward: str | None) -> list[list[float]]:
    """Return the scores of each prompt, in the order of their first samples. ``reward``: name of the reward that is the
    score (empty: the total; None: there is no score)."""
    scores: dict[int, list[float]] = {}
    if reward is None:
        return []
    for scored in rewarded:
        score = scored.reward_parts.get(reward) if reward else scored.reward
        if score is not None:
            scores.setdefault(scored.trajectory.id.group_id, []).append(score)
    return list(scores.values())

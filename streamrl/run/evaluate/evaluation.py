"""Held-out evaluation: completions of prompts that are never trained on, scored by the same rewards.

It shares the engines with the rollout of the next batch. At most ``in_flight`` of its requests are open at once, so
that a rollout request waits behind one filling of the engines, not behind the whole evaluation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from math import comb, sqrt
from statistics import fmean, stdev

import anyio
import msgspec

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
from streamrl.base.types import Prompt, ScoredTrajectory, TrajectoryId
from streamrl.contracts import EpisodeRunner, Evaluations
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe import sections
from streamrl.run.prompts.prompt_spec import prompt_sources
from streamrl.run.prompts.prompts import open_prompts
from streamrl.run.step_metrics import completion_metrics, part_values

MOST_HELD_OUT = 10_000
ROUNDING = 1e-9
"""How much less than ``success_reward`` is solved: parts of 0.7, 0.2 and 0.1 add up to 0.9999999999999999."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out prompts, and how the recipe has them evaluated. ``sets``: where there are several, those that follow
    each other in ``prompts``, with the number of theirs. ``reward``: whose value is the score (empty: the total).
    ``in_flight``: requests of an evaluation that are open at once: what the engines can run
    (``EngineReady.max_num_seqs`` of the pool)."""

    prompts: Sequence[Prompt] = ()
    sets: Mapping[str, tuple[sections.EvaluationSet, int]] = {}
    settings: sections.Evaluation = sections.Evaluation()
    reward: str = ""
    in_flight: int = 256

    def chosen(self, policy_version: int, limit: int) -> dict[str, range]:
        """Numbers of the prompts that are evaluated, by set: with ``limit`` 0 all, else those that are due."""
        if not self.sets:
            return {sections.HELD_OUT: range(len(self.prompts[: limit or None]))}
        found = {}
        first = 0
        for name, (one, size) in self.sets.items():
            if not limit or (one.every and policy_version % one.every == 0):
                found[name] = range(first, first + (min(one.limit or size, size) if limit else size))
            first += size
        return found


async def read_held_out(recipe: sections.Recipe, tokenizer: Tokenizer, in_flight: int) -> HeldOut:
    """Read all held-out prompts, in file order; of an iterator at most ``MOST_HELD_OUT``. ``in_flight``: requests of an
    evaluation that are open at once."""
    prompts: list[Prompt] = []
    sets: dict[str, tuple[sections.EvaluationSet, int]] = {}
    _, *sources = prompt_sources(recipe).values()
    for spec, (name, one) in zip(sources, recipe.evaluation.sets.items(), strict=True):
        source = open_prompts(spec, None if recipe.environment.given else tokenizer, seed=0, shuffle=False)
        try:
            found = await source.draw(source.size or MOST_HELD_OUT)
        finally:
            await source.aclose()
        prompts += found
        sets[name] = one, len(found)
    several = sets if sets.keys() - {sections.HELD_OUT} else {}
    return HeldOut(prompts=prompts, sets=several, settings=recipe.evaluation, reward=recipe.score, in_flight=in_flight)


class EvaluationRun:
    """One evaluation of one policy version, on the first ``limit`` prompts (0: all). ``run`` once. Held-out groups have
    negative ids: they belong to no group of the run. ``sets``: numbers of its prompts."""

    def __init__(self, held_out: HeldOut, policy_version: int, *, limit: int, seed: int) -> None:
        self.policy_version = policy_version
        self.limit = limit
        self.cancelled = False
        self.outcomes: list[EndedOutcome] = []
        self._held_out = held_out
        self.sets = held_out.chosen(policy_version, limit)
        self._seed = seed
        self._open: set[TrajectoryId] = set()
        self._room = anyio.Semaphore(held_out.in_flight)
        self._settled = anyio.Event()

    @property
    def wanted(self) -> int:
        """Completions of this evaluation."""
        return sum(map(len, self.sets.values())) * self._held_out.settings.samples

    async def run(self, episodes: EpisodeRunner, ended: Callable[[], Awaitable[None]]) -> dict[str, float]:
        """Launch everything and wait for every outcome; figures are named ``eval/SET/*``. ``ended`` is called
        after each outcome."""

        async def take(outcome: TrajectoryOutcome) -> None:
            assert not isinstance(outcome, TrajectoryPaused), "control never pauses what is held out"
            self._ended(outcome)
            await ended()

        started = anyio.current_time()
        for launch in self._launches():
            await self._room.acquire()
            if self.cancelled:
                break
            self._open.add(launch.id)
            episodes.launch(launch, take)
        while self._open:
            self._settled = anyio.Event()
            await self._settled.wait()
        settings = self._held_out.settings
        reward = self._held_out.reward
        figures = {"time/eval_s": anyio.current_time() - started}
        for name, numbers in self.sets.items():
            solved = settings.success_reward
            own = self.outcomes_of(numbers)
            figures |= evaluation_metrics(own, settings.samples, solved, reward=reward, collection=name)
        return figures

    def outcomes_of(self, numbers: range) -> list[EndedOutcome]:
        """The outcomes of the prompts of a set."""
        return [outcome for outcome in self.outcomes if -1 - identity(outcome).group_id in numbers]

    def _ended(self, outcome: EndedOutcome) -> None:
        self.outcomes.append(outcome)
        self._open.discard(identity(outcome))
        self._room.release()
        if not self._open:
            self._settled.set()

    def cancel(self, episodes: EpisodeRunner) -> None:
        """Launch no more and stop what runs; ``run`` returns when all that was launched has ended."""
        self.cancelled = True
        episodes.cancel(self._open)

    def _launches(self) -> Iterator[LaunchTrajectory]:
        temperature = self._held_out.settings.temperature
        sampling = {} if temperature is None else {"temperature": temperature}
        for index in (number for numbers in self.sets.values() for number in numbers):
            prompt = self._held_out.prompts[index]
            for sample in range(self._held_out.settings.samples):
                yield LaunchTrajectory(
                    id=TrajectoryId(
                        prompt_id=prompt.prompt_id, group_id=-1 - index, sample=sample, attempt=self.policy_version
                    ),
                    prompt=prompt,
                    group_size=1,  # each is scored alone, also by a reward that sees whole groups
                    seed=derive_seed(self._seed, "evaluation", prompt.prompt_id, self.policy_version, sample),
                    evaluation=True,
                    sampling=sampling,
                )


def identity(outcome: EndedOutcome) -> TrajectoryId:
    """Id of an outcome's trajectory."""
    return outcome.id if isinstance(outcome, TrajectoryLost) else outcome.outcome.trajectory.id


class HeldOutEvaluations(Evaluations):
    """The evaluations of a run, one at a time, on ``held_out``; ``seed`` is the run's.

    ``emit`` is given the figures of each that was not cancelled, and a warning why one was; ``scored`` version, figures
    and limit. ``store`` writes its outcomes, by the numbers of the prompts of each set (None: nothing does)."""

    def __init__(
        self,
        held_out: HeldOut,
        seed: int,
        *,
        emit: Callable[[RunEvent], Awaitable[None]],
        scored: Callable[[int, dict[str, float], int], Awaitable[None]],
        store: Callable[[int, Sequence[EndedOutcome], Mapping[str, range]], Awaitable[None]] | None = None,
    ) -> None:
        self._held_out = held_out
        self._seed = seed
        self._emit = emit
        self._scored = scored
        self._store_outcomes = store
        self.running: EvaluationRun | None = None

    def begin(self, policy_version: int, limit: int) -> None:
        """``run`` evaluates this version, on the first ``limit`` prompts (0: all)."""
        self.running = EvaluationRun(self._held_out, policy_version, limit=limit, seed=self._seed)

    async def run(self, episodes: EpisodeRunner, ended: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Return when all of the evaluation that was begun has ended; what is returned stores it, which may be slow."""
        evaluation = self.running
        assert evaluation is not None
        figures = await evaluation.run(episodes, ended)
        version = evaluation.policy_version
        self.running = None
        finished = not evaluation.cancelled and bool(evaluation.sets)  # there may be none that is due
        if finished:
            # It ran beside the next step, whose time and tokens it is part of.
            await self._emit(EvaluationFinished(step=version, policy_version=version, metrics=figures))

        async def store() -> None:
            if finished:
                await self._scored(version, figures, evaluation.limit)
                if self._store_outcomes is not None:
                    await self._store_outcomes(version, evaluation.outcomes, evaluation.sets)

        return store

    async def cancel(self, episodes: EpisodeRunner, why: str = "") -> None:
        """Cancel the evaluation that runs, if one does, and say ``why`` in a warning."""
        evaluation = self.running
        if evaluation is None or (why and evaluation.cancelled):
            return
        if why:
            await self.warn_cancelled(evaluation.policy_version, why)
        evaluation.cancel(episodes)

    async def warn_cancelled(self, policy_version: int, why: str) -> None:
        """The evaluation of ``policy_version`` has no figures."""
        message = f"evaluation of version {policy_version} given up: {why}"
        await self._emit(RunWarning(step=policy_version, message=message))


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
    outcomes: Iterable[EndedOutcome],
    samples: int,
    success_reward: float = 1.0,
    *,
    reward: str = "",
    collection: str = sections.HELD_OUT,
) -> dict[str, float]:
    """Figures of an evaluation with ``samples`` completions of each prompt. ``reward``: the name of the reward that is
    the score (empty: the total), so that rewards which only shape training do not change it. ``collection``: the set
    that their names have.

    avg@k: the mean over prompts of the mean score of their samples. pass@j: the mean over prompts of ``pass_at_k``. A
    sample without a reward is counted as failed and is in neither, nor is one that the named reward does not apply to;
    a prompt with fewer than j scores is not in pass@j."""
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
    for name, of_prompts in values_by_prompt(scores, samples, success_reward).items():
        metrics[f"eval/{collection}/{name}"] = fmean(of_prompts)
        if name.startswith("avg@"):
            error = stdev(of_prompts) / sqrt(len(of_prompts)) if len(of_prompts) > 1 else 0.0
            metrics[f"eval/{collection}/standard_error"] = error
    return metrics | {
        f"eval/{collection}/{name.removeprefix('completion/')}": value
        for name, value in completion_metrics(rewarded).items()
        if name.startswith(("completion/", "environment/"))
    }


def values_by_prompt(
    scores: Sequence[Sequence[float]], samples: int, success_reward: float
) -> dict[str, Sequence[float]]:
    """``avg@samples`` and ``pass@1``, ``pass@2`` ... of the scores of each prompt; a prompt with fewer than j scores is
    not in ``pass@j``, and what no prompt has is left out."""
    least = success_reward - ROUNDING
    solved = [(len(values), sum(value >= least for value in values)) for values in scores]
    found = {f"avg@{samples}": [fmean(values) for values in scores]}
    found |= {f"pass@{k}": [pass_at_k(n, c, k) for n, c in solved if n >= k] for k in pass_sizes(samples)}
    return {name: values for name, values in found.items() if values}


def scores_by_prompt(rewarded: Sequence[ScoredTrajectory], reward: str) -> list[list[float]]:
    """The scores of each prompt, in the order in which the first of each came; ``reward``: as above."""
    scores: dict[int, list[float]] = {}
    for scored in rewarded:
        score = scored.reward_parts.get(reward) if reward else scored.reward
        if score is not None:
            scores.setdefault(scored.trajectory.id.group_id, []).append(score)
    return list(scores.values())

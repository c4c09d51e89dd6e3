"""Report of ``streamrl try``: its figures, its advice, and its form for a terminal and as an HTML page.
``recipe_trial`` makes it in the command's own process."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from msgspec import Struct
from rich.console import Group
from rich.text import Text

from streamrl.base.types import ScoredTrajectory, Texts
from streamrl.cli.try_rewards.trial_report import (
    Bin,
    RewardReport,
    ValueSpread,
    histogram_picture,
    problems_of,
    rich_report,
)
from streamrl.observe.terminal.console import open_console
from streamrl.observe.terminal.step_line import duration
from streamrl.prepare.measured_step import MeasuredStep
from streamrl.recipe import learning_rate
from streamrl.recipe.sections import Recipe
from streamrl.rewards.scoring import Outcome
from streamrl.run.step_metrics import set_metrics

_OF_SETS = ("samples", "reward_mean", "reward_zero_std_ratio", "completion_length_mean", "completion_truncated_ratio")
_MANY_TRUNCATED = 0.3
_FEW_SIGNAL = 0.5
_HOT = 1.0
_GOOD = ("rewards differ inside groups, so there is something to learn: train it",)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>streamrl try</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{{color:{foreground};background:{background};margin:2rem}}pre{{white-space:pre-wrap;font:14px/1.4 monospace}}
{stylesheet}</style></head><body><pre>{code}</pre></body></html>
"""


class SetTrial(Struct, frozen=True, kw_only=True):
    """One of several training sets. ``limit_key``: key with its ``max_tokens``; ``figures``: metrics
    ``prompts/<set>/*`` of its completions."""

    name: str
    share: float
    limit_key: str
    max_tokens: int
    figures: dict[str, float]

    @property
    def line(self) -> str:
        """The figures in a line."""
        figures = self.figures
        return (
            f"set {self.name}: share {self.share:.3g}, {figures['samples']:.0f} completions with a reward, mean "
            f"{figures['reward_mean']:.3f}; {figures['reward_zero_std_ratio']:.0%} of the groups have one value; "
            f"{figures['completion_length_mean']:.0f} tokens, {figures['completion_truncated_ratio']:.0%} cut at "
            f"{self.max_tokens}"
        )


class RecipeTrial(Struct, frozen=True, kw_only=True):
    """Findings of ``streamrl try``. ``prompt``: the first prompt as the model sees it, in lines. ``lengths``: token
    counts of the completions, ``truncated`` of which reached ``max_tokens``.

    ``sampling_s``: measured time of all completions on one engine, without its start. ``training``: the measured step,
    or None where no measurement was requested. ``step_sampling_s`` and ``step_training_s`` are these two times, scaled
    to the ``step_trajectories`` of a step, shared evenly by the engines and ranks of the recipe. ``memory``: estimated
    demand of the processes of the run. ``learning_rate``: proposed rate, for ``rate_reason``; ``advice``: changes to
    make first; ``sets``: each of several training sets."""

    recipe: str
    parameters: int
    prompts: str
    prompt: Texts
    reward: RewardReport
    lengths: ValueSpread
    length_histogram: tuple[Bin, ...]
    truncated: int
    max_tokens: int
    sampling_s: float
    training: MeasuredStep | None
    step_trajectories: int
    step_sampling_s: float
    step_training_s: float | None
    memory: Texts
    learning_rate: float
    rate_reason: str
    advice: Texts = ()
    sets: tuple[SetTrial, ...] = ()


def trials_of_sets(recipe: Recipe, outcomes: Iterable[Outcome]) -> Iterator[SetTrial]:
    """Yield the figures of the completions of each training set."""
    figures = set_metrics([outcome for outcome in outcomes if isinstance(outcome, ScoredTrajectory)])
    for name, share in recipe.prompts.shares.items():
        training_set = recipe.prompts.sets[name]
        limit = recipe.token_limit(training_set)
        yield SetTrial(
            name=name,
            share=share,
            limit_key=f"prompts.train.{name}.max_tokens" if limit == training_set.max_tokens else "sampling.max_tokens",
            max_tokens=limit,
            figures={key: figures.get(f"prompts/{name}/{key}", 0.0) for key in _OF_SETS},
        )


def proposed_rate(recipe: Recipe, parameters: int) -> tuple[float, str]:
    """The rate of AdamW that the square-root rule gives a model of ``parameters``, in one significant digit, and the
    reason."""
    adapters = recipe.lora.rank > 0
    rate = float(f"{learning_rate.usual_learning_rate(parameters, adapters=adapters):.0e}")
    small = learning_rate.SMALL_RATE
    lowest = learning_rate.LEAST_RATE
    rule = f"{small:.0e} x sqrt({learning_rate.SMALL_MODEL:.0e} / {parameters:,} parameters), at least {lowest:.0e}"
    trained_part = f"LoRA: {learning_rate.ADAPTER_FACTOR:g} times that" if adapters else "all weights are trained"
    recipe_rate = recipe.training.learning_rate
    comparison = f"the recipe has {recipe_rate:g}"
    if not learning_rate.learning_rate_notice(recipe_rate, parameters, adapters=adapters):
        comparison += f", within {learning_rate.SPREAD:g} times: keep it"
    return rate, f"{comparison}; {rule}; {trained_part}"


def advice_of(trial: RecipeTrial, recipe: Recipe, *, unused_template: bool) -> Iterator[str]:
    """Yield what to change before a run is spent on the recipe. ``unused_template``: the model has a chat template, and
    the prompts are plain text."""
    yield from problems_of(trial.reward)
    signal = trial.reward.signal
    sampling = recipe.sampling
    if signal.groups and signal.flat >= _FEW_SIGNAL * signal.groups:
        if signal.flat_high > signal.flat / 2:
            yield "most groups get all of the reward: take harder prompts, or a reward that asks for more"
        else:
            remedies = (
                "most groups get one value, so they have no gradient: try easier prompts, a stronger (instruct) model, "
                f"partial credit in the reward, rollout.group_size above {recipe.rollout.group_size}"
            )
            if sampling.temperature >= _HOT:
                remedies += f", a lower sampling.temperature than {sampling.temperature:g} (small models: 0.5 to 0.7)"
            yield remedies
    cut = [("", "sampling.max_tokens", trial.max_tokens, trial.truncated / trial.reward.completions)]
    if trial.sets:
        ratio = "completion_truncated_ratio"
        cut = [(f" of {part.name}", part.limit_key, part.max_tokens, part.figures[ratio]) for part in trial.sets]
    for of_set, key, limit, share in cut:
        if share > _MANY_TRUNCATED:
            yield (
                f"{share:.0%} of the completions{of_set} are cut at {key} = {limit}: raise it (to {2 * limit}?), or "
                "look whether the model ever ends one (chat template, stop tokens)"
            )
    if unused_template:
        yield "the model has a chat template and the prompts are plain text: put ?chat=true behind prompts.train"
    if trial.training is not None and trial.training.problem:
        yield f"no step could be measured ({trial.training.problem}): the memory is an estimate alone"
    rate = recipe.training.learning_rate
    adapters = recipe.lora.rank > 0
    if notice := learning_rate.learning_rate_notice(rate, trial.parameters, adapters=adapters):
        yield notice


def rich_trial(trial: RecipeTrial) -> Group:
    """Tables and pictures, for a terminal."""
    values = trial.lengths
    total = trial.reward.completions
    length = f"mean {values.mean:.0f}, P50 {values.p50:.0f}, P95 {values.p95:.0f}, max {values.most:.0f} tokens"
    truncated = f"{trial.truncated} of {total} ({trial.truncated / total:.0%}) at the cap of {trial.max_tokens}"
    return Group(
        Text(f"{trial.recipe}, {trial.parameters:,} parameters\n", "bold"),
        rich_report(trial.reward, trial.prompts, advice=False),
        Text(f"\nlength      {length}; {truncated}"),
        histogram_picture(trial.length_histogram),
        *(Text(part.line) for part in trial.sets),
        Text("\n".join(["", *trial.prompt, "", *_step_lines(trial)])),
        *(Text.assemble(("-> ", "yellow"), line) for line in trial.advice or _GOOD),
    )


def report_page(trial: RecipeTrial) -> str:
    """The report as one HTML page without links to other hosts; texts of models and rewards are escaped."""
    console = open_console(io.StringIO(), record=True, width=120)
    console.print(rich_trial(trial))
    return console.export_html(code_format=_PAGE)


def _step_lines(trial: RecipeTrial) -> list[str]:
    """Seconds and memory of a step, each marked as measured, scaled or estimated, and the learning rate."""
    count = trial.reward.completions
    training = trial.training
    seconds = trial.sampling_s
    tokens = round(trial.lengths.mean * count)
    speed = f"{tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} a second"
    lines = [f"sampling    {count} completions in {duration(seconds)} on one engine: {speed} (measured)"]
    if training is not None and not training.problem:
        cost = f"{duration(training.seconds)} on one rank, in {training.cpu_bytes / 2**30:.2f} GiB"
        if training.device_bytes:
            cost += f", {training.device_bytes / 2**30:.2f} GiB of the GPU"
        lines.append(f"training    {training.trajectories} of them, {training.tokens:,} tokens: {cost} (measured)")
    scaled_time = f"about {duration(trial.step_sampling_s)} of sampling"
    if trial.step_training_s is not None:
        scaled_time += f" and {duration(trial.step_training_s)} of training"
    lines.append(
        f"step        {scaled_time} for {trial.step_trajectories} trajectories (scaled from what was measured)"
    )
    lines += [f"memory      {line} (estimated)" for line in trial.memory]
    return [*lines, f"rate        {trial.learning_rate:.0e} by the square-root rule ({trial.rate_reason})"]

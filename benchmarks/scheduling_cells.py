"""One cell of the scheduling benchmark: a task, a shape, a policy arm and a seed, run once and kept as a JSON file."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean

import msgspec
from training_run import DEMO_RECIPE, ROOT, toml_value, training_run

from streamrl.cli.compare.run_figures import WARM_UP_STEPS, RunFigures, samples_of
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.simulate.recording import TRACE_FILE

HEAVY_RECIPE = DEMO_RECIPE.parents[1] / "heavy" / "recipe.toml"
RECIPES = {"demo": DEMO_RECIPE, "heavy": HEAVY_RECIPE}
COOL_DOWN_STEPS = 1
"""After the measured ones, of every arm: the last step of a race trains those who would wait in vain."""
SYNCHRONOUS, AUTO, DAPO_SYNCHRONOUS = "synchronous", "auto", "dapo_synchronous"
SIZES = (4, 8, 16)

KEPT_METRICS = (
    "time/step_s",
    "time/wait_eval_s",
    "time/forward_backward_s",
    "reward/mean",
    "completion/length_mean",
    "completion/truncated_ratio",
    "length/sampled_mean",
    "length/bias",
    "length/first_update",
    "length/last_update",
    "perf/samples_s",
    "perf/groups_s",
    "perf/train_tok_s",
    "perf/generated_per_trained_tok",
    "perf/wasted_tok_ratio",
    "util/free_slot_ratio",
    "util/engine_idle_ratio",
    "util/rollout_bubble_ratio",
    "util/capacity",
    "async/staleness_oldest_max",
    "sizing/size",
    "sizing/straggler_rate",
    "sizing/budget",
    "sizing/queue",
)


class Regime(msgspec.Struct, frozen=True, order=True):
    """A task at one shape: ``prompts`` x ``group_size`` trajectories a batch. Written ``heavy:16x8``."""

    task: str
    prompts: int
    group_size: int

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"{self.task}:{self.prompts}x{self.group_size}"

    @property
    def steps(self) -> int:
        """Measured steps that take about 75 s on two cores.

        A multiple of 20, so that cycles of 4 and of 5 rounds are measured whole: their long rounds cost the most."""
        return 60 if self.task == "demo" and self.prompts * self.group_size <= 64 else 20


def steps_for(regime: Regime, overrides: Mapping[str, object], batches: int) -> int:
    """Steps in which an arm trains as many samples as ``synchronous`` in ``batches`` steps.

    What short rounds leave behind fills a long one, and so many short rounds with that long one are a cycle; one that
    trains several batches at once needs fewer steps. Raises ``ValueError`` where cycles would be measured in part:
    their long rounds cost the most."""
    rounds, of_cycle = cycle_of(regime, overrides)
    if batches % of_cycle:
        raise ValueError(f"its cycle is {of_cycle} batches: give --steps that are a multiple of it, not {batches}")
    return batches // of_cycle * rounds


def cycle_of(regime: Regime, overrides: Mapping[str, object]) -> tuple[int, int]:
    """Rounds of the smallest cycle that comes back whole, and the batches that they train."""

    def number(key: str, otherwise: float) -> float:
        return float(str(overrides.get(key, otherwise)))

    kind = overrides.get("rollout.rounds")
    if kind == "length_sorted":
        cohort = int(number("length_sorted.cohort_batches", 4))
        return cohort, cohort
    if kind != "tail_batching":
        return 1, 1
    prompts = int(number("rollout.prompts_per_batch", regime.prompts))
    left_behind = math.ceil(prompts * number("tail_batching.prompt_oversampling", 1.25)) - prompts
    if not left_behind:
        return 1, 1
    at_once = long_round_batches(overrides)
    short_rounds = Fraction(at_once * prompts, left_behind)
    cycles = short_rounds.denominator
    return int(short_rounds * cycles) + cycles, int(short_rounds * cycles) + at_once * cycles


def long_round_batches(overrides: Mapping[str, object]) -> int:
    """Batches that a long round trains at once."""
    return int(str(overrides.get("tail_batching.long_round_batches", 1)))


def parse_regime(text: str) -> Regime:
    """``task:PROMPTSxGROUP``. Raises ``ValueError`` that names what is known."""
    task, _, shape = text.partition(":")
    prompts, _, group_size = shape.partition("x")
    if task not in RECIPES or not prompts.isdigit() or not group_size.isdigit():
        raise ValueError(f"{text!r} is no regime: write task:PROMPTSxGROUP, with a task of {', '.join(RECIPES)}")
    return Regime(task, int(prompts), int(group_size))


def _rounds(kind: str, section: str = "", **options: object) -> dict[str, object]:
    return {"rollout.rounds": kind, **{f"{section}.{name}": value for name, value in options.items()}}


def _race(prompt_oversampling: float = 1.25, deferred_prompts: str = "replay", **options: object) -> dict[str, object]:
    return _rounds(
        "tail_batching",
        "tail_batching",
        prompt_oversampling=prompt_oversampling,
        deferred_prompts=deferred_prompts,
        **options,
    )


PRESUBMIT: dict[str, object] = {"rollout.advanced.presubmit": True}
PARTIAL_COHORT = 4
ROUND_ARMS: dict[str, dict[str, object]] = {
    SYNCHRONOUS: {},
    "synchronous_presubmit": PRESUBMIT,
    "tail_prompts": _race(deferred_prompts="regenerate"),
    "tail_prompts_replay": _race(),
    "tail_prompts_presubmit": _race() | PRESUBMIT,
    "tail_elastic_presubmit": _race(long_round_batches=2) | PRESUBMIT,
    "tail_elastic4_presubmit": _race(long_round_batches=4) | PRESUBMIT,
    "tail_wide_elastic4_presubmit": _race(1.5, long_round_batches=4) | PRESUBMIT,
    "tail_wide_elastic4_verify": _race(1.5, deferred_prompts="verify", long_round_batches=4) | PRESUBMIT,
    "tail_wide_elastic8_verify": _race(1.5, deferred_prompts="verify", long_round_batches=8) | PRESUBMIT,
    "tail_widest_elastic4_verify": _race(2.0, deferred_prompts="verify", long_round_batches=4) | PRESUBMIT,
    "tail_elastic4_verify": _race(deferred_prompts="verify", long_round_batches=4) | PRESUBMIT,
    "tail_both": _race(deferred_prompts="regenerate", response_oversampling=1.25),
    "tail_both_presubmit": _race(deferred_prompts="regenerate", response_oversampling=1.25) | PRESUBMIT,
    "tail_both_elastic": _race(deferred_prompts="regenerate", response_oversampling=1.25, long_round_batches=2)
    | PRESUBMIT,
    "tail_both_elastic4": _race(deferred_prompts="regenerate", response_oversampling=1.25, long_round_batches=4)
    | PRESUBMIT,
    "sorted_2": _rounds("length_sorted", "length_sorted", cohort_batches=2),
    "sorted_4": _rounds("length_sorted", "length_sorted", cohort_batches=4),
    "sorted_partial": _rounds("length_sorted", "length_sorted", cohort_batches=PARTIAL_COHORT, partial=True)
    | {"rollout.max_staleness": PARTIAL_COHORT - 1},
    "continuous_1": _rounds("continuous") | {"rollout.max_staleness": 1},
    AUTO: _rounds("auto"),
    "auto_presubmit": _rounds("auto") | PRESUBMIT,
    "auto_elastic": _rounds("auto") | {"tail_batching.long_round_batches": 2} | PRESUBMIT,
}
"""How rounds are formed. What an arm leaves out is what the task's recipe says."""

SIZING_ARMS = ("size_4", "size_16", "sagc", "random_sizes")
"""How large groups are. ``best_`` in front: over the composition that ``--best`` names; ``dapo_``: with DAPO;
``prompts_``: at the regime's prompts a step instead of its trajectories, and at equal steps instead of samples."""

KEEPS_PROMPTS = "prompts_"
PREFIXES = ("", "best_", "dapo_", f"{KEEPS_PROMPTS}dapo_", KEEPS_PROMPTS)
SORTED_RL = {"reinforce_": "reinforce_plus_plus", "ppo_": "ppo"}
"""The algorithms of SortedRL's paper, by the prefix of their arms."""
SORTED_RL_ARMS: dict[str, dict[str, object]] = {
    prefix + arm: ROUND_ARMS[rounds] | single | {"objective.algorithm": algorithm}
    for prefix, algorithm in SORTED_RL.items()
    for arm, rounds, single in (
        (SYNCHRONOUS, SYNCHRONOUS, {}),
        ("sorted", "sorted_4", {"length_sorted.advanced.single": True}),
        ("sorted_partial", "sorted_partial", {"length_sorted.advanced.single": True}),
    )
}
"""Single trajectories in cohorts of four batches, against the same algorithm in synchronous rounds."""

LEAVE_ONE_OUT: dict[str, object] = {"objective.advantages": "leave_one_out"}
TRACKED: dict[str, object] = {"objective.advantages": "tracked"}
METHOD_ARMS: dict[str, tuple[str, dict[str, object]]] = {
    "loo_4": ("size_4", LEAVE_ONE_OUT),
    "loo_8": ("size_8", LEAVE_ONE_OUT),
    "loo_16": ("size_16", LEAVE_ONE_OUT),
    "loo_4_fewer": (f"{KEEPS_PROMPTS}size_4", LEAVE_ONE_OUT),
    "loo_16_more": (f"{KEEPS_PROMPTS}size_16", LEAVE_ONE_OUT),
    "loo_sagc": (f"{KEEPS_PROMPTS}sagc", LEAVE_ONE_OUT),
    "tracked_1": ("size_1", TRACKED),
    "tracked_sagc": ("sagc", TRACKED | {"group_sizing.sizes": [1, 2, 4, 8]}),
    "filter_8": ("size_8", {"objective.algorithm": "dapo"}),
    "loo_8_continuous": ("size_8", LEAVE_ONE_OUT | ROUND_ARMS["continuous_1"]),
}
"""The table of baselines and group sizes (``method_table.py``): what each builds on, and its objective. All train as
many trajectories a step, but ``fewer`` and ``more``, which have the regime's prompts, and ``loo_sagc``."""

SIZED_ARMS = tuple(prefix + arm for prefix in PREFIXES for arm in SIZING_ARMS)
ARMS = (*ROUND_ARMS, *SORTED_RL_ARMS, *SIZED_ARMS, DAPO_SYNCHRONOUS, *METHOD_ARMS)


class Cell(RunFigures, frozen=True, kw_only=True):
    """A finished run. ``steps``: for each optimizer step, its values of ``KEPT_METRICS``.

    ``accuracy``: held out, over ``held_out`` prompts. ``overrides``: of the task's recipe. ``accuracies``: of every
    evaluation, by the steps before it.
    ``warnings``: what the run warned of, alarms included. ``cpu``: CPU seconds by process in the measured steps,
    evaluations beside them too (empty: not measured)."""

    regime: Regime
    arm: str
    seed: int
    overrides: dict[str, object]
    held_out: int
    on_policy: bool
    machine: str
    finished_at: float
    accuracies: dict[int, float] = {}
    warnings: list[str] = []
    cpu: dict[str, float] = {}

    @property
    def keeps_prompts(self) -> bool:
        """Whether its steps are of as many prompts at every group size."""
        like, _ = METHOD_ARMS.get(self.arm, (self.arm, {}))
        return like.startswith(KEEPS_PROMPTS)

    def seconds_to(self, accuracy: float) -> float:
        """Wall time of the steps until an evaluation found this accuracy; infinite where none did."""
        first = min((step for step, found in self.accuracies.items() if found >= accuracy), default=None)
        waited = [step["time/step_s"] - step.get("time/wait_eval_s", 0.0) for step in self.steps]
        return math.inf if first is None else sum(waited[:first])

    @property
    def sample_cpu_ms(self) -> float:
        """Milliseconds of CPU time a trained sample. NaN where it was not measured."""
        return 1e3 * sum(self.cpu.values()) / self.samples if self.cpu else math.nan

    @property
    def groups(self) -> float:
        """Trained in the measured steps."""
        return sum(step["perf/groups_s"] * step["time/step_s"] for step in self.measured)

    @property
    def generated_per_trained(self) -> float:
        """Tokens whose sampling ended in the measured steps, over trained ones. NaN where no step says it."""
        return self.mean_by(
            "perf/generated_per_trained_tok", lambda step: step["perf/train_tok_s"] * step["time/step_s"]
        )

    def per_batch(self, name: str) -> float:
        """Mean of a metric over the batches of the measured steps that have it: long rounds may train several. NaN
        where no step has it."""
        of_batch = "perf/groups_s" if self.keeps_prompts else "perf/samples_s"
        return self.mean_by(name, lambda step: step[of_batch] * step["time/step_s"])

    def last(self, name: str, among: Sequence[Mapping[str, float]] | None = None) -> float:
        """Its last value, of the steps ``among`` (None: all). NaN where none has it."""
        steps = self.steps if among is None else among
        return next((step[name] for step in reversed(steps) if name in step), math.nan)

    def after_whole_cycles(self, name: str) -> float:
        """Its value at the end of the last round that trained several batches at once, else the last one: what short
        rounds after it left behind would be missing. NaN where no step has it."""
        samples = list(map(samples_of, self.steps))
        of_long = [at for at, count in enumerate(samples) if count > 1.5 * min(samples)]
        return self.last(name, self.steps[: of_long[-1] + 1] if of_long else self.steps)

    def size_shares(self) -> dict[int, float]:
        """Share of the measured steps for each group size that was chosen."""
        sizes = [round(step["sizing/size"]) for step in self.measured if "sizing/size" in step]
        return {size: sizes.count(size) / len(sizes) for size in sorted(set(sizes))}


class CellPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell will run. ``steps``: optimizer steps with warm-up and cool-down; ``overrides``: of the recipe."""

    regime: Regime
    arm: str
    seed: int
    steps: int
    overrides: dict[str, object]

    @property
    def recipe(self) -> Path:
        """The task's recipe."""
        return RECIPES[self.regime.task]

    @property
    def settings(self) -> dict[str, object]:
        """Every override of the recipe, those of the benchmark too."""
        return {
            "rollout.prompts_per_batch": self.regime.prompts,
            "rollout.group_size": self.regime.group_size,
            "evaluation.at_start": False,
            "evaluation.at_end": True,
            "checkpoint.at_end": False,
            **self.overrides,
            "run.steps": self.steps,
            "run.seed": self.seed,
        }

    def file(self, folder: Path) -> Path:
        """Where its result lies."""
        shape = f"{self.regime.task}-{self.regime.prompts}x{self.regime.group_size}"
        return folder / f"{shape}-{self.arm}-{self.seed}.json"

    def checked_on_policy(self) -> bool:
        """Whether the recipe trains on-policy. Raises ``RecipeError`` where this tree does not take the overrides."""
        recipe = load_recipe(self.recipe, [f"{key}={toml_value(value)}" for key, value in self.settings.items()])
        return recipe.on_policy


def sized(regime: Regime, size: int) -> dict[str, object]:
    """A static group size at the regime's batch. Raises ``ValueError`` where it does not divide the batch."""
    batch = regime.prompts * regime.group_size
    if batch % size:
        raise ValueError(f"group size {size} does not divide the {batch} trajectories of {regime.name}")
    return {"rollout.group_size": size, "rollout.prompts_per_batch": batch // size}


def sizing_overrides(
    regime: Regime, arm: str, *, best: str, sagc: Mapping[str, float], shares: Mapping[int, float]
) -> dict[str, object]:
    """The overrides of an arm of ``SIZING_ARMS``, with its prefix. ``sagc``: the settings of its controller;
    ``shares``: of each size, for ``random_sizes``."""
    if arm in METHOD_ARMS:
        like, objective = METHOD_ARMS[arm]
        return sizing_overrides(regime, like, best=best, sagc=sagc, shares=shares) | objective
    prefix = next((prefix for prefix in PREFIXES if prefix and arm.startswith(prefix)), "")
    kind = arm.removeprefix(prefix)
    over: dict[str, object] = ROUND_ARMS[best] if prefix == "best_" else {}
    if prefix.endswith("dapo_"):
        over = {"objective.algorithm": "dapo"}
    keeps_prompts = prefix.startswith(KEEPS_PROMPTS)
    if kind == SYNCHRONOUS:
        return over
    if kind.startswith("size_"):
        size = int(kind.removeprefix("size_"))
        return over | ({"rollout.group_size": size} if keeps_prompts else sized(regime, size))
    if kind == "sagc":
        sizing: dict[str, object] = {"kind": "sagc", **sagc}
    else:
        sizing = {"kind": "random", "advanced.shares": [shares.get(size, 0.0) for size in SIZES]}
    if keeps_prompts:
        sizing["advanced.keeps"] = "prompts"
    return over | {f"group_sizing.{name}": value for name, value in ({"sizes": list(SIZES)} | sizing).items()}


def run_cell(plan: CellPlan, folder: Path, *, checkout: Path, timeout_s: float, keep_trace: bool) -> Cell:
    """Run to the end and write the result; raises ``RunFailed``. ``checkout``: whose streamrl runs, on its own recipe;
    ``keep_trace``: with the trace and the recipe."""
    on_policy = plan.checked_on_policy()
    recipe = checkout / plan.recipe.relative_to(ROOT)
    with training_run(recipe, plan.settings, variables={"PYTHONPATH": str(checkout)}) as run:
        run.wait(timeout_s=timeout_s)
        steps, evaluations = run.steps(), run.evaluations()
        first, last = (steps[at]["time"] for at in (WARM_UP_STEPS - 1, len(steps) - COOL_DOWN_STEPS - 1))
        cpu = run.cpu.between(first, last)
        printed = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
        if keep_trace and run.directory is not None:
            _keep(run.directory, plan.file(folder).with_suffix(""))
    cell = Cell(
        regime=plan.regime,
        arm=plan.arm,
        seed=plan.seed,
        overrides=plan.overrides,
        steps=[
            {name: step[name] for name in KEPT_METRICS if isinstance(step.get(name), int | float)} for step in steps
        ],
        accuracy=evaluations[-1]["eval/held_out/avg@1"],
        held_out=int(evaluations[-1]["eval/held_out/prompts"]),
        on_policy=on_policy,
        machine=platform.node(),
        finished_at=time.time(),
        cool_down=COOL_DOWN_STEPS,
        accuracies={line["step"]: line["eval/held_out/avg@1"] for line in evaluations},
        warnings=[line for line in printed if line.startswith("warning at step")],
        cpu=cpu,
    )
    path = plan.file(folder)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(cell), indent=0))
    unfinished.replace(path)
    return cell


def _keep(run_directory: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("recipe.toml", TRACE_FILE):
        found = next(run_directory.rglob(name), None)
        if found is not None:
            (folder / name).write_bytes(found.read_bytes())


def read_cell(path: Path) -> Cell:
    """A finished cell. Raises ``msgspec.MsgspecError`` for a file that is none."""
    return msgspec.json.decode(path.read_bytes(), type=Cell)


def read_cells(folder: Path) -> list[Cell]:
    """Every finished cell in ``folder``, in order of regime, arm and seed."""
    cells = [read_cell(path) for path in sorted(folder.glob("*.json"))]
    return sorted(cells, key=lambda cell: (cell.regime, arm_order(cell.arm), cell.seed))


def arm_order(arm: str) -> int:
    """Place of ``arm`` in tables."""
    return ARMS.index(arm) if arm in ARMS else len(ARMS)


def pooled_shares(cells: Sequence[Cell]) -> dict[int, float]:
    """Mean over ``cells`` of the share of each size; empty where none chose sizes."""
    each = [shares for cell in cells if (shares := cell.size_shares())]
    return {size: round(fmean(shares.get(size, 0.0) for shares in each), 4) for size in SIZES} if each else {}

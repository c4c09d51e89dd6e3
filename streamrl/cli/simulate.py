"""``streamrl simulate`` and ``streamrl calibrate``: the forecast of a recipe on a fleet, in virtual time. Runs in the
command's own process and starts no other; ``what-if`` and ``compare`` use its arguments and tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from msgspec.structs import replace
from rich.table import Table

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, print_json, recipe_file
from streamrl.cli.compare.candidates import compared_recipes
from streamrl.observe.dashboard.chrome_trace import ChromeTrace
from streamrl.observe.terminal.console import wide_console
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_document
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.fleet import FleetModel, differences, load_fleet
from streamrl.simulate.lengths import RecordedLengths
from streamrl.simulate.recording import agreement, load_recording
from streamrl.simulate.report import KindSummary, SimulationReport
from streamrl.simulate.simulation import simulate_recipe
from streamrl.simulate.what_if import World

PROGRESS_AFTER_S = 2.0
DEFAULT_FLEET = "demo"
_WORDS = ("rounds", "kind", "system", "")
"""Columns of words, which are aligned on the left."""
Row = Iterator[tuple[str, str]]
"""Pairs of a column's name and its cell."""


class InVirtualTime(Command, frozen=True, kw_only=True):
    """Arguments common to the simulating commands: the fleet, and the number of steps."""

    fleet: Annotated[str, Argument("a fleet model (TOML), or one of the built-in", metavar="FILE")] = ""
    steps: int
    warm_up: Annotated[int, Argument("steps before them (default 10)", metavar="N")] = 10
    seed: Annotated[int, Argument("of lengths and rewards")] = 0
    environment_factor: Annotated[float, Argument("times as long in environments (default 1)", metavar="X")] = 1.0

    def world(self, trace: Path | None) -> tuple[str, World, list[str]]:
        """Return the name of the fleet, the world to simulate, and notes for the user. A recorded run gives lengths,
        and the fleet where none is named. Raises ``StreamRLError``."""
        factor = self.environment_factor
        if self.steps < 1 or self.warm_up < 0 or self.seed < 0 or not 0 <= factor < math.inf:
            flags = f"--steps {self.steps} --warm-up {self.warm_up} --seed {self.seed} --environment-factor {factor:g}"
            raise RecipeError(f"{flags}: at least 1, 0, 0 and 0")
        make_world = partial(World, steps=self.steps, warm_up=self.warm_up, seed=self.seed)
        if trace is None:
            name = self.fleet or DEFAULT_FLEET
            model = load_fleet(name)
            return name, make_world(model=_timed(model, factor), lengths=cache(model.drawn_lengths)), []
        run = load_recording(trace)
        recipe = _recipe_of(trace)
        notes = []
        fit_agreement = None
        if self.fleet:
            name = self.fleet
            model = load_fleet(self.fleet)
        else:
            fit = calibrate(run, recipe)
            name = f"of run {run.header.run_id}"
            model = fit.model
            try:
                if recipe:
                    fit_agreement = agreement(run, recipe, model, self.seed)
            except StreamRLError as error:
                notes.append(f"the recorded recipe cannot be simulated: {error}")
            if fit_agreement:
                notes += fit_agreement.notes()
            else:
                notes.append("nothing tells how well this run is simulated")
            notes.append(f"assumed, not fitted: {', '.join(fit.assumed)}")
        if any(not line.finish_reason for line in run.trajectories):
            notes.append(
                "the run stopped some completions before their end; they are taken to be as long as others that were "
                "longer: a record of synchronous rounds answers better"
            )
        lengths = cache(lambda seed: RecordedLengths(run, seed=seed))
        return name, make_world(model=_timed(model, factor), lengths=lengths, agreement=fit_agreement), notes


def _timed(model: FleetModel, factor: float) -> FleetModel:
    return replace(model, environment=replace(model.environment, factor=factor * model.environment.factor))


class Simulate(InVirtualTime, frozen=True, kw_only=True):
    """Run the control core of a recipe against models of engines, rewards and training."""

    recipe: RecipePath
    overrides: Overrides = ()
    trace: Annotated[Path | None, Argument("a recorded run: its fleet, and its lengths", metavar="RUN")] = None
    compare: Annotated[
        str,
        Argument(
            "rounds or systems to compare, each with its settings: continuous:rollout.max_staleness=2,synchronous",
            metavar="POLICY,...",
        ),
    ] = ""
    steps: Annotated[int, Argument("optimizer steps that count (default 40)", metavar="N")] = 40
    timeline: Annotated[
        Path | None, Argument("write Chrome trace events here, for ui.perfetto.dev", metavar="FILE.json")
    ] = None

    def run(self) -> int:
        """Simulate each candidate, print the tables (or JSON)."""
        recipes = candidates(self)
        name, world, notes = self.world(self.trace)
        cap = world.lengths(self.seed).cap
        notes += [note for _, recipe in recipes for note in differences(recipe, world.model, cap)]
        for note in dict.fromkeys(notes):
            print(f"note: {note}", file=sys.stderr)
        trace = ChromeTrace() if self.timeline else None
        outcomes = [_simulate_one(candidate, recipe, name, world, trace) for candidate, recipe in recipes]
        if trace is not None and self.timeline is not None:
            write_output("--timeline", self.timeline, trace.encoded())
        if self.json:
            print_json(outcomes)
            return 0
        wide = wide_console()
        wide.print(f"fleet {name}: {_fleet_sentence(world.model)}")
        for outcome in outcomes:
            if outcome.unknown:
                wide.print(f"{outcome.name}: {outcome.unknown}")
        for table in (speed_table(outcomes), quality_table(outcomes), kinds_table(outcomes)):
            wide.print(table)
        return 0


class Calibrate(Command, frozen=True):
    """Fit a fleet model to a recorded run."""

    recorded: Annotated[Path, Argument("the directory of a run, or a trace file", metavar="RUN", positional=True)]
    out: Annotated[Path | None, Argument("write the fleet model here (default: print it)", metavar="FILE")] = None

    def run(self) -> int:
        """Write or print the fleet model; its errors against the run are printed on stderr."""
        fit = calibrate(load_recording(self.recorded), _recipe_of(self.recorded))
        text = toml_document(fit.model)
        print(
            f"fitted to {fit.completions} completions and {fit.steps} steps of {self.recorded}: decode steps within "
            f"{fit.step_error:.1%}, times from launch to last token within {fit.life_error:.1%} (medians); "
            f"assumed, not fitted: {', '.join(fit.assumed)}",
            file=sys.stderr,
        )
        lines = [text.rstrip("\n")]
        if self.out is not None:
            write_output("--out", self.out, text.encode())
            lines = [f"wrote {self.out}; use it with: streamrl simulate RECIPE --fleet {self.out}"]
        return self.print(fit, *lines)


class Outcome(Struct, frozen=True, kw_only=True):
    """One line of the output. ``took_s``: real seconds. ``report``: figures of the simulation; ``slower``: factor of
    its seconds in the tables, which scales them to a recorded run; ``unknown``: reason why they are no forecast."""

    name: str
    fleet: str
    took_s: float
    report: SimulationReport
    slower: float = 1.0
    unknown: str = ""


def candidates(request: Simulate) -> list[tuple[str, Recipe]]:
    """Return the recipe with its name, or a recipe for each ``rounds[:key=value...]`` or system of --compare. Raises
    ``RecipeError``."""
    if not request.compare:
        recipe = load_recipe(recipe_file(request.recipe), request.overrides)
        return [(str(recipe.rollout.rounds), recipe)]
    return compared_recipes(recipe_file(request.recipe), request.overrides, request.compare, "--compare")


def _recipe_of(trace: Path) -> Recipe | None:
    """Return the recipe of the run that recorded ``trace``."""
    recipe = (trace if trace.is_dir() else trace.parent) / "recipe.toml"
    return load_recipe(recipe) if recipe.is_file() else None


def _simulate_one(name: str, recipe: Recipe, fleet: str, world: World, trace: ChromeTrace | None) -> Outcome:
    started_at = time.monotonic()
    with StdoutReporter(sys.stderr) as screen:

        def progress(version: int) -> None:
            if time.monotonic() - started_at > PROGRESS_AFTER_S:
                screen.progress(name, version, world.steps + world.warm_up)

        lengths = world.lengths(world.seed)
        seed = world.seed
        warm_up = world.warm_up
        report = simulate_recipe(
            recipe, world.model, world.steps, lengths, seed=seed, warm_up=warm_up, progress=progress, trace=trace
        )
    outcome = Outcome(name=name, fleet=fleet, took_s=time.monotonic() - started_at, report=report)
    if not world.agreement:
        return outcome
    return replace(outcome, slower=world.agreement.slower(report), unknown=world.agreement.unknown(report, recipe))


def _fleet_sentence(model: FleetModel) -> str:
    engine = model.engine
    lengths = model.lengths
    sentence = (
        f"{model.engines.count} engines of {engine.max_num_seqs} requests, a decode step of 1 takes "
        f"{engine.step_s(1) * 1e3:.3g} ms, of {engine.max_num_seqs} {engine.step_s(engine.max_num_seqs) * 1e3:.3g} ms; "
        f"completions to {lengths.cap} tokens. All times are simulated."
    )
    if hosts := hosts_sentence(model):
        sentence += f" {hosts}."
    return sentence


def hosts_sentence(model: FleetModel) -> str:
    """Describe the hosts of the fleet and the way of weights to them; empty where no hosts are modelled."""
    hosts = model.hosts
    if not hosts.count:
        return ""
    route = "by relays" if hosts.weights == "relay" else "from the trainer to each"
    return (
        f"{hosts.count} hosts of {hosts.link.gbit_s:g} Gbit/s, the trainer's {hosts.trainer_link.gbit_s:g}; "
        f"{hosts.push_bytes / 1e9:.3g} GB of weights {route} take {hosts.push_s(range(hosts.count)):.3g} s"
    )


def speed_table(outcomes: list[Outcome]) -> Table:
    """One row a candidate: times and rates. Speed-ups are relative to the first candidate."""
    first = outcomes[0].report
    first_slower = outcomes[0].slower

    def row(outcome: Outcome) -> Row:
        report = outcome.report
        slower = outcome.slower
        yield "rounds", outcome.name
        yield "step s", f"{report.step_s_mean * slower:.3g}"
        yield "P50", f"{report.step_s_p50 * slower:.3g}"
        yield "P95", f"{report.step_s_p95 * slower:.3g}"
        yield "groups/s", f"{report.groups_s / slower:.3g}"
        yield "goodput tok/s", f"{report.goodput / slower:.0f}"
        yield "speed in groups", f"{report.groups_s / first.groups_s * first_slower / slower:.2f}"
        yield "in tokens", f"{report.goodput / first.goodput * first_slower / slower:.2f}"
        yield "preemptions", str(report.preemptions)

    return results_table("simulated", map(row, outcomes))


def quality_table(outcomes: list[Outcome]) -> Table:
    """One row a candidate: use of the engines' time, age and length of the trained completions."""

    def row(outcome: Outcome) -> Row:
        report = outcome.report
        yield "rounds", outcome.name
        yield "bubble", f"{report.rollout_bubble:.3f}"
        yield "free slots", f"{report.free_slots:.3f}"
        if any(candidate.report.environment_s for candidate in outcomes):
            yield "sampling s", f"{report.sampling_s * outcome.slower:.3g}"
            yield "environment s", f"{report.environment_s:.3g}"
        yield "staleness", f"{report.staleness_mean:.2f}"
        yield "largest", str(report.staleness_max)
        yield "wait", f"{report.wait_mean:.2f}"
        yield "largest", str(report.wait_max)
        yield "length", f"{report.length_ratio:.3f}"
        yield "wasted", f"{report.wasted_share:.1%}"
        yield "push s", f"{report.push_s * outcome.slower:.3g}"
        yield "of a step", f"{report.push_share:.1%}"
        if any(candidate.report.hosts for candidate in outcomes):
            yield "hosts", str(report.hosts)
            yield "lost, joined", f"{report.hosts_lost}, {report.hosts_joined}"
            yield "requests moved", str(report.requests_moved)
        yield "stragglers", f"{report.straggler_rate:.2f}"

    return results_table("", map(row, outcomes))


def kinds_table(outcomes: list[Outcome]) -> Table:
    """One row a kind of round: its time, and the lengths it trains on next to the unbiased lengths of the prompts."""

    def row(outcome: Outcome, kind: KindSummary) -> Row:
        unbiased = outcome.report.unbiased
        yield "rounds", outcome.name
        yield "kind", kind.round_kind
        yield "steps", str(kind.steps)
        yield "step s", f"{kind.step_s:.3g}"
        yield "rollout s", f"{kind.rollout_s:.3g}"
        yield "longest", f"{kind.longest_mean:.0f}"
        yield "trained mean", f"{kind.trained.mean:.1f}"
        yield "P95", str(kind.trained.p95)
        yield "at cap", f"{kind.trained.cap_share:.2%}"
        yield "unbiased", f"{unbiased.mean:.1f}, {unbiased.p95}, {unbiased.cap_share:.2%}"

    rows = (row(outcome, kind) for outcome in outcomes for kind in outcome.report.kinds)
    return results_table("by kind of round; unbiased: mean, P95, share at the cap", rows)


def results_table(title: str, rows: Iterable[Row]) -> Table:
    """Return a table of rows with the same columns; columns of words are aligned on the left."""
    table = Table(title=title or None)
    for row in rows:
        columns, cells = zip(*row, strict=True)
        if not table.columns:
            for column in columns:
                table.add_column(column, justify="left" if column in _WORDS else "right", overflow="fold")
        table.add_row(*cells)
    return table


def write_output(flag: str, path: Path, content: bytes) -> None:
    """Write ``path``. Raises ``RecipeError`` that names ``flag`` if the file cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RecipeError(f"{flag} {path}: {error.strerror}: name a file that can be written to") from error

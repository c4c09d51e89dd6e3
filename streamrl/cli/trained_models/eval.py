"""``streamrl eval MODEL RECIPE``: the recipe's held-out prompts and rewards on a model, without training. Runs in the
command's own process, with one engine as its child process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import json
from msgspec.structs import replace
from rich.table import Table

from streamrl.base.atomic_files import PRIVATE
from streamrl.base.errors import RecipeError
from streamrl.cli.command import Argument, Command, Overrides, print_json, recipe_file, refuse_no_folder
from streamrl.cli.run_for_report import run_for_report
from streamrl.cli.trained_models.model_evaluation import EvaluatedPass, EvaluationPass, evaluate_model
from streamrl.cli.trained_models.saved_model import find_model
from streamrl.observe.terminal.console import open_console
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.prepare.preflight import check_model
from streamrl.prepare.summary import SIMULATED_SENTENCE
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.remote_names import HUB
from streamrl.recipe.rules.load_recipe import load_recipe, resolve_spec
from streamrl.recipe.sections import ONE_SET, EngineKind, Lora, Recipe
from streamrl.recipe.toml_text import toml_value
from streamrl.run.evaluate.evaluation import EvaluationRun
from streamrl.run.evaluate.sample_files import sample_line

_NAMES = "a folder, a run, RUN@VERSION (a number, latest, best), or a name on the Hub"


class Eval(Command, frozen=True, kw_only=True):
    """Evaluate a model on the held-out prompts of a recipe, with its rewards, on one engine: avg@k and pass@k of
    evaluation.samples completions, and greedy. Nothing is trained."""

    model: Annotated[str, Argument(_NAMES, metavar="MODEL", positional=True)]
    recipe: Annotated[
        Path | None, Argument("a recipe, or a run (default: that of MODEL)", metavar="RECIPE", positional=True)
    ] = None
    overrides: Overrides = ()
    prompts: Annotated[str, Argument("in place of evaluation.prompts", metavar="PROMPTS")] = ""
    samples: Annotated[int | None, Argument("in place of evaluation.samples", metavar="K")] = None
    limit: Annotated[int, Argument("the first prompts alone", metavar="N", flag="-n")] = 0
    no_greedy: Annotated[bool, Argument("only the samples")] = False
    out: Annotated[Path | None, Argument("write every completion here, a JSON line each", metavar="FILE")] = None

    def run(self) -> int:
        """1 when no completion got a score."""
        refuse_no_folder("--out", self.out)
        recipe, version = self._recipe()
        if self.out is not None:
            self.out.touch(PRIVATE)
        evaluated = run_for_report(lambda: self._evaluate(recipe, version or 0))
        if self.out is not None:
            tokenizer = load_tokenizer(recipe.model.path)
            lines = (sample_line(outcome, tokenizer) for _, outcomes in evaluated for outcome in outcomes)
            self.out.write_bytes(b"".join(json.encode(line) + b"\n" for line in lines))
        passes = [evaluation_pass for evaluation_pass, _ in evaluated]
        if self.json:
            print_json({"model": recipe.model.path, "version": version, "passes": passes})
        else:
            open_console(soft_wrap=True).print(_table(passes, recipe))
        return 0 if any(scores for result in passes for scores in result.scores.values()) else 1

    def _recipe(self) -> tuple[Recipe, int | None]:
        """Return the recipe with the named model, and the version of the run where the model is from a run. Raises
        ``StreamRLError``."""
        folder, saved = find_model(self.model)
        path = self.recipe or (saved.run if saved else None)
        if path is None:
            raise RecipeError(f"{self.model} is no run: name the recipe too: streamrl eval MODEL RECIPE")
        prompts = self.prompts if self.prompts.startswith(HUB) else resolve_spec(self.prompts, Path.cwd())
        flags = {"model.path": folder, "evaluation.prompts": prompts, "evaluation.samples": self.samples}
        settings = [f"{key}={toml_value(value)}" for key, value in flags.items() if value not in (None, "")]
        recipe = load_recipe(recipe_file(path), [*self.overrides, *settings])
        if not recipe.evaluation.sets:
            raise RecipeError(f"{path} has no evaluation.prompts: name some: --prompts FILE")
        if self.limit < 0:
            raise RecipeError(f"-n {self.limit}: write a number of prompts, or 0 for all")
        if recipe.judge.model:
            raise RecipeError(f"{path} has a judge.model, which eval does not start: leave it out, or name an endpoint")
        source = next(iter(recipe.evaluation.sets.values())).prompts  # in place of those that are trained on
        sets = {name: replace(settings, prompts=source) for name, settings in recipe.prompts.all_sets.items()}
        prompts_read = replace(recipe.prompts, train=source if ONE_SET in sets else sets)
        evaluation = replace(recipe.evaluation, limit=self.limit)
        recipe = with_hub_folders(replace(recipe, prompts=prompts_read, evaluation=evaluation, lora=Lora()))
        check_model(recipe)
        return recipe, saved.version if saved else None

    async def _evaluate(self, recipe: Recipe, version: int) -> list[EvaluatedPass]:
        tokenizer = load_tokenizer(recipe.model.path)
        greedy = not self.no_greedy and recipe.evaluation.temperature != 0
        with StdoutReporter(sys.stderr) as screen:

            def progress(evaluation: EvaluationRun) -> None:
                screen.progress("completions", len(evaluation.outcomes), evaluation.completions)

            start = partial(screen.line, f"starting an engine of {recipe.model.path}")
            return await evaluate_model(
                recipe, version, tokenizer, greedy=greedy, on_start=start, on_completion=progress
            )


def _table(passes: Sequence[EvaluationPass], recipe: Recipe) -> Table:
    caption = f"{recipe.model.path}, at most {recipe.sampling.max_tokens} tokens"
    if recipe.engines.kind is EngineKind.SIMULATED:
        caption += f"; {SIMULATED_SENTENCE}"
    failed = sum(value for result in passes for name, value in result.figures.items() if name.endswith("/failed"))
    if failed:
        caption += f"; {failed:.0f} completions have no score, --out FILE says why"
    table = Table(box=None, pad_edge=False, header_style="dim", caption_justify="left")
    table.caption = caption
    for name in ("set", "score", "value", "95 % interval", "prompts", "temperature"):
        table.add_column(name, justify="left" if name in ("set", "score") else "right")
    for result in passes:
        for name, scores in result.scores.items():
            prompts = f"{result.figures[f'eval/{name}/prompts']:.0f}"
            for metric, score in scores.items():
                interval = None if score.low is None else f"{score.low:.3f} to {score.high:.3f}"
                label = metric if result.temperature else f"greedy {metric}"
                table.add_row(name, label, f"{score.value:.3f}", interval, prompts, f"{result.temperature:g}")
    return table

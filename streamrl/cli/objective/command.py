"""``streamrl objective test FUNCTION``: the gradients of a loss of the user's own beside float64, and the promises of a
run that it keeps. The function runs in a child process; the command's own process prints the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command, recipe_file
from streamrl.cli.control import reward_option
from streamrl.learning.custom_objective.objective_trial import ObjectiveTrial, try_objective
from streamrl.recipe.objective import Objective, OffPolicy
from streamrl.recipe.objectives.custom import CUSTOM
from streamrl.recipe.rules.load_recipe import load_recipe, resolve_function

_VERDICTS = {(True, True): "holds", (True, False): "broken", (False, True): "", (False, False): "note"}


class TestObjective(Command, frozen=True, kw_only=True):
    """Compare a loss, or advantages, of your own with float64 over random batches (streamed, packed, stale, turns,
    truncated), and say which promises of a run it keeps."""

    function: Annotated[str, Argument("module:name or file.py:name", metavar="FUNCTION", positional=True)]
    option: Annotated[Texts, Argument("one of objective.advanced.options; may be repeated", metavar="KEY=VALUE")] = ()
    advantages: Annotated[bool, Argument("try its advantages, which a recipe takes by advantages = custom")] = False
    recipe: Annotated[
        Path | None, Argument("with the clip, the options and [off_policy] of this recipe", metavar="RECIPE")
    ] = None

    def run(self) -> int:
        """1 when a run would be refused."""
        objective = Objective()
        off_policy = OffPolicy()
        if self.recipe is not None:
            recipe = load_recipe(recipe_file(self.recipe))
            objective = recipe.objective
            off_policy = recipe.off_policy
        part = "advantages" if self.advantages else "surrogate"
        objective = replace(
            objective,
            function=resolve_function(self.function, Path.cwd()),
            options=objective.options | dict(map(reward_option, self.option)),
            **{"surrogate": None, "advantages": None, part: CUSTOM},
        )
        if ":" not in self.function:
            raise RecipeError(f'"{self.function}" does not name a function: write "file.py:name" or "module:name"')
        trial = try_objective(objective, off_policy)
        self.print(trial, *_lines(self.function, trial))
        return 1 if trial.refusals else 0


def _lines(function: str, trial: ObjectiveTrial) -> list[str]:
    """Describe a trial, a line for each promise."""
    lines = [f"{function}: {' and '.join(trial.parts)}" if trial.parts else function]
    lines += [f"  refused: {problem}" for problem in trial.problems]
    width = max((len(promise.name) for promise in trial.promises), default=0)
    for promise in trial.promises:
        verdict = _VERDICTS[promise.needed, promise.holds]
        error = " " * 5
        if promise.error is not None:
            error = f"{promise.error:.0e}"
        lines.append(f"  {promise.name:<{width}}  {verdict:<6}  {error:>5}  {promise.text}")
    return lines

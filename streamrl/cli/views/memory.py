"""``streamrl memory RECIPE``: whether a recipe fits GPUs that this host does not have, and what takes their memory.
Runs in the command's own process, and reads the headers of the model's files."""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, recipe_file
from streamrl.prepare.card_fits import fit_on
from streamrl.prepare.hub.resolution import hub_looked_up
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import LoraSync

CARDS = (16, 24, 40, 80)


class Memory(Command, frozen=True, kw_only=True):
    """Say whether a recipe fits GPUs that are not here: engines and trainer ranks side by side, in turns, or not at
    all, with the GiB that are predicted for each part of a rank. Nothing is started or downloaded but the headers of
    the model."""

    recipe: RecipePath
    cards: Annotated[tuple[int, ...], Argument("GB of the cards to try (default 16,24,40,80)", metavar="GB,GB")] = CARDS
    gpus: Annotated[int, Argument("number of GPUs (default 1)", metavar="N")] = 1
    older: Annotated[bool, Argument("cards without bfloat16, below compute capability 8.0, such as a T4")] = False
    overrides: Overrides = ()

    def run(self) -> int:
        """Print a line for each card. Raises ``RecipeError`` for a recipe or a model that cannot be read."""
        if self.gpus < 1 or not self.cards or min(self.cards) < 1:
            raise RecipeError(f"--gpus {self.gpus} --cards {','.join(map(str, self.cards))}: at least 1 each")
        with hub_looked_up(load_recipe(recipe_file(self.recipe), self.overrides)) as hub:
            recipe = hub.recipe
            note = ""
            if recipe.lora.rank and recipe.lora.sync is LoraSync.AUTO:
                recipe = replace(recipe, lora=replace(recipe.lora, sync=LoraSync.ADAPTER))
                note = 'lora.sync = "adapter" is assumed, which "auto" becomes where vLLM can serve the adapter'
            fits = [fit_on(recipe, card, self.gpus, older=self.older) for card in self.cards]
        return self.print({"cards": fits}, *(fit.line() for fit in fits), *filter(None, [note]))

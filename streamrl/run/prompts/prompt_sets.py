"""Prompts of the training sets, drawn in the order of control (``control/mixture.py``). ``launch/sampling.py`` opens
them in the controller process, and ``streamrl try`` in its own."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from streamrl.base.types import Prompt
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.sections import ONE_SET, Recipe, TrainingSet
from streamrl.run.prompts.open_prompts import OpenPrompts, open_prompts
from streamrl.run.prompts.prompt_spec import environment_writes, training_sources, with_settings


class PromptSets:
    """Draws from the sources of the training sets.

    ``sources``: open source of each set by name; ``ONE_SET`` for a run of a single source;
    ``settings``: settings of each set;
    ``size``: number of prompts of the single source in one epoch (None: there is no such number)."""

    def __init__(self, sources: Mapping[str, OpenPrompts], settings: Mapping[str, TrainingSet]) -> None:
        self._sources = sources
        self._settings = settings
        self.size = sources[ONE_SET].size if ONE_SET in sources else None
        self._waiting: defaultdict[str, deque[Prompt]] = defaultdict(deque)

    async def draw(self, count: int, sets: Sequence[str] = ()) -> list[Prompt]:
        """Return the next ``count`` prompts of a single source, or the next one of each of ``sets``, in their order;
        fewer where a source is exhausted. Prompts of a set have its name before their id, so that two sets may have the
        same rows."""
        if not sets:
            if ONE_SET not in self._sources:
                return []  # all of several sets are exhausted
            return await self._sources[ONE_SET].draw(count)
        for name, ordered in Counter(sets).items():
            waiting = self._waiting[name]  # of a draw that was cancelled while another set was read
            if missing := ordered - len(waiting):
                prompts = await self._sources[name].draw(missing)
                waiting.extend(_of_set(with_settings(prompt, self._settings[name]), name) for prompt in prompts)
        return [self._waiting[name].popleft() for name in sets if self._waiting[name]]

    async def aclose(self) -> None:
        """Close all sources. Idempotent."""
        for source in self._sources.values():
            await source.aclose()


def _of_set(prompt: Prompt, name: str) -> Prompt:
    return replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", set=name)


def open_training_sets(recipe: Recipe, tokenizer: Tokenizer, positions: Mapping[str, int]) -> PromptSets:
    """Open the sources of the training sets. ``positions``: number of prompts that were drawn from each set before (0
    for others). Raises ``RecipeError`` as ``open_prompts`` does."""
    sources = {}
    settings = dict(recipe.prompts.sets)
    for name, source in training_sources(recipe).items():
        is_written = environment_writes(recipe, settings[name])
        if recipe.environment.configured and not is_written:  # the run's own limit is that of episodes
            settings[name] = replace(settings[name], max_tokens=recipe.token_limit(settings[name]))
        sources[name] = open_prompts(
            source,
            None if is_written else tokenizer,
            seed=recipe.run.seed,
            shuffle=recipe.prompts.shuffle,
            start=positions.get(name, 0),
        )
    return PromptSets(sources, settings)

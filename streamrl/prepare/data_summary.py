"""Lines of the dry run about the rows of a recipe: how many there are and how often each is drawn, values that many of
them lack, and held-out prompts that are trained on. Pure; called once preflight has read the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.recipe.sections import Recipe
from streamrl.run.prompts.row_notes import RowNotes


def data_lines(recipe: Recipe, notes: Mapping[str, RowNotes]) -> Iterator[str]:
    """Yield the lines of every source. ``notes``: notes of each source by the path of its key."""
    trained = notes.get("prompts.train", RowNotes())
    for path, source in notes.items():
        rows = f"{source.size:,} rows" if source.size else "an iterator, of which the first row is read"
        line = f"{path}: {rows}"
        if source is trained and source.size:
            batch = recipe.rollout.prompts_per_batch
            drawn = recipe.run.prompts or recipe.run.steps * batch
            line += f"; {drawn:,} prompts, {batch} a step: {drawn / source.size:.3g} passes"
            if batch > source.size:
                line += f"; warning: a batch is larger than all rows, and has each {batch / source.size:.3g} times"
        yield line
        yield from (f"  warning: {note}" for note in source.lines())
        shared = len(source.prompts & trained.prompts)
        if shared and source is not trained:
            yield f"  warning: {shared:,} of its {len(source.prompts):,} different prompts are in prompts.train too"

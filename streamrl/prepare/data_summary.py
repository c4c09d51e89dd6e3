"""Lines of the dry run about the rows of a recipe: how many there are and how often each is drawn, values that many of
them lack, and held-out prompts that are trained on. Pure; called once preflight has read the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.recipe.sections import Recipe
from streamrl.run.prompts.imitated_rows import rows_until
from streamrl.run.prompts.prompt_spec import training_path
from streamrl.run.prompts.row_notes import RowNotes


def data_lines(recipe: Recipe, notes: Mapping[str, RowNotes]) -> Iterator[str]:
    """Yield the lines of every source that was read. ``notes``: notes of each source by the path of its key."""
    imitated = {training_path(recipe, name): name for name in recipe.prompts.imitated}
    shares = {training_path(recipe, name): share for name, share in recipe.prompts.shares.items()}
    trained = {hashed for path, source in notes.items() if path.startswith("prompts.") for hashed in source.prompts}
    for path, source in notes.items():
        if not source.rows and not source.size:
            continue
        is_trained = path.startswith("prompts.")
        rows = f"{source.size:,} rows" if source.size else "an iterator, of which the first row is read"
        line = f"{path}: {rows}"
        if path in imitated:
            count = rows_until(recipe, imitated[path], recipe.run.steps)
            line += f"; imitated, {count:,} in {recipe.run.steps} steps"
            if source.size:
                line += f": {count / source.size:.3g} passes"
        elif is_trained and source.size:
            share = shares.get(path, 1.0)
            batch = recipe.rollout.prompts_per_batch * share
            drawn = (recipe.run.prompts or recipe.run.steps * recipe.rollout.prompts_per_batch) * share
            if path in shares:
                line += f"; share {share:.3g}"
            line += f"; {drawn:,.0f} prompts, {batch:,.6g} a step: {drawn / source.size:.3g} passes"
            if batch > source.size:
                line += f"; warning: a batch is larger than all rows, and has each {batch / source.size:.3g} times"
        yield line
        yield from (f"  warning: {note}" for note in source.lines())
        shared = 0 if is_trained else len(source.prompts & trained)
        if shared:
            yield f"  warning: {shared:,} of its {len(source.prompts):,} different prompts are in prompts.train too"

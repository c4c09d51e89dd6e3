"""streamrl: RL post-training for language models as one long-lived asyncio pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.launch.pipeline import Pipeline
    from streamrl.recipe.rules.load import load_recipe
    from streamrl.recipe.sections import Recipe

__all__ = ["Pipeline", "Recipe", "load_recipe"]


def __getattr__(name: str) -> Any:
    # Lazy: vLLM's worker processes and user code import parts of this package and must not load all of it.
    if name == "Pipeline":
        from streamrl.launch.pipeline import Pipeline

        return Pipeline
    if name == "Recipe":
        from streamrl.recipe.sections import Recipe

        return Recipe
    if name == "load_recipe":
        from streamrl.recipe.rules.load import load_recipe

        return load_recipe
    raise AttributeError(f"module 'streamrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

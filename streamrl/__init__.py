"""streamrl: RL post-training for language models as one long-lived asyncio pipeline."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.cli.try_rewards.recipe_trial import try_recipe
    from streamrl.contracts import Observer, RoundPolicy, Sink
    from streamrl.launch.pipeline import Pipeline
    from streamrl.observe.terminal.live_curve import live_curve
    from streamrl.recipe.rules.load_recipe import load_recipe
    from streamrl.recipe.sections import Recipe

__all__ = ["Observer", "Pipeline", "Recipe", "RoundPolicy", "Sink", "live_curve", "load_recipe", "try_recipe"]

# Lazy: vLLM's worker processes and user code import parts of this package and must not load all of it.
_PLACES = dict.fromkeys(("Observer", "RoundPolicy", "Sink"), "contracts") | {
    "Pipeline": "launch.pipeline",
    "Recipe": "recipe.sections",
    "live_curve": "observe.terminal.live_curve",
    "load_recipe": "recipe.rules.load_recipe",
    "try_recipe": "cli.try_rewards.recipe_trial",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'streamrl' has no attribute {name!r}")
    return getattr(import_module(f"streamrl.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

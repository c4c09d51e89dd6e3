"""Rules of ``engines.gpu_sharing``: settings that do not fit turns. ``prepare.gpu_placement`` reads them, too, before
it chooses turns for ``auto``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.recipe.rules.rule import Broken, Problem, rule
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe, ReleaseKind


class Obstacle(NamedTuple):
    """A setting that keeps engines and trainer ranks from taking turns, the reason, and the setting that does not."""

    reason: str
    remedy: str


def obstacles_to_turns(recipe: Recipe) -> Iterator[Obstacle]:
    """Yield what keeps engines and trainer ranks of ``recipe`` from taking turns, whatever ``gpu_sharing`` says."""
    rollout = recipe.rollout
    engines = recipe.engines
    if rollout.rounds in (RoundKind.CONTINUOUS, RoundKind.CUSTOM) and not recipe.on_policy:
        reason = f'rollout.rounds = "{rollout.rounds}" at staleness {rollout.max_staleness}, whose rounds have no end'
        yield Obstacle(reason, 'set rollout.rounds = "synchronous", or other rounds that end')
    if rollout.presubmit:
        reason = "rollout.presubmit = true, whose requests wait in engines that would be asleep"
        yield Obstacle(reason, "set rollout.presubmit = false")
    if engines.sets:
        yield Obstacle("engines.sets, of which all but one sleep already", "leave engines.sets out")
    if engines.release is not ReleaseKind.NEVER:
        reason = f'engines.release = "{engines.release}", which trains while others sample'
        yield Obstacle(reason, 'set engines.release = "never"')
    if not recipe.on_one_host:
        yield Obstacle(
            f'cluster.kind = "{recipe.cluster.kind}", whose hosts share no GPU', 'set cluster.kind = "local"'
        )
    if recipe.weights.transport:
        yield Obstacle("weights.transport, whose engines are on another site", "leave weights.transport out")


@rule("engines", "rollout", "tail_batching", "length_sorted", "cluster.kind", "weights.transport")
def turns_of_gpus(recipe: Recipe) -> Broken:
    """Engines and ranks take turns only where a round is sampled before it is trained, on one host."""
    if recipe.in_turns:
        for reason, remedy in obstacles_to_turns(recipe):
            text = f'"in_turns" does not fit {reason}: {remedy}, or gpu_sharing = "side_by_side"'
            yield Problem("engines.gpu_sharing", text)

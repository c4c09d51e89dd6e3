"""Fit of a recipe on GPUs that this host may not have, as ``streamrl memory`` prints it. Called in the process of the
command."""

from __future__ import annotations

from msgspec import Struct

from streamrl.engines.vllm.visible_gpus import Gpu
from streamrl.learning.rank_memory import Card
from streamrl.prepare.gpu_placement import CONTEXT_BYTES, GpuPlacement, gpu_placement
from streamrl.prepare.memory import GIB, device_bytes
from streamrl.prepare.preflight import check_model
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import prepared_sets

LEAST_SHARE = 0.96
"""Share of the memory in a card's name that the smallest card of this name shows."""


class CardFit(Struct, frozen=True, kw_only=True):
    """Fit of a recipe on cards of one size. Sizes are GiB of one GPU.

    ``mode``: ``apart`` (no GPU has both), ``side by side``, ``in turns`` or ``refused``.
    ``engine``: memory of the engines of one GPU.
    ``state``: weights, gradient, optimizer and baseline of a trainer rank.
    ``step``: activations, logits and bfloat16 copies of its step.
    ``unseen``: share that is added for memory that is not counted, and CUDA's own.
    ``problem``: the reason why it is refused."""

    card: int
    mode: str
    engine: float
    state: float
    step: float
    unseen: float
    problem: str = ""

    @property
    def rank(self) -> float:
        """Sum of the parts of a rank."""
        return self.state + self.step + self.unseen

    def line(self) -> str:
        """The fit as one line."""
        text = f"{self.card:>3} GB  {self.mode:<12} "
        if self.problem:
            return text + self.problem
        parts = f"state {self.state:.1f}, step {self.step:.1f}, unseen {self.unseen:.1f}"
        return f"{text} engines {self.engine:.1f}, a rank {self.rank:.1f} GiB ({parts})"


def fit_on(recipe: Recipe, card: int, count: int, *, older: bool) -> CardFit:
    """Return the fit of ``recipe`` on ``count`` GPUs with ``card`` GB. ``older``: whether they lack bfloat16.
    Raises ``RecipeError`` for a model that cannot be read."""
    facts = check_model(recipe).facts
    memory = int(card * LEAST_SHARE * GIB)
    gpus = [Gpu(str(number), memory, has_bfloat16=not older) for number in range(count)]
    placement = gpu_placement(recipe, gpus)
    rank = device_bytes(recipe, facts, Card(memory, has_bfloat16=not older))
    step = rank.casts + rank.gathered + rank.backward
    return CardFit(
        card=card,
        mode=_mode(placement),
        engine=_engine_bytes(recipe, placement) / GIB,
        state=(rank.total - step - rank.unseen) / GIB,
        step=step / GIB,
        unseen=(rank.unseen + CONTEXT_BYTES) / GIB,
        problem="; ".join(placement.problems),
    )


def _mode(placement: GpuPlacement) -> str:
    if placement.problems:
        return "refused"
    if not placement.shared_gpus:
        return "apart"
    return "in turns" if placement.in_turns else "side by side"


def _engine_bytes(recipe: Recipe, placement: GpuPlacement) -> int:
    """Bytes that the engines of the first set take of the first GPU."""
    engines = [placement.tenants.get(name) for name in prepared_sets(recipe)[0].engines]
    gpu = placement.gpus[0]
    return sum(engine.bytes_on(gpu) for engine in engines if engine is not None and gpu in engine.gpus)

"""Options of a trainer rank, as one frozen struct: no recipe is read inside ``learning``."""

from __future__ import annotations

from functools import partial

import torch
from msgspec import structs

from streamrl.base.run_process import usable_cores
from streamrl.learning.routing_replay import replays_routing
from streamrl.learning.threads import trainer_threads
from streamrl.pretrained.tokenizer import end_tokens
from streamrl.recipe.environment import Credit
from streamrl.recipe.objective import ObjectiveSettings, OffPolicy, why_not_streaming
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Lora, Recipe, Training


class TrainerOptions(Training, frozen=True, kw_only=True):
    """One rank of the trainer: ``training`` of the recipe, and what else of the run it needs to know.

    ``rendezvous``: ``tcp://host:port`` or ``file:///path`` where the ranks meet; empty with one rank.
    ``temperature`` to ``min_tokens`` are those of the engines: the policy that is differentiated is the one that
    sampled. ``end_tokens``: ids that cannot be among the first ``min_tokens`` (empty where that is 0).
    ``threads`` 0: every core; ``idle_threads``: while the engines of the host do nothing (0: as many);
    ``freed_threads``: while one of them does nothing, two of them, ... (empty: always ``threads``).
    ``streaming``: groups may be trained before their batch is closed.
    ``shortest_first``: several updates on a batch take its groups in the order of their lengths.
    ``parameters``: of the model, once it is loaded. ``steps``: of the run.
    ``canary``: engines want to know what each version finds for the canary's tokens.
    ``resume_from``: a directory that ``save_checkpoint`` wrote; empty: the weights of ``model_path``."""

    model_path: str
    run_id: str
    weights_endpoint: str
    seed: int = 0
    steps: int = 1
    rank: int = 0
    rendezvous: str = ""
    idle_threads: int = 0
    freed_threads: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    max_tokens: int = 512
    objective: ObjectiveSettings = ObjectiveSettings()
    credit: Credit = Credit.TRAJECTORY
    off_policy: OffPolicy = OffPolicy()
    lora: Lora = Lora()
    shortest_first: bool = False
    collective_timeout_s: float = 600.0
    parameters: int = 0
    canary: bool = False
    resume_from: str = ""

    def threads_while(self, freed: int) -> int:
        """Torch's threads while ``freed`` engines of the host do nothing."""
        return self.freed_threads[freed - 1] if 0 < freed <= len(self.freed_threads) else self.threads


def trainer_options(
    recipe: Recipe, rank: int, run_id: str, weights_endpoint: str, *, rendezvous: str = "", resume_from: str = ""
) -> TrainerOptions:
    """Options of one rank. Without ``rendezvous`` several ranks meet at a file beside their ipc endpoints."""
    training = recipe.training
    objective = recipe.objective_settings
    sampling = structs.asdict(recipe.sampling)
    del sampling["stop"]
    sampling["max_tokens"] = recipe.most_tokens
    if training.ranks > 1 and not rendezvous and weights_endpoint.startswith("ipc://"):
        directory = weights_endpoint.removeprefix("ipc://").rpartition("/")[0]
        rendezvous = f"file://{directory}/trainer.rendezvous"

    threads = partial(trainer_threads, recipe, usable_cores(), engines_on_cpu=not torch.cuda.is_available())
    decided = {
        "threads": threads(),
        "streaming": training.streaming
        and not recipe.run.deterministic
        and not why_not_streaming(objective, training.updates_per_batch, training.epochs_per_batch),
        "end_tokens": end_tokens(recipe.model.path).ids if recipe.sampling.min_tokens else (),
        "routing_replay": replays_routing(recipe),
    }
    return TrainerOptions(
        **structs.asdict(training) | decided | sampling,
        model_path=recipe.model.path,
        run_id=run_id,
        seed=recipe.run.seed,
        steps=recipe.run.steps,
        weights_endpoint=weights_endpoint,
        rank=rank,
        rendezvous=rendezvous,
        idle_threads=threads(engines_on_cpu=False),
        freed_threads=tuple(threads(freed=freed) for freed in range(1, recipe.engines.count + 1)),
        objective=objective,
        credit=recipe.environment.credit,
        off_policy=recipe.off_policy,
        lora=recipe.lora,
        shortest_first=recipe.rollout.rounds is RoundKind.LENGTH_SORTED,
        canary=recipe.canary,
        resume_from=resume_from or recipe.checkpoint.resume_from,
    )

"""Options of a trainer rank, as one frozen struct: the modules of the rank read these options and never a recipe.

``launch.roles`` makes them in each trainer process, ``prepare.measured_step`` in the process of a trial's step."""

from __future__ import annotations

from functools import partial

import torch
from msgspec.structs import asdict

from streamrl.base.run_process import usable_cores
from streamrl.base.types import SamplingSettings
from streamrl.learning.routing_replay import replays_routing
from streamrl.learning.threads import trainer_threads
from streamrl.pretrained.tokenizer import end_tokens
from streamrl.recipe.environment import Credit
from streamrl.recipe.objective import ObjectiveSettings, OffPolicy, why_not_streaming
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Lora, Recipe, Training


class TrainerOptions(Training, frozen=True, kw_only=True):
    """Options of one trainer rank: section ``training`` of the recipe, and values of other sections that a rank needs.
    A number of threads that is 0 means every core.

    ``sampling``: settings of the engines; the trainer differentiates the policy that sampled.
    ``max_tokens``: sampled tokens of the longest trajectory, which has one turn or several.
    ``context``: tokens of the longest sequence of a model with as many positions.
    ``steps``: number of optimizer steps of the run.
    ``rendezvous``: address where the ranks meet, ``tcp://host:port`` or ``file:///path``; empty with one rank.
    ``idle_threads``: threads while all engines of this host are idle; 0: ``threads``.
    ``freed_threads``: threads while one engine of this host is idle, while two are, ...; empty: always ``threads``.
    ``end_tokens``: ids that cannot be among the first ``sampling.min_tokens`` tokens; empty where these are 0.
    ``streaming``: whether groups may be trained before their batch is closed.
    ``shortest_first``: whether several updates on a batch take its groups in the order of their lengths.
    ``learn_observations``: weight of the cross-entropy of tokens that environments wrote.
    ``parameters``: number of parameters of the model, once it is loaded.
    ``routing_demanded``: whether the recipe demands that routers take the experts of engines (``routing_replay``).
    ``canary``: whether the rank scores the probe tokens of ``canary`` in each batch.
    ``in_turns``: whether the rank holds its state on the device only while it makes a step.
    ``served_teacher``: whether samples have the logprobs of a teacher that was asked beside their rewards.
    ``resume_from``: directory that ``save_checkpoint`` wrote; empty: start from the weights of ``model_path``."""

    model_path: str
    run_id: str
    weights_endpoint: str
    seed: int = 0
    steps: int = 1
    rank: int = 0
    rendezvous: str = ""
    idle_threads: int = 0
    freed_threads: tuple[int, ...] = ()
    sampling: SamplingSettings = SamplingSettings()
    end_tokens: tuple[int, ...] = ()
    max_tokens: int = 512
    context: int = 0
    objective: ObjectiveSettings = ObjectiveSettings()
    credit: Credit = Credit.TRAJECTORY
    learn_observations: float = 0.0
    off_policy: OffPolicy = OffPolicy()
    lora: Lora = Lora()
    shortest_first: bool = False
    collective_timeout_s: float = 600.0
    parameters: int = 0
    routing_demanded: bool = False
    canary: bool = False
    in_turns: bool = False
    served_teacher: bool = False
    resume_from: str = ""

    def threads_while(self, freed: int) -> int:
        """Return the number of torch's threads while ``freed`` engines of this host are idle."""
        if 0 < freed <= len(self.freed_threads):
            return self.freed_threads[freed - 1]
        return self.threads


def trainer_options(
    recipe: Recipe, rank: int, run_id: str, weights_endpoint: str, *, rendezvous: str = "", resume_from: str = ""
) -> TrainerOptions:
    """Make the options of one rank. Without ``rendezvous``, several ranks meet at a file beside their ipc endpoints."""
    training = recipe.training
    objective = recipe.objective_settings
    if training.ranks > 1 and not rendezvous and weights_endpoint.startswith("ipc://"):
        directory = weights_endpoint.removeprefix("ipc://").rpartition("/")[0]
        rendezvous = f"file://{directory}/trainer.rendezvous"

    threads_of_rank = partial(trainer_threads, recipe, usable_cores(), engines_on_cpu=not torch.cuda.is_available())
    end_token_ids: tuple[int, ...] = ()
    if recipe.sampling.min_tokens:
        end_token_ids = end_tokens(recipe.model.path).ids
    overrides = {
        "threads": threads_of_rank(),
        "streaming": training.streaming
        and not recipe.run.deterministic
        and not recipe.in_turns
        and not why_not_streaming(objective, training.updates_per_batch, training.epochs_per_batch),
        "end_tokens": end_token_ids,
        "routing_replay": replays_routing(recipe),
    }
    return TrainerOptions(
        **asdict(training) | overrides,
        model_path=recipe.model.path,
        run_id=run_id,
        seed=recipe.run.seed,
        steps=recipe.run.steps,
        weights_endpoint=weights_endpoint,
        rank=rank,
        rendezvous=rendezvous,
        idle_threads=threads_of_rank(engines_on_cpu=False),
        freed_threads=tuple(threads_of_rank(freed=freed) for freed in range(1, recipe.engines.count + 1)),
        sampling=recipe.sampling,
        max_tokens=recipe.max_tokens,
        context=recipe.context,
        objective=objective,
        credit=recipe.environment.credit,
        learn_observations=recipe.environment.learn_observations,
        in_turns=recipe.in_turns,
        off_policy=recipe.off_policy,
        lora=recipe.lora,
        shortest_first=recipe.rollout.rounds is RoundKind.LENGTH_SORTED,
        routing_demanded=recipe.training.routing_replay is True,
        canary=recipe.canary,
        served_teacher=bool(recipe.teacher.addresses),
        resume_from=resume_from or recipe.checkpoint.resume_from,
    )

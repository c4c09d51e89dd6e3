"""What a trainer rank needs to know, as one frozen struct: no recipe is read inside ``learning``."""

from __future__ import annotations

import os

import msgspec
import torch

from streamrl.base.errors import StreamRLError
from streamrl.learning.threads import idle_threads, trainer_threads
from streamrl.recipe.algorithms import ObjectiveSettings, why_not_streaming
from streamrl.recipe.objective import OffPolicy
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import ComputeDtype, Gathered, Lora, OptimizerKind, Recipe


class TrainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the trainer.

    ``rendezvous``: ``tcp://host:port`` or ``file:///path`` where the ranks meet; empty with one rank.
    ``temperature`` and ``top_p`` are those of the engines: the policy that is differentiated is the one that sampled.
    ``threads`` 0: every core; ``idle_threads``: while the engines of the host do nothing (0: as many);
    ``freed_threads``: while one of them does nothing, two of them, ... (empty: always ``threads``).
    ``streaming``: groups may be trained before their batch is closed.
    ``shortest_first``: several updates on a batch take its groups in the order of their lengths.
    ``canary``: engines want to know what each version finds for the canary's tokens.
    ``resume_from``: a directory that ``save_checkpoint`` wrote; empty: the weights of ``model_path``.
    """

    model_path: str
    run_id: str
    weights_endpoint: str
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    rendezvous: str = ""
    device: str = "auto"
    threads: int = 0
    idle_threads: int = 0
    freed_threads: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    objective: ObjectiveSettings = ObjectiveSettings()
    off_policy: OffPolicy = OffPolicy()
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    lora: Lora = Lora()
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates_per_batch: int = 1
    epochs_per_batch: int = 1
    shortest_first: bool = False
    micro_batch_tokens: int = 2048
    streaming: bool = True
    compute_dtype: ComputeDtype = ComputeDtype.AUTO
    gathered: Gathered = Gathered.AUTO
    activation_checkpointing: bool = False
    compile: bool = False
    collective_timeout_s: float = 600.0
    canary: bool = False
    resume_from: str = ""

    def threads_while(self, freed: int) -> int:
        """Torch's threads while ``freed`` engines of the host do nothing."""
        return self.freed_threads[freed - 1] if 0 < freed <= len(self.freed_threads) else self.threads


def trainer_options(
    recipe: Recipe, rank: int, run_id: str, weights_endpoint: str, *, rendezvous: str = "", resume_from: str = ""
) -> TrainerOptions:
    """Options of one rank. Without ``rendezvous`` several ranks meet at a file beside their ipc endpoints.

    Raises ``StreamRLError`` when several ranks have no place to meet.
    """
    training, ranks = recipe.training, recipe.training.ranks
    objective = recipe.objective_settings
    if ranks > 1 and not rendezvous:
        if not weights_endpoint.startswith("ipc://"):
            raise StreamRLError(
                f"{ranks} trainer ranks have no rendezvous (weights endpoint {weights_endpoint!r} is not ipc): "
                "give one, tcp://host:port or file:///path"
            )
        directory = weights_endpoint.removeprefix("ipc://").rpartition("/")[0]
        rendezvous = f"file://{directory}/trainer.rendezvous"

    def threads(freed: int) -> int:
        on_cpu = not torch.cuda.is_available()
        return trainer_threads(recipe, os.cpu_count() or 1, engines_on_cpu=on_cpu, freed=freed)

    return TrainerOptions(
        model_path=recipe.model.path,
        run_id=run_id,
        seed=recipe.run.seed,
        weights_endpoint=weights_endpoint,
        rank=rank,
        ranks=ranks,
        rendezvous=rendezvous,
        device=training.device,
        threads=threads(0),
        idle_threads=idle_threads(recipe, os.cpu_count() or 1),
        freed_threads=tuple(threads(freed) for freed in range(1, recipe.engines.count + 1)),
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        max_tokens=recipe.sampling.max_tokens,
        objective=objective,
        off_policy=recipe.off_policy,
        optimizer=training.optimizer,
        lora=recipe.lora,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        beta1=training.beta1,
        beta2=training.beta2,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        updates_per_batch=training.updates_per_batch,
        epochs_per_batch=training.epochs_per_batch,
        shortest_first=recipe.rollout.rounds is RoundKind.LENGTH_SORTED,
        micro_batch_tokens=training.micro_batch_tokens,
        streaming=training.streaming
        and not recipe.run.deterministic
        and not why_not_streaming(objective, training.updates_per_batch, training.epochs_per_batch),
        compute_dtype=training.compute_dtype,
        gathered=training.gathered,
        activation_checkpointing=training.activation_checkpointing,
        compile=training.compile,
        canary=recipe.canary,
        resume_from=resume_from or recipe.checkpoint.resume_from,
    )

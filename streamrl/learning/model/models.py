"""The models of one rank: the policy that is trained, the reference, and the critic."""

from __future__ import annotations

import logging
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from streamrl.learning.batches.gradients import logits_at_once
from streamrl.learning.model.architecture import decoder_layers
from streamrl.learning.model.compilation import checkpoint_activations, compile_policy
from streamrl.learning.model.loading import empty_policy, load_policy, load_sharded
from streamrl.learning.model.policy import PackedPolicy, computes_in_sixteen_bits
from streamrl.learning.objective.critic import ValueHead
from streamrl.learning.options import TrainerOptions
from streamrl.learning.rank_memory import MOMENT_BYTES, TrainingSizes, activation_bytes, choose_gathered
from streamrl.learning.ranks import process_group
from streamrl.learning.state.published_weights import local_part
from streamrl.recipe.sections import Gathered, OptimizerKind

log = logging.getLogger(__name__)


class Models(NamedTuple):
    """``by_layer``: parameters are gathered layer by layer, so that every forward is a collective."""

    policy: PackedPolicy
    reference: PackedPolicy | None
    critic: ValueHead | None
    by_layer: bool


def load_models(options: TrainerOptions, device: torch.device) -> Models:
    """What ``options`` ask for. Collective with several ranks. Raises ``StreamRLError``."""
    gathered = _choose_gathered(options, device) if options.ranks > 1 else Gathered.BATCH
    policy, reference, critic = _load(options, device, gathered), None, None
    if options.compile:
        compile_policy(policy)
    if options.activation_checkpointing:
        checkpoint_activations(policy)
    by_layer = gathered is Gathered.LAYER
    if options.objective.has_reference:
        # Ranks that score different numbers of rows need all of it.
        whole = _load(options, device, gathered) if by_layer else load_policy(options.model_path, device)
        reference = _freeze(whole)
    if options.objective.has_critic:
        critic = ValueHead(options, policy.hugging_face.config.get_text_config().hidden_size, device)
    return Models(policy, reference, critic, by_layer)


def _load(options: TrainerOptions, device: torch.device, gathered: Gathered) -> PackedPolicy:
    if options.ranks == 1:
        return load_policy(options.model_path, device)
    over, sixteen_bit = process_group.mesh(device), computes_in_sixteen_bits(options, device)
    return load_sharded(options.model_path, device, over, gathered, sixteen_bit=sixteen_bit)


@torch.no_grad()
def _freeze(policy: PackedPolicy) -> PackedPolicy:
    """Freeze a policy at the published bits of version 0: what the policy that is trained is held close to."""
    for parameter in policy.requires_grad_(False).parameters():
        part = local_part(parameter)
        part.copy_(part.to(torch.bfloat16))
    return policy


def _choose_gathered(options: TrainerOptions, device: torch.device) -> Gathered:
    """When the ranks of ``options`` gather parameters, by what each has free. Collective; rank 0 logs why."""
    policy = empty_policy(options.model_path)
    config = policy.hugging_face.config.get_text_config()
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(policy.hugging_face)]
    total = sum(p.numel() for p in policy.parameters())
    sizes = TrainingSizes(
        parameters=total,
        outside=total - sum(layers),
        layer=max(layers),
        ranks=options.ranks,
        # About: peft has not chosen yet.
        trained=total // 100 if options.lora.rank else 0,
        adapted=sum(layers) if options.lora.rank else 0,
        moment_bytes=MOMENT_BYTES[options.optimizer],
        masters_on_host=options.optimizer is OptimizerKind.ADAMW_OFFLOADED and device.type != "cpu",
        sixteen_bit=computes_in_sixteen_bits(options, device),
        on_device=device.type != "cpu",
        reference=options.objective.has_reference,
    )
    activations = activation_bytes(
        tokens=options.micro_batch_tokens,
        hidden=config.hidden_size,
        layers=len(layers),
        logits=min(options.micro_batch_tokens * config.vocab_size, logits_at_once(device)),
        checkpointing=options.activation_checkpointing,
    )
    room = round(process_group.all_reduce([_free_bytes(device, options.ranks)], device, dist.ReduceOp.MIN)[0])
    chosen, reason = choose_gathered(options.gathered, sizes, room, activations)
    if options.rank == 0:
        log.info("%s", reason)
    return chosen


def _free_bytes(device: torch.device, ranks: int) -> float:
    """Memory that this rank may take now: of its device, or its share of what the host has."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available) / ranks

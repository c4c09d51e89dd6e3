"""The model as the trainer sees it: packed tokens in, hidden states of the predicting positions out."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from streamrl.errors import StreamRLError
from streamrl.learning.attention import register_packed_attention
from streamrl.learning.packing import MicroBatch

UNSUPPORTED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PackedPolicy(nn.Module):
    """A Hugging Face causal language model on packed rows. Its forward is the unit that FSDP2 sees as its root.

    The output head is not applied here but in chunks by the caller, so that the logits of a whole row never exist.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def hugging_face(self) -> Any:
        """The transformers model itself."""
        return self.model

    @property
    def head(self) -> nn.Module:
        """The output head (``[N, D] -> [N, V]``)."""
        return cast("nn.Module", self.hugging_face.get_output_embeddings())

    def forward(self, row: MicroBatch) -> Tensor:
        """Hidden states that predict the trained tokens of the row: float [N, D]."""
        output = self.hugging_face.base_model(
            input_ids=row.tokens_T[None],
            position_ids=row.positions_T[None],
            attention_mask=None,
            use_cache=False,
            packed=row.layout,
        )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD.index_select(0, row.predictors_N)

    def checkpoint_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their checkpoint names; tied ones once."""
        return dict(self.model.named_parameters())


def load_policy(model_path: str, device: torch.device) -> PackedPolicy:
    """The model of a Hugging Face directory in float32, without dropout. Raises ``StreamRLError``."""
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation=register_packed_attention()
        )
    except (OSError, ValueError) as error:
        raise StreamRLError(f"cannot load the model of {model_path!r}: {error}") from error
    for name in UNSUPPORTED_HEADS:
        if getattr(model.config, name, None) not in (None, 1.0):
            raise StreamRLError(f"model {model_path!r} scales its logits ({name}), which the trainer does not repeat")
    # Dropout would make the policy that is differentiated another one than the policy that sampled.
    return PackedPolicy(model.eval().to(device))


def shard(policy: PackedPolicy, over: DeviceMesh) -> None:
    """FSDP2: each decoder layer is a unit, the rest is the root's. Parameters stay unsharded while a batch is open."""
    for layer in policy.hugging_face.base_model.layers:
        fully_shard(layer, mesh=over)
    fully_shard(policy, mesh=over)
    root = cast("FSDPModule", policy)
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)


def set_sharded(policy: PackedPolicy, sharded: bool) -> None:
    """Shard or gather every unit. Collective. Nothing to do without FSDP2."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard() if sharded else module.unshard()


def set_gradient_sync(policy: PackedPolicy, synced: bool) -> None:
    """Whether a backward reduces gradients over the ranks, or adds them up locally."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(synced)

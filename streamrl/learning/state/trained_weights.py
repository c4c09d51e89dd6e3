"""The weights that a rank trains: all of the policy, or adapters."""

from __future__ import annotations

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.published_weights import FullWeights, PublishedWeights
from streamrl.recipe.sections import OptimizerKind


def make_weights(options: TrainerOptions, policy: PackedPolicy) -> PublishedWeights:
    """The weights that ``options`` train: all of them, or adapters. The policy must be sharded (if it is) and loaded.

    Collective. Raises ``StreamRLError`` for targets of an adapter that the model does not have, and for adapters whose
    masters should be in host memory.
    """
    on_host = options.optimizer is OptimizerKind.ADAMW_OFFLOADED
    if options.lora.rank:
        if on_host:
            raise StreamRLError(
                f'training.optimizer is "{options.optimizer}" with lora.rank {options.lora.rank}: masters and moments '
                'of adapters are small and stay on the device; set it to "adamw"'
            )
        # Only here: peft takes more than a second to import.
        from streamrl.learning.state.lora import AdapterWeights

        return AdapterWeights(options, policy)
    return FullWeights(policy.trained_parameters(), policy.pieces, masters_on_host=on_host)

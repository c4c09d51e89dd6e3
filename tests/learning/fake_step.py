"""The bytes of a training step on a GPU that is not there: FakeTensorMode runs the product's own code on tensors that
have a device, a shape and a type, and no values. torch's CPU build counts as its CUDA build does, which was compared
once (Qwen3-0.6B and Llama-3.2-1B, equal to 0.1 %): fake tensors cannot be trained on ``cuda`` in a CPU build, so they
lie on the CPU, and attention takes the flash kernel's shapes all the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamrl.base.types import TrainingSample, TrajectoryId, float_array, token_array
from streamrl.learning.batches import gradients
from streamrl.learning.batches.packing import PreparedSample, pack
from streamrl.learning.model import attention, local_shards, policy
from streamrl.learning.model.loading import checkpoint_activations
from streamrl.learning.options import TrainerOptions
from streamrl.learning.rank_memory import STEP_ELEMENTS, Card
from streamrl.learning.state import lora, masters
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.updates import make_weights
from streamrl.recipe.sections import OptimizerKind

CPU = torch.device("cpu")
SEQUENCES = 4
BLOCK = 512
"""Bytes to which CUDA's allocator rounds."""


@dataclass
class Peaks:
    """Bytes before the first row, and at the peak of the rows and of the optimizer's step."""

    before: int
    rows: int
    step: int

    @property
    def peak(self) -> int:
        return max(self.rows, self.step)


class _Blocks(TorchDispatchMode):
    """Counts storages up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def restart(self) -> int:
        """The peak until now; it begins again."""
        peak, self.peak = self.peak, self.now
        return peak


def _with_values(function: Any) -> Any:
    def called(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments)

    return called


def _repeated(query: Any, key: Any, value: Any, *, enable_gqa: bool, **options: Any) -> Any:
    """Attention in float32 on a GPU: only a kernel that keeps all scores takes grouped heads."""
    times = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, **options)


@contextmanager
def _pretended(card: Card) -> Iterator[_Blocks]:
    """Count tensors as on ``card``. What reads values of tensors is left out."""
    __import__("torch.nn.attention.varlen")  # makes tensors while it is imported
    blocks = _Blocks()
    with ExitStack() as stack:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        for owner, name, value in (
            (attention, "has_bfloat16", lambda _: card.has_bfloat16),
            (policy, "has_bfloat16", lambda _: card.has_bfloat16),
            (policy, "card_of", lambda _: card),
            (attention, "scaled_dot_product_attention", _repeated),
            (masters, "STEP_ELEMENTS", {"cpu": STEP_ELEMENTS["cuda"]}),
            (local_shards, "_indices_on_side", _with_values(local_shards._indices_on_side)),
            (lora.AdapterWeights, "_sum_of_bits", lambda _: 0),
            (gradients.TokenSums, "add", lambda _, **sums: None),
            (torch, "bincount", lambda tensor, minlength: tensor.new_zeros(minlength)),
            (torch.nn.Module, "to", lambda module, *_, **__: module),  # of peft, to where the module is
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(blocks)


def _row(tokens: int) -> list[PreparedSample]:
    length = tokens // SEQUENCES
    return [
        PreparedSample(
            TrainingSample(
                id=TrajectoryId(prompt_id=f"p{index}", group_id=index, sample=0),
                token_ids=token_array([5] * (length + 1)),
                loss_mask=b"\0" * 2 + b"\1" * (length - 1),
                behavior_logprobs=float_array([-1.0] * (length + 1)),
                reward=1.0,
                oldest_version=0,
                newest_version=0,
            ),
            advantage=0.5,
        )
        for index in range(SEQUENCES)
    ]


def step_on(card: Card, config: dict[str, Any], options: TrainerOptions, tokens: int) -> Peaks:
    """The peaks of two rows of ``tokens`` and a step of the model of ``config``, random and on one rank."""
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager")
    with _pretended(card) as blocks:
        model.to_empty(device=CPU)
        model.tie_weights()
        for module in model.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                blocks.count(tensor)
        packed = policy.PackedPolicy(model.eval())
        packed.hugging_face.set_attn_implementation(attention.register_packed_attention())
        if options.activation_checkpointing:
            checkpoint_activations(packed)
        weights = make_weights(options, packed)
        moments: list[Any] = []
        optimizer = None
        if options.optimizer is OptimizerKind.ADAMW_8BIT:  # a library's, which reads values
            moments = [torch.zeros(weights.masters.size, dtype=torch.uint8) for _ in range(2)]
        else:
            optimizer = MasterOptimizer(options, weights.masters, weights.decayed_places)
        baseline = [torch.empty(shard.stop - shard.start, dtype=torch.int16) for shard in weights.shards]
        weights.clear_gradient()
        blocks.restart()
        before = blocks.now
        for _ in range(2):
            gradients.accumulate(packed, None, pack(_row(tokens), 0, CPU), options, gradients.BatchSums(), 0)
        rows = blocks.restart()
        gradient = weights.collect_gradient()
        if optimizer is not None:
            optimizer.step(gradient, 1e-6)
        weights.refresh_forward()
        step = blocks.restart()
        del moments, baseline
    return Peaks(before, rows, step)

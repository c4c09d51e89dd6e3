"""The optimizer of one rank's flat master vector: one step, and a state that a checkpoint can hold.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2. The decay is its own product
before the moments' step, over matrices only, so that the step itself stays one call over the whole vector.

Bytes an element beside the masters: ``adamw`` 8; ``adamw_8bit`` 2.03; ``adamw_offloaded`` none on the device, and in
host memory 18 (masters 4, moments 8, the gradient that comes over 4, the bits that go back 2).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from streamrl.config.recipe import OptimizerKind
from streamrl.errors import StreamRLError
from streamrl.learning.options import TrainerOptions

# Imported by us and by peft, it warns that kernels for 4-bit inference, which nobody asked for, are missing.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

QUANTIZED_BLOCK = 256
"""Elements that share one scale in bitsandbytes' 8-bit optimizers."""
CHUNK = 1 << 22
"""Elements of one call to bitsandbytes, a multiple of its block: its CUDA kernel counts in int32, and on a CPU it needs
22 bytes an element while it runs."""


class _MomentState(Protocol):
    """AdamW without decay, in one of several precisions."""

    @property
    def steps(self) -> int: ...
    def step(self, gradient_L: Tensor, learning_rate: float) -> None: ...
    def moments(self) -> dict[str, Tensor]: ...
    def load(self, moments: dict[str, Tensor], steps: int) -> None: ...


class MasterOptimizer:
    """AdamW on ``masters_L`` (float32 [L]), as ``options.optimizer`` says.

    ``decayed``: the places to which weight decay applies (``PublishedWeights.decayed``).
    Masters may lie in host memory: the gradient is fetched, and the step taken there.
    Raises ``StreamRLError`` when the library of ``adamw_8bit`` is missing.
    """

    def __init__(self, options: TrainerOptions, masters_L: nn.Parameter, decayed: Sequence[slice]) -> None:
        quantized = options.optimizer is OptimizerKind.ADAMW_8BIT
        self._moments: _MomentState = (
            _QuantizedMoments(options, masters_L) if quantized else _FullMoments(options, masters_L)
        )
        self._weight_decay = options.weight_decay
        self._decayed = [masters_L.data[place] for place in decayed] if options.weight_decay else []
        self._device = masters_L.device
        self._fetched_L: Tensor | None = None

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self._moments.steps

    @torch.no_grad()
    def step(self, gradient_L: Tensor, learning_rate: float) -> None:
        """Move the masters by one step along ``gradient_L`` (float32 [L], on the masters' device or another)."""
        if gradient_L.device != self._device:
            if self._fetched_L is None:
                self._fetched_L = torch.empty(gradient_L.shape, dtype=gradient_L.dtype, pin_memory=True)
            gradient_L = self._fetched_L.copy_(gradient_L)
        if self._decayed:
            torch._foreach_mul_(self._decayed, 1.0 - learning_rate * self._weight_decay)
        self._moments.step(gradient_L, learning_rate)

    def moments(self) -> dict[str, Tensor]:
        """``exp_avg`` and ``exp_avg_sq``, float32 [L]; zeros before the first step. They may be copies."""
        return self._moments.moments()

    def load_moments(self, moments: dict[str, Tensor], steps: int) -> None:
        """Take the state of a checkpoint. What ``moments`` returned comes back exactly, also from 8 bits; moments of
        another kind of optimizer or cut into other shards are quantized anew."""
        self._moments.load(moments, steps)


class _FullMoments:
    """torch's fused AdamW: moments in float32."""

    def __init__(self, options: TrainerOptions, masters_L: nn.Parameter) -> None:
        self._masters_L = masters_L
        self._adamw = torch.optim.AdamW(
            [masters_L],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=0.0,
            fused=True,
        )

    @property
    def steps(self) -> int:
        state = self._adamw.state[self._masters_L]
        return int(state["step"]) if state else 0

    def step(self, gradient_L: Tensor, learning_rate: float) -> None:
        self._masters_L.grad = gradient_L
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()

    def moments(self) -> dict[str, Tensor]:
        state = self._adamw.state[self._masters_L]
        names = ("exp_avg", "exp_avg_sq")
        return {name: state[name] if state else torch.zeros_like(self._masters_L.data) for name in names}

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        device = self._masters_L.device
        step = torch.tensor(float(steps), dtype=torch.float32, device=device)
        self._adamw.state[self._masters_L] = {"step": step, **{n: m.to(device) for n, m in moments.items()}}


class _QuantizedMoments:
    """bitsandbytes' AdamW: moments in 8 bits with one scale in 256 elements (Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization", 2022). Its kernels are prebuilt for CUDA, and plain torch on a CPU (35 times the time of
    torch's fused AdamW there)."""

    NAMES = {"exp_avg": ("state1", "absmax1", "dynamic"), "exp_avg_sq": ("state2", "absmax2", "udynamic")}

    def __init__(self, options: TrainerOptions, masters_L: nn.Parameter) -> None:
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise StreamRLError(
                f'training.optimizer is "adamw_8bit", which needs bitsandbytes, and it cannot be imported ({error}): '
                'install streamrl[torch] or set it to "adamw"'
            ) from error
        self._chunks = [nn.Parameter(part) for part in torch.split(masters_L.data, CHUNK)]
        self._adamw = AdamW8bit(
            self._chunks,
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=0.0,
            min_8bit_size=0,
        )
        for index, chunk in enumerate(self._chunks):
            self._adamw.init_state(self._adamw.param_groups[0], chunk, 0, index)

    @property
    def steps(self) -> int:
        return int(self._adamw.state[self._chunks[0]]["step"])

    def step(self, gradient_L: Tensor, learning_rate: float) -> None:
        for chunk, gradient in zip(self._chunks, torch.split(gradient_L, CHUNK), strict=True):
            chunk.grad = gradient
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()

    def moments(self) -> dict[str, Tensor]:
        moments: dict[str, Tensor] = {}
        for name, (codes, scales, levels) in self.NAMES.items():
            parts = []
            for chunk in self._chunks:
                state = self._adamw.state[chunk]
                blocks = self._adamw.name2qmap[levels][_blocks(state[codes]).long()]
                parts.append((blocks * state[scales][:, None]).flatten()[: chunk.numel()])
            moments[name] = torch.cat(parts)
        return moments

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        for name, (codes, scales, levels) in self.NAMES.items():
            for chunk, values in zip(self._chunks, torch.split(moments[name], CHUNK), strict=True):
                state = self._adamw.state[chunk]
                blocks = _blocks(values.to(chunk.device))
                found_scales, found_codes = quantize_again(blocks, self._adamw.name2qmap[levels])
                state["step"] = steps
                state[scales].copy_(found_scales)
                state[codes].copy_(found_codes.flatten()[: chunk.numel()])


def _blocks(values: Tensor) -> Tensor:
    """A flat vector as [blocks, 256], padded with zeros."""
    return nn.functional.pad(values, (0, -len(values) % QUANTIZED_BLOCK)).view(-1, QUANTIZED_BLOCK)


def quantize_again(values_BK: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (float32 [B]) and codes (uint8 [B, K]) of blocks, such that values which are already products of a scale
    and levels come back bit for bit.

    The largest value of a block gives its scale only up to its own level: the signed map of bitsandbytes has 1 and no
    -1, so a block whose largest value is negative would shrink by 0.7 % at each save and load. Every scale within one
    rounding of the two outermost levels is tried; the first that reproduces its block is taken. Other values get the
    nearest levels with the scale max |value|, as the library would give them.
    """
    largest_B = values_BK.abs().amax(dim=1)
    scales_B = largest_B.clone()
    codes_BK = _nearest(values_BK, scales_B, levels)
    reproduced_B = (levels[codes_BK] * scales_B[:, None] == values_BK).all(dim=1)
    for level in (1.0, float(levels.abs().sort().values[-2])):
        quotient_B = largest_B / level
        for candidate_B in (quotient_B, quotient_B.nextafter(2 * quotient_B), quotient_B.nextafter(0 * quotient_B)):
            if reproduced_B.all():
                break
            tried_BK = _nearest(values_BK, candidate_B, levels)
            exact_B = (levels[tried_BK] * candidate_B[:, None] == values_BK).all(dim=1) & ~reproduced_B
            scales_B = torch.where(exact_B, candidate_B, scales_B)
            codes_BK = torch.where(exact_B[:, None], tried_BK, codes_BK)
            reproduced_B |= exact_B
    return scales_B, codes_BK.to(torch.uint8)


def _nearest(values_BK: Tensor, scales_B: Tensor, levels: Tensor) -> Tensor:
    """The index of the level nearest to value / scale, int64; the level 0 where the scale is 0."""
    relative_BK = values_BK / torch.where(scales_B > 0, scales_B, 1.0)[:, None]
    return torch.bucketize(relative_BK, (levels[1:] + levels[:-1]) / 2)

"""The optimizer of one rank's flat master vector: its step, and its state for checkpoints.

``updates`` makes it and steps it in each trainer rank. AdamW: Loshchilov and Hutter, "Decoupled Weight Decay
Regularization" (2019), algorithm 2. The weight decay is a separate product before the step, over matrices only, so that
the step itself is one call over a chunk of the vector.

Bytes an element besides the masters: ``adamw`` 8; ``adamw_8bit`` 2.03; ``adamw_offloaded`` none on the device, and 18
in CPU memory (masters 4, moments 8, a copy of the gradient 4, bits for the device 2).
A step goes chunk by chunk over the masters, which may be stored in another form (``masters.SplitMasters``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from streamrl.base.errors import StreamRLError
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.masters import Masters, Tensors
from streamrl.recipe.sections import OptimizerKind

# bitsandbytes warns about missing kernels for 4-bit inference, which streamrl does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

QUANTIZED_BLOCK = 256
"""Elements that share one scale in bitsandbytes' 8-bit optimizers."""
ADAM_EPSILON = 1e-8


class MasterOptimizer:
    """AdamW on ``masters``, of the kind ``options.optimizer``.

    Masters may be in CPU memory: the gradient is copied to it, and the step is taken on the CPU.
    The constructor raises ``StreamRLError`` when the library of ``adamw_8bit`` is missing.

    ``decayed_places``: places in the masters to which weight decay applies (``PublishedWeights.decayed_places``)."""

    def __init__(self, options: TrainerOptions, masters: Masters, decayed_places: Sequence[slice]) -> None:
        quantized = options.optimizer is OptimizerKind.ADAMW_8BIT
        self._masters = masters
        self._moments = _QuantizedMoments(options, masters) if quantized else _FullMoments(options, masters)
        self._weight_decay = options.weight_decay
        self._decayed_places: list[slice] = []
        if options.weight_decay:
            self._decayed_places = list(decayed_places)
        self._cpu_gradient_L: Tensor | None = None

    @property
    def steps(self) -> int:
        """Number of steps until now."""
        return self._moments.steps

    @torch.no_grad()
    def step(self, gradient_L: Tensor, learning_rate: float) -> None:
        """Take one step with ``gradient_L`` (float32 [L], on the device of the masters or on another one)."""
        if gradient_L.device != self._masters.device:
            if self._cpu_gradient_L is None:
                self._cpu_gradient_L = torch.empty(gradient_L.shape, dtype=gradient_L.dtype, pin_memory=True)
            gradient_L = self._cpu_gradient_L.copy_(gradient_L)
        for place in self._masters.chunks():
            values = self._masters.read(place)
            for decayed in self._decayed_places:
                inside = slice(max(decayed.start - place.start, 0), max(decayed.stop - place.start, 0))
                values[inside].mul_(1.0 - learning_rate * self._weight_decay)
            self._moments.step(place, values, gradient_L[place], learning_rate)
            self._masters.write(place, values)
        self._moments.steps += 1

    def moments(self) -> Tensors:
        """Return ``exp_avg`` and ``exp_avg_sq``, float32 [L], which may be copies; zeros before the first step."""
        return self._moments.moments()

    def load_moments(self, moments: Tensors, steps: int) -> None:
        """Set the state from a checkpoint. Results of ``moments`` are restored exactly, also in 8 bits. Moments of
        another kind of optimizer, or of other shards, are quantized again."""
        self._moments.load(moments, steps)


class _FullMoments:
    """Moments in float32, for torch's fused AdamW without its decay."""

    def __init__(self, options: TrainerOptions, masters: Masters) -> None:
        self.steps = 0
        self._betas = options.beta1, options.beta2
        names = ("exp_avg", "exp_avg_sq")
        self._state = {name: torch.zeros(masters.size, dtype=torch.float32, device=masters.device) for name in names}

    def step(self, place: slice, values: Tensor, gradient: Tensor, learning_rate: float) -> None:
        adamw(
            [values],
            [gradient],
            [self._state["exp_avg"][place]],
            [self._state["exp_avg_sq"][place]],
            [],
            [torch.tensor(float(self.steps), device=values.device)],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=learning_rate,
            weight_decay=0.0,
            eps=ADAM_EPSILON,
            maximize=False,
        )

    def moments(self) -> Tensors:
        return dict(self._state)

    def load(self, moments: Tensors, steps: int) -> None:
        self.steps = steps
        self._state = {name: moment.to(self._state[name].device) for name, moment in moments.items()}


class _QuantizedMoments:
    """Moments in 8 bits with one scale for 256 elements, for bitsandbytes' AdamW (Dettmers et al., "8-bit Optimizers
    via Block-wise Quantization", 2022). Its kernels are prebuilt for CUDA. On a CPU they are plain torch, and take 35
    times as long as torch's fused AdamW."""

    NAMES = {"exp_avg": ("state1", "absmax1", "dynamic"), "exp_avg_sq": ("state2", "absmax2", "udynamic")}

    def __init__(self, options: TrainerOptions, masters: Masters) -> None:
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise StreamRLError(
                f'training.optimizer is "adamw_8bit", which needs bitsandbytes, and it cannot be imported ({error}): '
                'install streamrl[torch] or set it to "adamw"'
            ) from error
        self.steps = 0
        self._places = list(masters.chunks())
        self._chunks = [nn.Parameter(torch.empty(0, device=masters.device)) for _ in self._places]
        self._adamw = AdamW8bit(
            self._chunks,
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=0.0,
            min_8bit_size=0,
        )
        for index, (chunk, place) in enumerate(zip(self._chunks, self._places, strict=True)):
            chunk.data = chunk.data.new_empty(place.stop - place.start)
            self._adamw.init_state(self._adamw.param_groups[0], chunk, 0, index)
            chunk.data = chunk.data.new_empty(0)

    def step(self, place: slice, values: Tensor, gradient: Tensor, learning_rate: float) -> None:
        # The library skips the other chunks, which have no gradient.
        chunk = self._chunks[self._places.index(place)]
        chunk.data = values
        chunk.grad = gradient
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        chunk.grad = None
        chunk.data = values.new_empty(0)

    def moments(self) -> Tensors:
        moments: Tensors = {}
        for name, (codes, scales, levels) in self.NAMES.items():
            parts = []
            for chunk, place in zip(self._chunks, self._places, strict=True):
                state = self._adamw.state[chunk]
                blocks = self._adamw.name2qmap[levels][_blocks(state[codes]).long()]
                parts.append((blocks * state[scales][:, None]).flatten()[: place.stop - place.start])
            moments[name] = torch.cat(parts)
        return moments

    def load(self, moments: Tensors, steps: int) -> None:
        self.steps = steps
        for name, (codes, scales, levels) in self.NAMES.items():
            for chunk, place in zip(self._chunks, self._places, strict=True):
                state = self._adamw.state[chunk]
                blocks = _blocks(moments[name][place].to(chunk.device))
                block_scales, block_codes = quantize_again(blocks, self._adamw.name2qmap[levels])
                state["step"] = steps
                state[scales].copy_(block_scales)
                state[codes].copy_(block_codes.flatten()[: place.stop - place.start])


def _blocks(values: Tensor) -> Tensor:
    """Reshape a flat vector to [blocks, 256], padded with zeros."""
    return nn.functional.pad(values, (0, -len(values) % QUANTIZED_BLOCK)).view(-1, QUANTIZED_BLOCK)


def quantize_again(values_BK: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (float32 [B]) and codes (uint8 [B, K]) of blocks. Values that are already products of a scale and levels
    are reproduced bit for bit.

    The largest value of a block determines its scale only up to the level of this value: the signed map of bitsandbytes
    has 1 and no -1, so a block whose largest value is negative would shrink by 0.7 % at each save and load. Every scale
    within one rounding of the two outermost levels is tried, and the first scale that reproduces its block is taken.
    Other values get the nearest levels with the scale max |value|, as the library computes them."""
    largest_B = values_BK.abs().amax(dim=1)
    scales_B = largest_B.clone()
    codes_BK = _nearest(values_BK, scales_B, levels)
    reproduced_B = (levels[codes_BK] * scales_B[:, None] == values_BK).all(dim=1)
    for level in (1.0, float(levels.abs().sort().values[-2])):
        quotient_B = largest_B / level
        for candidate_B in (quotient_B, quotient_B.nextafter(2 * quotient_B), quotient_B.nextafter(0 * quotient_B)):
            if reproduced_B.all():
                break
            candidate_codes_BK = _nearest(values_BK, candidate_B, levels)
            exact_B = (levels[candidate_codes_BK] * candidate_B[:, None] == values_BK).all(dim=1) & ~reproduced_B
            scales_B = torch.where(exact_B, candidate_B, scales_B)
            codes_BK = torch.where(exact_B[:, None], candidate_codes_BK, codes_BK)
            reproduced_B |= exact_B
    return scales_B, codes_BK.to(torch.uint8)


def _nearest(values_BK: Tensor, scales_B: Tensor, levels: Tensor) -> Tensor:
    """Index of the level that is nearest to value / scale, int64; the index of level 0 where the scale is 0."""
    relative_BK = values_BK / torch.where(scales_B > 0, scales_B, 1.0)[:, None]
    return torch.bucketize(relative_BK, (levels[1:] + levels[:-1]) / 2)

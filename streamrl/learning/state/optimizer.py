"""The optimizer of one rank's flat master vector: one step, and a state that a checkpoint can hold.

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2. The decay is its own product
before the moments' step, over matrices only, so that the step itself stays one call over the whole vector.

Bytes an element beside the masters: ``adamw`` 8; ``adamw_8bit`` 2.03; ``adamw_offloaded`` none on the device, and in
host memory 18 (masters 4, moments 8, the gradient that comes over 4, the bits that go back 2).
A step goes chunk by chunk over the masters, which may be stored in another form (``masters.SplitMasters``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from streamrl.base.errors import StreamRLError
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.masters import Masters
from streamrl.recipe.sections import OptimizerKind

# Imported by us and by peft, it warns that kernels for 4-bit inference, which nobody asked for, are missing.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

QUANTIZED_BLOCK = 256
"""Elements that share one scale in bitsandbytes' 8-bit optimizers."""
ADAM_EPSILON = 1e-8


class MasterOptimizer:
    """AdamW on ``masters``, as ``options.optimizer`` says.

    ``decayed``: the places to which weight decay applies (``PublishedWeights.decayed``).
    Masters may lie in host memory: the gradient is fetched, and the step taken there.
    Raises ``StreamRLError`` when the library of ``adamw_8bit`` is missing."""

    def __init__(self, options: TrainerOptions, masters: Masters, decayed: Sequence[slice]) -> None:
        quantized = options.optimizer is OptimizerKind.ADAMW_8BIT
        self._masters = masters
        self._moments = _QuantizedMoments(options, masters) if quantized else _FullMoments(options, masters)
        self._weight_decay = options.weight_decay
        self._decayed = list(decayed) if options.weight_decay else []
        self._fetched_L: Tensor | None = None

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self._moments.steps

    @torch.no_grad()
    def step(self, gradient_L: Tensor, learning_rate: float) -> None:
        """Move the masters by one step along ``gradient_L`` (float32 [L], on the masters' device or another)."""
        if gradient_L.device != self._masters.device:
            if self._fetched_L is None:
                self._fetched_L = torch.empty(gradient_L.shape, dtype=gradient_L.dtype, pin_memory=True)
            gradient_L = self._fetched_L.copy_(gradient_L)
        for place in self._masters.steps():
            values = self._masters.read(place)
            for decayed in self._decayed:
                inside = slice(max(decayed.start - place.start, 0), max(decayed.stop - place.start, 0))
                values[inside].mul_(1.0 - learning_rate * self._weight_decay)
            self._moments.step(place, values, gradient_L[place], learning_rate)
            self._masters.write(place, values)
        self._moments.steps += 1

    def moments(self) -> dict[str, Tensor]:
        """``exp_avg`` and ``exp_avg_sq``, float32 [L]; zeros before the first step. They may be copies."""
        return self._moments.moments()

    def load_moments(self, moments: dict[str, Tensor], steps: int) -> None:
        """Take the state of a checkpoint. What ``moments`` returned comes back exactly, also from 8 bits; moments of
        another kind of optimizer or cut into other shards are quantized anew."""
        self._moments.load(moments, steps)


class _FullMoments:
    """torch's fused AdamW without its decay: moments in float32."""

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

    def moments(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        self.steps = steps
        self._state = {name: moment.to(self._state[name].device) for name, moment in moments.items()}


class _QuantizedMoments:
    """bitsandbytes' AdamW: moments in 8 bits with one scale in 256 elements (Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization", 2022). Its kernels are prebuilt for CUDA, and plain torch on a CPU (35 times the time of
    torch's fused AdamW there)."""

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
        self._places = list(masters.steps())
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
        # The other chunks have no gradient: the library leaves them out.
        chunk = self._chunks[self._places.index(place)]
        chunk.data = values
        chunk.grad = gradient
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        chunk.grad = None
        chunk.data = values.new_empty(0)

    def moments(self) -> dict[str, Tensor]:
        moments: dict[str, Tensor] = {}
        for name, (codes, scales, levels) in self.NAMES.items():
            parts = []
            for chunk, place in zip(self._chunks, self._places, strict=True):
                state = self._adamw.state[chunk]
                blocks = self._adamw.name2qmap[levels][_blocks(state[codes]).long()]
                parts.append((blocks * state[scales][:, None]).flatten()[: place.stop - place.start])
            moments[name] = torch.cat(parts)
        return moments

    def load(self, moments: dict[str, Tensor], steps: int) -> None:
        self.steps = steps
        for name, (codes, scales, levels) in self.NAMES.items():
            for chunk, place in zip(self._chunks, self._places, strict=True):
                state = self._adamw.state[chunk]
                blocks = _blocks(moments[name][place].to(chunk.device))
                found_scales, found_codes = quantize_again(blocks, self._adamw.name2qmap[levels])
                state["step"] = steps
                state[scales].copy_(found_scales)
                state[codes].copy_(found_codes.flatten()[: place.stop - place.start])


def _blocks(values: Tensor) -> Tensor:
    """A flat vector as [blocks, 256], padded with zeros."""
    return nn.functional.pad(values, (0, -len(values) % QUANTIZED_BLOCK)).view(-1, QUANTIZED_BLOCK)


def quantize_again(values_BK: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (float32 [B]) and codes (uint8 [B, K]) of blocks, such that values which are already products of a scale
    and levels come back bit for bit.

    The largest value of a block gives its scale only up to its own level: the signed map of bitsandbytes has 1 and no
    -1, so a block whose largest value is negative would shrink by 0.7 % at each save and load. Every scale within one
    rounding of the two outermost levels is tried; the first that reproduces its block is taken. Other values get the
    nearest levels with the scale max |value|, as the library would give them."""
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

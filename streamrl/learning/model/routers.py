"""Routers of a mixture of experts: they take the experts that engines chose, and count the tokens of each expert.

``policy`` makes them in each trainer rank, for models that have experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.architecture import decoder_layers
from streamrl.pretrained.model_facts import experts_of


class RoutedRow(NamedTuple):
    """Experts of the tokens of a row.

    ``experts_TLK``: uint8 [tokens, layers of the model, top_k]; int16 for models with more than 256 experts.
    ``known_T``: bool, False for a token for which the router chooses.
    ``missing``: number of these tokens."""

    experts_TLK: Tensor
    known_T: Tensor
    missing: int


class Routers:
    """The routers of a model, which has ``number`` experts a layer; a token goes through ``top_k`` of them.

    A router scores all experts, and ``torch.topk`` of the scores chooses. The call returns the experts of the row
    instead: their scores, normalised by the model's own code, weigh their outputs, so that gradients reach the router.
    This works for each family of transformers, also where the output of the router is changed later, for example by
    expert parallel plans."""

    def __init__(self, model: Any, layers: int, number: int, top_k: int) -> None:
        self.number = number
        self.top_k = top_k
        self._kind = model.config.model_type
        self._layers = layers
        self._row: RoutedRow | None = None
        self.counted = False
        self._loads_LE: Tensor | None = None
        self._device: Callable[[], torch.device] = lambda: model.device
        for layer, decoder in enumerate(decoder_layers(model)):
            for block in decoder.modules():
                if isinstance(getattr(block, "experts", None), nn.Module):
                    block.forward = self._around(layer, block.forward)

    def begin(self, row: RoutedRow | None, *, counted: bool) -> None:
        """Use the experts of ``row`` until the next call (None: the routers choose), in its forward and where the
        backward computes layers again. ``counted``: whether the row adds to the loads. Raises ``StreamRLError`` for
        experts of another model."""
        if row is not None and tuple(row.experts_TLK.shape[1:]) != (self._layers, self.top_k):
            raise StreamRLError(
                f"engines return {row.experts_TLK.shape[2]} experts in each of {row.experts_TLK.shape[1]} layers, the "
                f"trainer's model has {self.top_k} in {self._layers}: set training.advanced.routing_replay = false"
            )
        self._row = row
        self.counted = counted

    def take_loads(self) -> Tensor:
        """Return the number of tokens of each expert since the last call, float64 [layers, experts], and clear it."""
        loads_LE = self._loads()
        self._loads_LE = None
        return loads_LE

    def _loads(self) -> Tensor:
        if self._loads_LE is None:
            self._loads_LE = torch.zeros(self._layers, self.number, dtype=torch.float64, device=self._device())
        return self._loads_LE

    def _around(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def routed(*arguments: Any, **options: Any) -> Any:
            with _Choice(self, layer) as choice:
                result = forward(*arguments, **options)
            if not choice.chose_experts:
                raise StreamRLError(
                    f"model type {self._kind!r} does not choose experts by torch.topk: its routing cannot be replayed: "
                    "set training.advanced.routing_replay = false"
                )
            return result

        return routed

    def choose(self, layer: int, own_TK: Tensor) -> Tensor:
        """Experts of the row in ``layer``, int64 [tokens, top_k]; ``own_TK``, the router's own choice, for tokens that
        have none."""
        chosen_TK = own_TK
        if self._row is not None:
            chosen_TK = torch.where(self._row.known_T[:, None], self._row.experts_TLK[:, layer].long(), own_TK)
        if self.counted:
            self._loads()[layer] += torch.bincount(chosen_TK.flatten(), minlength=self.number)
        return chosen_TK


class _Choice(TorchFunctionMode):
    """Replaces the result of the ``torch.topk`` that chooses experts, while the block of a layer runs."""

    def __init__(self, routers: Routers, layer: int) -> None:
        super().__init__()
        self._routers = routers
        self._layer = layer
        self.chose_experts = False

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        scores = arguments[0]
        sizes = (self._routers.number, self._routers.top_k)
        if scores.ndim != 2 or (scores.shape[-1], result.indices.shape[-1]) != sizes:
            return result  # this call chooses groups of experts
        self.chose_experts = True
        if isinstance(scores, DTensor):
            raise StreamRLError("the scores of a router are split over ranks: its routing cannot be replayed")
        chosen_TK = self._routers.choose(self._layer, result.indices)
        return torch.return_types.topk((scores.gather(-1, chosen_TK), chosen_TK))


def routers_of(model: Any) -> Routers | None:
    """Make the routers of a transformers model; None where it has no experts."""
    sizes = experts_of(model.config.get_text_config().to_dict())
    return None if sizes is None else Routers(model, *sizes)

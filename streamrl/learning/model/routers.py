"""Routers of a mixture of experts: they take the experts that engines chose, and count the tokens of each expert.

``policy`` makes them in each trainer rank, for models that have experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.architecture import decoder_layers
from streamrl.pretrained.model_facts import experts_of

log = getLogger(__name__)
_WITHOUT = "without torch.topk"


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
    instead (``replayable``: every router chose in this way so far): their scores, normalised by the model's own code,
    weigh their outputs, so that gradients reach the router.
    This works for each family of transformers, also where the output of the router is changed later, for example by
    expert parallel plans."""

    def __init__(self, model: Any, layers: int, number: int, top_k: int) -> None:
        self.number = number
        self.top_k = top_k
        self._kind = model.config.model_type
        self._layers = layers
        self._row: RoutedRow | None = None
        self.replayable = True
        self._counted_N: Tensor | None = None
        self._replayed = 0
        self._loads_LE: Tensor | None = None
        self._device: Callable[[], torch.device] = lambda: model.device
        for layer, decoder in enumerate(decoder_layers(model)):
            for block in decoder.modules():
                if isinstance(getattr(block, "experts", None), Module):
                    block.forward = self._around(layer, block.forward)

    def begin(self, row: RoutedRow | None, counted_N: Tensor | None = None) -> None:
        """Use the experts of ``row`` until the next call (None: the routers choose), in its forward and where the
        backward computes layers again. Raises ``StreamRLError`` for experts of another model.

        ``counted_N``: places of the tokens that add to the loads, a place once for each trained token that it predicts:
        rows share, copy and pad other tokens, by the layout of the ranks (None: no token)."""
        if row is not None and tuple(row.experts_TLK.shape[1:]) != (self._layers, self.top_k):
            raise StreamRLError(
                f"engines return {row.experts_TLK.shape[2]} experts in each of {row.experts_TLK.shape[1]} layers, the "
                f"trainer's model has {self.top_k} in {self._layers}: set training.advanced.routing_replay = false"
            )
        if row is not None and not self.replayable:
            _warn_of_own_choice(self._kind)
            row = None
        self._row = row
        self._counted_N = counted_N
        if row is not None and counted_N is not None:
            self._replayed += row.known_T.numel() - row.missing

    def demand_replay(self) -> None:
        """Raise ``StreamRLError`` where the forwards so far have shown that the routing cannot be replayed."""
        if not self.replayable:
            raise StreamRLError(
                f"model type {self._kind!r} chooses experts {_WITHOUT}: its routing cannot be replayed: set "
                'training.advanced.routing_replay = "auto" or false'
            )

    def end(self) -> None:
        """End the forward: the backward may compute layers again, and counts no token."""
        self._counted_N = None

    def take_loads(self) -> tuple[Tensor, int]:
        """Return the number of trained tokens of each expert since the last call, float64 [layers, experts], and the
        number of tokens of the rows whose experts engines returned, and clear both."""
        loads_LE = self._loads()
        replayed_tokens = self._replayed
        self._loads_LE = None
        self._replayed = 0
        return loads_LE, replayed_tokens

    def _loads(self) -> Tensor:
        if self._loads_LE is None:
            self._loads_LE = torch.zeros(self._layers, self.number, dtype=torch.float64, device=self._device())
        return self._loads_LE

    def _around(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def routed(*arguments: Any, **options: Any) -> Any:
            with _Choice(self, layer) as choice:
                result = forward(*arguments, **options)
            # The first forward is the one of ``check_packing``, before any row has experts of engines.
            self.replayable = self.replayable and choice.chose_experts
            return result

        return routed

    def choose(self, layer: int, own_TK: Tensor) -> Tensor:
        """Experts of the row in ``layer``, int64 [tokens, top_k]; ``own_TK``, the router's own choice, for tokens that
        have none."""
        chosen_TK = own_TK
        if self._row is not None:
            chosen_TK = torch.where(self._row.known_T[:, None], self._row.experts_TLK[:, layer].long(), own_TK)
        if self._counted_N is not None:
            self._loads()[layer] += torch.bincount(chosen_TK[self._counted_N].flatten(), minlength=self.number)
        return chosen_TK


@cache
def _warn_of_own_choice(kind: str) -> None:
    log.warning("model type %r chooses experts %s: experts that engines return are not taken over", kind, _WITHOUT)


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

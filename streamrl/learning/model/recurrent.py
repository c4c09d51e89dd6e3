"""Layers that carry a state from token to token (Gated DeltaNet, Mamba, lightning attention, short convolutions), over
packed rows.

Such a layer has no mask: on a row it would carry its state from each sequence into the next. It gets whole sequences
instead, a shared prompt in front of each of its completions. Where its kernels know borders (``cu_seqlens`` of the
recurrence, ``seq_idx`` of the convolution) these follow each other in one row. Otherwise they lie beside each other in
batches of nearly equal length, padded at the end, where no token of theirs sees it. Which of the two is right is
measured on the tokens of ``packing_check``: torch's own stand-ins take the borders and ignore them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from streamrl.learning.model.architecture import decoder_layers
from streamrl.learning.model.attention import Bucket, PackedLayout, collect_rows, spread_rows

_CACHES = frozenset({"past_key_values", "past_key_value", "cache_params", "cache"})
_OF_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "packed")
_ROUNDING = 1e-5
"""Share of a layer's largest output by which equal tokens may differ."""


class Borders(NamedTuple):
    """Sequences of a row one after the other, without padding: what kernels take that know borders.

    ``places_R``: places among the padded ones of the layout, int64.
    ``starts``: cumulative lengths, int32 [sequences + 1].
    ``sequence_R``: sequence of each place, int32."""

    places_R: Tensor
    starts: Tensor
    sequence_R: Tensor

    def arguments(self, module: Any) -> dict[str, Any]:
        """Keyword arguments, as transformers calls them, of those that a module takes."""
        parameters = signature(type(module).forward).parameters
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        named = {"cu_seq_lens_q": self.starts, "seq_idx": self.sequence_R[None]}
        return {name: value for name, value in named.items() if takes_all or name in parameters}


def borders_of(layout: PackedLayout) -> Borders:
    """Return the borders of the sequences of a row."""
    keys = layout.keys
    device = keys.tokens_P.device
    widths = torch.tensor([bucket.keys for bucket in layout.buckets for _ in range(bucket.sequences)], device=device)
    real_P = torch.zeros(len(keys.tokens_P), dtype=torch.bool, device=device)
    real_P[keys.places_T] = True
    real_P[keys.repeats_R] = True
    sequence_P = torch.arange(len(widths), device=device).repeat_interleave(widths)
    places_R = real_P.nonzero()[:, 0]
    sequence_R = sequence_P[places_R].int()
    starts = torch.bincount(sequence_R, minlength=len(widths)).cumsum(0).int()
    return Borders(places_R, nn.functional.pad(starts, (1, 0)), sequence_R)


class RecurrentLayers:
    """Layers of one model that carry a state. With a row (``begin``) they get its sequences, without one what the model
    gives them."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}
        self._layout: PackedLayout | None = None
        self._borders: Borders | None = None
        self._measured: set[str] | None = None
        self.in_kernels: frozenset[str] = frozenset()
        """Names of the layers whose kernels get the borders of a row."""

    @property
    def names(self) -> list[str]:
        """Names of the layers in the model."""
        return list(self._modules)

    def begin(self, layout: PackedLayout | None) -> None:
        """Give the layers the sequences of a row until the next call, in its forward and where the backward computes
        them again. None: they get what they are given."""
        self._layout = layout if self._modules else None
        self._borders = None
        if self._layout is not None and (self.in_kernels or self._measured is not None):
            self._borders = borders_of(self._layout)

    def take(self, model: Any, names: Sequence[str]) -> None:
        """Let the modules of these names get sequences of rows."""
        for name in names:
            module = model.get_submodule(name)
            self._modules[name] = module
            module.forward = self._around(name, module.forward)

    def like(self, model: Any, other: RecurrentLayers) -> None:
        """Take the layers of ``model``, a copy, as ``other`` has those of its own model."""
        self.take(model, other.names)
        self.in_kernels = other.in_kernels

    def measure(self, run: Callable[[], Any]) -> Any:
        """Return the result of ``run``, which computes a row with borders, and note which layers keep them by
        themselves."""
        self._measured = set()
        try:
            return run()
        finally:
            self.in_kernels = frozenset(self._measured)
            self._measured = None

    def leave_kernels(self) -> None:
        """Give all layers batches of sequences."""
        self.in_kernels = frozenset()

    def leave_uncompiled(self) -> None:
        """Mark the layers so that ``torch.compile`` skips them."""
        for module in self._modules.values():
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]

    def _around(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def of_sequences(*arguments: Any, **options: Any) -> Any:
            layout = self._layout
            if layout is None:
                return forward(*arguments, **options)
            options = {key: value for key, value in options.items() if key not in _OF_BORDERS}
            if "attention_mask" in options:
                options["attention_mask"] = None
            hidden = arguments[0] if arguments else options["hidden_states"]
            row = _Row(forward, arguments, options, layout, tokens=hidden.shape[1])
            if self._borders is not None and name in self.in_kernels:
                return row.in_one_row(self._borders, self._borders.arguments(self._modules[name]))[0]
            if self._measured is not None and self._keeps(name, row):
                self._measured.add(name)
            return row.in_batches()

        return of_sequences

    def _keeps(self, name: str, row: _Row) -> bool:
        """Whether the first sequence of a row leaves the outputs of the others as they are, where the layer gets the
        borders."""
        borders = self._borders
        assert borders is not None
        arguments = borders.arguments(self._modules[name])
        if not arguments:
            return False
        try:
            outputs = [row.in_one_row(borders, arguments, of_first=factor)[1] for factor in (1.0, -1.0)]
        except (TypeError, RuntimeError, ValueError, NotImplementedError):
            return False  # it takes other arguments
        plain, changed = (output[borders.sequence_R > 0] for output in outputs)
        return bool((plain - changed).abs().max() <= _ROUNDING * plain.abs().max())


class _Row(NamedTuple):
    """One call of a layer with a row of ``tokens``: each tensor ``[1, tokens, ..]`` of its arguments is of the row."""

    forward: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    layout: PackedLayout
    tokens: int

    def in_batches(self) -> Any:
        """The layer's output from batches of sequences, padded at the end."""
        sizes = [bucket.sequences * bucket.keys for bucket in self.layout.buckets]
        parts: dict[int, tuple[Tensor, ...]] = {}
        outputs = []
        for index, bucket in enumerate(self.layout.buckets):

            def of_bucket(row: Tensor, index: int = index, bucket: Bucket = bucket) -> Tensor:
                if id(row) not in parts:
                    parts[id(row)] = torch.split(spread_rows(row[0], self.layout.keys), sizes)
                part = parts[id(row)][index]
                return part.view(bucket.sequences, bucket.keys, *part.shape[1:])

            outputs.append(self._call(of_bucket))
        joined_PD = torch.cat([_first(output).flatten(0, 1) for output in outputs])
        return _like(outputs[0], collect_rows(joined_PD, self.layout.keys)[None])

    def in_one_row(self, borders: Borders, of_borders: dict[str, Tensor], of_first: float = 1.0) -> tuple[Any, Tensor]:
        """The layer's output from all sequences in one row, whose borders it gets, and the hidden states among it
        that are of that row. ``of_first``: factor of what it is given of the first sequence."""
        factor_R = torch.where(borders.sequence_R == 0, of_first, 1.0)

        def without_padding(row: Tensor) -> Tensor:
            rows = spread_rows(row[0], self.layout.keys).index_select(0, borders.places_R)
            return rows[None] if of_first == 1.0 else (rows * factor_R.view(-1, *[1] * (rows.ndim - 1)))[None]

        output = self._call(without_padding, of_borders)
        row_RD = _first(output)[0]
        rows_PD = row_RD.new_zeros(len(self.layout.keys.tokens_P), *row_RD.shape[1:])
        rows_PD = rows_PD.index_copy(0, borders.places_R, row_RD)
        return _like(output, collect_rows(rows_PD, self.layout.keys)[None]), row_RD

    def _call(self, change: Callable[[Tensor], Tensor], of_borders: dict[str, Tensor] | None = None) -> Any:
        arguments, options = self._changed((self.arguments, self.options), change)
        return self.forward(*arguments, **options, **(of_borders or {}))

    def _changed(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return change(value) if value.shape[:2] == (1, self.tokens) else value
        if isinstance(value, dict):
            return {key: self._changed(item, change) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self._changed(item, change) for item in value)
        return value


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _like(output: Any, hidden_1TD: Tensor) -> Any:
    """The output of a layer with other hidden states. What else layers return is nothing that a model reads here."""
    return (hidden_1TD, *[None] * (len(output) - 1)) if isinstance(output, tuple) else hidden_1TD


def recurrent_layers(model: Any, attending: Collection[Module]) -> list[str]:
    """Return the names of the layers that carry a state: innermost modules of decoder layers that take a cache.

    ``attending``: modules that gave keys to the attention of packed rows, which knows the sequences."""
    names = {module: name for name, module in model.named_modules()}
    attends = {id(module) for module in attending}
    recurrent = []
    for layer in decoder_layers(model):
        taking = [module for module in layer.modules() if _CACHES & signature(module.forward).parameters.keys()]
        for module in taking:
            below = {id(part) for part in module.modules()}
            is_innermost = not any(id(other) in below and other is not module for other in taking)
            if is_innermost and not below & attends:
                recurrent.append(names[module])
    return recurrent

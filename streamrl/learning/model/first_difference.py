"""The layer that makes packed rows give other results: found by comparing what the modules of two forwards take and
give. ``packing_check`` names it where it refuses a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from streamrl.learning.model.architecture import decoder_layers

_EQUAL = 1e-4
"""Share of the largest value by which equal hidden states may differ."""


class _Call(NamedTuple):
    """Hidden states ``[tokens, D]`` that a module takes and returns."""

    inputs: Tensor
    outputs: Tensor


def first_difference(model: Any, run: Callable[[], Any], other_run: Callable[[], Any], tokens: slice) -> str:
    """Return the name of the innermost module that takes the same hidden states in two forwards and returns others.
    Empty: there is none. ``tokens``: part of the row of ``run`` that is the same in ``other_run``, or its whole row."""
    calls, calls_of_other = (_calls(model, forward) for forward in (run, other_run))
    for name, call in calls.items():
        other = calls_of_other.get(name)
        if other is None:
            continue
        part = tokens if len(other.inputs) == len(call.inputs) else slice(None)
        if _equal(call.inputs[tokens], other.inputs[part]) and not _equal(call.outputs[tokens], other.outputs[part]):
            return name
    return ""


def _equal(states: Tensor, other_states: Tensor) -> bool:
    if states.shape != other_states.shape:
        return False
    return bool((states - other_states).abs().max() <= _EQUAL * other_states.abs().max())


@torch.no_grad()
def _calls(model: Any, run: Callable[[], Any]) -> dict[str, _Call]:
    """Calls of the modules of decoder layers in the order in which they end, so that inner ones come first. Of each its
    first call."""
    names = {module: name for name, module in model.named_modules()}
    calls: dict[str, _Call] = {}

    def note(module: Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        inputs = arguments[0] if arguments else options.get("hidden_states")
        outputs = output[0] if isinstance(output, tuple) else output
        states = [state for state in (inputs, outputs) if isinstance(state, Tensor) and state.ndim == 3]
        if len(states) == 2 and states[0].shape[:2] == states[1].shape[:2]:
            calls.setdefault(names[module], _Call(*(state[0].float() for state in states)))

    layers = decoder_layers(model)
    modules = [module for layer in layers for module in layer.modules()]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    row_tokens = len(calls[names[layers[0]]].inputs)
    return {name: call for name, call in calls.items() if len(call.inputs) == row_tokens}

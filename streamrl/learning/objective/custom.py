"""A loss and advantages of the user's own: the object that ``objective.function`` names, as a surrogate and as
advantages.

``objectives`` and ``batches.preparation`` ask for the parts of an objective here, in each trainer rank. A function with
the parameter ``rewards`` computes advantages, another function a loss; a class has methods ``loss``, ``advantages`` or
both, and is called with ``objective.options``. Parameters of a loss have names of ``LOSS_INPUTS``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from msgspec import json
from torch import Tensor

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import JsonObject, Texts
from streamrl.recipe.objective import ObjectiveSettings
from streamrl.recipe.objectives.custom import CUSTOM, CustomAdvantages, CustomLoss
from streamrl.recipe.objectives.method import Advantages, Clip, Surrogate, SurrogateTokens
from streamrl.recipe.user_code import describe_error, load_user_object

LOSS_INPUTS: Mapping[str, Callable[[SurrogateTokens], Any]] = {
    "logprobs": attrgetter("logprobs_N"),
    "old_logprobs": attrgetter("proximal_N"),
    "behavior_logprobs": attrgetter("behavior_N"),
    "ratio": attrgetter("ratio_N"),
    "advantages": attrgetter("advantages_N"),
    "staleness": attrgetter("staleness_N"),
    "sequence_ids": attrgetter("sequence_N"),
    "sequence_mean": attrgetter("sequence_mean"),
    "sequence_sum": attrgetter("sequence_sum"),
    "clip_low": attrgetter("clip.low"),
    "clip_high": attrgetter("clip.high"),
    "dual_clip": attrgetter("clip.dual"),
}
"""What a loss may ask for, by the names of its parameters."""
TRAJECTORY_INPUTS = frozenset({"sequence_mean", "sequence_sum", "sequence_ids"})
"""Inputs that need all tokens of a trajectory at once."""
INPUTS_OF = {"loss": frozenset(LOSS_INPUTS), "advantages": frozenset({"rewards"})}


class UserLoss(CustomLoss, frozen=True):
    """Loss of the user. ``spec``: name in the recipe; ``inputs``: names of the parameters that it takes."""

    spec: str
    function: Any
    inputs: Texts

    def loss(self, tokens: SurrogateTokens) -> tuple[Tensor, Tensor]:
        """Call the user's function. Raises ``StreamRLError`` where it raises, and for a result that is no loss of each
        token."""
        try:
            result = self.function(**{name: LOSS_INPUTS[name](tokens) for name in self.inputs})
        except Exception as error:
            raise StreamRLError(f'objective.function "{self.spec}" raised {describe_error(error)}') from error
        clipped_N = torch.zeros_like(tokens.advantages_N, dtype=torch.bool)
        if isinstance(result, tuple) and len(result) == 2:
            result, clipped_N = result
        for part, name in ((result, "loss"), (clipped_N, "clipped")):
            if not isinstance(part, Tensor) or part.shape != tokens.advantages_N.shape:
                shape = f"a tensor of shape {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                raise StreamRLError(
                    f'objective.function "{self.spec}" returned {shape} as {name} of {tokens.advantages_N.numel()} '
                    "tokens: return a tensor with one number a token; the run takes the mean "
                    "(objective.loss_normalization)"
                )
        if tokens.logprobs_N.requires_grad and not result.requires_grad:
            raise StreamRLError(
                f'objective.function "{self.spec}" returned a loss without a gradient: compute it from logprobs or '
                "ratio, without detach(), item() or no_grad()"
            )
        return result, clipped_N.detach().bool()


class UserTrajectoryLoss(UserLoss, frozen=True):
    """Loss of the user, of which a token reads other tokens of its trajectory."""

    reads_trajectory = True


class UserAdvantages(CustomAdvantages, frozen=True):
    """Advantages of the user. ``spec``: name in the recipe."""

    spec: str
    function: Any

    def of_group(self, rewards_S: Tensor, centred_S: Tensor) -> Tensor:
        """Call the user's function. Raises ``StreamRLError`` where it raises, and for other than finite numbers."""
        try:
            advantages_S = torch.as_tensor(self.function(rewards=rewards_S.clone()), dtype=torch.float64)
        except Exception as error:
            raise StreamRLError(f'objective.function "{self.spec}" raised {describe_error(error)}') from error
        if advantages_S.shape != rewards_S.shape or not bool(advantages_S.isfinite().all()):
            raise StreamRLError(
                f'objective.function "{self.spec}" returned {advantages_S.tolist()} for the rewards '
                f"{rewards_S.tolist()}: return one finite number a reward"
            )
        return advantages_S


class UserObjective(NamedTuple):
    """Parts of an objective that the user's object has."""

    loss: UserLoss | None = None
    advantages: UserAdvantages | None = None


def surrogate_of(settings: ObjectiveSettings) -> Surrogate:
    """Return the surrogate of ``settings``. Raises ``RecipeError`` for a function of the user that is no loss."""
    if settings.surrogate != CUSTOM:
        return settings.token_surrogate
    loss = user_objective(settings).loss
    if loss is None:
        raise RecipeError(
            f'objective.function: "{settings.function}" has advantages and no loss: set objective.advantages = '
            '"custom", or name a function without the parameter rewards'
        )
    return loss


def estimator_of(settings: ObjectiveSettings) -> Advantages:
    """Return the advantages of ``settings``. Raises ``RecipeError`` for a function of the user that has none."""
    if settings.advantages != CUSTOM:
        return settings.estimator
    advantages = user_objective(settings).advantages
    if advantages is None:
        raise RecipeError(
            f'objective.function: "{settings.function}" has a loss and no advantages: name a function with the '
            'parameter rewards, or leave objective.advantages = "custom" out'
        )
    return advantages


def trains_without_advantage(settings: ObjectiveSettings) -> bool:
    """Return whether the surrogate has a gradient for a token whose advantage is 0, so that no token may be skipped."""
    if settings.surrogate != CUSTOM:
        return False
    return _gradient_at_zero(settings.function, json.encode(settings.options), settings.clip)


@cache
def _gradient_at_zero(spec: str, options: bytes, clip: Clip) -> bool:
    """Return whether the user's loss has a gradient at advantages of 0."""
    loss = _load(spec, options).loss
    if loss is None:
        return False
    proximal_N = torch.tensor([-0.1, -0.7, -2.0, -2.5], dtype=torch.float64)
    logprobs_N = torch.tensor([-0.4, -0.7, -1.2, -2.9], dtype=torch.float64, requires_grad=True)
    zeros_N = torch.zeros(4, dtype=torch.int64)
    nothing_N = torch.zeros(4, dtype=torch.float64)
    ratio_N = (logprobs_N - proximal_N).exp()
    tokens = SurrogateTokens(logprobs_N, proximal_N, proximal_N - 0.1, ratio_N, nothing_N, zeros_N, zeros_N, 1, clip)
    losses_N, _ = loss.loss(tokens)
    torch.autograd.backward(losses_N.sum())
    return logprobs_N.grad is not None and bool(logprobs_N.grad.any())


def user_objective(settings: ObjectiveSettings) -> UserObjective:
    """Load the object that ``objective.function`` names, once a process. Raises ``RecipeError`` where it cannot be
    imported, or has parameters that a loss does not get."""
    return _load(settings.function, json.encode(settings.options))


@cache
def _load(spec: str, encoded_options: bytes) -> UserObjective:
    """Load the parts of the object that ``spec`` names."""
    options: JsonObject = json.decode(encoded_options)
    target: Any = load_user_object(spec)
    if not callable(target):
        raise RecipeError(f'"{spec}" is a {type(target).__name__}: name a function or a class')
    if not isinstance(target, type):
        kind = "advantages" if "rewards" in _parameters(spec, target) else "loss"
        return _objective_of(spec, {kind: target}, options)
    _refuse_unknown_options(spec, _parameters(spec, target), options)
    try:
        instance = target(**options)
    except Exception as error:
        raise RecipeError(f'"{spec}" cannot be made of objective.advanced.options: {describe_error(error)}') from error
    methods = {name: getattr(instance, name) for name in UserObjective._fields if callable(getattr(instance, name, 0))}
    if not methods:
        raise RecipeError(f'"{spec}" has neither a method loss nor a method advantages: define one')
    return _objective_of(spec, methods, {})


def _objective_of(spec: str, functions: Mapping[str, Callable[..., Any]], options: JsonObject) -> UserObjective:
    parts: dict[str, Any] = {}
    for kind, function in functions.items():
        parameters = _parameters(spec, function)
        names = INPUTS_OF[kind]
        _refuse_unknown_options(spec, {name: parameters[name] for name in parameters.keys() - names}, options)
        for name, parameter in parameters.items():
            if name not in names and name not in options and parameter.default is parameter.empty:
                raise RecipeError(
                    f'"{spec}" takes "{name}", which is no input of {kind}: they are '
                    f"{', '.join(sorted(names))}; give it a default, or a value in objective.advanced.options"
                )
        if inspect.iscoroutinefunction(function):
            raise RecipeError(f'"{spec}" is async: a trainer rank waits for nothing, write a plain function')
        inputs = tuple(name for name in parameters if name in names)
        bound = partial(function, **options)
        if kind == "advantages":
            parts[kind] = UserAdvantages(spec=spec, function=bound)
        elif TRAJECTORY_INPUTS.isdisjoint(inputs):
            parts[kind] = UserLoss(spec=spec, function=bound, inputs=inputs)
        else:
            parts[kind] = UserTrajectoryLoss(spec=spec, function=bound, inputs=inputs)
    return UserObjective(**parts)


def _parameters(spec: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name. Raises ``RecipeError`` for a form that cannot be called by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RecipeError(f'"{spec}" has no signature that Python can read ({error}): wrap it in a function') from error
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    by_name = {name: parameter for name, parameter in parameters.items() if parameter.kind not in kinds}
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in by_name.values()):
        raise RecipeError(f'"{spec}" has parameters without names ("/"): remove the "/"')
    return by_name


def _refuse_unknown_options(spec: str, parameters: Mapping[str, inspect.Parameter], options: JsonObject) -> None:
    for name in options:
        if name not in parameters:
            names = ", ".join(parameters) or "no further one"
            raise RecipeError(
                f'objective.advanced.options: "{name}" is no option of "{spec}", which takes {names}: correct it'
            )

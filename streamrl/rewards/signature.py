"""Inputs of a reward function, read from its signature.

``calls.loading`` makes the signatures (reward worker, fork server, or the process that inspects functions); scoring in
the reward worker, and the checks of prompts in the controller and in commands, read them.

A function is *per sample* when a parameter takes one completion: the one named ``completion``, in verl's form
``solution_str``, else the first. It is *per group*, in TRL's form, when a parameter is named ``completions`` (or its
first one ``completion_ids`` or ``prompts``): then every argument is a list with one entry for each completion, and the
function returns such a list. All other parameters are passed by name: dataset columns, and the names of ``PROVIDED`` or
``PROVIDED_OF_GROUPS``. ``**columns`` gets every column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from streamrl.base.types import AnyFunction, JsonMapping, Texts
from streamrl.recipe.rewards import RewardCredit

PROVIDED = ("prompt", "prompt_id", "token_ids", "finish_reason", "environment_reward", "tool_calls", "turn_texts")
"""Parameters of a function of one completion that are not columns."""

PROVIDED_OF_GROUPS = (
    "prompts", "completion_ids", "prompt_id", "token_ids", "finish_reason", "environment_reward", "tool_calls",
    "turn_texts",
)  # fmt: skip
"""Parameters of a function of a group that are not columns."""

_NOT_GIVEN = {
    **dict.fromkeys(("trainer_state", "log_extra", "log_metric", "environments"), "TRL"),
    **dict.fromkeys(("state", "parser"), "verifiers"),
    **dict.fromkeys(("solution_strs", "data_sources", "ground_truths", "extra_infos"), "verl in batches"),
    **dict.fromkeys(("queries", "labels"), "OpenRLHF"),
    "sample": "slime",
}
"""Name of an argument -> the other system that passes it. streamrl passes it only where a column has the name."""


class RewardSignature(Struct, frozen=True, kw_only=True):
    """Signature of one reward function.

    ``spec``: ``function`` of the recipe; ``first``: parameter that takes the completions; ``per_group``: a call is
    about all completions of a group; ``wants_all``: the function takes ``**columns``; ``bound``: parameters that
    options have set, whatever columns the prompt has; ``columns``: dataset columns that the function needs;
    ``optional_columns``: dataset columns for parameters with a default; ``provided``: parameters among ``PROVIDED`` or
    ``PROVIDED_OF_GROUPS``; ``limit_key``: column whose value selects the adaptive time limit (empty: the prompt's
    identity); ``as_text``: completions of a chat are texts, not lists of messages; ``special_tokens``: texts show
    special tokens; ``credit``: unit to which the function gives numbers."""

    spec: str
    name: str
    first: str
    per_group: bool
    is_async: bool
    wants_all: bool
    bound: Texts = ()
    columns: Texts = ()
    optional_columns: Texts = ()
    provided: Texts = ()
    limit_key: str = ""
    as_text: bool = True
    special_tokens: bool = False
    credit: RewardCredit = RewardCredit.COMPLETION

    @property
    def sees_tokens(self) -> bool:
        """Return whether the function sees special tokens of a completion."""
        return self.special_tokens or not {"token_ids", "completion_ids"}.isdisjoint((self.first, *self.provided))


class RewardFunction(Struct, frozen=True, kw_only=True):
    """A user's function, ready to be called with ``call(completion, **arguments)``."""

    signature: RewardSignature
    call: AnyFunction


def needed_columns(signatures: Iterable[RewardSignature]) -> dict[str, Texts]:
    """The dataset columns that each reward needs for its function and for its time limits, by reward name."""
    return {
        # A dict keeps the order and drops a column that both need.
        signature.name: tuple(dict.fromkeys([*signature.columns, *filter(None, [signature.limit_key])]))
        for signature in signatures
    }


def column_of(columns: JsonMapping, name: str) -> tuple[Any, ...]:
    """The column ``name`` as the only element; empty: the prompt has no such column. ``ground_truth`` may be a part of
    the column ``reward_model``, as in verl's data."""
    if name in columns:
        return (columns[name],)
    if name == "ground_truth":
        nested = columns.get("reward_model")
        if isinstance(nested, Mapping) and name in nested:
            return (nested[name],)
    return ()


def missing_column(column: str, reward: str) -> str:
    """Message about a prompt without ``column``, which ``reward`` needs. The caller puts the name of the prompt before
    the message."""
    message = f'has no column "{column}", which the reward {reward} needs: add it'
    system = _NOT_GIVEN.get(column)
    if system is None:
        return message
    return f"{message} ({system} gives that, and it is not given here: make the parameter optional)"

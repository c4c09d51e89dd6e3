"""Inputs of a reward function, read from its signature.

A function is *per sample* when a parameter takes one completion: the one named ``completion``, in verl's form
``solution_str``, else the first. It is *per group*, in TRL's form, when a parameter is named ``completions`` (or its
first one ``completion_ids`` or ``prompts``): then every argument is a list with one entry for each completion, and so
is what it returns. All other parameters are passed by name: dataset columns, and the names of ``PROVIDED`` or
``PROVIDED_OF_GROUPS``. ``**columns`` gets every column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

PROVIDED = ("prompt", "prompt_id", "token_ids", "finish_reason", "environment_reward", "tool_calls")
"""What a function of one completion may ask for besides columns."""

PROVIDED_OF_GROUPS = (
    "prompts", "completion_ids", "prompt_id", "token_ids", "finish_reason", "environment_reward", "tool_calls",
)  # fmt: skip
"""What a function of a group may ask for besides columns."""

_NOT_GIVEN = {
    **dict.fromkeys(("trainer_state", "log_extra", "log_metric", "environments"), "TRL"),
    **dict.fromkeys(("state", "parser"), "verifiers"),
    **dict.fromkeys(("solution_strs", "data_sources", "ground_truths", "extra_infos"), "verl in batches"),
    **dict.fromkeys(("queries", "labels"), "OpenRLHF"),
    "sample": "slime",
}
"""Names of arguments that other systems give, and no run here does unless a column has the name."""


class RewardSignature(msgspec.Struct, frozen=True, kw_only=True):
    """Signature of one reward function. ``columns``: dataset columns it cannot do without; ``optional_columns``: those
    with a default; ``provided``: names of ``PROVIDED`` or ``PROVIDED_OF_GROUPS`` it asked for; ``first``: the parameter
    that takes the completions; ``bound``: names that options have set, whatever columns there are; ``limit_key``: a
    column that its time limits follow; ``as_text``: completions of a chat are texts too, not messages;
    ``special_tokens``: these texts show special tokens."""

    spec: str
    name: str
    first: str
    per_group: bool
    is_async: bool
    wants_all: bool
    bound: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    provided: tuple[str, ...] = ()
    limit_key: str = ""
    as_text: bool = True
    special_tokens: bool = False

    @property
    def sees_tokens(self) -> bool:
        """Return whether special tokens of a completion are known to the function."""
        return self.special_tokens or not {"token_ids", "completion_ids"}.isdisjoint((self.first, *self.provided))


class RewardFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A user's function, ready to be called with ``call(completion, **arguments)``."""

    signature: RewardSignature
    call: Callable[..., Any]


def needed_columns(signatures: Iterable[RewardSignature]) -> dict[str, tuple[str, ...]]:
    """The dataset columns that each reward cannot do without, by reward name: its function, and its time limits."""
    return {
        signature.name: tuple(dict.fromkeys([*signature.columns, *filter(None, [signature.limit_key])]))
        for signature in signatures
    }


def column_of(columns: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """The column ``name`` as the only element; empty: there is none. ``ground_truth`` may be, as in verl's data, a part
    of ``reward_model``."""
    if name in columns:
        return (columns[name],)
    nested = columns.get("reward_model") if name == "ground_truth" else None
    return (nested[name],) if isinstance(nested, Mapping) and name in nested else ()


def missing_column(column: str, reward: str) -> str:
    """The problem of a prompt without ``column``, which ``reward`` needs; to be put behind a place."""
    system = _NOT_GIVEN.get(column)
    given = f" ({system} gives that, and it is not given here: make the parameter optional)" if system else ""
    return f'has no column "{column}", which the reward {reward} needs: add it{given}'

"""Inputs of a reward function, read from its signature.

A function is *per sample* when its first parameter takes one completion (``completion: str``), and *per group* when
that parameter is named ``completions`` (``list[str]``, the completions of one prompt; it returns one value each). All
other parameters are passed by name: dataset columns, and the names of ``PROVIDED``. ``**columns`` gets every column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

PROVIDED = ("prompt", "prompt_id", "token_ids", "finish_reason")
"""What a function may ask for besides columns. Per group, ``token_ids`` and ``finish_reason`` are lists with one
entry for each completion; columns, ``prompt`` and ``prompt_id`` are those of the one prompt."""


class RewardSignature(msgspec.Struct, frozen=True, kw_only=True):
    """Signature of one reward function. ``columns``: dataset columns it cannot do without; ``optional_columns``: those
    with a default; ``provided``: names of ``PROVIDED`` it asked for; ``first``: its first parameter's name; ``bound``:
    names that options have set, whatever columns there are; ``limit_key``: a column that its time limits follow."""

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

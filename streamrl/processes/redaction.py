"""Secrets do not leave the run: their values are taken out of whatever is written for other people to read. Pure.

A secret is the value of an environment variable or of a recipe's option whose name says so, what a reward was given by
name, and every text of a shape that only keys have (a Hugging Face token, a bearer header, a password in an address).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from streamrl.recipe.rewards import Reward
from streamrl.recipe.toml_text import parse_toml

SHORTEST_SECRET = 6
"""Characters. Shorter values (``TOKENIZERS_PARALLELISM=false``) are part of too many other words."""

_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|key|token|pass|passwd|password|passphrase|authorization|bearer|dsn)$"
    r"|(^|_)(secret|credential|cookie)s?($|_)|(access|auth|private|signing|license)_?key",
    re.IGNORECASE,
)
_PATH = re.compile(r"[/~.][\w./~-]*")
# What keys of well-known services look like, wherever they stand.
_SHAPES = tuple(
    re.compile(pattern)
    for pattern in (
        rb"\bhf_[A-Za-z0-9]{16,}",
        rb"\bsk-[A-Za-z0-9_-]{16,}",
        rb"\bgh[pousr]_[A-Za-z0-9]{20,}",
        rb"\bgithub_pat_[A-Za-z0-9_]{20,}",
        rb"\bAKIA[0-9A-Z]{16}\b",
        rb"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}",
        rb"(?<=://)[^/\s:@\"']+:[^/\s:@\"']+(?=@)",
        rb"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    )
)


def is_secret_name(name: str) -> bool:
    """Return whether what ``name`` is called holds a secret: ``HF_TOKEN``, ``api_key``; not ``max_tokens``."""
    return _SECRET_NAME.search(name) is not None


class Redaction:
    """Replaces the values of ``secrets`` (value -> name) by ``[name removed]``."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # The longest first: one may be the beginning of another.
        chosen = sorted((value for value in secrets if len(value) >= SHORTEST_SECRET), key=len, reverse=True)
        self._names = {value.encode(): f"[{secrets[value]} removed]".encode() for value in chosen}
        self._known = re.compile(b"|".join(map(re.escape, self._names))) if self._names else None

    def clean(self, content: bytes) -> bytes:
        """``content`` without secrets."""
        if self._known is not None:
            content = self._known.sub(lambda found: self._names[found[0]], content)
        for shape in _SHAPES:
            content = shape.sub(b"[secret removed]", content)
        return content

    def text(self, text: str) -> str:
        """``text`` without secrets."""
        return self.clean(text.encode(errors="replace")).decode(errors="replace")


def run_redaction(environment: Mapping[str, str], recipe_toml: str = "", attached: Sequence[Reward] = ()) -> Redaction:
    """Make the redaction for everything that a run writes. ``recipe_toml``: its recipe as text; one that cannot be read
    names nothing. ``attached``: rewards that the recipe may not have."""
    try:
        recipe = parse_toml(recipe_toml)
    except (ValueError, RecursionError):
        recipe = {}
    secrets = {value: name for name, value in environment.items() if is_secret_name(name) and not _is_path(value)}
    rewards = [*recipe.get("rewards", ()), *map(structs.asdict, attached)]
    for name in _given_to_rewards(rewards):  # a person names here what a function needs to identify itself
        if name in environment and not _is_path(environment[name]):
            secrets[environment[name]] = name
    named = [*_named_strings(recipe, ""), *_named_strings({r.label: r.options for r in attached}, "rewards")]
    secrets |= {value: path for path, value in named if not _is_path(value)}
    return Redaction(secrets)


def _is_path(value: str) -> bool:
    return _PATH.fullmatch(value) is not None


def _given_to_rewards(rewards: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for reward in rewards:
        yield from reward.get("environment", ())
        yield from (value for key, value in reward.get("options", {}).items() if key == "api_key_variable")


def _named_strings(table: Any, path: str) -> Iterator[tuple[str, str]]:
    """Strings under keys whose names say that they are secret; names of variables (``*_variable``) are none."""
    if isinstance(table, Mapping):
        for key, value in table.items():
            where = f"{path}.{key}".lstrip(".")
            if isinstance(value, str):
                if is_secret_name(key) and not key.endswith(("_variable", "_env", "_file", "_path")):
                    yield where, value
            else:
                yield from _named_strings(value, where)
    elif isinstance(table, list | tuple):
        for index, value in enumerate(table):
            yield from _named_strings(value, f"{path}.{index}")

"""Redaction of secrets in whatever other people read of a run: crash bundles (``processes/crash_bundle``), the page and
its reports (``observe/dashboard``), and the configuration that trackers get. Each calls it in its own process. Pure.

A secret is the value of a variable or of a recipe's option with the name of a secret, the value of a variable that a
reward gets, and every text with the form of a key (a Hugging Face token, a bearer header, a password in an address)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from streamrl.base.types import JsonMapping, TextMapping
from streamrl.recipe.rewards import Reward, with_current_keys
from streamrl.recipe.toml_text import parse_toml

SHORTEST_SECRET = 6
"""Characters. Shorter values (``TOKENIZERS_PARALLELISM=false``) are part of too many other words."""

_SECRET_NAME = re.compile(
    r"(^|_)(api_?key|key|token|pass|passwd|password|passphrase|authorization|bearer|dsn)$"
    r"|(^|_)(secret|credential|cookie)s?($|_)|(access|auth|private|signing|license)_?key",
    re.IGNORECASE,
)
_PATH = re.compile(r"[/~.][\w./~-]*")
# Forms of the keys of well-known services, in any text.
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
    """Return whether ``name`` is the name of a secret: ``HF_TOKEN``, ``api_key``; not ``max_tokens``."""
    return _SECRET_NAME.search(name) is not None


class Redaction:
    """Replaces the values of ``secrets`` (value -> name) by ``[name removed]``."""

    def __init__(self, secrets: TextMapping) -> None:
        # The longest first: a secret may be the beginning of another one.
        values = sorted((value for value in secrets if len(value) >= SHORTEST_SECRET), key=len, reverse=True)
        self._replacements = {value.encode(): f"[{secrets[value]} removed]".encode() for value in values}
        self._pattern = re.compile(b"|".join(map(re.escape, self._replacements))) if self._replacements else None

    def clean(self, content: bytes) -> bytes:
        """Return ``content`` without secrets."""
        if self._pattern is not None:
            content = self._pattern.sub(lambda match: self._replacements[match[0]], content)
        for shape in _SHAPES:
            content = shape.sub(b"[secret removed]", content)
        return content

    def text(self, text: str) -> str:
        """Return ``text`` without secrets."""
        return self.clean(text.encode(errors="replace")).decode(errors="replace")

    def public(self, value: Any) -> Any:
        """Return ``value`` without secrets in its texts. ``value``: JSON, as lists, dictionaries, texts and numbers."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {name: self.public(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.public(item) for item in value]
        return value


def run_redaction(variables: TextMapping, recipe_toml: str, attached: Sequence[Reward] = ()) -> Redaction:
    """Make the redaction for the files of a run. ``variables``: variables of a process of the run; ``recipe_toml``:
    recipe as text, which counts as empty where it cannot be read; ``attached``: rewards that the recipe may not
    have."""
    try:
        recipe = parse_toml(recipe_toml)
    except (ValueError, RecursionError):
        recipe = {}
    secrets = {value: name for name, value in variables.items() if is_secret_name(name) and not _is_path(value)}
    rewards = [*map(with_current_keys, recipe.get("rewards", ())), *map(asdict, attached)]
    for name in _variables_of_rewards(rewards):  # a recipe names the variables by which a function identifies itself
        if name in variables and not _is_path(variables[name]):
            secrets[variables[name]] = name
    attached_options = {reward.label: reward.options for reward in attached}
    options = [*_named_strings(recipe, ""), *_named_strings(attached_options, "rewards")]
    secrets |= {value: path for path, value in options if not _is_path(value)}
    return Redaction(secrets)


def _is_path(value: str) -> bool:
    return _PATH.fullmatch(value) is not None


def _variables_of_rewards(rewards: Iterable[JsonMapping]) -> Iterator[str]:
    for reward in rewards:
        yield from reward.get("variables", ())
        yield from (value for key, value in reward.get("options", {}).items() if key == "api_key_variable")


def _named_strings(table: Any, path: str) -> Iterator[tuple[str, str]]:
    """Strings under keys with the name of a secret, each with its path; names of variables (``*_variable``) are no
    secrets."""
    if isinstance(table, Mapping):
        for key, value in table.items():
            key_path = f"{path}.{key}".lstrip(".")
            if isinstance(value, str):
                if is_secret_name(key) and not key.endswith(("_variable", "_env", "_file", "_path")):
                    yield key_path, value
            else:
                yield from _named_strings(value, key_path)
    elif isinstance(table, list | tuple):
        for index, value in enumerate(table):
            yield from _named_strings(value, f"{path}.{index}")

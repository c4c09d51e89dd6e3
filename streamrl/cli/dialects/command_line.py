"""Forms of overrides and recipes on a command line, of hydra, pydantic and Hugging Face's parsers, as our own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

NAMED_BY_USERS = ("options", "part_weights", "train", "prompts")
"""Tables whose keys may have a hyphen."""
_PATH = r"([A-Za-z_][\w-]*(?:\.[\w-]+)+)"
_BARE = re.compile(rf"([+~]*){_PATH}(=.*)?", re.DOTALL)
_DASHED = re.compile(rf"--(no-)?{_PATH}(=.*)?", re.DOTALL)
_FLAG = re.compile(r"--?[A-Za-z]")


def normalized_arguments(words: Iterable[str], flag: str, refuse: Callable[[str], NoReturn]) -> list[str]:
    """Return the words of a command line with every override behind ``flag``: ``a.b=c``, ``+a.b=c``, ``--a.b c``,
    ``--a-b.c=d``, ``--a.b`` (true), ``--no-a.b`` (false); ``@ RECIPE``, ``@RECIPE`` and ``--config RECIPE`` by its
    place. ``refuse`` is called for what is none of them."""
    written = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == flag:
            written += [word, *rest[:1]]
            rest = rest[1:]
        elif word in ("@", "--config"):
            if not rest or _FLAG.match(rest[0]):
                refuse(f"{word}: write the recipe behind it, such as {word} recipe.toml")
            written.append(rest.pop(0))
        elif word.startswith(("@", "--config=")):
            written.append(word.removeprefix("@").removeprefix("--config="))
        elif dashed := _DASHED.fullmatch(word):
            value = dashed[3]
            if dashed[1] and value is not None:
                refuse(f"{word}: write --no-{dashed[2]} for false, or {dashed[2]}{value}")
            if value is None and not dashed[1] and rest and not _FLAG.match(rest[0]):
                value = f"={rest.pop(0)}"
            written += [flag, _snake(dashed[2]) + (value or ("=false" if dashed[1] else "=true"))]
        elif (bare := _BARE.fullmatch(word)) and (bare[3] or bare[1]):
            mark = bare[1]
            path = _snake(bare[2])
            if "~" in mark or not bare[3]:
                refuse(f"{mark}{path}: write {path}=VALUE; a key is not deleted, but left out of the recipe")
            if mark:
                print(f"note: {path} needs no {mark}: a recipe knows all of its keys", file=sys.stderr)
            written += [flag, f"{path}{bare[3]}"]
        else:
            written.append(word)
    return written


def _snake(path: str) -> str:
    """``path`` with underscores for hyphens, but for names that are the user's own."""
    parts = path.split(".")
    own = min((parts.index(name) for name in NAMED_BY_USERS if name in parts), default=len(parts))
    return ".".join([part.replace("-", "_") for part in parts[: own + 1]] + parts[own + 1 :])


def unknown_words(words: Sequence[str]) -> str:
    """Return what to write for words that no argument took: of a flag, the key of a recipe that it is."""
    # Not above: most commands read no recipe.
    from streamrl.recipe.dialects.foreign_keys import foreign_answer
    from streamrl.recipe.field_types import paths_to
    from streamrl.recipe.sections import Recipe
    from streamrl.recipe.toml_text import value_or_text

    flag = next((word for word in words if word.startswith("--") or "=" in word), "")
    name, equals, value = flag.removeprefix("--").partition("=")
    if not equals:
        following = [*words[words.index(flag) + 1 :], "--end"] if flag else ["--end"]
        value = "true" if _FLAG.match(following[0]) else following[0]
    own = paths_to(Recipe, name.replace("-", "_"))
    if own:
        return f"{flag}: write its section, too: {' or '.join(f'{path}={value}' for path in own)}"
    if flag and (answer := foreign_answer(name, value_or_text(value))):
        return f"{flag}: {answer}; keys are written as SECTION.KEY=VALUE"
    rest = "there is one recipe, or run, and keys are written as SECTION.KEY=VALUE (streamrl explain lists them)"
    return f"unrecognized arguments: {' '.join(words)}: {rest}"

"""Names of the Hugging Face Hub, and folders of its cache, whose paths say which commit of which repository they hold.
Nothing here asks the Hub (``streamrl.prepare.hub`` does)."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from streamrl.base.errors import RecipeError

HUB = "hf:"
"""The beginning of a name that cannot be a path. A data set has it always, a model may have it."""
_PART = r"(?![^/@]*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_BARE = re.compile(rf"{_PART}/{_PART}(@\S+)?", re.ASCII)
_MARKED = re.compile(rf"({_PART}(?:/{_PART})?)(?:@(\S+))?", re.ASCII)
_SNAPSHOT = re.compile(r".*/(model|dataset)s--([^/]+)/snapshots/([0-9a-f]{40})")


class HubName(msgspec.Struct, frozen=True):
    """A repository of the Hub. ``revision``: a branch, a tag or a full commit; empty: the main branch."""

    repository: str
    revision: str = ""
    dataset: bool = False

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    @property
    def kind(self) -> str:
        """``model`` or ``dataset``, as huggingface_hub calls it."""
        return "dataset" if self.dataset else "model"

    @property
    def command(self) -> str:
        """The command line that fills the cache."""
        options = f"{' --repo-type dataset' * self.dataset}{f' --revision {self.revision}' if self.revision else ''}"
        return f"`hf download {self.repository}{options}`"


def is_bare_name(text: str) -> bool:
    """Return whether ``text`` is ``owner/name`` or ``owner/name@revision``, which may be a path, too."""
    return _BARE.fullmatch(text) is not None


def read_hub_name(text: str, *, dataset: bool = False) -> HubName:
    """The repository that ``text`` names, with ``hf:`` before it or not. Raises ``RecipeError`` where it names none."""
    if found := _MARKED.fullmatch(text.removeprefix(HUB)):
        return HubName(found[1], found[2] or "", dataset)
    form = f'"{HUB}owner/name" or "{HUB}owner/name@revision"'
    raise RecipeError(f'"{text}" is no name of the Hub: write {form}, with letters, digits, "-", "_" and "."')


def cached_name(path: str | Path) -> HubName | None:
    """The repository and commit of a folder in the cache of huggingface_hub; None for another path."""
    found = _SNAPSHOT.fullmatch(str(path))
    return HubName(found[2].replace("--", "/"), found[3], found[1] == "dataset") if found else None


def hub_name(path: str) -> str | None:
    """The name on the Hub of what lies in the folder ``path``, where that is one of the Hub's cache."""
    found = cached_name(path)
    return found.repository if found else None

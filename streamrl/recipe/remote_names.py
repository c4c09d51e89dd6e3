"""Names of repositories on the Hugging Face Hub and of folders of its cache, whose paths have name and commit, and
URLs of places in object stores. Commands and ``rules.load_recipe`` parse them here, without a request to a server
(``prepare.hub`` and ``comm.object_store`` make these)."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from streamrl.base.errors import RecipeError

HUB = "hf:"
"""Prefix that marks a name of the Hub, not a path: required for a data set, optional for a model."""
_PART = r"(?![^/@]*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_BARE = re.compile(rf"{_PART}/{_PART}(@\S+)?", re.ASCII)
_MARKED = re.compile(rf"({_PART}(?:/{_PART})?)(?:@(\S+))?", re.ASCII)
_SNAPSHOT = re.compile(r".*/(model|dataset)s--([^/]+)/snapshots/([0-9a-f]{40})")
SCHEMES = {"s3": "bucket", "gs": "bucket", "az": "container", "file": ""}

_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<kind>datasets/|models/)?(?P<name>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/?#]+)/?(?P<file>[^?#]*))?.*"
)
_FILE_SYSTEM = re.compile(r"hf://(?P<kind>datasets/)?(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/?(?P<file>.*)")


class HubName(Struct, frozen=True):
    """A repository of the Hub. ``revision``: branch, tag or full commit (empty: the main branch)."""

    repository: str
    revision: str = ""
    dataset: bool = False

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    @property
    def kind(self) -> str:
        """Type of the repository for huggingface_hub: ``model`` or ``dataset``."""
        return "dataset" if self.dataset else "model"

    @property
    def command(self) -> str:
        """Command line that downloads the repository to the cache."""
        words = ["hf download", self.repository]
        if self.dataset:
            words.append("--repo-type dataset")
        if self.revision:
            words.append(f"--revision {self.revision}")
        return f"`{' '.join(words)}`"


def is_bare_name(text: str) -> bool:
    """Return whether ``text`` has the form ``owner/name`` or ``owner/name@revision``; it may also be a path."""
    return _BARE.fullmatch(text) is not None


def read_hub_name(text: str, *, dataset: bool = False) -> HubName:
    """Return the repository that ``text`` names, with or without ``hf:``. Raises ``RecipeError`` for another text."""
    match = _MARKED.fullmatch(text.removeprefix(HUB))
    if match is not None:
        return HubName(match[1], match[2] or "", dataset)
    form = f'"{HUB}owner/name" or "{HUB}owner/name@revision"'
    raise RecipeError(f'"{text}" is no name of the Hub: write {form}, with letters, digits, "-", "_" and "."')


def name_in_address(text: str) -> str:
    """Return the name for a recipe of the repository in ``text``, the address of a page or file of the Hub as browsers
    and pandas have it; empty for another text."""
    match = _PAGE.fullmatch(text) or _FILE_SYSTEM.fullmatch(text)
    if match is None:
        return ""
    name = f"{HUB}{match['name']}"
    if match["revision"] not in (None, "main"):
        name += f"@{match['revision']}"
    if match["file"] and match["kind"]:
        name += f"?files={match['file']}"
    return name


def cached_name(path: str | Path) -> HubName | None:
    """Return the repository and commit of a folder in the cache of huggingface_hub; None for another path."""
    match = _SNAPSHOT.fullmatch(str(path))
    if match is None:
        return None
    return HubName(match[2].replace("--", "/"), match[3], match[1] == "dataset")


def hub_name(path: str) -> str | None:
    """Return the Hub's name of the repository in the folder ``path`` of the Hub's cache; None for another folder."""
    name = cached_name(path)
    return name.repository if name else None


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL of a store, not a path."""
    return "://" in text


def place_of_run(url: str, run_directory: Path) -> str:
    """Return the URL of a run's objects: ``url`` and the name of the run's directory."""
    return f"{url.rstrip('/')}/{run_directory.resolve().name}"


def url_problem(url: str) -> str:
    """Return the problem with a URL of a place in a store, and the remedy; empty: it is valid."""
    scheme, _, place = url.partition("://")
    name, _, below = place.partition("/")
    if scheme not in SCHEMES:
        schemes = ", ".join(f"{allowed}://" for allowed in SCHEMES)
        return f'"{url}" is no URL of a store: write one of {schemes} before the name'
    if scheme == "file":
        if name or not below:
            return f'"{url}" names no folder: write three slashes, as in file:///mnt/store'
        return ""
    if not 3 <= len(name) <= 63:
        return f'"{url}" names a {SCHEMES[scheme]} of {len(name)} characters, "{name}": one has 3 to 63'
    return ""

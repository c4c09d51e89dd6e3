"""Messages between the command and the process that asks the Hub."""

from __future__ import annotations

import os

import msgspec

from streamrl.recipe.rules.hub_names import HubName


class WantedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a repository for one key of the recipe. Of a data set those of ``config`` and ``split``, or those that
    the patterns ``files`` name, as in an earlier life of the run."""

    key: str
    name: HubName
    config: str = ""
    split: str = ""
    files: str = ""


class Asking(msgspec.Struct, frozen=True, tag=True):
    """The process asks the Hub from now on, or the Hub has ``answered``."""

    answered: bool = False


class DownloadProgress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of the files of ``name`` that are downloaded, and how many of them are there."""

    name: str
    done: int
    total: int


class Resolved(msgspec.Struct, frozen=True, tag=True):
    """``name``: with its commit; ``folder``: where its files are; ``files``: patterns of those of a data set;
    ``missing``: bytes of ``total`` that are not in the cache yet; ``notice``: why the Hub did not say which commit."""

    key: str
    name: HubName
    folder: str
    files: str
    total: int
    missing: int
    notice: str


class Unresolved(msgspec.Struct, frozen=True, tag=True):
    """A problem with its remedy."""

    key: str
    problem: str


HubAnswer = Asking | DownloadProgress | Resolved | Unresolved


def answer_s() -> float:
    """Seconds that the Hub has for an answer: 2, or what HF_HUB_ETAG_TIMEOUT says."""
    given = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(given) if given.isdecimal() else 2.0

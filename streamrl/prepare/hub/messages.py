"""Messages between the process of the command (``resolution``) and the process that asks the Hub (``fetch``)."""

from __future__ import annotations

import os

from msgspec import Struct

from streamrl.recipe.remote_names import HubName


class WantedFiles(Struct, frozen=True, kw_only=True):
    """Request for the files of a repository, for one key of the recipe. Files of a data set are chosen by ``config``
    and ``split``, or by the patterns ``files``, as an earlier start of the run chose them."""

    key: str
    name: HubName
    config: str = ""
    split: str = ""
    files: str = ""


class Asking(Struct, frozen=True, tag=True):
    """The process asks the Hub from now on, or the Hub has ``answered``."""

    answered: bool = False


class DownloadProgress(Struct, frozen=True, tag=True):
    """Bytes of the files of ``name`` that are downloaded so far, and in total."""

    name: str
    downloaded: int
    total: int


class Resolved(Struct, frozen=True, tag=True):
    """Files of one key of the recipe, in the cache.

    ``name``: name with the commit.
    ``folder``: directory of the files.
    ``files``: patterns of the files of a data set; empty for a model.
    ``total``: bytes of all files.
    ``missing``: bytes that are not in the cache yet.
    ``notice``: sentence part for users, such as that the Hub did not say which is the newest commit, or that the files
    are a part of a data set; empty for none."""

    key: str
    name: HubName
    folder: str
    files: str
    total: int
    missing: int
    notice: str


class Unresolved(Struct, frozen=True, tag=True):
    """A problem with its remedy."""

    key: str
    problem: str


HubAnswer = Asking | DownloadProgress | Resolved | Unresolved


def answer_s() -> float:
    """Seconds that the Hub has for an answer: HF_HUB_ETAG_TIMEOUT, or 2."""
    seconds = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(seconds) if seconds.isdecimal() else 2.0

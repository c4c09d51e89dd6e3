"""URLs of places in object stores. Nothing here asks a store (``comm.object_store`` does)."""

from __future__ import annotations

from pathlib import Path

SCHEMES = {"s3": "bucket", "gs": "bucket", "az": "container", "file": ""}


def is_url(text: str) -> bool:
    """Return whether ``text`` is meant for a store and not for a file system."""
    return "://" in text


def place_of_run(url: str, run_directory: Path) -> str:
    """The place of a run's objects: below ``url``, by the name of its directory."""
    return f"{url.rstrip('/')}/{run_directory.resolve().name}"


def url_problem(url: str) -> str:
    """Return what is wrong with the URL of a place in a store, and the remedy; empty: nothing is."""
    scheme, _, rest = url.partition("://")
    name, _, below = rest.partition("/")
    if scheme not in SCHEMES:
        return f'"{url}" is no URL of a store: write one of {", ".join(f"{one}://" for one in SCHEMES)} before the name'
    if scheme == "file":
        return "" if not name and below else f'"{url}" names no folder: write three slashes, as in file:///mnt/store'
    if not 3 <= len(name) <= 63:
        return f'"{url}" names a {SCHEMES[scheme]} of {len(name)} characters, "{name}": one has 3 to 63'
    return ""

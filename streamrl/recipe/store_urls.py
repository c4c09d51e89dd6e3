"""URLs of places in object stores, checked without a request to the store (``comm.object_store`` makes these)."""

from __future__ import annotations

from pathlib import Path

SCHEMES = {"s3": "bucket", "gs": "bucket", "az": "container", "file": ""}


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

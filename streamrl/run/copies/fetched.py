"""A checkpoint from its copy in an object store: fetched whole, and verified, before anything is started on it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from msgspec import structs

from streamrl.base.atomic_files import make_directory
from streamrl.base.errors import RecipeError, StoreError, StreamRLError
from streamrl.comm.object_store import ObjectStore
from streamrl.learning.state import durable_files
from streamrl.recipe.sections import Recipe
from streamrl.recipe.store_urls import is_url, url_problem
from streamrl.run.copies.checkpoint_copies import LATEST

FOLDER = ".fetched"
"""Folder beside the runs, which all hosts of a run see."""
_NAME = re.compile(r"step-\d+\.[0-9a-f]+")


def with_fetched_checkpoint(recipe: Recipe) -> Recipe:
    """``recipe`` with a directory in place of the copy that it starts from. Blocking. Raises ``RecipeError``."""
    url = recipe.checkpoint.resume_from
    if not is_url(url):
        return recipe
    try:
        directory = fetch_checkpoint(url, Path(recipe.run.directory).absolute() / FOLDER)
    except (StreamRLError, OSError) as error:
        raise RecipeError(f"checkpoint.resume_from: {error}") from error
    return structs.replace(recipe, checkpoint=structs.replace(recipe.checkpoint, resume_from=str(directory)))


def whole_copy(url: str, **limits: float) -> tuple[ObjectStore, str, bytes]:
    """The store of a copy, its name in it, and its list of digests. ``url``: of the copy, or ends in ``latest``. Raises
    ``StoreError`` where there is none, or it is not whole."""
    if problem := url_problem(url):
        raise StoreError(problem)
    root, _, name = url.rstrip("/").rpartition("/")
    store = ObjectStore(root, **limits)
    if name == LATEST:
        epochs = store.list_keys(LATEST)
        name = (store.get(epochs[-1]) or b"").decode(errors="replace") if epochs else ""
    listed = store.get(f"{name}/{durable_files.DIGESTS}") if _NAME.fullmatch(name) else None
    if listed is None:
        keys = store.list_keys()
        whole = sorted({key.partition("/")[0] for key in keys if key.endswith(f"/{durable_files.DIGESTS}")})
        found = f"whole there are {', '.join(whole[-5:])}" if whole else "there is none"
        raise StoreError(f"{url} is no whole copy of a checkpoint ({found}): name PREFIX/RUN/checkpoints/{LATEST}")
    return store, name, listed


def fetch_checkpoint(url: str, parent: Path) -> Path:
    """Fetch the copy at ``url`` into a directory of ``parent``, unless it is there already. Durable when it returns.
    Raises ``StreamRLError``: there is none, or what came is not what was written."""
    store, name, listed = whole_copy(url)
    directory = parent / name
    if directory.is_dir():
        durable_files.verify(directory)
        return directory
    make_directory(parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    try:
        (partial / durable_files.DIGESTS).write_bytes(listed)
        digests = durable_files.read_digests(partial)
        for file in digests:
            path = partial / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as content:
                for part in store.parts(f"{name}/{file}"):
                    content.write(part)
        came = durable_files.flush_and_digest(partial, digests)
        durable_files.refuse_faults(Path(url), [f"{file} differs" for file in digests if came[file] != digests[file]])
        durable_files.write_digests(partial, [digests])
        os.chmod(partial, 0o755)
        durable_files.move_into_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory

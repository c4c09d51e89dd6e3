"""Fetching of a checkpoint from its copy in an object store.

The process of a command fetches and verifies the complete copy that a recipe starts from, before it starts a run; the
checks before a run look for the copy without fetching it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from msgspec.structs import replace

from streamrl.base.atomic_files import make_directory
from streamrl.base.errors import RecipeError, StoreError, StreamRLError
from streamrl.comm.object_store import ObjectStore
from streamrl.learning.state import durable_files
from streamrl.recipe.remote_names import is_url, url_problem
from streamrl.recipe.sections import Recipe
from streamrl.run.copies.checkpoint_copies import LATEST

FOLDER = ".fetched"
"""Folder beside the runs for fetched checkpoints. All hosts of a run see it."""
_NAME = re.compile(r"step-\d+\.[0-9a-f]+")


def with_fetched_checkpoint(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with a fetched directory in place of the URL that it starts from. Blocking. Raises
    ``RecipeError``."""
    url = recipe.checkpoint.resume_from
    if not is_url(url):
        return recipe
    try:
        directory = fetch_checkpoint(url, Path(recipe.run.directory).absolute() / FOLDER)
    except (StreamRLError, OSError) as error:
        raise RecipeError(f"checkpoint.resume_from: {error}") from error
    return replace(recipe, checkpoint=replace(recipe.checkpoint, resume_from=str(directory)))


def whole_copy(url: str, **limits: float) -> tuple[ObjectStore, str, bytes]:
    """Return the store of a copy, its name in the store, and its list of digests. ``url``: address of the copy, or of
    ``latest``; ``limits``: options of ``ObjectStore``. Raises ``StoreError`` where there is no copy, or it is not
    complete."""
    if problem := url_problem(url):
        raise StoreError(problem)
    root, _, name = url.rstrip("/").rpartition("/")
    store = ObjectStore(root, **limits)
    if name == LATEST:
        name = _name_of_latest(store)
    digest_file = store.get(f"{name}/{durable_files.DIGESTS}") if _NAME.fullmatch(name) else None
    if digest_file is None:
        keys = store.list_keys()
        names = sorted({key.partition("/")[0] for key in keys if key.endswith(f"/{durable_files.DIGESTS}")})
        content = f"whole there are {', '.join(names[-5:])}" if names else "there is none"
        raise StoreError(f"{url} is no whole copy of a checkpoint ({content}): name PREFIX/RUN/checkpoints/{LATEST}")
    return store, name, digest_file


def _name_of_latest(store: ObjectStore) -> str:
    """Return the name of the copy to which the newest epoch's ``latest`` points; empty where there is none."""
    epochs = store.list_keys(LATEST)
    if not epochs:
        return ""
    content = store.get(epochs[-1]) or b""
    return content.decode(errors="replace")


def fetch_checkpoint(url: str, parent: Path) -> Path:
    """Fetch the copy at ``url`` into a directory of ``parent``, unless the directory exists already. The files are
    durable when the function returns. Raises ``StreamRLError`` where there is no complete copy, or files differ from
    those that were written."""
    store, name, digest_file = whole_copy(url)
    directory = parent / name
    if directory.is_dir():
        durable_files.verify(directory)
        return directory
    make_directory(parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
    try:
        (partial / durable_files.DIGESTS).write_bytes(digest_file)
        digests = durable_files.read_digests(partial)
        for file in digests:
            path = partial / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as content:
                for part in store.parts(f"{name}/{file}"):
                    content.write(part)
        fetched_digests = durable_files.flush_and_digest(partial, digests)
        faults = [f"{file} differs" for file in digests if fetched_digests[file] != digests[file]]
        durable_files.refuse_faults(Path(url), faults)
        durable_files.write_digests(partial, [digests])
        os.chmod(partial, 0o755)
        durable_files.move_into_place(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory

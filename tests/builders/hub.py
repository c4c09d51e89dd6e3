"""A Hub on a loopback port, for tests: Hugging Face repositories with commits, served to huggingface_hub and all that
is built on it, and filled by its uploads. Every request is noted, with the process that made it.

    with LocalHub() as hub:
        commit = hub.commit("org/tiny", folder_or_files)
        subprocess.run(command, env=os.environ | hub.environment(tmp_path / "home", token=TOKEN))

A client reads its variables when huggingface_hub is imported, so it must be a process of its own. Each test wants a
home of its own: what is in the cache is used without a token, also of a gated repository."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

import psutil

TOKEN, USER = "hf_aTokenOfTheTestsThatMayReadAndWrite", "tester"
CONVERTED = "refs/convert/parquet"
"""The revision at which the Hub keeps data sets as parquet files."""
LFS_BYTES = 1 << 14
"""Larger files are uploaded as objects of their own, as large ones are on the Hub."""
_API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+?)(?:/(revision|tree|preupload|commit)/(.+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/(refs/[^/]+/[^/]+|[^/]+)/(.+)")
_KEPT = re.compile(r"bytes=(\d+)-(\d*)")
Files = Mapping[str, bytes]


class Request(NamedTuple):
    """``process``: who asked, among this process and those that it started; 0: another."""

    method: str
    path: str
    process: int
    range: str = ""
    token: str = ""


@dataclass
class Repository:
    """``commits``: the files of each, by its hash; ``refs``: hashes by the name of a branch or a tag."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


class LocalHub:
    """Repositories by name; that of a data set begins with ``datasets/``. ``faults``: by the beginning of a path, a
    status that is answered, ``"hang"``, or ``"cut"``: half of the answer, then the end of the connection. ``busy``: so
    many requests are answered 429 first. ``renamed``: old names to new ones. ``says_sizes``: of files, before they are
    asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.faults: dict[str, int | str] = {}
        self.renamed: dict[str, str] = {}
        self.busy = 0
        self.says_sizes = True
        self._objects: dict[str, bytes] = {}
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True, name="local hub").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path, token: str = "") -> dict[str, str]:
        """Variables of a client with the cache in ``home``. Without Xet: its protocol is another, and not served."""
        places = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        return places | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "HF_TOKEN": token}

    def commit(self, name: str, content: Path | Files, *, ref: str = "main", **kind: bool) -> str:
        """Make ``content`` all there is of ``name`` at ``ref``; earlier commits stay. Returns the commit."""
        if isinstance(content, Path):
            paths = (path for path in sorted(content.rglob("*")) if path.is_file())
            content = {path.relative_to(content).as_posix(): path.read_bytes() for path in paths}
        found = self.repositories.setdefault(name, Repository())
        found.private, found.gated = kind.get("private", found.private), kind.get("gated", found.gated)
        parts = [name, *(f"{path} {_blob(data)}" for path, data in sorted(content.items()))]
        sha = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        found.commits[sha], found.refs[ref] = content, sha
        return sha

    def files(self, name: str, ref: str = "main") -> Files:
        """What is there, also after an upload."""
        found = self.repositories[name]
        return found.commits[found.refs[ref]]

    # ---- answers -----------------------------------------------------------------------------------

    def answer(self, to: _Handler) -> None:
        url = urlsplit(to.path)
        path, query = unquote(url.path), parse_qs(url.query)
        body = b"".join(to.body())
        token = (to.headers.get("Authorization") or "").removeprefix("Bearer ")
        range_ = to.headers.get("Range") or ""
        if path != "/api/agent-harnesses":  # huggingface_hub asks that once a day, for its own name in statistics
            self.requests.append(Request(to.command, path, _process(to.client_address[1]), range_, token))
        fault = next((what for beginning, what in self.faults.items() if path.startswith(beginning)), None)
        old = next((name for name in self.renamed if f"/{name}/" in f"{path}/"), None)
        if self.busy:
            self.busy -= 1
            to.send(429, b"", {"Retry-After": "0"})
        elif fault == "hang":
            self._closed.wait()
        elif isinstance(fault, int):
            to.send(fault)
        elif old:
            to.send(307, b"", {"Location": to.path.replace(old, self.renamed[old], 1)})
        elif path.startswith("/lfs/"):
            self._objects[path.removeprefix("/lfs/")] = body
            to.send(200)
        elif found := _FILE.fullmatch(path):
            self._resolve(to, (found[1] or "") + found[2], found[3], found[4], token, cut=fault == "cut")
        elif path.startswith("/api/whoami") or to.command == "POST":
            if token == TOKEN:
                self._write(to, path, body)
            else:
                to.refuse(401, "", "Invalid username or password.")
        elif found := _API.fullmatch(path):
            name = ("datasets/" if found[1] == "dataset" else "") + found[2]
            self._tell(to, name, found[3] or "", found[4] or "main", token, query)
        else:
            to.refuse(404, "", "Not found")

    def _lookup(self, to: _Handler, name: str, revision: str, token: str) -> tuple[str, Files] | None:
        """Commit and files; None after a refusal."""
        found = self.repositories.get(name)
        if found is None or (found.private and token != TOKEN):
            # The code is what tells huggingface_hub this from other refusals, on a Hub that is not at https://.
            to.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        sha = found.refs.get(revision, revision)
        if sha not in found.commits:
            to.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return sha, found.commits[sha]

    def _tell(
        self, to: _Handler, name: str, what: str, revision: str, token: str, query: Mapping[str, list[str]]
    ) -> None:
        """What is known of a repository, or the list of its files."""
        if what == "tree" and revision.startswith(CONVERTED):
            revision, below = CONVERTED, revision.removeprefix(CONVERTED).lstrip("/")
        elif what == "tree":
            revision, _, below = revision.partition("/")
        if (found := self._lookup(to, name, revision, token)) is None:
            return
        sha, files = found
        if what == "tree":
            deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            to.send_json(list(_entries(files, f"{below}/" if below else "", deep=deep)))
            return
        repository = self.repositories[name]
        sizes = {path: len(data) if self.says_sizes else None for path, data in files.items()}
        siblings = [{"rfilename": path, "size": size} for path, size in sizes.items()]
        told = {"id": name.removeprefix("datasets/"), "sha": sha, "private": repository.private, "tags": []}
        to.send_json(told | {"gated": "manual" if repository.gated else False, "siblings": siblings})

    def _resolve(self, to: _Handler, name: str, revision: str, path: str, token: str, *, cut: bool) -> None:
        """A file, or a part of it."""
        if (found := self._lookup(to, name, revision, token)) is None:
            return
        sha, files = found
        if self.repositories[name].gated and token != TOKEN:
            to.refuse(403 if token else 401, "GatedRepo", f"Access to {name} is restricted.")
        elif (data := files.get(path)) is None:
            to.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
        else:
            headers = {"X-Repo-Commit": sha, "ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
            status, whole = 200, len(data)
            if part := _KEPT.fullmatch(to.headers.get("Range") or ""):
                first, last = int(part[1]), min(int(part[2] or whole - 1), whole - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{whole}"
                status, data = 206, data[first : last + 1]
            to.send(status, data, headers, cut=cut)

    def _write(self, to: _Handler, path: str, body: bytes) -> None:
        """The steps of an upload: a repository, how each file goes up, where large ones go, the commit."""
        if path.startswith("/api/whoami"):
            to.send_json({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            plain = f"{asked.get('organization') or USER}/{asked['name']}"
            name = f"datasets/{plain}" if asked.get("type") == "dataset" else plain
            there = name in self.repositories
            if not there:
                self.repositories[name] = Repository(private=asked.get("visibility") == "private")
                self.commit(name, {".gitattributes": b""})  # as the Hub does
            to.send_json({"url": f"{self.url}/{name}"}, 409 if there else 200)
        elif path == "/api/validate-yaml":
            to.send_json({"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            places = [{"upload": {"href": f"{self.url}/lfs/{one['oid']}", "header": {}}} for one in objects]
            told = [one | {"actions": actions} for one, actions in zip(objects, places, strict=True)]
            to.send_json({"transfer": "basic", "objects": told})
        elif (found := _API.fullmatch(path)) and found[3] == "preupload":
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if one["size"] > LFS_BYTES else "regular"}
                for one in json.loads(body)["files"]
            ]
            to.send_json({"files": [mode | {"shouldIgnore": False} for mode in modes]})
        elif found and found[3] == "commit":
            name = ("datasets/" if found[1] == "dataset" else "") + found[2]
            sha = self.commit(name, self._committed(name, found[4], body), ref=found[4])
            link = f"{self.url}/{name}/commit/{sha}"
            to.send_json({"success": True, "commitOid": sha, "commitUrl": link, "hookOutput": ""})
        else:
            to.refuse(404, "", "Not found")

    def _committed(self, name: str, ref: str, body: bytes) -> Files:
        repository = self.repositories[name]
        files = dict(repository.commits.get(repository.refs.get(ref, ""), {}))
        for line in body.splitlines():
            step = json.loads(line)
            value = step["value"]
            if step["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif step["key"] == "lfsFile":
                files[value["path"]] = self._objects[value["oid"]]
            elif step["key"] == "deletedFile":
                files.pop(value["path"], None)
        return files


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def handle_any(self) -> None:
        with suppress(ConnectionError):  # a client that was killed
            self.hub.answer(self)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def body(self) -> Iterator[bytes]:
        """All of it; the lines of a commit come in chunks of unknown number."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def send(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = self.close_connection or cut

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        told = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        self.send(status, json.dumps({"error": message}).encode(), told | dict(headers or {}))


def _entries(files: Files, below: str, *, deep: bool) -> Iterator[dict[str, Any]]:
    for path, data in files.items():
        if path.startswith(below) and (deep or "/" not in path.removeprefix(below)):
            large = (
                {"lfs": {"oid": _etag(data), "size": len(data), "pointerSize": 134}} if len(data) > LFS_BYTES else {}
            )
            yield {"type": "file", "oid": _blob(data), "size": len(data), "path": path} | large
    folders = {path.rpartition("/")[0] for path in files if path.startswith(below) and "/" in path}
    yield from ({"type": "directory", "oid": _blob(name.encode()), "size": 0, "path": name} for name in sorted(folders))


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if len(data) > LFS_BYTES else _blob(data)


def _process(port: int) -> int:
    """The process that holds the client's end of a connection."""
    mine = psutil.Process()
    for process in (mine, *mine.children(recursive=True)):
        with suppress(psutil.Error):
            if any(one.laddr.port == port for one in process.net_connections("tcp")):
                return process.pid
    return 0

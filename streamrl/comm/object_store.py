"""Object stores by obstore: S3 and compatible stores, Google Cloud Storage, Azure, or a folder.

The controller copies checkpoints and claims epochs with it, trainer ranks and engines exchange weights through it, and
the preflight checks of a command try it. obstore is imported with the first store. All calls block; a failure that may
pass is tried again for ``give_up_s``. obstore reads credentials from the variables of the process
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...)."""

from __future__ import annotations

import importlib.util
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from streamrl.base.errors import StoreError
from streamrl.recipe.remote_names import SCHEMES, is_url, url_problem

PART_BYTES = 8 << 20
GIVE_UP_S = 120.0
_REQUEST_S = 30.0
_CONNECT_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google", "Account must be specified", "credential")
_REMEDIES = (
    (("No space left", "InsufficientStorage", "StorageFull", "QuotaExceeded", " 507 "), "make room there"),
    (_NO_CREDENTIALS, "set the store's credentials in the environment, such as AWS_ACCESS_KEY_ID"),
    (("NoSuchBucket", "ContainerNotFound", "404 Not Found"), "make the bucket, or correct its name"),
    (("SignatureDoesNotMatch", "InvalidAccessKeyId", "lacked the necessary privileges"), "correct the credentials"),
    (("InvalidPath",), "correct the name"),
    (("error sending request", "timed out"), "is its address right (AWS_ENDPOINT_URL), and reachable from here?"),
)

_Result = TypeVar("_Result")


def access_problem(url: str) -> str:
    """Return why a run could not write below ``url``; empty where it could. Writes an object and removes it again.
    Takes 5 s at most where the store does not answer."""
    problem = url_problem(url)
    if problem:
        return problem
    key = f".streamrl-{secrets.token_hex(8)}"
    try:
        store = ObjectStore(url, give_up_s=0, request_s=_CONNECT_S)
        try:
            overwrites = store.create(key, b"a") and store.create(key, b"b")
        finally:
            with suppress(StoreError):
                store.remove([key])
    except StoreError as error:
        return str(error)
    if overwrites:
        return f"{url} overwrites an object that was to be created once: take a store with conditional writes"
    return ""


def in_store(text: str) -> bool:
    """Return whether ``text`` is the URL of an object store, rather than the endpoint of a socket."""
    return is_url(text) and text.partition("://")[0] in SCHEMES


class ObjectStore:
    """The objects below ``url``, by key. Safe for several threads.

    Methods raise ``StoreError``, which names the object and a remedy, when the store refuses a request for good, or
    when all attempts within ``give_up_s`` failed (0: one attempt). ``sent_bytes``: bytes of files sent so far, repeated
    attempts included."""

    def __init__(self, url: str, *, give_up_s: float = GIVE_UP_S, request_s: float = _REQUEST_S) -> None:
        self.url = url.rstrip("/")
        self.sent_bytes = 0
        self._give_up_s = give_up_s
        problem = url_problem(url)
        if problem:
            raise StoreError(problem)
        if importlib.util.find_spec("obstore") is None:
            raise StoreError(f"{self.url} needs obstore: run `pip install 'streamrl[object-store]'` on every host")
        import obstore
        from obstore import exceptions
        from obstore.store import from_url

        self._client = obstore
        self._errors = exceptions
        remote: dict[str, Any] = {
            "client_options": {
                "timeout": timedelta(seconds=request_s),
                "connect_timeout": timedelta(seconds=min(request_s, _CONNECT_S)),
                "allow_http": True,  # for an endpoint with http://; clouds have https
            },
            "retry_config": {"max_retries": 0},  # the retry of a conditional write would find the object of the first
        }
        options = {"mkdir": True, "automatic_cleanup": True} if url.startswith("file://") else remote
        self._store = self._retried("", lambda: from_url(self.url, **options))

    def create(self, key: str, content: bytes | memoryview) -> bool:
        """Write an object unless there is one with this key already. Returns whether ``content`` is stored now."""
        try:
            self._retried(key, lambda: self._put(key, content, "create"))
        except self._errors.AlreadyExistsError:
            return self.get(key) == bytes(content)  # equal: an attempt succeeded and its answer was lost
        return True

    def put(self, key: str, content: bytes | memoryview) -> None:
        """Write an object; replace one with this key."""
        self._retried(key, lambda: self._put(key, content, "overwrite"))

    def put_file(self, key: str, path: Path) -> str:
        """Write the content of a file of any size. Returns the sha256 of the bytes sent. Raises ``OSError`` or
        ``StoreError`` at once where the file cannot be read: only what the store refuses is tried again."""

        def read_part() -> bytes:
            try:
                return file.read(PART_BYTES)
            except OSError as error:
                raise StoreError(
                    f"{path} cannot be read ({error.strerror}): it was not copied to {self.url}"
                ) from error

        def send() -> str:
            digest = sha256()
            file.seek(0)

            def parts() -> Iterator[bytes]:
                while part := read_part():
                    digest.update(part)
                    self.sent_bytes += len(part)
                    yield part

            self._client.put(self._store, key, parts(), chunk_size=PART_BYTES)
            return digest.hexdigest()

        with path.open("rb") as file:
            return self._retried(key, send)

    def get(self, key: str) -> bytes | None:
        """The content of an object; None where there is no object."""
        try:
            return self._retried(key, lambda: bytes(self._client.get(self._store, key).bytes()), absent=True)
        except FileNotFoundError:
            return None

    def parts(self, key: str) -> Iterator[bytes]:
        """The content of an object of any size, in parts of ``PART_BYTES``."""
        try:
            size = self._retried(key, lambda: self._client.head(self._store, key)["size"], absent=True)
        except FileNotFoundError:
            raise StoreError(f"{self.url}/{key} is not there: a copy of it was removed, or never finished") from None
        for start in range(0, size, PART_BYTES):
            part = partial(self._client.get_range, self._store, key, start=start, length=min(PART_BYTES, size - start))
            yield bytes(self._retried(key, part))

    def list_keys(self, below: str = "") -> list[str]:
        """Keys of all objects in the folder ``below`` and its subfolders, sorted."""

        def listed() -> list[str]:
            return sorted(entry["path"] for page in self._client.list(self._store, below or None) for entry in page)

        return self._retried(below, listed)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects in this order. Keys without an object are ignored."""
        for key in keys:
            with suppress(FileNotFoundError):
                self._retried(key, partial(self._client.delete, self._store, key), absent=True)

    def _put(self, key: str, content: bytes | memoryview, mode: str) -> None:
        self._client.put(self._store, key, content, mode=mode, use_multipart=False)

    def _retried(self, key: str, call: Callable[[], _Result], *, absent: bool = False) -> _Result:
        """Return the result of ``call``, tried again until it succeeds or ``give_up_s`` are over. Raises
        ``StoreError``, ``AlreadyExistsError``, and with ``absent`` (the object may be missing)
        ``FileNotFoundError``."""
        deadline = monotonic() + self._give_up_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                if absent and "NoSuchBucket" not in str(error):
                    raise
                raise self._failure(key, error, lasting=True) from error
            except self._errors.AlreadyExistsError:
                raise
            except (self._errors.BaseError, NotImplementedError, OSError) as error:
                lasting = isinstance(error, self._lasting) or any(sign in str(error) for sign in _NO_CREDENTIALS)
                if lasting or monotonic() + pause_s > deadline:
                    raise self._failure(key, error, lasting) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    def _lasting(self) -> tuple[type[Exception], ...]:
        """Errors that no further attempt can mend."""
        errors = self._errors
        refusals = (errors.PermissionDeniedError, errors.UnauthenticatedError, errors.InvalidPathError)
        return (*refusals, errors.UnknownConfigurationKeyError, NotImplementedError)

    def _failure(self, key: str, error: Exception, lasting: bool) -> StoreError:
        message = str(error)
        first_part = message.partition("\n\nDebug source")[0].partition("<?xml")[0]
        text = " ".join(first_part.split())[:300]
        remedies = (remedy for signs, remedy in _REMEDIES if any(sign in message for sign in signs))
        remedy = next(remedies, "look at the store")
        duration = ""
        if self._give_up_s and not lasting:
            duration = f" for {self._give_up_s:g} s"
        place = f"{self.url}/{key}".rstrip("/")
        return StoreError(f"{place} cannot be reached or used{duration} ({text}): {remedy}")

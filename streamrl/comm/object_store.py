"""Object stores: S3 and what speaks as it does, those of Google and Azure, and a folder, by obstore, which is loaded
with the first of them. All of it blocks; what may pass is tried again until ``give_up_s`` are over.

Credentials come from the environment, as obstore reads it (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...)."""

from __future__ import annotations

import hashlib
import importlib.util
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from streamrl.base.errors import StoreError
from streamrl.recipe.store_urls import SCHEMES, is_url, url_problem

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
    """Return why a run could not write below ``url``, after it was tried with an object that is removed again; empty:
    it could. Takes 5 s at most where nobody answers."""
    if problem := url_problem(url):
        return problem
    key = f".streamrl-{secrets.token_hex(8)}"
    try:
        store = ObjectStore(url, give_up_s=0, request_s=_CONNECT_S)
        try:
            twice = store.create(key, b"a") and store.create(key, b"b")
        finally:
            with suppress(StoreError):
                store.remove([key])
    except StoreError as error:
        return str(error)
    return f"{url} overwrites an object that was to be created once: take a store with conditional writes" * twice


def in_store(text: str) -> bool:
    """Return whether ``text`` names a place in a store, and is no endpoint of a socket, say."""
    return is_url(text) and text.partition("://")[0] in SCHEMES


class ObjectStore:
    """The objects below ``url``, by key. Methods raise ``StoreError``, which names the object and a remedy, when
    something was refused for good, or nothing has worked for ``give_up_s`` (0: one attempt). For several threads.
    ``sent``: bytes of files, also of those that are sent again."""

    def __init__(self, url: str, *, give_up_s: float = GIVE_UP_S, request_s: float = _REQUEST_S) -> None:
        self.url = url.rstrip("/")
        self.sent = 0
        self._give_up_s = give_up_s
        if problem := url_problem(url):
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
                "allow_http": True,  # where the endpoint is one; that of a cloud is not
            },
            "retry_config": {"max_retries": 0},  # a retried conditional write would seem to be another's
        }
        options = {"mkdir": True, "automatic_cleanup": True} if url.startswith("file://") else remote
        self._store = self._retried("", lambda: from_url(self.url, **options))

    def create(self, key: str, content: bytes | memoryview) -> bool:
        """Write an object that is not there yet; False, and nothing was written: it is."""
        try:
            self._retried(key, lambda: self._put(key, content, "create"))
        except self._errors.AlreadyExistsError:
            return self.get(key) == bytes(content)  # by an attempt of which the answer was lost
        return True

    def put(self, key: str, content: bytes | memoryview) -> None:
        """Write an object, or another one in its place."""
        self._retried(key, lambda: self._put(key, content, "overwrite"))

    def put_file(self, key: str, path: Path) -> str:
        """Write the content of a file of any size. Returns the sha256 of what was written. Raises ``OSError`` for the
        file."""

        def send() -> str:
            seen = hashlib.sha256()
            file.seek(0)

            def parts() -> Iterator[bytes]:
                while part := file.read(PART_BYTES):
                    seen.update(part)
                    self.sent += len(part)
                    yield part

            self._client.put(self._store, key, parts(), chunk_size=PART_BYTES)
            return seen.hexdigest()

        with path.open("rb") as file:
            return self._retried(key, send)

    def get(self, key: str) -> bytes | None:
        """The content of an object; None: there is none."""
        try:
            return self._retried(key, lambda: bytes(self._client.get(self._store, key).bytes()), absent=True)
        except FileNotFoundError:
            return None

    def parts(self, key: str) -> Iterator[bytes]:
        """The content of an object of any size, in pieces."""
        try:
            size = self._retried(key, lambda: self._client.head(self._store, key)["size"], absent=True)
        except FileNotFoundError:
            raise StoreError(f"{self.url}/{key} is not there: a copy of it was removed, or never finished") from None
        for start in range(0, size, PART_BYTES):
            part = partial(self._client.get_range, self._store, key, start=start, length=min(PART_BYTES, size - start))
            yield bytes(self._retried(key, part))

    def list_keys(self, below: str = "") -> list[str]:
        """Keys of the objects in a folder, and in those in it, sorted."""

        def listed() -> list[str]:
            return sorted(one["path"] for page in self._client.list(self._store, below or None) for one in page)

        return self._retried(below, listed)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects in this order, also those that are not there."""
        for key in keys:
            with suppress(FileNotFoundError):
                self._retried(key, partial(self._client.delete, self._store, key), absent=True)

    def _put(self, key: str, content: bytes | memoryview, mode: str) -> None:
        self._client.put(self._store, key, content, mode=mode, use_multipart=False)

    def _retried(self, key: str, call: Callable[[], _Result], *, absent: bool = False) -> _Result:
        """Raises ``StoreError``, ``AlreadyExistsError``, and where it may be ``absent`` ``FileNotFoundError``."""
        deadline = time.monotonic() + self._give_up_s
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
                if lasting or time.monotonic() + pause_s > deadline:
                    raise self._failure(key, error, lasting) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    def _lasting(self) -> tuple[type[Exception], ...]:
        known = self._errors
        refused = (known.PermissionDeniedError, known.UnauthenticatedError, known.InvalidPathError)
        return (*refused, known.UnknownConfigurationKeyError, NotImplementedError)

    def _failure(self, key: str, error: Exception, lasting: bool) -> StoreError:
        text = " ".join(str(error).partition("\n\nDebug source")[0].partition("<?xml")[0].split())[:300]
        remedy = next((remedy for signs, remedy in _REMEDIES if any(sign in str(error) for sign in signs)), "")
        for_s = f" for {self._give_up_s:g} s" * bool(self._give_up_s and not lasting)
        where = f"{self.url}/{key}".rstrip("/")
        return StoreError(f"{where} cannot be reached or used{for_s} ({text}): {remedy or 'look at the store'}")

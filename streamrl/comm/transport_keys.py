"""CURVE keys of runs: a pair for each role, in a directory that only its owner may enter.

::

    controller.secret  controller.public     binds the streams to engines and ranks, and the metrics socket
    engine.secret      engine.public         connects to its streams and pulls weights
    trainer.secret     trainer.public        connects to its streams and serves weights
    observer.secret    observer.public       reads metrics

A process needs the secret key of its own role and the public keys of all roles. A ``.public`` file has one key a line.
A bound socket admits every key of the role that connects to it; a connecting socket expects the first key of the role
that is bound. So a host may have a pair of its own, and a key is replaced by adding the new line, giving out the new
secret, and removing the old line; the file is read at each connection.

A process that starts in a run (``processes.run_role``) sets variables with the directory and its role, which vLLM's
worker processes inherit; keys themselves are never in variables. ``streamrl keys`` and, on a cluster, ``open_launcher``
in the supervisor make the pairs, ``guarded_sockets`` reads them in each process that opens a socket."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import zmq
from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import InputError, StreamRLError
from streamrl.recipe.sections import Recipe, TransportSecurity
from streamrl.recipe.topology import Role

KEYS_DIRECTORY = "STREAMRL_KEYS"
KEY_ROLE = "STREAMRL_KEY_ROLE"
OPEN_TO_ALL = "STREAMRL_TRANSPORT_SECURITY"
"""``none`` lets sockets listen on other than loopback addresses without keys."""

CLUSTER_KEYS = "keys"
"""Folder of a run directory with the keys that a run on a cluster has made for itself."""

KEY_LENGTH = 40
"""Characters of a key of 32 bytes in Z85."""


class KeyRole(StrEnum):
    """Owner of a key. Workers of user code and judges have no key, since their streams stay on one host; the control
    socket has no CURVE key, but a secret of its own (``launch.control_socket``)."""

    CONTROLLER = "controller"
    ENGINE = "engine"
    TRAINER = "trainer"
    OBSERVER = "observer"


class RoleKeys(Struct, frozen=True):
    """The key pair of this process, and the directory with the public keys of all roles."""

    role: KeyRole
    directory: Path
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"RoleKeys({self.role.value} in {self.directory})"


def make_keys(directory: Path) -> tuple[Path, ...]:
    """Make a pair for each role in ``directory``. Returns the files. Raises ``StreamRLError`` where one exists
    already."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_others(directory)
        files = []
        for role in KeyRole:
            public, secret = zmq.curve_keypair()
            for kind, key in (("secret", secret), ("public", public)):
                files.append(directory / f"{role.value}.{kind}")
                _write_new(files[-1], key)
    except FileExistsError as error:
        raise InputError(
            f"{error.filename} is there already: give a new directory, or remove the old keys first"
        ) from None
    except OSError as error:
        raise StreamRLError(f"keys cannot be made in {directory}: {error.strerror}") from error
    return tuple(files)


def read_role_keys(directory: Path, role: KeyRole) -> RoleKeys:
    """The pair of ``role``. Raises ``StreamRLError`` where a file is missing, wrong, or open to other users."""
    secret_file = directory / f"{role.value}.secret"
    _refuse_others(directory)
    _refuse_others(secret_file)
    secrets = _keys_in(secret_file)
    if len(secrets) != 1:
        raise StreamRLError(f"{secret_file} holds {len(secrets)} keys: one is expected, {KEY_LENGTH} characters long")
    try:
        public = zmq.curve_public(secrets[0])
    except (zmq.ZMQError, ValueError) as error:
        raise StreamRLError(f"{secret_file} holds no CURVE key; make one with `streamrl keys DIRECTORY`") from error
    if public not in public_keys(directory, role):
        raise StreamRLError(f"{directory / role.value}.public does not name the public half of {secret_file}: add it")
    return RoleKeys(role, directory, public, secrets[0])


def public_keys(directory: Path, role: KeyRole) -> tuple[bytes, ...]:
    """Public keys of ``role``, the key of the process that serves first. Raises ``StreamRLError`` where there is no
    key."""
    file = directory / f"{role.value}.public"
    keys = _keys_in(file)
    if not keys:
        raise StreamRLError(f"{file} holds no key: nobody could be let in")
    return keys


def process_keys(variables: Mapping[str, str] = os.environ) -> RoleKeys | None:
    """Keys that the ``variables`` of this process name; None where they name none. Raises ``StreamRLError`` where the
    keys cannot be used."""
    directory = variables.get(KEYS_DIRECTORY, "")
    role = variables.get(KEY_ROLE, "")
    if not directory:
        return None
    if role not in list(KeyRole):
        names = ", ".join(key_role.value for key_role in KeyRole)
        raise StreamRLError(f"{KEYS_DIRECTORY} is set and {KEY_ROLE} is {role!r}: it must be one of {names}")
    return read_role_keys(Path(directory), KeyRole(role))


def transport_variables(recipe: Recipe, role: Role) -> dict[str, str]:
    """Variables about keys for a process of ``role``. An empty value keeps the process from inheriting another. Raises
    ``StreamRLError`` where the keys that the recipe names cannot be used."""
    no_keys = dict.fromkeys((KEYS_DIRECTORY, KEY_ROLE, OPEN_TO_ALL), "")
    if role.value not in list(KeyRole):
        return no_keys
    if recipe.transport.security is TransportSecurity.NONE:
        return no_keys | {OPEN_TO_ALL: TransportSecurity.NONE.value}
    if not recipe.transport.keys:
        return no_keys
    keys = read_role_keys(Path(recipe.transport.keys), KeyRole(role.value))
    return no_keys | {KEYS_DIRECTORY: str(keys.directory), KEY_ROLE: keys.role.value}


def with_cluster_keys(recipe: Recipe, run_directory: Path) -> Recipe:
    """Return ``recipe``; on a cluster, where it names no keys, with those that the run makes in its directory."""
    transport = recipe.transport
    if recipe.on_one_host or transport.keys or transport.security is TransportSecurity.NONE:
        return recipe
    keys = replace(transport, keys=str(run_directory / CLUSTER_KEYS))
    return replace(recipe, transport=keys)


def _write_new(file: Path, key: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(file, flags, 0o600), "wb") as stream:
        stream.write(key + b"\n")


def _keys_in(file: Path) -> tuple[bytes, ...]:
    try:
        lines = file.read_bytes()[: 1 << 20].split()
    except OSError as error:
        raise StreamRLError(
            f"{file} cannot be read ({error.strerror}): set transport.keys to a directory made by "
            "`streamrl keys DIRECTORY`, with the secret of this process's role and all public keys"
        ) from error
    for line in lines:
        if len(line) != KEY_LENGTH:
            raise StreamRLError(f"{file} has a line of {len(line)} characters: a key has {KEY_LENGTH}")
    return tuple(lines)


def _refuse_others(path: Path) -> None:
    """Raise ``StreamRLError`` where other users own or may read ``path``."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return  # the next reader reports the missing file
    if status.st_uid not in (os.getuid(), 0):
        raise InputError(f"{path} belongs to another user: make keys of your own with `streamrl keys DIRECTORY`")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):o}): chmod go= {path}")

"""One replica of the checkpoint bits for all engine workers of a machine, and one fetch of each version.

The first worker to stage an announced version fetches it for all; the others find it decoded in shared memory
(``shared_versions``). Nothing is fetched, written or looked up without the lock.

The shared bits advance to a version when the next one is staged, whose base it is. A worker that is not at their
version (it was late, or restarted) takes all bits of the staged one, copied from memory: none of that comes from the
trainer."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.manifest import CHECKPOINT_VERSION
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, StagedPatch, StagedVersion
from streamrl.weights.pull.shared_versions import SharedState, SharedVersion, SharedVersions

_LONGEST_WAIT_S = 60.0  # for a lock that is taken outside of staging: the engine is paused


class SharedReplica(CheckpointReplica):
    """Replica of one worker whose bits are shared with the workers that use the same ``directory``. ``policy_version``
    and ``state_hash`` are the worker's own. Raises ``OSError`` where memory cannot be shared."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._shared = CheckpointReplica()
        self._versions = SharedVersions(directory, self._show)

    # ---- as the replica of one worker ---------------------------------------------------------------

    @property
    def at_hand(self) -> bool:
        """Return whether the shared bits are those of this worker's version."""
        return self._own == (self._shared.policy_version, self._shared.state_hash)

    def bits(self, name: str) -> BitArray:
        """All elements of a tensor at this worker's version: shared while it stages, else a copy."""
        if self._versions.locked_here:
            return self._own_bits(name)
        with self._versions.locked(threading.Event(), _LONGEST_WAIT_S):
            return self._own_bits(name).copy()

    def catch_up(self) -> None:
        """Done by ``staging``."""

    def advance(self, staged: StagedVersion) -> None:
        """Take over a committed version. Its bits follow when the next one is staged. Idempotent."""
        self.tensors = dict(staged.tensors)
        self.policy_version = staged.policy_version
        self.state_hash = staged.state_hash
        self.run_id = staged.run_id

    def clear(self) -> None:
        """Forget the version that this worker holds; what is shared stays."""
        self.policy_version = None
        self.state_hash = 0
        self.run_id = ""

    @contextmanager
    def staging(self, announced: WeightAnnouncement, stop: threading.Event) -> Iterator[None]:
        """Hold the lock while ``announced`` is fetched, or found: one worker of the machine at a time. Waits for
        the lock until ``stop`` is set."""
        with self._versions.locked(stop, None):
            self._advance_shared(announced)
            yield

    def stage_announced(
        self,
        announced: WeightAnnouncement,
        fetch: Callable[[CheckpointReplica], FetchedVersion],
        *,
        on_checkpoint: bool,
    ) -> StagedVersion:
        """Implements ``CheckpointReplica.stage_announced``. Fetches only what no worker here has."""
        wanted = (announced.policy_version, announced.state_hash)
        bits = self._versions.state.bits
        staged = self._versions.state.staged
        if (staged is None or staged.identity != wanted) and (bits is None or bits.identity != wanted):
            fetched = fetch(self._shared)
            if fetched.checkpoint is not None:
                self._versions.keep(SharedState(self._versions.share(fetched.checkpoint, 0)))
            staged = self._versions.share(self._shared.stage(fetched), self._shared.state_hash)
            self._versions.keep(SharedState(self._versions.state.bits, staged))
        elif staged is not None and staged.identity != wanted:
            staged = None
        if staged is not None and staged.base_version is None:
            return self._versions.view(staged)
        if staged is not None and on_checkpoint and staged.base_version == CHECKPOINT_VERSION:
            self.policy_version = staged.base_version
            self.state_hash = staged.base_hash
            self.tensors = {spec.name: spec for spec in staged.tensors}
            return self._versions.view(staged)
        on_own = staged is not None and self._own == (staged.base_version, staged.base_hash)
        if staged is not None and on_own and announced.base_version is not None:
            return self._versions.view(staged)
        return self._complete(wanted, staged)

    def close(self) -> None:
        """Give back what is shared; the last one removes the directory. Idempotent."""
        self._versions.close()

    # ---- what is shared ----------------------------------------------------------------------------

    @property
    def _own(self) -> tuple[int | None, int]:
        return self.policy_version, self.state_hash

    def _own_bits(self, name: str) -> BitArray:
        if not self.at_hand:
            raise WeightError(
                f"the replica of this machine holds version {self._shared.policy_version}, this engine "
                f"{self.policy_version}: publish an anchor"
            )
        return self._shared.bits(name)

    def _complete(self, wanted: tuple[int, int], staged: SharedVersion | None) -> StagedVersion:
        """All bits of a version: those that are shared, with ``staged`` on them."""
        patches = {} if staged is None else self._versions.view(staged).patches
        complete = {}
        state_hash = 0
        for name in self._shared.tensors:
            bits = self._shared.bits(name).copy()
            patch = patches.get(name)
            if patch is not None:
                bits[patch.positions] = patch.new_bits
            complete[name] = StagedPatch(None, bits)
            state_hash += hash_range(name, 0, bits)
        if state_hash % HASH_MODULUS != wanted[1]:
            raise WeightError(
                f"version {wanted[0]} would have state hash {state_hash % HASH_MODULUS:#018x} from the replica of this "
                f"machine; announced was {wanted[1]:#018x}"
            )
        run_id = self._shared.run_id if staged is None else staged.run_id
        return StagedVersion(wanted[0], None, wanted[1], self._shared.tensors, complete, 0, run_id)

    def _advance_shared(self, announced: WeightAnnouncement) -> None:
        """Write the staged version into the shared bits once a version is announced on it, or this worker holds it."""
        bits = self._versions.state.bits
        staged = self._versions.state.staged
        if staged is None or not (
            self._versions.state.writing
            or staged.identity == self._own
            or staged.policy_version == announced.base_version
        ):
            return
        if staged.base_version is None:
            self._versions.keep(SharedState(staged))
            return
        if bits is None or (bits.policy_version, bits.state_hash) != (staged.base_version, staged.base_hash):
            return
        self._versions.keep(SharedState(bits, staged, writing=True))
        for name, patch in self._versions.view(staged).patches.items():
            self._shared.bits(name)[patch.positions if patch.positions is not None else slice(None)] = patch.new_bits
        now = msgspec.structs.replace(
            bits, policy_version=staged.policy_version, state_hash=staged.state_hash, run_id=staged.run_id
        )
        self._versions.keep(SharedState(now))

    def _show(self, state: SharedState) -> None:
        if state.bits is None:
            self._shared.clear()
            return
        self._shared.show(self._versions.view(state.bits))


def shared_replica(run: str, model: str, parent: Path) -> CheckpointReplica:
    """The replica that all with the same ``run`` and ``model`` share, whose files are in ``parent``. Where memory
    cannot be shared, one of this process's own."""
    key = hashlib.blake2b(f"{run} {model}".encode(), digest_size=8).hexdigest()
    try:
        return SharedReplica(parent / f"streamrl-replica-{key}")
    except (OSError, AttributeError) as error:  # no memfd here
        _logger.warning("this worker keeps a replica of its own, since memory cannot be shared: %s", error)
        return CheckpointReplica()


_logger = logging.getLogger(__name__)

"""One replica of the checkpoint bits for all vLLM workers of a machine, and one fetch of each version.

``vllm/weight_receiver.py`` makes a ``SharedReplica`` in each vLLM worker's process; ``launch/roles.py`` makes one in
the process of a simulated engine. The first worker that stages an announced version fetches it for all; the others read
the decoded version from shared memory (``shared_versions``). A worker fetches, writes and reads with the lock held.

The shared bits advance to a version when the next version, a delta on it, is staged. A worker with another version than
the shared bits (it was late, or has restarted) takes a copy of all bits of the staged version from shared memory,
without a transfer from the trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from threading import Event

from msgspec.structs import replace

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.manifest import CHECKPOINT_VERSION
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, StagedPatch, StagedVersion
from streamrl.weights.pull.shared_versions import SharedState, SharedVersion, SharedVersions

_LONGEST_WAIT_S = 60.0  # wait for the lock outside of staging, while the engine is paused


class SharedReplica(CheckpointReplica):
    """Replica of one worker whose bits are shared with the workers that use the same ``directory``. ``policy_version``
    and ``state_hash`` are those of the worker. Raises ``OSError`` where memory cannot be shared."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._shared = CheckpointReplica()
        self._versions = SharedVersions(directory, self._show)

    # ---- methods of CheckpointReplica ---------------------------------------------------------------

    @property
    def at_hand(self) -> bool:
        """Return whether the shared bits have this worker's version."""
        return self._identity == (self._shared.policy_version, self._shared.state_hash)

    def bits(self, name: str) -> BitArray:
        """Return all elements of a tensor at this worker's version: the shared array where this thread holds the lock,
        otherwise a copy."""
        if self._versions.locked_here:
            return self._checked_bits(name)
        with self._versions.locked(Event(), _LONGEST_WAIT_S):
            return self._checked_bits(name).copy()

    def catch_up(self) -> None:
        """Do nothing: ``staging`` writes to the shared bits."""

    def advance(self, staged: StagedVersion) -> None:
        """Hold a committed version. The shared bits follow when the next version is staged. Idempotent."""
        super().advance(staged)
        self._behind = {}  # the shared versions hold the patches

    def clear(self) -> None:
        """Forget the version that this worker holds. The shared versions stay."""
        self.policy_version = None
        self.state_hash = 0
        self.run_id = ""

    @contextmanager
    def staging(self, announced: WeightAnnouncement, stop: Event) -> Iterator[None]:
        """Hold the lock while ``announced`` is fetched and staged, or read from shared memory: one worker of the
        machine at a time. Waits for the lock until ``stop`` is set."""
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
        """Stage the announced version, fetched only where no worker of the machine has it; see
        ``CheckpointReplica.stage_announced``. Returns a delta where the worker holds its base, otherwise all bits."""
        identity = (announced.policy_version, announced.state_hash)
        bits = self._versions.state.bits
        staged = self._versions.state.staged
        is_staged = staged is not None and staged.identity == identity
        has_bits = bits is not None and bits.identity == identity
        if not is_staged and not has_bits:
            fetched = fetch(self._shared)
            if fetched.checkpoint is not None:
                self._versions.keep(SharedState(self._versions.share(fetched.checkpoint, 0)))
            staged = self._versions.share(self._shared.stage(fetched), self._shared.state_hash)
            self._versions.keep(SharedState(self._versions.state.bits, staged))
        elif not is_staged:
            staged = None
        if staged is not None and staged.base_version is None:
            return self._versions.view(staged)
        if staged is not None and on_checkpoint and staged.base_version == CHECKPOINT_VERSION:
            self.policy_version = staged.base_version
            self.state_hash = staged.base_hash
            self.tensors = {spec.name: spec for spec in staged.tensors}
            return self._versions.view(staged)
        has_base = staged is not None and self._identity == (staged.base_version, staged.base_hash)
        if staged is not None and has_base and announced.base_version is not None:
            return self._versions.view(staged)
        return self._complete(identity, staged)

    def close(self) -> None:
        """Release the shared memory; the last worker removes the directory. Idempotent."""
        self._versions.close()

    # ---- the shared versions -----------------------------------------------------------------------

    @property
    def _identity(self) -> tuple[int | None, int]:
        """Version and state hash of this worker."""
        return self.policy_version, self.state_hash

    def _checked_bits(self, name: str) -> BitArray:
        """Return the shared bits. Raises ``WeightError`` where they have another version than this worker."""
        if not self.at_hand:
            raise WeightError(
                f"the replica of this machine holds version {self._shared.policy_version}, this engine "
                f"{self.policy_version}: publish an anchor"
            )
        return self._shared.bits(name)

    def _complete(self, identity: tuple[int, int], staged: SharedVersion | None) -> StagedVersion:
        """Return all bits of a version: a copy of the shared bits, with the patches of ``staged``. ``identity``:
        version and state hash. Raises ``WeightError`` where the bits have another state hash."""
        version, expected_hash = identity
        patches: Mapping[str, StagedPatch] = {}
        if staged is not None:
            patches = self._versions.view(staged).patches
        complete = {}
        state_hash = 0
        for name in self._shared.tensors:
            bits = self._shared.bits(name).copy()
            patch = patches.get(name)
            if patch is not None:
                bits[patch.positions] = patch.new_bits
            complete[name] = StagedPatch(None, bits)
            state_hash += hash_range(name, 0, bits)
        if state_hash % HASH_MODULUS != expected_hash:
            raise WeightError(
                f"version {version} would have state hash {state_hash % HASH_MODULUS:#018x} from the replica of this "
                f"machine; announced was {expected_hash:#018x}"
            )
        run_id = self._shared.run_id if staged is None else staged.run_id
        return StagedVersion(version, None, expected_hash, self._shared.tensors, complete, 0, run_id)

    def _advance_shared(self, announced: WeightAnnouncement) -> None:
        """Write the staged version to the shared bits where the announced version is a delta on it, where this worker
        holds it, or where another worker died while it did so."""
        bits = self._versions.state.bits
        staged = self._versions.state.staged
        if staged is None or not (
            self._versions.state.writing
            or staged.identity == self._identity
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
        advanced = replace(
            bits, policy_version=staged.policy_version, state_hash=staged.state_hash, run_id=staged.run_id
        )
        self._versions.keep(SharedState(advanced))

    def _show(self, state: SharedState) -> None:
        """Point the replica of the shared bits to the memory of ``state``."""
        if state.bits is None:
            self._shared.clear()
            return
        self._shared.show(self._versions.view(state.bits))


def shared_replica(run: str, model: str, parent: Path) -> CheckpointReplica:
    """Return the replica that all workers with the same ``run`` and ``model`` share, with its files in ``parent``.
    Where memory cannot be shared, returns a replica for this worker alone."""
    key = hashlib.blake2b(f"{run} {model}".encode(), digest_size=8).hexdigest()
    try:
        return SharedReplica(parent / f"streamrl-replica-{key}")
    except (OSError, AttributeError) as error:  # AttributeError: this system has no memfd
        _logger.warning("this worker keeps a replica of its own, since memory cannot be shared: %s", error)
        return CheckpointReplica()


_logger = getLogger(__name__)

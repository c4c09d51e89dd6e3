"""A receiver in a process of its own, for tests that kill it: ``receiver_process.py POINT ANNOUNCEMENT...``.

Announcements are paths of msgpack files, taken one after another; a delta that is refused is reported. The process
kills itself with SIGKILL at POINT of the last announcement (``never``: not at all). At the end it prints what it holds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.pull import decoding
from streamrl.weights.pull.replica import CheckpointReplica, StagedVersion
from streamrl.weights.vllm.weight_transaction import WeightTransaction

POINTS = ("decoding", "applying", "verifying", "advancing")


class ArrayModel:
    """Live weights that are arrays in checkpoint order: a ``LiveModel`` without torch."""

    def __init__(self, reached: object) -> None:
        self.state_hash = 0
        self.arrays: dict[str, np.ndarray] = {}
        self._reached = reached

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[tuple[str, object]]:
        return list(staged.patches.items())

    def apply(self, writes: Sequence[tuple[str, object]], *, anchor: bool) -> int:
        for name, patch in writes:
            if patch.positions is None:
                self.arrays[name] = patch.new_bits.copy()
            else:
                self.arrays[name][patch.positions] = patch.new_bits
            self._reached("applying")
        self._reached("verifying")
        return self._hash()

    def undo(self, writes: Sequence[tuple[str, object]], replica: CheckpointReplica) -> None:
        for name, _ in writes:
            self.arrays[name] = replica.bits(name).copy()

    def audit(self, replica: CheckpointReplica) -> int:
        return self._hash()

    def _hash(self) -> int:
        return sum(hash_range(name, 0, bits) for name, bits in self.arrays.items()) % HASH_MODULUS


def main(point: str, paths: Sequence[str]) -> None:
    last = [False]

    def reached(now: str) -> None:
        if last[0] and now == point:
            os.kill(os.getpid(), signal.SIGKILL)

    decode, advance = decoding.decode_patch, CheckpointReplica.advance

    def watched_decode(*arguments: object) -> object:
        reached("decoding")
        return decode(*arguments)  # type: ignore[arg-type]

    def watched_advance(replica: CheckpointReplica, staged: StagedVersion) -> None:
        advance(replica, StagedVersion(*(getattr(staged, f) for f in staged.__struct_fields__[:4]), {}, 0))
        reached("advancing")
        advance(replica, staged)

    decoding.decode_patch, CheckpointReplica.advance = watched_decode, watched_advance  # type: ignore[assignment,method-assign]
    model = ArrayModel(reached)
    receiver = WeightTransaction(lambda live, writes: None)
    for number, path in enumerate(paths):
        last[0] = number == len(paths) - 1
        announced = msgspec.msgpack.decode(Path(path).read_bytes(), type=WeightAnnouncement)
        receiver.begin_stage(announced)
        report = receiver.finish_stage(lambda tensors: model)
        if report.error:
            sys.stdout.write(f"refused: {report.error}\n")
            continue
        receiver.apply(announced.policy_version)
        receiver.finish()
    held = receiver.live_report()
    sys.stdout.write(f"holds {held.policy_version} {held.state_hash} {held.error}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

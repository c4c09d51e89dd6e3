"""One trainer rank as a process: ``rank_process.py OPTIONS.json GROUPS STEPS OUT.npz`` trains and saves its masters.

GROUPS: comma-separated indices of the groups that this rank gets in even and odd steps, e.g. ``0,1,2/-`` (``-``: none).
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
from sample_groups import close_of, make_groups

from streamrl.learning.options import TrainerOptions
from streamrl.learning.trainer import TorchTrainer
from streamrl.messages import SaveCheckpoint

SIZES = [4, 3, 1, 5, 2]


def main(options_path: str, mine: str, steps: str, out: str) -> None:
    options = msgspec.json.decode(Path(options_path).read_bytes(), type=TrainerOptions)
    shares = [[] if share == "-" else [int(i) for i in share.split(",")] for share in mine.split("/")]
    trainer = TorchTrainer(options)
    ready = trainer.start()
    arrays: dict[str, np.ndarray] = {}
    for step in range(ready.policy_version, ready.policy_version + int(steps)):
        groups = make_groups(step, SIZES, seed=step, version=step)
        for index in shares[step % len(shares)]:
            trainer.train_group(groups[index])
        report = trainer.close_batch(close_of(groups, step + 1))
        trainer.acknowledge(step + 1)
    metrics = {**report.metrics, "version": report.policy_version, "hash_high": float(report.state_hash >> 32)}
    arrays |= {f"metric/{name}": np.float64(value) for name, value in metrics.items()}
    arrays |= {f"offset/{shard.name}": np.int64(shard.offset) for shard in trainer.shard_specs}
    arrays |= {f"master/{name}": value for name, value in trainer.master_values().items()}
    trainer.save_checkpoint(
        SaveCheckpoint(directory=out.replace(f".{options.rank}.npz", ".ckpt"), policy_version=step + 1)
    )
    trainer.close()
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Does the memory of a run grow? Samples the proportional set size (PSS) of the whole process tree over 200 steps.

    python benchmarks/memory_growth.py --steps 200

Passes when the peak stays within ``--limit-gib`` and the last quarter's median is within ``--growth-mib`` of the
second quarter's (the first one fills caches). The demo recipe's evaluations are part of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from process_tree import sampled_memory
from training_run import DEMO_RECIPE, training_run

GIB, MIB = 2**30, 2**20


def quarter_medians(samples: list[tuple[float, int]]) -> list[float]:
    """Median size of each quarter of ``samples``, in bytes. Needs four samples."""
    size = len(samples) // 4
    return [statistics.median(bytes_ for _, bytes_ in samples[i * size : (i + 1) * size]) for i in range(4)]


def main() -> int:
    """Run, sample, report; exit code 1 when memory grows or is over the limit."""
    arguments = argparse.ArgumentParser(description="Sample the memory of a run's process tree.")
    arguments.add_argument("--recipe", type=Path, default=DEMO_RECIPE)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--limit-gib", type=float, default=4.0)
    arguments.add_argument("--growth-mib", type=float, default=64.0)
    arguments.add_argument("--timeout-s", type=float, default=1800.0)
    arguments.add_argument("--out", type=Path, help="write samples and verdict as JSON")
    options = arguments.parse_args()

    with training_run(options.recipe, {"run.steps": options.steps}) as run:
        run.wait_for_step(1, timeout_s=options.timeout_s)
        with sampled_memory(run.process.pid) as memory:
            run.wait_for_step(options.steps, timeout_s=options.timeout_s)
        steps = len(run.steps())
        run.wait(timeout_s=options.timeout_s)
    quarters = quarter_medians(memory.samples)
    growth = quarters[3] - quarters[1]
    passed = memory.peak_bytes <= options.limit_gib * GIB and growth <= options.growth_mib * MIB
    print(f"{steps} steps, {len(memory.samples)} samples: peak {memory.peak_bytes / GIB:.2f} GiB")
    print("median of each quarter: " + ", ".join(f"{size / GIB:.3f} GiB" for size in quarters))
    print(f"growth from the second to the last quarter: {growth / MIB:+.1f} MiB -> {'passed' if passed else 'FAILED'}")
    if options.out:
        result = {"steps": steps, "peak_bytes": memory.peak_bytes, "quarters": quarters, "samples": memory.samples}
        options.out.write_text(json.dumps({**result, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

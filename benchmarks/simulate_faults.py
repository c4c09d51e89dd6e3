"""Simulated runs with faults, from seeds: the real pipeline on a simulated clock, network, disk and processes.

    python benchmarks/simulate_faults.py run --state runs/faults.json [--hours 2000 --faults 1000000] [--seconds S]
    python benchmarks/simulate_faults.py run --state runs/faults-0.json --part 0/2  # and --part 1/2 beside it
    python benchmarks/simulate_faults.py report runs/faults-0.json runs/faults-1.json
    python benchmarks/simulate_faults.py replay SEED [--state runs/faults.json]
    python benchmarks/simulate_faults.py shrink SEED [--state runs/faults.json]
    python benchmarks/simulate_faults.py planted [NAME ...] [--seeds N]

``run`` goes on where the state file ends and prints seeds that fail, rates, and cells (component x fault x phase) that
have not fired; ``planted`` plants known bugs and prints which seed notices each. The world is in ``tests/simulation``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

WORLD = Path(__file__).resolve().parent.parent / "tests" / "simulation"


def main() -> None:
    """Hand over to the command beside the world."""
    planted = sys.argv[1:2] == ["planted"]
    script = WORLD / ("planted_in_world.py" if planted else "campaign.py")
    sys.argv = [str(script), *sys.argv[2 if planted else 1 :]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()

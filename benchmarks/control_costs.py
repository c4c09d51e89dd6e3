"""What decisions of the pure core cost, in processor time of one core (so that a busy machine matters little).

    python benchmarks/control_costs.py                  # every section
    python benchmarks/control_costs.py --only sizing

``sizing``: one decision of straggler-aware group sizing, with steps of ``--groups`` groups of the largest size. The
issue allows 1 ms for 128 groups of 32.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median, quantiles

from streamrl.config.scheduling import GroupSizing, SizingKind
from streamrl.control.group_sizing import GroupLengths, make_group_sizer

Section = Callable[[argparse.Namespace], list[str]]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What decisions of the pure core cost.")
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 128])
    return parser.parse_args()


def cost_line(name: str, seconds: list[float]) -> str:
    """Median and 99th percentile of the processor seconds, in milliseconds."""
    return f"{name}: median {1e3 * median(seconds):.3f} ms, P99 {1e3 * quantiles(seconds, n=100)[98]:.3f} ms"


def sampled_groups(number: int, size: int, rng: random.Random) -> list[GroupLengths]:
    """Lognormal lengths around 400 tokens, spread 0.5 between prompts and 0.4 inside, cut at 1,600."""
    groups = []
    for _ in range(number):
        middle = rng.lognormvariate(6, 0.5)
        lengths = [max(1, int(middle * rng.lognormvariate(0, 0.4))) for _ in range(size)]
        groups.append(
            GroupLengths(
                lengths=tuple(min(length, 1600) for length in lengths),
                truncated=tuple(length >= 1600 for length in lengths),
            )
        )
    return groups


def sizing_costs(options: argparse.Namespace) -> list[str]:
    """Straggler-aware sizing: all of what a decision does, from lengths to figures."""
    lines = []
    for number in options.groups:
        rng = random.Random(0)
        settings = GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8, 16, 32))
        sizer = make_group_sizer(settings, fixed_size=32, batch_trajectories=number * 32, seed=0)
        seconds = []
        for _ in range(options.repeats):
            groups = sampled_groups(number, 32, rng)
            began = time.process_time_ns()
            sizer.observe(groups)
            seconds.append((time.process_time_ns() - began) / 1e9)
        lines.append(cost_line(f"sizing decision, {number} groups of 32, sizes 4 to 32", seconds))
    return lines


SECTIONS: dict[str, Section] = {"sizing": sizing_costs}


def main() -> None:
    """Print the sections that were asked for."""
    options = parse_arguments()
    for name in options.only:
        print("\n".join(SECTIONS[name](options)))


if __name__ == "__main__":
    main()

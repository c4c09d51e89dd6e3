"""All hostile campaigns one after the other: messages to live sockets, rewards, surroundings.

    python campaigns/hostile/hostile.py                        # all
    python campaigns/hostile/hostile.py rewards surroundings   # some

Each module has ``run(out) -> int``, the number of cases that failed, and can be run alone.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CAMPAIGNS = ("messages", "rewards", "surroundings")


def main() -> None:
    """Run the campaigns named on the command line; exit code 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="*", choices=(*CAMPAIGNS, []), help="which (all)")
    failed = 0
    for name in parser.parse_args().campaigns or CAMPAIGNS:
        began = time.monotonic()
        failures = importlib.import_module(f"campaigns.hostile.hostile_{name}").run(
            lambda line: print(line, flush=True)
        )
        print(f"{name}: {failures} cases failed, {time.monotonic() - began:.0f} s", flush=True)
        failed += failures
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

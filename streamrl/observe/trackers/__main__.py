"""``python -m streamrl.observe.trackers TRACKER DIR``: the process of a follower, which ends when its standard input
ends. The supervisor starts it (``processes/tracker_processes.py``)."""

from __future__ import annotations

import logging
import os
import select
import sys
from pathlib import Path

from streamrl.base.printable import log_to
from streamrl.base.run_process import die_with_parent
from streamrl.observe.trackers.follower import follow_run

NICE = 10


def main() -> None:
    """Follow the run of the supervisor that started this process."""
    die_with_parent()
    os.nice(NICE)
    log_to(sys.stderr, logging.INFO)
    spec, directory = sys.argv[1:]
    count = follow_run(Path(directory), spec, lambda: bool(select.select([sys.stdin], [], [], 0)[0]))
    logging.getLogger(__name__).info("%s: %d lines were sent", spec, count)


if __name__ == "__main__":
    main()

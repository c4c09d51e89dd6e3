"""A process that stands by: it has imported what its role needs, and waits to be told whose place it takes.

Importing is most of a start: 15 of 20 s of an engine's on two cores, 3 of 4 of a trainer rank's, 1 of 2 of a
controller's. It waits as a child of the supervisor like any other, marked and in a session of its own, and ends with
it.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from streamrl.config.topology import ProcessPlan, Role
from streamrl.observe.printable import log_to
from streamrl.processes.exit_reason import log_of

log = logging.getLogger(__name__)


class TakeOver(msgspec.Struct, frozen=True, tag=True):
    """Whose place it takes; ``resumes``: and goes on where that one was."""

    index: int
    resumes: bool


Prepare = Callable[[Role, Path], None]
"""Imports what a role needs. ``Path``: the directory of the run."""


def stand_by(role: Role, run_directory: Path, prepare: Prepare) -> TakeOver:
    """Prepare, wait for one line at stdin, and take over the log of who is replaced. Ends the process when the line
    never comes. Raises what ``prepare`` raises, unless somebody is to be replaced already: it will meet the same error
    where its reason is kept."""
    log_to(sys.stderr, logging.INFO)
    try:
        prepare(role, run_directory)
    except Exception:
        if not select.select([sys.stdin], [], [], 0)[0]:
            raise
        log.exception("what a process of the role %s needs could not be imported", role.value)
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)  # the run is over
    order = msgspec.json.decode(line, type=TakeOver)
    plan = ProcessPlan(role=role, index=order.index)
    sys.stdout.flush()
    sys.stderr.flush()
    with log_of(run_directory, plan.name).open("ab") as output, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    return order


def import_for(role: Role, run_directory: Path) -> None:
    """What takes the time of a start in a process of ``role``. No device is touched, nothing is computed."""
    match role:
        case Role.ENGINE:
            from streamrl.processes.engine_process import import_engine

            import_engine(run_directory)
        case Role.TRAINER:
            from streamrl.processes.trainer_process import import_trainer

            import_trainer(run_directory)
        case Role.CONTROLLER:
            import streamrl.processes.controller_process  # noqa: F401 - for its imports

"""CPU time of a process and of everything that it started, by process, while they run.

    python benchmarks/cpu_time.py [--samples N] COMMAND ...    # wall and CPU time of a command that trains N samples

On a shared machine wall time says as much of its neighbours as of a run; CPU time a trained sample is what the run
costs. ``os.wait4`` and ``RUSAGE_CHILDREN`` have it only when all is over, with start and evaluations, and without what
no parent waited for; a control group needs rights that a container seldom has. So ``/proc`` is read twice a second, and
what a parent's counters know of children that came and went between two looks is added. Other work on the machine makes
CPU time grow, too, by less than wall time."""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

INTERVAL_S = 0.5
TICK = os.sysconf("SC_CLK_TCK")
ROLE = re.compile(r"streamrl\.launch[. ](\w+)")
Key = tuple[int, int]
"""When a process began, in ticks, and its pid: pids are used again."""


class _Used(msgspec.Struct):
    """CPU seconds of a process; ``reaped``: of children that it waited for, of which ``credited`` were seen."""

    parent: Key | None
    name: str
    own: float = 0.0
    reaped: float = 0.0
    credited: float = 0.0
    ended: bool = False


def _processes() -> dict[Key, tuple[int, float, float]]:
    """Pid of the parent, own seconds, and those of children that were waited for."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        user, system, of_children, in_system = (int(ticks) / TICK for ticks in fields[11:15])
        found[int(fields[19]), int(pid)] = int(fields[1]), user + system, of_children + in_system
    return found


def _name(pid: int, before: str, parent: str) -> str:
    """``controller``, ``engine``, ``engine core``; the parent's name for a process of no role of its own, and the one
    ``before`` of a process that ended and was not waited for: it has no command line any more."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return before
    if not command:
        return before
    if "EngineCore" in command:
        return "engine core"
    return role[1] if (role := ROLE.search(command)) else parent


class CpuTree:
    """What the process ``pid``, called ``name``, and all that descends from it used. ``read`` it, or ``start`` reading
    it twice a second and ask for what was used ``between`` two moments. One whose parent died is still known."""

    def __init__(self, pid: int, name: str = "supervisor") -> None:
        self._pid, self._name = pid, name
        self._known: dict[Key, _Used] = {}
        self._rows: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def read(self) -> dict[str, float]:
        """CPU seconds since each began, by name; of those that ended, too."""
        living: dict[int, Key] = {}
        for key, (parent_pid, own, reaped) in sorted(_processes().items()):  # parents began before their children
            parent = living.get(parent_pid)
            used = self._known.get(key)
            if used is None:
                if parent is None and (self._known or key[1] != self._pid):
                    continue
                used = self._known[key] = _Used(parent, self._name if parent is None else self._known[parent].name)
            used.parent, used.own, used.reaped = parent, own, reaped
            if parent is not None:
                used.name = _name(key[1], used.name, self._known[parent].name)
            living[key[1]] = key
        for key, used in sorted(self._known.items(), reverse=True):  # children before their parents
            if not used.ended and living.get(key[1]) != key:
                used.ended = True
                if used.parent is not None:
                    self._known[used.parent].credited += used.own + max(used.reaped, used.credited)
        seconds = dict.fromkeys((used.name for used in self._known.values()), 0.0)
        for used in self._known.values():
            seconds[used.name] += used.own + max(used.reaped - used.credited, 0.0)
        return seconds

    def start(self) -> CpuTree:
        """Read it twice a second, in a thread, until ``stop``."""
        self._thread.start()
        return self

    def _run(self) -> None:
        while True:
            self._rows.append((time.time(), self.read()))
            if self._over.wait(INTERVAL_S):
                return

    def stop(self) -> None:
        """Read it a last time. Idempotent."""
        self._over.set()
        self._thread.join()

    def between(self, first: float = 0.0, last: float = np.inf) -> dict[str, float]:
        """CPU seconds by name between two moments of ``time.time()``, most first."""
        rows = list(self._rows)
        spent = {}
        for name in dict.fromkeys(name for _, used in rows for name in used):
            at = np.interp([first, last], [moment for moment, _ in rows], [used.get(name, 0.0) for _, used in rows])
            spent[name] = float(at[1] - at[0])
        return dict(sorted(spent.items(), key=lambda item: -item[1]))


def main() -> int:
    """Run the command, print its times, and return its exit code."""
    parser = argparse.ArgumentParser(description="Wall time and CPU time of a command and of all that it starts.")
    parser.add_argument("--samples", type=int, default=0, help="that the command trains")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    began = time.monotonic()
    process = subprocess.Popen(options.command)
    tree = CpuTree(process.pid).start()
    _, status, waited_for = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began
    tree.stop()
    cpu_s = max(sum(tree.between().values()), waited_for.ru_utime + waited_for.ru_stime)
    each = 1e3 / (options.samples or math.nan)
    print(f"{wall_s:.1f} s, {cpu_s:.1f} s of CPU; {each * wall_s:.2f} ms a sample, {each * cpu_s:.2f} CPU ms a sample")
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())

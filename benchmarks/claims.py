"""The table of measured claims, and the commands that measure a row again.

``python benchmarks/claims.py`` writes ``docs/evidence/benchmarks.md`` from ``benchmarks/claims.json``. With names of
claims it runs their commands first, and records what they printed with the date, the commit and the machine
(``make claims``)."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "claims.json"
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make claims` from `benchmarks/claims.json`; a test compares the two. Each row says when, at which commit
and on which machine its figure was measured; before 2026-11-25 the commit is the last one of that day. The machines are
shared and noisy: read CPU milliseconds a trained sample (all processes of a run) and ratios of them before wall time.
Beside other work CPU time grows, too. `make claims CLAIMS="NAME"` measures a row again.
"""


class Claim(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One figure. ``shows``: pattern of the lines of the output that are the figure; without one, the last line.
    ``goal_cpu_ms``: CPU time a trained sample that the figure is not to exceed (0: no goal); noise moves it less than a
    ratio of wall times. ``keeps_table``: the Markdown tables of the output are kept too, as ``table``."""

    name: str
    area: str
    what: str
    command: str
    figure: str
    date: str
    commit: str
    machine: str
    minutes: float
    shows: str = ""
    goal_cpu_ms: float = 0
    keeps_table: bool = False
    table: str = ""


def read_claims() -> list[Claim]:
    """All claims, in the order of the file. Raises ``msgspec.ValidationError`` where the file is malformed."""
    return msgspec.json.decode(TABLE.read_bytes(), type=list[Claim])


def page(claims: list[Claim]) -> str:
    """Text of ``docs/evidence/benchmarks.md``: a table for each area."""
    parts = [HEAD]
    for area in dict.fromkeys(claim.area for claim in claims):
        parts.append(f"\n## {area}\n\n| what | figure | when, where | command |\n|---|---|---|---|")
        parts += [
            f"| {claim.what} | {claim.figure}{goal_text(claim)} | {claim.date}, `{claim.commit}`, {claim.machine} "
            f"| `{claim.name}`: `{claim.command}` ({claim.minutes:g} min) |"
            for claim in claims
            if claim.area == area
        ]
        parts += [f"\n`{claim.name}`:\n\n{claim.table}" for claim in claims if claim.area == area and claim.table]
    return "\n".join(parts) + "\n"


def cpu_ms_of(figure: str) -> float | None:
    """The last CPU milliseconds a sample in a figure, ``20.1`` of ``33.0 → 20.1 CPU ms a sample``."""
    found = re.findall(r"([\d.]+) CPU ms a sample", figure)
    return float(found[-1]) if found else None


def goal_text(claim: Claim) -> str:
    """The goal and whether it is met, for behind the figure; empty where there is none."""
    if not claim.goal_cpu_ms:
        return ""
    measured = cpu_ms_of(claim.figure)
    verdict = "not measured" if measured is None else "met" if measured <= claim.goal_cpu_ms else "UNMET"
    return f"; goal {claim.goal_cpu_ms:g} CPU ms a sample: {verdict}"


def table_of(output: str) -> str:
    """The Markdown tables of an output, without what stands between them."""
    tables = re.findall(r"(?:^\|.*\n)+", output, re.MULTILINE)
    return "\n".join(tables).strip()


def figure_of(claim: Claim, output: str) -> str:
    """What the command's output says. Raises ``SystemExit`` where it does not contain the figure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line for line in lines if re.search(claim.shows, line)] if claim.shows else lines[-1:]
    if not found:
        raise SystemExit(f"{claim.name}: no line of the output matches {claim.shows!r}")
    return "; ".join(found).replace("|", "/")


def machine() -> str:
    """Cores and processor, and the GPU where there is one."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    found = f"{os.cpu_count()} cores, {model[1].strip() if model else platform.machine()}"
    try:
        names = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return found
    return f"{found}, {len(names)} GPU" if names else found


def measure(claim: Claim) -> Claim:
    """The claim with a new figure. Raises ``SystemExit`` where the command fails; nothing is recorded then."""
    print(f"{claim.name}: {claim.command} (about {claim.minutes:g} min)", flush=True)
    began = time.monotonic()
    arguments = shlex.split(claim.command)
    if arguments[0] == "python":
        arguments[0] = sys.executable
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        print(f"  {line.rstrip()}", flush=True)
        lines.append(line)
    if process.wait() != 0:
        raise SystemExit(f"{claim.name}: {claim.command!r} ended with {process.returncode}; its row is as it was")
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return msgspec.structs.replace(
        claim,
        figure=figure_of(claim, "".join(lines)),
        table=table_of("".join(lines)) if claim.keeps_table else "",
        date=date.today().isoformat(),
        commit=commit.stdout.strip(),
        machine=machine(),
        minutes=round((time.monotonic() - began) / 60, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims to measure again")
    names = parser.parse_args().names
    claims = read_claims()
    if unknown := set(names) - {claim.name for claim in claims}:
        parser.error(f"no such claim: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in claims)}")
    for number, claim in enumerate(claims):
        if claim.name in names:
            claims[number] = measure(claim)
            TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(claims), indent=2) + b"\n")
    PAGE.write_text(page(claims))


if __name__ == "__main__":
    main()

"""The page of benchmark figures is the one that its table makes; CPU time and the accounting of a step are complete."""

from __future__ import annotations

import re
import subprocess
import sys

import claims
import pytest
from builders.files import ROOT
from cpu_time import CpuTree
from step_accounting import CLOSE, DECODE, GAP, PREFILL, PUSH, Span, core_spans, seconds_of


def test_the_page_is_current() -> None:
    assert claims.PAGE.read_text() == claims.page(claims.read_claims()), "run: make claims"


def test_every_command_is_there() -> None:
    found = claims.read_claims()
    assert len({claim.name for claim in found}) == len(found)
    campaigns = (ROOT / "campaigns" / "__main__.py").read_text()
    for claim in found:
        program, script, *rest = claim.command.split()
        if script == "-m":
            assert f"python -m {rest[0]} {rest[1]} " in campaigns, claim.command
        else:
            assert program in {"make", "streamrl"} or (ROOT / script).is_file(), claim.command


def test_a_figure_is_what_the_command_printed() -> None:
    claim = claims.read_claims()[0]
    assert claims.figure_of(claim, "installing\nheld-out 0.2 | 0.6\nbye\n") == "held-out 0.2 / 0.6"
    with pytest.raises(SystemExit, match="no line"):
        claims.figure_of(claim, "nothing of the kind")
    assert claims.table_of("5 steps\n\n| a |\n|---|\n\nand\n| b |\n") == "| a |\n|---|\n\n| b |"


def test_wall_time_ratios_have_cpu_time_beside_them() -> None:
    """A ratio of wall times has CPU time beside it, or says that it has none."""
    figures = [claim.figure for claim in claims.read_claims() if "less wall time" in claim.figure]
    assert figures and all(claims.cpu_ms_of(figure) or "CPU not measured" in figure for figure in figures)
    readme = " ".join(re.findall(r"^\|.*CPU .*$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert (numbers := set(re.findall(r"\d+\.\d+", readme))) and all(n in " ".join(figures) for n in numbers)
    assert claims.cpu_ms_of("24.5 → 14 ms a sample, 33.5 → 20.25 CPU ms a sample: 1.6 times") == 20.25


FAMILY = """import os, time
def burn():
    while time.process_time() < 0.3: pass
if not (short := os.fork()): burn(), os._exit(0)
os.waitpid(short, 0)
(wake, go), (stop, halt) = os.pipe(), os.pipe()
if not (pair := os.fork()):
    os.close(halt)
    if not os.fork(): burn(), os.write(go, b"1"), os.read(stop, 1), os._exit(0)
    os.wait(), os._exit(0)
os.read(wake, 1)
if not (middle := os.fork()):
    os.close(halt)
    if not os.fork():
        os.close(go), os.read(wake, 1), burn(), os.write(1, b"burnt\\n"), os.read(wake, 1), os._exit(0)
    burn(), os.write(1, b"look\\n"), time.sleep(60)
input(), os.kill(middle, 9), os.write(go, b"1")
input(), os.close(halt), os.waitpid(pair, 0), os.waitpid(middle, 0), os.write(1, b"gone\\n"), input()"""


def test_cpu_time_includes_children_and_orphans() -> None:
    """CPU time includes that of children never seen, of ended ones and of orphans."""
    command = [sys.executable, "-c", FAMILY, "streamrl.launch reward"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as family:
        tree = CpuTree(family.pid)
        for said in ("look", "burnt", "gone"):
            assert family.stdout.readline() == f"{said}\n"
            used = tree.read()
            assert said == "look" or (0.85 < used["reward"] < 1.0 and 1.15 < sum(used.values()) < 1.45), "each once"
            family.stdin.write("\n")


def test_every_moment_of_a_step_counts_once() -> None:
    spans = [*core_spans(["0 2 130 130", "2 3 5 5", "3 4 5 40"]), Span(3.5, 6, CLOSE), Span(5, 7, PUSH)]
    seconds = {row: found for row, found in seconds_of(spans, 1, 8).items() if found}
    assert seconds == {DECODE[128]: 1, DECODE[1]: 1, PREFILL: 1, CLOSE: 2, PUSH: 1, GAP: 1}

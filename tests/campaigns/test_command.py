"""``python -m campaigns`` as it is typed: it lists all campaigns, and imports the one that is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from campaigns.__main__ import MODULES

PROGRAM = """
import runpy, sys
sys.argv = ["campaigns", *sys.argv[1:]]
try:
    runpy.run_module("campaigns", run_name="__main__")
finally:
    print("imports:", *(name for name in ("torch", "vllm", "campaigns.control_walks") if name in sys.modules))
"""


@pytest.mark.parametrize(("words", "imported"), [(["--help"], ""), (["walks", "--help"], "campaigns.control_walks")])
def test_only_the_campaign_that_is_named_is_imported(words: list[str], imported: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    printed, _, imports = ended.stdout.rpartition("imports:")
    assert imports.strip() == imported
    assert words != ["--help"] or all(name in printed for name in MODULES)

"""The page of benchmark figures is the one that its table makes."""

from __future__ import annotations

from pathlib import Path

import claims
import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_is_current() -> None:
    assert claims.PAGE.read_text() == claims.page(claims.read_claims()), "run: make claims"


def test_every_command_is_there() -> None:
    found = claims.read_claims()
    assert len({claim.name for claim in found}) == len(found)
    for claim in found:
        program, script = claim.command.split()[:2]
        assert program in {"make", "streamrl"} or (ROOT / script).is_file(), claim.command


def test_a_figure_is_what_the_command_printed() -> None:
    claim = claims.read_claims()[0]
    assert claims.figure_of(claim, "installing\nheld-out 0.2 | 0.6\nbye\n") == "held-out 0.2 / 0.6"
    with pytest.raises(SystemExit, match="no line"):
        claims.figure_of(claim, "nothing of the kind")

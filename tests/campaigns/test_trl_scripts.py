"""Constructors of public TRL scripts: each argument is translated or refused by name."""

from __future__ import annotations

import pytest

from campaigns.trl_scripts import outcomes


def test_no_argument_of_a_public_script_is_lost() -> None:
    pytest.importorskip("trl")
    results = [result for _, result in outcomes()]
    assert len(results) >= 40
    assert [result.lost for result in results if result.lost] == []
    assert sum(bool(result.refused) for result in results) >= 10  # so that "refused" is not empty for all

"""Tokenizers of families by name, each made once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamrl.pretrained.tokenizer import Tokenizer
from tests.pretrained.turns.families import tokenizer_of


@pytest.fixture(scope="session")
def of_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    folder = tmp_path_factory.mktemp("families")
    return lambda name: tokenizer_of(name, folder)

"""What training imports of transformers, in fresh interpreters: without the compiler, and none the worse for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODEL = "examples/sort/model"
TRAINS_AND_COMPILES = f"""
import sys, torch
from streamrl.learning.model.loading import load_policy
from streamrl.learning.model.policy import empty_micro_batch
device = torch.device("cpu")
policy = load_policy({MODEL!r}, device)
policy(empty_micro_batch(device)).sum().backward()
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
assert torch._dynamo.is_compiling() is False
"""
ASKS = """
import sys
from streamrl.learning.model.hugging_face import without_compiler
with without_compiler():
    import torch._dynamo
    stand_in = sys.modules["torch._dynamo"]
    assert stand_in.disable(len) is len and stand_in.disable(recursive=False)(len) is len
    assert torch._dynamo.config.suppress_errors is False, "what the stand-in lacks is the real one's"
    assert sys.modules["torch._dynamo"] is not stand_in
from torch._dynamo import is_compiling
"""
MASKS = """
import torch
from streamrl.learning.model.hugging_face import without_compiler
with without_compiler():
    from transformers.masking_utils import TransformGetItemToIndex
table = torch.arange(8)
with TransformGetItemToIndex():
    rows = torch.vmap(lambda index: table[index])(torch.tensor([3, 5]))
assert rows.tolist() == [3, 5]
"""
SCRIPTS = {"trains and compiles": TRAINS_AND_COMPILES, "asks": ASKS, "masks": MASKS}


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_is_imported_when(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr

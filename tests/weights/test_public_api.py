"""``streamrl.weights`` is what an outside user imports: all of it is there, and nothing else is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from builders.files import ROOT

from streamrl import weights


def imported(source: str) -> set[str]:
    """``module.name`` of everything of streamrl's that a text of Python imports."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {f"{n.module}.{alias.name}" for n in found if (n.module or "").startswith("streamrl") for alias in n.names}


def test_the_public_list_is_complete_and_true() -> None:
    """Every name in the list is there, and every public name is in the list."""
    assert all(getattr(weights, name) is not None for name in weights.__all__)
    homes = [name for names in weights._HOMES.values() for name in names]
    direct = [name for name in weights.__all__ if name not in homes]
    assert sorted([*homes, *direct]) == sorted(weights.__all__)
    assert set(direct) <= vars(weights).keys()
    assert all(name in (weights.__doc__ or "") for name in weights.__all__)


def test_the_example_and_its_page_need_nothing_else() -> None:
    example = (ROOT / "examples/weights_only/train_loop.py").read_text()
    page = (ROOT / "docs/take_out.md").read_text()
    for source in (example, *re.findall(r"```python\n(from.*?)```", page, flags=re.DOTALL)):
        used = imported(source)
        assert used
        assert used <= {f"streamrl.weights.{name}" for name in weights.__all__}


def test_nothing_heavy_is_imported_before_it_is_asked_for() -> None:
    """vLLM's front end and cores import the plugin, which takes names from here."""
    script = (
        "import sys, streamrl.engines.vllm.plugin, streamrl.weights; "
        "sys.stdout.write(' '.join({'zmq', 'numpy', 'torch', 'vllm', 'anyio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert (done.stdout, done.stderr) == ("", "")

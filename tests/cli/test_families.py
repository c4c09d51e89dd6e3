"""``streamrl families``: tiny models of families, tried by trainer, engine and pushes."""

from __future__ import annotations

import json

import pytest

from streamrl.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("vllm")

from streamrl.engines.async_llm.worker import KERNELS_VARIABLE
from streamrl.engines.families.family_probe import FamilyReport

pytestmark = [pytest.mark.torch, pytest.mark.vllm]


def test_families_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "--list", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert len(names) >= 36 and names["gpt_oss"] == "gpt-oss"
    assert main(["families", "gpt_os"]) == 2
    assert "no family is called 'gpt_os': choose among" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reasons", "dtype", "verdict"),
    [
        ({}, "float32", "trains"),
        ({}, "bfloat16", 'trains with engines.dtype = "bfloat16"'),
        ({"trainer": "a\nb", "push": "c"}, "float32", "refused (trainer): a b"),
        ({"push": "c"}, "bfloat16", "refused (push): c"),
    ],
)
def test_a_verdict_names_the_first_part_that_fails(reasons: dict[str, str], dtype: str, verdict: str) -> None:
    assert FamilyReport(name="n", title="N", engine_dtype=dtype, **reasons).verdict == verdict


@pytest.mark.long
@pytest.mark.seconds(120)
@pytest.mark.parametrize(
    ("kernels", "verdict"),
    [("", "trains"), ("stock", "refused (engine): engine-0: vLLM's EngineCore reported a fatal")],
)
def test_a_family_is_tried_with_trainer_engine_and_pushes(
    kernels: str, verdict: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has the family's class and the verdict. vLLM's own router of a CPU knows no sigmoid without groups, and
    the engine dies of its first request."""
    monkeypatch.setenv(KERNELS_VARIABLE, kernels)
    assert main(["families", "minimax_m2"]) == bool(kernels)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"| MiniMax-M2 | `MiniMaxM2ForCausalLM` | {verdict}")

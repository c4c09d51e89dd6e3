"""The memory of a rank is predicted as FakeTensorMode counts it, for each family, kind of training and card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from builders.files import ROOT  # noqa: E402
from builders.pretrained import folder_of_shapes  # noqa: E402
from builders.recipe import small_recipe  # noqa: E402
from fake_step import Peaks, step_on  # noqa: E402

from streamrl.base.types import SamplingSettings  # noqa: E402
from streamrl.learning import process_group  # noqa: E402
from streamrl.learning.model import loading  # noqa: E402
from streamrl.learning.options import TrainerOptions, trainer_options  # noqa: E402
from streamrl.learning.rank_memory import Card, RankBytes, bytes_per_rank, training_sizes  # noqa: E402
from streamrl.prepare.memory import device_bytes  # noqa: E402
from streamrl.pretrained.model_facts import read_model_facts  # noqa: E402
from streamrl.recipe.sections import ComputeDtype, Gathered, Lora, LoraSync, OptimizerKind, Sampling, Training  # noqa: E402
from tests.tiers import quick_only  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")]
GIB = 1 << 30
H100, RTX_4090, T4 = Card(int(79.6 * GIB)), Card(int(23.5 * GIB)), Card(int(14.6 * GIB), has_bfloat16=False)
ADAPTER, MERGED = (Lora(rank=16, sync=LoraSync(kind)) for kind in ("adapter", "merged"))
ALL_LINEAR = Lora(rank=16, targets=("all-linear",), sync=LoraSync.MERGED)
KINDS: dict[str, tuple[Card, dict[str, Any]]] = {
    "full": (H100, {}),
    "full on 24 GB": (RTX_4090, {}),
    "8-bit": (RTX_4090, {"optimizer": OptimizerKind.ADAMW_8BIT}),
    "adapter": (H100, {"lora": ADAPTER}),
    "merged": (RTX_4090, {"lora": MERGED}),
    "all-linear": (RTX_4090, {"lora": ALL_LINEAR}),
    "checkpointing": (RTX_4090, {"activation_checkpointing": True}),
    "checkpointing of adapters": (RTX_4090, {"activation_checkpointing": True, "lora": ADAPTER}),
    "a nucleus": (RTX_4090, {"sampling": SamplingSettings(top_p=0.9)}),
    "float32": (T4, {}),
    "float32 adapter": (T4, {"lora": ADAPTER}),
}

OF_EACH_FAMILY = ("full on 24 GB", "adapter", "checkpointing of adapters", "float32")
CASES = [("Qwen3-0.6B", kind) for kind in KINDS]
CASES += [
    (name, kind) for name in ("Llama-3.2-1B-Instruct", "Mistral-7B-v0.3", "gemma-3-1b-it") for kind in OF_EACH_FAMILY
]


def config_of(name: str, **sizes: Any) -> dict[str, Any]:
    text = (ROOT / "tests" / "examples" / "model_configs" / f"{name}.json").read_text()
    config: dict[str, Any] = json.loads(text) | sizes
    return config


def measured_and_predicted(
    folder: Path, config: dict[str, Any], card: Card, tokens: int, **settings: Any
) -> tuple[Peaks, RankBytes]:
    options = TrainerOptions(
        model_path="", run_id="", weights_endpoint="", device="cpu", micro_batch_tokens=tokens,
        compute_dtype=ComputeDtype("bfloat16" if card.has_bfloat16 else "float32"), **settings,
    )  # fmt: skip
    facts = read_model_facts(folder_of_shapes(folder, config))
    sizes = training_sizes(options, options.lora, options.objective, facts, distribution=options.sampling, card=card)
    return step_on(card, config, options, tokens), bytes_per_rank(sizes, Gathered.BATCH)


@pytest.mark.parametrize(("name", "kind"), quick_only(CASES, CASES[:1] + CASES[-4:-2]))
def test_a_step_takes_what_is_predicted(name: str, kind: str, tmp_path: Path) -> None:
    """The sizes of layers, head and state are those of the real model, which has more layers."""
    card, settings = KINDS[kind]
    check(tmp_path, config_of(name, num_hidden_layers=4), card, 2048, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "card", "tokens", "gib"),
    [
        ("Qwen3-0.6B", H100, 2048, 20.7),
        ("Qwen3-0.6B", RTX_4090, 2048, 18.0),
        ("Qwen3-0.6B", H100, 8192, 34.4),
        ("Llama-3.2-1B-Instruct", H100, 4096, 37.8),
        ("Qwen3-8B", H100, 2048, 188.6),
    ],
)
def test_real_sizes_take_what_is_predicted(name: str, card: Card, tokens: int, gib: float, tmp_path: Path) -> None:
    """torch's CUDA build has counted as much for the first four."""
    assert check(tmp_path, config_of(name), card, tokens) == pytest.approx(gib, rel=0.01)


def check(folder: Path, config: dict[str, Any], card: Card, tokens: int, **settings: Any) -> float:
    """GiB at the peak, to which the prediction is equal, with more on top than it may lack."""
    measured, predicted = measured_and_predicted(folder, config, card, tokens, **settings)
    assert predicted.total - predicted.unseen == pytest.approx(measured.peak, rel=0.05)
    assert measured.peak < predicted.total
    return measured.peak / GIB


def test_loading_gives_freed_blocks_back(start_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses to start where less is free than its share, and a rank has freed its parameters one by one."""
    calls: list[Any] = []
    empty_cache = process_group.empty_cache
    monkeypatch.setattr("streamrl.learning.trainer.process_group.empty_cache", calls.append)
    start_trainer()
    assert calls == [torch.device("cpu")]
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append("emptied"))
    empty_cache(torch.device("cpu"))
    empty_cache(torch.device("cuda", 0))
    assert calls == [torch.device("cpu"), "emptied"]


def test_trainer_and_dry_run_predict_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a card's memory, a nucleus, a long prompt and a model that has fewer positions than the recipe asks for."""
    config = config_of("Qwen3-0.6B", max_position_embeddings=4096)
    recipe = small_recipe(
        str(folder_of_shapes(tmp_path, config)),
        sampling=Sampling(max_tokens=3500, top_p=0.9),
        training=Training(ranks=2, gathered=Gathered.BATCH),
    )
    predicted = device_bytes(recipe, read_model_facts(tmp_path), H100)
    assert predicted.backward > 4 * GIB
    monkeypatch.setattr(loading, "card_of", lambda _: H100)
    monkeypatch.setattr(loading, "_free_bytes", lambda *_: 80.0 * GIB)
    monkeypatch.setattr(loading.process_group, "all_reduce", lambda values, *_: values)
    with caplog.at_level("INFO"):
        loading._choose_gathered(trainer_options(recipe, 0, "run", "ipc://weights"), torch.device("cpu"))
    assert f"once a batch: {predicted.total / GIB:.2f} GiB a rank" in caplog.text

"""A tiny random model and trainers on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests are imported without packages: what they share lies beside them, and rank_process.py imports it as a script.
sys.path.insert(0, str(Path(__file__).parent))

from sample_groups import VOCABULARY


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen2 (2 layers, width 32, 4 heads on 2, tied) with a character tokenizer, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    directory = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(directory)
    tokens = {
        name: index for index, name in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz  "])
    }
    Tokenizer(models.WordLevel(tokens, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.fixture
def start_trainer(tiny_model: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start trainers with one rank, one after the other: a process has one process group."""
    from streamrl.learning.options import TrainerOptions
    from streamrl.learning.trainer import TorchTrainer
    from streamrl.weights.publish.torch_tensors import start_publisher

    running: list[TorchTrainer] = []

    def start(**changes: Any) -> TorchTrainer:
        while running:
            running.pop().close()
        options: dict[str, Any] = {
            "model_path": tiny_model,
            "run_id": "test",
            "weights_endpoint": f"ipc://{tmp_path}/weights",
            "threads": 1,
            "learning_rate": 1e-2,
            "micro_batch_tokens": 128,
        } | changes
        running.append(TorchTrainer(TrainerOptions(**options), start_publisher))
        running[0].start()
        return running[0]

    yield start
    while running:
        running.pop().close()

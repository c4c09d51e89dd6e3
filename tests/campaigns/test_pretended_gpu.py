"""The pretended GPU: what a GPU refuses is refused, its values are the CPU's, and a driver answers for named cards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from builders.files import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from campaigns.pretended_gpu import ranks  # noqa: E402
from campaigns.pretended_gpu.cards import KNOWN, cards_of  # noqa: E402
from campaigns.pretended_gpu.devices import Seen, pretended_gpus  # noqa: E402
from campaigns.pretended_gpu.driver import variables  # noqa: E402
from streamrl.recipe.sections import Lora, LoraSync, OptimizerKind  # noqa: E402

pytestmark = pytest.mark.torch
# What a test asks is not refused, so these ask as user code: from another file.
ASKED: dict[str, tuple[str, str]] = {
    "operands": ("torch.ones(3, device='cuda') + torch.ones(3)", "Expected all tensors to be on the same device"),
    "two devices": ("torch.ones(3, device='cuda:1') * torch.ones(3).cuda(0)", "same device"),
    "an indexed host tensor": ("torch.ones(3)[torch.tensor([1], device='cuda')]", "same device"),
    "a scalar in cat": ("torch.stack([torch.ones((), device='cuda'), torch.ones(())])", "same device"),
    "an array": ("torch.ones(3, device='cuda') + torch.from_numpy(numpy.ones(3))", "same device"),
    "numpy": ("torch.ones(3, device='cuda').numpy()", "can't convert cuda:0 device type tensor to numpy"),
    "numpy of a view": ("torch.ones(4, device='cuda').view(2, 2)[0].detach().numpy()", "to numpy"),
    "pinned": ("torch.ones(3, device='cuda').pin_memory()", "only dense CPU tensors can be pinned"),
    "no such device": ("torch.ones(3, device='cuda:2')", "invalid device ordinal"),
    "a gradient": ("setattr(torch.ones(3, device='cuda'), 'grad', torch.ones(3))", "a gradient on cpu"),
    "in backward": ("BACKWARD()", "same device"),
}
ALLOWED = (
    "torch.ones(3, device='cuda') + torch.ones(())",
    "torch.ones(3, device='cuda')[torch.tensor([1])]",
    "torch.ones(3, device='cuda').copy_(torch.zeros(3))",
    "torch.ones(3, device='cuda').cpu().numpy()",
    "torch.ones(3, device='cuda') + 1",
)


@pytest.fixture
def asked() -> Callable[[str], Any]:
    """Evaluate an expression as a file outside of the tests."""

    def backward() -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(eval(compile("lambda g: g + torch.ones(3)", "/user/code.py", "eval"), {"torch": torch}))
        y.sum().backward()

    names = {"torch": torch, "numpy": numpy, "BACKWARD": backward}
    return lambda text: eval(compile(text, "/user/code.py", "eval"), names)


@pytest.fixture
def gpus() -> Iterator[Seen]:
    with pretended_gpus(cards_of("H100,H100")) as seen:
        yield seen


@pytest.mark.parametrize("case", ASKED)
def test_what_a_gpu_refuses_is_refused(case: str, asked: Callable[[str], Any], gpus: Seen) -> None:
    expression, sentence = ASKED[case]
    with pytest.raises((RuntimeError, TypeError), match=sentence):
        asked(expression)
    assert len(gpus.refused) == 1


@pytest.mark.parametrize("expression", ALLOWED)
def test_what_a_gpu_allows_is_allowed(expression: str, asked: Callable[[str], Any], gpus: Seen) -> None:
    asked(expression)
    assert gpus.refused == []


def flash(**changes: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    rows = torch.randn(7, 2, 8, device="cuda").to(changes.pop("dtype", torch.bfloat16))
    ends = torch.tensor([0, 3, 7], dtype=changes.pop("ends", torch.int32), device=changes.pop("device", "cuda"))
    return varlen_attn(rows, rows, rows, ends, ends, changes.pop("longest", 4), 4, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": torch.float32}, "takes float16 and bfloat16"),
        ({"ends": torch.int64}, "not int32"),
        ({"device": "cpu"}, "cu_seq_q is on the host"),
        ({"longest": 3}, "longer than 3"),
    ],
)
def test_the_flash_kernel_refuses(changes: dict[str, Any], sentence: str, gpus: Seen) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        flash(**changes)


def test_the_flash_kernel_is_not_for_a_t4() -> None:
    with pretended_gpus([KNOWN["T4"]]), pytest.raises(RuntimeError, match="only supports Ampere GPUs or newer"):
        flash()


def test_everything_is_as_it_was_afterwards() -> None:
    before = torch.cuda.is_available, torch.cuda.Stream, torch.autograd._engine_run_backward
    with pretended_gpus():
        assert torch.ones(3, device="cuda").device == torch.device("cuda", 0) and torch.cuda.device_count() == 1
    assert before == (torch.cuda.is_available, torch.cuda.Stream, torch.autograd._engine_run_backward)
    assert torch.ones(3).device.type == "cpu"


def test_cards_are_named_or_described() -> None:
    assert cards_of("T4, NVIDIA X:10.5:8.6") == (KNOWN["T4"], ("NVIDIA X", 10.5, (8, 6)))
    assert cards_of(",".join(map(str, KNOWN.values()))) == tuple(KNOWN.values())
    with pytest.raises(ValueError, match="'H1000' is no card: write one of T4, "):
        cards_of("H1000")


@pytest.mark.long
@pytest.mark.seconds(120)
@pytest.mark.parametrize("variant", ranks.VARIANTS)
def test_ranks_are_one_rank(variant: str, tmp_path: Path) -> None:
    """Two ranks over NCCL, as they see it, have the weights of one rank on the host."""
    assert ranks.problems_of(variant, write_model(tmp_path)) == []


ALONE: dict[str, dict[str, Any]] = {
    "lora": {"lora": Lora(rank=4, targets=("all-linear",))},
    "adapter": {"lora": Lora(rank=4, targets=("all-linear",), sync=LoraSync.ADAPTER)},
    "offloaded": {"optimizer": OptimizerKind.ADAMW_OFFLOADED},
    "checkpointing": {"activation_checkpointing": True},
}


@pytest.mark.long
@pytest.mark.parametrize("variant", ALONE)
def test_alone_it_is_as_on_the_host(variant: str, tmp_path: Path) -> None:
    """A rank on a GPU has the weights and metrics of one on the host."""
    model = write_model(tmp_path)
    ranks.train(0, 1, tmp_path, model, "cpu", ALONE[variant])
    with pretended_gpus() as seen:
        ranks.train(0, 1, tmp_path, model, "cuda", ALONE[variant])
    assert seen.refused == [] and ranks.differences(tmp_path) == []


def write_model(folder: Path) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(
        vocab_size=32, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return str(folder)


@pytest.mark.long
@pytest.mark.started
@pytest.mark.parametrize(("cards", "line"), [("H100", "of 79.6 GiB"), ("T4,T4", "of 14.6 GiB")])
def test_a_dry_run_is_that_of_the_cards(cards: str, line: str) -> None:
    """With the CPU builds, too."""
    command = [sys.executable, "-m", "streamrl", "train", "examples/sort/recipe.toml", "--dry-run"]
    found = variables(cards_of(cards))
    paths = {"PYTHONPATH": f"{found.get('PYTHONPATH', '')}:{ROOT}"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | found | paths, capture_output=True, text=True, check=False
    )
    shown = done.stdout.partition("# memory of the GPUs")[2]
    assert line in shown, done.stdout[-2000:] + done.stderr[-2000:]

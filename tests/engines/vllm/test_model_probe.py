"""What the dry run finds out about a model, with the real vLLM and without an engine or weights in it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.base.types import Prompt, token_array
from streamrl.engines.async_llm.options import cpu_variables, shared_variables
from streamrl.engines.vllm.options import EngineOptions
from streamrl.prepare.recipe_probe import problem_of_model
from streamrl.recipe.sections import Lora, LoraSync

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.vllm]


def model(config: Any, directory: Path) -> EngineOptions:
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return EngineOptions(
        name="engine-0",
        model_path=str(directory),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        cache_blocks=9,
        block_tokens=128,
        gpu_memory_utilization=0.9,
        workers=1,
        sleeps=False,
        variables=shared_variables(directory) | cpu_variables("plain"),
    )


@pytest.mark.started
@pytest.mark.long
def test_the_probe_tries_trainer_and_vllm(tmp_path: Path) -> None:
    """The probe tries the model with the trainer and with vLLM before a start."""
    ids = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    short = model(transformers.GPT2Config(**ids, n_embd=64, n_layer=1, n_head=2, n_positions=128), tmp_path / "gpt2")
    # The output head of Phi-2 has a bias, which vLLM makes anew each time that weights are loaded.
    late_bias = model(transformers.PhiConfig(**ids, **shape, max_position_embeddings=256), tmp_path / "phi")
    narrow = model(transformers.LlamaConfig(**ids, **shape | {"num_attention_heads": 4}), tmp_path / "narrow")
    late_bias = msgspec.structs.replace(
        late_bias,
        adapter=Lora(rank=3, sync=LoraSync.ADAPTER, targets=("q_proj", "fc1")),
        workers=2,
        args={"decode_context_parallel_size": 2},  # which the one worker of a probe cannot have
    )
    prompt = Prompt(prompt_id="p", token_ids=token_array([1]), columns={"prompt": "a"})  # and no tokenizer
    with ThreadPoolExecutor() as threads:
        unclear = threads.submit(problem_of_model, short, 200, (1,))  # targets are names
        found = list(threads.map(lambda one: problem_of_model(one, 200, (), prompt), [short, late_bias, narrow]))
    answers = [trial.problem for trial in found]
    mismatch = ("it cannot tokenise the prompt (", "token 1 of 0 is no")
    assert all(trial.differs.startswith(mismatch) and not trial.failure for trial in found)
    expected = "exit code 1, msgspec.ValidationError: Expected `str`, got `int` - at `$[1][0]`"
    assert unclear.result().failure == expected, "the last line of its traceback"
    remedy = "the model has 128 positions, and 256 are asked for: set engines.max_model_len = 128"
    heads = "the model has attention heads of 16, and vLLM on a CPU serves only [32, 64, "
    assert answers[0] == f"engine-0: {remedy}"
    assert answers[1] == ""
    assert answers[2].startswith(heads)


WITHOUT_A_CPU = """
import sys
from vllm.platforms import current_platform
type(current_platform).is_cpu = lambda platform: False
from streamrl.engines.vllm.plugin import register
register()
sys.exit("vllm.v1.worker.gpu_model_runner" in sys.modules)
"""


@pytest.mark.started
@pytest.mark.long
def test_the_plugin_leaves_the_runner_of_a_gpu_alone() -> None:
    """The patched runner is a CPU engine's. Its import compiles Triton's kernels, and fails without a driver."""
    environment = os.environ | {"STREAMRL_ENGINE": "1", "VLLM_PLUGINS": ""}
    assert subprocess.run([sys.executable, "-c", WITHOUT_A_CPU], env=environment, check=False).returncode == 0

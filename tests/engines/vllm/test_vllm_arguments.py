"""Arguments of the recipe in vLLM's own configuration, and speculative decoding: the same distribution, several tokens
a step."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from forks.call import call_in_process

from streamrl.base.messages import Generate
from streamrl.base.types import Completion, FinishReason, token_array
from streamrl.engines.vllm.options import EngineOptions
from tests.engines.conftest import Hosted

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.torch]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TEN = {  # argument: (value, its place in vLLM's configuration, what is there)
    "speculative_config": (NGRAM, "speculative_config.num_speculative_tokens", 4),
    "attention_backend": ("cpu_attn", "attention_config.backend.name", "CPU_ATTN"),
    "scheduling_policy": ("priority", "scheduler_config.policy", "priority"),
    "stream_interval": (3, "scheduler_config.stream_interval", 3),
    "watermark": (0.05, "scheduler_config.watermark", 0.05),
    "max_logprobs": (7, "model_config.max_logprobs", 7),
    "disable_cascade_attn": (True, "model_config.disable_cascade_attn", True),
    "distributed_timeout_seconds": (77, "parallel_config.distributed_timeout_seconds", 77),
    "prefix_caching_hash_algo": ("sha256", "cache_config.prefix_caching_hash_algo", "sha256"),
    "use_tqdm_on_load": (False, "load_config.use_tqdm_on_load", False),
}
WRONG = {
    '{"stream_intervall": 3}': 'stream_intervall: vLLM 0.32.0 has no such argument; did you mean "stream_interval"?',
    '{"stream_interval": "often"}': 'engines.args.stream_interval: "often" is not what vLLM 0.32.0 takes there (Input ',
    '{"scheduling_policy": "lifo"}': 'engines.args.scheduling_policy: "lifo" is not what vLLM 0.32.0 takes there (',
    '{"enforce_eager": false}': "engines.args.enforce_eager: an engine on a CPU has it as it must be: remove it",
    '{"pipeline_parallel_size": 2}': "engines.args.pipeline_parallel_size: vLLM on a CPU dies with it at the first",
    '{"enable_expert_parallel": true}': "engines.args.enable_expert_parallel: vLLM on a CPU dies with it at the first",
    '{"speculative_config": {"method": "ngram", "tokens": 3}}': "args.speculative_config.tokens: vLLM 0.32.0 has no",
    '{"speculative_config": {"method": "suffix"}}': "Arctic Inference is required",
    '{"attention_backend": "FLASH"}': 'engines.args.attention_backend: "FLASH" is not what vLLM 0.32.0 takes there (',
}
ASK = """
import functools, json, os, sys
import msgspec
from streamrl.base.errors import ModelRefused
from streamrl.engines.vllm.options import EngineOptions
options = msgspec.json.decode(sys.argv[1], type=EngineOptions)
os.environ.update(options.variables)
from streamrl.engines.vllm import arguments
from streamrl.engines.vllm.engine import engine_config
ordered = engine_config(msgspec.structs.replace(options, args={}, by_priority=True)).scheduler_config.policy
config = engine_config(options)
cuda_only, arguments.CUDA_ONLY = arguments.CUDA_ONLY, {}
staged = msgspec.structs.replace(options, workers=4, args={"pipeline_parallel_size": 2})
parallel = engine_config(staged).parallel_config
arguments.CUDA_ONLY = cuda_only
reached = (functools.reduce(getattr, place.split("."), config) for place in json.loads(sys.argv[2]))
print(json.dumps([ordered, [parallel.tensor_parallel_size, parallel.pipeline_parallel_size], *reached]))
for given in json.loads(sys.argv[3]):
    try:
        engine_config(msgspec.structs.replace(options, args=json.loads(given)))
        print("accepted")
    except ModelRefused as error:
        print(" ".join(str(error).split()))
"""


@pytest.mark.long
def test_ten_arguments_reach_vllm_and_wrong_ones_are_named(tiny_options: Callable[[Path], EngineOptions]) -> None:
    given = {name: value for name, (value, _, _) in TEN.items()}
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        options = msgspec.structs.replace(tiny_options(Path(directory)), args=given, pushed=False)
        places = json.dumps([place for _, place, _ in TEN.values()])
        asked = [sys.executable, "-c", ASK, msgspec.json.encode(options).decode(), places, json.dumps(list(WRONG))]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    reached, *refused = done.stdout.splitlines()[-1 - len(WRONG) :]
    assert json.loads(reached) == ["priority", [2, 2], *(wanted for _, _, wanted in TEN.values())]
    for (wrong, words), said in zip(WRONG.items(), refused, strict=True):
        assert words in said, wrong


def commands_of_a_first_start(options: str) -> list[list[str]]:
    """Commands that vLLM runs while it makes its configuration for ``options``."""
    engine_options = msgspec.json.decode(options, type=EngineOptions)
    os.environ.update(engine_options.variables)
    from streamrl.engines.vllm.engine import engine_config

    commands: list[list[str]] = []
    run = subprocess.run

    def recorded(command: list[str], **options: object) -> object:
        commands.append(list(command))
        return run(command, **options)

    subprocess.run = recorded  # type: ignore[assignment]
    engine_config(engine_options)
    return commands


def test_a_first_start_of_an_architecture_needs_no_other_process(
    tiny_options: Callable[[Path], EngineOptions], tmp_path: Path, socket_directory: Path
) -> None:
    options = msgspec.structs.replace(tiny_options(socket_directory), pushed=False)
    notes = {"VLLM_CACHE_ROOT": str(tmp_path)}
    commands = call_in_process(commands_of_a_first_start, msgspec.json.encode(options).decode(), variables=notes)
    assert not [command for command in commands if "vllm.model_executor.models.registry" in command]
    assert list((tmp_path / "modelinfos").iterdir()), "vLLM looked at no model"


COMPLETIONS, BINS, FARTHEST = 60, 20, 55.0  # chi-square of 19 degrees: above 55 once in 40,000
STOP = "w7w9"


@pytest.mark.long
@pytest.mark.asyncio
async def test_speculation_samples_from_the_same_distribution(
    tiny_model: Path,
    tiny_options: Callable[[Path], EngineOptions],
    hosted: Hosted,
    make_request: Callable[..., Generate],
) -> None:
    """With exact logprobs, of tokens several of which come in a step."""
    cuts: dict[str, object] = {"temperature": 0.6, "top_k": 20, "top_p": 0.98, "max_tokens": 120}
    requests = [make_request(**cuts, stop=(STOP,) if i % 3 == 0 else ()) for i in range(COMPLETIONS)]
    found: dict[str, Completion] = {}
    with tempfile.TemporaryDirectory(prefix="srl") as name:
        options = msgspec.structs.replace(tiny_options(Path(name)), args={"speculative_config": NGRAM})
        async with hosted(options, Path(name)) as (engine, _):

            async def ask(request: Generate) -> None:
                found[request.request_id] = await engine.generate(request)

            async with anyio.create_task_group() as group:
                for request in requests:
                    group.start_soon(ask, request)
            scored = Generate(
                request_id="scored",
                token_ids=token_array(range(2, 30)),
                max_tokens=1,
                seed=0,
                temperature=1.0,
                scored_tokens=27,
            )
            given = await engine.generate(scored)
            while engine.load().running:
                await anyio.sleep(0.05)
            load = engine.load()
    tokens = sum(len(one.token_ids) for one in found.values())
    assert tokens > 3_000 and load.generated_tokens >= tokens
    assert 0.05 < load.accepted_tokens / load.decode_tokens < 4, "several tokens come in a step"
    assert load.accepted_tokens < load.drafted_tokens and load.decode_steps > 0
    assert_exact(tiny_model, [(request, found[request.request_id]) for request in requests])
    assert_exact(tiny_model, [(msgspec.structs.replace(scored, token_ids=token_array([2])), given)])


def assert_exact(path: Path, pairs: list[tuple[Generate, Completion]]) -> None:
    from transformers import Qwen2ForCausalLM

    from streamrl.learning.objective.logprobs import removed_tokens, token_logprobs

    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
    chance, ratios, counts = random.Random(1), [], [0] * BINS
    for request, completion in pairs:
        sequence, count = torch.tensor([*request.token_ids, *completion.token_ids]), len(completion.token_ids)
        targets = sequence[-count:]
        with torch.no_grad():
            logits = model(sequence[None]).logits[0, -count - 1 : -1] / request.temperature
        settings = msgspec.structs.replace(request, temperature=1.0)
        ours, _ = token_logprobs(logits, targets, settings)
        ratios += (ours - torch.tensor(completion.behavior_logprobs.tolist())).exp().tolist()
        removed = removed_tokens(logits, settings)
        if removed is None:
            removed = torch.zeros_like(logits, dtype=torch.bool)
        removed.scatter_(-1, targets[:, None], False)
        shares = logits.masked_fill(removed, -torch.inf).softmax(-1)
        for share, target in zip(shares, targets.tolist(), strict=True):
            # Uniform, where the token was drawn from these shares given all before it.
            above = share[share > share[target]].sum() + chance.random() * share[target]
            counts[min(int(above * BINS), BINS - 1)] += 1
        words = "".join(f"w{token - 2}" for token in completion.token_ids if token > 1)
        stopped = completion.finish_reason is FinishReason.STOP and completion.token_ids[-1] != 1
        assert not request.stop or (stopped is (STOP in words) and STOP not in words[: -len("w9")])
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=1e-3)
    assert max(ratios) < 1.001 and min(ratios) > 0.999
    if len(pairs) > 1:
        mean = sum(counts) / BINS
        assert sum((count - mean) ** 2 / mean for count in counts) < FARTHEST, counts

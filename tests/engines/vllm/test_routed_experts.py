"""A real engine on a CPU returns the experts of each token, in parts, and the trainer's routers take them: the ratio of
trainer to engine is 1 although both choose between experts whose scores are nearly equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from builders.recipe import small_recipe
from msgspec import structs

from streamrl.base.messages import Generate
from streamrl.base.types import (
    Completion,
    FinishReason,
    Prompt,
    ScoredTrajectory,
    Segment,
    TrainingSample,
    Trajectory,
    TrajectoryId,
    to_training_sample,
    token_array,
)
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.resumption import join_completions, resumed_request
from streamrl.engines.vllm.options import engine_options
from streamrl.recipe.sections import Engines, Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.vllm
VOCABULARY, LAYERS, EXPERTS, TOP_K = 32, 3, 16, 3
TOKENS, PROMPTS, SIBLINGS = 160, 4, 6


def write_mixture(directory: Path, tokenizer: Path) -> None:
    """Qwen3-MoE of random weights, in which experts have nearly the same score in pairs, and very different outputs."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, head_dim=32,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.2,
        tie_word_embeddings=False, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight.data
        gate[1::2] = gate[::2]
        gate[1::2, 0] *= 1.02
    model.to(torch.bfloat16).save_pretrained(directory)
    for file in tokenizer.glob("token*.json"):
        shutil.copy(file, directory)


async def sampled(engine: RemoteEngine, request: Generate, cut_after_s: float) -> Completion:
    """A completion that is cut once, and goes on from its tokens."""
    pieces: list[Completion] = []
    while not pieces or pieces[-1].finish_reason is FinishReason.ABORT:
        async with anyio.create_task_group() as group:

            async def cut(asked: Generate) -> None:
                await anyio.sleep(cut_after_s)
                await engine.abort([asked.request_id])

            if not pieces:
                group.start_soon(cut, request)
            pieces.append(await engine.generate(request))
            group.cancel_scope.cancel()
        request = resumed_request(request, pieces[-1], seed=request.seed + 1000, request_id=f"{request.request_id}+")
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = join_completions(whole, piece)
    return whole


async def samples_of(engine: RemoteEngine) -> list[TrainingSample]:
    """Groups of siblings, all sampled at once."""
    found: list[TrainingSample] = []

    async def one(group: int, sample: int) -> None:
        prompt = token_array([(7 * group + 3 * place) % (VOCABULARY - 1) + 1 for place in range(130 + group)])
        request = Generate(
            request_id=f"{group}.{sample}", token_ids=prompt, max_tokens=TOKENS, seed=10 * group + sample,
            temperature=1.0, routed_tokens=0,
        )  # fmt: skip
        done = await sampled(engine, request, 0.2 + 0.1 * sample)
        segment = Segment(
            token_ids=done.token_ids, trained=True, behavior_logprobs=done.behavior_logprobs,
            version_spans=done.version_spans, routed=done.routed,
        )  # fmt: skip
        trajectory = Trajectory(
            id=TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=sample),
            prompt=Prompt(prompt_id=f"p{group}", token_ids=prompt), segments=(segment,),
            finish_reason=done.finish_reason,
        )  # fmt: skip
        found.append(to_training_sample(ScoredTrajectory(trajectory=trajectory, reward=1.0)))

    async with anyio.create_task_group() as tasks:
        for group in range(PROMPTS):
            for sample in range(SIBLINGS):
                tasks.start_soon(one, group, sample)
    return found


def difference(directory: Path, samples: list[TrainingSample]) -> tuple[Any, int]:
    """Trainer's minus engine's logprob of each trained token, and the tokens whose experts are not known."""
    from streamrl.learning.batches.packing import PreparedSample, pack, plan_micro_batches
    from streamrl.learning.model.loading import load_policy

    policy, parts, missing = load_policy(str(directory), torch.device("cpu")), [], 0
    with torch.no_grad():
        for planned in plan_micro_batches([PreparedSample(sample) for sample in samples], 2048):
            row = pack(planned, 0, torch.device("cpu"))
            missing += row.tokens_T.numel() if row.routed is None else row.routed.missing
            logprobs_NV = policy.head(policy(row)).log_softmax(-1)
            parts.append(logprobs_NV.gather(1, row.targets_N[:, None])[:, 0] - row.inputs.behavior_N)
    return torch.cat(parts), missing


@pytest.mark.long
async def test_the_trainer_takes_the_experts_of_the_engine(
    hosted: Callable[..., Any], tiny_model: Path, tmp_path: Path, socket_directory: Path
) -> None:
    write_mixture(tmp_path / "m", tiny_model)
    engines = Engines(max_num_seqs=16, max_model_len=512, dtype="bfloat16")  # the trainer computes in float32
    recipe = small_recipe(str(tmp_path / "m"), engines=engines, sampling=Sampling(max_tokens=TOKENS))
    async with hosted(engine_options(recipe, 0, socket_directory), socket_directory) as (engine, _):
        samples = await samples_of(engine)
    assert any(len(sample.routed) > 1 for sample in samples)  # of two parts
    replayed_N, missing = difference(tmp_path / "m", samples)
    own_N, all_missing = difference(tmp_path / "m", [structs.replace(sample, routed=()) for sample in samples])
    assert missing == 0 < all_missing  # also of what the prefix cache gave
    assert replayed_N.exp().mean() == pytest.approx(1, abs=5e-3)
    assert 5 * replayed_N.exp().std() < own_N.exp().std()

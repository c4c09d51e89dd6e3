"""A real engine on a CPU returns the kept set of each token, and the trainer's ratio to it is 1, whatever tokens the
trainer's logits would keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from builders.recipe import small_recipe
from msgspec import structs

from streamrl.base.messages import Generate
from streamrl.base.types import Completion, KeptSets, TokenDistribution, token_array
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.vllm.options import engine_options
from streamrl.recipe.sections import Engines, Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.vllm
SETTINGS: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01}
]  # fmt: skip
REQUESTS = 24


async def answers(engine: RemoteEngine, requests: list[Generate]) -> list[Completion]:
    found: dict[str, Completion] = {}

    async def ask(request: Generate) -> None:
        found[request.request_id] = await engine.generate(request)

    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(ask, request)
    return [found[request.request_id] for request in requests]


def kept_rows(kept: KeptSets) -> list[list[int]]:
    return [list(kept.within(token, token + 1).token_ids) for token in range(len(kept.counts))]


async def test_the_trainer_keeps_what_the_engine_kept(
    hosted: Callable[..., Any], tiny_model: Path, socket_directory: Path
) -> None:
    from streamrl.learning.objective.logprobs import token_logprobs

    recipe = small_recipe(
        str(tiny_model),
        engines=Engines(max_num_seqs=16, max_model_len=128, dtype="float32"),
        sampling=Sampling(top_k=12, max_tokens=48),
    )
    options = engine_options(recipe, 0, socket_directory)
    assert options.kept_tokens == 20
    requests = [
        Generate(
            request_id=f"{number}", token_ids=token_array([2, 3 + number % 20]), max_tokens=48, seed=number,
            routed_tokens=0, **SETTINGS[number % len(SETTINGS)],
        )
        for number in range(REQUESTS)
    ]  # fmt: skip
    evaluations = [structs.replace(request, request_id=f"e{request.seed}", routed_tokens=None) for request in requests]
    async with hosted(options, socket_directory) as (engine, _):
        sampled = await answers(engine, [*requests, *evaluations])
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    returned = 0
    farthest = 0.0
    for request, done in zip(requests, sampled, strict=False):
        sequence = torch.tensor([*request.token_ids, *done.token_ids])
        tokens = len(done.token_ids)
        with torch.no_grad():
            logits_TV = model(sequence[None]).logits[0, -tokens - 1 : -1]
        rows = kept_rows(done.kept_sets)
        returned += sum(map(bool, rows))
        assert all(token in row for token, row in zip(done.token_ids, rows, strict=True) if row)
        width = max(map(len, rows))
        kept_TK = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        distribution = TokenDistribution(**SETTINGS[request.seed % len(SETTINGS)])
        ours_T, _ = token_logprobs(logits_TV, sequence[-tokens:], distribution, kept_NK=kept_TK)
        farthest = max(farthest, float((ours_T - torch.tensor(done.behavior_logprobs.tolist())).abs().max()))
    total = sum(len(done.token_ids) for done in sampled[:REQUESTS])
    assert returned > 0.9 * total > 300
    assert farthest < 5e-6
    for done, evaluation in zip(sampled, sampled[REQUESTS:], strict=False):
        assert evaluation.token_ids == done.token_ids and not evaluation.kept_sets.counts

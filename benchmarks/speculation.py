"""Speculative decoding by n-grams on the two examples: tokens accepted a step, tokens a second, and the distribution.

    python benchmarks/speculation.py

Chi-square over 50 bins (above 85.4 once in a thousand): likelier tokens' probability plus a part of the own one."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from msgspec import structs

from streamrl.base.concurrent_calls import all_of
from streamrl.base.messages import Generate
from streamrl.engines.vllm.engine import RunEngine
from streamrl.engines.vllm.options import engine_options
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe

NGRAM = 'engines.args.speculative_config={method = "ngram", num_speculative_tokens = 4, prompt_lookup_max = 4}'
TOKENS, BINS, AT_ONCE = 20_000, 50, 128


def sampled(recipe: Any) -> list[Any]:
    """Prompts and completions of one engine, ``AT_ONCE`` at a time until there are ``TOKENS``; prints its speed."""
    tokenizer, pairs = load_tokenizer(recipe.model.path), list[Any]()
    rows = Path(recipe.prompts.train).read_text().splitlines()
    asked = dict(enumerate(tokenizer.encode(json.loads(row)["prompt"]) for row in rows))

    async def ask(engine: RunEngine) -> None:
        while asked and sum(len(completion.token_ids) for _, completion in pairs) < TOKENS:
            seed, ids = asked.popitem()
            request = Generate(request_id=f"{seed}", token_ids=ids, seed=seed, **structs.asdict(recipe.sampling))
            pairs.append((list(ids), await engine.generate(request)))

    async def run(directory: str) -> None:
        options = structs.replace(engine_options(recipe, 0, directory), max_num_seqs=AT_ONCE)
        os.environ.update(options.variables | {"OMP_NUM_THREADS": "1"})
        engine = RunEngine(options)
        await engine.start()
        began_s = time.monotonic()
        await all_of([lambda: ask(engine)] * AT_ONCE)
        load, rate = engine.load(), engine.load().generated_tokens / (time.monotonic() - began_s)
        await engine.aclose()
        drafted, accepted = load.drafted_tokens / load.decode_tokens, load.accepted_tokens / load.decode_tokens
        print(f"{recipe.run.name}: {rate:.0f} tokens/s, {drafted:.3f} drafted and {accepted:.3f} accepted a step")

    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        anyio.run(run, directory)
    return pairs


def bins_of(recipe: Any, pairs: list[Any]) -> Any:
    """How many of the uniform numbers are in each bin, a tensor; prints what it finds."""
    import torch  # its threads must not be there when an engine forks
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32)
    bins, ratios = torch.zeros(BINS), 0.0
    for ids, completion in pairs:
        sequence = torch.tensor([*ids, *completion.token_ids])
        with torch.no_grad():
            shares = model(sequence[None]).logits[0, len(ids) - 1 : -1].softmax(-1)
        own = shares.gather(1, sequence[len(ids) :, None])[:, 0]
        ratios += float((own.log() - torch.tensor(completion.behavior_logprobs.tolist())).exp().sum())
        bins += torch.histc((shares * (shares > own[:, None])).sum(-1) + torch.rand(len(own)) * own, BINS, 0, 1)
    square = float(((bins - bins.mean()) ** 2 / bins.mean()).sum())
    print(f"  {int(bins.sum())} tokens: chi-square {square:.1f}, mean exp(trainer - engine) {ratios / bins.sum():.7f}")
    return bins


if __name__ == "__main__":
    examples = [Path(__file__).parents[1] / "examples" / name / "recipe.toml" for name in ("sort", "heavy")]
    recipes = [load_recipe(path, own) for path in examples for own in ([], [NGRAM])]
    found = [(recipe, sampled(recipe)) for recipe in recipes]
    all_bins = [bins_of(recipe, pairs) for recipe, pairs in found]
    for (recipe, _), a, b in zip(found[::2], all_bins[::2], all_bins[1::2], strict=True):
        share = (b.sum() / a.sum()) ** 0.5
        print(f"{recipe.run.name}: against each other {((a * share - b / share) ** 2 / (a + b)).sum():.1f}")

"""Does an engine answer the same with each of its changes to vLLM on and off, whatever is done to its requests?

    python benchmarks/engine_identity.py --completions 10000

The reference is an engine without the changes that samples every request at once. Each variant then samples the same
requests while random ones are aborted and asked again with their tokens kept (cuts, verified deferred prompts), the
engine is paused (requests kept with and without their cache, or all aborted) and gets new versions that hold the same
weights. Token ids must be equal, logprobs within 1e-5, version labels without a gap. Prints what differs; exit code 1
if anything does."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np

from streamrl.base.messages import Generate, PauseMode, WeightAnnouncement
from streamrl.base.seeds import derive_seed
from streamrl.base.types import Completion, FinishReason, token_array
from streamrl.engines.async_llm.worker import KERNELS_VARIABLE
from streamrl.engines.resumption import with_unverified_tokens
from streamrl.engines.vllm.engine import RunEngine
from streamrl.engines.vllm.held_outputs import HELD_VARIABLE
from streamrl.engines.vllm.options import engine_options
from streamrl.engines.vllm.sampler_patches import NUMBERS_VARIABLE
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher

DEMO = Path(__file__).parents[1] / "examples" / "sort" / "recipe.toml"
OFF = dict.fromkeys((HELD_VARIABLE, KERNELS_VARIABLE, NUMBERS_VARIABLE), "stock")
LOGPROB_TOLERANCE = 1e-5
VARIANTS: dict[str, dict[str, str]] = {
    "plain": OFF,
    **{f"only {name}": {other: value for other, value in OFF.items() if other != name} for name in OFF},
    "all": {},
}


class Trial:
    """One engine, its requests and what came of them."""

    def __init__(self, engine: RunEngine, publisher: WeightPublisher, bits: dict[str, Any], count: int) -> None:
        recipe = load_recipe(DEMO)
        tokenizer, chance = load_tokenizer(recipe.model.path), random.Random(7)
        self.engine, self.publisher, self.bits = engine, publisher, bits
        self.version = -1
        self.counts: Counter[str] = Counter()
        self.done: dict[int, Completion] = {}
        self.open: dict[str, int] = {}
        self.requests = [
            Generate(
                request_id=str(number),
                token_ids=token_array(
                    tokenizer.encode("".join(str(chance.randint(0, 9)) for _ in range(chance.randint(3, 9))) + ":")
                ),
                max_tokens=recipe.sampling.max_tokens,
                seed=derive_seed(5, "identity", number),
                temperature=1.0,
            )
            for number in range(count)
        ]

    async def push(self) -> None:
        """The same weights as another version. The engine must be paused."""
        self.version += 1
        published = self.publisher.publish(self.version, self.bits)
        announcement = WeightAnnouncement(
            policy_version=self.version,
            base_version=published.base_version,
            state_hash=published.state_hash,
            sources=(published.source,),
        )
        await self.engine.stage(announcement)
        await self.engine.commit(self.version)
        self.publisher.acknowledge(self.version)

    async def run(self, *, disturbed: bool) -> None:
        await self.engine.pause(PauseMode.KEEP, clear_cache=True)
        await self.push()
        await self.engine.resume()
        finished = anyio.Event()
        async with anyio.create_task_group() as tasks:
            if disturbed:
                tasks.start_soon(self.disturb, finished)
            limit = anyio.CapacityLimiter(384)  # more than run at once
            async with anyio.create_task_group() as asking:
                for number, request in enumerate(self.requests):
                    asking.start_soon(self.ask, number, request, limit)
            finished.set()

    async def ask(self, number: int, request: Generate, limit: anyio.CapacityLimiter) -> None:
        """Ask until the request has ended; what an abort returned is kept."""
        async with limit:
            asked, attempt, kept = request, 0, token_array([])
            while True:
                name = f"{number}-{attempt}"
                self.open[name] = number
                completion = await self.engine.generate(msgspec.structs.replace(asked, request_id=name))
                del self.open[name]
                if completion.finish_reason is not FinishReason.ABORT:
                    break
                self.counts["aborted"] += 1
                if len(completion.token_ids) > len(kept):  # an abort while kept tokens are verified returns none
                    kept = completion.token_ids
                self.counts["tokens kept"] += len(kept)
                asked, attempt = with_unverified_tokens(request, kept), attempt + 1
            self.done[number] = completion

    async def streamed(self) -> float:
        """How many outputs vLLM gives for the first request where it asks for tokens as they come."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        first, known = self.requests[0], self.done[0].token_ids
        ends = {} if self.done[0].finish_reason is FinishReason.LENGTH else {"stop_token_ids": [known[-1]]}
        params = SamplingParams(
            seed=first.seed, max_tokens=first.max_tokens, output_kind=RequestOutputKind.DELTA, detokenize=False, **ends
        )
        prompt = {"type": "token", "prompt_token_ids": list(first.token_ids)}
        parts = [part.outputs[0].token_ids async for part in self.engine.front_end.generate(prompt, params, "streams")]
        if [token for part in parts for token in part] != list(known):
            raise SystemExit(f"a request that streams got {parts}, not {list(known)}")
        return len(parts)

    async def disturb(self, finished: anyio.Event) -> None:
        chance = random.Random(11)
        while not finished.is_set():
            await anyio.sleep(chance.uniform(0.1, 1.5))
            if chance.random() < 0.5:
                await self.engine.abort(chance.sample(sorted(self.open), min(len(self.open), 24)))
                continue
            mode = chance.choice((PauseMode.KEEP, PauseMode.KEEP, PauseMode.KEEP, PauseMode.ABORT))
            await self.engine.pause(mode, clear_cache=chance.random() < 0.5)
            self.counts[f"pause {mode}"] += 1
            if chance.random() < 0.5:
                await self.push()
                self.counts["push"] += 1
            await self.engine.resume()


class Answer(msgspec.Struct):
    """One completion, in types that are sent as they are; ``spans``: (start, end, policy version)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: list[tuple[int, int, int]]


def answer_of(completion: Completion) -> Answer:
    return Answer(
        list(completion.token_ids),
        list(completion.behavior_logprobs),
        completion.finish_reason.value,
        [(span.start, span.end, span.policy_version) for span in completion.version_spans],
    )


async def answers(count: int, *, disturbed: bool) -> tuple[dict[str, float], list[Answer]]:
    """What an engine answers, and what was done to it."""
    import torch
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        options = engine_options(load_recipe(DEMO), 0, directory)
        os.environ.update(options.variables | {"OMP_NUM_THREADS": "1"})
        tensors = load_file(Path(options.model_path) / "model.safetensors")
        bits = {n: t.bfloat16().flatten().view(torch.int16).numpy().view(np.uint16) for n, t in tensors.items()}
        shards = [
            ShardSpec(name=name, dtype="bfloat16", shape=tuple(t.shape), offset=0, count=t.numel())
            for name, t in tensors.items()
        ]
        engine = RunEngine(options)
        publisher = WeightPublisher(f"ipc://{directory}/w", run_id="identity", rank=0, shards=shards)
        publisher.start()
        try:
            await engine.start()
            trial = Trial(engine, publisher, bits, count)
            began, cpu = time.monotonic(), os.times()
            await trial.run(disturbed=disturbed)
            spent = os.times()
            summary = {
                "outputs of a request that streams": await trial.streamed(),
                "seconds": time.monotonic() - began,
                "host CPU s": spent.user + spent.system - cpu.user - cpu.system,
                **trial.counts,
            }
        finally:
            await engine.aclose()
            publisher.close()
    return summary, [answer_of(trial.done[number]) for number in range(count)]


def differences(reference: list[Answer], found: list[Answer]) -> list[str]:
    """What differs, a line each."""
    faults = []
    for number, (one, other) in enumerate(zip(reference, found, strict=True)):
        ends, versions = [0, *(end for _, end, _ in other.spans)], [version for *_, version in other.spans]
        if one.token_ids != other.token_ids or one.finish_reason != other.finish_reason:
            faults.append(f"completion {number}: other tokens or another end")
        elif (far := np.abs(np.subtract(one.logprobs, other.logprobs)).max(initial=0)) > LOGPROB_TOLERANCE:
            faults.append(f"completion {number}: logprobs differ by {far:.1e}")
        if [start for start, *_ in other.spans] != ends[:-1] or ends[-1] != len(other.token_ids):
            faults.append(f"completion {number}: version labels with a gap: {other.spans}")
        if versions != sorted(versions):
            faults.append(f"completion {number}: an older version after a newer one: {other.spans}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--disturbed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        made = anyio.run(partial(answers, arguments.completions, disturbed=arguments.disturbed))
        arguments.serve.write_bytes(msgspec.msgpack.encode(made))
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        reference: list[Answer] = []
        for name, disturbed in [("plain", False), *((variant, True) for variant in arguments.variants)]:
            path = Path(directory) / "completions"
            command = [sys.executable, __file__, "--serve", str(path), "--completions", str(arguments.completions)]
            subprocess.run([*command, *["--disturbed"] * disturbed], check=True, env=os.environ | VARIANTS[name])
            summary, found = msgspec.msgpack.decode(path.read_bytes(), type=tuple[dict[str, float], list[Answer]])
            reference = reference or found
            faults = differences(reference, found)
            wrong += len(faults)
            figures = {key: round(value, 1) for key, value in summary.items()}
            print(f"{name}, {'disturbed' if disturbed else 'at once'}: {len(faults)} differ; {json.dumps(figures)}")
            print("".join(f"  {fault}\n" for fault in faults[:5]), end="", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

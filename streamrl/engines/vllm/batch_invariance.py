"""Check of batch invariance: whether an engine samples the same bits for a request, however many others run beside it.

The controller runs the check at the start of a deterministic run (``launch.sampling``), through the engine pool. Most
engines fail it, since kernels choose the order of additions by the size of the batch; the demo's model on one thread of
a CPU passes. Engines that fail get one request at a time in such a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import asdict, replace

from streamrl.base.concurrent_calls import all_of
from streamrl.base.messages import Generate
from streamrl.base.seeds import derive_seed
from streamrl.base.types import Completion, TokenArray
from streamrl.contracts import Sampler
from streamrl.recipe.sections import Sampling

PROBES = 16
PROBE_TOKENS = 64


async def batch_invariant(engine: Sampler, prompts: Sequence[TokenArray], sampling: Sampling) -> bool:
    """Sample ``PROBES`` completions one by one, then all at once, and return whether tokens and logprobs are the same,
    bit for bit. Raises ``EngineError`` and ``RequestRefused``."""
    sampling_fields = asdict(replace(sampling, max_tokens=PROBE_TOKENS, min_tokens=0))
    requests = [
        Generate(
            request_id=f"probe-{number}",
            token_ids=prompts[number % len(prompts)],
            seed=derive_seed(0, "batch invariance", number),
            **sampling_fields,
        )
        for number in range(PROBES)
    ]
    alone = [await engine.generate(request) for request in requests]
    together = await all_of([partial(engine.generate, request) for request in requests])
    return [_bits(completion) for completion in alone] == [_bits(completion) for completion in together]


def _bits(completion: Completion) -> tuple[bytes, bytes]:
    return completion.token_ids.tobytes(), completion.behavior_logprobs.tobytes()

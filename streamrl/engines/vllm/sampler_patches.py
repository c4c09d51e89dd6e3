"""Patches of the sampler of vLLM's CPU worker, which the plugin applies in each worker process of an engine.

1. One prefill verifies the unverified tokens of a request (``resumption``).
2. A seeded request can start at token n of its random numbers.
3. Random numbers are drawn in blocks.
4. Drafted tokens get the temperature of their request.

They replace three methods and a function of vLLM 0.32. The first two act only on requests with our arguments
(``SamplingParams.extra_args``), which ``engines.vllm.engine`` sets in the engine process.

On a CPU the generator of a request gives one number a token, and the sampler's Gumbel noise is a function of this
number and of the token id (``TopKTopPSampler.forward_cpu``). So the random numbers of any position can be drawn again.
A CUDA sampler draws the noise for the full vocabulary from a generator on the device: there unverified tokens are
replayed (see ``verifies``)."""

from __future__ import annotations

from os import environ
from typing import Any
from weakref import WeakKeyDictionary

from streamrl.base.types import TokenDistribution

COMPARE = "streamrl_compare"
"""Extra argument: number of tokens at the end of the prompt that are compared with the choices of these weights."""

SKIP = "streamrl_skip"
"""Extra argument: number of tokens that were sampled with this seed before."""

FEWEST = "streamrl_fewest"
"""Extra argument beside ``COMPARE``: number of compared tokens, from the first, whose choice must not be an end
token."""

EXPANSION_VARIABLE = "STREAMRL_CPU_EXPANSION"  # "stock": as vLLM does
NUMBERS_VARIABLE = "STREAMRL_CPU_NUMBERS"  # "stock": one number at a time, as vLLM does, to measure against
_AHEAD = 64  # numbers that are drawn at once: 0.1 us each instead of 3
_SEEDS = 2**31  # range of the number that forward_cpu draws for a token
_GREEDY = 1e-5  # vLLM's own bound: a lower temperature counts as 0


def verifies() -> bool:
    """Return whether the worker can draw its noise again. Only vLLM's fused sampler on a CPU can."""
    import torch
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() and hasattr(torch.ops._C, "fused_gumbel_argmax"))


def add_continuation() -> None:
    """Patch this process, of a CPU engine. The plugin calls it before a model runner is made."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner._get_prompt_logprobs_dict, "streamrl_original"):
        return
    vllm_initialise = CachedRequestState.__post_init__
    vllm_score = GPUModelRunner._get_prompt_logprobs_dict

    def initialise(state: Any) -> None:
        vllm_initialise(state)
        skip = _argument(state.sampling_params, SKIP)
        if skip and state.generator is not None:
            _draw(state.generator, skip)

    def score(runner: Any, hidden_states: Any, scheduled: dict[str, int]) -> Any:
        compared = {
            request_id: _choices(runner, runner.requests[request_id], hidden_states)
            for request_id in runner.num_prompt_logprobs
            if request_id in scheduled and _argument(runner.requests[request_id].sampling_params, COMPARE)
        }
        by_request = vllm_score(runner, hidden_states, scheduled)
        for request_id, (choices, logprobs) in compared.items():
            tensors = by_request.get(request_id)
            if tensors is not None:
                # The choices take the place of the ranks of the prompt's tokens, which these requests do not use.
                tensors.selected_token_ranks[-len(choices) :] = choices
                tensors.logprobs[-len(choices) :, 0] = logprobs
        return by_request

    score.streamrl_original = vllm_score  # type: ignore[attr-defined]
    CachedRequestState.__post_init__ = initialise
    GPUModelRunner._get_prompt_logprobs_dict = score
    if environ.get(NUMBERS_VARIABLE) != "stock":
        TopKTopPSampler.forward_cpu = drawn_ahead(TopKTopPSampler.forward_cpu)
    if environ.get(EXPANSION_VARIABLE) != "stock":
        rejection_sampler.expand_batch_to_tokens = expanded


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Repeat the values ``x`` [requests] for each drafted token: [tokens]. ``cu_num_tokens`` [requests]: cumulative
    number of drafted tokens. Values that equal ``replace_from`` become ``replace_to``.

    Replaces vLLM's function on a CPU, where vLLM 0.32 writes temperature, top-k and top-p to a copy in integers and the
    sampler reads uninitialised memory (``cpu_triton_utils._expand_kernel_impl``)."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def drawn_ahead(stock: Any) -> Any:
    """Return a sampler with the same random numbers as ``stock`` (vLLM's ``forward_cpu``), drawn ``_AHEAD`` at a time.
    The numbers are stored by generator, which a request keeps while it waits."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    drawn: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def sample(sampler: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any) -> Any:
        if sampler.use_fp64_gumbel or sampler.logprobs_mode != "processed_logprobs":
            return stock(sampler, logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = torch.randint(0, _SEEDS, (len(logits),), dtype=torch.long)
        numbers = seeds.numpy()
        for row, generator in generators.items():
            ahead = drawn.get(generator)
            if not ahead:
                ahead = _draw(generator, _AHEAD).tolist()[::-1]  # the next number is the last
                drawn[generator] = ahead
            numbers[row] = ahead.pop()
        return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds), logprobs

    return sample


def _argument(params: Any, name: str) -> int:
    arguments = getattr(params, "extra_args", None)
    return int(arguments.get(name, 0)) if arguments else 0


def _draw(generator: Any, count: int) -> Any:
    """Draw the random numbers that ``forward_cpu`` would draw for the next ``count`` tokens: [count]."""
    import torch

    return torch.randint(0, _SEEDS, (count,), generator=generator, dtype=torch.long)


def _choices(runner: Any, request: Any, hidden_states: Any) -> tuple[Any, Any]:
    """Return the choices at the last C tokens of a prompt, the compared ones, and the logprobs of the compared tokens:
    [C] and [C]. The steps are those of ``Sampler.forward``: end tokens, temperature, min-p, top-k, top-p, then logprobs
    and noise."""
    import torch

    from streamrl.learning.objective.logprobs import removed_tokens

    params = request.sampling_params
    tokens = request.prompt_token_ids
    compared = _argument(params, COMPARE)
    # The prefill of such a prompt is complete: it reads no block from the prefix cache, and has no chunks.
    first = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request.req_id]].item()
    last = first + len(tokens) - 1
    logits = runner.model.compute_logits(hidden_states[last - compared : last]).to(torch.float32)
    logits[: max(_argument(params, FEWEST), 0), list(params.stop_token_ids)] = -torch.inf
    greedy = params.temperature < _GREEDY
    if not greedy:
        logits = logits / params.temperature
    settings = {name: getattr(params, name) for name in TokenDistribution.__struct_fields__}
    removed = removed_tokens(logits, TokenDistribution(**settings))
    if removed is not None:
        logits = logits.masked_fill(removed, -torch.inf)
    compared_ids = torch.tensor(tokens[-compared:], dtype=torch.long).unsqueeze(1)
    logprobs = logits.log_softmax(dim=-1).gather(1, compared_ids).squeeze(1)
    if greedy:
        return logits.argmax(dim=-1), logprobs
    seeds = _draw(torch.Generator().manual_seed(params.seed), compared)
    return torch.ops._C.fused_gumbel_argmax(logits.contiguous(), seeds).view(-1), logprobs

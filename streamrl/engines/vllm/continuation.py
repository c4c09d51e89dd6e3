"""Changes to the sampler of vLLM's CPU worker: kept tokens are verified in one prefill, a seeded request starts at
token n, random numbers are drawn in blocks, drafted tokens have the temperature of their request. Three methods and a
function of vLLM 0.32, patched by our plugin in each worker process. The first two changes act only on requests that
carry our arguments (``SamplingParams.extra_args``).

On CPU a request's generator gives one number a token, and the sampler's Gumbel noise is a function of that number and
of the token id (``TopKTopPSampler.forward_cpu``). So the random numbers of any position can be drawn again. A CUDA
sampler draws noise for the whole vocabulary from a generator on the device: there kept tokens are replayed
(``verifies``)."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

COMPARE = "streamrl_compare"
"""Extra argument: so many tokens at the end of the prompt are compared with what would be chosen there."""

SKIP = "streamrl_skip"
"""Extra argument: so many tokens were sampled with this seed before."""

FEWEST = "streamrl_fewest"
"""Extra argument beside ``COMPARE``: none of the first so many of those tokens can be an end token."""

EXPANSION_VARIABLE = "STREAMRL_CPU_EXPANSION"  # "stock": as vLLM does
NUMBERS_VARIABLE = "STREAMRL_CPU_NUMBERS"  # "stock": one number at a time, as vLLM does, to measure against
_AHEAD = 64  # numbers drawn at once: 0.1 us for one, in place of 3
_SEEDS = 2**31  # range of the number that forward_cpu draws for a token
_GREEDY = 1e-5  # vLLM's own bound: below it the temperature is taken to be 0


def verifies() -> bool:
    """Return whether the worker's noise can be had again: vLLM's fused sampler on CPU."""
    import torch
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() and hasattr(torch.ops._C, "fused_gumbel_argmax"))


def add_continuation() -> None:
    """Patch this process. Called by the plugin, before a model runner is made."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner._get_prompt_logprobs_dict, "streamrl_original"):
        return
    initialised = CachedRequestState.__post_init__
    scored = GPUModelRunner._get_prompt_logprobs_dict
    least = MinTokensLogitsProcessor.add_request

    def end_tokens_in_vocabulary(params: Any, *others: Any) -> Any:
        """The tokenizer's own end token may be none that the model has an embedding for: the engine would die."""
        found = least(params, *others)
        return found and (*found[:2], set(params.stop_token_ids), *found[3:])

    def initialise(state: Any) -> None:
        initialised(state)
        skip = _argument(state.sampling_params, SKIP)
        if skip and state.generator is not None:
            _draw(state.generator, skip)

    def score(runner: Any, hidden_states: Any, scheduled: dict[str, int]) -> Any:
        compared = {
            request_id: _choices(runner, runner.requests[request_id], hidden_states)
            for request_id in runner.num_prompt_logprobs
            if request_id in scheduled and _argument(runner.requests[request_id].sampling_params, COMPARE)
        }
        found = scored(runner, hidden_states, scheduled)
        for request_id, (chosen, logprobs) in compared.items():
            tensors = found.get(request_id)
            if tensors is not None:
                # The place of the rank of a prompt token: a number that nothing else is asked for.
                tensors.selected_token_ranks[-len(chosen) :] = chosen
                tensors.logprobs[-len(chosen) :, 0] = logprobs
        return found

    score.streamrl_original = scored  # type: ignore[attr-defined]
    CachedRequestState.__post_init__ = initialise
    MinTokensLogitsProcessor.add_request = staticmethod(end_tokens_in_vocabulary)
    GPUModelRunner._get_prompt_logprobs_dict = score
    if os.environ.get(NUMBERS_VARIABLE) != "stock":
        TopKTopPSampler.forward_cpu = drawn_ahead(TopKTopPSampler.forward_cpu)
    if current_platform.is_cpu() and os.environ.get(EXPANSION_VARIABLE) != "stock":
        rejection_sampler.expand_batch_to_tokens = expanded


def expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """``x`` [requests] for each drafted token: [tokens]; ``cu_num_tokens``: drafted until the end of each request.
    Values that equal ``replace_from`` become ``replace_to``. On a CPU vLLM 0.32 writes temperature, top-k and top-p to
    a copy in integers, and the sampler reads memory that nobody wrote (``cpu_triton_utils._expand_kernel_impl``)."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def drawn_ahead(stock: Any) -> Any:
    """Return ``stock`` (vLLM's ``forward_cpu``) with the same numbers, drawn ``_AHEAD`` at a time. They are kept beside
    the generator, which a request keeps while it waits."""
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
            if not (ahead := drawn.get(generator)):
                ahead = drawn[generator] = _draw(generator, _AHEAD).tolist()[::-1]
            numbers[row] = ahead.pop()
        return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds), logprobs

    return sample


def _argument(params: Any, name: str) -> int:
    arguments = getattr(params, "extra_args", None)
    return int(arguments.get(name, 0)) if arguments else 0


def _draw(generator: Any, count: int) -> Any:
    """Random numbers that ``forward_cpu`` draws for the next ``count`` tokens: [count]."""
    import torch

    return torch.randint(0, _SEEDS, (count,), generator=generator, dtype=torch.long)


def _choices(runner: Any, request: Any, hidden_states: Any) -> tuple[Any, Any]:
    """(choices, logprobs of the kept tokens), each [kept], of the last tokens of a prompt. As ``Sampler.forward``
    treats the tokens that it samples: end tokens, temperature, min-p, top-k, top-p, then logprobs and noise."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    params = request.sampling_params
    tokens = request.prompt_token_ids
    kept = _argument(params, COMPARE)
    # Nothing of such a prompt is read from the prefix cache, nor is it cut into chunks.
    first = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request.req_id]].item()
    last = first + len(tokens) - 1
    logits = runner.model.compute_logits(hidden_states[last - kept : last]).to(torch.float32)
    logits[: max(_argument(params, FEWEST), 0), list(params.stop_token_ids)] = -torch.inf
    greedy = params.temperature < _GREEDY
    if not greedy:
        logits = logits / params.temperature
    if params.min_p > 0:
        probabilities = logits.softmax(dim=-1)
        logits = logits.masked_fill(probabilities < params.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    k = torch.full((kept,), min(params.top_k, logits.shape[-1])) if params.top_k > 0 else None
    p = torch.full((kept,), params.top_p) if params.top_p < 1 else None
    logits = apply_top_k_top_p(logits, k, p)
    there = torch.tensor(tokens[-kept:], dtype=torch.long).unsqueeze(1)
    logprobs = logits.log_softmax(dim=-1).gather(1, there).squeeze(1)
    if greedy:
        return logits.argmax(dim=-1), logprobs
    seeds = _draw(torch.Generator().manual_seed(params.seed), kept)
    return torch.ops._C.fused_gumbel_argmax(logits.contiguous(), seeds).view(-1), logprobs

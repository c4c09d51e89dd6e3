"""vLLM's ``AsyncLLM`` as an ``Engine``. vLLM is imported by ``start``, after the environment is set.

Version labels are strings only here: vLLM's ``weight_version`` becomes ``policy_version``, and ``default``
(weights that the model directory held, never committed by us) becomes ``UNCOMMITTED``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from streamrl.base.errors import EngineError, ModelRefused, RequestRefused, WeightError
from streamrl.base.messages import EngineLoad, EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.resident_thread import ResidentThread
from streamrl.base.types import Completion, FinishReason, TokenArray, VersionSpan, float_array, token_array
from streamrl.engines.resumption import (
    accepted_part,
    accepted_prefix,
    join_completions,
    remaining_tokens,
    resumed_request,
    without_kept,
)
from streamrl.plan.gpus import visible_gpus
from streamrl.vllm.fork import fork_engine_core
from streamrl.vllm.options import EngineOptions, batched_tokens
from streamrl.vllm.processes import ProcessWatch
from streamrl.vllm.statistics import EngineStatistics, kv_tokens, stat_loggers
from streamrl.weights import engine_environment, engine_push

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams

UNCOMMITTED = -1
"""Policy version of weights that no commit gave."""

WATCH_SECONDS = 0.05
SHUTDOWN_SECONDS = 1.0
"""For vLLM to end by itself. A CPU engine never does within its own 5 s, and there is nothing to save."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}

T = TypeVar("T")


class VllmEngine:
    """One ``AsyncLLM`` and its two processes. Run ``watch`` beside it: a dead idle engine says nothing by itself."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._thread = ResidentThread(f"{options.name}-owner")
        self._llm: Any = None
        self._processes: ProcessWatch | None = None
        self._policy_version = UNCOMMITTED
        self._paused = False
        self._pauses = 0
        self._death = ""
        self._calls: set[anyio.CancelScope] = set()
        self._open_requests = 0
        self._statistics = EngineStatistics()
        self._verifying: set[str] = set()
        self._aborted: set[str] = set()

    @property
    def front_end(self) -> Any:
        """vLLM's ``AsyncLLM``, for the judge's routes. Raises ``EngineError`` before ``start``."""
        self._require_alive()
        return self._llm

    async def start(self) -> EngineReady:
        """Load the model (15 to 45 s on CPU). Raises ``EngineError`` when vLLM does not start."""
        os.environ.update(self._options.environment)
        os.environ.update(engine_environment())
        try:
            self._llm = await self._thread.call(lambda: _build(self._options, self._statistics))
        except ModelRefused:
            raise
        except Exception as error:
            raise EngineError(
                f"{self._options.name}: vLLM could not load {self._options.model_path}: {error};"
                " the log of its EngineCore process says more"
            ) from error
        self._processes = ProcessWatch()
        await self._llm.get_supported_tasks()  # cached by vLLM; every request needs it
        return EngineReady(
            engine=self._options.name,
            policy_version=self._policy_version,
            max_model_len=self._options.max_model_len,
            max_num_seqs=self._options.max_num_seqs,
            tokenizer_digest=await anyio.to_thread.run_sync(_tokenizer_digest, self._options.model_path),
            kv_tokens=kv_tokens(self._llm),
        )

    async def watch(self) -> None:
        """Return never; raise ``EngineError`` naming the process that died, after failing every pending call."""
        while True:
            cause = self._processes.first_death() if self._processes else None
            if cause or (self._llm is not None and self._llm.errored):
                raise self._die(cause)
            await anyio.sleep(WATCH_SECONDS)

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion. Raises ``RequestRefused`` (this request only) or ``EngineError``."""
        if remaining_tokens(request) == 0:
            return _empty(FinishReason.LENGTH)
        self._open_requests += 1
        try:
            if request.scored:
                return await self._given(request)
            if request.kept:
                return await self._verified(request)
            return _completion(await self._sampled(request))
        finally:
            self._open_requests -= 1

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask for requests to stop; each returns what it has."""
        self._aborted.update(self._verifying.intersection(request_ids))
        await self._unless_dead(lambda: self._llm.abort(list(request_ids)))

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling. ``clear_cache`` with ``keep``: requests in flight are recomputed when resumed."""
        # Counted before the call: what is submitted from here on reaches vLLM after it, and runs after ``resume``.
        self._pauses += 1
        await self._unless_dead(lambda: self._llm.pause_generation(mode=mode.value, clear_cache=clear_cache))
        self._paused = True
        self._statistics.paused(clear_cache=clear_cache and mode is PauseMode.KEEP)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._unless_dead(self._llm.resume_generation)
        self._paused = False

    async def sleep(self) -> None:
        """Give the device's memory back, with the weights in host memory; nothing may be asked of it until ``wake``.
        CUDA only."""
        self._pauses += 1
        await self._unless_dead(lambda: self._llm.sleep(level=1))
        self._paused = True

    async def wake(self) -> None:
        """Take the device's memory again. What it holds must be brought to the live version before it samples."""
        await self._unless_dead(self._llm.wake_up)
        self._paused = False

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Fetch, check and decode on the worker while it generates."""
        return await self._unless_dead(lambda: engine_push.stage(self._llm, announcement))

    async def commit(self, policy_version: int) -> OrderDone:
        """Apply the staged version to the live weights of the paused engine."""
        if not self._paused:
            raise WeightError(f"{self._options.name}: commit of version {policy_version} while sampling; pause first")
        done = await self._unless_dead(lambda: engine_push.commit(self._llm, policy_version))
        self._policy_version = policy_version
        return done

    async def checksums(self) -> dict[str, str]:
        """vLLM's checksum of every live parameter, of all its workers under one name each."""
        parts = await self._unless_dead(self._llm.compute_weight_checksums)
        return merge_checksums(parts)

    def load(self) -> EngineLoad:
        """What vLLM's scheduler said last, at most one decode step ago; while paused all requests wait."""
        return self._statistics.load(open_requests=self._open_requests, paused=self._paused)

    async def aclose(self) -> None:
        """Stop vLLM and wait for its processes."""
        llm, self._llm = self._llm, None
        with anyio.CancelScope(shield=True):
            if llm is not None:
                await self._thread.call(partial(llm.shutdown, timeout=SHUTDOWN_SECONDS))
                llm.shutdown = bool  # its __del__ calls it again: at the end of the process that is an error on stderr
            del llm
            self._thread.close()
            if self._processes is not None:
                await anyio.to_thread.run_sync(self._processes.end_all)

    async def _sampled(self, request: Generate, **changes: Any) -> CompletionOutput:
        return (await self._unless_dead(lambda: self._final_output(request, **changes), refusable=True)).outputs[0]

    async def _given(self, request: Generate) -> Completion:
        """The last ``scored`` tokens, with their logprobs: one prefill, and one token that is not answered."""
        output = await self._unless_dead(
            lambda: self._final_output(request, max_tokens=1, prompt_logprobs=0), refusable=True
        )
        sampled = _completion(output.outputs[0])
        if not sampled.token_ids:
            return _empty(FinishReason.ABORT)
        tokens = request.token_ids[-request.scored :]
        logprobs = output.prompt_logprobs.logprobs[-request.scored :]
        return accepted_part(tokens, logprobs, request.scored, sampled.version_spans[0].policy_version)

    async def _verified(self, request: Generate) -> Completion:
        """First one prefill that says which of the kept tokens hold; from there the engine samples on, with the noise
        of that place. What is aborted before the first is over has sampled nothing."""
        from streamrl.vllm import continuation

        whole = without_kept(request)
        longest = self._options.max_model_len - 1 - len(whole.token_ids)
        kept = min(request.kept, longest, remaining_tokens(request))
        if kept <= 0 or not continuation.verifies():
            return _completion(await self._sampled(whole))
        tokens = request.token_ids[len(whole.token_ids) :][:kept]
        self._verifying.add(request.request_id)
        try:
            accepted = await self._scored(whole, tokens)
            if request.request_id in self._aborted:
                return accepted
        finally:
            self._verifying.discard(request.request_id)
            self._aborted.discard(request.request_id)
        held = len(accepted.token_ids)
        rest = resumed_request(whole, accepted, seed=request.seed)
        if remaining_tokens(rest) == 0:
            return msgspec.structs.replace(accepted, finish_reason=FinishReason.LENGTH)
        arguments = {continuation.SKIP: held} if held else None
        return join_completions(accepted, _completion(await self._sampled(rest, extra_args=arguments)))

    async def _scored(self, whole: Generate, tokens: TokenArray) -> Completion:
        """The part of ``tokens`` that these weights choose, too, as what was sampled so far."""
        from streamrl.vllm import continuation

        asked = msgspec.structs.replace(whole, token_ids=whole.token_ids + tokens)
        comparing: dict[str, Any] = {"extra_args": {continuation.COMPARE: len(tokens)}, "prompt_logprobs": 0}
        pauses = -1
        while pauses != self._pauses:  # the weights may have changed since: what is in flight now is not affected
            pauses = self._pauses
            output = await self._unless_dead(
                lambda: self._final_output(asked, max_tokens=1, **comparing), refusable=True
            )
            if output.outputs[0].finish_reason == "abort":
                self._aborted.add(whole.request_id)
                return _empty(FinishReason.ABORT)
        flat = output.prompt_logprobs
        held = accepted_prefix(tokens, flat.ranks[-len(tokens) :])
        version = _completion(output.outputs[0]).version_spans[0].policy_version
        return accepted_part(tokens, flat.logprobs[-len(tokens) :], held, version)

    async def _final_output(self, request: Generate, **changes: Any) -> RequestOutput:
        # Weights change only while paused, so the blocks of one salt were all computed by one version. A version's name
        # would not do: what is submitted while paused does not know which version it will be computed by.
        prompt = {"type": "token", "prompt_token_ids": request.token_ids.tolist(), "cache_salt": str(self._pauses)}
        final: RequestOutput | None = None
        async for output in self._llm.generate(prompt, _sampling_params(request, **changes), request.request_id):
            final = output
        if final is None:
            raise EngineError(f"{self._options.name}: request {request.request_id} ended without an output")
        return final

    async def _unless_dead(self, call: Callable[[], Awaitable[T]], *, refusable: bool = False) -> T:
        """Await ``call``; when the engine dies meanwhile raise ``EngineError``, also where vLLM would wait for ever."""
        self._require_alive()
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await call()
            except Exception as error:
                raise self._translated(error, refusable) from error
            finally:
                self._calls.discard(scope)
        raise EngineError(self._death or f"{self._options.name}: the call was cancelled")

    def _require_alive(self) -> None:
        if self._death:
            raise EngineError(self._death)
        if self._llm is None:
            raise EngineError(f"{self._options.name}: not started, or closed")

    def _translated(self, error: Exception, refusable: bool) -> Exception:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            return self._die(self._processes.first_death() if self._processes else None)
        if refusable and isinstance(error, (VLLMClientError, ValueError)):
            return RequestRefused(f"{self._options.name}: {error}")
        if isinstance(error, (WeightError, EngineError)):
            return error
        return EngineError(f"{self._options.name}: {type(error).__name__}: {error}")

    def _die(self, cause: str | None) -> EngineError:
        if not self._death:
            reason = cause or "vLLM's EngineCore reported a fatal error; its log says which"
            self._death = f"{self._options.name}: {reason}"
            for scope in tuple(self._calls):
                scope.cancel()
        return EngineError(self._death)


def merge_checksums(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    """Checksums of all workers: a lone worker keeps its names, several are distinguished by a prefix."""
    if len(parts) == 1:
        return dict(parts[0])
    return {f"worker{rank}.{name}": digest for rank, part in enumerate(parts) for name, digest in part.items()}


def engine_config(options: EngineOptions) -> Any:
    """vLLM's configuration of the engine. Raises ``ModelRefused`` if vLLM rejects the configuration."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    device_arguments: dict[str, Any] = {"gpu_memory_utilization": options.gpu_memory_utilization}
    if options.on_cpu:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        device_arguments = {
            # One process computes and schedules. With vLLM's default two of them spin for each other on every token,
            # which on two cores costs a quarter of the step and 430 MB. A class is taken as it is; "uni" is not.
            "distributed_executor_backend": UniProcExecutor if options.workers == 1 else "mp",
            "enforce_eager": True,
            # A partial prefill rewinds the request's generator, which CPU generators cannot do: the engine dies.
            "enable_chunked_prefill": False,
        }
    if options.cache_blocks:
        device_arguments |= {"block_size": options.block_tokens, "num_gpu_blocks_override": options.cache_blocks}
    arguments = AsyncEngineArgs(
        model=options.model_path,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=batched_tokens(options, max((gpu.memory for gpu in visible_gpus()), default=0)) or None,
        tensor_parallel_size=options.workers,
        enable_sleep_mode=options.sleeps,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend="streamrl") if options.pushed else None,
        **device_arguments,
    )
    try:
        config = arguments.create_engine_config()
    except ValueError as error:
        raise ModelRefused(f"{options.name}: {_why_refused(options, str(error))}") from error
    if options.on_cpu and not config.model_config.use_mla:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size, sizes = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:  # vLLM would otherwise crash on the first request
            raise ModelRefused(f"the model has attention heads of {size}, and vLLM on a CPU serves only {sizes}")
    return config


def _why_refused(options: EngineOptions, said: str) -> str:
    """In one sentence, with what to set where that is known."""
    if found := re.search(r"derived max_model_len \(\w+=(\d+)", said):
        key = "engines.max_model_len" if options.pushed else "judge.advanced.max_model_len"
        return f"the model has {found[1]} positions, and {options.max_model_len} are asked for: set {key} = {found[1]}"
    return f"vLLM cannot serve {options.model_path}: {said}"


def _build(options: EngineOptions, statistics: EngineStatistics) -> Any:
    from vllm.envs import enable_envs_cache
    from vllm.v1.engine.async_llm import AsyncLLM

    config = engine_config(options)
    fork_engine_core(spawn_workers=options.on_cpu)
    # Its own loggers off; a factory of ours turns the statistics on.
    llm = AsyncLLM.from_vllm_config(config, stat_loggers=stat_loggers(statistics), disable_log_stats=True)
    # Its statistics look up an environment variable for every token, which without the cache is three quarters of their
    # cost (3.2 against 0.7 us a token). vLLM's own processes turn it on when they are ready.
    enable_envs_cache()
    return llm


def _tokenizer_digest(model_path: str) -> str:
    from streamrl.prompts.tokenizer import load_tokenizer

    return load_tokenizer(model_path).digest


def _sampling_params(request: Generate, **changes: Any) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    arguments: dict[str, Any] = {
        "n": 1,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "max_tokens": remaining_tokens(request),
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,
    }
    return SamplingParams(**(arguments | changes))


def _empty(reason: FinishReason) -> Completion:
    return Completion(token_ids=token_array(), behavior_logprobs=float_array(), finish_reason=reason, version_spans=())


def _completion(output: CompletionOutput) -> Completion:
    """vLLM's output as ours. Raises ``EngineError`` when a token has no logprob, no version, or no known end."""
    token_ids = token_array(output.token_ids)
    flat = output.logprobs
    logprobs = float_array([flat.logprobs[start] for start in flat.start_indices] if flat is not None else ())
    reason = _FINISH.get(output.finish_reason or "")
    if reason is None:
        raise EngineError(f"vLLM ended a request with finish_reason {output.finish_reason!r}; expected {list(_FINISH)}")
    spans = tuple(
        VersionSpan(start=span.start, end=span.end, policy_version=_policy_version(span.version))
        for span in output.weight_versions or ()
        if span.end > span.start
    )
    covered = sum(span.end - span.start for span in spans)
    if len(logprobs) != len(token_ids) or covered != len(token_ids):
        raise EngineError(
            f"vLLM returned {len(token_ids)} tokens with {len(logprobs)} logprobs and version labels for {covered}"
        )
    return Completion(token_ids=token_ids, behavior_logprobs=logprobs, finish_reason=reason, version_spans=spans)


def _policy_version(label: str) -> int:
    return UNCOMMITTED if label == "default" else int(label)

"""Calls to vLLM's ``AsyncLLM`` as those of an ``Engine``: requests, pauses, pushes, and the end.

``engines.vllm`` derives the engine of a run and of its judge from it, in their processes. vLLM is imported by
``start``, after its environment variables are set.

vLLM's ``weight_version``, a string, becomes ``policy_version`` here. Its label ``default``, for the weights of the
model directory, becomes ``UNCOMMITTED``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from os import environ
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CancelScope, sleep
from msgspec.structs import replace

from streamrl.base.dedicated_thread import DedicatedThread
from streamrl.base.errors import EngineError, ModelRefused, RequestRefused, WeightError
from streamrl.base.messages import EngineLoad, EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.types import (
    NO_KEPT_SETS,
    CachedPrefix,
    Completion,
    FinishReason,
    KeptSets,
    RoutedTokens,
    SamplingSettings,
    TextsByName,
    VersionSpan,
    count_array,
    float_array,
    token_array,
)
from streamrl.engines.async_llm.options import VllmOptions, unset_service_address
from streamrl.engines.async_llm.stop_strings import BEFORE, find_across_parts
from streamrl.engines.resumption import accepted_part, empty_completion, remaining_tokens
from streamrl.pretrained.tokenizer import end_tokens
from streamrl.weights import engine_push

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams

UNCOMMITTED = -1
"""Policy version of weights that were never committed."""

WATCH_SECONDS = 0.05
SHUTDOWN_SECONDS = 1.0
"""Time limit for vLLM's shutdown. An engine on a CPU never ends within vLLM's own 5 s, and has nothing to save."""
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}

T = TypeVar("T")


class VllmEngine(ABC):
    """One ``AsyncLLM`` and its processes."""

    def __init__(self, options: VllmOptions) -> None:
        self._name = options.name
        self._vllm_options = options
        self._thread = DedicatedThread(f"{options.name}-owner")
        self._llm: Any = None
        self._policy_version = UNCOMMITTED
        self._paused = False
        self._pauses = 0
        self._death = ""
        self._calls: set[CancelScope] = set()
        self._end_tokens: tuple[int, ...] = ()
        self._block_tokens = 1
        self._open_requests = 0
        self._generated_tokens = 0
        self._adapter: Any = None

    async def start(self) -> EngineReady:
        """Load the model (15 to 45 s on CPU). Raises ``EngineError`` when vLLM does not start."""
        environ.update(self._vllm_options.variables)
        unset_service_address()
        self._end_tokens = (await self._thread.call(partial(end_tokens, self._vllm_options.model_path))).ids
        try:
            self._llm = await self._thread.call(self._build)
            bound_end_tokens(self._llm)
            find_across_parts()
        except ModelRefused:
            raise
        except Exception as error:
            raise EngineError(
                f"{self._name}: vLLM could not load {self._vllm_options.model_path}: {error};"
                " the log of its EngineCore process says more"
            ) from error
        await self._llm.get_supported_tasks()  # cached by vLLM; every request needs it
        self._block_tokens = self._llm.vllm_config.cache_config.block_size
        return EngineReady(
            engine=self._name,
            policy_version=self._policy_version,
            max_model_len=self._vllm_options.max_model_len,
            max_num_seqs=self._vllm_options.max_num_seqs,
        )

    async def watch(self) -> None:
        """Return never; raise ``EngineError`` when the engine died, after failing every pending call. Without a watch
        the death of an idle engine stays unnoticed."""
        while True:
            cause = self._cause_of_death()
            if cause or (self._llm is not None and self._llm.errored):
                raise self._die(cause)
            await sleep(WATCH_SECONDS)

    async def generate(self, request: Generate) -> Completion:
        if remaining_tokens(request) == 0:
            return empty_completion(FinishReason.LENGTH)
        self._open_requests += 1
        try:
            completion = await (self._score(request) if request.scored_tokens else self._answer(request))
        finally:
            self._open_requests -= 1
        self._generated_tokens += len(completion.token_ids)
        return completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._unless_dead(lambda: self._llm.abort(list(request_ids)))

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling. With ``PauseMode.KEEP`` and ``clear_cache`` the requests in flight are recomputed after
        ``resume``."""
        # Counted before the call: later requests reach vLLM after it, and run after ``resume``.
        self._pauses += 1
        await self._unless_dead(lambda: self._llm.pause_generation(mode=mode.value, clear_cache=clear_cache))
        self._paused = True

    async def resume(self) -> None:
        await self._unless_dead(self._llm.resume_generation)
        self._paused = False

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        return await self._unless_dead(lambda: engine_push.stage(self._llm, announcement))

    async def commit(self, policy_version: int) -> OrderDone:
        if not self._paused:
            raise WeightError(f"{self._name}: commit of version {policy_version} while sampling; pause first")
        answer = await self._unless_dead(lambda: engine_push.commit(self._llm, policy_version))
        self._policy_version = policy_version
        return answer

    async def checksums(self) -> TextsByName:
        """Return vLLM's checksum of every live parameter, by name. With several workers each name has the prefix of its
        worker, such as ``worker0.``."""
        by_worker = await self._unless_dead(self._llm.compute_weight_checksums)
        if len(by_worker) == 1:
            return dict(by_worker[0])
        return {
            f"worker{rank}.{name}": digest
            for rank, checksums in enumerate(by_worker)
            for name, digest in checksums.items()
        }

    def load(self) -> EngineLoad:
        """Return the load of the engine now. vLLM's own statistics are not read."""
        running = 0 if self._paused else self._open_requests
        generated_tokens = self._generated_tokens
        if self._llm is not None:
            states = self._llm.output_processor.request_states.values()
            generated_tokens += sum(state.detokenizer.num_output_tokens() for state in states)
        return EngineLoad(
            running=running,
            waiting=self._open_requests - running,
            kv_cache_usage=0.0,
            generated_tokens=generated_tokens,
        )

    async def aclose(self) -> None:
        llm = self._llm
        self._llm = None
        with CancelScope(shield=True):
            if llm is not None:
                await self._thread.call(partial(llm.shutdown, timeout=SHUTDOWN_SECONDS))
                # ``AsyncLLM.__del__`` calls shutdown again, which at the end of the process prints an error.
                llm.shutdown = bool
            del llm
            self._thread.close()

    @abstractmethod
    def _build(self) -> Any:
        """Make the ``AsyncLLM``, in the engine's own thread. Raises ``ModelRefused`` for a model that vLLM refuses."""

    @abstractmethod
    async def _answer(self, request: Generate) -> Completion:
        """Sample ``request``, whose unverified tokens may be accepted or sampled again."""

    async def _sample(self, request: Generate, **changes: Any) -> Completion:
        """Sample ``request``. ``changes``: parameters of vLLM's ``SamplingParams`` that replace ours."""
        pauses = self._pauses  # read before the first await: the same number as in the cache salt of the request
        self._require_alive()
        vocabulary = self._llm.model_config.get_vocab_size()
        returns_sets = self._vllm_options.kept_tokens and request.removes_tokens and request.routed_tokens is not None
        if returns_sets and not request.stop:  # with texts that stop it vLLM makes a text of each token of a set
            # The one after the largest set says whether the set is whole.
            changes["logprobs"] = min(self._vllm_options.kept_tokens + 1, vocabulary)
        output = await self._output(request, **changes)
        completion = replace(
            completion_of(output.outputs[0]),
            routed=routed_of(request, output.outputs[0]),
            kept_sets=kept_sets_of(output.outputs[0].logprobs, vocabulary),
        )
        if not self._vllm_options.prefix_caching:
            return completion
        tokens = output.num_cached_tokens or 0
        block = self._block_tokens
        return replace(completion, cached=CachedPrefix(tokens=tokens, block_tokens=block, pauses=pauses))

    async def _score(self, request: Generate) -> Completion:
        """Return the last ``scored_tokens`` tokens of ``request`` with their logprobs. vLLM runs one prefill and
        samples one token, which is dropped."""
        output = await self._output(request, max_tokens=1, prompt_logprobs=0)
        sampled = completion_of(output.outputs[0])
        if not sampled.token_ids:
            return empty_completion(FinishReason.ABORT)
        tokens = request.token_ids[-request.scored_tokens :]
        logprobs = output.prompt_logprobs.logprobs[-request.scored_tokens :]
        return accepted_part(tokens, logprobs, request.scored_tokens, sampled.version_spans[0].policy_version)

    async def _output(self, request: Generate, **changes: Any) -> RequestOutput:
        return await self._unless_dead(lambda: self._final_output(request, **changes), refusable=True)

    async def _final_output(self, request: Generate, **changes: Any) -> RequestOutput:
        # Weights change only while paused, so all KV blocks with one salt were computed by one version. The version
        # itself cannot be the salt: a request that is submitted during a pause does not know its version yet.
        prompt = {"type": "token", "prompt_token_ids": request.token_ids.tolist(), "cache_salt": str(self._pauses)}
        final: RequestOutput | None = None
        params = sampling_params(request, stop_token_ids=list(self._end_tokens), **changes)
        options = {"priority": request.priority, "lora_request": self._adapter}
        async for output in self._llm.generate(prompt, params, request.request_id, **options):
            final = output
        if final is None:
            raise EngineError(f"{self._name}: request {request.request_id} ended without an output")
        return final

    async def _unless_dead(self, call: Callable[[], Awaitable[T]], *, refusable: bool = False) -> T:
        """Await ``call``; raise ``EngineError`` when the engine dies meanwhile, even if vLLM would wait for ever.
        ``refusable``: whether an error of vLLM about the request becomes ``RequestRefused``."""
        self._require_alive()
        with CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await call()
            except Exception as error:
                raise self._error_of(error, refusable) from error
            finally:
                self._calls.discard(scope)
        raise EngineError(self._death or f"{self._name}: the call was cancelled")

    def _require_alive(self) -> None:
        if self._death:
            raise EngineError(self._death)
        if self._llm is None:
            raise EngineError(f"{self._name}: not started, or closed")

    def _error_of(self, error: Exception, refusable: bool) -> Exception:
        """Return our error for an ``error`` of vLLM."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            return self._die(self._cause_of_death())
        if refusable and isinstance(error, (VLLMClientError, ValueError)):
            return RequestRefused(f"{self._name}: {error}")
        if isinstance(error, (WeightError, EngineError)):
            return error
        return EngineError(f"{self._name}: {type(error).__name__}: {error}")

    @abstractmethod
    def _cause_of_death(self) -> str | None:
        """Return a sentence about the process that died; None when no death is known."""

    def _die(self, cause: str | None) -> EngineError:
        if not self._death:
            reason = cause or "vLLM's EngineCore reported a fatal error; its log says which"
            self._death = f"{self._name}: {reason}"
            for scope in tuple(self._calls):
                scope.cancel()
        return EngineError(self._death)


def bound_end_tokens(llm: Any) -> None:
    """Let vLLM know only end tokens that the model has an embedding for, of those that it reads itself.

    Until ``min_tokens`` are sampled it bans them all. For one that is too large it writes beyond the logits of the
    token on a GPU, and a CPU engine dies."""
    size = llm.vllm_config.model_config.get_vocab_size()
    renderer = llm.renderer
    named = llm.input_processor.generation_config_fields
    if "eos_token_id" in named:
        ids = named["eos_token_id"]
        ids = ids if isinstance(ids, list) else [ids]
        named["eos_token_id"] = [token for token in ids if token is not None and 0 <= token < size]
    end = renderer.get_eos_token_id()
    if end is not None and not 0 <= end < size:
        renderer.get_eos_token_id = lambda: None


def sampling_params(request: Generate, **changes: Any) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    routed_start = len(request.token_ids) if request.routed_tokens is None else request.routed_tokens
    arguments: dict[str, Any] = {name: getattr(request, name) for name in SamplingSettings.__struct_fields__}
    arguments |= {
        "n": 1,
        "seed": request.seed,
        "max_tokens": remaining_tokens(request),
        "min_tokens": max(request.min_tokens - request.prefix_length, 0),
        "stop": list(request.stop),
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": bool(request.stop),
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,
        "routed_experts_prompt_start": routed_start,
    }
    if request.stop and request.prefix_length:
        changes["extra_args"] = {BEFORE: request.prefix_length} | changes.get("extra_args", {})
    return SamplingParams(**(arguments | changes))


def completion_of(output: CompletionOutput) -> Completion:
    """Return vLLM's output as a ``Completion``. Raises ``EngineError`` when a token has no logprob or no version, or
    the finish reason is unknown."""
    token_ids = token_array(output.token_ids)
    logprobs = float_array()
    flat = output.logprobs
    if flat is not None:
        logprobs = float_array([flat.logprobs[start] for start in flat.start_indices])
    reason = _FINISH_REASONS.get(output.finish_reason or "")
    if reason is None:
        raise EngineError(
            f"vLLM ended a request with finish_reason {output.finish_reason!r}; expected {list(_FINISH_REASONS)}"
        )
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


def routed_of(request: Generate, output: CompletionOutput) -> tuple[RoutedTokens, ...]:
    """Return the experts of the tokens that ``request`` asks for, as one part. The last sampled token has none, since
    it has not gone through the model. Empty without experts of vLLM. Raises ``EngineError`` for more experts than
    tokens."""
    if output.routed_experts is None or request.routed_tokens is None or not len(output.routed_experts):
        return ()
    rows_TLK = output.routed_experts
    experts = array("B" if rows_TLK.itemsize == 1 else "H", rows_TLK.tobytes())
    part = RoutedTokens(start=request.routed_tokens, shape=rows_TLK.shape[1:], experts=experts)
    tokens = len(request.token_ids) + len(output.token_ids)
    if part.stop > tokens:
        raise EngineError(f"vLLM returned experts up to token {part.stop} of {tokens}")
    return (part,)


def kept_sets_of(flat: FlatLogprobs | None, vocabulary: int) -> KeptSets:
    """Return the kept set of each token: the tokens with a finite logprob among the most likely ones. Where all of
    these have one, the set may have more tokens, and its count is 0, unless they are the whole ``vocabulary``."""
    import numpy as np

    if not flat or len(flat.logprobs) == len(flat):  # only those of the sampled tokens
        return NO_KEPT_SETS
    sampled_first = len(flat), -1
    ids_TK = np.array(flat.token_ids, dtype=np.int32).reshape(sampled_first)[:, 1:]
    kept_TK = np.isfinite(np.array(flat.logprobs).reshape(sampled_first)[:, 1:])
    if ids_TK.shape[1] < vocabulary:
        kept_TK &= ~kept_TK[:, -1:]
    sizes_T = kept_TK.sum(axis=1, dtype=np.uint16)
    return KeptSets(counts=count_array(sizes_T.tobytes()), token_ids=token_array(ids_TK[kept_TK].tobytes()))


def _policy_version(label: str) -> int:
    return UNCOMMITTED if label == "default" else int(label)

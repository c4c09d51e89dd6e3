"""Patch of vLLM's engine core: the outputs of a request stay in the core until the request ends.

Stock vLLM packs, sends and unpacks every token of every request, and wakes the event loop of the engine process on
every step, even for a request of the final output alone (``RequestOutputKind.FINAL_ONLY``). Held outputs leave the core
in one message: when their request ends or is aborted, and before the first output of another weight version. A request
that streams, or that vLLM's front end may stop (stop strings), gets its tokens at once. The core is a fork of the
engine process (``fork_engine_core``), so the engine process patches its own ``EngineCoreProc`` when it builds the
engine."""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger
from os import environ
from time import monotonic
from typing import Any

from streamrl.engines.vllm.statistics import EngineCounters

log = getLogger(__name__)

HELD_VARIABLE = "STREAMRL_HELD_OUTPUTS"  # "stock": without this patch, as a baseline of measurements
ABORT = "streamrl_abort"
"""Method of the patched core: abort requests and send the tokens that they have sampled. vLLM's own abort answers from
the tokens in the engine process, which has none of them here."""

_JOIN_FROM = 64  # number of steps whose logprobs are joined to one array: small arrays are mostly overhead


def hold_outputs(counters: EngineCounters) -> bool:
    """Let the next engine core of this process hold outputs and count its steps in ``counters``. Returns False, after
    one line in the log, when vLLM lacks a method that the patch needs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import RequestStatus

    holds = environ.get(HELD_VARIABLE) != "stock"
    EngineCoreProc.streamrl_counters = counters if holds else None
    if hasattr(EngineCoreProc, ABORT) or not holds:
        return holds
    try:
        vllm_step = EngineCoreProc._process_engine_step
        vllm_abort = EngineCoreProc.abort_requests
        vllm_send_aborts = EngineCoreProc._send_abort_outputs
        _ = Scheduler._preempt_request, Scheduler.update_from_output, Scheduler.finish_requests
    except AttributeError as error:
        log.warning("outputs leave vLLM's core token by token: %s", error)
        return False

    def process_and_count(core: Any) -> bool:
        if core.streamrl_counters is None:
            return bool(vllm_step(core))
        if not isinstance(core.output_queue, HeldOutputs):  # the first step of this core
            core.output_queue = HeldOutputs(core.output_queue, core.scheduler)
        return core.output_queue.count(core.streamrl_counters, lambda: vllm_step(core))

    def abort_requests(core: Any, request_ids: list[str]) -> None:
        vllm_abort(core, request_ids)
        if isinstance(core.output_queue, HeldOutputs):
            core.output_queue.discard(request_ids)

    def abort_and_send(core: Any, request_ids: list[str]) -> None:
        aborted = core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        vllm_send_aborts(core, aborted)

    EngineCoreProc._process_engine_step = process_and_count
    EngineCoreProc.abort_requests = abort_requests
    setattr(EngineCoreProc, ABORT, abort_and_send)
    return True


class HeldOutputs:
    """Output queue of an engine core, in place of vLLM's ``queue``. It holds the outputs of unfinished requests."""

    def __init__(self, queue: Any, scheduler: Any) -> None:
        self.get = queue.get
        self._queue = queue
        self._scheduler = scheduler
        self._pending: dict[str, _MergedOutput | None] = {}  # by request id; None: outputs of it are sent at once
        self._version: str | None = None  # weight version of all pending outputs
        # Counts of the current step.
        self._tokens = 0
        self._prefilled = 0
        self._preempted = 0
        self._drafted = 0
        self._accepted = 0
        preempt = scheduler._preempt_request
        update = scheduler.update_from_output

        def preempt_and_count(*arguments: Any, **options: Any) -> None:
            self._preempted += 1
            preempt(*arguments, **options)

        def update_and_count(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            # With async scheduling, a step of the core schedules one step of the model, and gets the outputs of the
            # one before.
            self._drafted = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            decoded = len(scheduled.num_scheduled_tokens) + self._drafted
            self._prefilled = scheduled.total_num_scheduled_tokens - decoded
            return update(scheduled, *arguments, **options)

        scheduler._preempt_request = preempt_and_count
        scheduler.update_from_output = update_and_count

    def count(self, counters: EngineCounters, step: Callable[[], Any]) -> bool:
        """Run a step of the core and count it."""
        # Reset here: clearing the cache in a pause preempts requests, too, which is no lack of memory.
        self._tokens = 0
        self._prefilled = 0
        self._preempted = 0
        self._drafted = 0
        self._accepted = 0
        began_s = monotonic()
        scheduler = self._scheduler
        executed = bool(step())
        counters.count_step(
            self._tokens,
            monotonic() - began_s,
            self._preempted,
            prefilled=self._prefilled,
            running=len(scheduler.running),
            kv_usage=scheduler.kv_cache_manager.usage,
            drafted=self._drafted,
            accepted=self._accepted,
        )
        return executed

    def discard(self, request_ids: list[str]) -> None:
        """Drop the held outputs of requests that the engine process has aborted itself."""
        for request_id in request_ids:
            self._pending.pop(request_id, None)

    def put_nowait(self, item: Any) -> None:
        """Queue ``item``, a pair ``(client, EngineCoreOutputs)`` or bytes, without the outputs that are held."""
        if not isinstance(item, bytes) and item[1].outputs:
            client, step = item
            if step.weight_version is None:  # the outputs of aborts have no version
                step.weight_version = self._version
            elif step.weight_version != self._version:
                older = self._take_pending()
                if older:
                    self._queue.put_nowait((client, type(step)(outputs=older, weight_version=self._version)))
                self._version = step.weight_version
            step.outputs = [output for output in step.outputs if self._is_released(output)]
            if not step.outputs:
                return
        self._queue.put_nowait(item)

    def _take_pending(self) -> list[Any]:
        """Return the pending outputs with tokens, and begin an empty output for each of their requests."""
        with_tokens = [merged for merged in list(self._pending.values()) if merged and merged.output.new_token_ids]
        return [merged.take() for merged in with_tokens]

    def _is_released(self, output: Any) -> bool:
        """Return whether ``output`` is to be sent now; the held outputs of its request are then merged into it. vLLM's
        input thread calls this, too, with error outputs of requests that it could not preprocess: no outputs of such a
        request are held."""
        self._tokens += len(output.new_token_ids)
        self._accepted += max(len(output.new_token_ids) - 1, 0)  # without speculation a step samples one token
        ends = output.finish_reason is not None
        merged = self._pending.get(output.request_id)
        if merged is not None:
            merged.add(output)
        elif output.request_id not in self._pending and not ends:
            self._pending[output.request_id] = _MergedOutput(output) if self._is_final_only(output) else None
        if ends:
            self._pending.pop(output.request_id, None)
            if merged is not None:
                merged.move_into(output)
        return ends or self._pending[output.request_id] is None

    def _is_final_only(self, output: Any) -> bool:
        """Return whether only the final output of the request is asked for, and its outputs can be merged."""
        params = getattr(self._scheduler.requests.get(output.request_id), "sampling_params", None)
        if params is None or params.output_kind.name != "FINAL_ONLY" or params.stop:
            return False
        unmerged = (output.pooling_output, output.new_sampling_mask, output.prompt_token_id_logprobs)
        return all(field is None for field in unmerged)


class _MergedOutput:
    """The merged outputs of one request. Logprobs of the prompt are in the first output."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self._logprobs = [output.new_logprobs]
        self._routed = [output.routed_experts]
        self._joined = 0  # number of their first entries that are joined ones

    def add(self, output: Any) -> None:
        self.output.new_token_ids += output.new_token_ids
        self._logprobs.append(output.new_logprobs)
        self._routed.append(output.routed_experts)
        if len(self._logprobs) == self._joined + _JOIN_FROM:
            self._logprobs[self._joined :] = [_joined(self._logprobs[self._joined :])]
            self._routed[self._joined :] = [_joined_rows(self._routed[self._joined :])]
            self._joined += 1

    def move_into(self, last: Any) -> None:
        """Set the merged fields in ``last``, the final output of the request."""
        first = self.take()
        last.new_token_ids = first.new_token_ids
        last.new_logprobs = first.new_logprobs
        last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
        last.prefill_stats = first.prefill_stats
        last.routed_experts = first.routed_experts

    def take(self) -> Any:
        """Return the merged output, and begin an empty one."""
        output = self.output
        self.output = type(output)(request_id=output.request_id, new_token_ids=[])
        output.new_logprobs = _joined(self._logprobs)
        self._logprobs = []
        output.routed_experts = _joined_rows(self._routed)
        self._routed = []
        self._joined = 0
        return output


def _joined(logprobs: list[Any]) -> Any:
    """Join the ``LogprobsLists`` of several steps of one request: [tokens, 1 + num_logprobs] and [tokens]; None without
    any. The rows of a step are as wide as its widest request needs, so the columns that some step lacks are not of this
    request."""
    import numpy as np

    parts = [part for part in logprobs if part is not None]
    if not parts:
        return None
    width = min(part.logprobs.shape[1] for part in parts)
    token_ids = np.concatenate([part.logprob_token_ids[:, :width] for part in parts])
    values = np.concatenate([part.logprobs[:, :width] for part in parts])
    ranks = np.concatenate([part.sampled_token_ranks for part in parts])
    return type(parts[0])(token_ids, values, ranks, None)


def _joined_rows(routed: list[Any]) -> Any:
    """Join the experts of several steps of one request: [tokens, layers, top_k]; None without any."""
    import numpy as np

    parts = [part for part in routed if part is not None]
    return np.concatenate(parts) if parts else None

"""Outputs of a request stay in vLLM's engine core until the request ends.

vLLM packs, sends and unpacks every token of every request, and wakes the host's event loop on every step, also where
only the final output is asked for (``RequestOutputKind.FINAL_ONLY``). Held outputs leave the core in one message: when
their request ends or is aborted, and before the first output of another weight version. A request that streams, or
that vLLM's front end may stop (stop strings), gets its tokens as they come. The core is a fork of its host
(``fork_engine_core``), so the host patches its own ``EngineCoreProc``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from streamrl.engines.vllm.statistics import EngineCounters

log = logging.getLogger(__name__)

HELD_VARIABLE = "STREAMRL_HELD_OUTPUTS"  # "stock": as vLLM does, to measure against
ABORT = "streamrl_abort"
"""Method of the patched core: abort requests and send what they have sampled. vLLM's own abort answers from what the
host has, which is nothing here."""

_JOIN_FROM = 64  # logprobs of so many steps become one array: small arrays are mostly overhead


def hold_outputs(counters: EngineCounters) -> bool:
    """Let the next engine core of this process hold outputs and count its steps in ``counters``. False, with one line
    in the log, where vLLM lacks a method that this needs."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.request import RequestStatus

    holds = os.environ.get(HELD_VARIABLE) != "stock"
    EngineCoreProc.streamrl_counters = counters if holds else None
    if hasattr(EngineCoreProc, ABORT) or not holds:
        return holds
    try:
        vllm_step = EngineCoreProc._process_engine_step
        vllm_abort = EngineCoreProc.abort_requests
        vllm_send_aborts = EngineCoreProc._send_abort_outputs
        _ = Scheduler._preempt_request, Scheduler.schedule, Scheduler.finish_requests
    except AttributeError as error:
        log.warning("outputs leave vLLM's core token by token: %s", error)
        return False

    def process_and_count(core: Any) -> bool:
        if core.streamrl_counters is None:
            return bool(vllm_step(core))
        if not isinstance(core.output_queue, HeldOutputs):  # before the first step there is nothing to hold
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
    """Output queue of an engine core: wraps ``queue`` and holds the outputs of unfinished requests."""

    def __init__(self, queue: Any, scheduler: Any) -> None:
        self.get = queue.get
        self._queue = queue
        self._scheduler = scheduler
        self._held: dict[str, _Held | None] = {}  # by request; None: its outputs are not held
        self._version: str | None = None  # of all that is held
        self._tokens = 0
        self._prefilled = False
        self._preempted = 0
        self._drafted = 0
        self._accepted = 0
        preempt = scheduler._preempt_request
        schedule = scheduler.schedule

        def preempt_and_count(*arguments: Any, **options: Any) -> None:
            self._preempted += 1
            preempt(*arguments, **options)

        def schedule_and_look(*arguments: Any, **options: Any) -> Any:
            scheduled = schedule(*arguments, **options)
            self._drafted = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            decoded = len(scheduled.num_scheduled_tokens) + self._drafted
            self._prefilled = scheduled.total_num_scheduled_tokens > decoded
            return scheduled

        scheduler._preempt_request = preempt_and_count
        scheduler.schedule = schedule_and_look

    def count(self, counters: EngineCounters, step: Callable[[], Any]) -> bool:
        """Run a step of the core and count it."""
        # clearing the cache in a pause preempts, too
        self._tokens = 0
        self._prefilled = False
        self._preempted = 0
        self._drafted = 0
        self._accepted = 0
        began_s = time.monotonic()
        scheduler = self._scheduler
        executed = bool(step())
        decoded_s = None if self._prefilled else time.monotonic() - began_s
        usage = scheduler.kv_cache_manager.usage
        state = {"running": len(scheduler.running), "drafted": self._drafted, "accepted": self._accepted}
        counters.count_step(self._tokens, decoded_s, self._preempted, kv_usage=usage, **state)
        return executed

    def discard(self, request_ids: list[str]) -> None:
        """Drop the held outputs of requests that the host has aborted itself."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def put_nowait(self, item: Any) -> None:
        """Queue what is to be sent now: ``(client, EngineCoreOutputs)``, or bytes."""
        if not isinstance(item, bytes) and item[1].outputs:
            client, step = item
            if step.weight_version is None:  # abort outputs carry none
                step.weight_version = self._version
            elif step.weight_version != self._version:
                if older := [held.take() for held in [*self._held.values()] if held and held.output.new_token_ids]:
                    self._queue.put_nowait((client, type(step)(outputs=older, weight_version=self._version)))
                self._version = step.weight_version
            step.outputs = [output for output in step.outputs if self._is_released(output)]
            if not step.outputs:
                return
        self._queue.put_nowait(item)

    def _is_released(self, output: Any) -> bool:
        """Return whether ``output`` is to be sent now, with all that was held of its request. vLLM's input thread puts
        error outputs here, too, for requests that it could not preprocess: nothing is held of those."""
        self._tokens += len(output.new_token_ids)
        self._accepted += max(len(output.new_token_ids) - 1, 0)  # without speculation a step samples one
        ends = output.finish_reason is not None
        if (held := self._held.get(output.request_id)) is not None:
            held.add(output)
        elif output.request_id not in self._held and not ends:
            self._held[output.request_id] = _Held(output) if self._is_final_only(output) else None
        if ends:
            self._held.pop(output.request_id, None)
            if held is not None:
                held.move_into(output)
        return ends or self._held[output.request_id] is None

    def _is_final_only(self, output: Any) -> bool:
        params = getattr(self._scheduler.requests.get(output.request_id), "sampling_params", None)
        parts = (output.pooling_output, output.new_sampling_mask, output.prompt_token_id_logprobs)
        asked = params is not None and params.output_kind.name == "FINAL_ONLY" and not params.stop
        return asked and all(part is None for part in parts)


class _Held:
    """The merged outputs of one request; logprobs of the prompt are in the first."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self._logprobs = [output.new_logprobs]
        self._routed = [output.routed_experts]

    def add(self, output: Any) -> None:
        self.output.new_token_ids += output.new_token_ids
        self._logprobs.append(output.new_logprobs)
        self._routed.append(output.routed_experts)
        if len(self._logprobs) == _JOIN_FROM:
            self._logprobs = [_joined(self._logprobs)]
            self._routed = [_joined_rows(self._routed)]

    def move_into(self, last: Any) -> None:
        first = self.take()
        last.new_token_ids = first.new_token_ids
        last.new_logprobs = first.new_logprobs
        last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
        last.prefill_stats = first.prefill_stats
        last.routed_experts = first.routed_experts

    def take(self) -> Any:
        taken = self.output
        self.output = type(self.output)(request_id=self.output.request_id, new_token_ids=[])
        taken.new_logprobs = _joined(self._logprobs)
        self._logprobs = []
        taken.routed_experts = _joined_rows(self._routed)
        self._routed = []
        return taken


def _joined(logprobs: list[Any]) -> Any:
    """``LogprobsLists`` of one request after another: [tokens, 1 + num_logprobs] and [tokens]; None without any. vLLM's
    rows are as wide as the widest request of their step asks: columns that not every step has were not asked for."""
    import numpy as np

    if not (given := [one for one in logprobs if one is not None]):
        return None
    width = min(one.logprobs.shape[1] for one in given)
    tokens, values = ([one[place][:, :width] for one in given] for place in range(2))
    ranks = [one.sampled_token_ranks for one in given]
    return type(given[0])(np.concatenate(tokens), np.concatenate(values), np.concatenate(ranks), None)


def _joined_rows(parts: list[Any]) -> Any:
    """Experts of one request after another: [tokens, layers, top_k]; None without any."""
    import numpy as np

    given = [one for one in parts if one is not None]
    return np.concatenate(given) if given else None

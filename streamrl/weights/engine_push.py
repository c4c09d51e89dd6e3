"""Pushes weights into one vLLM engine: stage while the engine samples, commit while it is paused.

The engine of a run (``engines/vllm/engine.py``) calls ``stage`` and ``commit`` in its process; an outside training loop
calls ``push``. The workers run ``streamrl.weights.vllm.weight_receiver``. ``llm`` is an ``AsyncLLM`` that was made with
``weight_transfer_config=WeightTransferConfig(backend=WEIGHT_BACKEND)`` and under ``engine_variables()``, or a
``vllm_server.VllmServer``. This file does not import vllm, so that a trainer may call it."""

from __future__ import annotations

import base64
from time import monotonic
from typing import Any

from anyio import CancelScope, sleep
from msgspec import msgpack
from msgspec.structs import replace

from streamrl.base.errors import EngineError, WeightError
from streamrl.base.messages import HASH_MODULUS, OrderDone, WeightAnnouncement
from streamrl.base.types import JsonObject

# Seconds between two calls for the workers' progress. Each call costs the engine a little.
_SHORTEST_WAIT = 0.002
_LONGEST_WAIT = 0.05
_WAIT_SHARE = 0.1  # wait as share of the elapsed time: the end of staging is noticed at most a tenth late


async def push(llm: Any, announcement: WeightAnnouncement, *, clear_cache: bool = True) -> OrderDone:
    """Push a version into one engine: stage, pause (requests in flight are kept), commit, resume.

    ``clear_cache``: whether the KV cache of tokens sampled so far is computed again under the new weights. Raises as
    ``stage`` and ``commit`` do. After a ``WeightError`` the engine samples on with the weights that it holds; after an
    ``EngineError`` of the commit it stays paused, since its weights are unknown. Cancellation takes effect before the
    pause or after it, never in between. ``seconds`` of the result is the time of the commit."""
    staged = await stage(llm, announcement)
    with CancelScope(shield=True):
        try:
            await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        except Exception:
            await llm.resume_generation()
            raise
        try:
            committed = await commit(llm, announcement.policy_version)
        except WeightError:
            await llm.resume_generation()
            raise
        await llm.resume_generation()
    return replace(committed, payload_bytes=staged.payload_bytes)


async def stage(llm: Any, announcement: WeightAnnouncement) -> OrderDone:
    """Fetch, check and decode a version on every worker while the engine samples. ``order_id`` of the result is 0.
    Raises ``WeightError`` with the worker's reason; live weights are unchanged then."""
    started = monotonic()
    text = base64.b64encode(msgpack.encode(announcement)).decode()  # ``vllm serve`` passes on text only
    await llm.collective_rpc("streamrl_begin_stage", args=(text,))
    reports = await llm.collective_rpc("streamrl_stage_report")
    while not all(report["fetched"] for report in reports):
        elapsed = monotonic() - started
        await sleep(min(max(_SHORTEST_WAIT, _WAIT_SHARE * elapsed), _LONGEST_WAIT))
        reports = await llm.collective_rpc("streamrl_stage_report")
    _raise_first(reports)
    reports = await llm.collective_rpc("streamrl_finish_stage")
    _raise_first(reports)
    seconds = monotonic() - started
    mover = next((report["mover"] for report in reports if report.get("mover")), "")
    return OrderDone(order_id=0, seconds=seconds, payload_bytes=reports[0]["payload_bytes"], mover=mover)


async def commit(llm: Any, policy_version: int) -> OrderDone:
    """Apply the staged version to the live weights of every worker of a paused engine. ``order_id`` of the result is 0,
    ``state_hash`` is computed from the live weights.

    Raises ``WeightError`` when the version is not staged or does not verify; the engine then holds the version that it
    held before. Raises ``EngineError`` when nobody knows which version the engine holds."""
    started = monotonic()
    try:
        reports = await llm.collective_rpc("streamrl_apply", args=(str(policy_version),))
    except Exception as error:
        raise EngineError(f"version {policy_version} could not be committed: {error}") from error
    if any(report["error"] for report in reports):
        await llm.collective_rpc("streamrl_roll_back")
        _raise_first(reports)
    state_hash = sum(report["state_hash"] for report in reports) % HASH_MODULUS
    if state_hash != reports[0]["expected_hash"]:
        await llm.collective_rpc("streamrl_roll_back")
        raise WeightError(
            f"version {policy_version}: the live weights of {len(reports)} workers add up to state hash "
            f"{state_hash:#018x}; announced was {reports[0]['expected_hash']:#018x}"
        )
    await llm.finish_weight_update(weight_version=str(policy_version))
    return OrderDone(order_id=0, seconds=monotonic() - started, state_hash=state_hash)


def _raise_first(reports: list[JsonObject]) -> None:
    """Raise ``WeightError`` with the first error that a worker reports."""
    for worker, report in enumerate(reports):
        if report["error"]:
            raise WeightError(report["error"] if len(reports) == 1 else f"worker {worker}: {report['error']}")

"""The owner's side of a weight push into one engine: stage while it samples, commit while it is paused.

The worker's side is ``streamrl.weights.vllm.weight_receiver``. The engine is an ``AsyncLLM`` that was made with
``weight_transfer_config=WeightTransferConfig(backend=WEIGHT_BACKEND)`` and under ``engine_environment()``, or a
``vllm_server.VllmServer``. Nothing here imports vllm: a trainer may call it."""

from __future__ import annotations

import base64
import time
from typing import Any

import anyio
import msgspec

from streamrl.base.errors import EngineError, WeightError
from streamrl.base.messages import HASH_MODULUS, OrderDone, WeightAnnouncement

# seconds between two questions; each costs the engine one short call
_SHORTEST_WAIT = 0.002
_LONGEST_WAIT = 0.05
_WAIT_SHARE = 0.1  # of the time that has passed: so much later than it was done it is noticed, at most


async def push(llm: Any, announcement: WeightAnnouncement, *, clear_cache: bool = True) -> OrderDone:
    """Stage, pause (requests in flight are kept), commit, resume: the whole push into one engine.

    ``clear_cache``: compute the KV of what was sampled so far anew under the new weights. Raises as ``stage`` and
    ``commit`` do: after a ``WeightError`` the engine goes on with what it holds, after an ``EngineError`` of the commit
    it stays paused, since nobody knows what it holds. Cancelled, it ends after the pause, never in the midst of it.
    ``seconds`` of the answer are those of the commit."""
    staged = await stage(llm, announcement)
    with anyio.CancelScope(shield=True):
        try:
            await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        except Exception:
            await llm.resume_generation()
            raise
        try:
            done = await commit(llm, announcement.policy_version)
        except WeightError:
            await llm.resume_generation()
            raise
        await llm.resume_generation()
    return msgspec.structs.replace(done, payload_bytes=staged.payload_bytes)


async def stage(llm: Any, announcement: WeightAnnouncement) -> OrderDone:
    """Fetch, check and decode a version on every worker while the engine samples. ``order_id`` is 0. Raises
    ``WeightError`` with the worker's reason; nothing live has changed then."""
    started = time.monotonic()
    text = base64.b64encode(msgspec.msgpack.encode(announcement)).decode()  # ``vllm serve`` passes on text only
    await llm.collective_rpc("streamrl_begin_stage", args=(text,))
    reports = await llm.collective_rpc("streamrl_stage_report")
    while not all(report["fetched"] for report in reports):
        passed = time.monotonic() - started
        await anyio.sleep(min(max(_SHORTEST_WAIT, _WAIT_SHARE * passed), _LONGEST_WAIT))
        reports = await llm.collective_rpc("streamrl_stage_report")
    _raise_first(reports)
    reports = await llm.collective_rpc("streamrl_finish_stage")
    _raise_first(reports)
    return OrderDone(order_id=0, seconds=time.monotonic() - started, payload_bytes=reports[0]["payload_bytes"])


async def commit(llm: Any, policy_version: int) -> OrderDone:
    """Apply the staged version to the live weights of every worker. Only while paused. ``order_id`` is 0.

    ``state_hash`` of the answer is computed from the live weights. Raises ``WeightError`` when the version is not
    staged or does not verify; the engine then holds what it held. Raises ``EngineError`` when that cannot be said."""
    started = time.monotonic()
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
    return OrderDone(order_id=0, seconds=time.monotonic() - started, state_hash=state_hash)


def _raise_first(reports: list[dict[str, Any]]) -> None:
    for worker, report in enumerate(reports):
        if report["error"]:
            raise WeightError(report["error"] if len(reports) == 1 else f"worker {worker}: {report['error']}")

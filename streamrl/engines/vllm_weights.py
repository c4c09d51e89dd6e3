"""The owner's side of a weight push into one ``AsyncLLM``: stage while it samples, commit while it is paused.

The worker's side is ``weight_receiver``. ``AsyncLLM`` must have been made with
``weight_transfer_config=WeightTransferConfig(backend=WEIGHT_BACKEND)`` and under ``engine_environment()``.
"""

from __future__ import annotations

import time
from typing import Any

import anyio
import msgspec

from streamrl.comm.weights.state_hash import MODULUS
from streamrl.engines.vllm_plugin import ENGINE_VARIABLE, WEIGHT_BACKEND
from streamrl.errors import EngineError, WeightError
from streamrl.messages import OrderDone, WeightAnnouncement

__all__ = ["WEIGHT_BACKEND", "commit", "engine_environment", "stage"]

_FIRST_WAIT, _LONGEST_WAIT = 0.002, 0.05  # seconds between two questions; each costs the engine one short call


def engine_environment() -> dict[str, str]:
    """Environment of the process that owns an engine, to be set before vllm is imported."""
    return {"VLLM_PLUGINS": "streamrl", ENGINE_VARIABLE: "1"}


async def stage(llm: Any, announcement: WeightAnnouncement) -> OrderDone:
    """Fetch, check and decode a version on every worker while the engine samples. ``order_id`` is 0.

    Raises ``WeightError`` with the worker's reason; nothing live has changed then.
    """
    started = time.monotonic()
    await llm.collective_rpc("streamrl_begin_stage", args=(msgspec.msgpack.encode(announcement),))
    wait = _FIRST_WAIT
    reports = await llm.collective_rpc("streamrl_stage_report")
    while not all(report["fetched"] for report in reports):
        await anyio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
        reports = await llm.collective_rpc("streamrl_stage_report")
    _raise_first(reports)
    reports = await llm.collective_rpc("streamrl_finish_stage")
    _raise_first(reports)
    return OrderDone(order_id=0, seconds=time.monotonic() - started, payload_bytes=reports[0]["payload_bytes"])


async def commit(llm: Any, policy_version: int) -> OrderDone:
    """Apply the staged version to the live weights of every worker. Only while paused. ``order_id`` is 0.

    ``state_hash`` of the answer is computed from the live weights. Raises ``WeightError`` when the version is not
    staged or does not verify; the engine then holds what it held. Raises ``EngineError`` when that cannot be said.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    started = time.monotonic()
    await llm.start_weight_update()
    try:
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"policy_version": policy_version}))
    except Exception as error:
        reports = await llm.collective_rpc("streamrl_live_report")
        await llm.collective_rpc("streamrl_roll_back")
        _raise_first(reports)
        raise EngineError(f"version {policy_version} could not be committed: {error}") from error
    reports = await llm.collective_rpc("streamrl_live_report")
    state_hash = sum(report["state_hash"] for report in reports) % MODULUS
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

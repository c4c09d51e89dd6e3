"""What several engines say, seen as what one says. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from streamrl.base.errors import EngineError, WeightError
from streamrl.base.messages import EngineLoad, EngineReady
from streamrl.base.types import Completion, FinishReason, float_array, token_array

COUNTERS = ("generated_tokens", "preemptions", "decode_steps", "decode_s", "decode_tokens")
"""What of ``EngineLoad`` counts since the start."""


def nothing_sampled() -> Completion:
    """What a request comes back with that was cut before its first token."""
    return Completion(
        token_ids=token_array(),
        behavior_logprobs=float_array(),
        finish_reason=FinishReason.ABORT,
        version_spans=(),
    )


def with_counters(load: EngineLoad, parts: Sequence[EngineLoad]) -> EngineLoad:
    """``load`` with the counters of all ``parts`` together."""
    sums = {name: sum(getattr(part, name) for part in parts) for name in COUNTERS}
    return msgspec.structs.replace(load, **sums)


def joined_readiness(names: Sequence[str], readiness: Sequence[EngineReady]) -> EngineReady:
    """What the engines ``names`` are together; those that said nothing yet (``readiness``: the others) are as these.

    Raises ``EngineError`` unless they are of one model.
    """
    first = readiness[0]
    for ready in readiness[1:]:
        refuse_difference(first, ready, ("max_model_len", "tokenizer_digest"))
    return msgspec.structs.replace(
        first,
        engine="+".join(names),
        max_num_seqs=sum(ready.max_num_seqs for ready in readiness) * len(names) // len(readiness),
        kv_tokens=sum(ready.kv_tokens for ready in readiness) * len(names) // len(readiness),
    )


def refuse_difference(first: EngineReady, other: EngineReady, fields: Sequence[str]) -> None:
    """Raises ``EngineError`` unless both say the same of ``fields``."""
    for field in fields:
        if getattr(other, field) != getattr(first, field):
            raise EngineError(
                f"{other.engine} has {field} {getattr(other, field)!r}, {first.engine} has"
                f" {getattr(first, field)!r}; start both with the same recipe and model"
            )


def joined_load(past: EngineLoad, loads: Sequence[EngineLoad]) -> EngineLoad:
    """Sums over ``loads``, in the counters also of those that are gone (``past``). Cache usage is that of the fullest,
    the time of a decode step the mean of those that decode."""
    step_times = [load.token_s for load in loads if load.token_s]
    return with_counters(
        EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_cache_usage=max((load.kv_cache_usage for load in loads), default=0.0),
            generated_tokens=0,
            token_s=sum(step_times) / len(step_times) if step_times else 0.0,
            mean_running=sum(load.mean_running for load in loads),
        ),
        [past, *loads],
    )


def agreed_checksums(names: Sequence[str], parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all engines ``names`` say. Raises ``WeightError`` naming the first parameter that differs."""
    for name, part in zip(names[1:], parts[1:], strict=True):
        differing = _first_difference(parts[0], part)
        if differing is not None:
            raise WeightError(f"{name} and {names[0]} hold different {differing}; publish an anchor")
    return dict(parts[0])


def _first_difference(left: Mapping[str, str], right: Mapping[str, str]) -> str | None:
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            return name
    return None

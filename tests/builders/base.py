"""Trajectories, their ids, and clocks that tests set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import anyio.lowlevel

from streamrl.base.types import (
    FinishReason,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    float_array,
    token_array,
)


def trajectory(
    sample: int = 0,
    group: int = 0,
    *,
    prompt_id: str = "p",
    attempt: int = 0,
    prompt: Iterable[int] = (4, 5),
    tokens: Sequence[int] = (5,),
    logprob: float = -1.0,
    version: int | None = None,
    columns: dict[str, Any] | None = None,
    **fields: Any,
) -> Trajectory:
    """A completion of one segment. ``version`` sampled all of it; None: nobody says."""
    spans = (VersionSpan(start=0, end=len(tokens), policy_version=version),) if tokens and version is not None else ()
    segment = Segment(
        token_ids=token_array(tokens),
        trained=True,
        behavior_logprobs=float_array([logprob] * len(tokens)),
        version_spans=spans,
    )
    given: dict[str, Any] = {"finish_reason": FinishReason.STOP, "segments": (segment,)}
    return Trajectory(
        id=TrajectoryId(prompt_id=prompt_id, group_id=group, sample=sample, attempt=attempt),
        prompt=Prompt(prompt_id=prompt_id, token_ids=token_array(prompt), columns=columns or {}),
        **(given | fields),
    )


def identity(sample: int, group: int = 0) -> TrajectoryId:
    """The id of a trajectory of prompt ``p``."""
    return TrajectoryId(prompt_id="p", group_id=group, sample=sample)


class SetClock:
    """A clock that shows what a test sets: ``now``, in seconds."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class InstantClock:
    """Virtual time: ``sleep`` advances it and lets other tasks run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await anyio.lowlevel.checkpoint()

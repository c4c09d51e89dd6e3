"""The completions of an evaluation on disk, so that a figure can be looked into: ``evaluations/step-N.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from streamrl.errors import StreamRLError
from streamrl.stage_messages import EndedOutcome, TrajectoryLost
from streamrl.types import RewardFailure, TokenArray, Trajectory, TrajectoryId


class EvaluationSamples:
    """Writes one file for each evaluation under ``directory``. ``decode``: text of token ids; None: ids only."""

    def __init__(self, directory: Path, decode: Callable[[TokenArray], str] | None = None) -> None:
        self._directory = directory
        self._decode = decode

    async def write(self, policy_version: int, outcomes: Sequence[EndedOutcome]) -> None:
        """Write ``step-N.jsonl``, whole or not at all, in a thread. Raises ``StreamRLError`` when the disk refuses."""
        path = self._directory / f"step-{policy_version:06d}.jsonl"
        try:
            await anyio.to_thread.run_sync(partial(_write_lines, path, list(outcomes), self._decode))
        except OSError as error:
            raise StreamRLError(
                f"the samples of the evaluation at step {policy_version} could not be written to {path}: {error}; "
                "free the disk, or set evaluation.store_samples = false"
            ) from error


def _write_lines(path: Path, outcomes: list[EndedOutcome], decode: Callable[[TokenArray], str] | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        for line in sorted((sample_line(outcome, decode) for outcome in outcomes), key=_order):
            file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _order(line: dict[str, Any]) -> tuple[int, int]:
    return line["prompt"], line["sample"]


def sample_line(outcome: EndedOutcome, decode: Callable[[TokenArray], str] | None) -> dict[str, Any]:
    """One line: ``prompt`` is the number of the held-out prompt; ``reward`` is null where ``failure`` says why."""
    if isinstance(outcome, TrajectoryLost):
        return _whose(outcome.id) | {"reward": None, "failure": outcome.reason}
    scored = outcome.outcome
    line = _whose(scored.trajectory.id)
    if isinstance(scored, RewardFailure):
        line |= {"reward": None, "failure": f"{scored.function} {scored.kind}: {scored.message}"}
    else:
        line |= {"reward": scored.reward, "reward_parts": scored.reward_parts}
    return line | _texts(scored.trajectory, decode)


def _whose(trajectory: TrajectoryId) -> dict[str, Any]:
    return {
        "prompt": -1 - trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample,
        "policy_version": trajectory.attempt,
    }


def _texts(trajectory: Trajectory, decode: Callable[[TokenArray], str] | None) -> dict[str, Any]:
    prompt = trajectory.prompt.token_ids
    completion = prompt[:0]
    for segment in trajectory.segments:
        completion.extend(segment.token_ids)
    fields: dict[str, Any] = {
        "finish_reason": trajectory.finish_reason,
        "prompt_token_ids": prompt.tolist(),
        "token_ids": completion.tolist(),
    }
    return fields if decode is None else fields | {"prompt_text": decode(prompt), "text": decode(completion)}

"""Completions on disk, to be read: all of an evaluation (``evaluations/step-N.jsonl``), three of each batch
(``samples.jsonl``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from streamrl.base.atomic_files import MOST_BYTES, remove_oldest, write_durable
from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import LineFile
from streamrl.base.run_events import CompletionSampled
from streamrl.base.stage_messages import EndedOutcome, TrajectoryLost
from streamrl.base.types import (
    RewardFailure,
    ScoredTrajectory,
    Segment,
    TokenArray,
    Trajectory,
    TrajectoryId,
    token_array,
)
from streamrl.recipe.sections import HELD_OUT

Decode = Callable[[TokenArray], str]
LONGEST_TEXT = 8_000
"""Characters of a prompt and of a completion there."""
MOST_TOKENS = 2_000
"""Tokens of a completion that are written one by one: decoding them is work of the controller."""
SHOWN_EVERY = 10
"""Steps between two completions that the run shows; it shows one of the first step, too."""


class StoredSample(CompletionSampled, frozen=True, kw_only=True, omit_defaults=True, tag="CompletionSampled"):
    """A completion with its tokens, as it stands in ``samples.jsonl``: the text, the behaviour logprob and the policy
    version of each; empty where it has more than ``MOST_TOKENS``. ``turn_rewards``: as its environment gave them."""

    token_texts: list[str] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turn_rewards: tuple[float, ...] = ()


class TrainingSamples:
    """Appends the best, the worst and a random completion of each batch to ``path``, after those of earlier lives."""

    def __init__(self, path: Path, decode: Decode, *, most_bytes: int = MOST_BYTES) -> None:
        self._decode = decode
        self._file = LineFile(path, most_bytes=most_bytes)

    def take(self, step: int, batch: Sequence[ScoredTrajectory]) -> list[CompletionSampled]:
        """Write those of the batch of ``step``. Returns what to show: one of them now and then."""
        ordered = sorted(batch, key=lambda scored: scored.reward)
        one = random.Random(step).choice(ordered)
        three = (("best", ordered[-1]), ("worst", ordered[0]), ("random", one))
        chosen = [sample_of(scored, self._decode, step=step, chosen=kind) for kind, scored in three]
        self._file.append(*(_stored(shown, of[1], self._decode) for shown, of in zip(chosen, three, strict=True)))
        return chosen[-1:] if step == 1 or step % SHOWN_EVERY == 0 else []

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def sample_of(scored: ScoredTrajectory, decode: Decode, *, step: int, chosen: str) -> CompletionSampled:
    """The completion as it is shown to people."""
    trajectory = scored.trajectory
    return CompletionSampled(
        step=step,
        chosen=chosen,
        prompt_id=trajectory.prompt.prompt_id,
        prompt=decode(_prompt_of(trajectory)),
        text=_text_of(trajectory, decode),
        reward=scored.reward,
        rewards=scored.reward_parts,
        tokens=trajectory.generated_tokens,
        finish_reason=str(trajectory.finish_reason),
        sample=trajectory.id.sample,
    ).shortened(LONGEST_TEXT)


def _stored(shown: CompletionSampled, scored: ScoredTrajectory, decode: Decode) -> StoredSample:
    stored = StoredSample(**msgspec.structs.asdict(shown), turn_rewards=scored.trajectory.turn_rewards)
    if shown.tokens > MOST_TOKENS:
        return stored
    turns = [segment for segment in scored.trajectory.segments if segment.trained]
    return msgspec.structs.replace(
        stored,
        token_texts=[decode(turn.token_ids[at : at + 1]) for turn in turns for at in range(len(turn.token_ids))],
        logprobs=[round(logprob, 4) for turn in turns for logprob in turn.behavior_logprobs],
        versions=[
            span.policy_version for turn in turns for span in turn.version_spans for _ in range(span.end - span.start)
        ],
    )


async def write_evaluation(
    directory: Path,
    decode: Decode | None,
    policy_version: int,
    outcomes: Sequence[EndedOutcome],
    sets: Mapping[str, range] | None = None,
    *,
    most_bytes: int = MOST_BYTES,
) -> None:
    """Write ``step-N.jsonl`` in ``directory``, whole or not at all, in a thread. ``decode``: text of token ids; None:
    ids only. ``sets``: numbers of the prompts of each set. ``most_bytes``: of all files there; the oldest ones are
    removed. Raises ``StreamRLError`` when the disk refuses."""
    path = directory / f"step-{policy_version:06d}.jsonl"
    try:
        await anyio.to_thread.run_sync(_write_lines, path, list(outcomes), decode, sets or {}, most_bytes)
    except OSError as error:
        raise StreamRLError(
            f"the samples of the evaluation at step {policy_version} could not be written to {path}: {error}; "
            "free the disk, or set evaluation.advanced.store_samples = false"
        ) from error


def _write_lines(
    path: Path, outcomes: list[EndedOutcome], decode: Decode | None, sets: Mapping[str, range], most_bytes: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted((sample_line(outcome, decode) for outcome in outcomes), key=lambda at: (at["number"], at["sample"]))
    for line in lines if sets.keys() - {HELD_OUT} else ():
        name, numbers = next((name, numbers) for name, numbers in sets.items() if line["number"] in numbers)
        line |= {"set": name, "number": line["number"] - numbers.start}
    write_durable(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    remove_oldest(path.parent.glob("step-*.jsonl"), most_bytes)


def sample_line(outcome: EndedOutcome, decode: Decode | None) -> dict[str, Any]:
    """One line with the names of ``CompletionSampled``: ``number`` is that of the held-out prompt (of ``set``, where
    there are several); ``reward`` is null where ``failure`` says why. Without ``decode`` it has no texts."""
    if isinstance(outcome, TrajectoryLost):
        return _whose(outcome.id) | {"reward": None, "failure": outcome.reason}
    scored = outcome.outcome
    line = _whose(scored.trajectory.id)
    if isinstance(scored, RewardFailure):
        line |= {"reward": None, "failure": f"{scored.function} {scored.kind}: {scored.message}"}
    else:
        line |= {"reward": scored.reward, "rewards": scored.reward_parts}
    return line | _texts(scored.trajectory, decode)


def _whose(trajectory: TrajectoryId) -> dict[str, Any]:
    return {
        "step": trajectory.attempt,
        "number": -1 - trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample,
    }


def _texts(trajectory: Trajectory, decode: Decode | None) -> dict[str, Any]:
    prompt, completion = _prompt_of(trajectory), _completion_of(trajectory)
    fields: dict[str, Any] = {
        "finish_reason": trajectory.finish_reason,
        "tokens": trajectory.generated_tokens,
        "prompt_token_ids": prompt.tolist(),
        "token_ids": completion.tolist(),
    }
    fields |= {"turn_rewards": trajectory.turn_rewards} if trajectory.turn_rewards else {}
    return fields if decode is None else fields | {"prompt": decode(prompt), "text": _text_of(trajectory, decode)}


def _begun(trajectory: Trajectory) -> int:
    """Count the segments of the prompt: the first, where an environment wrote it."""
    return int(bool(trajectory.segments) and not trajectory.segments[0].trained)


def _prompt_of(trajectory: Trajectory) -> TokenArray:
    return _joined(trajectory.prompt.token_ids, trajectory.segments[: _begun(trajectory)])


def _completion_of(trajectory: Trajectory) -> TokenArray:
    return _joined(token_array(), trajectory.segments[_begun(trajectory) :])


def _joined(before: TokenArray, segments: Sequence[Segment]) -> TokenArray:
    return sum((segment.token_ids for segment in segments), before)


def _text_of(trajectory: Trajectory, decode: Decode) -> str:
    """The turns; what stands between them on lines of its own, which begin with ``>``."""
    parts = []
    for segment in trajectory.segments[_begun(trajectory) :]:
        text = decode(segment.token_ids)
        parts.append(text if segment.trained else f"\n> {text.strip()}\n".replace("\n\n", "\n"))
    return "".join(parts)

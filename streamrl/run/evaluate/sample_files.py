"""Completions on disk, to be read: all of an evaluation (``evaluations/step-N.jsonl``), three of each batch
(``samples.jsonl``)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from streamrl.base.atomic_files import MOST_BYTES, remove_oldest, write_durable
from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import LineFile
from streamrl.base.run_events import CompletionSampled, ShownMessage
from streamrl.base.stage_messages import EndedOutcome, Scored, TrajectoryLost
from streamrl.base.types import RewardFailure, ScoredTrajectory, Trajectory, TrajectoryId, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.sections import HELD_OUT

LONGEST_TEXT = 8_000
"""Characters of a prompt and of a completion there."""
MOST_TOKENS = 2_000
"""Tokens of a completion that are written one by one: decoding them is work of the controller."""
MOST_MESSAGES = 200
"""Of a conversation that is written by message."""
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

    def __init__(self, path: Path, tokenizer: Tokenizer, *, most_bytes: int = MOST_BYTES) -> None:
        self._tokenizer = tokenizer
        self._file = LineFile(path, most_bytes=most_bytes)

    def take(self, step: int, batch: Sequence[ScoredTrajectory]) -> list[CompletionSampled]:
        """Write those of the batch of ``step``. Returns what to show: one of them now and then."""
        ordered = sorted(batch, key=lambda scored: scored.reward)
        one = random.Random(step).choice(ordered)
        three = (("best", ordered[-1]), ("worst", ordered[0]), ("random", one))
        chosen = [sample_of(scored, self._tokenizer, step=step, chosen=kind) for kind, scored in three]
        self._file.append(*(_stored(shown, of[1], self._tokenizer) for shown, of in zip(chosen, three, strict=True)))
        return chosen[-1:] if step == 1 or step % SHOWN_EVERY == 0 else []

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def sample_of(scored: ScoredTrajectory, tokenizer: Tokenizer, *, step: int, chosen: str) -> CompletionSampled:
    """The completion as it is shown to people."""
    line = sample_line(Scored(outcome=scored), tokenizer) | {"step": step, "chosen": chosen}
    return msgspec.convert(line, CompletionSampled).shortened(LONGEST_TEXT)


def _stored(shown: CompletionSampled, scored: ScoredTrajectory, tokenizer: Tokenizer) -> StoredSample:
    stored = StoredSample(**msgspec.structs.asdict(shown), turn_rewards=scored.trajectory.turn_rewards)
    if shown.tokens > MOST_TOKENS:
        return stored
    turns = [segment for segment in scored.trajectory.segments if segment.trained]
    return msgspec.structs.replace(
        stored,
        token_texts=[
            tokenizer.decode(turn.token_ids[at : at + 1]) for turn in turns for at in range(len(turn.token_ids))
        ],
        logprobs=[round(logprob, 4) for turn in turns for logprob in turn.behavior_logprobs],
        versions=[
            span.policy_version for turn in turns for span in turn.version_spans for _ in range(span.end - span.start)
        ],
    )


async def write_evaluation(
    directory: Path,
    tokenizer: Tokenizer | None,
    policy_version: int,
    outcomes: Sequence[EndedOutcome],
    sets: Mapping[str, range] | None = None,
    *,
    most_bytes: int = MOST_BYTES,
) -> None:
    """Write ``step-N.jsonl`` in ``directory``, whole or not at all, in a thread. ``tokenizer``: None: ids
    only. ``sets``: numbers of the prompts of each set. ``most_bytes``: of all files there; the oldest ones are
    removed. Raises ``StreamRLError`` when the disk refuses."""
    path = directory / f"step-{policy_version:06d}.jsonl"
    try:
        await anyio.to_thread.run_sync(_write_lines, path, list(outcomes), tokenizer, sets or {}, most_bytes)
    except OSError as error:
        raise StreamRLError(
            f"the samples of the evaluation at step {policy_version} could not be written to {path}: {error}; "
            "free the disk, or set evaluation.advanced.store_samples = false"
        ) from error


def _write_lines(
    path: Path, outcomes: list[EndedOutcome], tokenizer: Tokenizer | None, sets: Mapping[str, range], most_bytes: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted(
        (sample_line(outcome, tokenizer) for outcome in outcomes), key=lambda at: (at["number"], at["sample"])
    )
    for line in lines if sets.keys() - {HELD_OUT} else ():
        name, numbers = next((name, numbers) for name, numbers in sets.items() if line["number"] in numbers)
        line |= {"set": name, "number": line["number"] - numbers.start}
    write_durable(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    remove_oldest(path.parent.glob("step-*.jsonl"), most_bytes)


def sample_line(outcome: EndedOutcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One line with the names of ``CompletionSampled``: ``number`` is that of the held-out prompt (of ``set``, where
    there are several); ``reward`` is null where ``failure`` says why. Without ``tokenizer`` it has no texts."""
    if isinstance(outcome, TrajectoryLost):
        return _whose(outcome.id) | {"reward": None, "failure": outcome.reason}
    scored = outcome.outcome
    line = _whose(scored.trajectory.id)
    if isinstance(scored, RewardFailure):
        line |= {"reward": None, "failure": f"{scored.function} {scored.kind}: {scored.message}"}
    else:
        line |= {"reward": scored.reward, "rewards": scored.reward_parts}
    trajectory = scored.trajectory
    begun = 1 + sum(not one.trained for one in trajectory.segments[:1])  # the environment may write the prompt
    parts = [trajectory.prompt.token_ids, *(segment.token_ids for segment in trajectory.segments)]
    line |= {
        "finish_reason": trajectory.finish_reason,
        "tokens": trajectory.generated_tokens,
        "prompt_token_ids": sum(parts[:begun], token_array()).tolist(),
        "token_ids": sum(parts[begun:], token_array()).tolist(),
    }
    line |= {"turn_rewards": trajectory.turn_rewards} if trajectory.turn_rewards else {}
    return line if tokenizer is None else line | _texts(trajectory, tokenizer)


def _whose(trajectory: TrajectoryId) -> dict[str, Any]:
    return {
        "step": trajectory.attempt,
        "number": -1 - trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample,
    }


def _texts(trajectory: Trajectory, tokenizer: Tokenizer) -> dict[str, Any]:
    """``prompt``, ``text`` and ``turns`` of ``CompletionSampled``. Lines of the text that begin with ``>`` are what an
    environment wrote between the turns."""
    several = trajectory.environment is not None or len(trajectory.segments) > 1
    if not several:
        completion = sum((segment.token_ids for segment in trajectory.segments), token_array())
        return {"prompt": tokenizer.decode(trajectory.prompt.token_ids), "text": tokenizer.decode(completion)}
    turns = [ShownMessage(*one) for one in tokenizer.messages(trajectory.prompt.token_ids, "prompt")]
    for segment in trajectory.segments:
        said = tokenizer.messages(segment.token_ids, "environment")
        if segment.trained:
            said = [("assistant", tokenizer.decode(segment.token_ids), len(segment.token_ids))]
        version = max((span.policy_version for span in segment.version_spans), default=0)
        turns += [
            ShownMessage(*one, sampled=segment.trained, version=version, again=segment.follows is not None and not at)
            for at, one in enumerate(said)
        ]
    first = next((place for place, turn in enumerate(turns) if turn.sampled), len(turns))
    prompt = "\n".join(f"{turn.role}: {turn.text}" for turn in turns[:first])
    written = (
        turn.text if turn.sampled else "\n> " + f"{turn.role}: {turn.text}".replace("\n", "\n> ") + "\n"
        for turn in turns[first:]
    )
    text = "".join(written).replace("\n\n>", "\n>")
    return {"prompt": prompt, "text": text, "turns": tuple(turns) if len(turns) <= MOST_MESSAGES else ()}

"""Files of completions for readers: all completions of an evaluation (``evaluations/step-N.jsonl``), and three of each
batch (``samples.jsonl``); and the first words of each prompt (``prompts.jsonl``).

The controller process writes them; ``streamrl samples``, the dashboard and trackers read them. ``streamrl eval`` and
``streamrl try`` use the same form."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from anyio import to_thread
from msgspec.structs import asdict, replace

from streamrl.base.atomic_files import MOST_BYTES, remove_oldest, write_durable
from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import LineFile
from streamrl.base.run_events import WORDS, CompletionSampled, NamedPrompt, NumberedText, ShownMessage
from streamrl.base.stage_messages import EndedOutcome, Scored, TrajectoryLost
from streamrl.base.types import JsonObject, RewardFailure, ScoredTrajectory, Trajectory, TrajectoryId, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.rewards import RewardCredit, credit_of
from streamrl.recipe.sections import HELD_OUT

LONGEST_TEXT = 8_000
"""Largest number of characters of a prompt and of a completion in ``samples.jsonl``."""
MOST_TOKENS = 2_000
"""Number of tokens above which a completion is not written token by token, because the controller decodes them."""
MOST_MESSAGES = 200
"""Number of messages above which a conversation is written as one text."""
MOST_NUMBERS = 200
"""Largest number of numbers of steps and tokens that are written with a completion."""
QUESTION_CHARACTERS = 400
SHOWN_EVERY = 10
"""Number of steps between two completions that the run shows; it also shows one of the first step."""


class StoredSample(CompletionSampled, frozen=True, kw_only=True, omit_defaults=True, tag="CompletionSampled"):
    """A completion with its tokens, as in ``samples.jsonl``.

    ``token_texts``, ``logprobs``, ``versions``: text, behaviour logprob and policy version of each token; empty where
    there are more than ``MOST_TOKENS``;
    ``turn_rewards``: rewards that the environment gave for turns."""

    token_texts: list[str] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turn_rewards: tuple[float, ...] = ()


class TrainingSamples(LineFile):
    """Appends the best, the worst and a random completion of each batch to ``path``, after those of earlier lives;
    where there are several training sets, those of each set."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, most_bytes: int = MOST_BYTES) -> None:
        super().__init__(path, most_bytes=most_bytes)
        self._tokenizer = tokenizer

    def take(self, step: int, batch: Sequence[ScoredTrajectory]) -> list[CompletionSampled]:
        """Write the completions of the batch of ``step``. Return the completions that the run is to show: one at the
        steps of ``SHOWN_EVERY``, else none."""
        samples: list[CompletionSampled] = []
        choices: list[ScoredTrajectory] = []
        for name in sorted({scored.trajectory.prompt.set for scored in batch}):
            of_set = [scored for scored in batch if scored.trajectory.prompt.set == name]
            ordered = sorted(of_set, key=lambda scored: scored.reward)
            random_one = random.Random(step).choice(ordered)
            for choice, scored in (("best", ordered[-1]), ("worst", ordered[0]), ("random", random_one)):
                samples.append(sample_of(scored, self._tokenizer, step=step, choice=choice))
                choices.append(scored)
        pairs = zip(samples, choices, strict=True)
        self.append(*(_stored(sample, scored, self._tokenizer) for sample, scored in pairs))
        if step == 1 or step % SHOWN_EVERY == 0:
            return samples[-1:]
        return []


class PromptWords(LineFile):
    """Appends the id and the first words of each prompt whose trajectory ended to ``path``, once a life of the
    controller: pages name prompts by them, also those of which no completion is kept."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, most_bytes: int = MOST_BYTES) -> None:
        super().__init__(path, most_bytes=most_bytes)
        self._tokenizer = tokenizer
        self._named: set[str] = set()

    def take(self, scored: Scored) -> None:
        """Write the words of the prompt of ``scored``, unless they are written already."""
        trajectory = scored.outcome.trajectory
        prompt_id = trajectory.id.prompt_id
        if prompt_id in self._named:
            return
        self._named.add(prompt_id)
        texts = _texts(trajectory, self._tokenizer)
        words = " ".join((texts["question"] or texts["prompt"]).split())
        self.append(NamedPrompt(prompt_id=prompt_id, words=words[:WORDS]))


def sample_of(scored: ScoredTrajectory, tokenizer: Tokenizer, *, step: int, choice: str) -> CompletionSampled:
    """Return the completion as the run shows it. ``choice``: reason to store it, for the field ``chosen``."""
    line = sample_line(Scored(outcome=scored), tokenizer) | {"step": step, "chosen": choice}
    return msgspec.convert(line, CompletionSampled).shortened(LONGEST_TEXT)


def _stored(sample: CompletionSampled, scored: ScoredTrajectory, tokenizer: Tokenizer) -> StoredSample:
    """Return ``sample`` with its tokens."""
    stored = StoredSample(**asdict(sample), turn_rewards=scored.trajectory.turn_rewards)
    if sample.tokens > MOST_TOKENS:
        return stored
    turns = [segment for segment in scored.trajectory.segments if segment.trained]
    return replace(
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
    """Write ``step-N.jsonl`` in ``directory``, completely or not at all, in a thread. Raises ``StreamRLError`` when the
    disk refuses.

    ``tokenizer``: tokenizer for the texts (None: only token ids are written);
    ``sets``: places of the prompts of each set;
    ``most_bytes``: limit of all files in ``directory``, above which the oldest ones are removed."""
    path = directory / f"step-{policy_version:06d}.jsonl"
    try:
        await to_thread.run_sync(_write_lines, path, list(outcomes), tokenizer, sets or {}, most_bytes)
    except OSError as error:
        raise StreamRLError(
            f"the samples of the evaluation at step {policy_version} could not be written to {path}: {error}; "
            "free the disk, or set evaluation.advanced.store_samples = false"
        ) from error


def _write_lines(
    path: Path, outcomes: list[EndedOutcome], tokenizer: Tokenizer | None, sets: Mapping[str, range], most_bytes: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [sample_line(outcome, tokenizer) for outcome in outcomes]
    lines.sort(key=lambda line: (line["number"], line["sample"]))
    if sets.keys() - {HELD_OUT}:
        for line in lines:
            name, numbers = next((name, numbers) for name, numbers in sets.items() if line["number"] in numbers)
            line |= {"set": name, "number": line["number"] - numbers.start}
    write_durable(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    remove_oldest(path.parent.glob("step-*.jsonl"), most_bytes)


def sample_line(outcome: EndedOutcome, tokenizer: Tokenizer | None) -> JsonObject:
    """Return a line with the names of ``CompletionSampled``, and two more: ``number`` is the number of the held-out
    prompt, and ``failure`` the reason for which ``reward`` is null. Without ``tokenizer`` the line has no texts."""
    if isinstance(outcome, TrajectoryLost):
        return _identity_fields(outcome.id) | {"reward": None, "failure": outcome.reason}
    scored = outcome.outcome
    line = _identity_fields(scored.trajectory.id)
    if isinstance(scored, RewardFailure):
        line |= {"reward": None, "failure": f"{scored.function} {scored.kind}: {scored.message}"}
    else:
        line |= {"reward": scored.reward, "rewards": scored.reward_parts}
    trajectory = scored.trajectory
    parts = [trajectory.prompt.token_ids, *(segment.token_ids for segment in trajectory.segments)]
    # An environment may write the first prompt, as an untrained segment after an empty prompt.
    prompt_parts = 1 + sum(not segment.trained for segment in trajectory.segments[:1])
    line |= {
        "finish_reason": trajectory.finish_reason,
        "tokens": trajectory.generated_tokens,
        "prompt_token_ids": sum(parts[:prompt_parts], token_array()).tolist(),
        "token_ids": sum(parts[prompt_parts:], token_array()).tolist(),
    }
    if trajectory.prompt.set:
        line["set"] = trajectory.prompt.set
    if trajectory.turn_rewards:
        line["turn_rewards"] = trajectory.turn_rewards
    if tokenizer is None:
        return line
    if isinstance(scored, ScoredTrajectory) and (numbers := _numbered_texts(scored, tokenizer)):
        line["numbers"] = numbers
    return line | _texts(trajectory, tokenizer)


def _numbered_texts(scored: ScoredTrajectory, tokenizer: Tokenizer) -> list[NumberedText]:
    """Return the numbers of steps and tokens with their texts, ``MOST_NUMBERS`` at most. The text of a step has the
    tokens since the step before; neighbouring tokens of equal numbers have one text."""
    texts = []
    token_ids = sum((part.token_ids for part in scored.trajectory.segments if part.trained), token_array())
    for name, values in scored.token_values.items():
        credit, label = credit_of(name)
        if not label:
            continue
        first = 0
        for place, number in enumerate(values):
            goes_on = credit is RewardCredit.TOKENS and values[place + 1 : place + 2] == values[place : place + 1]
            if math.isnan(number):
                first = first if credit is RewardCredit.STEPS else place + 1
            elif not goes_on:
                texts.append(NumberedText(label, number, tokenizer.decode(token_ids[first : place + 1])))
                first = place + 1
    return texts[:MOST_NUMBERS]


def _identity_fields(trajectory: TrajectoryId) -> JsonObject:
    return {
        "step": trajectory.attempt,
        "number": -1 - trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample,
    }


def _texts(trajectory: Trajectory, tokenizer: Tokenizer) -> JsonObject:
    """Return ``prompt``, ``question``, ``text`` and ``turns`` of ``CompletionSampled``. In the text of a conversation,
    messages that the environment wrote between the turns have lines that begin with ``>``."""
    if trajectory.environment is None and len(trajectory.segments) <= 1:
        completion = sum((segment.token_ids for segment in trajectory.segments), token_array())
        prompt_ids = trajectory.prompt.token_ids
        return {
            "prompt": tokenizer.decode(prompt_ids),
            "question": _question(tokenizer.messages(prompt_ids, "prompt")),
            "text": tokenizer.decode(completion),
        }
    messages = _shown_messages(trajectory, tokenizer)
    first = next((place for place, message in enumerate(messages) if message.sampled), len(messages))
    shown_prompt = messages[:first]
    prompt = "\n".join(f"{message.role}: {message.text}" for message in shown_prompt)
    texts = [message.text if message.sampled else _quoted(message) for message in messages[first:]]
    text = "".join(texts).replace("\n\n>", "\n>")
    if len(messages) > MOST_MESSAGES:
        messages = []
    question = _question([(message.role, message.text, 0) for message in shown_prompt])
    return {"prompt": prompt, "question": question, "text": text, "turns": tuple(messages)}


def _question(messages: Iterable[tuple[str, str, int]]) -> str:
    """Return the start of the last message of the user; empty where there is none."""
    questions = [text for role, text, _ in messages if role == "user"]
    return "".join(questions[-1:])[:QUESTION_CHARACTERS]


def _quoted(message: ShownMessage) -> str:
    quoted = f"{message.role}: {message.text}".replace("\n", "\n> ")
    return f"\n> {quoted}\n"


def _shown_messages(trajectory: Trajectory, tokenizer: Tokenizer) -> list[ShownMessage]:
    """Return the messages of the prompt and of all segments."""
    messages = [ShownMessage(*message) for message in tokenizer.messages(trajectory.prompt.token_ids, "prompt")]
    for segment in trajectory.segments:
        if segment.trained:
            parts = [("assistant", tokenizer.decode(segment.token_ids), len(segment.token_ids))]
        else:
            parts = tokenizer.messages(segment.token_ids, "environment")
        version = max((span.policy_version for span in segment.version_spans), default=0)
        for place, part in enumerate(parts):
            again = segment.follows is not None and place == 0
            messages.append(ShownMessage(*part, sampled=segment.trained, version=version, again=again))
    return messages

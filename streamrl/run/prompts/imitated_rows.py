"""Rows to imitate: prompts with a completion, whose cross-entropy is a part of the loss of each step.

``launch/run_controller.py`` opens them in the controller's process, and ``run/trainer_ranks.py`` sends them to the
ranks with the order to close a batch. The number of the version that a step makes says which rows it has, so that a run
that is resumed, or trains a batch of its journal again, has the same rows, and each is drawn once in an epoch."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import ImitatedSet
from streamrl.base.run_events import RunWarning
from streamrl.base.types import (
    IMITATED,
    JsonMapping,
    Prompt,
    TextMapping,
    TextsByName,
    TokenArray,
    TrainingSample,
    TrajectoryId,
    float_array,
)
from streamrl.pretrained.chat_template import ARGUMENTS_COLUMN, ChatError
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.environment import RUN_ENVIRONMENT
from streamrl.recipe.sections import Recipe
from streamrl.run.prompts.open_prompts import OpenPrompts, open_prompts
from streamrl.run.prompts.prompt_rows import BadRow, as_chat
from streamrl.run.prompts.prompt_spec import environment_writes, imitated_sources, with_options

COMPLETION_COLUMN = "completion"
"""Column with the completion of a row: a text, or a chat of one message."""

PLACEHOLDER = "(the completion)"
"""Text of a message in whose place a completion stands."""


def rows_until(recipe: Recipe, name: str, policy_version: int) -> int:
    """Number of rows of a set that the steps up to the version ``policy_version`` imitate: so many times
    ``rollout.prompts_per_batch`` as its share is of that of all sets which are sampled, rounded down."""
    imitated = recipe.prompts.imitated[name]
    sampled = sum(training_set.share for training_set in recipe.prompts.sets.values())
    steps = min(policy_version, imitated.imitate_steps or policy_version)
    return math.floor(steps * recipe.rollout.prompts_per_batch * imitated.share / sampled + 1e-9)


def sources_as_written(recipe: Recipe, tokenizer: Tokenizer, tools: TextMapping) -> TextsByName:
    """Source of each set by name. Rows of sets that have an environment become chats like those of its episodes, with
    its system message and its tools. ``tools``: JSON schemas of the tools of each environment, as text."""
    sources = imitated_sources(recipe)
    for name, settings in recipe.prompts.imitated.items():
        if environment_writes(recipe, settings) and tokenizer.chat_templates:
            environment = settings.environment_name or RUN_ENVIRONMENT
            system = recipe.environment.by_name[environment].system
            options = {"chat": True, "system": system, "tools": tools.get(environment, "")}
            sources[name] = with_options(sources[name], options)
    return sources


class ImitatedRows:
    """Rows of the sets to imitate.

    ``warn``: coroutine that gets a warning for the user;
    ``tools``: JSON schemas of the tools of each environment, as text."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, warn: Callable[[RunWarning], Awaitable[None]], tools: TextMapping
    ) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._warn = warn
        self._specs = sources_as_written(recipe, tokenizer, tools)
        self._sources: dict[str, OpenPrompts] = {}
        self._drawn: dict[str, int] = {}
        self._sets_at_end: set[str] = set()

    async def of_version(self, policy_version: int) -> tuple[ImitatedSet, ...]:
        """Rows of the step that makes ``policy_version``, of each set that has some. Raises ``StreamRLError`` for a row
        that cannot be imitated, as ``imitated_tokens``. Where an iterator has ended, there is a warning."""
        sets = []
        for name, imitated in self._recipe.prompts.imitated.items():
            first = rows_until(self._recipe, name, policy_version - 1)
            count = rows_until(self._recipe, name, policy_version) - first
            if not count:
                continue
            source = await self._at(name, first)
            prompts = await source.draw(count)
            self._drawn[name] = first + count
            if len(prompts) < count and name not in self._sets_at_end:
                self._sets_at_end.add(name)
                text = f"the iterator of prompts.train.{name} has ended: its rows are not imitated any more"
                await self._warn(RunWarning(step=policy_version, message=text))
            samples = [
                self._sample(name, prompt, number, policy_version) for number, prompt in enumerate(prompts, start=first)
            ]
            if samples:
                sets.append(ImitatedSet(name=name, weight=imitated.imitate, samples=tuple(samples)))
        return tuple(sets)

    async def aclose(self) -> None:
        """Close the files. Idempotent."""
        for source in self._sources.values():
            await source.aclose()
        self._sources.clear()

    async def _at(self, name: str, position: int) -> OpenPrompts:
        """Return the source of a set, whose next row is number ``position``."""
        source = self._sources.get(name)
        if source is not None and self._drawn[name] == position:
            return source
        if source is not None:
            await source.aclose()
        prompts = self._recipe.prompts
        self._sources[name] = open_prompts(
            self._specs[name], self._tokenizer, seed=self._recipe.run.seed, shuffle=prompts.shuffle, start=position
        )
        return self._sources[name]

    def _sample(self, name: str, prompt: Prompt, number: int, policy_version: int) -> TrainingSample:
        try:
            token_ids = imitated_tokens(prompt, self._tokenizer, self._recipe.context)
        except BadRow as error:
            raise StreamRLError(f"prompts.train.{name}: the row {prompt.prompt_id} {error}") from error
        imitated = len(token_ids) - len(prompt.token_ids)
        return TrainingSample(
            id=TrajectoryId(prompt_id=f"{name}/{prompt.prompt_id}", group_id=-1 - number, sample=0),
            token_ids=token_ids,
            loss_mask=bytes(len(prompt.token_ids)) + imitated * IMITATED,
            behavior_logprobs=float_array(bytes(4 * len(token_ids))),
            reward=0.0,
            oldest_version=policy_version - 1,
            newest_version=policy_version - 1,
        )


def imitated_tokens(prompt: Prompt, tokenizer: Tokenizer, context: int) -> TokenArray:
    """Token ids of a prompt with the completion of its row and the token that ends it, int32. Raises ``BadRow`` for a
    row without a completion, and one of more than ``context`` tokens."""
    completion = prompt.columns.get(COMPLETION_COLUMN)
    chat = as_chat(completion)
    if chat and len(chat) == 1 and isinstance(chat[0], Mapping):
        completion = chat[0].get("content")
    if not isinstance(completion, str) or not completion.strip():
        raise BadRow(
            f'has no completion to imitate: give it a column "{COMPLETION_COLUMN}", a text or a list of one message'
        )
    try:
        token_ids = prompt.token_ids + tokenizer.encode_fragment(completion)
        token_ids.append(_end_token(prompt.columns, tokenizer))
    except ChatError as error:
        raise BadRow(f"has a completion that cannot be tokenised: {error}") from error
    if beyond := tokenizer.beyond_model(token_ids):
        raise BadRow(f"has a completion with {beyond}")
    if len(token_ids) > context:
        raise BadRow(
            f"has {len(token_ids)} tokens with its completion, above the {context} of the run: remove it, or raise "
            "engines.max_model_len"
        )
    return token_ids


def _end_token(columns: JsonMapping, tokenizer: Tokenizer) -> int:
    """The token that ends a completion: in a chat the one that the model's template writes behind the message."""
    chat = as_chat(columns.get("prompt")) or columns.get("messages")
    if isinstance(chat, list):
        # A completion itself may be a part of the end token, as "e" of "<eos>".
        messages = [*chat, {"role": "assistant", "content": PLACEHOLDER}]
        written = tokenizer.write_chat(messages, None, columns.get(ARGUMENTS_COLUMN), generation_prompt=False)
        behind = written.rpartition(PLACEHOLDER)[2]
        ends = [token_id for token_id in tokenizer.encode_fragment(behind) if token_id in tokenizer.eos_token_ids]
        if ends:
            return ends[0]
    return tokenizer.eos_token_ids[0]

"""Completions for ``streamrl reward test`` and ``try``: read from a file, or sampled by an engine that is started for
them. Runs in the command's own process; the engine is a child process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct, json
from msgspec.structs import asdict, replace

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.base.messages import Generate
from streamrl.base.types import (
    FinishReason,
    JsonMapping,
    JsonObjects,
    Prompt,
    Texts,
    TokenArray,
    Trajectory,
    token_array,
)
from streamrl.cli.trained_models.model_evaluation import started_engine
from streamrl.prepare.called_rewards import trajectory_of
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.sections import Recipe
from streamrl.run.prompts.open_prompts import OpenPrompts

_MOST_AT_ONCE = 64
_READ_AHEAD = 256
_MOST_PROMPTS_LOOKED_AT = 1_000_000


class CompletedGroup(Struct, frozen=True):
    """The completions of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


class PlainText(Tokenizer):
    """Tokenizer where no model is named: a token is a byte of the text, so that every text comes back as it was."""

    def __init__(self) -> None:
        self.digest = ""
        self.eos_token_ids = ()
        self.vocabulary_size = 256

    def encode(self, text: str) -> TokenArray:
        """The bytes."""
        return token_array(list(text.encode(errors="surrogatepass")))

    def encode_chat(
        self, messages: JsonObjects, tools: JsonObjects | None = None, arguments: JsonMapping | None = None
    ) -> TokenArray:
        """The contents of the messages, a line each."""
        return self.encode("\n".join(str(message.get("content", "")) for message in messages))

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        """The text."""
        return bytes(token_ids.tolist()).decode(errors="surrogatepass")


class CompletionLine(Struct, frozen=True):
    """A line of a completions file. ``text`` is another name for ``completion``, used in ``evaluations/*.jsonl`` of a
    run; ``completions``: all completions of one prompt. The prompt is named by ``prompt_id``, or by ``prompt``, its
    text."""

    completion: str | None = None
    text: str | None = None
    completions: Texts = ()
    prompt_id: str | int | None = None
    prompt: str | int | None = None
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""

    def samples(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Texts, with token ids where the line has them."""
        completion = self.completion if self.completion is not None else self.text
        if completion is not None:
            yield completion, self.token_ids
        yield from ((text, ()) for text in self.completions)


async def groups_from_file(
    path: Path, source: OpenPrompts, prompt_count: int, tokenizer: Tokenizer
) -> list[CompletedGroup]:
    """The completions of ``path`` with their prompts of ``source``, at most ``prompt_count`` prompts. Raises
    ``RecipeError`` naming the line that is none, or when no prompt has a completion."""
    by_id, by_text = _read_completions(path)
    groups: list[CompletedGroup] = []
    drawn_count = 0
    draw_limit = source.size if source.size is not None else _MOST_PROMPTS_LOOKED_AT
    while drawn_count < draw_limit and len(groups) < prompt_count:
        prompts = await source.draw(min(_READ_AHEAD, draw_limit - drawn_count))
        drawn_count += len(prompts)
        for prompt in prompts:
            lines = by_id.get(prompt.prompt_id) or by_text.get(str(prompt.columns.get("prompt")))
            if lines and len(groups) < prompt_count:
                groups.append(_group(len(groups), prompt, lines, tokenizer))
        if not prompts:
            break
    if not groups:
        raise RecipeError(
            f"{path}: no line belongs to a prompt of the {drawn_count} that were read: "
            "each line names its prompt_id, or its prompt (the text)"
        )
    return groups


def _read_completions(path: Path) -> tuple[dict[str, list[CompletionLine]], dict[str, list[CompletionLine]]]:
    by_id: dict[str, list[CompletionLine]] = {}
    by_text: dict[str, list[CompletionLine]] = {}
    decoder = json.Decoder(CompletionLine)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    read = decoder.decode(line)
                except UNDECODABLE as error:
                    raise RecipeError(f"{path}, line {number} is no completion ({error}): correct it") from error
                if next(read.samples(), None) is None:
                    raise RecipeError(f'{path}, line {number} has no "completion" (or "completions"): add it')
                if read.prompt_id is not None:
                    by_id.setdefault(str(read.prompt_id), []).append(read)
                elif isinstance(read.prompt, str):
                    by_text.setdefault(read.prompt, []).append(read)
                else:
                    raise RecipeError(f'{path}, line {number} has no "prompt_id" and no "prompt": name its prompt')
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}): correct the path") from error
    return by_id, by_text


def _group(number: int, prompt: Prompt, lines: Sequence[CompletionLine], tokenizer: Tokenizer) -> CompletedGroup:
    samples = [(line, text, ids) for line in lines for text, ids in line.samples()]
    return CompletedGroup(
        prompt,
        tuple(
            trajectory_of(
                prompt,
                # Prefer the sampled token ids of the line: tokenising its text again may give other ids.
                token_array(ids) if ids and not isinstance(tokenizer, PlainText) else tokenizer.encode(text),
                group=number,
                sample=sample,
                finish_reason=FinishReason.LENGTH if line.finish_reason == FinishReason.LENGTH else FinishReason.STOP,
            )
            for sample, (line, text, ids) in enumerate(samples)
        ),
    )


async def groups_from_engine(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    samples: int,
    progress: Callable[[int], None] = lambda sampled_count: None,
) -> tuple[list[CompletedGroup], float]:
    """Sample ``samples`` completions of each prompt from an engine of ``recipe``, which runs for the duration of this
    call. Returns the groups and the seconds of sampling, without the start. ``progress`` is called with the number of
    sampled completions, first with 0 once the engine is ready. Raises ``RecipeError`` for a model that cannot be used,
    ``EngineError`` when it does not start or dies."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    concurrency = min(_MOST_AT_ONCE, len(prompts) * samples)
    context = longest + recipe.sampling.max_tokens
    capacity = asyncio.Semaphore(concurrency)
    engines = replace(recipe.engines, max_num_seqs=concurrency, max_model_len=context)
    async with started_engine(replace(recipe, engines=engines)) as engine:
        sampled_count = 0

        async def sample(group: int, index: int, prompt: Prompt) -> Trajectory:
            sampling = asdict(recipe.sampling)
            sampling["max_tokens"] = prompt.token_limit(recipe.sampling.max_tokens)
            request = Generate(
                request_id=f"{group}.{index}", token_ids=prompt.token_ids, seed=group * samples + index, **sampling
            )
            nonlocal sampled_count
            async with capacity:
                completion = await engine.generate(request)
            sampled_count += 1
            progress(sampled_count)
            logprobs = completion.behavior_logprobs
            return trajectory_of(
                prompt,
                completion.token_ids,
                group=group,
                sample=index,
                finish_reason=completion.finish_reason,
                logprobs=logprobs,
            )

        progress(0)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            sampling_tasks = [
                [tasks.create_task(sample(group, index, prompt)) for index in range(samples)]
                for group, prompt in enumerate(prompts)
            ]
        seconds = time.perf_counter() - began
    groups = [
        CompletedGroup(prompt, tuple(task.result() for task in group_tasks))
        for prompt, group_tasks in zip(prompts, sampling_tasks, strict=True)
    ]
    return groups, seconds

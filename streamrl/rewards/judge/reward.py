"""The reward ``judge``: a language model behind an OpenAI-compatible endpoint scores a completion. Listed in
``builtin.catalog``.

Equal questions are sent once (samples of a group are often equal), and answers are cached by the hash of the request.
Without an endpoint questions go to the run's own judge (the recipe's ``[judge]``). A judge that cannot be reached, and
an answer without a score, are failures of the reward and never a 0."""

from __future__ import annotations

import hashlib
import os
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from streamrl.base.types import JsonObject
from streamrl.recipe.field_types import Natural, NaturalFloat, Positive, PositiveFloat
from streamrl.recipe.judge import CALLS_AT_ONCE, JUDGE_MODEL, JUDGE_SOCKET
from streamrl.rewards.declared import BadOption, BuiltinReward, Options, RewardCallable, compiled, declare, last_match
from streamrl.rewards.judge.client import AnswerCache, JudgeClient

DEFAULT_QUESTION = """\
Rate the answer to the task below from 0 (useless or wrong) to 10 (correct and complete).

<task>
{prompt}
</task>

<answer>
{completion}
</answer>

Think briefly. Then end with a line of the form "Score: N"."""

_PROVIDED = ("prompt", "finish_reason", "prompt_id")
_LONGEST_QUOTE = 120


class JudgeOptions(Options, frozen=True):
    """Options of a judged reward: a score, scaled from ``lowest``..``highest`` to 0..1, or a choice.

    ``endpoint``: address such as ``http://host:8000/v1``; ``model``: name of the model at the endpoint; both empty: the
    run's own judge. ``question``: text of the question, in which ``{completion}``, ``{prompt}`` and ``{any_column}``
    are replaced. ``system``: a system message. ``chat`` false: ``/completions`` with the question as it is, for a model
    without a chat template. ``score``: a regular expression; the first group of its last match in the answer is the
    score. ``choices``: words and their scores, such as ``{yes = 1, no = 0}``, in place of ``score``; the last of these
    words in the answer counts. ``max_tokens``, ``temperature``: sampling of the judge's answer; ``request``: further
    fields of the request. ``api_key_variable``: environment variable that holds the key. ``concurrency``: requests at
    once, for each reward worker; ``retries``: number of retries after a busy or broken server, with a growing wait;
    ``timeout_s``: time limit of one request (for the run's own judge the time limit of the reward, which includes a
    restart of the judge). ``cache``: a file in which answers last (empty: memory of the worker); ``cache_entries``:
    number of the newest answers that the cache keeps."""

    endpoint: str = ""
    model: str = ""
    question: str = DEFAULT_QUESTION
    system: str = ""
    chat: bool = True
    score: str = r"(?i)score\W{1,4}?(-?\d+(?:\.\d+)?)"
    lowest: float = 0.0
    highest: float = 10.0
    choices: dict[str, float] = {}
    max_tokens: Positive = 512
    temperature: NaturalFloat = 0.0
    request: JsonObject = {}
    api_key_variable: str = ""
    concurrency: Positive = CALLS_AT_ONCE
    retries: Natural = 4
    timeout_s: PositiveFloat = 60.0
    cache: str = ""
    cache_entries: Positive = 100_000


class Verdicts:
    """Reader of the score in an answer of the judge. Raises ``BadOption`` for options that contradict each other."""

    def __init__(self, options: JudgeOptions) -> None:
        self._choices = {word.casefold(): value for word, value in options.choices.items()}
        if self._choices:
            words = "|".join(sorted(map(re.escape, self._choices), key=len, reverse=True))
            self._pattern = compiled("choices", rf"(?i)(?<!\w)({words})(?!\w)")
        else:
            self._pattern = compiled("score", options.score)
        if options.highest <= options.lowest:
            raise BadOption(f'"highest" = {options.highest:g} is not above "lowest" = {options.lowest:g}: correct one')
        self._lowest = options.lowest
        self._highest = options.highest

    def read(self, answer: str) -> float:
        """The reward. Raises ``ValueError`` where the answer has no score, or a score out of range."""
        text = last_match(self._pattern, answer)
        quote = answer if len(answer) <= _LONGEST_QUOTE else f"...{answer[-_LONGEST_QUOTE:]}"
        if text is None:
            raise ValueError(f"the judge's answer holds no score: {quote!r}: raise max_tokens, or mend the question")
        if self._choices:
            return self._choices[text.casefold()]
        score = float(text)
        if not self._lowest <= score <= self._highest:
            limits = f"{self._lowest:g} to {self._highest:g}"
            raise ValueError(f"the judge's score {text} is not in {limits}: {quote!r}: mend the question")
        return (score - self._lowest) / (self._highest - self._lowest)


def _judge(options: JudgeOptions) -> RewardCallable:
    fields = _fields(options.question)
    verdicts = Verdicts(options)
    if options.endpoint:
        model = options.model
        headers = _authorization(options.api_key_variable)
        timeout_s: float | None = options.timeout_s
        socket_path = None
    else:
        # The run's own judge. Both variables are empty where the recipe is only checked, which asks no question.
        model = os.environ.get(JUDGE_MODEL, "")
        headers = {}
        timeout_s = None
        socket_path = os.environ.get(JUDGE_SOCKET, "")
    client = JudgeClient(
        options.endpoint or "http://judge/v1",
        headers,
        concurrency=options.concurrency,
        retries=options.retries,
        timeout_s=timeout_s,
        socket_path=socket_path,
    )
    cache = AnswerCache(options.cache, options.cache_entries)
    route = "chat/completions" if options.chat else "completions"

    async def judge(completion: str, **columns: Any) -> float:
        question = options.question.format(completion=completion, **{name: columns[name] for name in fields})
        body = _request(options, model, question)
        key = hashlib.sha256(msgspec.json.encode([route, body], order="deterministic")).hexdigest()
        async with cache.alone(key):
            cached_answer = cache.find(key)
            if cached_answer is not None:
                # The cached answer may have no score for this ``score``, if another one read it: then ask again.
                with suppress(ValueError):
                    return verdicts.read(cached_answer)
            answer = await client.ask(route, body)
            value = verdicts.read(answer)  # an answer without a score is not cached, so a retry asks again
            cache.add(key, answer)
            return value

    judge.aclose = client.aclose  # type: ignore[attr-defined]
    provided = [name for name in fields if name in _PROVIDED]
    return declare(judge, columns=[name for name in fields if name not in _PROVIDED], provided=provided)


def _fields(question: str) -> list[str]:
    """Return the columns that the question names in addition to the completion. Raises ``BadOption``."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(question) if name is not None}
    except ValueError as error:
        raise BadOption(f'"question" is no template ({error}): write {{{{ and }}}} for braces') from error
    invalid_names = sorted(name for name in names if not name.isidentifier())
    if invalid_names:
        raise BadOption(f'"question" names {{{invalid_names[0]}}}: name a column, and write {{{{ and }}}} for braces')
    if "completion" not in names:
        raise BadOption('"question" has no {completion}: the judge must see it')
    return sorted(names - {"completion"})


def _authorization(variable: str) -> Mapping[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise BadOption(f'"api_key_variable": {variable} is not set: export it, and name it in "variables"')
    return {"Authorization": f"Bearer {key}"}


def _request(options: JudgeOptions, model: str, question: str) -> JsonObject:
    body: JsonObject = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        **options.request,
    }
    if not options.chat:
        return {**body, "prompt": question}
    messages = [{"role": "user", "content": question}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    return {**body, "messages": messages}


def _checked_judge(options: JudgeOptions) -> RewardCallable:
    address = urlsplit(options.endpoint)
    if options.endpoint and (address.scheme not in ("http", "https") or not address.netloc):
        raise BadOption(f'"endpoint" = "{options.endpoint}" is no address: write it as http://host:8000/v1')
    if options.endpoint and not options.model:
        raise BadOption('"model" is empty: give the name that the endpoint knows it by')
    if options.model and not options.endpoint:
        raise BadOption(f'"model" = "{options.model}" has no endpoint: set it, or name the model in [judge] instead')
    if not options.endpoint and os.environ.get(JUDGE_SOCKET) == "":
        raise BadOption('"endpoint" is empty, and this run has no judge of its own: set it, or [judge] in the recipe')
    folder = Path(options.cache).absolute().parent
    if options.cache and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise BadOption(f'"cache" = "{options.cache}": nothing can be made in {folder}: name a file elsewhere')
    return _judge(options)


JUDGE = BuiltinReward("judge", JudgeOptions, _checked_judge, needs={"httpx": "rewards"})

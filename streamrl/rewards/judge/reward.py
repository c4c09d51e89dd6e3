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
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, json

from streamrl.base.types import JsonMapping, JsonObject, TextMapping, Texts
from streamrl.recipe.field_types import Natural, NaturalFloat, Positive, PositiveFloat
from streamrl.recipe.served_models import CALLS_AT_ONCE, JUDGE_MODEL, JUDGE_SOCKET, address_problem
from streamrl.rewards.declared import BadOption, BuiltinReward, Options, RewardCallable, compiled, declare, last_match
from streamrl.rewards.judge.answer_cache import AnswerCache
from streamrl.rewards.judge.forms import (
    CRITERION_QUESTION,
    FIRST_OR_SECOND,
    PAIR_QUESTION,
    RANKING_QUESTION,
    SINGLE_QUESTION,
    STEP_QUESTION,
    YES_OR_NO,
    Reader,
    SiblingComparison,
    about_completion,
    about_criteria,
    about_pairs,
    about_ranking,
    about_steps,
    rubric_text,
)
from streamrl.rewards.served.client import ModelClient

_PROVIDED = ("prompt", "finish_reason", "prompt_id")
_LONGEST_QUOTE = 120
_SIBLINGS = ("completion", "completions")
"""Fields of completions. A comparison shows siblings by its own fields."""


class JudgeOptions(Options, frozen=True):
    """Options of a judged reward: a score, scaled from ``lowest``..``highest`` to 0..1, or a choice.

    ``compare``: ``pairs`` or ``ranking`` compares siblings (``none``: each completion is judged alone); ``opponents``:
    number of siblings with which ``pairs`` compares each one (0: all); ``orders``: number of orders in which
    ``ranking`` shows siblings, half of them reversed ones. ``rubric``: column with the criteria of a row, each of which
    is asked about alone; a comparison sees all of them. ``steps``: regular expression that ends a step, for numbers of
    steps.

    ``endpoint``: address such as ``http://host:8000/v1``; ``model``: name of the model at the endpoint; both empty: the
    run's own judge. ``question``: text of the question, in which ``{completion}``, ``{prompt}`` and ``{any_column}``
    are replaced, and ``{criterion}`` with ``rubric``, ``{before}`` and ``{step}`` with ``steps``, ``{first}`` and
    ``{second}``, or ``{completions}``, and ``{rubric}`` with ``compare`` (empty: a text for each of these). ``system``:
    a system message. ``chat`` false: ``/completions`` with the question as it is, for a model without a chat template.
    ``score``: a regular expression; the first group of its last match in the answer is the score. ``choices``: words
    and their scores, such as ``{yes = 1, no = 0}``, in place of ``score``; the last of these words in the answer
    counts. ``max_tokens``, ``temperature``: sampling of the judge's answer; ``request``: further fields of the request.
    ``api_key_variable``: environment variable that holds the key. ``concurrency``: requests at once, for each reward
    worker; ``retries``: number of retries after a busy or broken server, with a growing wait; ``timeout_s``: time limit
    of one request (for the run's own judge the time limit of the reward, which includes a restart of the judge).
    ``cache``: a file in which answers last (empty: memory of the worker); ``cache_entries``: number of the newest
    answers that the cache keeps."""

    endpoint: str = ""
    model: str = ""
    question: str = ""
    compare: SiblingComparison = SiblingComparison.NONE
    opponents: Natural = 0
    orders: Positive = 2
    rubric: str = ""
    steps: str = ""
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

    def __init__(self, options: JudgeOptions, choices: Mapping[str, float]) -> None:
        self._choices = {word.casefold(): value for word, value in choices.items()}
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


class _Questions:
    """Asks the questions of one judged reward, each once, with ``template`` filled in."""

    def __init__(self, options: JudgeOptions, template: str) -> None:
        self._options = options
        self._template = template
        self.fields = _fields(template)
        # The run's own judge. Both variables are empty where the recipe is only checked, which asks no question.
        self._model = options.model if options.endpoint else os.environ.get(JUDGE_MODEL, "")
        self.client = ModelClient(
            options.endpoint or "http://judge/v1",
            _authorization(options),
            concurrency=options.concurrency,
            retries=options.retries,
            timeout_s=options.timeout_s if options.endpoint else None,
            socket_path=None if options.endpoint else os.environ.get(JUDGE_SOCKET, ""),
        )
        self._cache = AnswerCache(options.cache, options.cache_entries)
        self._route = "chat/completions" if options.chat else "completions"

    async def ask(self, read: Reader[Any], fields: JsonMapping) -> Any:
        """Result of ``read`` for the answer to the question with ``fields``. Raises its errors, and ``ModelError``."""
        values = {name: fields[name] for name in self.fields if name != "rubric" or not self._options.rubric}
        if self._options.rubric and "rubric" in self.fields:
            values["rubric"] = rubric_text(fields[self._options.rubric])
        body = _request(self._options, self._model, self._template.format(**values))
        key = hashlib.sha256(json.encode([self._route, body], order="deterministic")).hexdigest()
        async with self._cache.alone(key):
            cached_answer = self._cache.find(key)
            if cached_answer is not None:
                # The cached answer may have no score for this ``score``, if another one read it: then ask again.
                with suppress(ValueError):
                    return read(cached_answer)
            answer = await self.client.ask(self._route, body)
            value = read(answer)  # an answer without a score is not cached, so a retry asks again
            self._cache.add(key, answer)
            return value


class _Form(Struct, frozen=True):
    """Defaults of a form of questions. ``fields``: fields that the form itself fills in, each of which a question
    needs; ``choices``: words of an answer."""

    question: str
    fields: Texts
    choices: dict[str, float] = {}


_FORMS = {
    "alone": _Form(SINGLE_QUESTION, ("completion",)),
    "criteria": _Form(CRITERION_QUESTION, ("completion", "criterion"), YES_OR_NO),
    "steps": _Form(STEP_QUESTION, ("before", "step"), YES_OR_NO),
    "pairs": _Form(PAIR_QUESTION, ("first", "second"), FIRST_OR_SECOND),
    "ranking": _Form(RANKING_QUESTION, ("completions",)),
}


def _form_of(options: JudgeOptions) -> str:
    """The name of the form of the questions. Raises ``BadOption`` for options of several forms."""
    compares = options.compare is not SiblingComparison.NONE
    if options.steps and (compares or options.rubric):
        raise BadOption(f'"steps" = {options.steps!r} beside compare or rubric: remove one')
    for name, comparison in (("opponents", SiblingComparison.PAIRS), ("orders", SiblingComparison.RANKING)):
        if getattr(options, name) != getattr(JudgeOptions(), name) and options.compare is not comparison:
            raise BadOption(f'"{name}" has no effect without compare = "{comparison}": set that, or remove it')
    if options.orders % 2:
        raise BadOption(f'"orders" = {options.orders} is odd, and each order is asked reversed, too: make it even')
    if compares:
        return options.compare.value
    if options.rubric:
        return "criteria"
    return "steps" if options.steps else "alone"


def _refuse_unread(options: JudgeOptions, choices: Mapping[str, float]) -> None:
    """Raise ``BadOption`` for an option by which a score would be read, where answers have none. ``choices``: words of
    an answer."""
    unread = ["score", "lowest", "highest"]
    reason = f"an answer is one of {', '.join(choices)}"
    if options.compare is SiblingComparison.RANKING:
        unread.append("choices")
        reason = 'compare = "ranking" reads ranks'
    elif not choices:
        return
    for name in unread:
        if getattr(options, name) != getattr(JudgeOptions(), name):
            raise BadOption(f'"{name}" has no effect, because {reason}: remove it')


def _judge(options: JudgeOptions) -> RewardCallable:
    name = _form_of(options)
    form = _FORMS[name]
    compares = options.compare is not SiblingComparison.NONE
    template = options.question
    if not template:
        template = form.question if options.rubric else form.question.replace("{rubric}", "")
    questions = _Questions(options, template)
    missing = [field for field in form.fields if field not in questions.fields]
    if missing:
        raise BadOption(f'"question" has no {{{missing[0]}}}: the judge must see it')
    other = next((field for field in _SIBLINGS if field in questions.fields and field not in form.fields), "")
    if compares and other:
        raise BadOption(f'"question" names {{{other}}}, and compare shows {{{form.fields[0]}}}: remove it')
    choices = options.choices or form.choices
    _refuse_unread(options, choices)
    if options.compare is SiblingComparison.PAIRS and not all(0 <= value <= 1 for value in options.choices.values()):
        raise BadOption('"choices" has a value outside of 0 to 1: give the share of the first completion')
    read = Verdicts(options, choices).read
    judges = {
        "alone": partial(about_completion, questions.ask, read),
        "criteria": partial(about_criteria, questions.ask, read, options.rubric),
        "steps": partial(about_steps, questions.ask, read, compiled("steps", options.steps)),
        "pairs": partial(about_pairs, questions.ask, read, options.opponents),
        "ranking": partial(about_ranking, questions.ask, options.orders),
    }
    judge = judges[name]()
    judge.aclose = questions.client.aclose  # type: ignore[attr-defined]
    fields = [field for field in questions.fields if field not in ("completion", *form.fields)]
    if options.rubric:
        fields = [*(field for field in fields if field != "rubric"), options.rubric]
    provided = [field for field in fields if field in _PROVIDED]
    columns = [field for field in fields if field not in _PROVIDED]
    if not compares:
        return declare(judge, columns=columns, provided=provided)
    if "finish_reason" in provided:
        raise BadOption('"question" names {finish_reason}, which siblings do not share: remove it')
    provided = ["prompts" if field == "prompt" else field for field in provided]
    return declare(judge, columns=columns, provided=provided, of_group=True)


def _fields(question: str) -> list[str]:
    """Return the fields that the question names. Raises ``BadOption``."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(question) if name is not None}
    except ValueError as error:
        raise BadOption(f'"question" is no template ({error}): write {{{{ and }}}} for braces') from error
    invalid_names = sorted(name for name in names if not name.isidentifier())
    if invalid_names:
        raise BadOption(f'"question" names {{{invalid_names[0]}}}: name a column, and write {{{{ and }}}} for braces')
    return sorted(names)


def _authorization(options: JudgeOptions) -> TextMapping:
    variable = options.api_key_variable
    if not variable or not options.endpoint:
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
    if options.endpoint and (problem := address_problem(options.endpoint)):
        raise BadOption(f'"endpoint" = {problem}')
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

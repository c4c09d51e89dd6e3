"""Reward functions of TRL, verl and others: worth what they are worth there, or refused in words.

The yardstick calls a function as TRL 1.16 does (``GRPOTrainer._calculate_rewards``) or as verl 0.5 does
(``NaiveRewardManager``), on the same completions of one prompt."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.base.types import (
    FinishReason,
    Prompt,
    RewardFailure,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)
from streamrl.cli.try_rewards.trial_completions import PlainText
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.user_code import load_user_object
from streamrl.rewards.calls.inspect import inspect_in_subprocess
from streamrl.rewards.calls.reward_set import RewardSet
from streamrl.rewards.signature import needed_columns
from streamrl.run.prompts.open_prompts import missing_columns

TEXTS = ("4", "5", "44 and more", "4", "the answer is 4")
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2"}]
COLUMNS: dict[str, Any] = {
    "answer": "4", "level": 3, "answers": ["4", "four"], "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train", "index": 7},
}  # fmt: skip

Values = list[Any]


def _ids(text: str) -> list[int]:
    return PlainText().encode(text).tolist()


def _prompt(chat: bool) -> Prompt:
    shown: dict[str, Any] = {"prompt": CHAT} if chat else {"prompt": "2+2"}
    return Prompt(prompt_id="p", token_ids=token_array(_ids("2+2")), columns=COLUMNS | shown)


def _trajectory(text: str, sample: int, chat: bool) -> Trajectory:
    ids = token_array(_ids(text))
    return Trajectory(
        id=TrajectoryId(prompt_id="p", group_id=0, sample=sample),
        prompt=_prompt(chat),
        segments=(Segment(token_ids=ids, trained=True, behavior_logprobs=float_array([0.0] * len(ids))),),
        finish_reason=FinishReason.STOP,
    )


def ours(spec: str, chat: bool) -> Values | str:
    """A value or a failure for each completion; why the dry run refuses the function."""
    reward = Reward(function=spec, trusted=True)
    (inspection,) = inspect_in_subprocess([reward])
    if inspection.signature is None:
        return "; ".join(inspection.problems)
    if missing := missing_columns(_prompt(chat), needed_columns([inspection.signature])):
        return "; ".join(missing)

    async def score() -> Values:
        async with asyncio.TaskGroup() as tasks:
            rewards = RewardSet([reward], RewardLimits(), PlainText(), tasks)
            try:
                await rewards.open()
                outcomes = await rewards.score([_trajectory(text, i, chat) for i, text in enumerate(TEXTS)])
            finally:
                await rewards.aclose()
        return [_value(outcome) for outcome in outcomes]

    return asyncio.run(score())


def _value(outcome: Any) -> Any:
    if not isinstance(outcome, RewardFailure):
        return outcome.reward
    return None if outcome.message.startswith("not applicable") else outcome.message


def _returned(call: Callable[[], Any]) -> Any:
    async def finish(pending: Any) -> Any:
        return await pending

    returned = call()
    return asyncio.run(finish(returned)) if inspect.isawaitable(returned) else returned


def trl(function: Any, chat: bool) -> Values:
    """The values that TRL has."""
    count = len(TEXTS)
    completions: list[Any] = [[{"role": "assistant", "content": text}] for text in TEXTS] if chat else list(TEXTS)
    columns = {name: [value] * count for name, value in COLUMNS.items()}
    prompts = [CHAT if chat else "2+2"] * count
    given = {"prompts": prompts, "completions": completions, "completion_ids": [_ids(text) for text in TEXTS]}
    values = _returned(lambda: function(**given, **columns, trainer_state=None, log_extra=None, log_metric=None))
    return [None if value is None else float(value) for value in values]


def verl(function: Any, _: bool) -> Values:
    """The values that verl has: of a mapping its score."""
    answer = COLUMNS["reward_model"]["ground_truth"]
    source, extra = COLUMNS["data_source"], COLUMNS["extra_info"]
    given = {"data_source": source, "ground_truth": answer, "extra_info": extra}
    taken = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        given = {name: value for name, value in given.items() if name in taken}  # custom functions have fewer
    values = [_returned(partial(function, solution_str=text, **given)) for text in TEXTS]
    return [float(value["score"] if isinstance(value, dict) else value) for value in values]


def called(function: Any, _: bool) -> Values:
    """The values of a function of one completion that is called by name, as in verifiers."""
    given = {"completion": None, "prompt": "2+2", "answer": "4"}
    taken = inspect.signature(function).parameters
    chosen = {name: value for name, value in given.items() if name in taken}
    return [float(_returned(partial(function, **chosen | {"completion": text}))) for text in TEXTS]


def same_as(yardstick: Callable[[Any, bool], Values], source: str, *, chat: bool = False) -> Callable[[Path], str]:
    """A variant that is worth what the yardstick says, and not the same everywhere."""

    def variant(directory: Path) -> str:
        spec = _written(directory, source)
        right, found = yardstick(load_user_object(spec), chat), ours(spec, chat)
        if len(set(right)) < 2:
            return f"the variant says nothing: {right}"
        return "" if found == right else f"{found} in place of {right}"

    return variant


def refused(words: str, source: str, *, chat: bool = False) -> Callable[[Path], str]:
    """A variant that the dry run refuses with these words."""

    def variant(directory: Path) -> str:
        found = ours(_written(directory, source), chat)
        return "" if isinstance(found, str) and words in found else f"{found} in place of a refusal with {words!r}"

    return variant


def fails(words: str, source: str) -> Callable[[Path], str]:
    """A variant of which every completion fails with these words: no signature could say so."""

    def variant(directory: Path) -> str:
        found = ours(_written(directory, source), False)
        good = isinstance(found, list) and all(isinstance(one, str) and words in one for one in found)
        return "" if good else f"{found} in place of failures with {words!r}"

    return variant


def _written(directory: Path, source: str) -> str:
    (directory / "reward.py").write_text(source)
    return f"{directory / 'reward.py'}:reward"


_PAIRS = "return [float(c == a) for c, a in zip(completions, answer)]"
_CHATS = "return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]"
_LENGTHS = "return [len(c) for c in completions]"
_ONE = "return float(solution_str == ground_truth)"
_METHOD = f"(self, completions, answer, **kwargs):\n        {_PAIRS}\n"
_INNER = "    def inner(*a, **k): return f(*a, **k)\n    return inner\n"


def _function(parameters: str, body: str, before: str = "") -> str:
    return f"{before}def reward({parameters}):\n    {body}\n"


# fmt: off
_PAIRED = _function("completions, answer, **kwargs", _PAIRS)
_TRL = {
    "a column": _PAIRED,
    "prompts first": _function("prompts, completions, answer, **kwargs", _PAIRS),
    "named only": _function("*, completions, answer, **kwargs", _PAIRS),
    "columns of kwargs": _function("completions, **_", "return [len(c) * n for c, n in zip(completions, _['level'])]"),
    "ids alone": _function("completion_ids, **kwargs", "return [float(len(ids)) for ids in completion_ids]"),
    "ids of kwargs": _function("completions, **kwargs", "return [sum(ids) for ids in kwargs['completion_ids']]"),
    "prompts too": _function("prompts, completions, **_", "return [len(p + c) for p, c in zip(prompts, completions)]"),
    "a list as column": _function("completions, answers, **_", "return [c in a for c, a in zip(completions, answers)]"),
    "async": "async " + _PAIRED,
    "None for some": _function("completions, **kwargs", "return [None if len(c) > 5 else len(c) for c in completions]"),
    "defaults that TRL fills": _function("completions, answer, log_extra=None, trainer_state=None, **kwargs", _PAIRS),
    "typing": _function("completions: List[str], answer: List[str], **kwargs", _PAIRS, "from typing import List\n"),
    "annotations as strings": _function("completions: 'list[str]', answer: 'list[str]', **kwargs", _PAIRS),
    "partial": _PAIRED.replace("answer", "scale, answer", 1).replace("reward", "f")
    + "import functools\nreward = functools.partial(f, scale=2)\n",
    "an instance": f"class R:\n    def __call__{_METHOD}reward = R()\n",
    "an async instance": f"class R:\n    async def __call__{_METHOD}reward = R()\n",
    "a method": f"class R:\n    def score{_METHOD}reward = R().score\n",
    "decorated": f"import functools\ndef log(f):\n    @functools.wraps(f)\n{_INNER}@log\n{_PAIRED}",
    "made by a function": "def make(n):\n    return lambda completion_ids, **_: [len(i) > n for i in completion_ids]\n"
    "reward = make(2)\n",
    "a lambda": "reward = lambda completions, **kwargs: [len(c) for c in completions]\n",
    "further positional": _function("completions, *args, **kwargs", _LENGTHS),
}
_TRL_CHAT = {
    "chat": _function("completions, answer, **kwargs", _CHATS),
    "chat, async": "async " + _function("completions, answer, **kwargs", _CHATS),
    "chat, annotated": _function("completions: list[list[dict[str, str]]], answer: list[str], **kwargs", _CHATS),
    "chat, prompts": _function("prompts, completions, **_",
        "return [len(p[-1]['content']) * len(c[0]['content']) for p, c in zip(prompts, completions)]"),
    "chat, roles": _function("completions, **_",
        "return [len(c[0]['content']) * (c[-1]['role'] == 'assistant') for c in completions]"),
}
_VERL = {
    "compute_score": _function("data_source, solution_str, ground_truth, extra_info=None", _ONE),
    "extra_info": _function("solution_str, ground_truth, extra_info", "return len(solution_str) * extra_info['index']"),
    "as in gsm8k.py": _function("solution_str, ground_truth, method='strict', score=1.0", _ONE),
    "a mapping": _function("data_source, solution_str, ground_truth, extra_info=None",
        "return {'score': float(solution_str == ground_truth), 'acc': 1, 'pred': solution_str}"),
    "async": "async " + _function("data_source, solution_str, ground_truth, extra_info=None, **kwargs", _ONE),
    "kwargs": _function("solution_str, ground_truth, **kwargs", _ONE),
    "the source": _function("data_source, solution_str, ground_truth", "return len(solution_str + data_source)"),
}
_CALLED = {
    "by name": _function("prompt, completion, answer", "return completion.startswith(answer)"),
    "async": "async " + _function("completion, answer", "return float(completion == answer)"),
    "named only": _function("*, completion, answer", "return float(completion == answer)"),
}
_REFUSED = {
    "verifiers: state": ("verifiers gives that", "completion, answer, state"),
    "verifiers: messages": ("annotated Messages", "completion: 'Messages', answer"),
    "trl: trainer_state": ("TRL gives that", "completions, trainer_state"),
    "verl: in batches": ("verl in batches gives that", "data_sources, solution_strs, ground_truths, extra_infos"),
    "openrlhf": ("OpenRLHF gives that", "queries, prompts, labels"),
    "slime": ("slime gives that", "args, sample, **kwargs"),
    "easyr1": ("get the text of one completion", "reward_inputs: list[dict], weight=0.1"),
    "areal": ('gets "prompts"', "prompt, completions, prompt_ids, completion_ids, answer"),
    "single values": ("would get a list", "completions: list[str], answer: str"),
    "both forms": ("keep the first", "completion, completions"),
    "no completion": ("name the one that gets it", "prompt, answer"),
    "kwargs alone": ("takes no completion", "**kwargs"),
}
# fmt: on

VARIANTS: dict[str, Callable[[Path], str]] = {
    **{f"trl: {name}": same_as(trl, source) for name, source in _TRL.items()},
    **{f"trl: {name}": same_as(trl, source, chat=True) for name, source in _TRL_CHAT.items()},
    **{f"verl: {name}": same_as(verl, source) for name, source in _VERL.items()},
    **{f"verifiers: {name}": same_as(called, source) for name, source in _CALLED.items()},
    **{name: refused(words, _function(taken, "return [1.0]")) for name, (words, taken) in _REFUSED.items()},
    "a class": refused("is a class", f"class reward:\n    def __call__{_METHOD}"),
    "a generator": refused("is a generator", _function("completions, **kwargs", "yield 1.0")),
    "decorated without wraps": fails("returned a list", f"def log(f):\n{_INNER}@log\n{_PAIRED}"),
}

"""Scoring of trajectories: arguments of the calls, and the reward of a sample from the values of the functions.

A ``RewardSet`` calls it for each order: in the reward worker, or in the process of a command. The reward of a sample is
``sum(weight * value)`` over the functions that apply, or the result of the recipe's own combining function. A function
that returns None does not apply to the sample and contributes nothing; where no function applies there is no reward, so
the sample fails (``wrong_type``, "not applicable"). A failure of a function is a failure of the sample: the first one,
in the order of the recipe, is recorded. A shadow function neither counts nor fails the sample."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

from msgspec import Struct

from streamrl.base.types import (
    FinishReason,
    FloatArray,
    JsonMapping,
    Prompt,
    RewardCall,
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    TokenArray,
    WeightedRewards,
    token_array,
)
from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.recipe.rewards import WHOLE_REWARD, FailurePolicy, Reward, RewardCredit, number_name
from streamrl.rewards.credited_numbers import place_numbers
from streamrl.rewards.reward_messages import CompletionToScore, SampleReward
from streamrl.rewards.reward_queue import total_of
from streamrl.rewards.signature import PROVIDED, PROVIDED_OF_GROUPS, RewardSignature, column_of, missing_column
from streamrl.rewards.values import CallFailure, CallResult, CheckedValue, failed

Outcome = ScoredTrajectory | RewardFailure
_PLAIN = (str, int, float, bool, type(None))
_OF_COMPLETIONS = frozenset(PROVIDED_OF_GROUPS) - {"prompt", "prompts", "prompt_id"}
"""Arguments that each completion has for itself."""


class Detokenizer(Protocol):
    """Decoder of token ids: a part of ``pretrained.tokenizer.Tokenizer``."""

    special_token_ids: frozenset[int]

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        """Text of ``token_ids``."""


class SampleValue(Struct, frozen=True):
    """Result of one reward for one sample. ``checked``: value of the sample; ``call``: result of the call, which is
    about siblings too where the function scores groups; ``numbers``: numbers of the sampled tokens, for a reward that
    gives them to steps or tokens (None: it gives none)."""

    reward: Reward
    checked: CheckedValue
    call: CallResult
    numbers: FloatArray | None = None

    @property
    def value(self) -> float | None:
        """The reward's value; None: it failed or does not apply. A late call has the value ``wrong_value`` where the
        recipe sets ``late_is_wrong``."""
        if self.late_is_wrong:
            return self.reward.wrong_value
        return None if self.checked.failure is not None else total_of(self.reward, self.checked)

    @property
    def late_is_wrong(self) -> bool:
        """Return whether the call ran out of time and the recipe counts a late call as a wrong answer."""
        failure = self.checked.failure
        return self.reward.late_is_wrong and failure is not None and failure.kind is RewardFailureKind.TIMED_OUT

    @property
    def failure(self) -> CallFailure | None:
        """Failure of this reward, which is a failure of the sample; None: no failure."""
        return None if self.late_is_wrong else self.checked.failure


class SampleTexts:
    """The sampled tokens of the completions of one order, and the texts of their last turns, decoded once.
    ``prompts``: prompts of the message to which the order belongs."""

    def __init__(
        self, completions: Sequence[CompletionToScore], prompts: Sequence[Prompt], tokenizer: Detokenizer
    ) -> None:
        self.completions = completions
        self.prompts = prompts
        self.token_ids = [_tokens_of(completion) for completion in completions]
        self._turns = [
            _turns_of(token_ids, completion.turns)
            for token_ids, completion in zip(self.token_ids, completions, strict=True)
        ]
        self.texts = [tokenizer.decode(turns[-1]) for turns in self._turns]
        self._special_texts: list[str] = []  # texts with special tokens, decoded when a function needs them
        self._tokenizer = tokenizer

    def prompt_of(self, member: int) -> Prompt:
        """The prompt of one completion."""
        return self.prompts[self.completions[member].prompt]

    def completion(self, signature: RewardSignature, members: Sequence[int]) -> Any:
        """The text of one completion, or the list of the texts of a group. In a chat each entry of the list is a list
        of one message, as TRL passes them."""
        all_texts = self.texts
        if signature.special_tokens:
            if not self._special_texts:
                places = range(len(self.texts))
                self._special_texts = [self._tokenizer.decode(self._inner_tokens(i), False) for i in places]
            all_texts = self._special_texts
        texts = [all_texts[member] for member in members]
        if not signature.per_group:
            return texts[0]
        if signature.as_text or _chat_of(self.prompt_of(members[0])) is None:
            return texts
        return [[{"role": "assistant", "content": text}] for text in texts]

    def turn_texts(self, signature: RewardSignature, member: int) -> list[str]:
        """The texts of all turns of one completion."""
        return [self._decode(signature, member, turn) for turn in self._turns[member]]

    def _decode(self, signature: RewardSignature, member: int, token_ids: TokenArray) -> str:
        """The text of the first tokens of a turn, as the function sees it."""
        if not signature.special_tokens:
            return self._tokenizer.decode(token_ids)
        return self._tokenizer.decode(self._without_end(member, token_ids), False)

    def value(
        self, reward: Reward, signature: RewardSignature, member: int, result: CallResult, place: int
    ) -> SampleValue:
        """The result of a call for one completion. ``place``: place of the completion in the call."""
        checked = result.values[place]
        if not checked.spans and not checked.token_numbers:
            return SampleValue(reward, checked, result)
        numbers = place_numbers(checked, self._turns[member], reward.credit, partial(self._decode, signature, member))
        if isinstance(numbers, CallFailure):
            return SampleValue(reward, CheckedValue(failure=numbers), result)
        return SampleValue(reward, checked, result, None if checked.value is None else numbers)

    def special_tokens(self) -> list[str]:
        """The special tokens that completions have, without the tokens that ended completions."""
        special = self._tokenizer.special_token_ids
        sampled: set[int] = set()
        for member in range(len(self.texts)):
            sampled.update(special.intersection(self._inner_tokens(member)))
        return [self._tokenizer.decode(token_array([token_id]), False) for token_id in sorted(sampled)]

    def _inner_tokens(self, member: int) -> TokenArray:
        """Tokens of the last turn, without the special token that ended it."""
        return self._without_end(member, self._turns[member][-1])

    def _without_end(self, member: int, token_ids: TokenArray) -> TokenArray:
        """Tokens of a turn without the special token that ended it."""
        if self.completions[member].finish_reason is FinishReason.LENGTH or len(token_ids) == 0:
            return token_ids
        return token_ids[:-1] if token_ids[-1] in self._tokenizer.special_token_ids else token_ids

    def arguments(self, signature: RewardSignature, members: Sequence[int]) -> dict[str, Any] | CallFailure:
        """Keyword arguments of a call about ``members``, which share a prompt."""
        prompt = self.prompt_of(members[0])
        names = signature.provided
        provided: dict[str, Any] = {}
        if "prompt_id" in names:
            provided["prompt_id"] = prompt.prompt_id
        if "prompt" in names or "prompts" in names:
            column = prompt.columns.get("prompt")
            text = column if isinstance(column, str) else self._tokenizer.decode(prompt.token_ids)
            chat = _chat_of(prompt)
            provided["prompt"] = text
            provided["prompts"] = text if chat is None else chat
        for name in _OF_COMPLETIONS.intersection(names):
            values = [self._argument(signature, name, member) for member in members]
            provided[name] = values if signature.per_group else values[0]
        return choose_arguments(signature, prompt.columns, provided)

    def _argument(self, signature: RewardSignature, name: str, member: int) -> Any:
        """The argument ``name`` of a call about one completion."""
        if name == "turn_texts":
            return self.turn_texts(signature, member)
        if name == "finish_reason":
            return self.completions[member].finish_reason.value
        if name in ("token_ids", "completion_ids"):
            return self.token_ids[member].tolist()
        return getattr(self.completions[member], name)

    def groups(self) -> list[list[int]]:
        """Places of completions that share a prompt and a group."""
        by_group: dict[tuple[int, str], list[int]] = {}
        for place, completion in enumerate(self.completions):
            by_group.setdefault((completion.group_id, self.prompt_of(place).prompt_id), []).append(place)
        return list(by_group.values())


def _chat_of(prompt: Prompt) -> list[Any] | None:
    """The messages of a prompt that is a chat; None: the prompt is a text."""
    for name in ("messages", "prompt"):
        column = prompt.columns.get(name)
        if isinstance(column, list):
            return column
    return None


def _tokens_of(completion: CompletionToScore) -> TokenArray:
    token_ids = token_array()
    token_ids.frombytes(completion.token_ids)
    return token_ids


def _turns_of(token_ids: TokenArray, lengths: Sequence[int]) -> list[TokenArray]:
    """The tokens of each turn, one turn at least."""
    starts = list(accumulate(lengths, initial=0))
    return [token_ids[start:stop] for start, stop in pairwise(starts)] or [token_ids]


def choose_arguments(
    signature: RewardSignature, columns: JsonMapping, provided: JsonMapping
) -> dict[str, Any] | CallFailure:
    """Keyword arguments of one call. A provided name takes precedence over a column of the same name, and a column with
    the name of the first parameter is not passed. Columns are copied: a function may change its arguments."""
    missing = [name for name in signature.columns if not column_of(columns, name)]
    if missing:
        return CallFailure(RewardFailureKind.RAISED, f"the prompt {missing_column(missing[0], signature.name)}")
    names = [*signature.columns, *signature.optional_columns]
    if signature.wants_all:
        # ``PROVIDED[1:]``: a function of one completion may take the column "prompt" as it is.
        reserved = (*PROVIDED_OF_GROUPS, "prompt", "completion") if signature.per_group else PROVIDED[1:]
        names += [name for name in columns if name not in reserved]
    excluded = {signature.first, *signature.bound}
    arguments = {name: copied(value) for name in names if name not in excluded for value in column_of(columns, name)}
    arguments.update({name: provided[name] for name in signature.provided})
    return arguments


def copied(value: Any) -> Any:
    """A copy of ``value``, which a function may change; ``value`` itself where its type is immutable."""
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def combine(
    values: Sequence[SampleValue], *, combined: CallResult | None = None, separate: bool = False
) -> SampleReward:
    """The reward of one sample from the values of its functions, in the order of the recipe.

    ``combined``: result of the recipe's own combining function, if it has one; ``separate``: the trainer compares each
    function's value with the values of siblings separately. ``parts`` of the reward are the values as returned, without
    weights; ``seconds`` is the longest call with its wait (functions run side by side)."""
    trained = [value for value in values if not value.reward.shadow]
    for value in trained:
        if (failure := value.failure) is not None:
            return _failure(values, value.reward.label, failure, policy_of(value))
    applicable = [(value.reward, number) for value in trained if (number := value.value) is not None]
    total = _total(applicable, combined)
    if isinstance(total, CallFailure):
        name = ", ".join(value.reward.label for value in trained) if combined is None else "combine"
        return _failure(values, name, total, _strictest(trained))
    credited = [value for value in trained if value.reward.credit is not RewardCredit.COMPLETION]
    separate_values = {}
    if separate or credited:
        separate_values = {reward.label: (reward.weight, number) for reward, number in applicable}
    if credited:
        separate_values = _with_whole(separate_values, credited, separate=separate)
    environment_weights = [reward.weight for reward, _ in applicable if reward.function == ENVIRONMENT_REWARD]
    return SampleReward(
        reward=total,
        parts=_parts(values),
        seconds=_seconds(values),
        calls=_calls(values),
        separate=separate_values,
        environment_weight=sum(environment_weights, 0.0),
        token_values={
            number_name(value.reward.credit, value.reward.label): value.numbers
            for value in values
            if value.numbers is not None
        },
    )


def _with_whole(values: WeightedRewards, credited: Sequence[SampleValue], *, separate: bool) -> WeightedRewards:
    """``values`` with the rewards of whole completions as one, unless they are compared ``separate``. There is such a
    sum also where no reward of whole completions applies: without it the total would be compared."""
    labels = {value.reward.label for value in credited}
    numbered = {label: value for label, value in values.items() if label in labels}
    if separate and len(numbered) < len(values):
        return values
    total = sum(weight * number for label, (weight, number) in values.items() if label not in labels)
    return {WHOLE_REWARD: (1.0, total)} | numbered


def _total(applicable: Sequence[tuple[Reward, float]], combined: CallResult | None) -> float | CallFailure:
    if not applicable:
        return CallFailure(RewardFailureKind.WRONG_TYPE, "not applicable: every reward function returned None")
    if combined is not None:
        (checked,) = combined.values
        if checked.failure is not None:
            return checked.failure
        if checked.value is None:
            return CallFailure(RewardFailureKind.WRONG_TYPE, "returned no number: a combining function must")
        return checked.value
    total = sum(reward.weight * value for reward, value in applicable)
    if not math.isfinite(total):
        return CallFailure(RewardFailureKind.NOT_FINITE, f"the weighted sum of the rewards is {total}")
    return total


def policy_of(value: SampleValue) -> FailurePolicy:
    """Policy of the recipe for the failure of ``value``."""
    failure = value.failure
    return value.reward.failure_policy(late=failure is not None and failure.kind is RewardFailureKind.TIMED_OUT)


def _parts(values: Sequence[SampleValue]) -> dict[str, float]:
    """Values of all functions and of their parts, as returned, by name; shadow functions included."""
    parts = {}
    for value in values:
        if (total := value.value) is not None:
            parts[value.reward.label] = total
        for name, part in value.checked.parts.items():
            parts[f"{value.reward.label}.{name}"] = part
    return parts


def column_failure(failure: CallFailure, count: int) -> CallResult:
    """Result of a call that could not be made, because of ``failure``."""
    return CallResult(failed(failure.kind, failure.message, count))


def _strictest(values: Sequence[SampleValue]) -> FailurePolicy:
    policies = {value.reward.on_failure for value in values}
    order = (FailurePolicy.STOP, FailurePolicy.DROP_GROUP, FailurePolicy.DROP_SAMPLE)
    return next((policy for policy in order if policy in policies), FailurePolicy.DROP_SAMPLE)


def _seconds(values: Sequence[SampleValue]) -> float:
    return max((value.call.seconds + value.call.waited_s for value in values), default=0.0)


def _calls(values: Sequence[SampleValue]) -> tuple[RewardCall, ...]:
    return tuple(
        [
            RewardCall(
                function=value.reward.label,
                seconds=value.call.seconds,
                waited_s=value.call.waited_s,
                limit_s=value.call.limit_s,
                adapted=value.call.limit_s < value.reward.timeout_s and value.call.limit_s > 0,
                value=value.value,
                failure=None if value.checked.failure is None else value.checked.failure.kind,
            )
            for value in values
        ]
    )


def _failure(values: Sequence[SampleValue], function: str, failure: CallFailure, policy: FailurePolicy) -> SampleReward:
    return SampleReward(
        seconds=_seconds(values),
        calls=_calls(values),
        kind=failure.kind,
        function=function,
        message=failure.message,
        policy=policy.value,
    )

"""Scoring of trajectories: arguments, values, weights. A reward is a value that user code returned.

The reward is ``sum(weight * value)`` over the functions that apply, or what the recipe's own function makes of the
values. A function that returns None does not apply to that sample and contributes nothing; where none applies there is
no reward, so the sample fails (``wrong_type``, "not applicable"). A function that fails fails the sample: the first
failure, in the order of the recipe, is recorded. A shadow function does neither."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from streamrl.base.types import (
    FinishReason,
    Prompt,
    RewardCall,
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    TokenArray,
    token_array,
)
from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.recipe.rewards import FailurePolicy, Reward
from streamrl.rewards.reward_messages import CompletionToScore, SampleReward
from streamrl.rewards.reward_queue import total_of
from streamrl.rewards.signature import PROVIDED, PROVIDED_OF_GROUPS, RewardSignature, column_of, missing_column
from streamrl.rewards.values import CallFailure, CallResult, CheckedValue, failed

Outcome = ScoredTrajectory | RewardFailure
_PLAIN = (str, int, float, bool, type(None))


class Detokenizer(Protocol):
    """Decoder of token ids: a part of ``pretrained.tokenizer.Tokenizer``."""

    special_token_ids: frozenset[int]

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        """Text of ``token_ids``."""
        ...


class SampleValue(msgspec.Struct, frozen=True):
    """Result of one reward for one sample: ``checked``, out of a call that may have been about siblings too."""

    reward: Reward
    checked: CheckedValue
    call: CallResult

    @property
    def value(self) -> float | None:
        """The reward's value; None: it failed or does not apply. A late value is wrong where the recipe says so."""
        if self.late_is_wrong:
            return self.reward.wrong_value
        return None if self.checked.failure is not None else total_of(self.reward, self.checked)

    @property
    def late_is_wrong(self) -> bool:
        """Return whether it ran out of time, and the recipe counts that as an answer that is wrong."""
        failure = self.checked.failure
        return self.reward.late_is_wrong and failure is not None and failure.kind is RewardFailureKind.TIMED_OUT

    @property
    def failure(self) -> CallFailure | None:
        """Failure of this reward, for which the sample has none; None: there is no failure."""
        return None if self.late_is_wrong else self.checked.failure


class SampleTexts:
    """The sampled tokens of the completions of one order, and the texts of their last turns, decoded once.
    ``prompts``: of the whole message."""

    def __init__(
        self, completions: Sequence[CompletionToScore], prompts: Sequence[Prompt], tokenizer: Detokenizer
    ) -> None:
        self.completions = completions
        self.prompts = prompts
        self.token_ids = [_tokens_of(completion) for completion in completions]
        self._turns = [ids[-one.last_turn :] for ids, one in zip(self.token_ids, completions, strict=True)]
        self.texts = [tokenizer.decode(ids) for ids in self._turns]
        self._whole_texts: list[str] = []  # with special tokens, once they are asked for
        self._tokenizer = tokenizer

    def prompt_of(self, member: int) -> Prompt:
        """The prompt of one completion."""
        return self.prompts[self.completions[member].prompt]

    def completion(self, signature: RewardSignature, members: Sequence[int]) -> Any:
        """The text of one completion, or a list of those of a group: in a chat as TRL gives them, each a list of one
        message."""
        if signature.special_tokens and not self._whole_texts:
            self._whole_texts = [self._tokenizer.decode(self._inner_tokens(i), False) for i in range(len(self.texts))]
        all_texts = self._whole_texts if signature.special_tokens else self.texts
        texts = [all_texts[member] for member in members]
        if not signature.per_group:
            return texts[0]
        if signature.as_text or _chat_of(self.prompt_of(members[0])) is None:
            return texts
        return [[{"role": "assistant", "content": text}] for text in texts]

    def special_tokens(self) -> list[str]:
        """The special tokens that completions have, without those that ended them."""
        special = self._tokenizer.special_token_ids
        found = set().union(*(special.intersection(self._inner_tokens(i)) for i in range(len(self.texts))))
        return [self._tokenizer.decode(token_array([token_id]), False) for token_id in sorted(found)]

    def _inner_tokens(self, member: int) -> TokenArray:
        token_ids = self._turns[member]
        ended = self.completions[member].finish_reason is not FinishReason.LENGTH and len(token_ids) > 0
        return token_ids[:-1] if ended and token_ids[-1] in self._tokenizer.special_token_ids else token_ids

    def arguments(self, signature: RewardSignature, members: Sequence[int]) -> dict[str, Any] | CallFailure:
        """Keyword arguments of a call about ``members``, which share a prompt."""
        prompt = self.prompt_of(members[0])
        wanted = signature.provided
        provided: dict[str, Any] = {}
        if wanted:
            if "prompt_id" in wanted:
                provided["prompt_id"] = prompt.prompt_id
            if "prompt" in wanted or "prompts" in wanted:
                text = prompt.columns.get("prompt")
                shown = text if isinstance(text, str) else self._tokenizer.decode(prompt.token_ids)
                provided["prompt"] = shown
                provided["prompts"] = shown if (chat := _chat_of(prompt)) is None else chat
            if "token_ids" in wanted or "completion_ids" in wanted:
                lists = [self.token_ids[member].tolist() for member in members]
                provided["token_ids"] = provided["completion_ids"] = lists if signature.per_group else lists[0]
            if "finish_reason" in wanted:
                reasons = [self.completions[member].finish_reason.value for member in members]
                provided["finish_reason"] = reasons if signature.per_group else reasons[0]
            for name in ("environment_reward", "tool_calls"):
                if name in wanted:
                    given = [getattr(self.completions[member], name) for member in members]
                    provided[name] = given if signature.per_group else given[0]
        return choose_arguments(signature, prompt.columns, provided)

    def groups(self) -> list[list[int]]:
        """Places of completions that share a prompt and a group."""
        by_group: dict[tuple[int, str], list[int]] = {}
        for place, completion in enumerate(self.completions):
            by_group.setdefault((completion.group_id, self.prompt_of(place).prompt_id), []).append(place)
        return list(by_group.values())


def _chat_of(prompt: Prompt) -> list[Any] | None:
    """The messages of a prompt that is a chat."""
    return next((m for name in ("messages", "prompt") if isinstance(m := prompt.columns.get(name), list)), None)


def _tokens_of(completion: CompletionToScore) -> TokenArray:
    token_ids = token_array()
    token_ids.frombytes(completion.token_ids)
    return token_ids


def choose_arguments(
    signature: RewardSignature, columns: Mapping[str, Any], provided: Mapping[str, Any]
) -> dict[str, Any] | CallFailure:
    """Keyword arguments of one call. A name that is provided always means ours, whatever columns there are, and a
    column with the name of the first parameter is not passed. Columns are copied: a function may change what it got."""
    missing = [name for name in signature.columns if not column_of(columns, name)]
    if missing:
        return CallFailure(RewardFailureKind.RAISED, f"the prompt {missing_column(missing[0], signature.name)}")
    asked = (*signature.columns, *signature.optional_columns)
    if signature.wants_all:
        ours = (*PROVIDED_OF_GROUPS, "prompt", "completion") if signature.per_group else PROVIDED[1:]
        asked = (*asked, *(name for name in columns if name not in ours))
    arguments = {
        name: copied(value)
        for name in asked
        if name != signature.first and name not in signature.bound
        for value in column_of(columns, name)
    }
    arguments.update({name: provided[name] for name in signature.provided})
    return arguments


def copied(value: Any) -> Any:
    """A value that a function may change without anybody else seeing it."""
    return value if isinstance(value, _PLAIN) else copy.deepcopy(value)


def combine(values: Sequence[SampleValue], *, own: CallResult | None = None, separate: bool = False) -> SampleReward:
    """The reward of one sample: of the functions, in the order of the recipe. ``own``: what the recipe's combining
    function made of their values; ``separate``: each is compared with its siblings' alone. ``parts`` holds the
    values as returned, without weights; ``seconds`` is the longest call with the time that it waited (functions
    run side by side)."""
    trained = [value for value in values if not value.reward.shadow]
    for value in trained:
        if (failure := value.failure) is not None:
            return _failure(values, value.reward.label, failure, policy_of(value))
    applicable = [(value.reward, v) for value in trained if (v := value.value) is not None]
    total = _total(applicable, own)
    if isinstance(total, CallFailure):
        name = ", ".join(value.reward.label for value in trained) if own is None else "combine"
        return _failure(values, name, total, _strictest(trained))
    return SampleReward(
        reward=total,
        parts=_parts(values),
        seconds=_seconds(values),
        calls=_calls(values),
        separate={reward.label: (reward.weight, v) for reward, v in applicable} if separate else {},
        environment_weight=sum((one.weight for one, _ in applicable if one.function == ENVIRONMENT_REWARD), 0.0),
    )


def _total(applicable: Sequence[tuple[Reward, float]], own: CallResult | None) -> float | CallFailure:
    if not applicable:
        return CallFailure(RewardFailureKind.WRONG_TYPE, "not applicable: every reward function returned None")
    if own is not None:
        (made,) = own.values
        if made.failure is not None:
            return made.failure
        if made.value is None:
            return CallFailure(RewardFailureKind.WRONG_TYPE, "returned no number: a combining function must")
        return made.value
    total = sum(reward.weight * value for reward, value in applicable)
    if not math.isfinite(total):
        return CallFailure(RewardFailureKind.NOT_FINITE, f"the weighted sum of the rewards is {total}")
    return total


def policy_of(value: SampleValue) -> FailurePolicy:
    """Policy of the recipe for this failure."""
    failure = value.failure
    return value.reward.failure_policy(late=failure is not None and failure.kind is RewardFailureKind.TIMED_OUT)


def _parts(values: Sequence[SampleValue]) -> dict[str, float]:
    """Values as returned, by name; also those of shadows."""
    parts: dict[str, float] = {}
    for value in values:
        if (total := value.value) is not None:
            parts[value.reward.label] = total
        for name, part in value.checked.parts.items():
            parts[f"{value.reward.label}.{name}"] = part
    return parts


def column_failure(failure: CallFailure, count: int) -> CallResult:
    """The result of a call that could not be made."""
    return CallResult(failed(failure.kind, failure.message, count))


def _strictest(values: Sequence[SampleValue]) -> FailurePolicy:
    policies = {value.reward.on_failure for value in values}
    order = (FailurePolicy.STOP, FailurePolicy.DROP_GROUP, FailurePolicy.DROP_SAMPLE)
    return next(policy for policy in order if policy in policies)


def _seconds(values: Sequence[SampleValue]) -> float:
    return max(value.call.seconds + value.call.waited_s for value in values)


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

"""Hits of later turns in the prefix caches of the engines, and the causes of the misses. Pure, and without a clock.

The engine pool (controller) calls this with every answer of an engine; the run report takes the metrics once a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.base.messages import Generate
from streamrl.base.types import CachedPrefix, Completion, Metrics, TokenArray
from streamrl.engines.resumption import completion_id_of, without_unverified_tokens
from streamrl.engines.routing import REMEMBERED_TRAJECTORIES, forget_oldest

_NO_ENGINE = ""


class _Context(NamedTuple):
    """A prompt with its completion. The engine has computed all tokens but the last one.

    ``length``: number of token ids
    ``digest``: hash of the token ids
    ``engine``: name of the engine, empty once it is stopped
    ``pauses``: number of pauses of the engine before this request
    ``version``: newest policy version that sampled a token of the completion"""

    length: int
    digest: int
    engine: str
    pauses: int
    version: int


class PrefixHits:
    """Counts the prompt tokens of later turns, and how many of them were cached. The prompt of a later turn begins with
    an earlier prompt and completion of its trajectory. An engine can have cached all full KV blocks of this beginning,
    without the last token."""

    def __init__(self) -> None:
        self._contexts: dict[str, list[_Context]] = {}
        self._tokens: Counter[str] = Counter()

    def note_answer(
        self, request: Generate, engine: str, completion: Completion, paused: Collection[str]
    ) -> Completion:
        """Count the answer of ``engine`` to ``request``. Returns the completion without the count of cached tokens:
        nothing that is stored or compared depends on it. ``paused``: names of the engines that were paused for new
        weights when the request was sent."""
        cached = completion.cached
        if cached is None:
            return completion
        completion_id = completion_id_of(request.request_id)
        prompt = without_unverified_tokens(request).token_ids
        contexts = self._contexts.pop(completion_id, [])
        if not request.prefix_length:  # a resumed part is not a turn of its own
            beginning = _newest_beginning(contexts, prompt)
            if beginning is not None:
                self._count(len(prompt), beginning, cached, _cause_of_misses(beginning, engine, completion, paused))
        if completion.token_ids:
            token_ids = prompt + completion.token_ids
            length = len(token_ids)
            version = completion.version_spans[-1].policy_version
            contexts.append(_Context(length, _digest(token_ids, length), engine, cached.pauses, version))
        self._contexts[completion_id] = contexts
        forget_oldest(self._contexts, REMEMBERED_TRAJECTORIES)
        return replace(completion, cached=None)

    def forget_trajectory(self, completion_id: str) -> None:
        """Forget the requests of a trajectory that has ended."""
        self._contexts.pop(completion_id, None)

    def forget_engine(self, stopped: str) -> None:
        """Note that an engine is stopped. The engine in its place has the same name and an empty cache."""
        for contexts in self._contexts.values():
            for index, context in enumerate(contexts):
                if context.engine == stopped:
                    contexts[index] = context._replace(engine=_NO_ENGINE)

    def take(self) -> Metrics:
        """Return the metrics of the turns since the last call; empty without a later turn."""
        tokens = self._tokens
        self._tokens = Counter()
        prompt = tokens["prompt"]
        if not prompt:
            return {}
        metrics = {
            "engines/prefix_hit_ratio": tokens["cached"] / prompt,
            "engines/prefix_miss_new_ratio": tokens["new"] / prompt,
            "engines/prefix_miss_pause_ratio": tokens["pause"] / prompt,
            "engines/prefix_miss_engine_ratio": tokens["engine"] / prompt,
            "engines/prefix_miss_evicted_ratio": tokens["evicted"] / prompt,
        }
        possible = tokens["possible"] - tokens["pause"]
        if possible:
            metrics["engines/prefix_hit_of_possible_ratio"] = tokens["hit"] / possible
        return metrics

    def _count(self, prompt: int, beginning: _Context, cached: CachedPrefix, cause: str) -> None:
        possible = (beginning.length - 1) // cached.block_tokens * cached.block_tokens
        hit = min(cached.tokens, possible)
        self._tokens["prompt"] += prompt
        self._tokens["cached"] += cached.tokens
        self._tokens["new"] += prompt - max(possible, cached.tokens)
        self._tokens["possible"] += possible
        self._tokens["hit"] += hit
        self._tokens[cause] += possible - hit


def _cause_of_misses(beginning: _Context, engine: str, completion: Completion, paused: Collection[str]) -> str:
    """Return the reason for the misses of ``engine``. Where new weights came since ``beginning``, or are coming, its
    engine has dropped the blocks, too: then the reason is the pause, whichever engine answered."""
    pushed = any(span.policy_version > beginning.version for span in completion.version_spans[:1])
    if beginning.engine in paused or pushed:
        return "pause"
    if engine != beginning.engine:
        return "engine"
    paused_between = completion.cached is not None and completion.cached.pauses != beginning.pauses
    return "pause" if paused_between else "evicted"


def _newest_beginning(contexts: list[_Context], token_ids: TokenArray) -> _Context | None:
    """Return the newest of ``contexts`` that ``token_ids`` begins with; None without one."""
    for context in reversed(contexts):
        if context.length <= len(token_ids) and context.digest == _digest(token_ids, context.length):
            return context
    return None


def _digest(token_ids: TokenArray, length: int) -> int:
    return hash(memoryview(token_ids)[:length].tobytes())

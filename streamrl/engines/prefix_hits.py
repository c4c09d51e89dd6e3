"""Hits of later turns in the prefix caches of the engines, and the causes of the misses. Pure, and without a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from msgspec import structs

from streamrl.base.messages import Generate
from streamrl.base.types import CachedPrefix, Completion, TokenArray
from streamrl.engines.resumption import whole_of, without_kept
from streamrl.engines.routing import REMEMBERED_TRAJECTORIES, forget_oldest

_NO_ENGINE = ""


class _Context(NamedTuple):
    """A prompt and its completion: ``length`` token ids, of which ``engine`` has computed all but the last one.
    ``digest``: of the ids; ``pauses``: of the engine before it; ``version``: the newest that sampled in it."""

    length: int
    digest: int
    engine: str
    pauses: int
    version: int


class PrefixHits:
    """Counts the prompt tokens of later turns, and those of them that were cached. A turn goes on from an earlier
    request of its trajectory, of which the engine can have all whole blocks but that of the last token."""

    def __init__(self) -> None:
        self._contexts: dict[str, list[_Context]] = {}
        self._tokens: Counter[str] = Counter()

    def answered(
        self, request: Generate, engine: str, completion: Completion, paused: Collection[str] = ()
    ) -> Completion:
        """Count ``request``, which ``engine`` has answered. Returns the completion without what was cached: nothing
        that is kept or compared depends on that. ``paused``: engines that were, for new weights, when it was sent."""
        if (cached := completion.cached) is None:
            return completion
        whole = whole_of(request.request_id)
        asked = without_kept(request).token_ids
        contexts = self._contexts.pop(whole, [])
        before = None if request.prefix_length else _goes_on_from(contexts, asked)
        if before is not None:
            self._count(len(asked), before, cached, _cause(before, engine, completion, paused))
        if completion.token_ids:
            context = asked + completion.token_ids
            version = completion.version_spans[-1].policy_version
            contexts.append(_Context(len(context), _digest(context, len(context)), engine, cached.pauses, version))
        self._contexts[whole] = contexts
        forget_oldest(self._contexts, REMEMBERED_TRAJECTORIES)
        return structs.replace(completion, cached=None)

    def ended(self, trajectory: str) -> None:
        """Forget the requests of a trajectory that has ended."""
        self._contexts.pop(trajectory, None)

    def lost(self, engine: str) -> None:
        """Note that ``engine`` is stopped: one in its place is another engine."""
        for contexts in self._contexts.values():
            contexts[:] = [one._replace(engine=_NO_ENGINE) if one.engine == engine else one for one in contexts]

    def take(self) -> dict[str, float]:
        """Metrics of the turns that were answered since the last call; nothing where there was no later turn."""
        tokens = self._tokens
        self._tokens = Counter()
        if not (prompt := tokens["prompt"]):
            return {}
        metrics = {
            "engines/prefix_hit_ratio": tokens["cached"] / prompt,
            "engines/prefix_miss_new_ratio": tokens["new"] / prompt,
            "engines/prefix_miss_pause_ratio": tokens["pause"] / prompt,
            "engines/prefix_miss_engine_ratio": tokens["engine"] / prompt,
            "engines/prefix_miss_evicted_ratio": tokens["evicted"] / prompt,
        }
        if possible := tokens["possible"] - tokens["pause"]:
            metrics["engines/prefix_hit_of_possible_ratio"] = tokens["hit"] / possible
        return metrics

    def _count(self, prompt: int, before: _Context, cached: CachedPrefix, cause: str) -> None:
        possible = (before.length - 1) // cached.block_tokens * cached.block_tokens
        hit = min(cached.tokens, possible)
        counted = {"prompt": prompt, "cached": cached.tokens, "new": prompt - max(possible, cached.tokens)}
        self._tokens.update(counted | {"possible": possible, "hit": hit, cause: possible - hit})


def _cause(before: _Context, engine: str, completion: Completion, paused: Collection[str]) -> str:
    """Return why ``engine`` misses what there was before. Where new weights came in between, or were coming, the engine
    of before has nothing of it either."""
    pushed = any(span.policy_version > before.version for span in completion.version_spans[:1])
    if before.engine in paused or pushed:
        return "pause"
    if engine != before.engine:
        return "engine"
    return "evicted" if completion.cached is None or completion.cached.pauses == before.pauses else "pause"


def _goes_on_from(contexts: list[_Context], token_ids: TokenArray) -> _Context | None:
    """Return the newest of ``contexts`` that ``token_ids`` begins with."""
    for context in reversed(contexts):
        if context.length <= len(token_ids) and context.digest == _digest(token_ids, context.length):
            return context
    return None


def _digest(token_ids: TokenArray, length: int) -> int:
    return hash(memoryview(token_ids)[:length].tobytes())

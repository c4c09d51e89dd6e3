"""An engine without a model: what it samples depends only on the seed, how long it takes only on what runs.

In a process of its own (``engines.kind = "simulated"``) it fetches and verifies the weights that are published, as a
real one does; elsewhere it takes announcements at their word. A decode step of all running requests takes
``options.step`` seconds, by default as measured on the real one. It has no background task: one of the callers of
``generate`` drives the steps for all, and hands over when it is done."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
import anyio.lowlevel
import msgspec

from streamrl.base.errors import EngineError, RequestRefused, WeightError
from streamrl.base.messages import EngineLoad, EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.types import Completion, FinishReason, VersionSpan
from streamrl.engines.resumption import accepted_prefix, empty_completion, remaining_tokens, without_kept
from streamrl.engines.simulated.text import LengthMixture, SampledText, UniformText
from streamrl.engines.step_cost import StepCost

__all__ = ["LengthMixture", "SimulatedEngine", "SimulationOptions"]


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``step``: time of one decode step. Tokens are uniform over ``[0, vocabulary)``; the
    last token of a completion that ends by itself is ``end_token``. ``kv_tokens``: what it says that its cache holds,
    which bounds nothing here."""

    name: str = "simulated"
    step: StepCost = StepCost(base_s=1.7e-3, per_running_s=0.027e-3)
    max_num_seqs: int = 256
    max_model_len: int = 4096
    kv_tokens: int = 0
    vocabulary: int = 32
    end_token: int = 1
    policy_version: int = -1
    tokenizer_digest: str = ""
    lengths: LengthMixture = LengthMixture()


class HeldWeights(Protocol):
    """The weights that an engine without a model holds, in the steps of a push. Raises ``WeightError``."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone: ...
    def commit(self, policy_version: int) -> OrderDone: ...
    def checksums(self) -> dict[str, str]: ...
    def close(self) -> None: ...


class _Running:
    """One open request: what it will sample, what it has sampled, and who waits for it."""

    def __init__(self, asked: Generate, text: SampledText, max_model_len: int) -> None:
        request = without_kept(asked)
        self._draft = text.draft(request, max_model_len - len(request.token_ids))
        plan = self._draft.token_ids
        self.finish_reason = FinishReason.STOP if self._draft.ends else FinishReason.LENGTH
        self.sampled = 0
        # The first step verifies what was kept, and samples one token more.
        self.accepted = min(accepted_prefix(asked.token_ids[len(request.token_ids) :], plan), len(plan) - 1)
        self.spans: list[VersionSpan] = []
        self.finished = False
        self.wakeup = anyio.Event()

    def sample(self, policy_version: int) -> None:
        start = self.sampled
        end = (self.sampled if self.spans else self.accepted) + 1
        if self.spans and self.spans[-1].policy_version == policy_version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(start=start, end=end, policy_version=policy_version))
        self.sampled = end
        if end == len(self._draft.token_ids):
            self.finish(self.finish_reason)

    def finish(self, reason: FinishReason) -> None:
        if not self.finished:
            self.finished = True
            self.finish_reason = reason
            self.wakeup.set()

    def completion(self) -> Completion:
        return Completion(
            token_ids=self._draft.token_ids[: self.sampled],
            behavior_logprobs=self._draft.logprobs[: self.sampled],
            finish_reason=self.finish_reason,
            version_spans=tuple(self.spans),
        )


class SimulatedEngine:
    """Satisfies ``Engine`` with neither torch nor vllm. ``fail`` kills it as a dead process would. ``text``: what it
    samples (None: as ``options`` say). ``weights``: what it holds (None: what was announced)."""

    def __init__(
        self,
        options: SimulationOptions = SimulationOptions(),  # noqa: B008 - frozen
        *,
        text: SampledText | None = None,
        weights: HeldWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._options = options
        self._text = text or UniformText(options.lengths, vocabulary=options.vocabulary, end_token=options.end_token)
        self._weights = weights
        self._clock = clock
        self._sleep = sleep
        self._open: dict[str, _Running] = {}
        self._driver: _Running | None = None
        self._paused = False
        self._asleep = False
        self._changed = anyio.Event()
        self._policy_version = options.policy_version
        self._state_hash = 0
        self._staged: WeightAnnouncement | None = None
        self._failure = ""
        self._generated_tokens = 0
        self._decode_steps = 0
        self._decode_s = 0.0

    async def start(self) -> EngineReady:
        self._require_alive()
        return EngineReady(
            engine=self._options.name,
            policy_version=self._policy_version,
            max_model_len=self._options.max_model_len,
            max_num_seqs=self._options.max_num_seqs,
            tokenizer_digest=self._options.tokenizer_digest,
            kv_tokens=self._options.kv_tokens,
        )

    async def watch(self) -> None:
        while True:
            self._require_alive()
            await self._changed.wait()

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion: a function of its seed and lengths, in time shared with all that run."""
        self._require_alive()
        if request.request_id in self._open:
            raise RequestRefused(f"request {request.request_id} is already open; give every request its own id")
        prompt = len(request.token_ids) - request.kept
        if not 0 < prompt < self._options.max_model_len:
            raise RequestRefused(
                f"a prompt of {prompt} tokens does not fit the context of"
                f" {self._options.max_model_len}; shorten it or raise engines.max_model_len"
            )
        if remaining_tokens(request) == 0:
            return empty_completion(FinishReason.LENGTH)
        running = self._open[request.request_id] = _Running(request, self._text, self._options.max_model_len)
        try:
            await self._until_finished(running)
        finally:
            del self._open[request.request_id]
        self._require_alive()
        return running.completion()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """The requests return what they have; unknown ids are ignored."""
        self._require_alive()
        self._finish_open([self._open[i] for i in request_ids if i in self._open])
        await anyio.lowlevel.checkpoint()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop at once; a step that was under way is not counted."""
        self._require_alive()
        self._paused = True
        if mode is PauseMode.ABORT:
            self._finish_open(list(self._open.values()))
        self._notify()
        await anyio.lowlevel.checkpoint()

    async def resume(self) -> None:
        self._require_alive()
        self._paused = False
        self._notify()
        await anyio.lowlevel.checkpoint()

    async def sleep(self) -> None:
        """Drop the requests until ``wake``, before which nothing can be staged."""
        await self.pause(PauseMode.ABORT, clear_cache=True)
        self._asleep = True

    async def wake(self) -> None:
        """Resume sampling, with the weights that are left."""
        self._asleep = False
        await self.resume()

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Check the base version as the real one does, or everything."""
        self._require_alive()
        if self._asleep:
            raise EngineError(f"{self._options.name}: it sleeps; wake it before a version is staged")
        if self._weights is not None:
            self._staged = None
            done = await self._weights.stage(announcement)
            self._staged = announcement
            return done
        base = announcement.base_version
        replay = (announcement.policy_version, announcement.state_hash) == (self._policy_version, self._state_hash)
        if base is not None and base != self._policy_version and not replay:
            raise WeightError(
                f"{self._options.name} holds version {self._policy_version}, the delta to version"
                f" {announcement.policy_version} starts from {base}; publish an anchor"
            )
        await anyio.lowlevel.checkpoint()
        self._staged = announcement
        return OrderDone(order_id=0, seconds=0.0, payload_bytes=sum(s.payload_bytes for s in announcement.sources))

    async def commit(self, policy_version: int) -> OrderDone:
        """Take the staged version. Raises ``WeightError`` while sampling, or for a version that is not staged."""
        self._require_alive()
        if not self._paused:
            raise WeightError(f"{self._options.name}: commit of version {policy_version} while sampling; pause first")
        staged = self._staged
        if staged is None or staged.policy_version != policy_version:
            held = "nothing" if staged is None else f"version {staged.policy_version}"
            raise WeightError(f"{self._options.name}: commit of version {policy_version}, but {held} is staged")
        await anyio.lowlevel.checkpoint()
        done = OrderDone(order_id=0, seconds=0.0, state_hash=staged.state_hash)
        if self._weights is not None:
            done = self._weights.commit(policy_version)
        self._policy_version = policy_version
        self._state_hash = done.state_hash
        self._staged = None
        return done

    async def checksums(self) -> dict[str, str]:
        """Checksums of its weights; without weights one made-up parameter whose checksum depends on the state hash."""
        self._require_alive()
        await anyio.lowlevel.checkpoint()
        if self._weights is not None:
            return self._weights.checksums()
        return {"simulated.weight": hashlib.sha256(str(self._state_hash).encode()).hexdigest()}

    def load(self) -> EngineLoad:
        """Requests beyond ``max_num_seqs`` wait; while paused all wait. Every token is one of a decode step."""
        running = 0 if self._paused else min(len(self._open), self._options.max_num_seqs)
        return EngineLoad(
            running=running,
            waiting=len(self._open) - running,
            kv_cache_usage=running / self._options.max_num_seqs,
            generated_tokens=self._generated_tokens,
            decode_steps=self._decode_steps,
            decode_s=self._decode_s,
            decode_tokens=self._generated_tokens,
        )

    async def aclose(self) -> None:
        """Pending calls get ``EngineError``."""
        if not self._failure:
            self.fail("closed")
        if self._weights is not None:
            self._weights.close()
        await anyio.lowlevel.checkpoint()

    def fail(self, reason: str) -> None:
        """Die: every pending and later call raises ``EngineError`` with ``reason``."""
        self._failure = f"{self._options.name}: {reason}"
        self._finish_open(list(self._open.values()))
        self._notify()

    async def _until_finished(self, running: _Running) -> None:
        try:
            while not running.finished:
                if self._driver is not None:
                    await running.wakeup.wait()
                    if not running.finished:
                        running.wakeup = anyio.Event()
                    continue
                self._driver = running
                try:
                    while not running.finished:
                        await self._step()
                finally:
                    self._driver = None
        finally:
            if self._driver is None:  # also where it was appointed, and aborted before it could begin
                self._appoint_driver(after=running)

    def _appoint_driver(self, after: _Running) -> None:
        for candidate in self._open.values():
            if candidate is not after and not candidate.finished:
                candidate.wakeup.set()
                return

    async def _step(self) -> None:
        if self._paused:
            await self._changed.wait()
            return
        batch = list(self._open.values())[: self._options.max_num_seqs]
        changed = self._changed
        began_s = self._clock()
        await self._sleep(self._options.step.step_s(len(batch)))
        if self._paused or changed.is_set():  # paused meanwhile: the step never happened
            return
        self._decode_steps += 1
        self._decode_s += self._clock() - began_s
        for running in batch:
            if not running.finished:
                running.sample(self._policy_version)
                self._generated_tokens += 1

    def _finish_open(self, requests: Sequence[_Running]) -> None:
        for running in requests:
            running.finish(FinishReason.ABORT)
        if self._driver is not None and self._driver.finished:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _require_alive(self) -> None:
        if self._failure:
            raise EngineError(self._failure)

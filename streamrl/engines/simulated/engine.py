"""An engine without a model: a completion depends only on the seed, its duration only on the running requests.

``launch.roles`` makes one in each engine process of a run with ``engines.kind = "simulated"``: it then fetches and
verifies the published weights, as a real engine does. In one process (tests, ``examples/sort/one_process.py``) it can
do without weights and only compares version numbers. A decode step of all running requests takes ``options.step``
seconds, by default the measured time of a real engine. The engine has no background task: one of the callers of
``generate`` drives the steps for all callers, and hands over when its own request has finished."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from time import monotonic
from typing import Protocol

import anyio
from anyio import Event
from anyio.lowlevel import checkpoint
from msgspec import Struct

from streamrl.base.errors import EngineError, RequestRefused, WeightError
from streamrl.base.messages import EngineLoad, EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.types import Clock, Completion, FinishReason, TextsByName, VersionSpan
from streamrl.engines.resumption import accepted_prefix, empty_completion, remaining_tokens, without_unverified_tokens
from streamrl.engines.simulated.text import LengthMixture, SampledText, UniformText
from streamrl.engines.step_cost import StepCost

__all__ = ["LengthMixture", "SimulatedEngine", "SimulationOptions"]


class SimulationOptions(Struct, frozen=True, kw_only=True):
    """Options of a simulated engine. Without a ``SampledText`` its tokens are uniform over ``[0, vocabulary)``.

    ``step``: duration of one decode step
    ``kv_tokens``: reported capacity of the KV cache, which limits nothing here
    ``end_token``: last token of a completion that ends before its limit
    ``policy_version``: version before the first push
    ``lengths``: distribution of the lengths of completions"""

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
    """The weights of an engine without a model, in the steps of a push. Raises ``WeightError``."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone: ...
    def commit(self, policy_version: int) -> OrderDone: ...
    def checksums(self) -> TextsByName: ...
    def close(self) -> None: ...


class _OpenRequest:
    """One open request: its full completion, the number of tokens sampled so far, and the event of its caller."""

    def __init__(self, request: Generate, text: SampledText, max_model_len: int) -> None:
        prompt = without_unverified_tokens(request)
        unverified = request.token_ids[len(prompt.token_ids) :]
        self._draft = text.draft(prompt, max_model_len - len(prompt.token_ids))
        token_ids = self._draft.token_ids
        self.finish_reason = FinishReason.STOP if self._draft.ends else FinishReason.LENGTH
        self.sampled = 0
        # The first step verifies the unverified tokens, and samples one more token.
        self.accepted = min(accepted_prefix(unverified, token_ids), len(token_ids) - 1)
        self.spans: list[VersionSpan] = []
        self.finished = False
        self.wakeup = Event()

    def sample(self, policy_version: int) -> None:
        """Sample one token; in the first step also the accepted tokens before it."""
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
    """An ``Engine`` without torch and vllm. ``fail`` has the effect of the death of its process.

    ``text``: text that it samples (None: uniform tokens, as ``options`` say)
    ``weights``: weights that it holds (None: only the announced version and hash)
    ``clock``, ``sleep``: time of the decode steps, in seconds"""

    def __init__(
        self,
        options: SimulationOptions = SimulationOptions(),  # noqa: B008 - frozen
        *,
        text: SampledText | None = None,
        weights: HeldWeights | None = None,
        clock: Clock = monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._options = options
        self._text = text or UniformText(options.lengths, vocabulary=options.vocabulary, end_token=options.end_token)
        self._weights = weights
        self._clock = clock
        self._sleep = sleep
        self._open: dict[str, _OpenRequest] = {}
        self._driver: _OpenRequest | None = None  # the request whose caller runs the decode steps
        self._paused = False
        self._asleep = False
        self._changed = Event()
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
        """Sample one completion, which depends only on the seed and the limits of ``request``. The duration depends on
        the other running requests."""
        self._require_alive()
        if request.request_id in self._open:
            raise RequestRefused(f"request {request.request_id} is already open; give every request its own id")
        prompt = len(request.token_ids) - request.unverified_tokens
        if not 0 < prompt < self._options.max_model_len:
            raise RequestRefused(
                f"a prompt of {prompt} tokens does not fit the context of"
                f" {self._options.max_model_len}; shorten it or raise engines.max_model_len"
            )
        if remaining_tokens(request) == 0:
            return empty_completion(FinishReason.LENGTH)
        open_request = _OpenRequest(request, self._text, self._options.max_model_len)
        self._open[request.request_id] = open_request
        try:
            await self._until_finished(open_request)
        finally:
            del self._open[request.request_id]
        self._require_alive()
        return open_request.completion()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Have these requests return their tokens so far. Unknown ids are ignored."""
        self._require_alive()
        self._finish_open([self._open[i] for i in request_ids if i in self._open])
        await checkpoint()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling at once. A step in progress is dropped."""
        self._require_alive()
        self._paused = True
        if mode is PauseMode.ABORT:
            self._finish_open(list(self._open.values()))
        self._notify()
        await checkpoint()

    async def resume(self) -> None:
        self._require_alive()
        self._paused = False
        self._notify()
        await checkpoint()

    async def sleep(self) -> None:
        """Abort the requests. Before ``wake`` no version can be staged, before ``resume`` no request runs."""
        await self.pause(PauseMode.ABORT, clear_cache=True)
        self._asleep = True

    async def wake(self) -> None:
        """Have the weights from before ``sleep`` again. The engine is paused."""
        self._require_alive()
        self._asleep = False
        await checkpoint()

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Stage a version. With ``weights`` it is fetched and verified; otherwise only the base version is checked.
        Raises ``WeightError`` when the version does not fit."""
        self._require_alive()
        if self._asleep:
            raise EngineError(f"{self._options.name}: it sleeps; wake it before a version is staged")
        if self._weights is not None:
            self._staged = None
            answer = await self._weights.stage(announcement)
            self._staged = announcement
            return answer
        base = announcement.base_version
        is_live = (announcement.policy_version, announcement.state_hash) == (self._policy_version, self._state_hash)
        if base is not None and base != self._policy_version and not is_live:
            raise WeightError(
                f"{self._options.name} holds version {self._policy_version}, the delta to version"
                f" {announcement.policy_version} starts from {base}; publish an anchor"
            )
        await checkpoint()
        self._staged = announcement
        payload_bytes = sum(source.payload_bytes for source in announcement.sources)
        return OrderDone(order_id=0, seconds=0.0, payload_bytes=payload_bytes)

    async def commit(self, policy_version: int) -> OrderDone:
        """Apply the staged version. Raises ``WeightError`` while sampling, or for a version that is not staged."""
        self._require_alive()
        if not self._paused:
            raise WeightError(f"{self._options.name}: commit of version {policy_version} while sampling; pause first")
        staged = self._staged
        if staged is None or staged.policy_version != policy_version:
            staged_version = "nothing" if staged is None else f"version {staged.policy_version}"
            raise WeightError(
                f"{self._options.name}: commit of version {policy_version}, but {staged_version} is staged"
            )
        await checkpoint()
        answer = OrderDone(order_id=0, seconds=0.0, state_hash=staged.state_hash)
        if self._weights is not None:
            answer = self._weights.commit(policy_version)
        self._policy_version = policy_version
        self._state_hash = answer.state_hash
        self._staged = None
        return answer

    async def checksums(self) -> TextsByName:
        """Return the checksums of the weights; without weights, the checksum of an invented parameter, which depends on
        the state hash."""
        self._require_alive()
        await checkpoint()
        if self._weights is not None:
            return self._weights.checksums()
        return {"simulated.weight": sha256(str(self._state_hash).encode()).hexdigest()}

    def load(self) -> EngineLoad:
        """Return the load now. Requests beyond ``max_num_seqs`` wait, during a pause all requests wait. All tokens
        count as tokens of decode steps."""
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
        """Close the engine: pending calls raise ``EngineError``."""
        if not self._failure:
            self.fail("closed")
        if self._weights is not None:
            self._weights.close()
        await checkpoint()

    def fail(self, reason: str) -> None:
        """Die: every pending and later call raises ``EngineError`` with ``reason``."""
        self._failure = f"{self._options.name}: {reason}"
        self._finish_open(list(self._open.values()))
        self._notify()

    async def _until_finished(self, request: _OpenRequest) -> None:
        """Wait for the end of ``request``; drive the decode steps of all requests meanwhile if no other caller does."""
        try:
            while not request.finished:
                if self._driver is not None:
                    await request.wakeup.wait()
                    if not request.finished:
                        request.wakeup = Event()
                    continue
                self._driver = request
                try:
                    while not request.finished:
                        await self._step()
                finally:
                    self._driver = None
        finally:
            if (
                self._driver is None
            ):  # also when this request was woken as the driver, and aborted before its first step
                self._wake_next_driver(request)

    def _wake_next_driver(self, last: _OpenRequest) -> None:
        for candidate in self._open.values():
            if candidate is not last and not candidate.finished:
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
        if self._paused or changed.is_set():  # a pause came meanwhile: the step is dropped
            return
        self._decode_steps += 1
        self._decode_s += self._clock() - began_s
        for request in batch:
            if not request.finished:
                request.sample(self._policy_version)
                self._generated_tokens += 1

    def _finish_open(self, requests: Sequence[_OpenRequest]) -> None:
        for request in requests:
            request.finish(FinishReason.ABORT)
        if self._driver is not None and self._driver.finished:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = Event()

    def _require_alive(self) -> None:
        if self._failure:
            raise EngineError(self._failure)

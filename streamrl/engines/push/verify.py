"""Checks of the engines' weights beside the state hash: the logprob canary, and audits by checksums.

The controller runs both: ``weight_sync`` calls the canary with each push, the audit is an observer of the run. The
state hash proves that the weights are right: an engine computes it over its live parameters, and the controller
compares it with the trainer's. The canary checks the results of computing with them, and so finds a kernel's packed
copy of weights that a push did not renew, a KV cache of an earlier version, a layer that reads other tensors, or a
trainer whose model code differs from vLLM's. After a push every engine scores a few fixed tokens, and the trainer
scores them with the same weights.

No push waits for the canary. An engine gets one short prefill, the probe, when it has the version, and continues its
requests; a full engine answers later. The trainer scores the tokens while engines sample, and sends its logprobs with
the next version. Then both are compared. An engine gets no second probe while one is open. An answer of a later version
waits for the trainer's logprobs of this version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path

from anyio import CancelScope, create_task_group, fail_after, sleep_forever
from anyio.abc import TaskGroup
from msgspec import json

from streamrl.base.atomic_files import append_whole
from streamrl.base.concurrent_calls import start_unless_ending
from streamrl.base.errors import EngineError, RequestRefused
from streamrl.base.messages import FirstProbe, Generate, WeightAnnouncement
from streamrl.base.types import Completion, TokenArray, token_array
from streamrl.contracts import CanaryReport, Engine, Observer, PushReport
from streamrl.learning.canary import CanaryBounds, canary_bounds, first_bound, median_difference, probe_tokens
from streamrl.pretrained.model_facts import read_model_config, read_model_facts
from streamrl.recipe.field_types import EngineDtype
from streamrl.recipe.sections import Recipe

FIRST_TIMEOUT_S = 300.0
_PROMPT_TOKENS = 9
_SAMPLED_TOKENS = 24
_LEAST_TOKENS = 8  # of fewer the median is that of single tokens, which rounding may move far

VERSIONS_REMEMBERED = 8
"""Number of versions whose logprobs of the trainer are stored, for late answers."""

log = getLogger(__name__)


class WeightCanary:
    """Compares logprobs of ``tokens`` between the engines and the trainer. An engine that deviates by more than
    ``bounds.limit`` nats counts as broken. ``run`` must run as a task beside the pushes. ``family``: type of the
    model."""

    def __init__(self, tokens: Sequence[int], bounds: CanaryBounds, family: str) -> None:
        self.limit = bounds.limit
        self._bounds = bounds
        self._family = family
        self._tokens = token_array(tokens)
        self._expected: dict[int, Sequence[float]] = {}  # logprobs of the trainer, by version
        self._open: dict[Engine, CancelScope] = {}  # probes without an answer
        self._answers: dict[Engine, tuple[int, Sequence[float]]] = {}  # version and logprobs
        self._group: TaskGroup | None = None
        self._probes = 0
        self.deviating: set[Engine] = set()
        """Engines that take the next version as an anchor."""

    async def run(self) -> None:
        """Run the probes as child tasks until this call is cancelled."""
        async with create_task_group() as self._group:
            await sleep_forever()

    def ask(self, engines: Sequence[Engine]) -> None:
        """Send a probe to each of ``engines`` without an open one. Returns at once."""
        assert self._group is not None, "run() was not started"
        for engine in engines:
            if engine not in self._open:
                self._open[engine] = CancelScope()
                start_unless_ending(self._group, self._ask, engine)

    def compare(self, policy_version: int, expected: Sequence[float]) -> CanaryReport | None:
        """Compare the answers with the trainer's logprobs, and set ``deviating`` to the engines beyond the limit.
        Returns None when no answer could be compared.

        ``expected``: the trainer's logprobs, at ``policy_version``, of the tokens after the first (empty: not scored)

        Raises ``EngineError`` when an engine was beyond the limit before, and has taken an anchor since."""
        if expected:
            self._expected[policy_version] = expected
        for version in sorted(self._expected)[:-VERSIONS_REMEMBERED]:
            del self._expected[version]
        deviations = {
            engine: median_difference(logprobs, self._expected[version])
            for engine, (version, logprobs) in self._answers.items()
            if version in self._expected
        }
        before = self.deviating
        self.deviating = {engine for engine, nats in deviations.items() if nats > self.limit}
        again = before & self.deviating
        if again:
            raise EngineError(
                f"{len(again)} engines compute something else than the trainer with the same weights, also after they "
                f"took an anchor: logprobs of the canary are {max(deviations.values()):.3g} nats apart "
                f"(limit: {self.limit:g}). Set engines.dtype and training.compute_dtype to float32 to see "
                "whether rounding does it; weights.advanced.canary = false lets the run go on"
            )
        if not deviations:
            return None
        versions = [self._answers.pop(engine)[0] for engine in deviations]
        return CanaryReport(max(versions), max(deviations.values()), len(deviations))

    async def check_first(self, engine: Engine, probe: FirstProbe) -> None:
        """Compare what ``engine`` computes before the first step: its prefill of the tokens with the trainer's, and the
        tokens that it samples one by one with its prefill of the same tokens. Raises ``EngineError`` with the figure
        where a median is beyond ``first_bound``; an engine that dies or does not answer in time is left to others."""
        prompt = self._tokens[:_PROMPT_TOKENS]
        try:
            with fail_after(FIRST_TIMEOUT_S):
                scored = await engine.generate(self._request(self._tokens, len(self._tokens) - 1))
                sampled = await engine.generate(self._request(prompt, 0, max_tokens=_SAMPLED_TOKENS))
                count = len(sampled.token_ids)
                again = await engine.generate(self._request(prompt + sampled.token_ids, count)) if count else sampled
        except (EngineError, RequestRefused, TimeoutError) as error:
            log.warning("the first tokens of an engine were not checked: %s", error)
            return
        pairs = [
            (scored.behavior_logprobs, probe.logprobs, "a prefill of the engine and the trainer"),
            (sampled.behavior_logprobs, again.behavior_logprobs, "sampled tokens and a prefill of the same engine"),
        ]
        bound = first_bound(self._bounds, probe.rounding)
        for logprobs, expected, compared in pairs:
            if not _LEAST_TOKENS <= len(logprobs) == len(expected):
                continue
            nats = median_difference(logprobs, expected)
            if nats > bound:
                figures = f"median of {len(logprobs)} tokens; at most {bound:.3g}; bfloat16 costs {probe.rounding:.2g}"
                raise EngineError(
                    f"engines do not compute models of type {self._family!r} as the trainer does, on this device and "
                    f"in this dtype: before the first step, logprobs of {compared} are {nats:.3g} nats apart "
                    f"({figures}). Set another engines.dtype, or run the engines on another device; "
                    "weights.advanced.canary = false lets the run begin"
                )

    def forget(self, engine: Engine) -> None:
        """Forget an engine that is gone, and cancel its probe."""
        self._answers.pop(engine, None)
        self.deviating.discard(engine)
        self.end_probe(engine)

    def end_probe(self, engine: Engine) -> None:
        """Cancel the probe of an engine, if it has one. An earlier answer is still compared."""
        if engine in self._open:
            self._open[engine].cancel()

    async def _ask(self, engine: Engine) -> None:
        try:
            with self._open[engine]:
                self._note(engine, await engine.generate(self._request(self._tokens, len(self._tokens) - 1)))
        except (EngineError, RequestRefused) as error:  # the owner of the engine handles its death
            log.warning("the canary of an engine was not answered: %s", error)
        finally:
            del self._open[engine]

    def _request(self, tokens: TokenArray, scored: int, *, max_tokens: int = 1) -> Generate:
        self._probes += 1
        return Generate(
            request_id=f"canary-{self._probes}", token_ids=tokens, max_tokens=max_tokens, seed=0, scored_tokens=scored
        )

    def _note(self, engine: Engine, answer: Completion) -> None:
        """Store an answer, if it is complete and of one version. The answer to an aborted probe is not complete; a
        pause in the middle of a probe leads to two versions."""
        versions = {span.policy_version for span in answer.version_spans}
        if len(versions) == 1 and len(answer.behavior_logprobs) == len(self._tokens) - 1:
            self._answers[engine] = (versions.pop(), answer.behavior_logprobs)


def canary_of(recipe: Recipe, device: str, dtype: EngineDtype) -> WeightCanary | None:
    """Return the canary of ``recipe``, whose engines run on ``device`` (``cpu`` or ``cuda``) in ``dtype``; None without
    a canary."""
    if not recipe.canary:
        return None
    directory = Path(recipe.model.path)
    tokens = probe_tokens(read_model_facts(directory).vocabulary)
    config = read_model_config(directory)
    bounds = canary_bounds(recipe.training, recipe.engines, device, dtype)
    return WeightCanary(tokens, bounds, str(config.get("model_type")))


class WeightAudit(Observer):
    """Appends the checksums of the live weights to ``path`` every ``interval`` versions (0: never), one line of JSON a
    version: ``{"policy_version", "checksums": {engine: {parameter: digest}}}``. ``serving``: function that returns the
    engines by name."""

    def __init__(self, serving: Callable[[], Mapping[str, Engine]], path: Path, interval: int) -> None:
        self._serving = serving
        self._path = path
        self._interval = interval

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Audit the first version if it is due."""
        await self._audit(anchor.policy_version)

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Audit the version if it is due, whether or not a round follows (``last``). No newer version is pushed
        meanwhile."""
        await self._audit(push.policy_version)

    async def _audit(self, policy_version: int) -> None:
        if not self._interval or policy_version % self._interval:
            return
        checksums = {}
        for name, engine in self._serving().items():
            with suppress(EngineError):  # an engine that died meanwhile is started again
                checksums[name] = await engine.checksums()
        line = json.encode({"policy_version": policy_version, "checksums": checksums})
        with self._path.open("ab", buffering=0) as file:
            append_whole(file, line + b"\n")

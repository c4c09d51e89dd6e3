"""Checks of the engines' weights beside the state hash: the logprob canary, and audits by checksums.

The state hash proves that the weights are right; the canary looks at what is computed with them: a kernel's packed copy
that was not packed again, a cache of old keys, a layer that reads something else, a trainer that reads a checkpoint
otherwise. After a push every engine scores a few fixed tokens, as the trainer does on the same bits.

No push waits for it. An engine gets its question, one short prefill, when it has the version, and goes on with its
requests; a full one answers when it has room. The trainer scores the tokens while engines sample, and its logprobs come
with the next version. Then both are compared. A question that is still open is not asked again, and an answer by a
later version waits for the trainer's logprobs of that one."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

from streamrl.base.atomic_files import append_whole
from streamrl.base.concurrent_calls import start_unless_ending
from streamrl.base.errors import EngineError, RequestRefused
from streamrl.base.messages import Generate, WeightAnnouncement
from streamrl.base.types import Completion, token_array
from streamrl.contracts import CanaryReport, Engine, Observer, PushReport
from streamrl.learning.canary import canary_bounds, probe_tokens
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.recipe.sections import Recipe

VERSIONS_REMEMBERED = 8
"""Of so many versions the trainer's logprobs are remembered, for answers that are late."""

log = logging.getLogger(__name__)


class WeightCanary:
    """Asks engines about ``tokens``. One that is further than ``limit`` nats from the trainer is taken for broken.
    ``run`` must run beside the pushes."""

    def __init__(self, tokens: Sequence[int], limit: float) -> None:
        self.limit = limit
        self._tokens = token_array(tokens)
        self._expected: dict[int, Sequence[float]] = {}
        self._open: dict[Engine, anyio.CancelScope] = {}
        self._answers: dict[Engine, tuple[int, Sequence[float]]] = {}
        self._group: TaskGroup | None = None
        self._asked = 0
        self.deviating: set[Engine] = set()
        """Engines that take the next version as an anchor."""

    async def run(self) -> None:
        """Questions run as children of this, until it is cancelled."""
        async with anyio.create_task_group() as self._group:
            await anyio.sleep_forever()

    def ask(self, engines: Sequence[Engine]) -> None:
        """Ask ``engines`` where no question is open. Returns at once."""
        assert self._group is not None, "run() was not started"
        for engine in engines:
            if engine not in self._open:
                self._open[engine] = anyio.CancelScope()
                start_unless_ending(self._group, self._ask, engine)

    def compare(self, policy_version: int, expected: Sequence[float]) -> CanaryReport | None:
        """Compare answers with the trainer's logprobs of the tokens after the first, by ``policy_version`` (empty: the
        trainer did not score). None: there was nothing to compare. Engines beyond the limit are then ``deviating``.

        Raises ``EngineError`` where one of them has been before, and has taken an anchor since."""
        if expected:
            self._expected[policy_version] = expected
        for old in sorted(self._expected)[:-VERSIONS_REMEMBERED]:
            del self._expected[old]
        apart = {
            engine: deviation(found, self._expected[version])
            for engine, (version, found) in self._answers.items()
            if version in self._expected
        }
        before = self.deviating
        self.deviating = {engine for engine, nats in apart.items() if nats > self.limit}
        if again := before & self.deviating:
            raise EngineError(
                f"{len(again)} engines compute something else than the trainer with the same weights, after an "
                f"anchor as before it: logprobs of the canary are {max(apart.values()):.3g} nats apart "
                f"({self.limit:g} may be). Set engines.dtype and training.compute_dtype to float32 to see "
                "whether rounding does it; weights.advanced.canary = false lets the run go on"
            )
        if not apart:
            return None
        report = CanaryReport(max(self._answers[e][0] for e in apart), max(apart.values()), len(apart))
        for engine in apart:
            del self._answers[engine]
        return report

    def forget(self, engine: Engine) -> None:
        """Forget an engine that is about to be stopped, or holds nothing to compare."""
        self._answers.pop(engine, None)
        self.deviating.discard(engine)
        if engine in self._open:
            self._open[engine].cancel()

    async def _ask(self, engine: Engine) -> None:
        self._asked += 1
        request = Generate(
            request_id=f"canary-{self._asked}",
            token_ids=self._tokens,
            max_tokens=1,
            seed=0,
            temperature=1.0,
            scored=len(self._tokens) - 1,
        )
        try:
            with self._open[engine]:
                self._note(engine, await engine.generate(request))
        except (EngineError, RequestRefused) as error:  # its death is noticed elsewhere
            log.warning("the canary of an engine was not answered: %s", error)
        finally:
            del self._open[engine]

    def _note(self, engine: Engine, answer: Completion) -> None:
        """Note an answer. An aborted question has none, and one that was paused half-way none of one version."""
        versions = {span.policy_version for span in answer.version_spans}
        if len(versions) == 1 and len(answer.behavior_logprobs) == len(self._tokens) - 1:
            self._answers[engine] = (versions.pop(), answer.behavior_logprobs)


def canary_of(recipe: Recipe, device: str) -> WeightCanary | None:
    """The canary of ``recipe``, whose engines run on ``device`` (``cpu`` or ``cuda``); None where it has none."""
    if not recipe.canary:
        return None
    tokens = probe_tokens(read_model_facts(Path(recipe.model.path)).vocabulary)
    return WeightCanary(tokens, canary_bounds(recipe.training, recipe.engines, device).limit)


def deviation(found: Sequence[float], expected: Sequence[float]) -> float:
    """The median over tokens of the absolute difference, in nats: single tokens may be far apart by rounding, where an
    expert is chosen, say, and a fault of a layer moves all. Infinite where more than half are not numbers."""
    apart = [abs(float(a) - float(b)) for a, b in zip(found, expected, strict=True)]
    return statistics.median_low([d if math.isfinite(d) else math.inf for d in apart])


class WeightAudit(Observer):
    """Appends a line to ``path`` every ``interval`` versions (0: never), of the engines that ``serving`` returns by
    name: ``{"policy_version", "checksums": {engine: {parameter: digest}}}``."""

    def __init__(self, serving: Callable[[], Mapping[str, Engine]], path: Path, interval: int) -> None:
        self._serving = serving
        self._path = path
        self._interval = interval

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Audit the first version when it is due."""
        await self._audit(anchor.policy_version)

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Audit the version when it is due: nothing newer is pushed meanwhile."""
        await self._audit(push.policy_version)

    async def _audit(self, policy_version: int) -> None:
        if not self._interval or policy_version % self._interval:
            return
        checksums = {}
        for name, engine in self._serving().items():
            with suppress(EngineError):  # it died meanwhile, and is started again
                checksums[name] = await engine.checksums()
        line = msgspec.json.encode({"policy_version": policy_version, "checksums": checksums})
        with self._path.open("ab", buffering=0) as file:
            append_whole(file, line + b"\n")

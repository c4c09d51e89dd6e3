"""Engines freed late in a round and sets of engines, in virtual time: the decisions are control's, the costs a model's.

A freed engine's devices are the trainer's until the next round: it then works at ``streaming_speed`` plus that share of
what is missing to full speed. A request that moves is submitted elsewhere ``migration_s`` later and prefilled again.
Another set takes over between rounds, in ``switch_s``.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Explain
from streamrl.elastic.engine_planning import (
    Lengths,
    OpenRequest,
    PlanningSettings,
    RoundProgress,
    ServingEngine,
    plan_release,
)
from streamrl.elastic.engine_release import RECENT_LENGTHS
from streamrl.elastic.engine_sets import (
    EngineSet,
    RoundMeasured,
    SetHistory,
    SetSettings,
    faster_steps,
    plan_engine_set,
    with_round,
)
from streamrl.engines.step_cost import StepCost
from streamrl.plan.topology import expected_kv_tokens, prepared_sets
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.rollout import SimulatedRollout
from streamrl.simulate.stages import TrainerClock

UNLIMITED = 1 << 40
"""Tokens of a KV cache without a limit."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe lets become of the engines. ``sets``: all of them, the cluster's own first; empty: that is all."""

    release: ReleaseKind = ReleaseKind.NEVER
    sets: tuple[EngineSet, ...] = ()

    def most_engines(self, model: ClusterModel) -> int:
        """Of the largest set."""
        return max([model.engines.count, *(one.engines for one in self.sets)])


def engine_plan(recipe: Recipe, model: ClusterModel) -> EnginePlan:
    """What ``recipe`` asks for on that cluster, whose engines are the first set."""
    if not recipe.engines.sets:
        return EnginePlan(release=recipe.engines.release)
    engines, first = model.engines, prepared_sets(recipe)[0]
    own = EngineSet(
        name=f"{engines.count}x{engines.tensor_parallel_size}",
        engines=engines.count,
        tensor_parallel_size=engines.tensor_parallel_size,
        kv_tokens=model.engine.kv_tokens,
        max_num_seqs=model.engine.max_num_seqs,
        round_kinds=first.rounds,
    )
    others = [
        EngineSet(
            name=one.name,
            engines=one.count,
            tensor_parallel_size=one.tensor_parallel_size,
            kv_tokens=one.kv_tokens
            or expected_kv_tokens(
                own.kv_tokens,
                one.tensor_parallel_size,
                of=own.tensor_parallel_size,
                weight_tokens=engines.weight_tokens,
            ),
            max_num_seqs=-(-own.max_num_seqs * own.engines // one.count),
            round_kinds=one.rounds,
        )
        for one in prepared_sets(recipe)[1:]
    ]
    return EnginePlan(release=recipe.engines.release, sets=(own, *others))


class SimulatedRelease:
    """Told of what is ``launched`` and ``ended``; frees engines of ``rollout`` and gives their share to ``trainer``."""

    def __init__(
        self,
        rollout: SimulatedRollout,
        trainer: TrainerClock,
        cap: int,
        settings: PlanningSettings = PlanningSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._rollout = rollout
        self._trainer = trainer
        self._cap = cap
        self._settings = settings
        self._lengths: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT_LENGTHS))
        self._open: set[TrajectoryId] = set()
        self._launched, self._kind, self._looked_at = 0, "", -1.0
        self.freed = 0

    def launched(self, round_kind: str, ids: Sequence[TrajectoryId]) -> None:
        """A group of a round of that kind was ordered."""
        self._kind = round_kind
        self._launched += len(ids)
        self._open.update(ids)

    def ended(self, identity: TrajectoryId, tokens: int, now: float) -> Explain | None:
        """A trajectory was scored. Why engines were freed, where they were."""
        if identity not in self._open:
            return None
        self._open.discard(identity)
        self._lengths[self._kind].append(tokens)
        finished = self._launched - len(self._open)
        progress = finished / self._launched
        low, high = self._settings.window
        due = 0.0 if self._looked_at < 0 else self._looked_at + self._settings.progress_step
        if self.freed or not max(low, due) <= progress <= high:
            return None
        plan = plan_release(
            RoundProgress(
                round_kind=self._kind,
                finished=finished,
                launched=self._launched,
                engines=tuple(self._serving(index) for index in self._rollout.serving),
                looked_at=self._looked_at,
            ),
            Lengths(ascending=tuple(sorted(self._lengths[self._kind])), cap=self._cap),
            self._settings,
        )
        if plan.looked:
            self._looked_at = progress
        if not plan.free:
            return None
        self.freed = len(plan.free)
        share = self.freed / len(self._rollout.serving)
        self._rollout.free([int(name) for name in plan.free], {move.request_id: int(move.to) for move in plan.moves})
        self._trainer.free(now, share)
        return plan.because

    def begin_round(self) -> None:
        """All engines serve again."""
        self._open.clear()
        self._launched, self._looked_at, self.freed = 0, -1.0, 0
        self._rollout.take_back()

    def _serving(self, index: int) -> ServingEngine:
        engine = self._rollout.engines[index]
        engine.advance(self._rollout.now)
        requests = [*engine.running, *(request for request in engine.waiting if not request.stopped)]
        return ServingEngine(
            name=str(index),
            kv_tokens=engine.model.kv_tokens or UNLIMITED,
            max_num_seqs=engine.model.max_num_seqs,
            requests=tuple(
                OpenRequest(request_id=str(r.id), prompt=r.prompt_tokens, sampled=engine.sampled_by_now(r))
                for r in requests
            ),
        )


class SimulatedSwitch:
    """Chooses the set for each round as it begins, and measures it."""

    def __init__(
        self,
        rollout: SimulatedRollout,
        model: ClusterModel,
        sets: Sequence[EngineSet],
        steps: int,
        settings: SetSettings = SetSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._rollout = rollout
        self._model = model
        self._sets = {one.name: one for one in sets}
        self._steps = steps
        self._settings = settings
        self.current = sets[0].name
        self._history = SetHistory()
        self._kind = ""
        self._began = 0.0
        self._preemptions = self._requests = self._tokens = self._longest = 0
        faster = faster_steps(model.engines.tensor_parallel_size, model.engines.parallel_scaling)
        self._cost = StepCost(base_s=model.engine.base_s * faster, per_running_s=model.engine.per_running_s * faster)

    def launched(self, round_kind: str, ids: Sequence[TrajectoryId], policy_version: int) -> Explain | None:
        """A group is about to be submitted. Why another set serves it, where one does."""
        because = None
        if not self._kind:
            because = self._begin(round_kind, self._steps - policy_version)
        self._requests += len(ids)
        return because

    def ended(self, tokens: int) -> None:
        """A trajectory was scored."""
        self._tokens += tokens
        self._longest = max(self._longest, tokens)

    def round_closed(self) -> None:
        """The batch of the round is complete."""
        if not self._kind:
            return
        measured = RoundMeasured(
            round_kind=self._kind,
            engine_set=self.current,
            seconds=max(self._rollout.now - self._began, 0.0),
            preemptions=self._rollout.preemptions - self._preemptions,
            kv_usage=self._rollout.fullest,
            requests=self._requests,
            tokens=float(self._tokens),
            longest=float(self._longest),
            prompt=float(self._model.engines.prompt_tokens),
        )
        self._history = with_round(self._history, measured, list(self._sets.values()), self._cost, self._settings)
        self._kind = ""

    def _begin(self, round_kind: str, rounds_left: int) -> Explain | None:
        plan = plan_engine_set(
            list(self._sets.values()),
            self._history,
            current=self.current,
            round_kind=round_kind,
            cost=self._cost,
            switch_s=self._model.engines.switch_s,
            rounds_left=rounds_left,
            settings=self._settings,
        )
        self._kind, self._began = round_kind, self._rollout.now
        self._requests = self._tokens = self._longest = 0
        self._preemptions, self._rollout.fullest = self._rollout.preemptions, 0.0
        if plan.engine_set != self.current:
            self.current = plan.engine_set
            one = self._sets[self.current]
            self._rollout.change(one.engines, scaled_engine(self._model, one), self._model.engines.switch_s)
            self._began += self._model.engines.switch_s
        return plan.because


def scaled_engine(model: ClusterModel, one: EngineSet) -> EngineModel:
    """An engine of that set: decode steps and prefill take what they take on the cluster's engine, by workers."""
    scaling = model.engines.parallel_scaling
    faster = faster_steps(one.tensor_parallel_size, scaling) / faster_steps(model.engines.tensor_parallel_size, scaling)
    engine = model.engine
    return msgspec.structs.replace(
        engine,
        base_s=engine.base_s / faster,
        per_running_s=engine.per_running_s / faster,
        per_context_token_s=engine.per_context_token_s / faster,
        per_running_squared_s=engine.per_running_squared_s / faster,
        per_root_running_s=engine.per_root_running_s / faster,
        prefill_tokens_s=engine.prefill_tokens_s * faster,
        max_num_seqs=one.max_num_seqs,
        kv_tokens=0 if math.isinf(one.capacity) else one.kv_tokens,
    )

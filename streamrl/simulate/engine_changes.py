"""Engines freed late in a round and sets of engines, in virtual time: the decisions are control's, the costs a model's.

A freed engine's devices are the trainer's until the next round: it then works at ``streaming_speed`` plus that share of
what is missing to full speed. A request that moves is submitted elsewhere ``migration_s`` later and prefilled again.
Another set takes over between rounds, in ``switch_s``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from streamrl.base.messages import EngineLoad
from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Decision
from streamrl.engines.elastic.freeing import Freeing, OpenRequest, ServingEngine
from streamrl.engines.elastic.sets import SetChooser, faster_steps
from streamrl.engines.step_cost import StepCost
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.recipe.topology import PreparedSet, expected_kv_tokens, prepared_sets
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.rollout import SimulatedRollout
from streamrl.simulate.stages import TrainerClock

UNLIMITED = 1 << 40
"""Tokens of a KV cache without a limit."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of the engines that a recipe allows. ``sets``: all of them, the cluster's own first; empty: only that."""

    release: ReleaseKind = ReleaseKind.NEVER
    sets: tuple[PreparedSet, ...] = ()


def engine_plan(recipe: Recipe, model: ClusterModel) -> EnginePlan:
    """Plan of ``recipe`` on that cluster, whose engines are the first set."""
    if not recipe.engines.sets:
        return EnginePlan(release=recipe.engines.release)
    engines = model.engines
    first, *others = prepared_sets(recipe)
    workers = engines.tensor_parallel_size
    kv_tokens = model.engine.kv_tokens
    requests = model.engine.max_num_seqs
    own = replace(first, count=engines.count, tensor_parallel_size=workers, kv_tokens=kv_tokens, max_num_seqs=requests)

    def expected(one: PreparedSet) -> PreparedSet:
        room = expected_kv_tokens(kv_tokens, one.workers, of=own.workers, weight_tokens=engines.weight_tokens)
        return replace(one, kv_tokens=one.kv_tokens or room, max_num_seqs=-(-requests * own.count // one.count))

    return EnginePlan(release=recipe.engines.release, sets=(own, *map(expected, others)))


class SimulatedFreeing:
    """Frees engines of ``rollout`` as ``Freeing`` decides, and gives their share to ``trainer``."""

    def __init__(self, rollout: SimulatedRollout, trainer: TrainerClock, cap: int) -> None:
        self._rollout = rollout
        self._trainer = trainer
        self._freeing = Freeing(cap)
        self.launched = self._freeing.launched

    def ended(self, identity: TrajectoryId, tokens: int, now: float) -> Decision | None:
        """A trajectory was scored. Why engines were freed, where they were."""
        self._freeing.ended(identity, tokens)
        if not self._freeing.is_due:
            return None
        serving = self._rollout.serving
        plan = self._freeing.plan([self._serving(index) for index in serving])
        if not plan.free:
            return None
        self._rollout.free([int(name) for name in plan.free], {move.request_id: int(move.to) for move in plan.moves})
        self._trainer.free(now, len(plan.free) / len(serving))
        return plan.because

    def begin_round(self) -> None:
        """All engines serve again."""
        self._freeing.begin_round()
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


class SimulatedSets:
    """Changes the engines of ``rollout`` to the set that ``SetChooser`` chooses as a round begins."""

    def __init__(self, rollout: SimulatedRollout, model: ClusterModel, sets: Sequence[PreparedSet], steps: int) -> None:
        self._rollout = rollout
        self._model = model
        faster = faster_steps(model.engines.tensor_parallel_size, model.engines.parallel_scaling)
        cost = StepCost(base_s=model.engine.base_s * faster, per_running_s=model.engine.per_running_s * faster)
        self._chooser = SetChooser(sets, steps=steps, switch_s=model.engines.switch_s, cost=cost)
        self.ended = self._chooser.ended

    def launched(self, round_kind: str, ids: Sequence[TrajectoryId], policy_version: int) -> Decision | None:
        """A group is about to be submitted. Why another set serves it, where one does."""
        rollout = self._rollout
        engines = self._model.engines
        if self._chooser.is_between_rounds:
            rollout.fullest = 0.0
        plan = self._chooser.launched(round_kind, ids, engines.prompt_tokens, policy_version, rollout.now, self._load)
        if plan is None:
            return None
        one = self._chooser.sets[plan.engine_set]
        rollout.change(one.count, scaled_engine(self._model, one), engines.switch_s)
        self._chooser.switched(one.name, rollout.now + engines.switch_s, engines.switch_s, self._load)
        return plan.because

    def round_closed(self) -> None:
        """The batch of the round is complete."""
        self._chooser.round_closed(self._rollout.now, self._load)

    @property
    def _load(self) -> EngineLoad:
        return EngineLoad(
            running=0,
            waiting=0,
            kv_cache_usage=self._rollout.fullest,
            generated_tokens=0,
            preemptions=self._rollout.preemptions,
        )


def scaled_engine(model: ClusterModel, one: PreparedSet) -> EngineModel:
    """An engine of that set: decode steps and prefill of the cluster's engine, by their tensor parallel sizes."""
    scaling = model.engines.parallel_scaling
    faster = faster_steps(one.tensor_parallel_size, scaling) / faster_steps(model.engines.tensor_parallel_size, scaling)
    engine = model.engine
    return replace(
        engine,
        base_s=engine.base_s / faster,
        per_running_s=engine.per_running_s / faster,
        per_context_token_s=engine.per_context_token_s / faster,
        per_root_running_s=engine.per_root_running_s / faster,
        prefill_tokens_s=engine.prefill_tokens_s * faster,
        max_num_seqs=one.max_num_seqs,
        kv_tokens=one.kv_tokens,
    )

"""Engines freed late in a round, and sets of engines, in virtual time. ``engines.elastic`` decides on both as in a real
run; the fleet model has the costs. ``simulation`` calls the two classes for each launch and each end.

The trainer has the cores or GPUs of freed engines, which have nothing to sample, until the next round: its speed is
then
``streaming_speed`` + (1 - ``streaming_speed``) x the share of engines that are freed. A request that moves is submitted
elsewhere ``migration_s`` later and prefilled again. A change to another set happens between rounds and takes
``switch_s``."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.messages import EngineLoad
from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Decision
from streamrl.engines.elastic.engine_sets import SetChooser, faster_steps
from streamrl.engines.elastic.freeing import Freeing, OpenRequest, ServingEngine
from streamrl.engines.step_cost import StepCost
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.recipe.topology import PreparedSet, expected_kv_tokens, prepared_sets
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.fleet import FleetModel
from streamrl.simulate.rollout import SimulatedRollout, open_requests
from streamrl.simulate.stages import TrainerClock

UNLIMITED = 1 << 40
"""Size in tokens of a KV cache without a limit."""


class EnginePlan(Struct, frozen=True, kw_only=True):
    """Changes of the engines that a recipe allows. ``release``: time at which engines are freed; ``sets``: all sets of
    engines, the set of the fleet first (empty: no change of the set)."""

    release: ReleaseKind = ReleaseKind.NEVER
    sets: tuple[PreparedSet, ...] = ()


def engine_plan(recipe: Recipe, model: FleetModel) -> EnginePlan:
    """Plan of ``recipe`` on the fleet ``model``, whose engines are the first set."""
    if not recipe.engines.sets:
        return EnginePlan(release=recipe.engines.release)
    engines = model.engines
    first, *other_sets = prepared_sets(recipe)
    workers = engines.tensor_parallel_size
    kv_tokens = model.engine.kv_tokens
    requests = model.engine.max_num_seqs
    first = replace(
        first, count=engines.count, tensor_parallel_size=workers, kv_tokens=kv_tokens, max_num_seqs=requests
    )

    def on_fleet(engine_set: PreparedSet) -> PreparedSet:
        """``engine_set`` with the KV tokens and requests that the fleet would give it."""
        room = expected_kv_tokens(kv_tokens, engine_set.workers, of=first.workers, weight_tokens=engines.weight_tokens)
        max_num_seqs = -(-requests * first.count // engine_set.count)
        return replace(engine_set, kv_tokens=engine_set.kv_tokens or room, max_num_seqs=max_num_seqs)

    return EnginePlan(release=recipe.engines.release, sets=(first, *map(on_fleet, other_sets)))


class SimulatedFreeing:
    """Frees engines of ``rollout`` when ``Freeing`` decides so, and gives their devices to ``trainer``."""

    def __init__(self, rollout: SimulatedRollout, trainer: TrainerClock, cap: int) -> None:
        self._rollout = rollout
        self._trainer = trainer
        self._freeing = Freeing(cap)
        self.note_launch = self._freeing.note_launch

    def note_end(self, identity: TrajectoryId, tokens: int, now: float) -> Decision | None:
        """Note that a trajectory was scored, and free engines where that is due. Returns the decision, if any."""
        self._freeing.note_end(identity, tokens)
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
        """Let all engines serve again."""
        self._freeing.begin_round()
        self._rollout.readmit()

    def _serving(self, index: int) -> ServingEngine:
        engine = self._rollout.engines[index]
        engine.advance(self._rollout.now)
        return ServingEngine(
            name=str(index),
            kv_tokens=engine.model.kv_tokens or UNLIMITED,
            max_num_seqs=engine.model.max_num_seqs,
            requests=tuple(
                OpenRequest(
                    request_id=str(request.id), prompt=request.prompt_tokens, sampled=engine.sampled_by_now(request)
                )
                for request in open_requests(engine)
            ),
        )


class SimulatedSets:
    """Changes the engines of ``rollout`` to the set that ``SetChooser`` chooses at the start of a round."""

    def __init__(self, rollout: SimulatedRollout, model: FleetModel, sets: Sequence[PreparedSet], steps: int) -> None:
        self._rollout = rollout
        self._model = model
        faster = faster_steps(model.engines.tensor_parallel_size, model.engines.parallel_scaling)
        cost = StepCost(base_s=model.engine.base_s * faster, per_running_s=model.engine.per_running_s * faster)
        self._chooser = SetChooser(sets, steps=steps, switch_s=model.engines.switch_s, cost=cost)
        self.note_end = self._chooser.note_end

    def note_launch(self, round_kind: str, ids: Sequence[TrajectoryId], policy_version: int) -> Decision | None:
        """Note that a group is about to be submitted, and change to another set where that is due. Returns the
        decision, if any."""
        rollout = self._rollout
        engines = self._model.engines
        if self._chooser.is_between_rounds:
            rollout.fullest = 0.0
        plan = self._chooser.note_launch(
            round_kind, ids, engines.prompt_tokens, policy_version, rollout.now, self._load
        )
        if plan is None:
            return None
        engine_set = self._chooser.sets[plan.engine_set]
        rollout.change(engine_set.count, scaled_engine(self._model, engine_set), engines.switch_s)
        self._chooser.note_switch(engine_set.name, rollout.now + engines.switch_s, engines.switch_s, self._load)
        return plan.because

    def close_round(self) -> None:
        """Note that the batch of the round is complete."""
        self._chooser.note_round_closed(self._rollout.now, self._load)

    @property
    def _load(self) -> EngineLoad:
        return EngineLoad(kv_cache_usage=self._rollout.fullest, preemptions=self._rollout.preemptions)


def scaled_engine(model: FleetModel, engine_set: PreparedSet) -> EngineModel:
    """Model of an engine of ``engine_set``: decode steps and prefill of the fleet's engine, scaled by the ratio of
    tensor parallel sizes."""
    scaling = model.engines.parallel_scaling
    fleet_speed = faster_steps(model.engines.tensor_parallel_size, scaling)
    faster = faster_steps(engine_set.tensor_parallel_size, scaling) / fleet_speed
    engine = model.engine
    return replace(
        engine,
        base_s=engine.base_s / faster,
        per_running_s=engine.per_running_s / faster,
        per_context_token_s=engine.per_context_token_s / faster,
        per_root_running_s=engine.per_root_running_s / faster,
        prefill_tokens_s=engine.prefill_tokens_s * faster,
        max_num_seqs=engine_set.max_num_seqs,
        kv_tokens=engine_set.kv_tokens,
    )

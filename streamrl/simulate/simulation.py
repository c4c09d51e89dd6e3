"""The real control core in virtual time: its actions are carried out by cost models, and answered as events.

Plain code around one heap. What happens next is an engine whose next request finishes, a request that arrives, a reward
that is known, or the trainer, a push, an evaluation that is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.types import FinishReason
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.check import violations
from streamrl.control.machine import Control
from streamrl.control.policies.auto import candidate_settings
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import ControlSettings, control_settings
from streamrl.observe.dashboard.chrome_trace import ChromeTrace
from streamrl.recipe.scheduling import InFlight, RoundKind
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.engine_changes import EnginePlan, SimulatedFreeing, SimulatedSets, engine_plan
from streamrl.simulate.engines import Request
from streamrl.simulate.host_changes import SimulatedHosts
from streamrl.simulate.lengths import LengthSource, RecipeLengths, drawn_turns
from streamrl.simulate.report import SimulationReport, StepLedger
from streamrl.simulate.rollout import SimulatedRollout
from streamrl.simulate.stages import EventQueue, RewardServers, TrainerClock

MEASURE_INTERVAL_S = 0.25
CYCLES_STEPS = 45
"""Whole cycles of races at 1.125, 1.25 and 1.5 (9, 5 and 3 rounds): a part of one would flatter a race, or wrong it."""

WARM_UP_STEPS = 5
STALLED = "nothing to wait for; that is a bug of the round policy"
ADVISED_AT = 4
"""Version at which simulated ``auto`` rounds are advised."""


def simulate(
    settings: ControlSettings,
    model: ClusterModel,
    steps: int,
    *,
    lengths: LengthSource | None = None,
    in_flight: InFlight = InFlight.KEEP,
    seed: int = 0,
    warm_up: int = 0,
    progress: Callable[[int], None] | None = None,
    engines: EnginePlan = EnginePlan(),  # noqa: B008 - frozen
    trace: ChromeTrace | None = None,
) -> SimulationReport:
    """Run the control core for ``warm_up + steps`` optimizer steps; figures are of the last ``steps``.

    ``engines``: whether they are freed late in a round, and other sets of them. ``lengths``: None draws from
    ``model.lengths``. ``progress``: called with each version that goes live. ``trace``: collects what happens.

    Raises ``StreamRLError`` when control stops the run, or when nothing is left that could happen."""
    settings = msgspec.structs.replace(settings, steps=warm_up + steps)
    source = lengths or model.drawn_lengths(seed)
    advice = None
    if settings.rounds is RoundKind.AUTO:
        reports = simulate_candidates(settings, model, source, seed=seed, engines=engines)
        advice = on.RoundsAdvised(goodput={name: report.goodput for name, report in reports.items()})
    simulation = Simulation(settings, model, source, in_flight=in_flight, seed=seed, engines=engines, advice=advice)
    if trace is None:
        return simulation.run(warm_up, progress)
    simulation.rollout.trace = trace
    trace.begin(str(settings.rounds), [f"engine {index}" for index in range(len(simulation.rollout.engines))])
    report = simulation.run(warm_up, progress)
    for row in report.recent:
        trace.step(row, row.began_s, groups=row.groups)
    return report


def simulate_recipe(
    recipe: Recipe, model: ClusterModel, steps: int, lengths: LengthSource, *, seed: int = 0, **more: Any
) -> SimulationReport:
    """``simulate`` what ``recipe`` asks for, no completion longer than it allows; ``more``: arguments of that."""
    lengths = RecipeLengths(recipe, model.environment, lengths, seed)
    plan = engine_plan(recipe, model)
    settings = control_settings(recipe)
    in_flight = recipe.rollout.in_flight
    return simulate(settings, model, steps, lengths=lengths, in_flight=in_flight, seed=seed, engines=plan, **more)


def simulate_candidates(
    settings: ControlSettings,
    model: ClusterModel,
    lengths: LengthSource,
    *,
    seed: int = 0,
    engines: EnginePlan = EnginePlan(),  # noqa: B008 - frozen
) -> dict[str, SimulationReport]:
    """Simulate every kind of round that ``auto`` chooses from, by name, for whole cycles of races."""
    return {
        name: simulate(one, model, CYCLES_STEPS, lengths=lengths, seed=seed, warm_up=WARM_UP_STEPS, engines=engines)
        for name, one in candidate_settings(settings).items()
    }


def check(control: Control) -> None:
    """Raise ``StreamRLError`` where an invariant does not hold."""
    if found := violations(control.state, control.rules):
        raise StreamRLError(f"a bug of streamrl or of the round policy, in the simulated run: {'; '.join(found)}")


def _refuse_sets_on_hosts(engines: EnginePlan, model: ClusterModel) -> None:
    if len(engines.sets) > 1 and (model.hosts.changes or model.hosts.loss_every_s):
        raise StreamRLError(
            "sets of engines on hosts that join or are lost are not simulated: leave out engines.sets of the "
            "recipe, or hosts.changes and hosts.loss_every_s of the cluster"
        )


def _with_hosts(report: SimulationReport, hosts: SimulatedHosts) -> SimulationReport:
    return msgspec.structs.replace(
        report,
        hosts=len(hosts.present),
        transfer_s=hosts.transfer_s / max(hosts.pushes, 1),
        hosts_lost=hosts.losses,
        hosts_joined=hosts.joins,
        requests_moved=hosts.moved,
    )


class Simulation:
    """One run: the core, and the world that it decides about."""

    def __init__(
        self,
        settings: ControlSettings,
        model: ClusterModel,
        lengths: LengthSource,
        *,
        in_flight: InFlight = InFlight.KEEP,
        seed: int = 0,
        engines: EnginePlan = EnginePlan(),  # noqa: B008 - frozen
        advice: on.RoundsAdvised | None = None,
    ) -> None:
        self.core = make_control(settings)
        self.model = model
        self.queue = EventQueue()
        verifies = settings.tail_batching.verifies(deterministic=settings.deterministic)
        largest = max((one.count for one in engines.sets), default=0)
        self.rollout = SimulatedRollout(
            model, self.queue, max_tokens=lengths.cap, most=largest, verifies_deferred=verifies
        )
        _refuse_sets_on_hosts(engines, model)
        self.hosts = SimulatedHosts(model.hosts, self.rollout, self.queue, seed)
        most = model.engines.count * model.engine.max_num_seqs
        self.rollout.sampled = self._sampled
        # Whatever the rounds have in flight: as the real pipeline measures its engines.
        capacity = model.engines.capacity or min(most, settings.batch_trajectories)
        self.ledger = StepLedger(settings, self.rollout.engines, self.rollout.together, capacity, lengths.cap)
        self.finished = ""
        self._lengths = lengths
        self._advice = advice
        self._recompute = in_flight is not InFlight.KEEP
        self._rewards = [RewardServers(one.reward, seed) for one in model.domains or [model]]
        self._trainer = TrainerClock(model.trainer)
        self._trainer_stamp = 0
        self._training_slows = 1.0
        self._round_kind = ""
        self._release: SimulatedFreeing | None = None
        if engines.release is not ReleaseKind.NEVER:
            self._release = SimulatedFreeing(self.rollout, self._trainer, lengths.cap)
        self._switch: SimulatedSets | None = None
        if len(engines.sets) > 1:
            self._switch = SimulatedSets(self.rollout, model, engines.sets, settings.steps)
        self._answers: deque[on.ControlEvent] = deque()
        self._telling = False
        self._next_prompt = 0
        self._measured_s = 0.0
        self._carry_out: dict[type[do.ControlAction], Callable[[Any], None]] = {
            do.DrawPrompts: self._draw,
            do.LaunchGroup: self._launch,
            do.Drop: self._drop,
            do.PauseTrajectories: self.rollout.pause_trajectories,
            do.PauseEngines: lambda action: self.rollout.pause_engines(),
            do.ResumeTrajectories: lambda action: self.rollout.resume_trajectories(
                action, self.core.state.live_version
            ),
            do.Decision: lambda action: self.ledger.explained(action.subject),
            do.TrainGroupNow: self._train,
            do.StepOptimizer: self._step,
            do.PublishWeights: self._publish,
            do.Evaluate: lambda action: self._soon(on.EvaluationDone(policy_version=action.policy_version)),
            do.CancelEvaluation: lambda action: None,  # EvaluationDone is on its way
            do.WriteCheckpoint: lambda action: self._soon(on.CheckpointDone(policy_version=action.policy_version)),
            do.End: self._end,
        }

    def run(self, warm_up: int = 0, progress: Callable[[int], None] | None = None) -> SimulationReport:
        """Run to the end. To be called once."""
        self._warm_up = warm_up
        self._progress = progress
        queue = self.queue
        rollout = self.rollout
        measures = self.core.settings.rounds is RoundKind.CUSTOM or self.core.settings.reads_environment
        self._send_event(on.RunBegan())
        rollout.settle()
        while not self.finished:
            if not queue:
                where = f"{queue.now:.3f} s, version {self.core.state.live_version} of {self.core.settings.steps}"
                raise StreamRLError(f"the simulation is stalled at {where}: {STALLED}")
            time, what, stamp = queue.next()
            if isinstance(what, int):
                for request in rollout.finished(what, stamp, time):
                    self._sampled(request)
            else:
                queue.now = time
                what()
            if measures and queue.now - self._measured_s >= MEASURE_INTERVAL_S:
                self._measured_s = queue.now
                self._send_event(rollout.measure())
            rollout.settle()
        check(self.core)
        return _with_hosts(self.ledger.report(self.finished, self.core.state.accounting()), self.hosts)

    # ---- what happens ------------------------------------------------------------------------------

    def _sampled(self, request: Request) -> None:
        if request.stopped:  # cancelled by what ended at the same instant
            return
        now = self.queue.now
        request.sampling_s = now - request.launched_s - request.environment_s
        request.newest_version = self.core.state.live_version
        servers = self._rewards[self.model.domain_of(request.prompt)]
        ends, reward = servers.score(now, request.prompt, truncated=request.length >= self._lengths.cap)
        if ends <= now:
            self._scored(request, reward)
            return

        def known() -> None:
            servers.running -= 1
            self._slow_down()
            self._scored(request, reward)

        self.queue.add(ends, known)
        servers.running += 1
        self._slow_down()

    def _slow_down(self, training: float | None = None) -> None:
        """Decode steps are slower by what is computed beside them: training by so much from now on, and rewards."""
        self._training_slows = self._training_slows if training is None else training
        judged = max(servers.model.rollout_slowdown if servers.running else 1.0 for servers in self._rewards)
        self.rollout.slow_down(self._training_slows * judged)

    def _scored(self, request: Request, reward: float) -> None:
        if request.stopped:
            return
        self._follow_end(request)
        truncated = request.length >= self._lengths.cap
        self._send_event(
            on.TrajectoryScored(
                id=request.id,
                reward=reward,
                tokens=request.length,
                finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
                oldest_version=request.first_version,
                newest_version=request.newest_version,
                seconds=self.queue.now - request.launched_s,
            )
        )

    def _follow_end(self, request: Request) -> None:
        if self._switch is not None:
            self._switch.ended(request.id, request.length)
        if self._release is not None:
            because = self._release.ended(request.id, request.length, self.queue.now)
            if because is not None:
                self.ledger.explained(because.subject)

    def _send_event(self, event: on.ControlEvent) -> None:
        self._answers.append(event)
        if self._telling:
            return
        self._telling = True
        carry_out = self._carry_out
        while self._answers:
            for action in self.core.handle(self._answers.popleft()):
                carry_out[type(action)](action)
        self._telling = False

    # ---- what control orders -----------------------------------------------------------------------

    def _draw(self, action: do.DrawPrompts) -> None:
        first = self._next_prompt
        self._next_prompt = self._next_prompt + action.count
        ids = tuple(f"p{number}" for number in range(first, self._next_prompt))
        tokens = (self.model.engines.prompt_tokens,) * action.count
        self._answers.append(on.PromptsDrawn(prompt_ids=ids, prompt_tokens=tokens))

    def _launch(self, action: do.LaunchGroup) -> None:
        ids = action.ids
        prompt = int(ids[0].prompt_id[1:])
        count = ids[-1].sample + 1
        version = action.policy_version
        lengths, turns = drawn_turns(self._lengths, prompt, action.seed_base, count, version)
        self.ledger.launched(prompt, ids[0].attempt, lengths, self.core.state.live_version)
        kind = action.round_kind
        if self._release is not None:
            self._release.launched(kind, ids)
        if self._switch is not None:
            because = self._switch.launched(kind, ids, action.policy_version)
            if because is not None:
                self.ledger.explained(because.subject)
        self.rollout.launch(action, prompt, lengths, turns)

    def _drop(self, action: do.Drop) -> None:
        if action.abort:
            self.rollout.cancel(action)
            return
        for identity in action.ids:
            request = self.rollout.requests.pop(identity, None)
            if request is not None:
                request.stopped = True

    def _train(self, action: do.TrainGroupNow) -> None:
        requests = [self.rollout.requests.pop(identity) for identity in action.ids]
        self._round_kind = action.round_kind
        tokens = self.ledger.joined(requests, self.core.state.trainer_version, action.round_kind)
        slowdown = self.model.trainer.rollout_slowdown
        self._trainer.take(self.queue.now, len(requests), tokens)
        if slowdown > 1 and self._trainer.idle_at > self.queue.now:
            self._slow_down(slowdown)
            self._trainer_stamp += 1
            self.queue.add(self._trainer.idle_at, partial(self._idle, self._trainer_stamp))

    def _idle(self, stamp: int) -> None:
        if stamp == self._trainer_stamp:
            self._slow_down(1.0)

    def _step(self, action: do.StepOptimizer) -> None:
        now = self.queue.now
        self.ledger.batch_full(now, action)
        ends = self._trainer.close(now, engines_idle=action.engines_idle)
        if self._switch is not None:
            self._switch.round_closed()
        self._trainer_stamp += 1
        self._slow_down(1.0 if action.engines_idle else self.model.trainer.rollout_slowdown)

        def trained() -> None:
            self._slow_down(1.0)
            self.ledger.trained_s = self.queue.now
            self._send_event(on.BatchTrained(batch_id=action.batch_id, policy_version=action.policy_version))

        self.queue.call_after(ends - now, trained)

    def _publish(self, action: do.PublishWeights) -> None:
        push = self.model.push
        now = self.queue.now
        barrier = push.abort_barrier_s if self.rollout.aborted else 0.0
        self.rollout.aborted = False
        seconds = push.seconds + push.kind_s.get(self._round_kind, 0.0) + barrier
        seconds += self.hosts.push_s(seconds)
        self.ledger.publishing_s = now
        self.queue.add(now + seconds - min(push.pause_s + barrier, seconds), self.rollout.pause_engines)
        self.queue.call_after(seconds, lambda: self._live(action.policy_version))

    def _live(self, version: int) -> None:
        now = self.queue.now
        if self._release is not None:
            self._release.begin_round()
        self.rollout.resume_engines(recompute=self._recompute)
        self._trainer.advance(now)
        row = self.ledger.live(now)
        if version == self._warm_up:
            self.ledger.begin(now)
        if self._progress is not None:
            self._progress(version)
        self._send_event(
            on.RoundTimed(policy_version=version, rollout_s=row.rollout_s, training_s=row.training_s, push_s=row.push_s)
        )
        if version == ADVISED_AT and self._advice is not None:
            self._send_event(self._advice)
        self._send_event(on.WeightsLive(policy_version=version))
        check(self.core)

    def _soon(self, done: on.ControlEvent) -> None:
        self.queue.call_after(0.0, lambda: self._send_event(done))

    def _end(self, action: do.End) -> None:
        if action.error:
            version = self.core.state.trainer_version
            raise StreamRLError(f"control stopped the simulated run at version {version}: {action.reason}")
        self.finished = action.reason

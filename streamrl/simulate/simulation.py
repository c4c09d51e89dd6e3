"""The real control core in virtual time: cost models carry out its actions and answer them with events.

``streamrl simulate``, ``what_if`` and benchmarks call ``simulate`` in their process, the adviser in its own. A loop
takes events from one heap: an engine finishes its next request, a request arrives, a reward is known, or the trainer, a
push or an evaluation ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

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
from streamrl.simulate.engine_changes import EnginePlan, SimulatedFreeing, SimulatedSets, engine_plan
from streamrl.simulate.engines import Request
from streamrl.simulate.fleet import FleetModel
from streamrl.simulate.host_changes import SimulatedHosts
from streamrl.simulate.lengths import LengthSource, RecipeLengths, drawn_turns
from streamrl.simulate.report import SimulationReport, StepLedger
from streamrl.simulate.rollout import SimulatedRollout
from streamrl.simulate.stages import EventQueue, RewardServers, TrainerClock

MEASURE_INTERVAL_S = 0.25
CYCLES_STEPS = 45
"""Steps of a candidate: complete cycles of races at 1.125, 1.25 and 1.5 (9, 5 and 3 rounds). A part of a cycle would
show a race too fast or too slow."""

WARM_UP_STEPS = 5
STALLED = "nothing to wait for; that is a bug of the round policy"
ADVISED_AT = 4
"""Version at which simulated ``auto`` rounds get advice."""


def simulate(
    settings: ControlSettings,
    model: FleetModel,
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
    """Simulate ``warm_up + steps`` optimizer steps. The report has figures of the last ``steps``.

    ``lengths``: source of lengths (None: draws from the lengths of ``model``);
    ``progress``: function to call with each version that goes live;
    ``engines``: freeing of engines, and sets of engines;
    ``trace``: trace for all requests and steps.

    Raises ``StreamRLError`` when control stops the run with an error, or when no event is left."""
    settings = replace(settings, steps=warm_up + steps)
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
    recipe: Recipe, model: FleetModel, steps: int, lengths: LengthSource, *, seed: int = 0, **options: Any
) -> SimulationReport:
    """Simulate ``recipe``, with completions no longer than it allows. ``options``: further arguments of
    ``simulate``."""
    lengths = RecipeLengths(recipe, model.environment, lengths, seed)
    plan = engine_plan(recipe, model)
    settings = control_settings(recipe)
    in_flight = recipe.rollout.in_flight
    return simulate(settings, model, steps, lengths=lengths, in_flight=in_flight, seed=seed, engines=plan, **options)


def simulate_candidates(
    settings: ControlSettings, model: FleetModel, lengths: LengthSource, *, seed: int = 0, engines: EnginePlan
) -> dict[str, SimulationReport]:
    """Simulate every candidate of ``auto`` rounds, for complete cycles of races. Returns the reports by name."""
    return {
        name: simulate(
            candidate, model, CYCLES_STEPS, lengths=lengths, seed=seed, warm_up=WARM_UP_STEPS, engines=engines
        )
        for name, candidate in candidate_settings(settings).items()
    }


def check(control: Control) -> None:
    """Raise ``StreamRLError`` where an invariant does not hold."""
    messages = violations(control.state, control.rules)
    if messages:
        raise StreamRLError(f"a bug of streamrl or of the round policy, in the simulated run: {'; '.join(messages)}")


def _refuse_sets_on_hosts(engines: EnginePlan, model: FleetModel) -> None:
    if len(engines.sets) > 1 and (model.hosts.changes or model.hosts.loss_every_s):
        raise StreamRLError(
            "sets of engines on hosts that join or are lost are not simulated: leave out engines.sets of the "
            "recipe, or hosts.changes and hosts.loss_every_s of the fleet"
        )


def _with_hosts(report: SimulationReport, hosts: SimulatedHosts) -> SimulationReport:
    return replace(
        report,
        hosts=len(hosts.present),
        transfer_s=hosts.transfer_s / max(hosts.pushes, 1),
        hosts_lost=hosts.losses,
        hosts_joined=hosts.joins,
        requests_moved=hosts.moved,
    )


class Simulation:
    """One simulated run: control (``core``), and the models of everything that it orders.

    ``queue``: events;
    ``rollout``: engines;
    ``hosts``: hosts of the engines;
    ``ledger``: figures of the steps;
    ``finished``: reason of the end, empty before it."""

    def __init__(
        self,
        settings: ControlSettings,
        model: FleetModel,
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
        largest_set = max((engine_set.count for engine_set in engines.sets), default=0)
        self.rollout = SimulatedRollout(
            model, self.queue, max_tokens=lengths.cap, most_engines=largest_set, verifies_deferred=verifies
        )
        _refuse_sets_on_hosts(engines, model)
        self.hosts = SimulatedHosts(model.hosts, self.rollout, self.queue, seed)
        self.rollout.on_sampled = self._begin_reward
        # As in a real run, the capacity does not depend on the number of slots of the rounds.
        all_requests = model.engines.count * model.engine.max_num_seqs
        capacity = model.engines.capacity or min(all_requests, settings.batch_trajectories)
        self.ledger = StepLedger(settings, self.rollout.engines, self.rollout.together, capacity, lengths.cap)
        self.finished = ""
        self._lengths = lengths
        self._advice = advice
        self._recompute = in_flight is not InFlight.KEEP
        self._rewards = [RewardServers(part.reward, seed) for part in model.domains or [model]]
        if settings.in_turns:  # groups wait for the close, and nothing is sampled beside a step
            model = replace(model, trainer=replace(model.trainer, streaming_speed=0.0, rollout_slowdown=1.0))
            self.model = model
        self._trainer = TrainerClock(model.trainer)
        self._trainer_stamp = 0
        self._training_slowdown = 1.0
        self._round_kind = ""
        self._release: SimulatedFreeing | None = None
        if engines.release is not ReleaseKind.NEVER:
            self._release = SimulatedFreeing(self.rollout, self._trainer, lengths.cap)
        self._switch: SimulatedSets | None = None
        if len(engines.sets) > 1:
            self._switch = SimulatedSets(self.rollout, model, engines.sets, settings.steps)
        self._events: deque[on.ControlEvent] = deque()  # for control
        self._sending = False
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
            do.Decision: lambda action: self.ledger.note_decision(action.subject),
            do.TrainGroupNow: self._train,
            do.StepOptimizer: self._step,
            do.PublishWeights: self._publish,
            do.Evaluate: lambda action: self._answer(on.EvaluationDone(policy_version=action.policy_version)),
            do.CancelEvaluation: lambda action: None,  # the queue has the EvaluationDone already
            do.WriteCheckpoint: lambda action: self._answer(on.CheckpointDone(policy_version=action.policy_version)),
            do.End: self._end,
        }

    def run(self, warm_up: int = 0, progress: Callable[[int], None] | None = None) -> SimulationReport:
        """Run to the end. Call it once. ``progress``: function to call with each version that goes live."""
        self._warm_up = warm_up
        self._progress = progress
        queue = self.queue
        rollout = self.rollout
        measures = self.core.settings.reads_load or self.core.settings.reads_environment
        self._send_event(on.RunBegan())
        rollout.settle()
        while not self.finished:
            if not queue:
                progress_text = f"version {self.core.state.live_version} of {self.core.settings.steps}"
                raise StreamRLError(f"the simulation is stalled at {queue.now:.3f} s, {progress_text}: {STALLED}")
            time, event, stamp = queue.next()
            if isinstance(event, int):
                for request in rollout.finish(event, stamp, time):
                    self._begin_reward(request)
            else:
                queue.now = time
                event()
            if measures and queue.now - self._measured_s >= MEASURE_INTERVAL_S:
                self._measured_s = queue.now
                self._send_event(rollout.measure(with_contexts=self.core.settings.reads_load))
            rollout.settle()
        check(self.core)
        return _with_hosts(self.ledger.report(self.finished, self.core.state.accounting()), self.hosts)

    # ---- events of the simulation ------------------------------------------------------------------

    def _begin_reward(self, request: Request) -> None:
        """Begin the reward of a request that has been sampled."""
        if request.stopped:  # another event at the same time has cancelled the request
            return
        now = self.queue.now
        request.sampling_s = now - request.launched_s - request.environment_s
        request.newest_version = self.core.state.live_version
        servers = self._rewards[self.model.domain_of(request.prompt)]
        ends, reward = servers.score(now, request.prompt, truncated=request.length >= self._lengths.cap)
        if ends <= now:
            self._score(request, reward)
            return

        def end_reward() -> None:
            servers.running -= 1
            self._slow_down()
            self._score(request, reward)

        self.queue.add(ends, end_reward)
        servers.running += 1
        self._slow_down()

    def _slow_down(self, training: float | None = None) -> None:
        """Slow decode steps down by the work beside them. ``training``: new factor for training (None: the last
        one)."""
        if training is not None:
            self._training_slowdown = training
        rewards = max(servers.model.rollout_slowdown if servers.running else 1.0 for servers in self._rewards)
        self.rollout.slow_down(self._training_slowdown * rewards)

    def _score(self, request: Request, reward: float) -> None:
        if request.stopped:
            return
        self._note_end(request)
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

    def _note_end(self, request: Request) -> None:
        """Tell the changes of engines that a trajectory was scored."""
        if self._switch is not None:
            self._switch.note_end(request.id, request.length)
        if self._release is not None:
            decision = self._release.note_end(request.id, request.length, self.queue.now)
            if decision is not None:
                self.ledger.note_decision(decision.subject)

    def _send_event(self, event: on.ControlEvent) -> None:
        """Let control handle ``event``, and carry out its actions, whose own events follow in the same loop."""
        self._events.append(event)
        if self._sending:
            return
        self._sending = True
        carry_out = self._carry_out
        while self._events:
            for action in self.core.handle(self._events.popleft()):
                carry_out[type(action)](action)
        self._sending = False

    # ---- actions of control ------------------------------------------------------------------------

    def _draw(self, action: do.DrawPrompts) -> None:
        first = self._next_prompt
        self._next_prompt = self._next_prompt + action.count
        ids = tuple(f"p{number}" for number in range(first, self._next_prompt))
        tokens = (self.model.engines.prompt_tokens,) * action.count
        self._events.append(on.PromptsDrawn(prompt_ids=ids, prompt_tokens=tokens, sets=action.sets))

    def _launch(self, action: do.LaunchGroup) -> None:
        ids = action.ids
        prompt = int(ids[0].prompt_id[1:])
        count = ids[-1].sample + 1
        version = action.policy_version
        lengths, samples_turns = drawn_turns(self._lengths, prompt, action.seed_base, count, version)
        self.ledger.note_launch(prompt, ids[0].attempt, lengths, self.core.state.live_version)
        kind = action.round_kind
        if self._release is not None:
            self._release.note_launch(kind, ids)
        if self._switch is not None:
            decision = self._switch.note_launch(kind, ids, action.policy_version)
            if decision is not None:
                self.ledger.note_decision(decision.subject)
        self.rollout.launch(action, prompt, lengths, samples_turns)

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
        tokens = self.ledger.note_join(requests, self.core.state.trainer_version, action.round_kind)
        slowdown = self.model.trainer.rollout_slowdown
        self._trainer.take(self.queue.now, len(requests), tokens)
        if slowdown > 1 and self._trainer.idle_at > self.queue.now:
            self._slow_down(slowdown)
            self._trainer_stamp += 1
            self.queue.add(self._trainer.idle_at, partial(self._end_slowdown, self._trainer_stamp))

    def _end_slowdown(self, stamp: int) -> None:
        """End the slowdown by training, unless more work has come since the event with ``stamp`` was added."""
        if stamp == self._trainer_stamp:
            self._slow_down(1.0)

    def _step(self, action: do.StepOptimizer) -> None:
        now = self.queue.now
        self.ledger.close_batch(now, action)
        ends = self._trainer.close(now, engines_idle=action.engines_idle)
        if self.core.settings.in_turns:
            ends += self.model.push.to_ranks_s
            self.rollout.pause_engines()
        if self._switch is not None:
            self._switch.close_round()
        self._trainer_stamp += 1
        self._slow_down(1.0 if action.engines_idle else self.model.trainer.rollout_slowdown)

        def end_step() -> None:
            self._slow_down(1.0)
            self.ledger.trained_s = self.queue.now
            self._send_event(on.BatchTrained(batch_id=action.batch_id, policy_version=action.policy_version))

        self.queue.call_after(ends - now, end_step)

    def _publish(self, action: do.PublishWeights) -> None:
        push = self.model.push
        now = self.queue.now
        barrier = push.abort_barrier_s if self.rollout.aborted else 0.0
        self.rollout.aborted = False
        seconds = push.seconds + push.kind_s.get(self._round_kind, 0.0) + barrier
        if self.core.settings.in_turns:
            seconds += push.to_engines_s
        seconds += self.hosts.push_s(seconds)
        self.ledger.publishing_s = now
        self.queue.add(now + seconds - min(push.pause_s + barrier, seconds), self.rollout.pause_engines)
        self.queue.call_after(seconds, lambda: self._finish_push(action.policy_version))

    def _finish_push(self, version: int) -> None:
        now = self.queue.now
        if self._release is not None:
            self._release.begin_round()
        self.rollout.resume_engines(recompute=self._recompute)
        self._trainer.advance(now)
        row = self.ledger.end_step(now)
        if version == self._warm_up:
            self.ledger.end_warm_up(now)
        if self._progress is not None:
            self._progress(version)
        self._send_event(
            on.RoundTimed(policy_version=version, rollout_s=row.rollout_s, training_s=row.training_s, push_s=row.push_s)
        )
        if version == ADVISED_AT and self._advice is not None:
            self._send_event(self._advice)
        self._send_event(on.WeightsLive(policy_version=version))
        check(self.core)

    def _answer(self, event: on.ControlEvent) -> None:
        """Answer an order at once, as the next event of the queue."""
        self.queue.call_after(0.0, lambda: self._send_event(event))

    def _end(self, action: do.End) -> None:
        if action.error:
            version = self.core.state.trainer_version
            raise StreamRLError(f"control stopped the simulated run at version {version}: {action.reason}")
        self.finished = action.reason

"""A simulated run that records what a real one records."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from oracle.trace_header import trace_header

from streamrl.base.types import TurnTimes
from streamrl.control import actions as do
from streamrl.observe.report.trajectory_trace import EnginesLine, RecordedRun, StepLine, TrajectoryLine
from streamrl.simulate.engines import Request
from streamrl.simulate.fleet import FleetModel
from streamrl.simulate.lengths import ModelledLengths, RecipeLengths
from streamrl.simulate.simulation import Simulation
from tests.simulate.worlds import control_settings


class Recorder(Simulation):
    """``samples``: whether the engines report their steps; ``recipe``: of a run with an environment; the other
    ``settings`` are control's."""

    def __init__(self, model: FleetModel, steps: int, *, samples: bool = True, seed: int = 4, **settings: Any) -> None:
        lengths, recipe = ModelledLengths(model.lengths, seed), settings.pop("recipe", None)
        super().__init__(
            control_settings(**{"batch_groups": 16, "group_size": 8, "steps": steps, **settings}),
            model,
            RecipeLengths(recipe, model.environment, lengths) if recipe else lengths,
            seed=seed,
        )
        self.samples = samples
        self._turns: defaultdict[Request, list[TurnTimes]] = defaultdict(list)
        to_environment = self.rollout._to_environment
        self.rollout._to_environment = lambda request: (self._turned(request), to_environment(request))
        self.trajectories: dict[object, TrajectoryLine] = {}
        self.engine_lines: list[EnginesLine] = []
        self._told_s = 0.0
        self._generated_then = 0.0
        cancel = self._carry_out[do.Drop]

        def cancelled(action: do.Drop) -> None:
            requests = [self.rollout.requests.get(identity) for identity in action.ids]
            cancel(action)
            for request in filter(None, requests) if action.abort else ():
                known = self.trajectories.get(request.id)
                line = known if known is not None else self._line(request, "")
                self.trajectories[request.id] = msgspec.structs.replace(line, outcome="lost_race")

        self._carry_out[do.Drop] = cancelled

    def _begin_reward(self, request: Request) -> None:
        now = self.queue.now
        self._turned(request)
        if not request.stopped:
            finish = "length" if request.length >= self.model.lengths.cap else "stop"
            self.trajectories[request.id] = self._line(request, finish)
        super()._begin_reward(request)
        if self.samples and now - self._told_s >= 0.05:
            self._told_s = now
            seen = self.rollout.measure(with_contexts=False)
            generated = sum(engine.generated for engine in self.rollout.engines)
            self.engine_lines.append(
                EnginesLine(
                    time_s=now, running=int(seen.running), waiting=0, kv_usage=0.0, token_s=seen.token_s,
                    mean_running=seen.running, generated_tokens=round(generated - self._generated_then),
                )
            )  # fmt: skip
            self._generated_then = generated

    def _turned(self, request: Request) -> None:
        if not request.appended:  # launched, or without an environment
            return
        before = [sum(part) for part in zip((0, 0.0, 0, 0.0), *self._turns[request], strict=True)]
        environment_s = request.environment_s - before[1]
        sampling_s = self.queue.now - request.launched_s - environment_s - before[1] - before[3]
        turn = (request.appended - before[0], environment_s, request.length - before[2], sampling_s)
        self._turns[request].append(turn)

    def _line(self, request: Request, finish_reason: str) -> TrajectoryLine:
        now = self.queue.now
        identity = request.id
        return TrajectoryLine(
            prompt_id=identity.prompt_id, group=identity.group_id, sample=identity.sample, attempt=identity.attempt,
            prompt_tokens=request.prompt_tokens, tokens=request.length if finish_reason else int(request.sampled),
            finish_reason=finish_reason, outcome="trained", round_kind="synchronous", launched_s=request.launched_s,
            ended_s=now, rollout_s=now - request.launched_s, reward_s=0.004, reward=1.0,
            oldest_version=request.first_version, newest_version=request.first_version,
            turns=tuple(self._turns[request]),
        )  # fmt: skip

    def recorded(self) -> RecordedRun:
        """Run to the end; once."""
        rows = self.run().recent
        trainer = self.model.trainer
        in_turns = self.core.settings.in_turns
        steps: list[StepLine] = []
        now = 0.0
        for row in rows:
            now += row.step_s
            worked = trainer.token_s * row.trained_tokens + trainer.sequence_s * row.samples
            steps.append(
                StepLine(
                    time_s=now, policy_version=row.policy_version, round_kind=row.round_kind, group_size=8.0,
                    samples=row.samples, trained_tokens=row.trained_tokens, generated_tokens=int(row.generated_tokens),
                    step_s=row.step_s, rollout_s=row.rollout_s, training_s=row.training_s, push_s=row.push_s,
                    paused_s=0.01, forward_backward_s=worked,
                    to_ranks_s=in_turns * self.model.push.to_ranks_s,
                    to_engines_s=in_turns * self.model.push.to_engines_s,
                )
            )  # fmt: skip
        trained_s = {line.policy_version - 1: line.time_s - line.push_s for line in steps}
        lines = [
            msgspec.structs.replace(line, ended_s=trained_s.get(line.newest_version, now))
            for line in self.trajectories.values()
        ]
        header = trace_header(
            max_tokens=self.model.lengths.cap, max_model_len=500, prompts_per_batch=16, group_size=8, capacity=128
        )
        return RecordedRun(
            header=header, trajectories=tuple(lines), steps=tuple(steps), engines=tuple(self.engine_lines)
        )

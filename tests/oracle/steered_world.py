"""A world whose run is steered by people while its controller is killed now and then (``SteeredWorld``)."""

from __future__ import annotations

from random import Random
from typing import Any

from oracle.control_walks import CrashWorld

from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.recipe.scheduling import DeferredPrompts

RACING = {"tail_batching.prompt_oversampling": 1.5, "tail_batching.response_oversampling": 1.25}
ROUNDS: dict[str, dict[str, Any]] = {
    "synchronous": {"rollout.max_staleness": 0},
    "tail_batching": {"rollout.max_staleness": 9, "tail_batching.long_round_batches": 2, **RACING},
    "length_sorted": {"length_sorted.cohort_batches": 3, "length_sorted.partial": False, "rollout.max_staleness": 0},
    "continuous": {"rollout.max_staleness": 2},
}
PLAIN: list[dict[str, Any]] = [
    {"training.learning_rate": 1e-5, "sampling.temperature": 0.7},
    {"sampling.temperature": 0.9, "sampling.max_tokens": 9},
    {"evaluation.every": 1, "checkpoint.every": 2},
    {"evaluation.at_end": True, "checkpoint.at_end": True, "reward_limits.window": 4},
    {"rollout.presubmit": True},
    {"rollout.presubmit": False},
]
SIZES = {"group_sizing.kind": "random", "group_sizing.sizes": [2, 4, 8], "group_sizing.shares": [1.0, 1.0, 1.0]}


class SteeredWorld(CrashWorld):
    """People steer it. It knows by which settings each group was launched, and each step was made."""

    steered = True
    changes = rounds = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.engines_away: dict[str, on.UserOrder] = {}
        super().__init__(*arguments, **options)

    def anything_else(self, random: Random) -> None:
        super().anything_else(random)
        if not self.over_now and random.random() < 0.1:
            self.tell(random.choice([self.order, self.change, self.change])(random))

    def order(self, random: Random) -> on.Steered:
        engine = random.choice(["", "", "engine-0", "engine-1"])
        if not engine:
            return on.Steered(order=random.choice(["pause", "continue", "evaluate", "checkpoint"]))
        return on.Steered(order=random.choice(["pause_engine", "withdraw_engine", "return_engine"]), engine=engine)

    def change(self, random: Random) -> on.SettingsChanged:
        values = random.choice([*PLAIN, *2 * PLAIN[:2]])
        if random.random() < 0.1:
            values = {"run.steps": self.trainer_version + random.randint(0, 3)}
        elif random.random() < 0.5 and not self.recipe.length_sorted.single:
            rounds = random.choice(list(ROUNDS)[: 3 if self.recipe.deterministic else 4])
            if rounds != "tail_batching" or not self.recipe.deterministic or self.replays:
                values = {"rollout.rounds": rounds, **ROUNDS[rounds]}
            if self.recipe.group_size == 8 and random.random() < 0.5:
                values |= {**SIZES, "group_sizing.keeps": random.choice(["trajectories", "prompts"])}
        step = random.choice([0, 0, self.trainer_version + random.randint(1, 3)])
        return on.SettingsChanged(values=values, step=step, recipe_steps=self.recipe.steps)

    @property
    def replays(self) -> bool:
        return self.recipe.tail_batching.deferred_prompts is not DeferredPrompts.RESUME

    def after(self, event: on.ControlEvent, actions: list[do.ControlAction]) -> None:
        before = self.settings.sampling
        super().after(event, actions)
        if isinstance(event, on.Steered) and event.engine:
            self.engines_away.pop(event.engine, None)
            if event.order != "return_engine":
                self.engines_away[event.engine] = event.order
        assert self.state.steering.engines_away == self.engines_away, "also after a kill"
        for action in actions:
            if isinstance(action, do.LaunchGroup):
                assert action.sampling == self.core.settings.sampling, (before, "launched by other sampling parameters")
                assert not self.state.steering.paused, "launched in a pause"
            if isinstance(action, do.TrainGroupNow):
                sampled = self.of_group[action.group_id].sampling
                assert action.temperature == sampled.get("temperature"), "trained at another temperature"
            if isinstance(action, do.Evaluate):
                assert self.paused_for is None, "paused engines evaluate nothing, and their push waits for that"
            if isinstance(action, do.StepOptimizer):
                said = action.learning_rate, action.steps
                assert said == (self.core.settings.learning_rate, self.state.steps)
            if isinstance(action, do.Decision) and action.subject == "settings":
                assert not self.batches.get(self.state.batch.batch_id), "changed in the middle of a batch"
                SteeredWorld.changes += 1
                SteeredWorld.rounds += "rollout.rounds" in action.reason

    def run_to_end(self, limit: int = 20_000) -> None:
        if self.state.steering.paused and not self.over_now:
            self.tell(on.Steered(order="continue"))
        super().run_to_end(limit)

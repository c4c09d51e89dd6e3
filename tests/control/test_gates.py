"""Pools by difficulty: which prompts are skipped when they are drawn again, counted against a ledger of its own."""

from __future__ import annotations

import math
from collections import Counter, deque
from random import Random
from statistics import fmean

import pytest
from oracle.control_walks import COMPOSITIONS
from oracle.control_world import control_settings, through_bytes

from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.check import violations
from streamrl.control.machine import fork
from streamrl.control.policies.round_policies import make_control
from streamrl.control.run_state import DrawnSet
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Pool, Prompts

POOLS = {"solved": Pool(minimum=1.0), "easy": Pool(minimum=0.6, keep=0.3), "hard": Pool(below=0.3, keep=0.55)}
SHARES = {"a": 0.6, "b": 0.3, "c": 0.1}
ROUNDS = ("synchronous", "continuous", "race", "wide race", "sorted")


class Epochs:
    """A run over rows that come again in each epoch, with the outcomes that a seed says, and a ledger of what must be
    launched. ``kill``: the controller is restored from its bytes, and what has no answer is ordered again."""

    def __init__(self, composition: str, seed: int, shares: dict[str, float], steps: int = 10**6) -> None:
        self.random = Random(seed)
        self.settings = control_settings(
            **{
                "batch_groups": 4,
                "steps": steps,
                "shares": shares,
                "pools": POOLS,
                "max_failed_share": 1.0,
                "failure_window": 10**6,
                "dynamic_sampling": seed % 2 == 1,
                **COMPOSITIONS[composition],
            }
        )
        self.core = make_control(self.settings)
        self.rows = {name: 40 + 11 * number for number, name in enumerate(shares or [""])}
        self.positions = Counter[str]()
        self.rewards: dict[str, float] = {}
        self.groups: dict[int, dict[int, float | None]] = {}
        self.prompt_of: dict[int, str] = {}
        self.drawn_by_pool = Counter[str]()
        self.launched_by_pool = Counter[str]()
        self.skipped = 0
        self.admitted = Counter[str]()
        self.fresh = Counter[str]()
        self.events = 0
        self.kills = 0
        self.orders: deque[do.ControlAction] = deque()
        self.running: list[TrajectoryId] = []
        self.end: do.End | None = None
        self.decisions: list[do.Decision] = []
        self.tell(on.RunBegan(steps=steps))

    def tell(self, event: on.ControlEvent) -> None:
        self.events += 1
        for action in self.core.handle(event):
            self.obey(action)
        assert not (found := violations(self.core.state, self.core.rules)), found
        counts = self.core.state.prompts.pools
        assert {name: count.drawn for name, count in counts.items()} == self.drawn_by_pool
        assert {name: count.launched for name, count in counts.items() if count.launched} == +self.launched_by_pool
        assert sum(drawn.skipped for drawn in self.core.state.prompts.sets.values()) == self.skipped

    def obey(self, action: do.ControlAction) -> None:
        match action:
            case do.LaunchGroup():
                prompt = action.ids[0].prompt_id
                if self.prompt_of.get(action.group_id) is None and action.ids[0].attempt == 0:
                    self.fresh[prompt] += 1
                    assert self.fresh[prompt] <= self.admitted[prompt], "a prompt that was skipped is launched"
                self.prompt_of[action.group_id] = prompt
                self.groups.setdefault(action.group_id, dict.fromkeys(i.sample for i in action.ids))
                self.running += action.ids
            case do.Drop():
                for trajectory in action.ids:
                    self.groups.get(trajectory.group_id, {}).pop(trajectory.sample, None)
                    if trajectory in self.running:
                        self.running.remove(trajectory)
            case do.Decision():
                self.decisions.append(action)
            case do.End():
                self.end = action
            case do.DrawPrompts() | do.StepOptimizer() | do.PublishWeights():
                self.orders.append(action)

    def note_end(self, trajectory: TrajectoryId, reward: float | None) -> None:
        """A member of a group has ended, before control knows: the mean of the rewards counts once no member is open,
        or once a race has as many as it keeps."""
        group = self.core.state.buffer.untrained.get(trajectory.group_id)
        members = self.groups.get(trajectory.group_id, {})
        if group is None or trajectory.sample not in group.members:
            return
        members[trajectory.sample] = reward
        if reward is None:
            del members[trajectory.sample]
        rewards = [value for value in members.values() if value is not None]
        if rewards and (len(rewards) == len(members) or len(rewards) >= group.keep):
            self.rewards[self.prompt_of[trajectory.group_id]] = fmean(rewards)
            del self.groups[trajectory.group_id]

    def kill(self) -> None:
        self.kills += 1
        self.core = make_control(self.settings, through_bytes(self.core.snapshot()))
        self.orders.clear()
        self.running.clear()
        for action in self.core.unanswered_orders():
            self.obey(action)

    def answer(self, order: do.ControlAction) -> None:
        match order:
            case do.StepOptimizer():
                self.tell(on.BatchTrained(batch_id=order.batch_id, policy_version=order.policy_version))
            case do.PublishWeights():
                self.tell(on.WeightsLive(policy_version=order.policy_version))
            case do.DrawPrompts():
                names = order.sets or ("",) * order.count
                ids = []
                for name in names:
                    row = self.positions[name] % self.rows[name]
                    ids.append(f"{name}/{row}" if name else f"p{row}")
                    self.positions[name] += 1
                    self.expect(ids[-1])
                self.tell(on.PromptsDrawn(prompt_ids=tuple(ids), sets=order.sets))

    def expect(self, prompt: str) -> None:
        """What must become of a prompt that is drawn now, by the definition of the pools."""
        mean = self.rewards.get(prompt)
        pool = None
        if mean is not None:
            pool = "solved" if mean >= 1 else "easy" if mean >= 0.6 else "hard" if mean < 0.3 else None
        if pool is None:
            self.admitted[prompt] += 1
            return
        self.drawn_by_pool[pool] += 1
        share = {"solved": 0.0, "easy": 0.3, "hard": 0.55}[pool]
        if self.launched_by_pool[pool] < math.floor(share * self.drawn_by_pool[pool]):
            self.launched_by_pool[pool] += 1
            self.admitted[prompt] += 1
        else:
            self.skipped += 1

    def step(self) -> None:
        if self.random.random() < 0.002:
            self.kill()
        if self.orders and (not self.running or self.random.random() < 0.2):
            self.answer(self.orders.popleft())
            return
        trajectory = self.running.pop(self.random.randrange(len(self.running)))
        if self.random.random() < 0.02:
            self.note_end(trajectory, None)
            self.tell(on.TrajectoryFailed(id=trajectory, reason=DropReason.ENGINE_FAILED))
            return
        difficulty = Random(trajectory.prompt_id).random()
        reward = float(self.random.random() > difficulty * math.exp(-self.events / 40_000))
        self.score(trajectory, reward)

    def score(self, trajectory: TrajectoryId, reward: float) -> None:
        version = self.core.state.live_version
        self.note_end(trajectory, reward)
        self.tell(
            on.TrajectoryScored(
                id=trajectory,
                reward=reward,
                tokens=self.random.randint(1, 9),
                finish_reason=FinishReason.STOP,
                oldest_version=version,
                newest_version=version,
            )
        )


def walk(composition: str, seed: int, events: int, shares: dict[str, float] | None = None) -> Epochs:
    world = Epochs(composition, seed, shares or {})
    while world.events < events and world.end is None:
        world.step()
    return world


@pytest.mark.parametrize("composition", ROUNDS)
@pytest.mark.parametrize("shares", [{}, SHARES], ids=["one", "three"])
def test_skipped_prompts_are_those_of_the_ledger(composition: str, shares: dict[str, float]) -> None:
    """After every event of runs with kills, control has skipped the prompts that the pools say, and no others."""
    skipped = kills = 0
    for seed in range(2):
        world = walk(composition, seed, 2500, shares)
        skipped += world.skipped
        kills += world.kills
    assert skipped > 100
    assert kills > 1


def test_a_run_whose_prompts_are_all_solved_ends() -> None:
    """Nothing is drawn for ever: each prompt is launched once, and the run ends."""
    world = Epochs("synchronous", 0, {})
    while world.end is None:
        assert world.events < 5000
        if world.orders:
            world.answer(world.orders.popleft())
        else:
            world.score(world.running.pop(), 1.0)
    assert world.end.reason == do.PROMPTS_EXHAUSTED
    assert max(world.fresh.values()) == 1
    assert world.core.state.prompts.sets[""].skipped == world.skipped > 2 * world.rows[""]


def test_a_set_that_is_solved_leaves_its_share() -> None:
    """Of two sets one is solved: the other one is drawn alone, and a decision says so."""
    world = Epochs("synchronous", 0, {"a": 0.5, "b": 0.5})
    while not world.core.state.prompts.sets.get("a", DrawnSet()).exhausted:
        assert world.events < 5000
        if world.orders:
            world.answer(world.orders.popleft())
        else:
            trajectory = world.running.pop()
            world.score(trajectory, 1.0 if trajectory.prompt_id.startswith("a/") else 0.5)
    assert [decision.reason for decision in world.decisions] == [
        "all 40 prompts of prompts.train a are in pools that keep none"
    ]
    launched = world.fresh.total()
    while world.fresh.total() < launched + 20:
        if world.orders:
            world.answer(world.orders.popleft())
        else:
            world.score(world.running.pop(), 0.5)
    assert sum(count for prompt, count in world.fresh.items() if prompt.startswith("a/")) == 40


def test_another_run_from_a_checkpoint_knows_the_rewards() -> None:
    world = walk("synchronous", 0, 40)
    pool = world.core.state.prompts
    assert pool.rewards
    forked = fork(through_bytes(world.core.snapshot()), control_settings(pools=POOLS)).state.prompts
    assert forked.rewards == pool.rewards, "another run from the checkpoint knows what is solved"
    assert forked.sets[""].prompts_known == len(pool.rewards)
    assert not fork(through_bytes(world.core.snapshot()), control_settings()).state.prompts.rewards


def test_pools_of_a_recipe() -> None:
    """``skip_solved`` is a pool that keeps none, before all others."""
    prompts = Prompts(train="a.jsonl", skip_solved=0.9, pools={"easy": Pool(minimum=0.5, keep=0.5)})
    assert list(prompts.gates) == ["solved", "easy"]
    assert prompts.gates["solved"].holds(0.9)
    assert not prompts.gates["solved"].holds(0.89)
    assert Prompts(train="a.jsonl").gates == {}
    recipe = {"model": "m", "rewards": "r.py:score"}
    table = {"train": "a.jsonl", "pools": {"hard": {"below": 0.1, "keep": 0.5}}}
    assert load_recipe({**recipe, "prompts": table}).prompts.pools == {"hard": Pool(below=0.1, keep=0.5)}

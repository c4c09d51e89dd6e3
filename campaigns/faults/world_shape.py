"""What kind of run a seed makes: its recipe and how long things take in it."""

from __future__ import annotations

from random import Random

import msgspec

from campaigns.faults.fault_plan import Course, Phase
from streamrl.engines.simulated.engine import LengthMixture
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.scheduling import (
    DeferredPrompts,
    InFlight,
    LengthSorted,
    Rollout,
    RoundKind,
    StalePolicy,
    TailBatching,
)
from streamrl.recipe.sections import (
    Checkpoint,
    Engines,
    EngineShape,
    Evaluation,
    JournalKind,
    Model,
    Prompts,
    Recipe,
    ReleaseKind,
    Run,
    Sampling,
    Training,
    Weights,
)

TAIL, SORTED, CONTINUOUS = RoundKind.TAIL_BATCHING, RoundKind.LENGTH_SORTED, RoundKind.CONTINUOUS
ROUNDS: tuple[dict[str, object], ...] = (
    {"rounds": RoundKind.SYNCHRONOUS},
    {"rounds": RoundKind.SYNCHRONOUS, "presubmit": True},
    {"rounds": CONTINUOUS, "max_staleness": 1},
    {"rounds": CONTINUOUS, "max_staleness": 3},
    {"rounds": CONTINUOUS, "max_staleness": 2, "when_stale": StalePolicy.DROP},
    {"rounds": CONTINUOUS, "max_staleness": 1, "when_stale": StalePolicy.REGENERATE},
    {"rounds": TAIL},
    {"rounds": SORTED},
    {"rounds": SORTED, "max_staleness": 3},
)

JOURNALS = (JournalKind.FSYNC, JournalKind.PROCESS)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """``..._s``: means, in virtual seconds. ``patience_s``: a run in which nothing was done for so long is stuck.
    ``poll_s``: the interval at which processes are checked; ``cumulative``: engines ask for deltas on what they hold;
    ``window``: no stream between processes has a larger one, so that senders wait for who is slow or dead."""

    seed: int
    recipe: Recipe
    lengths: LengthMixture
    step_ms: float
    latency_s: float
    reward_s: float
    compute_s: float
    fetch_s: float
    commit_s: float
    engine_start_s: float
    patience_s: float
    poll_s: float
    pace: float
    cumulative: bool
    window: int

    @property
    def engines(self) -> int:
        return self.recipe.engines.count + sum(one.count for one in self.recipe.engines.sets)

    @property
    def ranks(self) -> int:
        return self.recipe.training.ranks

    @property
    def workers(self) -> int:
        return self.recipe.reward_limits.workers

    @property
    def course(self) -> Course:
        """For a plan of faults. Twice evaluated is four prompts each time, a checkpoint is one file a rank."""
        recipe, steps = self.recipe, self.recipe.run.steps
        evaluations = 1 + steps // recipe.evaluation.every if recipe.evaluation.every else 0
        saved = recipe.checkpoint
        checkpoints = (steps // saved.every if saved.every else 0) + saved.at_end
        requests = steps * recipe.rollout.prompts_per_batch * recipe.rollout.group_size
        often = {Phase.ROLLOUT: requests, Phase.REWARD: requests, Phase.TRAIN: steps * self.ranks, Phase.START: 1}
        pushed = dict.fromkeys((Phase.STAGE, Phase.COMMIT), steps * self.engines)
        rarely = {Phase.EVALUATION: 4 * evaluations, Phase.CHECKPOINT: checkpoints * self.ranks}
        return Course(steps=steps, pace=self.pace, begins=dict.fromkeys(Phase, 0) | often | pushed | rarely)


def draw_shape(seed: int, *, steps: int = 0) -> Shape:
    """The run of ``seed``. ``steps`` 0: drawn, too."""
    random = Random(f"shape {seed}")
    rollout = _rollout(random)
    drawn_steps = random.randint(4, 12)  # always drawn: what is drawn after it stays the same when ``steps`` is given
    steps = steps or drawn_steps
    every = random.choice((0, 2, 3))
    restarts = 0 if random.random() < 0.15 else 1000
    pace = random.choice((0.2, 1.0, 5.0, 20.0))  # how long everything takes, beside what the product waits by itself
    recipe = Recipe(
        model=Model(path="/simulated/model"),
        prompts=Prompts(train="/simulated/prompts.jsonl", shuffle=False),
        rewards=(Reward(function="campaigns.faults.simulated_parts:score", trusted=True, timeout_s=30.0 * pace),),
        run=Run(name="simulated", seed=seed, steps=steps, restarts=restarts, journal=random.choice(JOURNALS)),
        rollout=rollout,
        tail_batching=TailBatching(
            prompt_oversampling=random.choice((1.25, 2.0)),
            response_oversampling=random.choice((1.0, 1.5)),
            deferred_prompts=random.choice(
                (DeferredPrompts.REPLAY, DeferredPrompts.REGENERATE, DeferredPrompts.VERIFY)
            ),
        ),
        length_sorted=LengthSorted(
            cohort_batches=random.choice((2, 3)),
            partial=rollout.rounds is SORTED and rollout.max_staleness > 0,
            oversubscription=random.choice((0.0, 1.5)),
        ),
        sampling=Sampling(max_tokens=40),
        training=Training(ranks=random.choice((1, 1, 2))),
        engines=Engines(count=random.choice((1, 2, 2, 3)), restarts=restarts),
        weights=Weights(canary=False, push_timeout_s=120.0 * max(pace, 1.0), audit_interval=random.choice((0, 2))),
        evaluation=Evaluation(
            prompts="/simulated/held_out.jsonl" if every else "",
            samples=1,
            every=every,
            limit=4,
            store_samples=every == 2,
        ),
        checkpoint=Checkpoint(every=random.choice((0, 1, 3)), at_end=random.random() < 0.5, min_free_gib=0.0),
        reward_limits=RewardLimits(workers=random.choice((1, 2)), max_failed_share=0.6, window=64),
    )
    return Shape(
        seed=seed,
        recipe=_composed(recipe),
        lengths=LengthMixture(median=6, sigma=0.7, long_share=0.1, long_median=25),
        step_ms=random.choice((20.0, 100.0)) * pace,
        latency_s=random.choice((0.0005, 0.005, 0.05)),
        reward_s=random.choice((0.01, 0.3)) * pace,
        compute_s=0.3 * pace,
        fetch_s=0.2 * pace,
        commit_s=0.05 * pace,
        engine_start_s=5.0 * pace,
        patience_s=1500.0 * max(pace, 1.0),
        poll_s=0.25 * max(pace, 1.0),
        pace=pace,
        cumulative=random.random() < 0.5,
        window=random.choice((2, 5, 4096)),
    )


def _composed(recipe: Recipe) -> Recipe:
    """In many runs engines are freed late in a round, and others take turns with them."""
    random, engines = Random(f"composed {recipe.run.seed}"), recipe.engines
    release = ReleaseKind.DRAIN if recipe.on_policy and engines.count > 1 and random.random() < 0.7 else engines.release
    sets = (EngineShape(count=1),) if random.random() < 0.4 else ()
    return msgspec.structs.replace(recipe, engines=msgspec.structs.replace(engines, release=release, sets=sets))


def _rollout(random: Random) -> Rollout:
    return Rollout(
        prompts_per_batch=random.randint(1, 4),
        group_size=random.choice((1, 2, 4)),
        in_flight=random.choice(list(InFlight)),
        dynamic_sampling=random.random() < 0.3,
        **random.choice(ROUNDS),  # type: ignore[arg-type]
    )

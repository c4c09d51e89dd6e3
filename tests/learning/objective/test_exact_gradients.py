"""Losses and gradients of every objective through the real trainer, against a float64 reference written out here.

The reference takes one sampled turn at a time, behind all that it goes on from, through transformers' own model and
shares no code with ``streamrl.learning``. The batch has 19 trajectories in groups of 4, 3, 5, 2, 4 and 1 and a number
of tokens that neither 2 nor 3 divides; tokens of four versions, also inside a turn; several turns, with rewards of
their own; forks and several sequences; truncated ones; a group of equal rewards."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tiers import quick_only

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from reference_policy import reference_model, relative_error, stepped_gradient  # noqa: E402
from sample_groups import make_groups, train_batch  # noqa: E402
from torch.func import functional_call  # noqa: E402

from streamrl.base.types import (  # noqa: E402
    FinishReason,
    Prompt,
    SamplingSettings,
    ScoredTrajectory,
    Segment,
    TrainingGroup,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.learning import rank_memory  # noqa: E402
from streamrl.learning.model import policy  # noqa: E402
from streamrl.recipe.environment import Credit  # noqa: E402
from streamrl.recipe.objective import (  # noqa: E402
    KlEstimator,
    Objective,
    ObjectiveSettings,
    OffPolicy,
    Proximal,
    RatioLevel,
    objective_settings,
    why_not_streaming,
)
from streamrl.recipe.objectives.catalog import METHODS  # noqa: E402
from streamrl.recipe.objectives.method import KlPlace, LossNormalization  # noqa: E402
from streamrl.recipe.objectives.ppo import ValueModel  # noqa: E402

pytestmark = pytest.mark.torch
StartTrainer = Callable[..., Any]
SIZES = [4, 3, 5, 2, 4, 1]
FAILED = {0: 0, 2: 2}
"""Number of the sample of a group whose reward failed: its siblings are compared without it."""
CAPPED = 40
TOLERANCE = 3e-6
DEFAULT, BEHAVIOR = OffPolicy(cap=1.3), OffPolicy(proximal=Proximal.BEHAVIOR)
DEFAULT_SAMPLING = SamplingSettings()


# Whether each segment is sampled and what it goes on from; the sampled ones in the order in which they are trained.
ENVIRONMENT = (False, None)
SAMPLED = (True, None)
SHAPES: list[tuple[list[tuple[bool, int | None]], list[int]]] = [
    ([SAMPLED], [0]),
    ([SAMPLED, ENVIRONMENT, SAMPLED], [0, 2]),
    ([SAMPLED, ENVIRONMENT, SAMPLED, (False, 0), SAMPLED], [0, 2, 4]),  # a fork
    (  # two conversations in turns, without a prompt
        [ENVIRONMENT, SAMPLED, (False, -1), SAMPLED, (False, 1), SAMPLED, (False, 3), SAMPLED],
        [1, 5, 3, 7],
    ),
    (  # the prompt twice, a fork of three, a summary in place of the history; nothing is sampled behind the last one
        [SAMPLED, (True, -1), (False, 0), SAMPLED, (False, 0), SAMPLED, (True, 0), (False, -1), SAMPLED, (False, 1)],
        [1, 0, 3, 5, 6, 8],
    ),
]


class Turn(NamedTuple):
    """``tokens``: all that it goes on from, and the ``behavior.numel()`` ones that were sampled, of these versions."""

    tokens: list[int]
    behavior: Any
    ages: Any
    number: int


class Sampled(NamedTuple):
    """What the reference knows of a trajectory. ``earned``: what each turn added, as they were sampled."""

    id: TrajectoryId
    reward: float
    truncated: bool
    turns: list[Turn]
    earned: list[float]

    @property
    def trained_tokens(self) -> int:
        return sum(turn.behavior.numel() for turn in self.turns)

    @property
    def behavior(self) -> Any:
        return torch.cat([turn.behavior for turn in self.turns])


class Batch(NamedTuple):
    groups: list[TrainingGroup]
    sampled: list[list[Sampled]]


@pytest.fixture(scope="module")
def batch(tiny_model: str) -> Batch:
    """The batch of the module's docstring; behaviour logprobs are the policy's plus noise (standard deviation 0.4)."""
    model, rng, index = reference_model(tiny_model), random.Random(1), 0
    found = Batch([], [])
    for group in make_groups(0, [size + (number in FAILED) for number, size in enumerate(SIZES)], seed=4):
        samples, sampled = [], []
        for sample in group.samples:
            if FAILED.get(group.group_id) == sample.id.sample:
                continue
            start = sample.loss_mask.index(1)
            shape, order = SHAPES[(index + 4) % 5 if sample.trained_tokens > 6 else 0]
            prompt = token_array() if order[0] == 1 and len(order) == 4 else sample.token_ids[:start]
            pieces = iter(np.array_split(sample.token_ids[start:], len(order)))
            paths: dict[int, list[int]] = {-1: list(prompt)}
            segments, turns = [], {}
            for place, (trained, follows) in enumerate(shape):
                ids = next(pieces).tolist() if trained else rng.choices(range(3, 32), k=3)
                paths[place] = paths[place - 1 if follows is None else follows] + ids
                behavior, spans, age = float_array(), (), -((index + place) % 4)
                if trained:
                    own = logits_of(model, paths[place], len(ids)).log_softmax(-1)
                    own = own.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
                    behavior = float_array([one + rng.gauss(0, 0.4) for one in own])
                    cut = len(ids) // 2 if (index + place) % 3 == 0 else 0
                    spans = (VersionSpan(0, cut, -3), VersionSpan(cut, len(ids), age)) if cut else ()
                    spans = spans or (VersionSpan(0, len(ids), age),)
                    ages = [-span.policy_version for span in spans for _ in range(span.end - span.start)]
                    own = torch.tensor(behavior, dtype=torch.float64)
                    turns[place] = Turn(paths[place], own, torch.tensor(ages), len(turns))
                segments.append(Segment(token_array(ids), trained, behavior, spans, follows))
            trajectory = Trajectory(
                id=sample.id,
                prompt=Prompt(prompt_id="p", token_ids=prompt),
                segments=tuple(segments),
                finish_reason=FinishReason.LENGTH if index % 6 == 2 else FinishReason.STOP,
            )
            reward = 1.0 if group.group_id == 3 else sample.reward
            earned = [(7 * index + 5 * number) % 4 / 2 - 0.5 for number in range(len(order))]
            if index in (3, 4, 9, 14) or index % 5 == 1:  # its turns earned 0, or its environment rewards none
                earned = [0.0] * len(order)
            turn_rewards = () if index in (3, 9) or index % 5 == 1 else tuple(earned)
            scored = ScoredTrajectory(trajectory=trajectory, reward=reward, turn_rewards=turn_rewards)
            samples.append(to_training_sample(scored))
            sampled.append(Sampled(sample.id, reward, index % 6 == 2, [turns[place] for place in order], earned))
            index += 1
        found.groups.append(msgspec.structs.replace(group, samples=tuple(samples)))
        found.sampled.append(sampled)
    tokens = sum(one.trained_tokens for group in found.sampled for one in group)
    assert tokens % 2
    assert tokens % 3
    assert max(len(sample.sequence_starts) for group in found.groups for sample in group.samples) == 5
    return found


def logits_of(model: Any, tokens: list[int], last: int) -> Any:
    """Logits that the ``last`` tokens were sampled from."""
    return model(torch.tensor([tokens])).logits[0, -last - 1 : -1]


class Scores(NamedTuple):
    """Of the trained tokens of one sample."""

    logprobs: Any
    entropy: Any
    values: Any


class Step(NamedTuple):
    """What one optimizer step began from, and the gradient that it got."""

    weights: dict[str, Any]
    critic: dict[str, Any]
    gradient: dict[str, Any]


class Reference:
    """The loss of a whole batch as the papers write it. ``sums``: tokens, clipped ones, masked ones, corrections."""

    def __init__(
        self,
        path: str,
        groups: list[list[Sampled]],
        settings: ObjectiveSettings,
        off_policy: OffPolicy,
        *,
        sampling: SamplingSettings = DEFAULT_SAMPLING,
        end_tokens: tuple[int, ...] = (),
        updates_per_batch: int = 1,
        epochs_per_batch: int = 1,
        shortest_first: bool = False,
        credit: Credit = Credit.TRAJECTORY,
    ) -> None:
        self.groups, self.settings, self.off_policy, self.credit = groups, settings, off_policy, credit
        self.temperature, self.updates, self.shortest_first = sampling.temperature, updates_per_batch, shortest_first
        self.early = sampling.min_tokens, list(end_tokens)
        self.steps = updates_per_batch * epochs_per_batch
        self.lengths: list[float] = []
        self.model = reference_model(path).double()
        self.other = noisy_reference(path) if settings.kl_coefficient else None
        self.before: dict[Any, Scores] = {}
        self.loss = self.value_loss = 0.0
        self.sums = torch.zeros(4)
        seen = [s for group in groups for s in group if settings.train_truncated or not s.truncated]
        counts = {LossNormalization.TOKEN_MEAN: sum(s.trained_tokens for s in seen)}
        counts[LossNormalization.CONSTANT] = sum(SIZES) * CAPPED
        self.denominator = counts.get(settings.loss_normalization, sum(SIZES))
        self.seen = {s.id for s in seen}

    def step(self, update: int, begun: Step) -> dict[str, Any]:
        """The gradient of one update; its losses are added up."""
        for name, parameter in self.model.named_parameters():
            parameter.data, parameter.grad = begun.weights[name].double(), None
        critic = {name: tensor.double().requires_grad_() for name, tensor in begun.critic.items()}
        now: dict[Any, Scores] = {}
        if not update:
            now = {s.id: self.forward(s, critic) for group in self.groups for s in group}
            self.before = {one: Scores(*(values.detach() for values in scores)) for one, scores in now.items()}
            self.advantages = self.all_advantages()
        trained = [[sample for sample in group if self.has_gradient(sample)] for group in self.groups]
        share = self.share(list(filter(None, trained)), update % self.updates)
        self.lengths.append(fmean(sample.trained_tokens for samples in share for sample in samples))
        for samples in share:
            for sample in samples:
                scores = now.pop(sample.id, None) or self.forward(sample, critic)
                loss, value_loss = self.losses(sample, scores, *self.advantages[sample.id])
                share = sample.trained_tokens if self.settings.loss_normalization == "sequence_mean" else 1
                loss, value_loss = (part.sum() / share / self.denominator for part in (loss, value_loss))
                self.loss, self.value_loss = self.loss + loss.item(), self.value_loss + value_loss.item()
                (self.updates * (loss + self.settings.value_coefficient * value_loss)).backward()
        gradient = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        if self.settings.advantages == "gae":
            gradient |= {f"critic.{name}": tensor.grad for name, tensor in critic.items()}
        return gradient

    def share(self, groups: list[list[Sampled]], update: int) -> list[list[Sampled]]:
        """The groups of one update."""
        if not self.shortest_first:
            return groups[update :: self.updates]
        groups = sorted(groups, key=lambda samples: fmean(sample.trained_tokens for sample in samples))
        return [groups[index] for index in np.array_split(np.arange(len(groups)), self.updates)[update]]

    def has_gradient(self, sample: Sampled) -> bool:
        """Groups without any such sample are dealt to no update."""
        s = self.settings
        always = s.kl_coefficient or s.entropy_coefficient or s.advantages == "gae"
        return sample.id in self.seen and bool(always or self.advantages[sample.id][0].any())

    def forward(self, sample: Sampled, critic: dict[str, Any]) -> Scores:
        below = {name.removeprefix("trunk."): tensor for name, tensor in critic.items() if name.startswith("trunk.")}
        found = []
        for turn in sample.turns:
            tokens, last = torch.tensor(turn.tokens), turn.behavior.numel()
            hidden = self.model.model(tokens[None]).last_hidden_state[0, -last - 1 : -1]
            logprobs = self.processed(self.model.lm_head(hidden))
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            if below:
                trunk = functional_call(self.model.model, below, tokens[None])
                hidden = trunk.last_hidden_state[0, -last - 1 : -1]
            values = hidden @ critic["weight"][0] + critic["bias"]
            found.append((logprobs.gather(1, tokens[-last:, None])[:, 0], entropy, values))
        return Scores(*map(torch.cat, zip(*found, strict=True)))

    def processed(self, logits: Any) -> Any:
        """Logprobs of one turn, as its engine took them."""
        least, ends = self.early
        removed = torch.zeros_like(logits, dtype=torch.bool)
        removed[:least, ends] = True
        return (logits / self.temperature).masked_fill(removed, torch.finfo(torch.float32).min).log_softmax(-1)

    def kl(self, policy: Any, sample: Sampled) -> Any:
        other = []
        for turn in sample.turns:
            ids = torch.tensor(turn.tokens[-turn.behavior.numel() :])
            logits = logits_of(self.other, turn.tokens, len(ids)).detach()
            other.append(self.processed(logits).gather(1, ids[:, None])[:, 0])
        apart = policy - torch.cat(other)
        kinds = {"k1": apart, "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}
        return self.settings.kl_coefficient * kinds[self.settings.kl_estimator]

    def reward(self, sample: Sampled) -> float:
        over = sample.trained_tokens - (CAPPED - self.settings.overlong_buffer)
        if not self.settings.overlong_buffer or over <= 0:
            return sample.reward
        return sample.reward - self.settings.overlong_penalty * min(1.0, over / self.settings.overlong_buffer)

    def all_advantages(self) -> dict[Any, tuple[Any, Any]]:
        """Advantages and returns of the trained tokens, by sample id."""
        kind, found, returns = self.settings.advantages, {}, {}
        for group in self.groups:
            penalties, alone = [self.penalties(sample) for sample in group], kind in ("batch", "cohort", "gae")
            totals = [self.reward(s) - (0 if alone else p.sum().item()) for s, p in zip(group, penalties, strict=True)]
            turns = self.of_turns(group, torch.tensor(totals, dtype=torch.float64))
            for index, (sample, penalty) in enumerate(zip(group, penalties, strict=True)):
                own = torch.cat([turns[turn.number][index].expand_as(turn.behavior) for turn in sample.turns])
                if kind == "gae":
                    found[sample.id], returns[sample.id] = self.gae(sample, own, penalty)
                else:
                    found[sample.id] = own - penalty.flip(0).cumsum(0).flip(0) if alone else own
        if kind in ("batch", "group_then_batch", "cohort", "gae"):
            every = torch.cat([values for key, values in found.items() if key in self.seen])
            found = {key: (values - every.mean()) / every.std(correction=0) for key, values in found.items()}
        return {key: (values, returns.get(key)) for key, values in found.items()}

    def of_turns(self, group: list[Sampled], totals: Any) -> list[Any]:
        """Advantages of each turn of the siblings, or what takes the place of their rewards."""
        found = []
        for turn in range(max(len(sample.turns) for sample in group)):
            before = [sum(s.earned[: min(turn, len(s.turns) - 1)]) for s in group]
            rest = totals - torch.tensor([sum(s.earned) for s in group])
            own = torch.tensor([sum(s.earned[turn : turn + 1]) for s in group], dtype=torch.float64)
            parts = {Credit.TURN: [own, rest], Credit.RETURN_TO_GO: [totals - torch.tensor(before)]}
            found.append(sum(map(self.compared, parts.get(self.credit, [totals]))))
        return found

    def compared(self, rewards: Any) -> Any:
        kind, size, apart = self.settings.advantages, len(rewards), rewards - rewards.mean()
        if kind in ("batch", "cohort", "gae"):
            return rewards
        if size == 1 or rewards.std() < 1e-9:
            return torch.zeros_like(rewards)
        others = (rewards.sum() - rewards) / (size - 1)
        return {"group_std": apart / (rewards.std() + 1e-4), "leave_one_out": rewards - others}.get(kind, apart)

    def penalties(self, sample: Sampled) -> Any:
        behavior = sample.behavior
        in_reward = self.other is not None and self.settings.kl_in is KlPlace.REWARD
        return self.kl(behavior, sample) if in_reward else torch.zeros_like(behavior)

    def gae(self, sample: Sampled, left: Any, penalties: Any) -> tuple[Any, Any]:
        values = self.before[sample.id].values
        advantages, running, after = torch.zeros_like(values), 0.0, 0.0
        for t in reversed(range(len(values))):
            reward = (left[t] - sum(left[t + 1 : t + 2]) - penalties[t]).item()
            delta = reward + self.settings.discount * after - values[t].item()
            running = delta + self.settings.discount * self.settings.gae_lambda * running
            advantages[t], after = running, values[t].item()
        return advantages, advantages + values

    def proximal_and_weight(self, sample: Sampled) -> tuple[Any, Any, Any]:
        """The policy that the ratio is taken against; the correction; where it left a token out."""
        o, own, behavior = self.off_policy, self.before[sample.id].logprobs, sample.behavior
        age = torch.cat([turn.ages for turn in sample.turns])
        kept = {Proximal.BEHAVIOR: torch.ones_like(own), Proximal.DECOUPLED: torch.zeros_like(own)}
        kept = torch.where(age > 0, kept.get(o.proximal, 1 / age.clamp(min=1)), 0.0)
        proximal = kept * behavior + (1 - kept) * own
        gap = proximal - behavior
        w = {"token": gap, "sequence": gap.sum().expand_as(gap), "geometric": gap.mean().expand_as(gap)}
        w = {level: value.exp() for level, value in w.items()} | {"none": torch.ones_like(gap)}
        corrected = (age > 0) | o.correct_mismatch
        masked = corrected & (o.mask != "none") & ((w[o.mask] < o.mask_low) | (w[o.mask] > o.mask_high))
        weight = w[o.truncate].clamp(max=o.cap if o.truncate != "none" else 1.0) * o.staleness_discount**age
        return proximal, torch.where(corrected, weight, 1.0).masked_fill(masked, 0.0), masked

    def losses(self, sample: Sampled, now: Scores, advantages: Any, returns: Any) -> tuple[Any, Any]:
        """Of each trained token: the policy's loss and the critic's."""
        s = self.settings
        proximal, weight, masked = self.proximal_and_weight(sample)
        ratio = now.logprobs - proximal
        ratio = (ratio.mean().expand_as(ratio) if s.surrogate == "sequence_clip" else ratio).exp()
        bounded = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
        gain = torch.minimum(ratio * advantages, bounded * advantages)
        if s.dual_clip:
            gain = torch.where(advantages < 0, torch.maximum(gain, s.dual_clip * advantages), gain)
        clipped = gain != ratio * advantages
        if s.surrogate == "policy_gradient":
            gain, clipped = ratio * advantages, torch.zeros_like(masked)
        elif s.surrogate == "token_weight":
            gain, clipped = bounded.detach() * advantages * now.logprobs, bounded != ratio
        loss = -weight * gain - s.entropy_coefficient * now.entropy
        if self.other is not None and s.kl_in is KlPlace.LOSS:
            loss = loss + self.kl(now.logprobs, sample)
        self.sums += torch.tensor([len(loss), clipped.sum(), masked.sum(), weight.sum()])
        value_loss = torch.zeros_like(loss)
        if returns is not None:
            near = self.before[sample.id].values
            near = near + (now.values - near).clamp(-s.value_clip, s.value_clip)
            value_loss = torch.maximum((now.values - returns) ** 2, (near - returns) ** 2) / 2
        return loss, value_loss


def noisy_reference(path: str) -> Any:
    """A reference model that is not the policy: at equality every KL gradient is 0."""
    model = reference_model(path).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def started(
    start_trainer: StartTrainer, path: str, objective: Objective, off_policy: OffPolicy = DEFAULT, **options: Any
) -> Any:
    """A trainer that clips no norm, with a noisy reference model and a value head that is not 0."""
    settings = objective_settings(objective)
    trainer = start_trainer(
        objective=settings,
        off_policy=off_policy,
        max_tokens=CAPPED,
        max_grad_norm=1e9,
        streaming=not why_not_streaming(
            settings, options.get("updates_per_batch", 1), options.get("epochs_per_batch", 1)
        ),
        **options,
    )
    with torch.no_grad():
        if trainer._updates.reference is not None:
            noisy = dict(noisy_reference(path).named_parameters())
            for name, parameter in trainer._updates.reference.trained_parameters().items():
                parameter.copy_(noisy[name])
        if trainer._updates.critic is not None:
            trainer._updates.critic._linear.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return trainer


def steps_of(trainer: Any, groups: list[TrainingGroup]) -> tuple[list[Step], dict[str, float]]:
    """Train the batch: every optimizer step of it, the critic's with the policy's, and the metrics."""
    steps: list[Step] = []
    policy_step, critic = trainer._updates.optimizer.step, trainer._updates.critic
    none = {"weight": torch.zeros(1, 32), "bias": torch.zeros(1)}
    of_critic = critic._parameters if critic else none

    def keep(gradient_L: Any, learning_rate: float) -> None:
        weights = {name: p.detach().clone() for name, p in trainer._updates.policy.trained_parameters().items()}
        values = {name: tensor.detach().clone() for name, tensor in of_critic.items()}
        gradient = {s.name: gradient_L[s.place].view(s.shape).clone() for s in trainer._updates.weights.shards}
        steps.append(Step(weights, values, gradient))
        policy_step(gradient_L, learning_rate)

    def keep_critic(scale: float, times: int) -> None:
        steps[-1].gradient.update({f"critic.{name}": scale * tensor.grad for name, tensor in of_critic.items()})
        critic_step(scale, times)

    trainer._updates.optimizer.step = keep
    if critic:
        critic_step, critic.step = critic.step, keep_critic
    metrics = train_batch(trainer, groups, trainer.policy_version + 1).metrics
    return steps, metrics


class Case(NamedTuple):
    """An objective and what else of a recipe reaches the loss. ``clips``: whether the clip must have had work."""

    objective: Objective
    off_policy: OffPolicy = DEFAULT
    options: dict[str, Any] = {}
    clips: bool = False


def objective(algorithm: str = "grpo", **fields: Any) -> Objective:
    return Objective(algorithm=algorithm, **fields)


TWICE, THRICE = {"updates_per_batch": 2}, {"updates_per_batch": 3}
BASELINE = "reinforce_plus_plus_baseline"
COLDER = {"sampling": SamplingSettings(temperature=0.7)}
AT_LEAST = {"sampling": SamplingSettings(min_tokens=3)}
SORTED, EPOCHS = {"shortest_first": True}, {"epochs_per_batch": 2}
CASES = {
    f"{algorithm}, updates {updates}": Case(
        objective(algorithm), options={"updates_per_batch": updates}, clips=algorithm not in ("rloo", "cispo")
    )
    for algorithm in METHODS
    for updates in (1, 2, 3)
} | {
    "two passes over the batch": Case(objective(), options=EPOCHS, clips=True),
    "three updates, shortest first": Case(objective("reinforce_plus_plus"), options=THRICE | SORTED, clips=True),
    "two passes of two updates": Case(objective("reinforce_plus_plus"), options=TWICE | EPOCHS, clips=True),
    "ppo, a value model of its own": Case(objective("ppo", value_model=ValueModel.OWN)),
    "ppo, a value model of its own, two passes of three updates, shortest first": Case(
        objective("ppo", value_model=ValueModel.OWN, value_learning_rate=0.01, value_clip=0.1, kl_coefficient=0.1),
        options=THRICE | SORTED | EPOCHS,
        clips=True,
    ),
    "k2 and entropy beside a correction": Case(objective(kl_coefficient=0.1, entropy_coefficient=0.02)),
    "k3, sequence mean": Case(
        objective(kl_coefficient=0.1, kl_estimator=KlEstimator.K3, loss_normalization=LossNormalization.SEQUENCE_MEAN)
    ),
    "k2 in gspo, entropy, three updates": Case(
        objective("gspo", kl_coefficient=0.1, entropy_coefficient=0.02, clip_low=0.05, clip_high=0.08),
        BEHAVIOR,
        THRICE,
        clips=True,
    ),
    **{
        f"{estimator} in the reward of {algorithm}": Case(
            objective(algorithm, kl_coefficient=0.1, kl_estimator=estimator, kl_in=KlPlace.REWARD)
        )
        for algorithm, estimator in [
            ("rloo", KlEstimator.K1),
            ("reinforce_plus_plus", KlEstimator.K1),
            (BASELINE, KlEstimator.K2),
            ("grpo", KlEstimator.K3),
        ]
    },
    "ppo, gamma, lambda, kl, clipped values": Case(
        objective("ppo", kl_coefficient=0.1, discount=0.97, gae_lambda=0.8, value_learning_rate=0.1, value_clip=0.1),
        options=TWICE,
        clips=True,
    ),
    "dual clip": Case(objective(dual_clip=1.4), BEHAVIOR, TWICE, clips=True),
    "cispo with both bounds": Case(objective("cispo", clip_low=0.3, clip_high=0.2), BEHAVIOR, clips=True),
    **{
        f"decoupled, {level} weights and masks": Case(
            objective(algorithm, kl_coefficient=0.1),
            OffPolicy(
                proximal=Proximal.DECOUPLED,
                truncate=level,
                cap=1.05,
                mask=level,
                mask_low=0.9,
                mask_high=1.1,
                correct_mismatch=algorithm == "gspo",
            ),
        )
        for algorithm, level in [
            ("grpo", RatioLevel.TOKEN),
            ("dr_grpo", RatioLevel.SEQUENCE),
            ("gspo", RatioLevel.GEOMETRIC),
        ]
    },
    "masks and staleness without weights": Case(
        objective("rloo"),
        OffPolicy(truncate=RatioLevel.NONE, mask=RatioLevel.TOKEN, mask_low=0.9, mask_high=1.1, staleness_discount=0.9),
    ),
    **{
        f"truncated left out of {algorithm}": Case(objective(algorithm, train_truncated=False), options=TWICE)
        for algorithm in ("dr_grpo", "gspo", "rloo", "ppo")
    },
    "overlong shaping and filtering": Case(
        objective("dapo", overlong_buffer=20, overlong_penalty=0.7, train_truncated=False), clips=True
    ),
    **{
        f"{credit} in {algorithm}": Case(
            objective(algorithm, kl_coefficient=kl, overlong_buffer=buffer, overlong_penalty=0.7),
            options={"credit": credit} | (TWICE if algorithm == "rloo" else {}),
        )
        for credit in (Credit.TURN, Credit.RETURN_TO_GO)
        for algorithm, kl, buffer in [
            ("dapo", 0.0, 20),
            ("rloo", 0.1, 0),
            ("ppo", 0.1, 0),
            (BASELINE, 0.0, 0),
            ("grpo", 0.1, 0),
            ("dr_grpo", 0.0, 20),
            ("cispo", 0.0, 0),
            ("reinforce_plus_plus", 0.1, 0),
        ]
    },
    "temperature": Case(objective(kl_coefficient=0.1, entropy_coefficient=0.02), options=COLDER),
    "no end among the first tokens of a turn": Case(
        objective("ppo", kl_coefficient=0.1, entropy_coefficient=0.02), options=AT_LEAST | {"end_tokens": (1, 2)}
    ),
}


def check(start_trainer: StartTrainer, path: str, batch: Batch, case: Case) -> None:
    """Gradients, losses and what is reported of corrections are the reference's."""
    settings, epochs = objective_settings(case.objective), case.options.get("epochs_per_batch", 1)
    steps, metrics = steps_of(
        started(start_trainer, path, case.objective, case.off_policy, **case.options), batch.groups
    )
    reference = Reference(path, batch.sampled, settings, case.off_policy, **case.options)
    assert len(steps) == reference.steps
    errors = [relative_error(step.gradient, reference.step(update, step)) for update, step in enumerate(steps)]
    assert max(errors) < TOLERANCE, errors
    losses = [epochs * metrics["optim/loss"], epochs * metrics.get("optim/value_loss", 0.0)]
    # A loss is a sum of terms of about 1 that cancel: processors differ by 2e-6 in it.
    assert losses == pytest.approx([reference.loss, reference.value_loss], rel=TOLERANCE, abs=TOLERANCE)
    tokens, *sums = reference.sums.tolist()
    found = [metrics[f"policy/{key}"] * tokens for key in ("clip_ratio", "masked_ratio", "correction_mean")]
    assert found == pytest.approx(sums, rel=1e-5)
    assert bool(sums[0]) or not case.clips, "nothing was clipped"
    assert bool(sums[1]) is (case.off_policy.mask is not RatioLevel.NONE)
    if reference.updates > 1:
        edges = [metrics["length/first_update"], metrics["length/last_update"]]
        assert edges == pytest.approx([reference.lengths[0], reference.lengths[-1]])
        assert edges[0] < edges[1] or not reference.shortest_first


QUICK = (
    "grpo, updates 1",
    "dr_grpo, updates 2",
    "dapo, updates 3",
    "rloo, updates 1",
    "gspo, updates 2",
    "ppo, updates 1",
    "decoupled, token weights and masks",
    "truncated left out of dr_grpo",
    "turn in dapo",
    "return_to_go in rloo",
    "no end among the first tokens of a turn",
)
"""One case of each normalisation of a loss, and of what is beside them."""


@pytest.mark.parametrize("name", quick_only(CASES, QUICK))
def test_losses_and_gradients_are_those_of_the_reference(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, name: str
) -> None:
    check(start_trainer, tiny_model, batch, CASES[name])


def test_samples_carry_the_temperature_that_sampled_them(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch
) -> None:
    """Gradients are those of a trainer whose options say so."""
    replace = msgspec.structs.replace
    carried = [
        replace(group, samples=tuple(replace(sample, temperature=0.7) for sample in group.samples))
        for group in batch.groups
    ]
    settings = CASES["temperature"].objective
    (found,), (wanted,) = (
        steps_of(started(start_trainer, tiny_model, settings, OffPolicy(), **options), given)[0]
        for given, options in ((carried, {}), (batch.groups, COLDER))
    )
    assert all(torch.equal(tensor, found.gradient[name]) for name, tensor in wanted.gradient.items())


def test_sequences_in_chunks_of_logits_give_the_same(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few logits at once every sequence is cut; GSPO needs whole ones all the same."""
    monkeypatch.setattr(rank_memory, "LOGITS_IN_A_CHUNK", 32 * 5)
    check(start_trainer, tiny_model, batch, CASES["k2 in gspo, entropy, three updates"])


def test_a_large_card_makes_more_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for total_memory, expected in ((80 << 30, 80 << 22), (2 << 30, 1 << 24)):
        monkeypatch.setattr(
            "torch.cuda.get_device_properties", lambda _, t=total_memory: SimpleNamespace(total_memory=t)
        )
        assert rank_memory.logits_at_once(policy.card_bytes(torch.device("cuda", 0))) == expected
    assert rank_memory.logits_at_once(policy.card_bytes(torch.device("cpu"))) == 1 << 24


def test_the_cohort_compares_with_earlier_batches(start_trainer: StartTrainer, tiny_model: str, batch: Batch) -> None:
    cohort = objective("reinforce_plus_plus", advantages="cohort", cohort_batches=2)
    trainer = started(start_trainer, tiny_model, cohort, learning_rate=0.0)
    lower = [
        msgspec.structs.replace(
            group, batch_id=1, samples=tuple(msgspec.structs.replace(s, reward=s.reward - 5.0) for s in group.samples)
        )
        for group in batch.groups
    ]
    before = stepped_gradient(trainer, batch.groups)
    after = stepped_gradient(trainer, lower)
    # Within its own batch the shift by 5 changes nothing; compared with the cohort every sample got worse.
    assert relative_error(after, before) > 0.5
    assert len(trainer._updates.cohort) == 1

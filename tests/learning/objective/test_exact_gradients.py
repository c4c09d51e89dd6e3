"""Losses and gradients of every objective through the real trainer, against a float64 reference written out here.

The reference takes one sampled turn at a time, behind all that it goes on from, through transformers' own model and
shares no code with ``streamrl.learning``. The batch has 19 trajectories in groups of 4, 3, 5, 2, 4 and 1 and a number
of tokens that neither 2 nor 3 divides; tokens of four versions, also inside a turn; several turns, with rewards of
their own; forks and several sequences; truncated ones; a group of equal rewards."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from builders.files import ROOT
from tiers import quick_only

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from reference_policy import reference_model, relative_error, stepped_gradient  # noqa: E402
from sample_groups import make_groups, train_batch  # noqa: E402
from torch.func import functional_call  # noqa: E402

from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.base.messages import ImitatedSet  # noqa: E402
from streamrl.base.types import (  # noqa: E402
    Baseline,
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
from streamrl.learning.batches.scoring import score_samples  # noqa: E402
from streamrl.learning.model import policy  # noqa: E402
from streamrl.learning.trainer import TorchTrainer  # noqa: E402
from streamrl.recipe.environment import Credit  # noqa: E402
from streamrl.recipe.objective import (  # noqa: E402
    KlEstimator,
    Mask,
    Objective,
    ObjectiveSettings,
    OffPolicy,
    Proximal,
    RatioLevel,
    objective_settings,
    why_not_streaming,
)
from streamrl.recipe.objectives.catalog import METHODS  # noqa: E402
from streamrl.recipe.objectives.distillation import Divergence  # noqa: E402
from streamrl.recipe.objectives.method import KlPlace, LossNormalization  # noqa: E402
from streamrl.recipe.objectives.ppo import ValueModel  # noqa: E402
from streamrl.recipe.objectives.sapo import SoftGate  # noqa: E402

pytestmark = pytest.mark.torch
StartTrainer = Callable[..., Any]
SIZES = [4, 3, 5, 2, 4, 1]
OWN = ROOT / "examples" / "custom_loss.py"
FAILED = {0: 0, 2: 2}
"""Number of the sample of a group whose reward failed: its siblings are compared without it."""
CAPPED = 40
TOLERANCE = 3e-6
"""Relative tolerance of gradients in float32. First updates on a batch are within 2.2e-6, on processors with AMX and of
AMD; later ones, whose ratios are of logprobs of two forwards, within 2.6e-6."""
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
    """What the reference knows of a trajectory. ``earned``: what each turn added, as they were sampled; ``observed``:
    what the environment wrote behind a turn, each as all tokens up to its end and the number of its own."""

    id: TrajectoryId
    reward: float
    truncated: bool
    turns: list[Turn]
    earned: list[float]
    observed: list[tuple[list[int], int]]

    @property
    def trained_tokens(self) -> int:
        return sum(turn.behavior.numel() for turn in self.turns)

    @property
    def behavior(self) -> Any:
        return torch.cat([turn.behavior for turn in self.turns])


Numbers = dict[TrajectoryId, dict[str, tuple[float, list[float | None]]]]
"""Weight and numbers of the trained tokens of a sample, by the name of what gave them."""


class Batch(NamedTuple):
    """``observing``: the groups, with observations to imitate."""

    groups: list[TrainingGroup]
    sampled: list[list[Sampled]]
    observing: list[TrainingGroup]


@pytest.fixture(scope="module")
def batch(tiny_model: str) -> Batch:
    """The batch of the module's docstring; behaviour logprobs are the policy's plus noise (standard deviation 0.4)."""
    model, rng, index = reference_model(tiny_model), random.Random(1), 0
    found = Batch([], [], [])
    for group in make_groups(0, [size + (number in FAILED) for number, size in enumerate(SIZES)], seed=4):
        samples, sampled, observing = [], [], []
        for sample in group.samples:
            if FAILED.get(group.group_id) == sample.id.sample:
                continue
            start = sample.loss_mask.index(1)
            shape, order = SHAPES[(index + 4) % 5 if sample.trained_tokens > 6 else 0]
            prompt = token_array() if order[0] == 1 and len(order) == 4 else sample.token_ids[:start]
            pieces = iter(np.array_split(sample.token_ids[start:], len(order)))
            paths: dict[int, list[int]] = {-1: list(prompt)}
            segments, turns, observed, behind = [], {}, [], {-1: False}
            for place, (trained, follows) in enumerate(shape):
                ids = next(pieces).tolist() if trained else rng.choices(range(3, 32), k=3)
                before = place - 1 if follows is None else follows
                paths[place] = paths[before] + ids
                behind[place] = trained or behind[before]
                observed += [(paths[place], len(ids))] if behind[before] and not trained else []
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
            observing.append(to_training_sample(scored, imitates_observations=True))
            in_order = [turns[place] for place in order]
            sampled.append(Sampled(sample.id, reward, index % 6 == 2, in_order, earned, observed))
            index += 1
        baseline = baseline_of(group.group_id)
        found.groups.append(msgspec.structs.replace(group, samples=tuple(samples), baseline=baseline))
        found.observing.append(msgspec.structs.replace(group, samples=tuple(observing), baseline=baseline))
        found.sampled.append(sampled)
    tokens = sum(one.trained_tokens for group in found.sampled for one in group)
    assert tokens % 2
    assert tokens % 3
    assert max(len(sample.sequence_starts) for group in found.groups for sample in group.samples) == 5
    return found


def baseline_of(group_id: int) -> Baseline:
    """What is known of the prompt of a group: another mean and weight for each; nothing of the prompt of group 1."""
    weight = 0.75 * group_id if group_id != 1 else 0.0
    return Baseline(total=0.4 * weight * (1 + group_id % 3), weight=weight, deviation=0.7)


def logits_of(model: Any, tokens: list[int], last: int) -> Any:
    """Logits that the ``last`` tokens were sampled from."""
    return model(torch.tensor([tokens])).logits[0, -last - 1 : -1]


class Scores(NamedTuple):
    """Of the trained tokens of one sample."""

    logprobs: Any
    entropy: Any
    values: Any
    distribution: Any


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
        numbers: Numbers | None = None,
        learn_observations: float = 0.0,
    ) -> None:
        self.numbers, self.imitation = numbers or {}, learn_observations
        self.groups, self.settings, self.off_policy, self.credit = groups, settings, off_policy, credit
        self.temperature, self.updates, self.shortest_first = sampling.temperature, updates_per_batch, shortest_first
        self.early = sampling.min_tokens, list(end_tokens)
        self.steps = updates_per_batch * epochs_per_batch
        self.lengths: list[float] = []
        self.model = reference_model(path).double()
        self.other = noisy_reference(path) if settings.kl_coefficient or settings.distillation_coefficient else None
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
                if self.imitation:
                    loss = torch.cat([loss, self.imitation * self.cross_entropy(sample)])
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
        always = s.kl_coefficient or s.distillation_coefficient or s.entropy_coefficient or s.advantages == "gae"
        always = always or (self.imitation and sample.observed)
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
            found.append((logprobs.gather(1, tokens[-last:, None])[:, 0], entropy, values, logprobs))
        return Scores(*map(torch.cat, zip(*found, strict=True)))

    def cross_entropy(self, sample: Sampled) -> Any:
        """Of each observed token, by the model itself: no temperature, no token that could not be sampled."""
        found = [torch.zeros(1, dtype=torch.float64)]
        for tokens, last in sample.observed:
            logprobs = logits_of(self.model, tokens, last).log_softmax(-1)
            found.append(-logprobs.gather(1, torch.tensor(tokens[-last:])[:, None])[:, 0])
        return torch.cat(found)

    def processed(self, logits: Any) -> Any:
        """Logprobs of one turn, as its engine took them."""
        least, ends = self.early
        removed = torch.zeros_like(logits, dtype=torch.bool)
        removed[:least, ends] = True
        return (logits / self.temperature).masked_fill(removed, torch.finfo(torch.float32).min).log_softmax(-1)

    def of_other(self, sample: Sampled) -> Any:
        """Logprobs of the trained tokens under the other model: the reference, or the teacher."""
        ids = torch.tensor([token for turn in sample.turns for token in turn.tokens[-turn.behavior.numel() :]])
        return self.distribution_of_other(sample).gather(1, ids[:, None])[:, 0]

    def distribution_of_other(self, sample: Sampled) -> Any:
        """Logprobs of every token where one was sampled, under the other model."""
        turns = [logits_of(self.other, turn.tokens, turn.behavior.numel()).detach() for turn in sample.turns]
        return torch.cat([self.processed(logits) for logits in turns])

    def divergence(self, now: Scores, sample: Sampled) -> Any:
        """The generalised Jensen-Shannon divergence from the teacher, by its definition."""
        beta, policy = self.settings.divergence_beta, now.distribution
        teacher = self.distribution_of_other(sample)
        if beta in (0, 1):
            first, second = (policy, teacher) if beta else (teacher, policy)
            return (first.exp() * (first - second)).sum(-1)
        mixture = (beta * teacher.exp() + (1 - beta) * policy.exp()).log()
        parts = [(one.exp() * (one - mixture).nan_to_num(0)).sum(-1) for one in (teacher, policy)]
        return beta * parts[0] + (1 - beta) * parts[1]

    def kl(self, policy: Any, sample: Sampled) -> Any:
        apart = policy - self.of_other(sample)
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
            if kind == "tracked":
                turns = [self.tracked(group, totals)] * len(turns)
            for index, (sample, penalty) in enumerate(zip(group, penalties, strict=True)):
                own = torch.cat([turns[turn.number][index].expand_as(turn.behavior) for turn in sample.turns])
                if kind == "gae":
                    found[sample.id], returns[sample.id] = self.gae(sample, own, penalty)
                else:
                    found[sample.id] = own - penalty.flip(0).cumsum(0).flip(0) if alone else own
            for one, extra in self.of_numbers(group).items():
                found[one] = found[one] + extra
        if kind in ("batch", "group_then_batch", "cohort", "gae"):
            every = torch.cat([values for key, values in found.items() if key in self.seen])
            found = {key: (values - every.mean()) / every.std(correction=0) for key, values in found.items()}
        if coefficient := 0 if self.settings.exact_divergence else self.settings.distillation_coefficient:
            for sample in (one for group in self.groups for one in group):
                found[sample.id] = found[sample.id] + coefficient * (self.of_other(sample) - sample.behavior)
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

    def of_numbers(self, group: list[Sampled]) -> dict[Any, Any]:
        """What numbers of steps and of tokens add to the advantages of the group's tokens."""
        found: dict[Any, Any] = {s.id: torch.zeros_like(s.behavior) for s in group if s.id in self.numbers}
        for name in {name for one in found for name in self.numbers[one]}:
            given = {one: self.numbers[one][name] for one in found}
            pool = [number for _, numbers in given.values() for number in numbers if number is not None]
            steps = iter(self.compared(torch.tensor(pool, dtype=torch.float64)).tolist())
            for one, (weight, numbers) in given.items():
                own = [0.0 if number is None else next(steps) for number in numbers]
                if name.startswith("tokens"):
                    found[one] += weight * torch.tensor([number or 0.0 for number in numbers])
                else:
                    found[one] += weight * torch.tensor([sum(own[place:]) for place in range(len(own))])
        return found

    def tracked(self, group: list[Sampled], totals: list[float]) -> Any:
        """Relative to the mean of what is known of the prompt, the sample itself left out."""
        known = baseline_of(group[0].id.group_id)
        found = []
        for index, total in enumerate(totals):
            others = totals[:index] + totals[index + 1 :]
            weight = known.weight + len(others)
            mean = (known.total + sum(others)) / weight if weight else total
            found.append((total - mean) / known.deviation)
        return torch.tensor(found, dtype=torch.float64)

    def compared(self, rewards: Any) -> Any:
        kind, size, apart = self.settings.advantages, len(rewards), rewards - rewards.mean()
        if kind in ("batch", "cohort", "gae", "tracked"):
            return rewards
        if kind == "teacher":
            return torch.zeros_like(rewards)
        if size < 2 or rewards.std() < 1e-9:
            return torch.zeros_like(rewards)
        others = (rewards.sum() - rewards) / (size - 1)
        scaled = {"group_std": apart / (rewards.std() + 1e-4), "leave_one_out": rewards - others}
        return (scaled | {"group_ratio": rewards / rewards.mean() - 1}).get(kind, apart)

    def penalties(self, sample: Sampled) -> Any:
        behavior = sample.behavior
        in_reward = self.settings.kl_coefficient and self.settings.kl_in is KlPlace.REWARD
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
        low = 0.5 if o.mask_low is None else o.mask_low
        high = (5.0 if o.mask == "icepop" else 2.0) if o.mask_high is None else o.mask_high
        if o.mask == "icepop":
            ratio = (own - behavior).exp()
            masked = (ratio < low) | (ratio > high)
            return proximal, (gap.exp() * o.staleness_discount**age).masked_fill(masked, 0.0), masked
        w = {"token": gap, "sequence": gap.sum().expand_as(gap), "geometric": gap.mean().expand_as(gap)}
        w = {level: value.exp() for level, value in w.items()} | {"none": torch.ones_like(gap)}
        corrected = (age > 0) | o.correct_mismatch
        masked = corrected & (o.mask != "none") & ((w[o.mask] < low) | (w[o.mask] > high))
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
        elif s.surrogate == "divergence_mask":
            change = now.logprobs.detach().exp() - proximal.exp()
            clipped = torch.where(advantages > 0, change > s.clip_high, change < -s.clip_low)
            gain = torch.where(clipped, 0, ratio * advantages)
        elif s.surrogate == "custom":
            gain, clipped = self.of_own_function(now.logprobs - proximal, proximal, advantages)
        elif s.surrogate == "soft_gate":
            gate = s.soft_gate
            t = torch.where(advantages > 0, gate.temperature_positive, gate.temperature_negative)
            gain, clipped = advantages * 4 / t / (1 + (t * (1 - ratio)).exp()), torch.zeros_like(masked)
        loss = -weight * gain - s.entropy_coefficient * now.entropy
        if s.kl_coefficient and s.kl_in is KlPlace.LOSS:
            loss = loss + self.kl(now.logprobs, sample)
        if s.exact_divergence:
            loss = loss + s.distillation_coefficient * self.divergence(now, sample)
        self.sums += torch.tensor([len(loss), clipped.sum(), masked.sum(), weight.sum()])
        value_loss = torch.zeros_like(loss)
        if returns is not None:
            near = self.before[sample.id].values
            near = near + (now.values - near).clamp(-s.value_clip, s.value_clip)
            value_loss = torch.maximum((now.values - returns) ** 2, (near - returns) ** 2) / 2
        return loss, value_loss

    def of_own_function(self, apart: Any, proximal: Any, advantages: Any) -> tuple[Any, Any]:
        """What the losses of ``examples/custom_loss.py`` take the negative of."""
        if self.settings.function.endswith(":gmpo"):
            bound = self.settings.options.get("clip", 0.4)
            signs = advantages.sign()
            bounded = signs * torch.minimum(signs * apart, torch.full_like(apart, bound))
            bounded = torch.where(signs == 0, apart.clamp(min=-bound), bounded)
            return bounded.mean().exp() * advantages, bounded != apart
        p, q = proximal.exp(), (apart + proximal).exp().detach()
        kl = p * (p / q).log() + (1 - p) * ((1 - p + 1e-8) / (1 - q + 1e-8)).log()
        bounds = {"low": 0.05, "high": 0.05} | self.settings.options
        out = torch.where(advantages > 0, (q > p) & (kl > bounds["high"]), (q < p) & (kl > bounds["low"]))
        out = out & (advantages.abs() > 1e-9)  # rounding of turns is 0
        return apart.exp() * advantages * ~out, out


def noisy_reference(path: str) -> Any:
    """A reference model that is not the policy: at equality every KL gradient is 0."""
    model = reference_model(path).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_((parameter + noise).bfloat16())  # exact in the trainer, which has float32
    return model


def started(
    start_trainer: StartTrainer, path: str, objective: Objective, off_policy: OffPolicy = DEFAULT, **options: Any
) -> Any:
    """A trainer that clips no norm, with a noisy reference model and a value head that is not 0."""
    settings = objective_settings(objective)
    if settings.reference:
        settings = msgspec.structs.replace(settings, reference=path)
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
        weights = {name: p.detach().clone().cpu() for name, p in trainer._updates.policy.trained_parameters().items()}
        values = {name: tensor.detach().clone().cpu() for name, tensor in of_critic.items()}
        gradient = {s.name: gradient_L[s.place].view(s.shape).clone().cpu() for s in trainer._updates.weights.shards}
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


def distilled(algorithm: str, **fields: Any) -> Objective:
    """An objective with a teacher: the reference, which ``started`` makes noisy."""
    return objective(algorithm, reference="MODEL", **fields)


TWICE, THRICE = {"updates_per_batch": 2}, {"updates_per_batch": 3}
BASELINE = "reinforce_plus_plus_baseline"
COLDER = {"sampling": SamplingSettings(temperature=0.7)}
AT_LEAST = {"sampling": SamplingSettings(min_tokens=3)}
SORTED, EPOCHS = {"shortest_first": True}, {"epochs_per_batch": 2}
CASES = {
    f"{algorithm}, updates {updates}": Case(
        distilled(algorithm) if algorithm == "distillation" else objective(algorithm),
        options={"updates_per_batch": updates},
        clips=algorithm not in ("rloo", "cispo", "distillation", "dppo", "sapo"),
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
    "icepop": Case(objective(), OffPolicy(mask=Mask.ICEPOP, mask_low=0.7, mask_high=1.6), clips=True),
    "icepop in gspo, decoupled, discounted, two updates": Case(
        objective("gspo"),
        OffPolicy(proximal=Proximal.DECOUPLED, mask=Mask.ICEPOP, mask_high=1.8, staleness_discount=0.9),
        TWICE,
        clips=True,
    ),
    "dppo against what sampled, two updates": Case(
        objective("dppo", clip_low=0.02, clip_high=0.01), BEHAVIOR, TWICE, clips=True
    ),
    "sapo against what sampled, kl, other temperatures": Case(
        objective("sapo", kl_coefficient=0.1, soft_gate=SoftGate(temperature_positive=0.6, temperature_negative=3.0)),
        BEHAVIOR,
        THRICE,
    ),
    "gmpo of a file, two updates": Case(
        objective(function=f"{OWN}:gmpo", options={"clip": 0.1}, loss_normalization=LossNormalization.SEQUENCE_MEAN),
        options=TWICE,
        clips=True,
    ),
    "binary kl of a file against what sampled": Case(
        objective("dr_grpo", function=f"{OWN}:binary_kl", options={"low": 0.002, "high": 0.001}, kl_coefficient=0.1),
        BEHAVIOR,
        {"credit": Credit.TURN},
        clips=True,
    ),
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
    **{
        f"a teacher beside {algorithm}": Case(
            distilled(algorithm, distillation_coefficient=0.7, **fields), options=options, clips=algorithm == "gspo"
        )
        for algorithm, fields, options in [
            ("grpo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.02}, {}),
            ("gspo", {"clip_low": 0.05, "clip_high": 0.08}, TWICE),
            ("rloo", {"kl_coefficient": 0.1}, {"credit": Credit.TURN}),
            ("reinforce_plus_plus", {}, COLDER),
            ("ppo", {"train_truncated": False}, AT_LEAST | {"end_tokens": (1, 2)}),
        ]
    },
    **{
        f"divergence {beta} from a teacher beside {algorithm}": Case(
            distilled(
                algorithm, distillation_coefficient=0.7, divergence=Divergence.EXACT, divergence_beta=beta, **fields
            ),
            options=options,
            clips=algorithm == "gspo",
        )
        for algorithm, beta, fields, options in [
            ("distillation", 1.0, {}, {}),
            ("distillation", 0.0, {"loss_normalization": LossNormalization.SEQUENCE_MEAN}, TWICE),
            ("distillation", 0.3, {"entropy_coefficient": 0.02}, COLDER),
            ("gspo", 0.5, {"clip_low": 0.05, "clip_high": 0.08, "kl_coefficient": 0.1}, TWICE),
            ("ppo", 1.0, {"train_truncated": False}, AT_LEAST | {"end_tokens": (1, 2)}),
        ]
    },
    "a clipped teacher, sequence mean": Case(
        distilled("distillation", surrogate="token_clip", loss_normalization=LossNormalization.SEQUENCE_MEAN),
        BEHAVIOR,
        TWICE,
        clips=True,
    ),
    "temperature": Case(objective(kl_coefficient=0.1, entropy_coefficient=0.02), options=COLDER),
    "no end among the first tokens of a turn": Case(
        objective("ppo", kl_coefficient=0.1, entropy_coefficient=0.02), options=AT_LEAST | {"end_tokens": (1, 2)}
    ),
}


def check(start_trainer: StartTrainer, path: str, batch: Batch, case: Case, numbers: Numbers | None = None) -> float:
    """Gradients, losses and what is reported of corrections are the reference's. The largest error of a gradient."""
    settings, epochs = objective_settings(case.objective), case.options.get("epochs_per_batch", 1)
    steps, metrics = steps_of(
        started(start_trainer, path, case.objective, case.off_policy, **case.options), batch.groups
    )
    reference = Reference(path, batch.sampled, settings, case.off_policy, **case.options, numbers=numbers)
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
    assert bool(sums[1]) is (case.off_policy.mask != "none")
    if reference.updates > 1:
        edges = [metrics["length/first_update"], metrics["length/last_update"]]
        assert edges == pytest.approx([reference.lengths[0], reference.lengths[-1]])
        assert edges[0] < edges[1] or not reference.shortest_first
    return max(errors)


QUICK = (
    "grpo, updates 1",
    "dr_grpo, updates 2",
    "dapo, updates 3",
    "dppo against what sampled, two updates",
    "maxrl, updates 1",
    "sapo against what sampled, kl, other temperatures",
    "icepop",
    "gmpo of a file, two updates",
    "binary kl of a file against what sampled",
    "rloo, updates 1",
    "gspo, updates 2",
    "ppo, updates 1",
    "decoupled, token weights and masks",
    "truncated left out of dr_grpo",
    "turn in dapo",
    "return_to_go in rloo",
    "no end among the first tokens of a turn",
    "distillation, updates 1",
    "a teacher beside grpo",
    "divergence 0.3 from a teacher beside distillation",
)
"""One case of each normalisation of a loss, and of what is beside them."""


@pytest.mark.parametrize("name", quick_only(CASES, QUICK))
def test_losses_and_gradients_are_those_of_the_reference(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, name: str
) -> None:
    check(start_trainer, tiny_model, batch, CASES[name])


def numbered(batch: Batch) -> tuple[Batch, Numbers]:
    """The batch, with numbers of steps and of tokens. All steps of the second group have the same number, and the third
    group has no steps; the fifth one has no numbers at all."""
    rng = random.Random(7)
    numbers: Numbers = {}

    def with_numbers(sample: Any) -> Any:
        marks: list[float | None] = [rng.choice((None, None, -0.5, 0.25, 1.0)) for _ in range(sample.trained_tokens)]
        steps = {1: [mark and 1.0 for mark in marks], 2: [None for _ in marks]}.get(sample.id.group_id, marks)
        tokens = [rng.choice((None, 0.0, -0.75, 0.5)) for _ in marks]
        if sample.id.group_id == 4:
            return msgspec.structs.replace(sample, separate_rewards={"/whole": (1.0, sample.reward)}, reward=99.0)
        numbers[sample.id] = {"steps/judge": (0.6, steps), "tokens/form": (-1.5, tokens)}
        values = {name: float_array(map(nan_of, given)) for name, (_, given) in numbers[sample.id].items()}
        separate = {name.partition("/")[2]: (weight, 9.0) for name, (weight, _) in numbers[sample.id].items()}
        separate |= {"/whole": (1.0, sample.reward)}
        values["tokens/shadow"] = float_array([3.0] * sample.trained_tokens)
        return msgspec.structs.replace(sample, reward=99.0, separate_rewards=separate, token_values=values)

    groups = [msgspec.structs.replace(group, samples=tuple(map(with_numbers, group.samples))) for group in batch.groups]
    return batch._replace(groups=groups), numbers


def nan_of(number: float | None) -> float:
    return float("nan") if number is None else number


NUMBERED = {
    "grpo": Case(objective()),
    "dapo, overlong": Case(objective("dapo", overlong_buffer=20, overlong_penalty=0.7, train_truncated=False)),
    "rloo, kl in the reward, by turns": Case(
        objective("rloo", kl_coefficient=0.1), options={"credit": Credit.RETURN_TO_GO} | TWICE
    ),
    "dr_grpo, shortest first": Case(objective("dr_grpo"), options=THRICE | SORTED),
    "cispo, a teacher": Case(distilled("cispo", distillation_coefficient=0.7), options=TWICE),
}


@pytest.mark.parametrize("name", quick_only(NUMBERED, ("grpo", "rloo, kl in the reward, by turns")))
def test_numbers_of_steps_and_tokens_reach_their_tokens(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, name: str
) -> None:
    """Steps as in DeepSeekMath's process supervision, tokens as they are; a group of equal rewards is trained."""
    assert check(start_trainer, tiny_model, *numbered(batch)[:1], NUMBERED[name], numbered(batch)[1]) < TOLERANCE


OBSERVING = {
    "dapo, sequence mean": Case(objective("dapo", loss_normalization=LossNormalization.SEQUENCE_MEAN)),
    "dr_grpo, colder, shortest first": Case(objective("dr_grpo"), options=THRICE | SORTED | COLDER),
    "ppo, no end among the first tokens": Case(
        objective("ppo", kl_coefficient=0.1), options=AT_LEAST | {"end_tokens": (1, 2)}
    ),
    "gspo, a divergence from a teacher": Case(
        distilled("gspo", distillation_coefficient=0.7, divergence=Divergence.EXACT), options=TWICE
    ),
    "reinforce_plus_plus, truncated left out": Case(objective("reinforce_plus_plus", train_truncated=False)),
}


@pytest.mark.parametrize("name", quick_only(OBSERVING, ("dapo, sequence mean", "ppo, no end among the first tokens")))
def test_observations_are_imitated_beside_the_objective(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each token that an environment wrote behind a turn is learnt once, also where chunks of logits divide it."""
    monkeypatch.setattr(rank_memory, "LOGITS_IN_A_CHUNK", 32 * 5)
    case = OBSERVING[name]
    case = case._replace(options=case.options | {"learn_observations": 0.3})
    marked = sum(sample.imitated_tokens for group in batch.observing for sample in group.samples)
    assert marked == sum(last for group in batch.sampled for one in group for _, last in one.observed) > 50
    assert check(start_trainer, tiny_model, batch._replace(groups=batch.observing), case) < TOLERANCE


IMITATING = {
    "token_clip, token mean": (objective(), {}),
    "rloo, sequence sum, three updates, colder": (objective("rloo"), THRICE | COLDER),
    "dr_grpo, two passes of two updates": (objective("dr_grpo"), TWICE | EPOCHS),
    "ppo": (objective("ppo", kl_coefficient=0.1), {}),
    "a divergence from a teacher": (distilled("distillation", divergence=Divergence.EXACT), {}),
}


@pytest.mark.parametrize(
    "name", quick_only(IMITATING, ("token_clip, token mean", "dr_grpo, two passes of two updates"))
)
def test_rows_are_imitated_by_a_mean_of_their_own(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The gradient of a step has that of each set's mean cross-entropy more, whatever divides the objective's loss."""
    settings, options = IMITATING[name]
    rows = [
        msgspec.structs.replace(
            sample, id=TrajectoryId(prompt_id="r", group_id=-1 - index, sample=0),
            loss_mask=sample.loss_mask.replace(b"\1", b"\2"), sequence_starts=(),
        )
        for index, sample in enumerate(one for group in make_groups(7, [3, 4], seed=9) for one in group.samples)
    ]  # fmt: skip
    sets = (
        ImitatedSet(name="a", weight=0.3, samples=tuple(rows[:4])),
        ImitatedSet(name="b", weight=2.0, samples=tuple(rows[4:])),
    )
    alone, _ = steps_of(started(start_trainer, tiny_model, settings, learning_rate=0.0, **options), batch.groups)
    trainer, close = (
        started(start_trainer, tiny_model, settings, learning_rate=0.0, **options),
        TorchTrainer.close_batch,
    )
    monkeypatch.setattr(
        TorchTrainer, "close_batch", lambda self, order: close(self, msgspec.structs.replace(order, imitated=sets))
    )
    beside, metrics = steps_of(trainer, batch.groups)
    updates, model = options.get("updates_per_batch", 1), reference_model(tiny_model).double()
    losses: list[Any] = []
    for update in range(len(beside)):
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for one in sets:
            tokens = sum(sample.imitated_tokens for sample in one.samples)
            for sample in one.samples[update % updates :: updates]:
                ids, last = list(sample.token_ids), sample.imitated_tokens
                logprobs = logits_of(model, ids, last).log_softmax(-1)
                entropies = -logprobs.gather(1, torch.tensor(ids[-last:])[:, None])[:, 0]
                loss = loss + updates * one.weight * entropies.sum() / tokens
                losses.append(entropies.detach())
        loss.backward()
        expected = dict(alone[update].gradient)
        for key, parameter in model.named_parameters():
            expected[key] = expected[key].double() + parameter.grad
        assert relative_error(beside[update].gradient, expected) < TOLERANCE
    assert metrics["imitation/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert metrics["imitation/tokens"] == sum(map(len, losses))


def test_advantages_of_a_file_are_those_of_siblings(start_trainer: StartTrainer, tiny_model: str, batch: Batch) -> None:
    """By the largest distance of the file, as the same numbers given as rewards to plain means are."""
    replace = msgspec.structs.replace
    scaled = []
    for group in batch.groups:
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        apart = rewards - rewards.mean()
        values = (apart / apart.abs().max().clamp(min=1e-6)).tolist()
        samples = (replace(sample, reward=value) for sample, value in zip(group.samples, values, strict=True))
        scaled.append(replace(group, samples=tuple(samples)))
    own = objective("dr_grpo", function=f"{OWN}:largest_distance", advantages="custom")
    (found,), _ = steps_of(started(start_trainer, tiny_model, own), batch.groups)
    (wanted,), _ = steps_of(started(start_trainer, tiny_model, objective("dr_grpo")), scaled)
    assert relative_error(found.gradient, wanted.gradient) < 1e-6


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


def test_the_reference_may_be_any_model_of_the_same_tokens(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, tmp_path: Path
) -> None:
    """Its logprobs are those of transformers' own model over the policy's tokens, without its padding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=32 + 9, hidden_size=48, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "other")
    settings = objective_settings(objective(kl_coefficient=0.1, reference=str(tmp_path / "other")))
    trainer = start_trainer(objective=settings, max_tokens=CAPPED)
    model = reference_model(str(tmp_path / "other")).double()
    samples = [sample for group in batch.groups for sample in group.samples]
    updates = trainer._updates
    scores = score_samples(
        samples, updates.policy, trainer._options, trainer._device,
        reference=updates.reference, critic=None, proximal=False, together=False,
    )  # fmt: skip
    for sample in (one for group in batch.sampled for one in group):
        wanted: list[Any] = []
        for turn in sample.turns:
            last = turn.behavior.numel()
            logits = logits_of(model, turn.tokens, last)[:, :32]
            wanted.append(logits.log_softmax(-1).gather(1, torch.tensor(turn.tokens[-last:])[:, None])[:, 0])
        found = torch.from_numpy(scores[sample.id].reference).double()
        assert float((found - torch.cat(wanted).detach()).abs().max()) < 5e-6


def test_a_served_teacher_is_a_reference_that_was_asked(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch
) -> None:
    """Its logprobs give the gradient that the same model gives in the trainer; a sample without them is refused."""
    trainer = started(start_trainer, tiny_model, distilled("distillation"))
    updates = trainer._updates
    samples = [sample for group in batch.groups for sample in group.samples]
    scores = score_samples(
        samples, updates.policy, trainer._options, trainer._device,
        reference=updates.reference, critic=None, proximal=False, together=False,
    )  # fmt: skip
    wanted = stepped_gradient(trainer, batch.groups)
    replace = msgspec.structs.replace
    asked = [
        replace(
            group,
            samples=tuple(
                replace(sample, token_values={"teacher": float_array(scores[sample.id].reference)})
                for sample in group.samples
            ),
        )
        for group in batch.groups
    ]
    trainer = started(start_trainer, tiny_model, objective("distillation"), served_teacher=True)
    assert trainer._updates.reference is None
    assert relative_error(stepped_gradient(trainer, asked), wanted) < 1e-6
    with pytest.raises(StreamRLError, match="0 logprobs of the teacher"):
        stepped_gradient(trainer, batch.groups)


def test_sequences_in_chunks_of_logits_give_the_same(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few logits at once every sequence is cut; GSPO needs whole ones all the same."""
    monkeypatch.setattr(rank_memory, "LOGITS_IN_A_CHUNK", 32 * 5)
    for name in ("k2 in gspo, entropy, three updates", "gmpo of a file, two updates"):
        check(start_trainer, tiny_model, batch, CASES[name])


def test_a_loss_of_a_file_that_raises_ends_the_step(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, tmp_path: Path
) -> None:
    """With the name of the function, the error and its line; so does one whose result is no loss of each token."""
    file = tmp_path / "raises.py"
    file.write_text(
        "def late(ratio, advantages):\n    raise ValueError('too late')\n"
        "def mean(ratio, advantages):\n    return -(ratio * advantages).mean()\n"
    )
    for name, words in {"late": r"raised ValueError: too late \(raises.py:2\)", "mean": r"shape \[\] as loss"}.items():
        trainer = started(start_trainer, tiny_model, objective(function=f"{file}:{name}"))
        with pytest.raises(StreamRLError, match=f'objective.function ".*raises.py:{name}" .*{words}'):
            train_batch(trainer, batch.groups, 1)


def test_a_divergence_of_sequences_in_chunks_is_the_same(
    start_trainer: StartTrainer, tiny_model: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of logits of policy and teacher are the same tokens, also where GSPO runs them twice."""
    monkeypatch.setattr(rank_memory, "LOGITS_IN_A_CHUNK", 32 * 5)
    for algorithm, beta in (("gspo", 0.5), ("distillation", 0.3)):
        check(start_trainer, tiny_model, batch, CASES[f"divergence {beta} from a teacher beside {algorithm}"])


def test_a_large_card_makes_more_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for total_memory, expected in ((80 << 30, 80 << 22), (2 << 30, 1 << 24)):
        monkeypatch.setattr(
            "torch.cuda.get_device_properties", lambda _, t=total_memory: SimpleNamespace(total_memory=t)
        )
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
        card = policy.card_of(torch.device("cuda", 0))
        assert card is not None and rank_memory.logits_at_once(card.memory) == expected
    assert policy.card_of(torch.device("cpu")) is None and rank_memory.logits_at_once(0) == 1 << 24


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

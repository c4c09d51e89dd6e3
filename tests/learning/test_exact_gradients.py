"""Every objective through the real trainer: the streamed gradient is the whole batch's, in float64, from the papers.

The reference goes one sequence at a time through transformers' own model, with plain formulas and no tensor of tokens.
Samples are stale, truncated, masked in the middle (an environment's turn), and in groups of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from reference_policy import reference_logprobs, reference_model, relative_error, stepped_gradient, stepped_gradients  # noqa: E402
from sample_groups import make_groups  # noqa: E402

from streamrl.config.algorithms import ObjectiveSettings, objective_settings, why_not_streaming  # noqa: E402
from streamrl.config.objective import (  # noqa: E402
    AdvantageKind,
    Algorithm,
    KlEstimator,
    KlPlace,
    LossNormalization,
    Objective,
    OffPolicy,
    Proximal,
    Surrogate,
)
from streamrl.learning import trainer as trainer_module  # noqa: E402
from streamrl.types import TrainingGroup, TrainingSample  # noqa: E402

pytestmark = pytest.mark.torch
StartTrainer = Callable[..., Any]
SIZES = [4, 3, 1, 5, 2]
OFF_POLICY = OffPolicy(proximal=Proximal.DECOUPLED, cap=1.5)
INTERPOLATED = OffPolicy(cap=1.5)
LIMIT = 24
CAPPED = 40


def varied_groups() -> list[TrainingGroup]:
    """Groups with stale, truncated and multi-turn samples; behaviour logprobs near the model's own."""
    groups = []
    for group in make_groups(0, SIZES, seed=3):
        members = []
        for index, sample in enumerate(group.samples):
            mask = bytearray(sample.loss_mask)
            if index == 1 and sample.trained_tokens > 6:
                first = mask.index(1)
                mask[first + 2 : first + 4] = b"\0\0"
            members.append(
                msgspec.structs.replace(
                    sample, loss_mask=bytes(mask), oldest_version=-2 if index % 2 else 0, truncated=index == 2
                )
            )
        groups.append(msgspec.structs.replace(group, samples=tuple(members)))
    return groups


class Reference:
    """The loss of a whole batch as the papers write it."""

    def __init__(
        self, path: str, settings: ObjectiveSettings, groups: list[TrainingGroup], off_policy: OffPolicy = OFF_POLICY
    ) -> None:
        self.off_policy = off_policy
        self.settings, self.groups = settings, groups
        self.model = reference_model(path).double()
        self.other = noisy_reference(path) if settings.has_reference else None
        self.head: Any = None

    def behavior(self, sample: TrainingSample) -> Any:
        pairs = zip(sample.behavior_logprobs, sample.loss_mask, strict=True)
        return torch.tensor([logprob for logprob, trained in pairs if trained], dtype=torch.float64)

    def penalties(self, sample: TrainingSample) -> Any:
        behavior = self.behavior(sample)
        if self.other is None or self.settings.kl_in is KlPlace.LOSS:
            return torch.zeros_like(behavior)
        with torch.no_grad():
            return self.settings.kl_coefficient * (behavior - reference_logprobs(self.other, sample))  # k1

    def reward(self, sample: TrainingSample) -> float:
        over = sample.trained_tokens - (CAPPED - self.settings.overlong_buffer)
        if not self.settings.overlong_buffer or over <= 0:
            return sample.reward
        return sample.reward - self.settings.overlong_penalty * min(1.0, over / self.settings.overlong_buffer)

    def values(self, sample: TrainingSample) -> Any:
        tokens = torch.tensor(list(sample.token_ids))
        hidden = self.model.model(tokens[None]).last_hidden_state[0, :-1]
        chosen = hidden[torch.tensor(list(sample.loss_mask[1:])) != 0]
        return chosen @ self.head[0] + self.head[1]

    def advantages(self) -> dict[Any, Any]:
        """Advantage of each trained token, by sample id."""
        kind, found = self.settings.advantages, {}
        for group in self.groups:
            totals = [self.reward(s) - float(self.penalties(s).sum()) for s in group.samples]
            size = len(totals)
            mean = sum(totals) / size
            deviation = (sum((t - mean) ** 2 for t in totals) / (size - 1)) ** 0.5 if size > 1 else 0.0
            for sample, total in zip(group.samples, totals, strict=True):
                penalties = self.penalties(sample)
                to_go = penalties.flip(0).cumsum(0).flip(0)
                if kind is AdvantageKind.GAE:
                    found[sample.id] = self.gae(sample, penalties)
                    continue
                if kind is AdvantageKind.GROUP_STD:
                    value = (total - mean) / (deviation + 1e-4) if deviation else 0.0
                elif kind is AdvantageKind.LEAVE_ONE_OUT:
                    value = total - (sum(totals) - total) / (size - 1) if size > 1 else 0.0
                elif kind in (AdvantageKind.GROUP_MEAN, AdvantageKind.GROUP_THEN_BATCH):
                    value = total - mean if size > 1 else 0.0
                else:
                    value = self.reward(sample)
                    found[sample.id] = value - to_go
                    continue
                found[sample.id] = torch.full_like(penalties, value)
        if kind in (AdvantageKind.BATCH, AdvantageKind.GROUP_THEN_BATCH, AdvantageKind.COHORT):
            every = torch.cat([v for v in found.values() if len(v)])
            deviation = every.std(correction=0)
            found = {key: (v - every.mean()) / (deviation + 1e-8) for key, v in found.items()}
        return found

    def gae(self, sample: TrainingSample, penalties: Any) -> Any:
        values = self.values(sample).detach()
        advantages, running = torch.zeros_like(values), 0.0
        for t in reversed(range(len(values))):
            last = t == len(values) - 1
            reward = -float(penalties[t]) + (self.reward(sample) if last else 0.0)
            after = 0.0 if last else float(values[t + 1])
            delta = reward + self.settings.discount * after - float(values[t])
            running = delta + self.settings.discount * self.settings.gae_lambda * running
            advantages[t] = running
        return advantages

    def loss_of(self, sample: TrainingSample, advantages: Any) -> Any:
        s, logprobs, behavior = self.settings, reference_logprobs(self.model, sample), self.behavior(sample)
        stale = sample.oldest_version < 0
        proximal = logprobs.detach()
        if stale and self.off_policy.proximal is Proximal.INTERPOLATED:
            proximal = behavior / -sample.oldest_version + (1 + 1 / sample.oldest_version) * proximal
        weight = (proximal - behavior).exp().clamp(max=self.off_policy.cap) if stale else torch.ones_like(behavior)
        ratio = (logprobs - proximal).exp()
        if s.surrogate is Surrogate.TOKEN_WEIGHT:
            loss = -advantages * logprobs
        else:  # at r = 1 no clip is active, and a sequence's ratio is the geometric mean of its tokens'
            ratio = ratio.log().mean().exp().expand(len(ratio)) if s.surrogate is Surrogate.SEQUENCE_CLIP else ratio
            clipped = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
            loss = (
                -torch.minimum(advantages * ratio, advantages * clipped)
                if s.surrogate is Surrogate.TOKEN_CLIP
                else -advantages * ratio
            )
        if self.other is not None and s.kl_in is KlPlace.LOSS:
            apart = reference_logprobs(self.other, sample).detach() - logprobs
            loss = loss + s.kl_coefficient * (
                apart.exp() - 1 - apart if s.kl_estimator is KlEstimator.K3 else apart**2 / 2
            )
        if s.entropy_coefficient:
            loss = loss - s.entropy_coefficient * self.entropy(sample)
        loss = weight * loss
        if s.has_critic:
            values = self.values(sample)
            returns = advantages + values.detach()
            loss = loss + s.value_coefficient * 0.5 * (values - returns) ** 2
        return loss

    def entropy(self, sample: TrainingSample) -> Any:
        tokens = torch.tensor(list(sample.token_ids))
        logprobs = self.model(tokens[None]).logits[0, :-1].log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)[torch.tensor(list(sample.loss_mask[1:])) != 0]

    def gradient(self) -> dict[str, Any]:
        s, advantages = self.settings, self.advantages()
        seen = [x for g in self.groups for x in g.samples if s.train_truncated or not x.truncated]
        denominator = {
            LossNormalization.TOKEN_MEAN: sum(x.trained_tokens for x in seen),
            LossNormalization.CONSTANT: len(seen) * CAPPED,
        }.get(s.loss_normalization, len(seen))
        for sample in seen:
            loss = self.loss_of(sample, advantages[sample.id]).sum()
            if s.loss_normalization is LossNormalization.SEQUENCE_MEAN:
                loss = loss / sample.trained_tokens
            (loss / denominator).backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def noisy_reference(path: str) -> Any:
    """A reference model that is not the policy: at equality every KL gradient is 0."""
    model = reference_model(path).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def started(
    start_trainer: StartTrainer,
    tiny_model: str,
    objective: Objective,
    off_policy: OffPolicy = OFF_POLICY,
    **options: Any,
) -> Any:
    settings = objective_settings(objective)
    trainer = start_trainer(
        objective=settings,
        off_policy=off_policy,
        max_tokens=CAPPED,
        max_grad_norm=1e9,
        streaming=not why_not_streaming(settings, options.get("updates_per_batch", 1)),
        **options,
    )
    if trainer._reference is not None:
        noisy = dict(noisy_reference(tiny_model).named_parameters())
        with torch.no_grad():
            for name, parameter in trainer._reference.trained_parameters().items():
                parameter.copy_(noisy[name])
    return trainer


CASES = {algorithm.value: Objective(algorithm=algorithm) for algorithm in Algorithm} | {
    "grpo with kl and entropy": Objective(kl_coefficient=0.1, entropy_coefficient=0.02),
    "grpo, sequence mean": Objective(loss_normalization=LossNormalization.SEQUENCE_MEAN),
    "dapo, overlong shaping and filtering": Objective(
        algorithm=Algorithm.DAPO, overlong_buffer=20, overlong_penalty=0.7, train_truncated=False
    ),
    "rloo with kl": Objective(algorithm=Algorithm.RLOO, kl_coefficient=0.1),
    "reinforce++ with kl": Objective(algorithm=Algorithm.REINFORCE_PLUS_PLUS, kl_coefficient=0.1),
    "reinforce++-baseline with kl": Objective(algorithm=Algorithm.REINFORCE_PLUS_PLUS_BASELINE, kl_coefficient=0.1),
    "ppo with kl": Objective(algorithm=Algorithm.PPO, kl_coefficient=0.1, discount=0.99),
}


@pytest.mark.parametrize("name", CASES)
def test_the_streamed_gradient_is_that_of_the_whole_batch(
    start_trainer: StartTrainer, tiny_model: str, name: str
) -> None:
    groups = varied_groups()
    trainer = started(start_trainer, tiny_model, CASES[name])
    reference = Reference(tiny_model, objective_settings(CASES[name]), groups)
    if trainer._critic is not None:
        linear = trainer._critic._linear
        torch.nn.init.normal_(linear.weight, std=0.3, generator=torch.Generator().manual_seed(1))
        reference.head = (linear.weight.detach()[0].double(), linear.bias.detach().double())
    assert relative_error(stepped_gradient(trainer, groups), reference.gradient()) < 2e-5


def test_a_batch_that_is_begun_again_begins_with_no_gradient_of_the_critic(
    start_trainer: StartTrainer, tiny_model: str
) -> None:
    trainer = started(start_trainer, tiny_model, CASES["ppo with kl"], micro_batch_tokens=32)
    for group in varied_groups():
        trainer.train_group(group)
    critic = list(trainer._critic._linear.parameters())
    assert all(parameter.grad.any() for parameter in critic), "what the controller that died had handed in"
    trainer.begin_again()
    assert not any(parameter.grad.any() for parameter in critic)


def test_the_default_correction_clips_stale_tokens_and_stays_exact(
    start_trainer: StartTrainer, tiny_model: str
) -> None:
    groups = varied_groups()
    trainer = started(start_trainer, tiny_model, Objective(), INTERPOLATED)
    reference = Reference(tiny_model, objective_settings(Objective()), groups, INTERPOLATED)
    gradient = stepped_gradient(trainer, groups)
    assert relative_error(gradient, reference.gradient()) < 2e-5
    unclipped = Reference(
        tiny_model, objective_settings(Objective(clip_low=0.99, clip_high=99.0)), groups, INTERPOLATED
    )
    assert relative_error(gradient, unclipped.gradient()) > 1e-3, "nothing was clipped"


def test_a_wrong_normaliser_is_seen(
    start_trainer: StartTrainer, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug of the published stream trainer: a denominator that is not what the batch really held."""
    groups = varied_groups()
    right = trainer_module.loss_denominator

    def halved(*arguments: Any, **counts: Any) -> float:
        return 0.5 * right(*arguments, **counts)

    monkeypatch.setattr(trainer_module, "loss_denominator", halved)
    trainer = started(start_trainer, tiny_model, Objective())
    reference = Reference(tiny_model, objective_settings(Objective()), groups)
    assert relative_error(stepped_gradient(trainer, groups), reference.gradient()) > 0.5


def test_long_sequences_in_chunks_give_the_same_gradient(
    start_trainer: StartTrainer, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few logits at once every sequence is cut; GSPO needs whole ones all the same."""
    from streamrl.learning import gradients

    monkeypatch.setattr(gradients, "LOGITS_IN_A_CHUNK", 32 * 5)
    objective = Objective(algorithm=Algorithm.GSPO, entropy_coefficient=0.02)
    trainer = started(start_trainer, tiny_model, objective)
    reference = Reference(tiny_model, objective_settings(objective), varied_groups())
    assert relative_error(stepped_gradient(trainer, varied_groups()), reference.gradient()) < 2e-5


def test_a_large_card_makes_more_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.learning import gradients

    for total_memory, expected in ((80 << 30, 80 << 22), (2 << 30, 1 << 24)):
        monkeypatch.setattr(
            "torch.cuda.get_device_properties", lambda _, t=total_memory: SimpleNamespace(total_memory=t)
        )
        assert gradients.logits_at_once(torch.device("cuda", 0)) == expected
    assert gradients.logits_at_once(torch.device("cpu")) == 1 << 24


def test_the_cohort_compares_with_earlier_batches(start_trainer: StartTrainer, tiny_model: str) -> None:
    objective = Objective(algorithm=Algorithm.REINFORCE_PLUS_PLUS, advantages=AdvantageKind.COHORT, cohort_batches=2)
    trainer = started(start_trainer, tiny_model, objective, learning_rate=0.0)
    first, second = varied_groups(), varied_groups()
    lower = [
        msgspec.structs.replace(
            group, batch_id=1, samples=tuple(msgspec.structs.replace(s, reward=s.reward - 5.0) for s in group.samples)
        )
        for group in second
    ]
    before = stepped_gradient(trainer, first)
    after = stepped_gradient(trainer, lower)
    # Within its own batch the shift by 5 changes nothing; compared with the cohort every sample got worse.
    assert relative_error(after, before) > 0.5
    assert len(trainer._cohort) == 1


@pytest.mark.parametrize("updates", [2, 3])
@pytest.mark.parametrize("normalization", list(LossNormalization))
def test_updates_on_shares_of_a_batch_add_up_to_the_whole(
    start_trainer: StartTrainer, tiny_model: str, normalization: LossNormalization, updates: int
) -> None:
    """19 samples divide by neither. While no weight moves, the mean of the updates' gradients is the batch's."""
    groups, objective = make_groups(0, [4, 3, 5, 2, 4, 1], seed=4), Objective(loss_normalization=normalization)
    assert sum(sample.trained_tokens for group in groups for sample in group.samples) % updates
    [whole] = stepped_gradients(started(start_trainer, tiny_model, objective, learning_rate=0.0), groups)
    trainer = started(start_trainer, tiny_model, objective, learning_rate=0.0, updates_per_batch=updates)
    shares = stepped_gradients(trainer, groups)
    assert len(shares) == trainer._optimizer.steps == updates
    mean = {name: sum(share[name] for share in shares) / updates for name in whole}
    assert relative_error(mean, whole) < 2e-6

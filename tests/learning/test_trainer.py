"""The trainer with one rank: exact gradients, exact policy, exact weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from reference_policy import reference_logprobs, reference_model, relative_error, stepped_gradient  # noqa: E402
from sample_groups import close_of, make_groups, master_values, published_bits, train_batch  # noqa: E402

from streamrl.base.errors import ModelRefused, StreamRLError  # noqa: E402
from streamrl.base.messages import CloseBatch, SaveCheckpoint  # noqa: E402
from streamrl.base.types import SamplingSettings, TrainingGroup, float_array  # noqa: E402
from streamrl.recipe.objective import OffPolicy, Proximal, RatioLevel  # noqa: E402
from streamrl.recipe.sections import Lora  # noqa: E402
from streamrl.weights.codec.state_hash import hash_range  # noqa: E402

pytestmark = pytest.mark.torch
SIZES = [4, 3, 1, 5, 2]
StartTrainer = Callable[..., Any]


def test_arrival_order_and_streaming_change_no_gradient(start_trainer: StartTrainer) -> None:
    groups = make_groups(0, SIZES)
    whole = stepped_gradient(start_trainer(streaming=False, max_grad_norm=1e9), groups)
    for order in range(3):
        shuffled = random.Random(order).sample(groups, len(groups))
        trainer = start_trainer(max_grad_norm=1e9, micro_batch_tokens=64)
        assert relative_error(stepped_gradient(trainer, shuffled), whole) < 5e-6


@pytest.mark.long
def test_training_borrows_threads_of_freed_engines(start_trainer: StartTrainer) -> None:
    """Training uses the threads of freed engines, and returns them."""
    groups = make_groups(0, SIZES)
    trainer = start_trainer(threads=1, freed_threads=(2, 3))
    seen = []
    for version, freed in enumerate((0, 1, 2, 0)):
        trainer.engines_freed(freed)
        for group in groups:
            trainer.train_group(msgspec.structs.replace(group, batch_id=version))
        seen.append(torch.get_num_threads())
        trainer.close_batch(msgspec.structs.replace(close_of(groups, version + 1), batch_id=version))
        seen.append(torch.get_num_threads())
        trainer.acknowledge(version + 1)
    assert seen == [1, 1, 2, 2, 3, 3, 1, 1]
    trainer = start_trainer(threads=1)  # as of somebody who says nothing of freed engines
    trainer.engines_freed(1)
    assert torch.get_num_threads() == 1


def with_behavior(groups: list[TrainingGroup], model: Any, temperature: float) -> list[TrainingGroup]:
    """The same groups as if this model had sampled them."""
    changed = []
    for group in groups:
        samples = []
        for sample in group.samples:
            values = [0.0] * (len(sample.token_ids) - sample.trained_tokens)
            values += reference_logprobs(model, sample, temperature).tolist()
            samples.append(msgspec.structs.replace(sample, behavior_logprobs=float_array(values)))
        changed.append(msgspec.structs.replace(group, samples=tuple(samples)))
    return changed


@pytest.mark.parametrize(("temperature", "own"), [(1.0, None), (0.7, None), (1.0, 0.7)])
def test_learning_rate_zero_ratio_is_one(
    start_trainer: StartTrainer, tiny_model: str, temperature: float, own: float | None
) -> None:
    """The trainer's policy is the published one: with unrounded weights the ratio would not be 1. ``own``: of every
    other group, whose temperature was changed in between."""
    with torch.no_grad():
        made, model = make_groups(0, SIZES), reference_model(tiny_model)
        groups = [*with_behavior(made[::2], model, own or temperature), *with_behavior(made[1::2], model, temperature)]
    for place, group in enumerate(groups[: len(made[::2])]):
        samples = tuple(msgspec.structs.replace(sample, temperature=own) for sample in group.samples)
        groups[place] = msgspec.structs.replace(group, samples=samples)
    trainer = start_trainer(learning_rate=0.0, sampling=SamplingSettings(temperature=temperature))
    for step in range(3):
        version = msgspec.structs.replace(close_of(groups, step + 1), batch_id=step)
        for group in groups:
            trainer.train_group(msgspec.structs.replace(group, batch_id=step))
        metrics = trainer.close_batch(version).metrics
        trainer.acknowledge(step + 1)
        assert abs(metrics["policy/is_weight_mean"] - 1) < 1e-5
        assert metrics["policy/logprob_diff_abs_p99"] < 2e-5
        assert metrics["policy/ess"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["policy/kl_rollout"] == pytest.approx(0.0, abs=1e-7)
        assert metrics["weights/changed_ratio"] in (0.0, 1.0) if step == 0 else metrics["weights/changed_ratio"] == 0.0


def test_top_p_ratio_is_one_against_the_engines_arithmetic(start_trainer: StartTrainer, tiny_model: str) -> None:
    """Behaviour logprobs as vLLM computes them at temperature 0.7, top-p 0.9, of tokens sampled that way."""
    model, temperature, top_p = reference_model(tiny_model), 0.7, 0.9
    torch.manual_seed(1)
    groups = []
    for group in make_groups(0, SIZES):
        samples = []
        for sample in group.samples:
            prompt = len(sample.token_ids) - sample.trained_tokens
            tokens, logprobs = torch.tensor(list(sample.token_ids[:prompt])), [0.0] * prompt
            with torch.no_grad():
                for _ in range(sample.trained_tokens):
                    logits = model(tokens[None]).logits[0, -1] / temperature
                    ascending, order = logits.sort()
                    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
                    distribution = logits.index_fill(0, order[removed], -torch.inf).log_softmax(-1)
                    token = distribution.exp().multinomial(1)
                    logprobs.append(float(distribution[token]))
                    tokens = torch.cat([tokens, token])
            token_ids = sample.token_ids[:0]
            token_ids.extend(tokens.tolist())
            samples.append(
                msgspec.structs.replace(sample, token_ids=token_ids, behavior_logprobs=float_array(logprobs))
            )
        groups.append(msgspec.structs.replace(group, samples=tuple(samples)))
    trainer = start_trainer(learning_rate=0.0, sampling=SamplingSettings(temperature=temperature, top_p=top_p))
    metrics = train_batch(trainer, groups, 1).metrics
    assert abs(metrics["policy/is_weight_mean"] - 1) < 1e-5
    assert metrics["policy/logprob_diff_abs_p99"] < 2e-5


def test_published_bits_are_the_forward_and_the_hash(start_trainer: StartTrainer) -> None:
    trainer = start_trainer()
    groups = make_groups(0, SIZES)
    report = train_batch(trainer, groups, 1)
    bits = published_bits(trainer)
    for name, parameter in trainer._updates.policy.trained_parameters().items():
        forward = parameter.detach()
        assert torch.equal(forward, forward.bfloat16().float())
        assert np.array_equal(forward.bfloat16().view(torch.int16).numpy().view(np.uint16).ravel(), bits[name])
    assert report.state_hash == sum(hash_range(name, 0, values) for name, values in bits.items()) % 2**64
    assert report.metrics["optim/grad_norm"] > 0
    masters = torch.from_numpy(np.concatenate(list(master_values(trainer).values())))
    assert not torch.equal(masters, masters.bfloat16().float()), "masters keep more than what is published"


def test_batch_without_signal_moves_nothing(start_trainer: StartTrainer) -> None:
    trainer = start_trainer()
    before = master_values(trainer)["model.norm.weight"].copy()
    groups = make_groups(0, [3, 2], rewards=[[1.0] * 3, [0.0] * 2])
    metrics = train_batch(trainer, groups, 1).metrics
    assert metrics["optim/groups_without_signal"] == 2
    assert metrics["optim/skipped_steps_total"] == 1
    assert "policy/entropy" not in metrics
    assert np.array_equal(before, master_values(trainer)["model.norm.weight"])


def test_off_policy_tokens_are_clipped(start_trainer: StartTrainer) -> None:
    groups = make_groups(0, SIZES, version=-1)
    trainer = start_trainer(off_policy=OffPolicy(proximal=Proximal.BEHAVIOR, truncate=RatioLevel.NONE))
    assert train_batch(trainer, groups, 1).metrics["policy/clip_ratio"] > 0.1


def test_the_correction_replaces_the_clip(start_trainer: StartTrainer) -> None:
    groups = make_groups(0, SIZES, version=-1)
    trainer = start_trainer(off_policy=OffPolicy(proximal=Proximal.DECOUPLED, mask=RatioLevel.TOKEN))
    metrics = train_batch(trainer, groups, 1).metrics
    assert metrics["policy/clip_ratio"] == 0
    assert 0 < metrics["policy/masked_ratio"] < 1
    assert "policy/mismatch_abs_mean" not in metrics, "every token is stale: nothing measures the mismatch"


def test_errors_name_batch_and_samples(start_trainer: StartTrainer) -> None:
    trainer = start_trainer()
    groups = make_groups(7, SIZES, version=-1)
    bad = msgspec.structs.replace(
        groups[0].samples[0], behavior_logprobs=float_array([float("nan")] * len(groups[0].samples[0].token_ids))
    )
    trainer.train_group(msgspec.structs.replace(groups[0], samples=(bad, *groups[0].samples[1:])))
    with pytest.raises(StreamRLError, match=r"loss of batch 7 is not finite.*0\.0\.0"):
        trainer.train_pending()
    trainer = start_trainer()
    trainer.train_group(groups[0])
    with pytest.raises(StreamRLError, match="batch 7 is open"):
        trainer.train_group(msgspec.structs.replace(groups[1], batch_id=8))
    with pytest.raises(StreamRLError, match=r"5 groups.*received 1, 4"):
        trainer.close_batch(close_of(groups, 1))
    with pytest.raises(StreamRLError, match="as version 5"):
        trainer.close_batch(msgspec.structs.replace(close_of(groups, 5)))


def test_infinite_gradient_is_an_error(start_trainer: StartTrainer) -> None:
    trainer = start_trainer()
    groups = make_groups(3, [2], rewards=[[0.0, 1.0]])
    trainer.train_group(groups[0])
    trainer.train_pending()
    trainer._updates.weights.gradient_L[5] = float("inf")
    with pytest.raises(StreamRLError, match=r"gradient norm of batch 3 is inf.*0\.0\.0"):
        trainer.close_batch(close_of(groups, 1))


def test_anchor_of_the_initial_weights_then_a_delta(start_trainer: StartTrainer) -> None:
    trainer = start_trainer()
    anchor = trainer.publish_anchor(0)
    assert anchor.source.changed_elements == anchor.source.total_elements
    trainer.acknowledge(0)
    groups = make_groups(0, SIZES)
    report = train_batch(trainer, groups, 1)
    assert report.base_version == 0
    assert 0 < report.source.changed_elements <= report.source.total_elements
    assert trainer.publish_anchor(1).state_hash == report.state_hash
    with pytest.raises(StreamRLError, match="holds 1"):
        trainer.publish_anchor(0)


def test_warm_up_and_clipping(start_trainer: StartTrainer) -> None:
    trainer = start_trainer(warmup_steps=4, learning_rate=8e-3, max_grad_norm=1e-3)
    rates = []
    for step in range(5):
        groups = make_groups(step, SIZES, seed=step, version=step)
        rates.append(train_batch(trainer, groups, step + 1).metrics["optim/lr"])
        assert float(trainer._updates.weights.gradient_L.norm()) == 0.0
        trainer.acknowledge(step + 1)
    assert rates == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3])


def test_batches_that_are_closed_at_once_are_as_many_steps(start_trainer: StartTrainer) -> None:
    groups = make_groups(0, SIZES)

    def stepped(batches: int, times: int = 1) -> tuple[int, int]:
        trainer = start_trainer()
        step = trainer._updates.optimizer.step
        trainer._updates.optimizer.step = lambda *along: [step(*along) for _ in range(times)]
        report = train_batch(trainer, groups, 1, batches)
        return report.state_hash, trainer._updates.optimizer.steps

    three = stepped(1, times=3)
    assert stepped(3) == three
    assert stepped(1)[1] == 1 and three[1] == 3


def run_steps(trainer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        groups = make_groups(step, SIZES, seed=step, version=step)
        train_batch(trainer, groups, step + 1)
        trainer.acknowledge(step + 1)


def test_checkpoint_round_trip(start_trainer: StartTrainer, tmp_path: Path) -> None:
    trainer = start_trainer()
    run_steps(trainer, 0, 2)
    directory = tmp_path / "checkpoints" / "step-2"
    saved = trainer.save_checkpoint(SaveCheckpoint(directory=str(directory), policy_version=2))
    assert (saved.policy_version, saved.directory) == (2, str(directory))
    assert sorted(path.name for path in directory.parent.iterdir()) == ["step-2"], "no partial directory stays"
    bits = published_bits(trainer)
    trainer.save_checkpoint(SaveCheckpoint(directory=str(directory), policy_version=2))
    run_steps(trainer, 2, 4)
    uninterrupted = master_values(trainer)

    resumed = start_trainer(resume_from=str(directory))
    assert resumed.policy_version == 2
    assert all(np.array_equal(bits[name], values) for name, values in published_bits(resumed).items())
    run_steps(resumed, 2, 4)
    for name, values in master_values(resumed).items():
        assert np.array_equal(values, uninterrupted[name]), f"{name}: optimizer state was not restored"


def test_hugging_face_directory(start_trainer: StartTrainer, tmp_path: Path, tiny_model: str) -> None:
    from transformers import AutoModelForCausalLM

    from streamrl.pretrained.tokenizer import load_tokenizer

    trainer = start_trainer()
    run_steps(trainer, 0, 1)
    trainer.save_checkpoint(SaveCheckpoint(directory=str(tmp_path / "c"), policy_version=1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c" / "hf")
    assert model.dtype is torch.bfloat16
    bits = published_bits(trainer)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == bits.keys()
    for name, parameter in loaded.items():
        assert np.array_equal(parameter.detach().view(torch.int16).numpy().view(np.uint16).ravel(), bits[name])
    assert load_tokenizer(tmp_path / "c" / "hf").digest == load_tokenizer(tiny_model).digest
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("option", "refusal"), [("resume_from", "is not a checkpoint"), ("model_path", "has no config.json")]
)
def test_an_empty_directory_is_refused(start_trainer: StartTrainer, tmp_path: Path, option: str, refusal: str) -> None:
    with pytest.raises(StreamRLError, match=refusal):
        start_trainer(**{option: str(tmp_path)})


def test_empty_close_is_a_version(start_trainer: StartTrainer) -> None:
    trainer = start_trainer()
    report = trainer.close_batch(CloseBatch(batch_id=0, policy_version=1, groups=0, samples=0, trained_tokens=0))
    assert report.policy_version == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": Lora(rank=4, targets=("lm_head",))}, "'lm_head' shares its weight"),
        ({"resume_from": "{folder}"}, "is not a checkpoint of this version"),
        ({"model_path": "{folder}"}, "has no config.json"),
    ],
)
def test_what_every_start_would_meet_again_is_a_refusal(
    start_trainer: StartTrainer, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """The supervisor does not start the run again for one."""
    changes = {
        key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in changes.items()
    }
    with pytest.raises(ModelRefused, match=said):
        start_trainer(**changes)


def test_what_may_pass_is_no_refusal(start_trainer: StartTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> None:
        raise torch.OutOfMemoryError("another process holds the memory")

    monkeypatch.setattr("streamrl.learning.model.loading._read_parameters", busy)
    with pytest.raises(StreamRLError, match="another process holds") as refusal:
        start_trainer()
    assert not isinstance(refusal.value, ModelRefused)

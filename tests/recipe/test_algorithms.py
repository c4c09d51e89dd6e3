"""What an algorithm's name resolves to, and when that can stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders.files import ROOT

from streamrl.recipe.objective import KlEstimator, Objective, ObjectiveSettings, objective_settings, why_not_streaming
from streamrl.recipe.objectives.catalog import ALL_ADVANTAGES, METHODS
from streamrl.recipe.objectives.distillation import Divergence
from streamrl.recipe.objectives.grpo import GroupStd
from streamrl.recipe.objectives.method import KlPlace
from streamrl.recipe.objectives.ppo import ValueModel
from streamrl.recipe.objectives.sapo import SoftGate
from streamrl.recipe.objectives.spo import TrackedBaseline

DOCUMENT = ROOT / "docs" / "training.md"


def resolved(**fields: Any) -> ObjectiveSettings:
    return objective_settings(Objective(**fields))


def test_every_field_of_the_recipe_overrides_the_method() -> None:
    """Another value than any method has, for every field: none may be lost on the way."""
    fields: dict[str, Any] = {
        "function": "my.py:loss",
        "options": {"bound": 0.3},
        "surrogate": "token_weight",
        "advantages": "cohort",
        "loss_normalization": "sequence_sum",
        "clip_low": 0.11,
        "clip_high": 0.12,
        "dual_clip": 3.0,
        "reference": "folder",
        "distillation_coefficient": 0.24,
        "divergence": Divergence.EXACT,
        "divergence_beta": 0.25,
        "kl_coefficient": 0.13,
        "kl_estimator": KlEstimator.K2,
        "kl_in": KlPlace.REWARD,
        "entropy_coefficient": 0.14,
        "overlong_buffer": 15,
        "overlong_penalty": 0.16,
        "train_truncated": False,
        "cohort_batches": 17,
        "tracked": TrackedBaseline(prior=2.0),
        "discount": 0.18,
        "gae_lambda": 0.19,
        "value_coefficient": 0.21,
        "value_clip": 0.22,
        "value_learning_rate": 0.23,
        "value_model": ValueModel.OWN,
        "soft_gate": SoftGate(temperature_positive=0.25),
    }
    assert {*fields, "algorithm"} == set(ObjectiveSettings.__struct_fields__)
    for algorithm in METHODS:
        assert msgspec.structs.asdict(resolved(algorithm=algorithm, **fields)) == fields | {"algorithm": algorithm}


@pytest.mark.parametrize("algorithm", METHODS)
def test_the_document_lists_each_method_as_it_is(algorithm: str) -> None:
    rows = [
        line.split("|")[1:-1] for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| `{algorithm}` |")
    ]
    ((_, surrogate, advantages, normalization, clip, paper),) = rows
    method = METHODS[algorithm]
    written = [cell.strip().strip("`") for cell in (surrogate, advantages, normalization)]
    assert written == [method.surrogate.name, method.advantages.name, method.loss_normalization]
    if not method.surrogate.clips:
        assert clip.strip() == "none"
    else:
        low, high = clip.split("/")
        # A weight of at least 0 has no lower bound.
        assert (1.0 if low.strip() == "none" else float(low)) == method.clip_low
        assert float(high) == method.clip_high
    assert ("dynamic_sampling" in paper) == method.dynamic_sampling


@pytest.mark.parametrize("algorithm", METHODS)
def test_the_omitted_kl_estimator_has_the_gradient_of_the_kl(algorithm: str) -> None:
    """The KL estimator that a recipe leaves out has the gradient of the KL."""
    assert resolved(algorithm=algorithm, kl_in=KlPlace.LOSS).kl_estimator is KlEstimator.K2
    assert resolved(algorithm=algorithm, kl_in=KlPlace.REWARD).kl_estimator is KlEstimator.K1
    methods_with_kl_in_reward = {"rloo", "reinforce_plus_plus", "ppo"}
    assert (resolved(algorithm=algorithm).kl_estimator is KlEstimator.K1) is (algorithm in methods_with_kl_in_reward)


def test_what_needs_other_models_or_trains_without_signal() -> None:
    assert resolved(algorithm="ppo").has_critic
    assert not resolved().has_critic
    assert resolved(algorithm="ppo", value_model=ValueModel.OWN).has_value_model
    assert not resolved(algorithm="ppo").has_value_model
    assert not resolved(algorithm="rloo").has_reference
    assert resolved(kl_coefficient=0.01).has_reference
    assert resolved(algorithm="distillation", reference="folder").has_reference
    assert not resolved(algorithm="distillation").has_reference, "a served teacher"
    assert not resolved(reference="folder").has_reference
    # A group of equal rewards has a gradient where siblings are not compared, and through KL and entropy.
    assert not resolved().trains_without_signal
    for fields in (
        {"algorithm": "reinforce_plus_plus"},
        {"algorithm": "ppo"},
        {"kl_coefficient": 0.01},
        {"entropy_coefficient": -0.01},
        {"distillation_coefficient": 0.01},
    ):
        assert resolved(**fields).trains_without_signal


@pytest.mark.parametrize("algorithm", METHODS)
def test_what_compares_with_the_whole_batch_does_not_stream(algorithm: str) -> None:
    whole = {"reinforce_plus_plus": "batch", "reinforce_plus_plus_baseline": "group_then_batch", "ppo": "gae"}
    reason = why_not_streaming(resolved(algorithm=algorithm), 1)
    if algorithm in whole:
        assert reason.startswith(f'objective.advantages = "{whole[algorithm]}" ')
    else:
        assert reason == ""
    assert why_not_streaming(resolved(algorithm=algorithm), 2).startswith("training.updates_per_batch = 2 ")
    assert why_not_streaming(resolved(algorithm="grpo"), 1, 2).startswith("training.epochs_per_batch = 2 ")


def test_the_part_with_its_own_keys_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several parts, the one with keys of its own is filled by the recipe."""

    class Bounded(GroupStd, frozen=True):
        """as group_std, bounded"""

        name = "bounded"
        bound: float = 4.0

    class WithBounded(ObjectiveSettings, frozen=True):
        bounded: Bounded = Bounded()

    monkeypatch.setitem(ALL_ADVANTAGES, "bounded", Bounded())
    settings = WithBounded(advantages="bounded", bounded=Bounded(bound=2.5))
    assert settings.estimator == Bounded(bound=2.5) and settings.estimator.compares_siblings
    assert msgspec.structs.replace(settings, advantages="group_std").estimator == GroupStd()


def test_where_group_sizes_vary_advantages_do_not_depend_on_them() -> None:
    objectives = {algorithm: Objective(algorithm=algorithm) for algorithm in METHODS}
    varied = {algorithm: objective_settings(one, sizes_vary=True) for algorithm, one in objectives.items()}
    changed = {algorithm for algorithm, one in objectives.items() if varied[algorithm] != objective_settings(one)}
    assert changed == {name for name, method in METHODS.items() if method.advantages.varies_with_size}
    assert changed >= {"grpo", "dr_grpo", "dapo", "gspo", "cispo"}
    assert {varied[algorithm].advantages for algorithm in changed} == {"leave_one_out"}
    asked = Objective(advantages="group_std")
    assert objective_settings(asked, sizes_vary=True).advantages == "group_std"

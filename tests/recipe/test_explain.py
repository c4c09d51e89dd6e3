"""Every key of a recipe has a text at its field, and the names of other systems are answered."""

from __future__ import annotations

import pytest
from builders.files import ROOT
from msgspec import inspect

from streamrl.base.errors import RecipeError
from streamrl.recipe.dialects.foreign_keys import foreign_answer
from streamrl.recipe.field_types import bare, keys_of, paths_in_view, written_path
from streamrl.recipe.rules.explain import explain, reference
from streamrl.recipe.sections import Recipe

REFERENCE = ROOT / "docs" / "recipe.md"
SECTIONS = {name: section.struct for name, section in keys_of(Recipe).items()}
KEYS = [written_path(Recipe, path) for path in paths_in_view(Recipe, with_advanced=True)]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_text_or_a_choice_that_has_one(section: str) -> None:
    struct = SECTIONS[section]
    assert struct is not None
    for name, key in keys_of(struct).items():
        kinds = key.kind.types if isinstance(key.kind, inspect.UnionType) else (key.kind,)
        assert key.text or any(isinstance(bare(kind), inspect.EnumType) for kind in kinds), name


def test_every_key_is_explained_where_it_is_written() -> None:
    for key in KEYS:
        assert explain(key)[0].startswith(f"{key}: "), key
    assert explain("engines.advanced")[0] == "[engines.advanced]"
    assert [line.partition(":")[0] for line in explain("restarts") if line.endswith("default 3")] == [
        "run.advanced.restarts",
        "judge.advanced.restarts",
        "teacher.advanced.restarts",
        "engines.advanced.restarts",
    ]
    assert explain("prompts.train.sums.share")[0] == "prompts.train.sums.share: a number > 0; default 1.0"
    assert explain("share")[0] == "prompts.train.NAME.share: a number > 0; default 1.0"
    assert "the loss, or the reward of each token" in "\n".join(explain("objective.advanced.kl_in"))


def test_the_reference_is_of_now() -> None:
    assert REFERENCE.read_text() == reference(), "run: streamrl explain --markdown > docs/recipe.md"


def test_what_is_not_there_is_answered_with_what_is() -> None:
    with pytest.raises(RecipeError, match=r'did you mean "max_staleness"\? Keys of \[rollout\]: '):
        explain("rollout.max_stale")
    for name in ("nonsense", "0", "advanced"):
        with pytest.raises(RecipeError, match=rf"{name}: unknown section\. Sections: "):
            explain(name)


def test_explain_answers_them_with_the_key_that_is_here() -> None:
    assert explain("num_generations")[0] == "num_generations: that is TRL's num_generations: rollout.group_size here"
    assert any(line.startswith("training.learning_rate: a number") for line in explain("lr"))
    assert explain("critic.optim.lr")[0].endswith(
        "that is verl's critic.optim.lr: objective.advanced.value_learning_rate here"
    )
    assert explain("vllm_model_impl") == [f"vllm_model_impl: {foreign_answer('vllm_model_impl')}"]
    assert explain("loss_type=dr_grpo")[0].endswith('TRL\'s loss_type: objective.loss_normalization = "constant" here')
    assert any(line.startswith("training.ranks: ") for line in explain("trainer.n_gpus_per_node"))
    assert explain("objective.advanced.kl_estimator=low_var_kl")[0].endswith(
        'write objective.advanced.kl_estimator = "k3"'
    )
    assert explain("rollout.group_size=4") == explain("rollout.group_size")

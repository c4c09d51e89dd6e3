"""Models that score the policy's tokens must have the same tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.files import SORT_MODEL
from builders.recipe import small_recipe
from builders.teacher_address import Address
from msgspec.structs import replace

from streamrl.prepare import other_models
from streamrl.prepare.other_models import address_problems, reference_problems, teacher_problems
from streamrl.recipe.objective import Objective
from streamrl.recipe.objectives.teacher import Teacher, TeacherAddress


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Address]:
    """An address that answers."""
    served = Address(tmp_path / "log")
    yield served
    served.kill()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the demo's model."""
    return Path(shutil.copytree(SORT_MODEL, tmp_path / "other"))


def problems(reference: Path) -> list[str]:
    recipe = small_recipe(str(SORT_MODEL), objective=Objective(kl_coefficient=0.1, reference=str(reference)))
    return list(reference_problems(recipe))


def test_the_first_token_that_differs_is_named(other: Path) -> None:
    """A reference with another vocabulary is refused with its first token that differs, also at the end."""
    assert problems(other) == []
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": swapped(tokenizer["model"], texts, 5, 7)}))
    (problem,) = problems(other)
    assert f"token 5 is {texts[7]!r} there, and {texts[5]!r} in the policy's" in problem
    last = max(texts)
    tokenizer["model"]["vocab"]["further"] = last + 1
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (problem,) = problems(other)
    assert f"token {last + 1} is 'further' there, and None" in problem


def swapped(model: dict[str, object], texts: dict[int, str], one: int, two: int) -> dict[str, object]:
    ids = {text: token_id for token_id, text in texts.items()} | {texts[one]: two, texts[two]: one}
    return model | {"vocab": ids}


def test_a_reference_needs_logits_of_every_token(other: Path) -> None:
    """One with fewer logits than the policy is refused; one that is no model, with the reason."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    config = json.loads((other / "config.json").read_text())
    tokens = config["vocab_size"]
    tensors = load_file(other / "model.safetensors")
    fewer = {name: tensor[: tokens - 1] if tensor.shape[0] == tokens else tensor for name, tensor in tensors.items()}
    assert any(not torch.equal(fewer[name], tensor) for name, tensor in tensors.items())
    save_file(
        {name: tensor.contiguous() for name, tensor in fewer.items()}, other / "model.safetensors", {"format": "pt"}
    )
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": tokens - 1}))
    (problem,) = problems(other)
    assert f"has logits of {tokens - 1} tokens, and the policy samples from {tokens}" in problem
    assert "is not a directory" in problems(other / "missing")[0]
    (other / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in problems(other)[0]


def test_the_tokenizer_of_each_served_teacher_is_compared(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused with its first token that differs, and an unset key of the endpoints is named."""
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    further = max(tokenizer["model"]["vocab"].values()) + 1
    tokenizer["model"]["vocab"]["further"] = further
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    address = TeacherAddress(name="maths", endpoint="http://a/v1", model="m", tokenizer=str(other))
    teacher = Teacher(
        endpoint="http://a/v1",
        model="m",
        tokenizer=str(SORT_MODEL),
        column="who",
        further=(address,),
        api_key_variable="KEY_OF_TEACHERS",
    )
    monkeypatch.setenv("KEY_OF_TEACHERS", "k")
    (problem,) = teacher_problems(small_recipe(str(SORT_MODEL), teacher=teacher))
    assert problem.startswith("teacher.advanced.further, maths: ") and f"token {further} is 'further' there" in problem
    monkeypatch.delenv("KEY_OF_TEACHERS")
    assert "KEY_OF_TEACHERS is not set" in list(teacher_problems(small_recipe(str(SORT_MODEL), teacher=teacher)))[-1]


def test_the_address_of_a_teacher_is_asked_before_a_run(
    address: Address, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers with the policy's tokens is right; another one is refused with what it answered: with its first
    token that differs, without logprobs, with nothing."""
    monkeypatch.setattr(other_models, "ANSWER_S", 0.5)

    def problems_of(model: str, policy: Path = SORT_MODEL) -> list[str]:
        teacher = replace(address.teacher(), model=model)
        return list(address_problems(small_recipe(str(policy), teacher=teacher)))

    for _ in range(100):  # the process starts
        if not (found := problems_of("teacher")):
            break
    assert found == []
    assert "answered 404" in problems_of("other")[0]
    assert "gave no logprobs of the prompt" in problems_of("silent")[0]
    tokenizer = json.loads((SORT_MODEL / "tokenizer.json").read_text())
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    one, two = (token_id for token_id, text in sorted(texts.items()) if text in "37")
    (other / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"model": swapped(tokenizer["model"], texts, one, two)})
    )
    (problem,) = problems_of("teacher", other)
    assert f"token {one} is {texts[one]!r} there, and {texts[two]!r} in the policy's" in problem
    address.kill()
    (problem,) = problems_of("teacher")
    assert problem.startswith("teacher.endpoint: http://127.0.0.1") and "no answer within 0.5 s" in problem

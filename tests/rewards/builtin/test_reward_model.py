"""A tiny sequence classifier that is made here, as a reward."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.base.errors import RecipeError
from streamrl.rewards.builtin.reward_model_options import RewardModelOptions
from streamrl.rewards.signature import RewardFunction

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def write_classifier(directory: Path, labels: int = 1) -> Path:
    import tokenizers

    words = {chr(code): (code - ord("4")) % 95 for code in range(32, 127)}  # "4", which ends texts, is token 0
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="~", unk_token="?")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=len(words), num_labels=labels, max_position_embeddings=128,
    )  # fmt: skip
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"))


def by_hand(directory: Path, text: str) -> float:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0])


async def ask(reward: RewardFunction, *completions: str, **columns: Any) -> list[float]:
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(reward.call(completion, prompt="2+2?", **columns)) for completion in completions]
        return [task.result() for task in asked]
    finally:
        await reward.call.aclose()  # type: ignore[attr-defined]


async def test_scores_do_not_depend_on_the_batch(make: Callable, classifier: Path) -> None:
    """The score of a text does not depend on the other texts of its batch."""
    texts = ["4", "five, I think", "", "it is 4 and nothing else at all"]
    reward = make("reward_model", path=str(classifier), batch=3)
    assert reward.signature.is_async
    scores = await ask(reward, *texts)
    expected = [by_hand(classifier, f"[user]2+2?[assistant]{text}") for text in texts]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 4
    (chat,) = await ask(reward, "4", messages=[{"role": "user", "content": "1+3?"}])
    assert chat == pytest.approx(by_hand(classifier, "[user]1+3?[assistant]4"), abs=1e-5)


async def test_plain_text_and_a_sigmoid(make: Callable, classifier: Path) -> None:
    (score,) = await ask(make("reward_model", path=str(classifier), chat=False, sigmoid=True), "4")
    assert score == pytest.approx(float(torch.sigmoid(torch.tensor(by_hand(classifier, "2+2?4")))), abs=1e-5)


async def test_a_text_that_is_too_long_fails_and_its_siblings_do_not(make: Callable, classifier: Path) -> None:
    reward = make("reward_model", path=str(classifier), max_tokens=24)
    with pytest.raises(ExceptionGroup) as caught:
        await ask(reward, "x" * 50)
    assert "are more than the reward model's max_tokens = 24: raise it" in str(caught.value.exceptions[0])
    assert len(await ask(reward, "4")) == 1


async def test_a_cancelled_call_takes_nobody_of_its_batch_with_it(classifier: Path) -> None:
    from streamrl.rewards.builtin.classifier_scores import BatchedClassifier

    scorer = BatchedClassifier(RewardModelOptions(path=str(classifier)))
    alone = await scorer.score("2+2?", None, "4")
    computing, gate = threading.Event(), threading.Event()
    forward, batches = scorer._forward, []

    def slow_forward(rows: Sequence[list[int]]) -> list[float]:
        batches.append(len(rows))
        if len(rows) > 1:
            computing.set()
            gate.wait(10)
        return forward(rows)

    monkeypatched: Any = scorer
    monkeypatched._forward = slow_forward
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(scorer.score("2+2?", None, "4")) for _ in range(4)]
        await asyncio.to_thread(computing.wait, 10)
        asked[1].cancel()  # its batch, with the two after it, is being computed
        await asyncio.sleep(0)
        gate.set()
    assert [asked[index].result() for index in (0, 2, 3)] == pytest.approx([alone] * 3, abs=1e-5)
    assert batches == [1, 3, 2]
    scorer.close()


def test_what_is_no_reward_model_is_refused_before_it_is_loaded(make: Callable, classifier: Path, tmp_path) -> None:
    def refused(change: Callable[[dict[str, Any]], Any], *, weights: bool = True, **options: Any) -> str:
        config = json.loads((classifier / "config.json").read_text())
        change(config)
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").touch()
        if not weights:
            (tmp_path / "model.safetensors").unlink()
        with pytest.raises(RecipeError) as caught:
            make("reward_model", path=str(tmp_path), **options)
        return str(caught.value)

    assert "has the architecture Qwen2ForCausalLM" in refused(lambda c: c.update(architectures=["Qwen2ForCausalLM"]))
    assert "has no *.safetensors weights" in refused(lambda c: None, weights=False)
    several = {"id2label": {"0": "bad", "1": "good"}}
    assert "the model has 2: choose one" in refused(lambda c: c.update(several))
    assert '"label" = 2: the model has 2, counted from 0' in refused(lambda c: c.update(several), label=2)

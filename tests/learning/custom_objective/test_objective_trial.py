"""What a trial says of losses of one's own: good ones of two papers, and one for each way to be wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from builders.files import ROOT

torch = pytest.importorskip("torch")

from streamrl.learning.custom_objective.objective_trial import ObjectiveTrial, try_objective  # noqa: E402
from streamrl.learning.custom_objective.promises import examine  # noqa: E402
from streamrl.learning.objective.custom import trains_without_advantage  # noqa: E402
from streamrl.recipe.objective import Objective, OffPolicy, Proximal, RatioLevel, objective_settings  # noqa: E402

pytestmark = pytest.mark.torch
PAGE = ROOT / "examples" / "custom_loss.py"


def written(folder: Path, code: str) -> Path:
    """A file with this code."""
    file = folder / f"{folder.name}_{len(list(folder.iterdir()))}.py"
    file.write_text(f"import torch\n{textwrap.dedent(code)}")
    return file


def tried(folder: Path, code: str, name: str = "loss", **fields: Any) -> ObjectiveTrial:
    """The trial of an object of a file with this code."""
    return examine(Objective(function=f"{written(folder, code)}:{name}", **fields), OffPolicy())


@pytest.mark.parametrize("name", ["gmpo", "binary_kl", "largest_distance"])
def test_losses_of_the_example_keep_every_promise(name: str) -> None:
    fields = {"advantages": "custom"} if name == "largest_distance" else {}
    trial = examine(Objective(function=f"{PAGE}:{name}", **fields), OffPolicy())
    assert not trial.refusals
    errors = {promise.name: promise.error for promise in trial.promises}
    assert errors["gradient of float64"] < 2e-6 and errors["denominators"] < 2e-6
    assert errors["streaming = whole batch"] < 2e-6 and errors["packing = single rows"] < 2e-6
    assert (
        trial.parts
        == {
            "gmpo": ("a loss that reads whole trajectories",),
            "binary_kl": ("a loss of each token",),
            "largest_distance": ("advantages of the rewards of siblings",),
        }[name]
    )


def test_the_losses_of_the_page_keep_every_promise(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training.md").read_text().partition("## A loss of your own")[2].partition("\n## ")[0]
    code = page.partition("```python\n")[2].partition("```")[0]
    assert not tried(tmp_path, code).refusals
    assert not tried(tmp_path, code, options={"epsilon": 0.1}).refusals
    (line,) = (text for text in page.replace("\n", " ").split("`") if text.startswith("def best"))
    assert not examine(Objective(function=f"{written(tmp_path, line)}:best", advantages="custom"), OffPolicy()).refusals


WRONG = {
    "returned a tensor of shape [] as loss": "def loss(ratio, advantages): return -(ratio * advantages).mean()",
    "returned float as loss": "def loss(ratio, advantages): return 1.0",
    "returned a tensor of shape [] as clipped": "def loss(ratio, advantages): return -ratio * advantages, ratio.sum()",
    "returned a loss without a gradient": "def loss(ratio, advantages): return -ratio.detach() * advantages",
    "makes tokens with a positive advantage less likely": "def loss(ratio, advantages): return ratio * advantages",
    "changes advantages in place": "def loss(ratio, advantages): return -ratio * advantages.mul_(2)",
    "gives NaN or infinity for ordinary tokens": "def loss(ratio, advantages): return -(ratio - 1).sqrt() * advantages",
    "raised ZeroDivisionError: division by zero": "def loss(ratio, advantages): return -ratio * (1 / 0)",
    'takes "mask", which is no input of loss': "def loss(ratio, advantages, mask): return -ratio * advantages",
    "is async": "async def loss(ratio, advantages): return -ratio * advantages",
    "is a float: name a function or a class": "loss = 0.5",
    'has no "loss"': "def other(ratio, advantages): return -ratio * advantages",
    "has neither a method loss nor a method advantages": "class loss: pass",
    "has advantages and no loss": "def loss(rewards): return rewards - rewards.mean()",
    'cannot be imported: ValueError: "not now"': "raise ValueError('\"not now\"')",
    '"gradient of float64" does not hold: the loss of a token depends on other tokens of its row': """
        def loss(ratio, advantages): return -ratio * (advantages - advantages.mean())
    """,
    '"packing = single rows" does not hold': """
        def loss(ratio, advantages): return -ratio * advantages / len(ratio)
    """,
    '"order of rows" does not hold': """
        def loss(ratio, advantages, sequence_ids):
            return -ratio * advantages * torch.linspace(1, 2, len(ratio)) ** (sequence_ids >= 0)
    """,
    '"resume" does not hold: equal batches have different gradients': """
        calls = []
        def loss(ratio, advantages):
            calls.append(1)
            return -ratio * advantages * (1 + 1e-6 * len(calls))
    """,
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_loss_is_refused_in_words(words: str, tmp_path: Path) -> None:
    trial = tried(tmp_path, WRONG[words])
    assert any(words in refusal for refusal in trial.refusals), trial.refusals


WRONG_ADVANTAGES = {
    "for the rewards [1.0, 0.0, 0.0, 1.0, 0.5]: return one finite number": "def loss(rewards): return rewards.sum()",
    "returned [inf": "def loss(rewards): return 1 / (rewards - 1).abs()",
    "has a loss and no advantages": "def loss(ratio, advantages): return -ratio * advantages",
    '"equal rewards" does not hold: must have advantages of 0': "def loss(rewards): return rewards - 0.4",
    '"direction" does not hold: a larger reward has a smaller': "def loss(rewards): return rewards.mean() - rewards",
    '"order of siblings" does not hold': "def loss(rewards): return rewards - rewards[0]",
}


@pytest.mark.parametrize("words", WRONG_ADVANTAGES)
def test_wrong_advantages_are_refused_in_words(words: str, tmp_path: Path) -> None:
    trial = tried(tmp_path, WRONG_ADVANTAGES[words], advantages="custom")
    assert any(words in refusal for refusal in trial.refusals), trial.refusals


def test_advantages_that_sizes_scale_need_groups_of_one_size(tmp_path: Path) -> None:
    """As GRPO's deviation, which is that of the sample: the file's largest distance has no scale of the size."""
    code = "def loss(rewards): return (rewards - rewards.mean()) / (rewards.std() + 1e-4)"
    assert not tried(tmp_path, code, advantages="custom").refusals
    scaled = Objective(function=f"{written(tmp_path, code)}:loss", advantages="custom")
    (refusal,) = examine(scaled, OffPolicy(), sizes_vary=True).refusals
    assert refusal.startswith('"group sizes" does not hold: scale advantages')
    unscaled = Objective(function=f"{PAGE}:largest_distance", advantages="custom")
    answer = try_objective(unscaled, OffPolicy(), sizes_vary=True)
    assert not answer.refusals and answer.promises[3].needed


def test_a_class_has_options_and_may_have_both_parts(tmp_path: Path) -> None:
    code = """
        class Mine:
            def __init__(self, power=1.0): self.power = power
            def loss(self, ratio, advantages): return -ratio.pow(self.power) * advantages
            def advantages(self, rewards): return rewards - rewards.mean()
    """
    both = {"surrogate": "custom", "advantages": "custom"}
    assert not tried(tmp_path, code, "Mine", options={"power": 2.0}, **both).refusals
    (problem,) = tried(tmp_path, code, "Mine", options={"powr": 2.0}, **both).problems
    assert 'objective.advanced.options: "powr" is no option of' in problem and "takes power" in problem


def test_a_gradient_without_advantage_is_known(tmp_path: Path) -> None:
    """Groups of equal rewards are then computed: the gradient is that of float64 all the same."""
    code = """
        def loss(logprobs, behavior_logprobs, ratio, advantages, tau=0.01):
            return -ratio * advantages + tau * (logprobs - behavior_logprobs) ** 2
    """
    trial = tried(tmp_path, code)
    assert not trial.refusals
    assert {promise.text for promise in trial.promises if promise.name == "advantage 0"} == {
        "has a gradient: groups of equal rewards are computed, too"
    }
    (file,) = tmp_path.glob("*.py")
    assert trains_without_advantage(objective_settings(Objective(function=f"{file}:loss")))
    assert not trains_without_advantage(objective_settings(Objective(function=f"{PAGE}:gmpo")))


def test_stale_tokens_weighted_twice_are_noted(tmp_path: Path) -> None:
    """By the loss, from the logprobs of the policy that sampled them, and by the correction of the recipe."""
    code = "def loss(ratio, advantages, behavior_logprobs): return -ratio * advantages"
    objective = Objective(function=f"{written(tmp_path, code)}:loss")

    def notes(off_policy: OffPolicy) -> list[str]:
        return [promise.text for promise in examine(objective, off_policy).promises if promise.name == "stale tokens"]

    (note,) = notes(OffPolicy())
    assert 'set off_policy.truncate = "none"' in note
    assert not notes(OffPolicy(truncate=RatioLevel.NONE)) and not notes(OffPolicy(proximal=Proximal.BEHAVIOR))
    objective = Objective(function=f"{PAGE}:gmpo")
    assert not notes(OffPolicy())


def test_code_that_hangs_or_ends_its_process_is_refused(tmp_path: Path) -> None:
    for number, (code, words) in enumerate(
        [("raise SystemExit(3)", "cannot be imported: SystemExit: 3"), ("import os; os._exit(4)", "exit code 4"),
         ("import time; time.sleep(60)", "gave no answer within 6 s")]
    ):  # fmt: skip
        file = tmp_path / f"bad{number}.py"
        file.write_text(code)
        (problem,) = try_objective(Objective(function=f"{file}:loss"), OffPolicy(), 6.0).refusals
        assert words in problem

"""A run whose turns have credit, on a real vLLM engine, recomputed in float64 step by step from its journal: advantages
by the definitions in docs/environments.md, the loss, the gradient, and AdamW."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from streamrl.base.types import Prompt, ScoredTrajectory, Trajectory, TrajectoryId  # noqa: E402
from streamrl.control.policies.round_policies import make_control  # noqa: E402
from streamrl.control.settings import control_settings  # noqa: E402
from streamrl.recipe.rules.load_recipe import load_recipe  # noqa: E402
from streamrl.run.journal.journal_file import read_journal  # noqa: E402
from streamrl.run.journal.records import (  # noqa: E402
    JournalCodec,
    JournalPrompt,
    JournalSampled,
    JournalScored,
    scored_trajectory,
    trajectory_of,
)
from streamrl.run.journal.recover import replayed_run  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.long]
EXAMPLE = Path(__file__).parents[3] / "examples" / "sort"
STEPS, MAX_TOKENS, CONVERSATION, RATE = 3, 24, 128, 1e-3
RECIPE = f"""
[run]
steps = {STEPS}
[model]
path = "{EXAMPLE / "model"}"
[prompts]
train = "{EXAMPLE / "train.jsonl"}"
[environment]
episode = "{Path(__file__).with_name("scripted_turns.py")}:episode"
max_tokens = {CONVERSATION}
[[rewards]]
function = "environment"
weight = 2.0
[reward_limits]
max_failed_share = 1.0
[objective]
algorithm = "dr_grpo"
[rollout]
prompts_per_batch = 4
group_size = 6
[sampling]
max_tokens = {MAX_TOKENS}
[training]
learning_rate = {RATE}
advanced.threads = 1
[checkpoint]
advanced.min_free_gib = 0.0
[engines]
dtype = "float32"
max_model_len = 128
"""
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def advantages(group: list[ScoredTrajectory], credit: str) -> list[list[float]]:
    """Of each sampled turn of each sibling, in float64."""
    earned = [list(one.turn_rewards) for one in group]
    counts = [sum(segment.trained for segment in one.trajectory.segments) for one in group]
    earned = [rewards + [0.0] * (count - len(rewards)) for rewards, count in zip(earned, counts, strict=True)]
    longest = max(counts)

    def compared(values: list[float]) -> Any:
        return np.array(values) - np.mean(values) if len(values) > 1 else np.zeros(1)

    if credit == "turn":
        rest = compared([one.reward - sum(rewards) for one, rewards in zip(group, earned, strict=True)])
        of_turns = [compared([(r + [0.0] * longest)[turn] for r in earned]) + rest for turn in range(longest)]
    else:
        of_turns = [
            compared([one.reward - sum(r[: min(turn, len(r) - 1)]) for one, r in zip(group, earned, strict=True)])
            for turn in range(longest)
        ]
    return [[of_turns[turn][member] for turn in range(count)] for member, count in enumerate(counts)]


def loss_of(model: Any, batch: list[ScoredTrajectory], credit: str) -> Any:
    """Dr. GRPO on tokens of the version that is trained: every r is 1."""
    groups: dict[int, list[ScoredTrajectory]] = {}
    for one in batch:
        groups.setdefault(one.trajectory.id.group_id, []).append(one)
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups.values():
        for one, of_turns in zip(group, advantages(group, credit), strict=True):
            tokens = list(one.trajectory.prompt.token_ids)
            turn = 0
            for segment in one.trajectory.segments:
                begin = len(tokens)
                tokens += segment.token_ids
                if not segment.trained:
                    continue
                logits = model(torch.tensor([tokens])).logits[0, begin - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[begin:])[:, None])[:, 0]
                ratio = (logprobs - logprobs.detach()).exp()
                loss = loss - (ratio * of_turns[turn]).sum()
                turn += 1
    return loss / (len(batch) * CONVERSATION)


def masters_of(checkpoint: Path) -> dict[str, Any]:
    tensors = {k: v for file in (checkpoint / "trainer").glob("*.safetensors") for k, v in load_file(file).items()}
    return {k.removeprefix("master."): v.double() for k, v in tensors.items() if k.startswith("master.")}


def apart(found: dict[str, Any], expected: dict[str, Any], begun: dict[str, Any]) -> float:
    """Relative error of a step: of what it added to the masters."""
    wrong = sum(float((found[k] - expected[k]).square().sum()) for k in expected)
    return float((wrong / sum(float((expected[k] - begun[k]).square().sum()) for k in expected)) ** 0.5)


def trained_batches(records: list[Any], restore: Any) -> tuple[Any, dict[int, list[ScoredTrajectory]]]:
    """The replayed run, and the trajectories that were trained into each version."""
    run = replayed_run(records, restore, 0)
    assert run is not None
    prompts: dict[str, Prompt] = {}
    sampled: dict[TrajectoryId, Trajectory] = {}
    scored: dict[TrajectoryId, ScoredTrajectory] = {}
    for record in map(JournalCodec().decode, records):
        if isinstance(record, JournalPrompt):
            prompts[record.prompt.prompt_id] = record.prompt
        elif isinstance(record, JournalSampled):
            sampled[record.id] = trajectory_of(record, prompts[record.id.prompt_id])
        elif isinstance(record, JournalScored):
            scored[record.id] = scored_trajectory(sampled[record.id], record)
    trained = {batch.policy_version: [scored[t] for group in batch.groups for t in group.ids] for batch in run.trained}
    return run, trained


def check(files: Path, credit: str) -> None:
    """Recompute each step of the run, and compare what it reported and saved."""
    recipe = load_recipe(files / "recipe.toml")
    assert (recipe.training.beta1, recipe.training.beta2, recipe.training.weight_decay) == (BETA1, BETA2, 0.0)
    restore = partial(make_control, control_settings(recipe))
    run, batches = trained_batches(list(read_journal(files / "journal").records(0)), restore)
    lines = [json.loads(line) for line in (files / "metrics.jsonl").read_text().splitlines()]
    reported = {line["step"]: line["optim/loss"] for line in lines if line["kind"] == "step"}
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32).double()
    names = dict(model.named_parameters())
    begun = {name: parameter.detach().clone() for name, parameter in names.items()}
    masters = begun
    first, second = ({name: torch.zeros_like(value) for name, value in masters.items()} for _ in range(2))
    kinds = set()
    for step in range(1, STEPS + 1):
        batch = batches[step]
        kinds |= {(len(one.turn_rewards), any(one.turn_rewards)) for one in batch}
        for name, parameter in names.items():
            parameter.data, parameter.grad = masters[name].bfloat16().double(), None
        loss = loss_of(model, batch, credit)
        loss.backward()
        assert reported[step] == pytest.approx(loss.item(), rel=1e-4, abs=1e-7)
        norm = sum(float(p.grad.square().sum()) for p in names.values()) ** 0.5
        clip = min(1.0, recipe.training.max_grad_norm / (norm + 1e-6))
        expected = {}
        for name, parameter in names.items():
            gradient = parameter.grad * clip
            first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
            second[name] = BETA2 * second[name] + (1 - BETA2) * gradient**2
            mean, square = first[name] / (1 - BETA1**step), second[name] / (1 - BETA2**step)
            expected[name] = masters[name] - RATE * mean / (square.sqrt() + EPSILON)
        masters = expected
    saved = masters_of(files / "checkpoints" / f"step-{STEPS:06d}")
    assert apart(saved, masters, begun) < 1e-4
    failed = run.state.accounting().dropped["reward_failed"]
    assert failed and (0, False) in kinds and (3, True) in kinds and any(n and not any_ for n, any_ in kinds), kinds


@pytest.mark.seconds(240)
@pytest.mark.parametrize("credit", ["turn", "return_to_go"])
def test_each_step_is_the_one_of_the_definition(tmp_path: Path, credit: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    command = [sys.executable, "-m", "streamrl", "train", str(file), "--set", f"run.directory={str(tmp_path)!r}"]
    done = subprocess.run(
        [*command, "--set", f"environment.advanced.credit={credit}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path / "latest", credit)

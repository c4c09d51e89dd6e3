"""Runs of tiny models of the families on vLLM whose engine is killed twice: every push arrives, and the model learns.

    python -m campaigns family_runs qwen3_5 gpt_oss
    python -m campaigns family_runs qwen3_5 gemma4 --lora adapter        # or merged

A model of random weights (``streamrl/learning/families``) learns to write digits, in 20 steps of 16 completions. The
core of its engine is killed after a third and after two thirds of them; the engine that is started again fetches the
live version. Passed: every step was trained, its version had the published hash in the engine (a run ends where it has
not), each kill was a restart, and the logprobs of engine and trainer differ by no more afterwards than before: a
parameter or a buffer that the restarted engine has otherwise would show. ``python -m campaigns twins --family NAME``
kills and resumes whole runs of the same project. About a minute a family."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from campaigns.chaos.kill_engine import host_of
from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import EngineBack, RunFinished, StepFinished
from streamrl.launch.pipeline import Pipeline
from streamrl.learning.families.family import read_families
from streamrl.learning.families.tiny_checkpoint import write_tiny_checkpoint
from streamrl.recipe.rules.load_recipe import load_recipe

STEPS = 20
KILLS = (STEPS // 3, 2 * STEPS // 3)
"""Steps after which the engine is killed."""
MISMATCH = "policy/mismatch_abs_mean"
APART = 3.0
"""How many times the mismatch before the first kill may be that after it."""
NOISE = 1e-4
"""Nats that a mismatch may have in any case, for engines in float32."""
PROMPTS = 64

RECIPE = """\
[run]
name = "{family}"
directory = "{directory}/runs"
steps = {steps}

[model]
path = "model"

[prompts]
train = "train.jsonl"

[[rewards]]
function = "digits.py:digits"

[rollout]
prompts_per_batch = 4
group_size = 4

[sampling]
max_tokens = 16

[training]
learning_rate = 3e-3
warmup_steps = 2

[engines]
dtype = "{dtype}"
max_model_len = 128
"""

LORA = """
[lora]
rank = 8
alpha = 32
targets = ["all-linear"]
sync = "{sync}"
"""

REWARD = """\
async def digits(completion: str, **_columns: object) -> float:
    return sum(character.isdigit() for character in completion) / max(len(completion), 8)
"""


class Outcome(Struct, frozen=True, kw_only=True):
    """One row of the table. ``rewards``: of each step; ``before``, ``after``: largest mismatch up to the first kill,
    and from there on; ``back_s``: seconds of each restart; ``problem``: why it failed."""

    family: str
    rewards: list[float] = []
    before: float = 0.0
    after: float = 0.0
    back_s: list[float] = []
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    parser.add_argument("families", nargs="*", help="names of tables (all)")
    parser.add_argument("--lora", choices=("adapter", "merged"), default="", help="train adapters of all linear layers")
    parser.set_defaults(work=try_families)


def try_families(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where a family failed."""
    failed = 0
    for name in arguments.families or read_families():
        outcome = try_family(name, arguments.lora)
        print(f"{name:16} {outcome.problem or row_of(outcome)}", flush=True)
        failed += bool(outcome.problem)
    return int(failed > 0)


def row_of(outcome: Outcome) -> str:
    """Figures of a family that passed."""
    third = STEPS // 3
    first, last = (sum(part) / third for part in (outcome.rewards[:third], outcome.rewards[-third:]))
    seconds = ", ".join(f"{one:.0f}" for one in outcome.back_s)
    return (
        f"reward {first:.3f} -> {last:.3f}, mismatch {outcome.before:.1e} -> {outcome.after:.1e}, back in {seconds} s"
    )


def try_family(name: str, lora: str = "") -> Outcome:
    """Run the project of a family and kill its engine. ``lora``: how adapters are synchronised; empty: there are
    none."""
    with tempfile.TemporaryDirectory(prefix="family") as folder:
        recipe = load_recipe(write_project(name, Path(folder), lora=lora))
        recipe = replace(recipe, engines=replace(recipe.engines, restarts=len(KILLS)))
        try:
            events = asyncio.run(run_with_kills(recipe))
        except StreamRLError as error:
            return Outcome(family=name, problem=f"FAILED: {' '.join(str(error).split())}")
    steps = [event for event in events if isinstance(event, StepFinished)]
    back_s = [event.seconds for event in events if isinstance(event, EngineBack)]
    mismatches = [step.metrics[MISMATCH] for step in steps]
    outcome = Outcome(
        family=name,
        rewards=[step.metrics["reward/mean"] for step in steps],
        before=max(mismatches[: KILLS[0]], default=0.0),
        after=max(mismatches[KILLS[0] :], default=0.0),
        back_s=back_s,
    )
    return replace(outcome, problem=problem_of(outcome, steps, events[-1]))


def problem_of(outcome: Outcome, steps: list[StepFinished], last: Any) -> str:
    """Why a run did not pass; empty: it did."""
    if [step.step for step in steps] != list(range(1, STEPS + 1)):
        return f"FAILED: steps {[step.step for step in steps]} were trained"
    if not isinstance(last, RunFinished) or last.reason != "finished":
        return f"FAILED: the run ended with {last}"
    if len(outcome.back_s) != len(KILLS):
        return f"FAILED: {len(outcome.back_s)} restarts for {len(KILLS)} kills"
    if outcome.after > APART * outcome.before + NOISE:
        return f"FAILED: {MISMATCH} was {outcome.before:.1e} before the first kill and {outcome.after:.1e} after it"
    return ""


async def run_with_kills(recipe: Any) -> list[Any]:
    """Run a recipe of one engine to its end, and return its events."""
    events: list[Any] = []
    trained = 0
    async with Pipeline(recipe) as pipeline:
        async for event in pipeline.events():
            events.append(event)
            if isinstance(event, StepFinished):
                trained += 1
                if trained in KILLS:
                    host_of("engine-0").children(recursive=True)[0].kill()
    return events


def write_project(name: str, directory: Path, *, lora: str = "") -> Path:
    """Write the tiny model of a family, its prompts and its reward; returns the recipe."""
    family = read_families()[name]
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny_checkpoint(family, directory / "model")
    draw = random.Random(0)
    rows = [{"prompt": " ".join(draw.choices("0123456789", k=draw.randint(2, 6))) + " ->"} for _ in range(PROMPTS)]
    (directory / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (directory / "digits.py").write_text(REWARD)
    recipe = directory / "recipe.toml"
    text = RECIPE.format(family=name, directory=directory, steps=STEPS, dtype=family.engine_dtype)
    recipe.write_text(text + (LORA.format(sync=lora) if lora else ""))
    return recipe

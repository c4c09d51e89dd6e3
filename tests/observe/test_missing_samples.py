"""A step that trained fewer samples than it should says in one line which are missing and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders.files import SORT as DEMO

REWARD = """
seen = set()
async def reward(completion, prompt_id):
    if prompt_id not in seen:
        seen.add(prompt_id)
        raise ValueError("the first of its group")
    return len(completion) % 7 / 6
"""


@pytest.mark.long
@pytest.mark.torch
def test_every_step_that_lacks_samples_says_which_and_why(tmp_path: Path) -> None:
    """Of each group of four one fails; three prompts are half a batch short of two steps; half of all is cut."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.py").write_text("def rows():\n    yield from ({'prompt': f'{n}58:'} for n in range(3))\n")
    settings = {
        "run.directory": f"'{tmp_path}/runs'", "run.steps": 5, "engines.kind": "'simulated'",
        "prompts.train": f"'{tmp_path}/rows.py:rows'", "evaluation.prompts": "''",
        "rewards.0.function": f"'{tmp_path}/reward.py:reward'", "rollout.prompts_per_batch": 2, "rollout.group_size": 4,
        "sampling.max_tokens": 16, "objective.train_truncated": "false", "checkpoint.advanced.min_free_gib": 0.0,
    }  # fmt: skip
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "streamrl", "train", str(DEMO / "recipe.toml"), *sets]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = [line for line in done.stdout.splitlines() if "samples were trained" in line]
    why = "reward_failed: reward raised: ValueError: the first of its group (reward.py:6))"
    assert first.startswith(f"warning at step 1: 6 of 8 samples were trained (2 {why}")
    assert second.startswith(
        f"warning at step 2: 3 of 4 samples were trained (1 {why}; 4 places of its batch stayed empty"
    )
    assert "samples were cut at max_tokens, so the loss does not see them" in first + second

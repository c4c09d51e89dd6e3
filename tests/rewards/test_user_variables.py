"""Variables that code of the user sees, in its own processes and in those that run it themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import json, os
from streamrl.rewards.user_variables import keep_variables_of_user_code
keep_variables_of_user_code(["SEARCH_KEY"])
print(json.dumps(sorted(os.environ)))
"""


def test_a_worker_that_runs_user_code_keeps_no_tokens() -> None:
    tokens = {"HF_TOKEN": "x", "WANDB_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    kept = {"SEARCH_KEY": "x", "STREAMRL_KEYS": "x", "VLLM_TARGET_DEVICE": "cpu", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-c", PROGRAM]
    child = subprocess.run(command, env=os.environ | tokens | kept, capture_output=True, check=True, timeout=60)
    names = set(json.loads(child.stdout))
    assert tokens.keys().isdisjoint(names) and {*kept, "PATH"} <= names

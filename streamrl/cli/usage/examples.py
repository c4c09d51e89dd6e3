"""One example of each command, which its ``--help`` ends with; every one of them parses (a test compares)."""

from __future__ import annotations

EXAMPLES = {
    "init": "init counting --task own --model tiny",
    "try": "try recipe.toml",
    "train": "train recipe.toml rollout.group_size=16 --dry-run",
    "watch": "watch runs/latest",
    "dashboard": "dashboard runs/latest",
    "show": "show runs/latest",
    "samples": "samples runs/latest --step 10,20 --best",
    "runs": "runs runs/sort-20261126-101500 runs/latest",
    "eval": "eval runs/latest@best recipe.toml --samples 8",
    "export": "export runs/latest my-model --version best",
    "push": "push runs/latest my-name/my-model",
    "drain": "drain runs/latest",
    "resume": "resume runs/latest --set run.steps=200",
    "reward test": "reward test my.py:reward --prompts train.jsonl --recipe .",
    "reward attach": "reward attach runs/latest style.py:polite --weight 0.2",
    "reward replace": "reward replace runs/latest polite style.py:formal",
    "reward detach": "reward detach runs/latest polite",
    "reward list": "reward list runs/latest",
    "check": "check",
    "explain": "explain rollout.group_size",
    "simulate": "simulate recipe.toml --compare synchronous,continuous",
    "calibrate": "calibrate runs/latest --out cluster.toml",
    "what-if": "what-if runs/latest --max-staleness 2",
    "compare": "compare recipe.toml --systems sagc,fastest",
    "serve": "serve engine recipe.toml --index 1",
    "keys": "keys ~/streamrl-keys",
}

"""The command line of ``streamrl reward``, without what it takes to run it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.cli.reward_changes import add_changes


class RewardTestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for. ``prompt_count``: prompts, at most; ``samples``: completions of each, from an
    engine: of the model ``engine``, or of ``recipe`` (None: ``recipe.toml`` of the current directory). ``tokenizer``: a
    model directory, for rewards that look at token ids of completions from a file."""

    function: str
    prompts: str
    options: tuple[str, ...] = ()
    prompt_count: int = 32
    samples: int = 8
    completions: Path | None = None
    engine: Path | None = None
    recipe: Path | None = None
    tokenizer: Path | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    timeout_s: float = 30.0
    memory_mib: int = 1024
    environment: tuple[str, ...] = ()
    trusted: bool = False
    as_json: bool = False


def add_reward(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], run: Callable[[argparse.Namespace], int]
) -> None:
    """``streamrl reward``. ``run``: what tests one; the others change those of a running run."""
    reward = commands.add_parser("reward", help="try a reward function alone; change the rewards of a running run")
    actions = reward.add_subparsers(required=True, metavar="ACTION")
    add_changes(actions)
    test = actions.add_parser(
        "test",
        help="values, spread, latency, failures, and whether groups would carry signal",
        description="Score completions with one reward as a run would, and print what came of it.",
    )
    test.add_argument("function", metavar="FUNCTION", help="module:function, file.py:function, or a built-in reward")
    test.add_argument("--prompts", required=True, metavar="PROMPTS", help="what prompts.train of a recipe may say")
    test.add_argument("-n", type=int, default=32, dest="prompt_count", metavar="N", help="prompts (default 32)")
    given = test.add_mutually_exclusive_group()
    given.add_argument(
        "--completions", type=Path, metavar="FILE", help='JSONL: "completion" with "prompt_id" or "prompt"'
    )
    given.add_argument("--engine", type=Path, metavar="MODEL", help="sample them from this model directory with vLLM")
    given.add_argument(
        "--recipe", type=Path, metavar="RECIPE", help="sample them as this recipe does (default: recipe.toml here)"
    )
    test.add_argument("--samples", type=int, default=8, metavar="G", help="sampled completions of a prompt (8)")
    test.add_argument("--max-tokens", type=int, metavar="N", help="of one (default: the recipe's, else 512)")
    test.add_argument("--temperature", type=float, metavar="T", help="of sampling (default: the recipe's, else 1)")
    test.add_argument("--tokenizer", type=Path, metavar="MODEL", help="for token_ids of completions from a file")
    test.add_argument(
        "--option", action="append", default=[], dest="options", metavar="KEY=VALUE", help="one of rewards.options"
    )
    test.add_argument("--time-limit", type=float, default=30.0, dest="timeout_s", metavar="S", help="(default 30)")
    test.add_argument("--memory", type=int, default=1024, dest="memory_mib", metavar="MIB", help="(default 1024)")
    test.add_argument(
        "--environment", action="append", default=[], metavar="NAME", help="a variable that the function may see"
    )
    test.add_argument("--trusted", action="store_true", help="in this process's own loop, as rewards.trusted")
    test.add_argument("--json", action="store_true", dest="as_json", help="the report as JSON")
    test.set_defaults(run=run)


def to_request(options: argparse.Namespace) -> RewardTestRequest:
    """The parsed command line as a request."""
    given = {name: getattr(options, name) for name in RewardTestRequest.__struct_fields__}
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return RewardTestRequest(**fields)

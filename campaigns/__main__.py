"""One command for all campaigns.

    python -m campaigns faults run | replay SEED | shrink SEED | planted [NAME ...]      # docs/evidence/faults.md
    python -m campaigns fuzz [--target NAME] [--replay FILE]
    python -m campaigns messages | rewards | surroundings [WORD ...]     # cases with one of the words in their names
    python -m campaigns families [NAME ...]
    python -m campaigns packed_families [NAME ...]   # tiny models of 36 families against transformers
    python -m campaigns family_runs [NAME ...]       # 20 steps of tiny models on vLLM, whose engine is killed twice
    python -m campaigns family_pushes [NAME ...] --out FOLDER   # 20 pushes of each family with a kill, to real engines
    python -m campaigns walks [--events N] [--seed N] [--plant BUG]      # control, with trajectories of several turns
    python -m campaigns endpoint [--requests N] [--seed N]   # requests of agents with something wrong in them
    python -m campaigns connections [--connections N] [--seed N]   # peers of the endpoint of agents that hold it up
    python -m campaigns harnesses [NAME ...] [--folder DIR]   # Codex, Claude Code and others, as they are installed
    python -m campaigns followers [shots | pairs]    # trackers that are killed, stopped, out of disk or asleep
    python -m campaigns hosts shots [--shots N] [--kinds ...] [--python PATH]   # three hosts in namespaces, with Ray
    python -m campaigns hosts equality [--kinds hsdp2x2]   # over hosts, and on one: the same model bit for bit
    python -m campaigns chaos [--kills N] [--engines vllm]   # processes of real runs that are killed or stopped
    python -m campaigns soak [--minutes N]           # whether a long run with faults grows
    python -m campaigns agent_soak [--minutes N]     # whether games, and agents that leave things behind, make it grow
    python -m campaigns twins --out FOLDER [--kills N]   # killed and resumed runs, beside one that is left alone
    python -m campaigns front_door [KIND ...]        # files as people have them: models, tokenizers, tables, ...
    python -m campaigns learning [WORD ...]          # rewards of turns, passes, meanings of checkpoints, experts
    python -m campaigns tool_calls [WORD ...]        # results, errors, threads, observations and calls of tools
    python -m campaigns trl_scripts                  # constructors of public TRL scripts, as objects
    python -m campaigns foreign_inputs [KIND ...]    # data, caches, rewards and chats of strangers
    python -m campaigns mistakes [WORD ...]          # of a newcomer: each is refused in one sentence
    python -m campaigns pretended_gpu [NAME ...] [--cards H100] [--plant]   # a trainer where torch says it has a GPU
    python -m campaigns quantised_layers [--card H100]   # pushes to layers that vLLM quantises, with its own Python
    python -m campaigns suite_faults [NAME ...]      # faults of the product that the tests must see

The exit code is 1 where something failed. ``--help`` behind a name lists its options."""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

RunCases = Callable[[Callable[[str], None], Sequence[str]], int]
HOSTILE = ("messages", "rewards", "surroundings")
MODULES = {
    "faults": "faults.campaign",
    "fuzz": "fuzz.campaign",
    "families": "model_families",
    "packed_families": "packed_families",
    "family_runs": "family_runs",
    "family_pushes": "family_pushes",
    "front_door": "front_door.campaign",
    "followers": "followers",
    "endpoint": "endpoint_requests",
    "connections": "endpoint_connections",
    "harnesses": "harnesses.campaign",
    "walks": "control_walks",
    "hosts": "hosts.campaign",
    "pretended_gpu": "pretended_gpu.campaign",
    "quantised_layers": "pretended_gpu.quantised_layers",
    "suite_faults": "suite_faults",
    "chaos": "chaos.campaign",
    "soak": "soak",
    "agent_soak": "chaos.agent_soak",
    "twins": "resume_twins",
    "trl_scripts": "trl_scripts",
    "learning": "learning_inputs",
    "tool_calls": "tool_calls",
    "foreign_inputs": "foreign_inputs.campaign",
    "mistakes": "newcomer_mistakes.campaign",
    **{name: f"hostile.hostile_{name}" for name in HOSTILE},
}
"""Module of each campaign. Only the one that is named is imported: some import torch, which takes seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    campaigns = parser.add_subparsers(required=True, metavar="CAMPAIGN")
    for name, module_name in MODULES.items():
        command = campaigns.add_parser(name, help=_first_line(module_name))
        if name not in sys.argv[1:2]:
            continue
        module = import_module(f"campaigns.{module_name}")
        if name in HOSTILE:
            command.add_argument("words", nargs="*", help="only cases that have one of these in their names")
            command.set_defaults(work=partial(_run_cases, name, module.run))
        else:
            module.add_arguments(command)
    arguments = parser.parse_args()
    return int(arguments.work(arguments))


def _first_line(module_name: str) -> str:
    """First line of the description of a module of this folder, which is not imported."""
    source = Path(__file__).parent.joinpath(*module_name.split(".")).with_suffix(".py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]


def _run_cases(name: str, run: RunCases, arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    failed = run(partial(print, flush=True), arguments.words)
    print(f"{name}: {failed} cases failed, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Commands to a running run over its control socket: ``streamrl drain``, ``reward attach|replace|detach|list``. Each
sends a request from the command's own process and prints the answer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio

from streamrl.base.errors import RecipeError
from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command, RunPath
from streamrl.launch import control_socket
from streamrl.launch.control_protocol import ControlAnswer, ControlOperation, ControlRefused, DrainRun
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import resolved_reward
from streamrl.recipe.toml_text import value_or_text
from streamrl.rewards.reward_messages import (
    AttachReward,
    DetachReward,
    ListRewards,
    ReplaceReward,
    RewardsChanged,
    RewardsListed,
)

ANSWER_LIMIT_S = 300.0
"""A function is imported twice, each import takes up to minutes, and changes wait for each other."""


DRAINING = "it ends after the step that trains now, and saves; prompts that are sampled come again on resume"

FunctionName = Annotated[
    str, Argument("module:function, file.py:function, or a built-in reward", metavar="FUNCTION", positional=True)
]
AttachedName = Annotated[str, Argument("as `list` calls it", metavar="NAME", positional=True)]


class RewardOptions(Command, frozen=True):
    """Options of a reward function's calls, common to the commands that name a function."""

    option: Annotated[Texts, Argument("one of rewards.options; may be repeated", metavar="KEY=VALUE")] = ()
    timeout: Annotated[float, Argument("of a call (default 30)", metavar="S")] = 30.0
    memory: Annotated[int, Argument("of its process (default 1024)", metavar="MIB")] = 1024
    variable: Annotated[Texts, Argument("that the function may see; may be repeated", metavar="NAME")] = ()
    trusted: Annotated[bool, Argument("in the loop of the reward worker, as rewards.trusted")] = False
    special_tokens: Annotated[bool, Argument("it sees special tokens, as rewards.advanced.special_tokens")] = False

    def reward(self, function: str, **fields: Any) -> Reward:
        """Return the reward as if it were read from a recipe. Raises ``RecipeError`` for an unknown option."""
        return Reward(
            function=function,
            options=dict(map(reward_option, self.option)),
            timeout_s=self.timeout,
            memory_mib=self.memory,
            variables=self.variable,
            trusted=self.trusted,
            special_tokens=self.special_tokens,
            **fields,
        )


class AttachedOptions(RewardOptions, frozen=True):
    """Further options of a reward of a run."""

    name: Annotated[str, Argument("what metrics call it (its own name)", metavar="NAME")] = ""
    weight: Annotated[float, Argument("what it counts (default 1)", metavar="W")] = 1.0
    shadow: Annotated[bool, Argument("it scores, and nothing is trained on it")] = False

    def attached(self, function: str) -> Reward:
        """Return the reward with absolute paths, since the run has another working directory."""
        reward = self.reward(function, name=self.name, weight=self.weight, shadow=self.shadow)
        return resolved_reward(reward, Path.cwd())


class Attach(AttachedOptions, frozen=True, kw_only=True):
    """Score with one more function, while the run goes on."""

    run_directory: RunPath
    function: FunctionName

    def run(self) -> int:
        control_socket.refuse_ended(self.run_directory)  # first what the run is, then what is wrong with the function
        return _change(self, self.run_directory, AttachReward(reward=self.attached(self.function)))


class Replace(AttachedOptions, frozen=True, kw_only=True):
    """Score with another function; settings that are not given have their defaults."""

    run_directory: RunPath
    replaced: AttachedName
    function: FunctionName

    def run(self) -> int:
        control_socket.refuse_ended(self.run_directory)
        order = ReplaceReward(name=self.replaced, reward=self.attached(self.function))
        return _change(self, self.run_directory, order)


class Detach(Command, frozen=True):
    """Score without a function."""

    run_directory: RunPath
    name: AttachedName

    def run(self) -> int:
        return _change(self, self.run_directory, DetachReward(name=self.name))


class Drain(Command, frozen=True):
    """Let a running run finish the step that trains, write a checkpoint and end. `streamrl resume` continues it."""

    run_directory: RunPath

    def run(self) -> int:
        """Send the order and return without waiting for the end of the run."""
        ask_run(self.run_directory, DrainRun())
        return self.print({"draining": str(self.run_directory)}, DRAINING)


class ListAttached(Command, frozen=True):
    """List the rewards that score now, and since which version of the rewards."""

    run_directory: RunPath

    def run(self) -> int:
        answer = ask_run(self.run_directory, ListRewards(), changes=False)
        assert isinstance(answer, RewardsListed), answer
        lines = [f"version {answer.reward_version}"]
        for reward in answer.rewards:
            counts = "shadow" if reward.shadow else f"weight {reward.weight:g}"
            if reward.trusted:
                counts += ", trusted"
            lines.append(f"  {reward.name}  {reward.function}  {counts}, since version {reward.since}")
        return self.print({"reward_version": answer.reward_version, "rewards": answer.rewards}, *lines)


def reward_option(text: str) -> tuple[str, Any]:
    """Return key and value of ``--option key=value``: a TOML value, or else the text itself. Raises ``RecipeError``."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"--option {text}: write --option key=value, such as --option column=answer")
    return key, value_or_text(raw)


def _change(command: Command, run_directory: Path, operation: ControlOperation) -> int:
    answer = ask_run(run_directory, operation)
    assert isinstance(answer, RewardsChanged), answer
    changed = {"reward_version": answer.reward_version, "rewards": answer.rewards}
    return command.print(changed, f"version {answer.reward_version}: {', '.join(answer.rewards)}")


def ask_run(run_directory: Path, operation: ControlOperation, *, changes: bool = True) -> ControlAnswer:
    """Return the answer of a running run. Raises ``RecipeError`` for a refusal, ``StreamRLError`` if no run listens."""
    answer = anyio.run(partial(control_socket.ask_run, run_directory, operation, ANSWER_LIMIT_S, changes=changes))
    if isinstance(answer, ControlRefused):
        raise RecipeError(*answer.problems, outcome="the run is as it was")
    return answer

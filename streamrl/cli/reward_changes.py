"""``streamrl reward attach|replace|detach|list RUN``: the rewards of a run that goes on, over its control socket."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.recipe.toml_text import parse_toml

if TYPE_CHECKING:
    from streamrl.recipe.rewards import Reward
    from streamrl.remote.control_protocol import ControlAnswer, ControlOperation

ANSWER_LIMIT_S = 300.0
"""Functions are imported twice, each time within minutes, and changes wait for each other."""


def add_changes(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The four actions beside ``test``."""
    attach = actions.add_parser("attach", help="score with one more function, while the run goes on")
    _add_run(attach)
    _add_reward(attach)
    attach.set_defaults(run=_attach)
    replace = actions.add_parser(
        "replace", help="score with another function; settings that are not given have their defaults"
    )
    _add_run(replace)
    replace.add_argument("replaced", metavar="NAME", help="what it replaces, as `list` calls it")
    _add_reward(replace)
    replace.set_defaults(run=_replace)
    detach = actions.add_parser("detach", help="score without a function")
    _add_run(detach)
    detach.add_argument("name", metavar="NAME", help="as `list` calls it")
    detach.set_defaults(run=_detach)
    listing = actions.add_parser("list", help="what scores now, and since which version of the rewards")
    _add_run(listing)
    listing.add_argument("--json", action="store_true", dest="as_json", help="as JSON")
    listing.set_defaults(run=_list)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="the directory of a running run")


def _add_reward(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="module:function, file.py:function, or a built-in reward")
    parser.add_argument("--name", default="", metavar="NAME", help="what metrics call it (its own name)")
    parser.add_argument("--weight", type=float, default=1.0, metavar="W", help="what it counts (1)")
    parser.add_argument("--shadow", action="store_true", help="it scores, and nothing is trained on it")
    parser.add_argument("--trusted", action="store_true", help="in the loop of the reward worker")
    parser.add_argument("--time-limit", type=float, default=30.0, dest="timeout_s", metavar="S", help="(30)")
    parser.add_argument("--memory", type=int, default=1024, dest="memory_mib", metavar="MIB", help="(1024)")
    parser.add_argument(
        "--environment", action="append", default=[], metavar="NAME", help="a variable that the function may see"
    )
    parser.add_argument(
        "--option", action="append", default=[], dest="options", metavar="KEY=VALUE", help="one of rewards.options"
    )


def reward_option(text: str) -> tuple[str, Any]:
    """Key and value of ``--option key=value``: a TOML value, or else the text itself. Raises ``RecipeError``."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise RecipeError([f"--option {text}: write --option key=value, such as --option column=answer"])
    try:
        return key, parse_toml(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        return key, raw


def _reward(options: argparse.Namespace) -> Reward:
    from streamrl.recipe.load import resolved_reward
    from streamrl.recipe.rewards import Reward

    reward = Reward(
        function=options.function,
        name=options.name,
        options=dict(map(reward_option, options.options)),
        weight=options.weight,
        shadow=options.shadow,
        trusted=options.trusted,
        timeout_s=options.timeout_s,
        memory_mib=options.memory_mib,
        environment=tuple(options.environment),
    )
    return resolved_reward(reward, Path.cwd())  # the run has another directory


def _attach(options: argparse.Namespace) -> int:
    from streamrl.remote.reward_changes import AttachReward

    return _change(options.run_directory, AttachReward(reward=_reward(options)))


def _replace(options: argparse.Namespace) -> int:
    from streamrl.remote.reward_changes import ReplaceReward

    return _change(options.run_directory, ReplaceReward(name=options.replaced, reward=_reward(options)))


def _detach(options: argparse.Namespace) -> int:
    from streamrl.remote.reward_changes import DetachReward

    return _change(options.run_directory, DetachReward(name=options.name))


def _change(run_directory: Path, operation: ControlOperation) -> int:
    from streamrl.remote.control_socket import read_key
    from streamrl.remote.reward_changes import RewardsChanged

    path = _socket_of(run_directory)
    answer = _ask(path, operation, read_key(run_directory))
    assert isinstance(answer, RewardsChanged), answer
    print(f"version {answer.reward_version}: {', '.join(answer.rewards)}")
    return 0


def _list(options: argparse.Namespace) -> int:
    import msgspec

    from streamrl.remote.reward_changes import ListRewards, RewardsListed

    answer = _ask(_socket_of(options.run_directory), ListRewards(), "")
    assert isinstance(answer, RewardsListed), answer
    if options.as_json:
        listed = {
            "reward_version": answer.reward_version,
            "rewards": [msgspec.structs.asdict(reward) for reward in answer.rewards],
        }
        print(msgspec.json.encode(listed).decode())
        return 0
    print(f"version {answer.reward_version}")
    for reward in answer.rewards:
        counts = "shadow" if reward.shadow else f"weight {reward.weight:g}"
        where = ", trusted" if reward.trusted else ""
        print(f"  {reward.name}  {reward.function}  {counts}{where}, since version {reward.since}")
    return 0


def _socket_of(run_directory: Path) -> Path:
    import msgspec

    from streamrl.plan.topology import TOPOLOGY_FILE, control_socket, read_topology

    try:
        topology = read_topology(run_directory)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StreamRLError(
            f"{run_directory} is not the directory of a run ({TOPOLOGY_FILE}: {error}): give one, such as runs/latest"
        ) from error
    return control_socket(topology)


def _ask(path: Path, operation: ControlOperation, key: str) -> ControlAnswer:
    import anyio

    from streamrl.remote.control_protocol import ControlRefused
    from streamrl.remote.control_socket import ask_control

    answer = anyio.run(ask_control, path, operation, key, ANSWER_LIMIT_S)
    if isinstance(answer, ControlRefused):
        raise RecipeError(list(answer.problems), "the run is as it was")
    return answer

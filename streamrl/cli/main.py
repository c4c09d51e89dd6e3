"""``streamrl COMMAND``: the console script, which finds the command, runs it in its own process and reports errors.
Exit codes: 0 done or drained, 1 failed, 2 wrong input, 130 interrupted."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from streamrl.base.errors import InputError, RecipeError, StreamRLError, leaves
from streamrl.base.printable import printable
from streamrl.base.run_process import ensure_home
from streamrl.cli.command import Command, parse_command
from streamrl.observe.terminal.screen import open_screen
from streamrl.recipe.problems import did_you_mean

Failure = TypeVar("Failure", bound=BaseException)
_RESOURCE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO,
)  # fmt: skip
"""Error numbers of a machine without space, memory, descriptors or a working disk, reported also without a file
name."""
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

COMMANDS = {
    "init": ("init.command:Init", "write a folder that trains: recipe, reward, prompts, a model"),
    "check": ("check:Check", "what this machine can run, with a remedy for what it cannot"),
    "families": ("families.command:Families", "what trains of each model family, tried on tiny models"),
    "explain": ("explain:Explain", "what a recipe key means, its default and what it may be"),
    "memory": ("views.memory:Memory", "whether a recipe fits GPUs that are not here"),
    "try": ("try_rewards.recipe_trial:Try", "sample, score and measure a recipe before any training"),
    "train": ("train:Train", "run a recipe"),
    "watch": ("watch:Watch", "follow a running run through its metrics socket"),
    "dashboard": ("views.dashboard:Dashboard", "a page about runs in the browser: curves, timeline, waits, samples"),
    "top": ("views.top:Top", "look into a running run from a terminal"),
    "report": ("views.report:Report", "the same page as one HTML file"),
    "trace": ("views.report:Trace", "the timeline of a run for ui.perfetto.dev"),
    "samples": ("samples:Samples", "completions of a run, with their rewards"),
    "show": ("show:Show", "what happened in a run, while it goes on and after its end"),
    "sync": ("views.sync:Sync", "send a run to a tracker, or what it has not got yet"),
    "runs": ("trained_models.runs:Runs", "the runs of a directory, or several side by side"),
    "status": ("steering.steer:Status", "where a running run stands, and what it waits for"),
    "pause": ("steering.steer:Pause", "launch nothing more in a running run"),
    "continue": ("steering.steer:Continue", "let a paused run go on"),
    "set": ("steering.steer:SetKeys", "change settings of a running run"),
    "checkpoint": ("steering.steer:WriteNow", "have a running run write a checkpoint"),
    "evaluate": ("steering.steer:EvaluateNow", "have a running run score its held-out prompts"),
    "engine pause": ("steering.steer:PauseEngine", "send an engine no requests; it keeps its GPU memory"),
    "engine withdraw": ("steering.steer:WithdrawEngine", "stop an engine's process, which frees its GPU memory"),
    "engine return": ("steering.steer:ReturnEngine", "have a paused or withdrawn engine serve again"),
    "drain": ("control:Drain", "let a running run finish its step, save and end"),
    "resume": ("train:ResumeRun", "continue a run that was killed, or drained"),
    "eval": ("trained_models.eval:Eval", "held-out scores of a model: avg@k, pass@k, greedy"),
    "export": ("trained_models.export:Export", "the model of a run as a folder for transformers and vLLM"),
    "push": ("trained_models.export:Push", "the model of a run to a repository of the Hub"),
    "reward test": ("reward:Test", "values, spread, latency, failures, and whether groups would carry signal"),
    "reward attach": ("control:Attach", "score with one more function, while the run goes on"),
    "reward replace": ("control:Replace", "score with another function"),
    "reward detach": ("control:Detach", "score without a function"),
    "reward list": ("control:ListAttached", "what scores now, and since which version of the rewards"),
    "objective test": ("objective.command:TestObjective", "whether a loss of your own keeps the promises of a run"),
    "simulate": ("simulate:Simulate", "what a recipe would do on a cluster, in virtual time"),
    "calibrate": ("simulate:Calibrate", "fit a cluster model to a recorded run"),
    "what-if": ("what_if:WhatIf", "which rounds would bring most, at bounded staleness and bias"),
    "compare": ("compare.command:Compare", "a recipe under several systems, alternately, as one report"),
    "completion": ("help_texts.completion:PrintCompletion", "print the completion of a shell"),
    "launch slurm": ("submit.command:Slurm", "submit a run as a job of Slurm"),
    "launch kubernetes": ("submit.command:Kubernetes", "submit a run as a RayJob or a JobSet"),
    "launch template": ("submit.command:WriteTemplate", "write the template of a job, to edit it"),
    "launch ssh": ("submit.command:Ssh", "run on a list of hosts, as long as this command lasts"),
    "keys": ("keys:Keys", "make the keys by which processes on other hosts are let in"),
}
"""Module in this folder and class of each command, and its line of help, in the order in which a user needs them. A
name of two words belongs to a group."""
GROUPS = {
    "reward": "try a reward function alone; change the rewards of a running run",
    "engine": "take an engine from a running run, and give it back",
    "objective": "try a loss, or advantages, of your own",
    "launch": "start Ray on the hosts of a cluster, and a run on them",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the console script exits with the value returned."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    names = (" ".join(words[:2]), " ".join(words[:1]))
    name = next((name for name in names if name in COMMANDS), "")
    if not name:
        parser = outline()
        first_words = {command_name.partition(" ")[0] for command_name in COMMANDS}
        if words and words[0] not in first_words and not words[0].startswith("-"):
            parser.error(
                f'there is no command "{words[0]}"{did_you_mean(words[0], first_words, ";")} --help lists them'
            )
        parser.parse_args(words)  # prints help, the version or an error, and exits
    command = parse_command(load_command(name), name, words[len(name.split()) :])
    if arguments is None:
        open_screen(drops=command.follows_a_run, escapes=True)
    try:
        _check_surroundings()
        ensure_home()
        return command.run()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (StreamRLError, OSError, BaseExceptionGroup) as error:
        if BaseExceptionGroup("", [error]).subgroup(BrokenPipeError):  # `streamrl train ... | head`
            sys.stderr.close()
            return EXIT_FAILED
        return report_error(error)


def load_command(name: str) -> type[Command]:
    """Import the class of a command of ``COMMANDS``."""
    module, _, kind = COMMANDS[name][0].partition(":")
    command: type[Command] = getattr(import_module(f"streamrl.cli.{module}"), kind)
    return command


def outline(fill: Callable[[str, argparse.ArgumentParser], None] = lambda *_: None) -> argparse.ArgumentParser:
    """Return the parser of the names of all commands; ``fill`` may add the arguments of each command."""
    parser = argparse.ArgumentParser(
        prog="streamrl",
        description="RL post-training as one long-lived pipeline.",
        formatter_class=partial(
            argparse.HelpFormatter, indent_increment=1
        ),  # names of 9 letters have their help beside
    )
    parser.add_argument("--version", action="version", version=f"streamrl {_version()}")
    commands: dict[str, Any] = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    for name, (_, text) in COMMANDS.items():
        group, _, action = name.rpartition(" ")
        if group not in commands:
            outer = commands[""].add_parser(group, help=GROUPS[group])
            commands[group] = outer.add_subparsers(required=True, metavar="ACTION")
        fill(name, commands[group].add_parser(action, help=text))
    return parser


def _version() -> str:
    try:
        return version("streamrl")
    except PackageNotFoundError:
        return "from a source tree"


def report_error(error: BaseException) -> int:
    """Print the error, the cause first and without a traceback, and return the exit code.

    Raises ``error`` again when it is neither a ``StreamRLError`` nor an ``OSError`` with a path or an errno of
    ``_RESOURCE_ERRORS``: such an error is a bug, and needs its traceback."""
    cause = first_of(StreamRLError, error) or first_of(OSError, error)
    if cause is None:
        raise error
    if isinstance(cause, OSError):
        if cause.filename is None and cause.errno not in _RESOURCE_ERRORS:
            raise error
        text = f"{cause.strerror}"
        if cause.filename:
            text = f"{cause.filename}: {text}"
        _complain(f"error: {text}")
        return EXIT_FAILED
    if isinstance(cause, RecipeError):
        count = len(cause.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        _complain("\n".join([f"error: {head}; {cause.outcome}", *(f"  {problem}" for problem in cause.problems)]))
    else:
        _complain(f"error: {cause}")
    return EXIT_BAD_INPUT if isinstance(cause, InputError) else EXIT_FAILED


def first_of(kind: type[Failure], error: BaseException) -> Failure | None:
    """Return the error itself, or the first error in a group, that is of ``kind``."""
    return next((leaf for leaf in leaves(error) if isinstance(leaf, kind)), None)


def _check_surroundings() -> None:
    """Raise ``RecipeError`` where no command could look up a relative path, or a process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise RecipeError("the current directory was deleted: change to another") from None
    if sys.platform == "linux" and not Path("/proc/self").exists():
        raise RecipeError("/proc is not there: mount it (mount -t proc proc /proc)")


def _complain(text: str) -> None:
    sys.stdout.flush()
    print(printable(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""``streamrl``: train, resume, check, watch, serve, keys, reward, samples, replay, simulate, calibrate, what-if,
explain.

Exit codes: 0 done or drained, 1 failed, 2 wrong input, 130 cut short.

Heavy modules are imported by the command that needs them: ``streamrl --help`` must be quick.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.observe.terminal.printable import printable
from streamrl.observe.terminal.screen import open_screen

Failure = TypeVar("Failure", bound=BaseException)
_LACKING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO)
"""What a machine lacks, also where no file is named."""
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the console script exits with the value returned."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    if arguments is None:
        open_screen(drops=run in (_train, _resume, _serve))
    try:
        _check_surroundings()
        return run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (StreamRLError, OSError, BaseExceptionGroup) as error:
        if BaseExceptionGroup("", [error]).subgroup(BrokenPipeError):  # `streamrl train ... | head`
            sys.stderr.close()
            return EXIT_FAILED
        return report_error(error)


def report_error(error: BaseException) -> int:
    """Print what went wrong, the cause first and without a traceback, and return the exit code.

    Raises ``error`` again when it is neither a ``StreamRLError`` nor an ``OSError`` with a path or an errno of
    ``_LACKING``: that is a bug, and its traceback is wanted.
    """
    cause = first_of(StreamRLError, error) or first_of(OSError, error)
    if cause is None:
        raise error
    if isinstance(cause, OSError):
        if cause.filename is None and cause.errno not in _LACKING:
            raise error
        _complain(f"error: {f'{cause.filename}: ' if cause.filename else ''}{cause.strerror}")
        return EXIT_FAILED
    if isinstance(cause, RecipeError):
        count = len(cause.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        _complain("\n".join([f"error: {head}; {cause.outcome}", *(f"  {problem}" for problem in cause.problems)]))
        return EXIT_BAD_INPUT
    _complain(f"error: {cause}")
    return EXIT_FAILED


def first_of(kind: type[Failure], error: BaseException) -> Failure | None:
    """The error itself, or the first one in a group, that is of ``kind``."""
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, (first_of(kind, inner) for inner in error.exceptions)), None)
    return None


def _check_surroundings() -> None:
    """Raise ``RecipeError`` where no command could look up a relative path, or a process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise RecipeError(["the current directory was deleted: change to another"]) from None
    if sys.platform == "linux" and not Path("/proc/self").exists():
        raise RecipeError(["/proc is not there: mount it (mount -t proc proc /proc)"])


def _complain(text: str) -> None:
    sys.stdout.flush()
    print(printable(text), file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streamrl", description="RL post-training as one long-lived pipeline.")
    parser.add_argument("--version", action="version", version=f"streamrl {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe", description="Run a recipe. Ctrl-C drains; twice ends.")
    _add_recipe(train)
    train.add_argument("--dry-run", action="store_true", help="check everything, print it, start nothing")
    train.set_defaults(run=_train)

    resume = commands.add_parser(
        "resume",
        help="go on with a run that was killed, or drained",
        description="Go on where the journal of a run ends: nothing that was sampled or scored is lost. "
        "--set run.steps=N makes it longer, or shorter.",
    )
    resume.add_argument("run_directory", metavar="RUN", type=Path, help="the directory of the run, such as runs/latest")
    resume.add_argument(
        "--force",
        action="store_true",
        help="also where its data, model, code, packages or settings other than run.steps are not as they were",
    )
    _add_overrides(resume)
    resume.set_defaults(run=_resume)

    check = commands.add_parser("check", help="what this machine can run, with a remedy for what it cannot")
    check.add_argument("--json", action="store_true", help="a JSON array of findings")
    check.set_defaults(run=_check)

    watch = commands.add_parser("watch", help="follow a running run through its metrics socket")
    where = "the run's directory, or where it publishes: tcp://HOST:PORT or ipc://PATH"
    watch.add_argument("where", metavar="RUN|ENDPOINT", help=where)
    watch.add_argument("--keys", type=Path, metavar="DIRECTORY", help="keys of an observer, where the run has keys")
    watch.add_argument("--json", action="store_true", help="every message as a JSON line")
    watch.set_defaults(run=_watch)

    serve = commands.add_parser("serve", help="start one external process of a run by hand (transport.kind = tcp)")
    serve.add_argument("role", choices=("engine", "trainer"))
    _add_recipe(serve)
    serve.add_argument(
        "--index", type=int, metavar="I", help="which engine, or which rank (default: torchrun's RANK, else 0)"
    )
    serve.set_defaults(run=_serve)

    _add_keys(commands)
    _add_reward(commands)
    _add_aftermath(commands)
    _add_simulation(commands)
    _add_what_if(commands)

    explain = commands.add_parser("explain", help="what a recipe key means, its default and what it may be")
    explain.add_argument("key", nargs="?", default="", metavar="SECTION[.KEY]")
    explain.set_defaults(run=_explain)
    return parser


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser(
        "keys",
        help="make the keys by which processes on other hosts are let in (transport.keys)",
        description="Make a pair of CURVE keys for each role, in a directory that only you may enter.",
    )
    keys.add_argument("directory", type=Path, metavar="DIRECTORY", help="a new directory")
    keys.set_defaults(run=_keys)


def _add_reward(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from streamrl.cli.reward_arguments import add_reward

    add_reward(commands, run=_reward)


def _add_aftermath(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from streamrl.cli.aftermath import add_aftermath

    add_aftermath(commands)


def _add_simulation(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="what a recipe would do on a cluster: the real control core in virtual time",
        description="Run the control core of a recipe against models of engines, rewards and training.",
    )
    _add_recipe(simulate)
    simulate.add_argument(
        "--cluster", default="", metavar="FILE", help="a cluster model (TOML), or one of the built-in"
    )
    simulate.add_argument("--trace", type=Path, metavar="RUN", help="a recorded run: its cluster, and its lengths")
    simulate.add_argument(
        "--compare",
        default="",
        metavar="POLICY,...",
        help="rounds to compare, each with settings of its own: continuous:rollout.max_staleness=2,synchronous",
    )
    simulate.add_argument("--steps", type=int, default=40, metavar="N", help="optimizer steps that count (default 40)")
    simulate.add_argument("--warm-up", type=int, default=10, metavar="N", help="steps before them (default 10)")
    simulate.add_argument("--seed", type=int, default=0, help="of lengths and rewards")
    simulate.add_argument("--json", action="store_true", help="the reports as a JSON array")
    simulate.set_defaults(run=_simulate)

    calibrate = commands.add_parser("calibrate", help="fit a cluster model to a recorded run")
    calibrate.add_argument("recorded", type=Path, metavar="RUN", help="the directory of a run, or a trace file")
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="write the cluster model here (default: print it)")
    calibrate.set_defaults(run=_calibrate)


def _add_what_if(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what_if = commands.add_parser(
        "what-if",
        help="which rounds would bring most, under a budget of staleness and length bias",
        description="Search policies of rounds and their constants in virtual time, and print the recommended recipe.",
    )
    what_if.add_argument(
        "subject", metavar="RUN|RECIPE", type=Path, help="the directory of a recorded run, or a recipe"
    )
    _add_overrides(what_if)
    what_if.add_argument("--cluster", default="", metavar="FILE", help="a cluster model (TOML), or one of the built-in")
    what_if.add_argument(
        "--max-staleness", type=int, metavar="S", help="oldest trained token, in steps (default: that of the recipe)"
    )
    what_if.add_argument(
        "--min-length-share",
        type=float,
        default=0.9,
        metavar="X",
        help="mean trained length over the unbiased one, at least (default 0.9)",
    )
    what_if.add_argument(
        "--steps", type=int, default=90, metavar="N", help="steps that count, a candidate (default 90)"
    )
    what_if.add_argument("--warm-up", type=int, default=10, metavar="N", help="steps before them (default 10)")
    what_if.add_argument("--seed", type=int, default=0, help="of lengths and rewards")
    what_if.add_argument("--json", action="store_true", help="all candidates as JSON")
    what_if.set_defaults(run=_what_if)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="a recipe (TOML), or the directory of a run")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        help="override one value, such as rollout.group_size=4 or rewards.0.weight=2; may be repeated",
    )


def _version() -> str:
    try:
        return version("streamrl")
    except PackageNotFoundError:
        return "from a source tree"


def recipe_file(path: Path) -> Path:
    """The recipe of a run directory, or the path itself."""
    return path / "recipe.toml" if path.is_dir() else path


def _train(options: argparse.Namespace) -> int:
    from streamrl.recipe.load import load_recipe

    recipe = load_recipe(recipe_file(options.recipe), options.overrides)
    if options.dry_run:
        from streamrl.cli.dry_run import dry_run

        return dry_run(recipe, options.recipe, options.overrides)
    from streamrl.cli.train import train

    return 0 if train(recipe) else EXIT_INTERRUPTED


def _resume(options: argparse.Namespace) -> int:
    from streamrl.cli.train import resume

    return 0 if resume(options.run_directory, options.overrides, force=options.force) else EXIT_INTERRUPTED


def _check(options: argparse.Namespace) -> int:
    from streamrl.cli.check import check

    return check(as_json=options.json)


def _keys(options: argparse.Namespace) -> int:
    from streamrl.cli.keys import write_keys

    return write_keys(options.directory)


def _watch(options: argparse.Namespace) -> int:
    from streamrl.cli.watch import watch

    return watch(options.where, as_json=options.json, keys=options.keys)


def _serve(options: argparse.Namespace) -> int:
    from streamrl.cli.serve import serve
    from streamrl.recipe.load import load_recipe

    recipe = load_recipe(recipe_file(options.recipe), options.overrides)
    return serve(options.role, recipe, options.index, options.recipe if options.recipe.is_dir() else None)


def _reward(options: argparse.Namespace) -> int:
    from streamrl.cli.reward import run_reward_test
    from streamrl.cli.reward_arguments import to_request

    return run_reward_test(to_request(options))


def _simulate(options: argparse.Namespace) -> int:
    from streamrl.cli.simulate import Request, simulate_recipe

    return simulate_recipe(
        Request(
            recipe=recipe_file(options.recipe),
            overrides=tuple(options.overrides),
            cluster=options.cluster,
            trace=options.trace,
            compare=options.compare,
            steps=options.steps,
            warm_up=options.warm_up,
            seed=options.seed,
            as_json=options.json,
        )
    )


def _calibrate(options: argparse.Namespace) -> int:
    from streamrl.cli.simulate import calibrate_run

    return calibrate_run(options.recorded, options.out)


def _what_if(options: argparse.Namespace) -> int:
    from streamrl.cli.what_if import Question, what_if

    return what_if(
        Question(
            subject=options.subject,
            overrides=tuple(options.overrides),
            cluster=options.cluster,
            max_staleness=options.max_staleness,
            min_length_share=options.min_length_share,
            steps=options.steps,
            warm_up=options.warm_up,
            seed=options.seed,
            as_json=options.json,
        )
    )


def _explain(options: argparse.Namespace) -> int:
    from streamrl.rules.explain import explain

    print("\n".join(explain(options.key)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

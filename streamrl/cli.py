"""``streamrl``: train, check, watch, serve, explain.

Exit codes: 0 done or drained, 1 failed, 2 wrong input, 130 cut short.

Heavy modules are imported by the command that needs them: ``streamrl --help`` must be quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from streamrl.errors import RecipeError, StreamRLError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the console script exits with the value returned."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `streamrl train ... | head`
        sys.stderr.close()
        return EXIT_FAILED
    except (StreamRLError, BaseExceptionGroup) as error:
        return report_error(error)


def report_error(error: BaseException) -> int:
    """Print what went wrong, the cause first and without a traceback, and return the exit code.

    Raises ``error`` again when it is no failure that streamrl names: that is a bug, and its traceback is wanted.
    """
    cause = first_named(error)
    if cause is None:
        raise error
    if isinstance(cause, RecipeError):
        count = len(cause.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        _complain("\n".join([f"error: {head}; nothing was started", *(f"  {problem}" for problem in cause.problems)]))
        return EXIT_BAD_INPUT
    _complain(f"error: {cause}")
    return EXIT_FAILED


def first_named(error: BaseException) -> StreamRLError | None:
    """The error itself, or the first one in a group, that streamrl raised on purpose."""
    if isinstance(error, StreamRLError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(first_named, error.exceptions)), None)
    return None


def _complain(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streamrl", description="RL post-training as one long-lived pipeline.")
    parser.add_argument("--version", action="version", version=f"streamrl {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe", description="Run a recipe. Ctrl-C drains; twice ends.")
    _add_recipe(train)
    train.add_argument("--dry-run", action="store_true", help="check everything, print it, start nothing")
    train.set_defaults(run=_train)

    check = commands.add_parser("check", help="what this machine can run, with a remedy for what it cannot")
    check.add_argument("--json", action="store_true", help="a JSON array of findings")
    check.set_defaults(run=_check)

    watch = commands.add_parser("watch", help="follow a running run through its metrics socket")
    watch.add_argument("endpoint", metavar="ENDPOINT", help="tcp://HOST:PORT or ipc://PATH; the run prints its own")
    watch.add_argument("--json", action="store_true", help="every message as a JSON line")
    watch.set_defaults(run=_watch)

    serve = commands.add_parser("serve", help="start one external process of a run by hand (transport.kind = tcp)")
    serve.add_argument("role", choices=("engine", "trainer"))
    _add_recipe(serve)
    serve.add_argument(
        "--index", type=int, metavar="I", help="which engine, or which rank (default: torchrun's RANK, else 0)"
    )
    serve.set_defaults(run=_serve)

    explain = commands.add_parser("explain", help="what a recipe key means, its default and what it may be")
    explain.add_argument("key", nargs="?", default="", metavar="SECTION[.KEY]")
    explain.set_defaults(run=_explain)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="a recipe (TOML), or the directory of a run")
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
    from streamrl.config.load import load_recipe

    recipe = load_recipe(recipe_file(options.recipe), options.overrides)
    if options.dry_run:
        from streamrl.cli_dry_run import dry_run

        return dry_run(recipe, options.recipe, options.overrides)
    from streamrl.cli_train import train

    return 0 if train(recipe) else EXIT_INTERRUPTED


def _check(options: argparse.Namespace) -> int:
    from streamrl.cli_check import check

    return check(as_json=options.json)


def _watch(options: argparse.Namespace) -> int:
    from streamrl.cli_watch import watch

    return watch(options.endpoint, as_json=options.json)


def _serve(options: argparse.Namespace) -> int:
    from streamrl.cli_serve import serve
    from streamrl.config.load import load_recipe

    return serve(options.role, load_recipe(recipe_file(options.recipe), options.overrides), options.index)


def _explain(options: argparse.Namespace) -> int:
    from streamrl.config.explain import explain

    print("\n".join(explain(options.key)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

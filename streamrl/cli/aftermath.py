"""The command line of ``streamrl samples`` and ``replay``, without what it takes to run them."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_aftermath(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What is asked of a run that has ended, or was killed; of its completions also while it runs."""
    samples = commands.add_parser(
        "samples",
        help="completions of a run, with their rewards",
        description="Show the best, the worst and a random completion of training steps and evaluations.",
    )
    samples.add_argument("run_directory", metavar="RUN", type=Path, help="the directory of a run, such as runs/latest")
    samples.add_argument("--step", type=_steps, default=(), metavar="N,...", help="steps (default: the last)")
    samples.add_argument("--best", action="append_const", dest="kinds", const="best", help="the best one only")
    samples.add_argument("--worst", action="append_const", dest="kinds", const="worst", help="the worst one only")
    samples.set_defaults(run=_samples)

    replay = commands.add_parser(
        "replay",
        help="what control knew when a run failed: from its crash bundle, or its directory",
        description="Rebuild the state of control from the recorded events, and print it.",
    )
    replay.add_argument("subject", metavar="BUNDLE|RUN", type=Path, help="a crash bundle, or the directory of a run")
    replay.set_defaults(run=_replay)


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of steps: write it as 0,20") from None


def _samples(options: argparse.Namespace) -> int:
    from streamrl.cli.samples import show_samples

    return show_samples(options.run_directory, options.step, options.kinds or ("best", "worst", "random"))


def _replay(options: argparse.Namespace) -> int:
    from streamrl.cli.replay import replay

    return replay(options.subject)

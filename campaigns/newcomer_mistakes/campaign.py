"""Mistakes of a newcomer: each is refused before an engine starts, in one sentence with place, value and remedy.
A further kind is a module of this folder with a table ``MISTAKES``, and its name in ``KINDS``."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from campaigns.front_door.campaign import try_variant
from campaigns.newcomer_mistakes.mistake import Mistake, problem_of

KINDS = ("recipes", "command_lines", "data_files", "models", "user_code", "surroundings", "runs")


def mistakes(words: Sequence[str] = ()) -> Iterator[tuple[str, Mistake]]:
    """Each mistake with its kind and name, of which one has one of ``words`` (empty: all)."""
    for kind in KINDS:
        table: dict[str, Mistake] = import_module(f"campaigns.newcomer_mistakes.{kind}").MISTAKES
        for name, mistake in table.items():
            if not words or any(word in f"{kind}: {name}" for word in words):
                yield f"{kind}: {name}", mistake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mistakes with one of these in kind or name")
    parser.set_defaults(work=make_mistakes)


def make_mistakes(arguments: argparse.Namespace) -> int:
    """Make the mistakes and print what is wrong in the answers; 1 where something is."""
    began = time.monotonic()
    wrong: list[str] = []
    count = 0
    with tempfile.TemporaryDirectory(prefix="mistakes-") as directory:
        for count, (name, mistake) in enumerate(mistakes(arguments.words), start=1):
            at = time.monotonic()
            said = try_variant(partial(problem_of, mistake), Path(directory) / str(count))
            print(f"  {name}: {said or 'refused'} ({time.monotonic() - at:.1f} s)", flush=True)
            if said:
                wrong.append(f"{name}: {said}")
    print(f"\n{count} mistakes, {count - len(wrong)} refused well, {time.monotonic() - began:.0f} s", *wrong, sep="\n")
    return int(bool(wrong))

"""Variants of the files that people bring, each tried on the product and on what transformers, vLLM or TRL make of it.

A module of this folder holds the variants of one kind: ``VARIANTS`` maps a name to a function that gets a folder,
makes the variant there, asks the product and the yardstick, and returns '' where the product is right, else one line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

KINDS = ("models", "tokenizers", "templates", "tables", "signatures")

Variant = Callable[[Path], str]


def variants_of(kind: str, package: str = "campaigns.front_door") -> Mapping[str, Variant]:
    """The variants of ``kind``, a module of ``package``; empty where it has no module yet."""
    name = f"{package}.{kind}"
    return import_module(name).VARIANTS if find_spec(name) is not None else {}


def try_variant(variant: Variant, directory: Path) -> str:
    """One line about what is wrong, or ''. An exception of a variant is a wrong answer too."""
    directory.mkdir()
    try:
        said = variant(directory)
    except Exception as error:  # noqa: BLE001 - of the product, which lets no foreign exception out
        said = f"{type(error).__name__}: {error}"
    return " ".join(said.split())


def add_arguments(
    parser: argparse.ArgumentParser, package: str = "campaigns.front_door", kinds: Sequence[str] = KINDS
) -> None:
    """Add the arguments of a campaign whose variants are the modules ``kinds`` of ``package``."""
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds)} (all)")
    parser.add_argument("--only", default="", metavar="WORD", help="variants that have it in their names")
    parser.set_defaults(work=partial(try_kinds, package, kinds))


def try_kinds(package: str, kinds: Sequence[str], arguments: argparse.Namespace) -> int:
    """Print progress, a table by kind and what is wrong; 1 where something is."""
    if unknown := set(arguments.kinds) - set(kinds):
        raise SystemExit(f"no kind {', '.join(sorted(unknown))}: one of {', '.join(kinds)}")
    table: dict[str, tuple[int, int]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="front-door-") as directory:
        for kind in arguments.kinds or kinds:
            variants = {name: one for name, one in variants_of(kind, package).items() if arguments.only in name}
            before = len(wrong)
            for number, (name, variant) in enumerate(variants.items()):
                began = time.monotonic()
                said = try_variant(variant, Path(directory) / f"{kind}-{number}")
                print(f"  {kind}: {name}: {said or 'right'} ({time.monotonic() - began:.1f} s)", flush=True)
                if said:
                    wrong.append(f"{kind}: {name}: {said}")
            table[kind] = (len(variants), len(wrong) - before)
    print(f"\n{'kind':<12}{'variants':>9}{'right':>7}{'wrong':>7}")
    for kind, (count, bad) in {**table, "all": tuple(map(sum, zip(*table.values(), strict=True)))}.items():
        print(f"{kind:<12}{count:>9}{count - bad:>7}{bad:>7}")
    print(*wrong, sep="\n")
    return int(bool(wrong))

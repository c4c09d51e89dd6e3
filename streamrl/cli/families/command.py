"""``streamrl families``: what this checkout does with the model families that it knows, tried on tiny checkpoints. The
processes that try them are ``engines.families.family_probe``."""

from __future__ import annotations

from typing import Annotated

from streamrl.base.errors import InputError
from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command
from streamrl.learning.families.family import read_families


class Families(Command, frozen=True):
    """Try model families: the trainer loads a tiny random checkpoint that is laid out as the published ones, vLLM must
    have a place for each tensor, an engine on a CPU must compute what the trainer does, and 20 pushes must arrive.
    About a minute a family."""

    names: Annotated[Texts, Argument("families to try (default: all)", "FAMILY", positional=True)] = ()
    list: Annotated[bool, Argument("print the names, and try nothing")] = False

    def run(self) -> int:
        """Return 1 if a family is refused."""
        families = read_families()
        unknown = [name for name in self.names if name not in families]
        if unknown:
            raise InputError(f"no family is called {unknown[0]!r}: choose among {', '.join(families)}")
        selection = [families[name] for name in self.names or families]
        if self.list:
            return self.print(
                {family.name: family.title for family in selection},
                *(f"{family.name:<16} {family.title}" for family in selection),
            )
        from streamrl.engines.families.family_probe import try_family

        reports = []
        if not self.json:
            print("| model | class in transformers | |\n|---|---|---|", flush=True)
        for family in selection:
            report = try_family(family)
            reports.append(report)
            if not self.json:
                print(f"| {report.title} | `{family.model_class}` | {report.verdict} |", flush=True)
        if self.json:
            self.print([{"name": report.name, "verdict": report.verdict} for report in reports])
        return int(any(report.verdict.startswith("refused") for report in reports))

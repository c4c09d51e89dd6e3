"""``streamrl samples``: completions of a run, those that were trained on and those of evaluations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import read_lines
from streamrl.base.printable import printable
from streamrl.base.run_events import CompletionSampled
from streamrl.cli.command import Argument, Command, RunPath
from streamrl.observe.follow.run_files import RunFiles
from streamrl.observe.terminal.step_line import sample_block


class Samples(Command, frozen=True):
    """Show the best, the worst and a random completion of training steps and evaluations."""

    run_directory: RunPath
    step: Annotated[tuple[int, ...], Argument("steps (default: the last)", metavar="N,...")] = ()
    best: Annotated[bool, Argument("the best one only")] = False
    worst: Annotated[bool, Argument("the worst one only")] = False

    def run(self) -> int:
        asked = tuple(kind for kind in ("best", "worst") if getattr(self, kind))
        found = _samples(self.run_directory, self.step, asked or ("best", "worst", "random"))
        blocks = ["\n".join(sample_block(f"{what}, step {one.step}, {one.chosen}", one)) for what, one in found]
        return self.print([{"of": what, "sample": one} for what, one in found], printable("\n\n".join(blocks)))


def _samples(run_directory: Path, steps: Sequence[int], kinds: Sequence[str]) -> list[tuple[str, CompletionSampled]]:
    """Return the samples of ``kinds`` (``best``, ``worst``, ``random``) of ``steps`` (empty: the last step that was
    trained, and the last evaluation), each with the name of its source. Raises ``StreamRLError`` where there are none.
    """
    if not (run_directory / "recipe.toml").is_file():
        raise StreamRLError(f"{run_directory} is not the directory of a run: give one, such as runs/latest")
    trained: dict[int, dict[str, CompletionSampled]] = {}
    run = RunFiles(run_directory)
    for sample in read_lines(run.samples, CompletionSampled):
        if sample.step < max(trained, default=0):  # the run went back: later steps were trained again, or are gone
            trained = {step: samples for step, samples in trained.items() if step < sample.step}
        trained.setdefault(sample.step, {})[sample.chosen] = sample
    files = run.evaluations()
    chosen = set(steps) if steps else {*list(trained)[-1:], *list(files)[-1:]}
    samples: list[tuple[str, CompletionSampled]] = []
    for step in sorted(chosen):
        evaluated = _of_evaluation(files[step], step) if step in files else {}
        for what, found in (("training", trained.get(step, {})), ("evaluation", evaluated)):
            samples += [(what, found[kind]) for kind in kinds if kind in found]
    if not samples:
        known = f"training has steps {min(trained)} to {max(trained)}" if trained else "it has trained no step"
        if files:
            known += f", evaluations {', '.join(map(str, files))}"
        raise StreamRLError(f"{run_directory} has no completions of what was asked for: {known}")
    return samples


def _of_evaluation(path: Path, step: int) -> dict[str, CompletionSampled]:
    """The best, the worst and a random completion of an evaluation."""
    scored = read_lines(path, CompletionSampled)  # lines without a reward are none
    ordered = sorted(scored, key=lambda one: one.reward)
    if not ordered:
        return {}
    some = {"best": ordered[-1], "worst": ordered[0], "random": random.Random(step).choice(ordered)}
    return {kind: msgspec.structs.replace(one, step=step, chosen=kind) for kind, one in some.items()}

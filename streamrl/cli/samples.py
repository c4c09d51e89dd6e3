"""``streamrl samples``: completions of the training steps and evaluations of a run. Only reads files of the run, in the
command's own process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from streamrl.base.errors import InputError
from streamrl.base.line_file import read_lines
from streamrl.base.printable import printable
from streamrl.base.run_events import CompletionSampled
from streamrl.cli.command import Argument, Command, RunPath
from streamrl.observe.run_files.run_reader import RunFiles
from streamrl.observe.terminal.step_line import sample_block


class Samples(Command, frozen=True):
    """Show the best, the worst and a random completion of training steps and evaluations."""

    run_directory: RunPath
    step: Annotated[tuple[int, ...], Argument("steps (default: the last)", metavar="N,...")] = ()
    best: Annotated[bool, Argument("the best one only")] = False
    worst: Annotated[bool, Argument("the worst one only")] = False

    def run(self) -> int:
        kinds = [kind for kind in ("best", "worst") if getattr(self, kind)]
        samples = _samples(self.run_directory, self.step, kinds or ("best", "worst", "random"))
        blocks = [
            "\n".join(sample_block(f"{source}, step {sample.step}, {sample.chosen}", sample))
            for source, sample in samples
        ]
        records = [{"of": source, "sample": sample} for source, sample in samples]
        return self.print(records, printable("\n\n".join(blocks)))


_ByKind = dict[tuple[str, str], CompletionSampled]
"""Samples by set (empty: there is one) and kind."""


def _samples(run_directory: Path, steps: Sequence[int], kinds: Sequence[str]) -> list[tuple[str, CompletionSampled]]:
    """Return the samples of ``kinds`` (``best``, ``worst``, ``random``) of ``steps`` (empty: the last step that was
    trained, and the last evaluation), each with the name of its source. Raises ``StreamRLError`` where there are none.
    """
    if not (run_directory / "recipe.toml").is_file():
        raise InputError(f"{run_directory} is not the directory of a run: name one, such as runs/latest")
    trained: dict[int, _ByKind] = {}
    run = RunFiles(run_directory)
    for sample in read_lines(run.samples, CompletionSampled):
        if sample.step < max(trained, default=0):  # a resumed run discards or repeats later steps
            trained = {step: samples for step, samples in trained.items() if step < sample.step}
        trained.setdefault(sample.step, {})[sample.set, sample.chosen] = sample
    files = run.evaluations()
    last_steps = {*list(trained)[-1:], *list(files)[-1:]}
    samples = []
    for step in sorted(set(steps) or last_steps):
        by_source = {"training": trained.get(step, {})}
        if step in files:
            by_source["evaluation"] = _evaluation_samples(files[step], step)
        for source, candidates in by_source.items():
            for name in sorted({name for name, _ in candidates}):
                source_of_set = f"{source} of {name}" if name else source
                samples += [(source_of_set, candidates[name, kind]) for kind in kinds if (name, kind) in candidates]
    if not samples:
        available = f"training has steps {min(trained)} to {max(trained)}" if trained else "it has trained no step"
        if files:
            available += f", evaluations {', '.join(map(str, files))}"
        raise InputError(f"{run_directory} has no completions of what was asked for: {available}")
    return samples


def _evaluation_samples(path: Path, step: int) -> _ByKind:
    """Return the best, the worst and a random completion of each set of an evaluation."""
    by_kind = {}
    scored = list(read_lines(path, CompletionSampled))  # skips lines without a reward
    for name in sorted({sample.set for sample in scored}):
        ordered = sorted((sample for sample in scored if sample.set == name), key=lambda sample: sample.reward)
        by_kind[name, "best"] = ordered[-1]
        by_kind[name, "worst"] = ordered[0]
        by_kind[name, "random"] = random.Random(step).choice(ordered)
    return {(name, kind): replace(sample, step=step, chosen=kind) for (name, kind), sample in by_kind.items()}

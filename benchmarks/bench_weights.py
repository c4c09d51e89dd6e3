"""What weight deltas take, in bytes and seconds, on your model or on a synthetic one: bytes against other forms and
against their entropy, and GB/s.

    python benchmarks/bench_weights.py --params 0.5G --density 0.01     # synthetic weights and an Adam step on noise
    python benchmarks/bench_weights.py --model MODEL                    # the same on the weights of a model
    python benchmarks/bench_weights.py --model OLD NEW --json           # what changed between two checkpoints"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from synthetic_updates import (
    STEPS,
    HalfArray,
    Pattern,
    adam_step,
    draw_weights,
    learning_rate_for,
    synthetic_model,
    to_bfloat16,
    uniform_step,
)
from weight_measurement import DeltaMeter, Measurement, UpdatedTensor, slices_of

from streamrl.base.errors import RecipeError, WeightError
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.pull.loaded_checkpoint import CheckpointTensor, map_checkpoint

DEFAULT_PARAMETERS = 50_000_000
DEFAULT_DENSITY = 0.01
MOST_PARAMETERS = 10**13
LARGEST_ADAM_DENSITY = 0.95
REPEATED_ELEMENTS = 1 << 22
"""How long a recorded tensor becomes by being repeated, as in a model of 0.5 to 1 G parameters."""

SAMPLE_ELEMENTS = 1 << 20
"""Weights on which a learning rate is searched that gives the density."""

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for. ``density``: None where it was not given."""

    model: tuple[Path, ...] = ()
    parameters: str = ""
    density: float | None = None
    pattern: Pattern = Pattern.ADAM
    threads: int = 1
    seed: int = 0
    as_json: bool = False


class Updates(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: in words, how many elements there will be, and the tensors one after another."""

    description: str
    elements: int
    tensors: Iterator[UpdatedTensor]


def bench_weights(request: BenchRequest) -> int:
    """Measure and print tables (or JSON). Raises ``RecipeError`` for input that cannot be measured."""
    try:
        updates = updates_of(request)
    except WeightError as error:
        raise RecipeError(str(error)) from None
    measured = _measure(updates, request.threads)
    if request.as_json:
        print(msgspec.json.format(msgspec.json.encode(measured), indent=2).decode())
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{measured.updates}: {measured.changed:,} of {measured.elements:,} elements changed", end=" ")
    console.print(f"({measured.density:.3%}), {measured.tensors} tensors")
    console.print(size_table(measured))
    console.print(speed_table(measured))
    console.print(
        "apply: a scatter into a copy in memory (the replica of a node). The pause of an engine is not measured here: "
        "python benchmarks/weight_apply.py",
        highlight=False,
    )
    return 0


def parse_parameters(text: str) -> int:
    """``500M``, ``0.5G``, ``1e6`` or ``123456`` as a number. Raises ``RecipeError``."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmgb]?)", text.strip().lower())
    try:
        number = int(float(match[1]) * _SCALES[match[2]]) if match else 0
    except (ValueError, OverflowError):
        number = 0
    if not 1 <= number <= MOST_PARAMETERS:
        raise RecipeError(f"--params {text!r} is no number of parameters: give one such as 500M, 0.5G or 1000000")
    return number


def updates_of(request: BenchRequest) -> Updates:
    """The updates that the request names. Raises ``RecipeError`` or ``WeightError``; nothing large is made yet."""
    density = DEFAULT_DENSITY if request.density is None else request.density
    if not 0 < density <= 1:
        raise RecipeError(f"--density {density:g} is no share of elements: give one above 0 and up to 1, such as 0.01")
    if request.threads < 1 or request.seed < 0:
        raise RecipeError(f"--threads {request.threads} --seed {request.seed}: at least 1 and 0")
    parameters = parse_parameters(request.parameters) if request.parameters else None
    if len(request.model) > 2:
        raise RecipeError(f"--model was given {len(request.model)} paths: one model, or an old and a new version of it")
    if len(request.model) == 2:
        if request.density is not None or request.pattern is not Pattern.ADAM:
            raise RecipeError("--density and --pattern make an update up; two versions are one: leave them out")
        return _recorded(request.model[0], request.model[1], parameters)
    if request.model:
        if parameters is not None:
            raise RecipeError(f"--params {request.parameters} and --model {request.model[0]}: the model has its size")
        return _on_model(request.model[0], density, request)
    return _synthetic(parameters or DEFAULT_PARAMETERS, density, request)


def _recorded(old: Path, new: Path, parameters: int | None) -> Updates:
    """The update between two versions of a model, repeated until there are about ``parameters`` elements: its tensors
    become longer, as those of a larger model are, and then more."""
    before, after = map_checkpoint(old), map_checkpoint(new)
    _refuse_different(before, after, old, new)
    elements = sum(tensor.bits.size for tensor in before.values())
    repeats = 1 if parameters is None else max(1, round(parameters / elements))

    def tensors() -> Iterator[UpdatedTensor]:
        for name, tensor in before.items():
            longest = max(1, REPEATED_ELEMENTS // max(1, tensor.bits.size))
            for turn in range(0, repeats, longest):
                times = min(longest, repeats - turn)
                # Copied: pages are read before the clock starts.
                bits = [np.concatenate([version[name].bits] * times) for version in (before, after)]
                yield UpdatedTensor(f"{turn}.{name}" if turn else name, tensor.dtype, *bits)

    times = f", repeated {repeats} times" if repeats > 1 else ""
    return Updates(description=f"recorded, {old} to {new}{times}", elements=elements * repeats, tensors=tensors())


def _refuse_different(
    before: Mapping[str, CheckpointTensor], after: Mapping[str, CheckpointTensor], old: Path, new: Path
) -> None:
    if before.keys() != after.keys():
        names = sorted(before.keys() ^ after.keys())
        raise WeightError(
            f"{old} and {new} differ in {len(names)} tensor names ({', '.join(names[:3])}): "
            "give two versions of one model"
        )
    for name, tensor in before.items():
        other = after[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise WeightError(
                f"{name!r} is {tensor.dtype} {list(tensor.shape)} in {old} and {other.dtype} {list(other.shape)} in "
                f"{new}: give two versions of one model"
            )


def _on_model(path: Path, density: float, request: BenchRequest) -> Updates:
    """A synthetic step on the weights of a model, rounded to bfloat16 where they are in another dtype."""
    held = map_checkpoint(path)
    elements = sum(tensor.bits.size for tensor in held.values())

    def weights(name: str) -> HalfArray:
        return _as_bfloat16(held[name].dtype, held[name].bits)

    def sample() -> HalfArray:
        """The beginning of every tensor, as much of each."""
        share = min(1.0, SAMPLE_ELEMENTS / elements)
        parts = [(tensor.dtype, tensor.bits[: math.ceil(share * tensor.bits.size)]) for tensor in held.values()]
        return np.concatenate([_as_bfloat16(dtype, bits) for dtype, bits in parts])

    return Updates(
        description=f"{_pattern_words(request.pattern)} on the weights of {path}",
        elements=elements,
        tensors=_drawn_steps(list(held), weights, request, _step_size(density, request.pattern, sample)),
    )


def _as_bfloat16(dtype: str, bits: BitArray) -> HalfArray:
    if dtype == "bfloat16":
        return bits.astype(np.uint16, copy=False)
    floats = bits.view(np.float32 if dtype == "float32" else np.float16)
    return to_bfloat16(floats.astype(np.float32))


def _synthetic(parameters: int, density: float, request: BenchRequest) -> Updates:
    """A synthetic step on drawn weights."""
    shapes = {shape.name: shape.elements for shape in synthetic_model(parameters)}
    places = {name: place for place, name in enumerate(shapes)}

    def weights(name: str) -> HalfArray:
        return draw_weights(shapes[name], request.seed, places[name])

    def sample() -> HalfArray:
        return draw_weights(SAMPLE_ELEMENTS, request.seed, len(shapes))

    return Updates(
        description=f"{_pattern_words(request.pattern)} on normal weights",
        elements=parameters,
        tensors=_drawn_steps(list(shapes), weights, request, _step_size(density, request.pattern, sample)),
    )


def _step_size(density: float, pattern: Pattern, sample: Callable[[], HalfArray]) -> float:
    """The learning rate at which ``density`` of the weights changes; the density itself for a uniform pattern."""
    if pattern is Pattern.UNIFORM:
        return density
    if density > LARGEST_ADAM_DENSITY:
        raise RecipeError(
            f"--density {density:g}: a noise step leaves some elements; give at most {LARGEST_ADAM_DENSITY:g}"
        )
    return learning_rate_for(density, sample())


def _drawn_steps(
    names: Sequence[str], weights: Callable[[str], HalfArray], request: BenchRequest, size: float
) -> Iterator[UpdatedTensor]:
    """``size``: as ``_step_size`` gives it."""
    step = adam_step if request.pattern is Pattern.ADAM else uniform_step
    with ThreadPoolExecutor(request.threads) as pool:

        def drawn(place: int, name: str) -> UpdatedTensor:
            return UpdatedTensor(name, "bfloat16", *step(weights(name), size, request.seed, place))

        for start in range(0, len(names), request.threads):
            yield from pool.map(drawn, range(start, start + request.threads), names[start : start + request.threads])


def _pattern_words(pattern: Pattern) -> str:
    if pattern is Pattern.UNIFORM:
        return "uniform positions, one step up or down,"
    return f"Adam step {STEPS} on noise"


def _measure(updates: Updates, threads: int) -> Measurement:
    """All slices, with a progress bar on stderr: half of it while tensors are made, half while they are measured."""
    meter = DeltaMeter(threads)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=updates.elements)

        def made() -> Iterator[UpdatedTensor]:
            for tensor in updates.tensors:
                progress.advance(task, tensor.old.size / 2)
                yield tensor

        for tensors in slices_of(made()):
            meter.add(tensors)
            progress.advance(task, sum(tensor.old.size for tensor in tensors) / 2)
    if not meter.changed:
        raise RecipeError(f"{updates.description}: none of {updates.elements:,} elements differs: give two versions")
    return meter.result(updates.description)


def size_table(measured: Measurement) -> Table:
    """Bytes of the update in each form."""
    sizes = measured.sizes
    table = Table(title="size", title_justify="left")
    for heading in ("form", "bytes", "a changed element", "of dense", "streamrl's delta is"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    rows = (
        ("dense", float(sizes.dense_bytes)),
        ("int32 + values", float(sizes.index_value_bytes)),
        ("entropy without context", sizes.context_free_bytes),
        ("entropy given the old exponent", sizes.conditional_bytes),
        ("  the same, each tensor by itself", sizes.conditional_by_tensor_bytes),
        ("streamrl's delta", float(sizes.encoded_bytes)),
    )
    for form, size in rows:
        ratio = size / sizes.encoded_bytes
        compared = f"{ratio:,.1f} x smaller" if ratio >= 2 else f"{1 / max(ratio, 1e-9):.3f} x as large"
        cells = (f"{size:,.0f}", f"{size / measured.changed:.3f}", f"{size / sizes.dense_bytes:.3%}")
        table.add_row(form, *cells, "" if form == "streamrl's delta" else compared)
    return table


def speed_table(measured: Measurement) -> Table:
    """Speed of each stage."""
    cores = "one core" if measured.threads == 1 else f"{measured.threads} threads"
    table = Table(title=f"speed, {cores}, GB of dense weights", title_justify="left")
    for heading in ("stage", "seconds", "GB/s", "GB/s of processor time"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage, cost in measured.stages.items():
        table.add_row(stage, f"{cost.wall_s:.3f}", f"{cost.dense_gb_per_s:.2f}", f"{cost.dense_gb_per_core_s:.2f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="a Hugging Face directory or safetensors file: a synthetic step on its weights; two: an old and a new one",
    )
    parser.add_argument(
        "--params",
        default="",
        metavar="N",
        help="parameters of a synthetic model, such as 500M (default 50M); two versions are repeated up to it",
    )
    parser.add_argument("--density", type=float, metavar="P", help="share of elements that change (default 0.01)")
    parser.add_argument(
        "--pattern",
        type=Pattern,
        choices=list(Pattern),
        default=Pattern.ADAM,
        help="an Adam step on noise, or any element with equal chance (the worst for a codec)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each stage (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of synthetic weights and steps")
    parser.add_argument("--json", action="store_true", help="the measurement as JSON")
    options = parser.parse_args(arguments)
    try:
        return bench_weights(
            BenchRequest(
                model=tuple(options.model),
                parameters=options.params,
                density=options.density,
                pattern=options.pattern,
                threads=options.threads,
                seed=options.seed,
                as_json=options.json,
            )
        )
    except RecipeError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Every family of the tables: packed rows against transformers' own forward of each sequence, gradients, and exports.

Tiny random checkpoints (``streamrl/learning/families``), and one row of nine sequences in four groups: shared prompts
of 1 to 40 tokens, completions of one token and of more than every window and chunk. Of each family: the largest
differences of logprobs and of the gradient (relative, over all parameters), in float64 where float32 is not exact to
2e-5 or 1e-4; how far logprobs move where groups of the row change places; how many tensors of an export before training
differ in a bit or a type; and of an export after a step, which transformers loads, how many that are not trained do.
Exit code 1 where a family is neither exact nor among the refused ones. About a minute."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import transformers
from msgspec import Struct
from safetensors.torch import load_file
from torch import Tensor

from streamrl.base.errors import StreamRLError
from streamrl.base.types import TrainingSample, TrajectoryId, float_array, token_array
from streamrl.learning.batches.packing import PreparedSample, pack
from streamrl.learning.families.family import read_families
from streamrl.learning.families.tiny_checkpoint import write_tiny_checkpoint
from streamrl.learning.model.loading import load_policy
from streamrl.learning.objective.logprobs import token_logprobs
from streamrl.learning.state.checkpoint import save_hugging_face
from streamrl.learning.state.published_weights import FullWeights

CPU = torch.device("cpu")
LOGPROBS, GRADIENT = 2e-5, 1e-4
DOUBLE = 1e-9
SWAPPED = 2e-6
"""Batches of sequences, and experts, compute tokens in another order when sequences change places: last bits differ."""
GROUPS = ((40, (5, 30, 1)), (4, (1, 70, 100)), (1, (1,)), (6, (20, 20)))
"""Tokens of a group's prompt, and of each of its completions."""
REFUSED = {"qwen3_vl_moe": "published transposed"}


class Outcome(Struct, frozen=True):
    """One row of the table. ``refusal``: why the trainer does not load it; ``double``: whether it was computed in
    float64; ``export``, ``after``: numbers of wrong tensors before and after a step."""

    family: str
    refusal: str = ""
    logprobs: float = 0.0
    gradient: float = 0.0
    swapped: float = 0.0
    double: bool = False
    export: int = 0
    after: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether packed rows are exact to the limits of their type."""
        limits = (DOUBLE, DOUBLE) if self.double else (LOGPROBS, GRADIENT)
        return self.logprobs <= limits[0] and self.gradient <= limits[1]

    @property
    def passed(self) -> bool:
        """Whether it is as it should be."""
        if self.family in REFUSED:
            return REFUSED[self.family] in self.refusal
        return not self.refusal and self.is_exact and self.swapped <= SWAPPED and not self.export + self.after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    parser.add_argument("families", nargs="*", help="names of tables (all)")
    parser.set_defaults(work=try_families)


def try_families(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where a family failed."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    failed = 0
    print(f"{'family':16} {'logprobs':>9} {'gradient':>9} {'swapped':>8}  export, after a step")
    for name in arguments.families or read_families():
        outcome = try_family(name)
        figures = f"{outcome.logprobs:9.1e} {outcome.gradient:9.1e} {outcome.swapped:8.1e}"
        text = f"{figures}  {outcome.export} and {outcome.after} wrong tensors{', float64' * outcome.double}"
        print(f"{name:16} {outcome.refusal or text}{'' if outcome.passed else '  FAILED'}", flush=True)
        failed += not outcome.passed
    return int(failed > 0)


def try_family(name: str) -> Outcome:
    """Make the checkpoint of a family and compute its row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        write_tiny_checkpoint(read_families()[name], directory)
        try:
            outcome = compare(name, directory)
        except StreamRLError as error:
            return Outcome(name, refusal=str(error).replace(str(directory), name))
        if not outcome.is_exact:
            outcome = compare(name, directory, double=True)
        wrong = exported(directory, Path(temporary) / "export", factor=1.0)
        wrong_after = exported(directory, Path(temporary) / "after", factor=1.01)
        return Outcome(
            name, "", outcome.logprobs, outcome.gradient, outcome.swapped, outcome.double, wrong, wrong_after
        )


def compare(name: str, directory: Path, *, double: bool = False) -> Outcome:
    """Compare the trainer's policy with transformers' own model, which is of the whole class."""
    policy = load_policy(str(directory), CPU)
    model = own_model(directory)
    if not double:
        return _differences(name, policy, model)
    policy.double()
    model.double()
    for one in (policy.hugging_face, model):
        one.set_experts_implementation("eager")
    with in_float64():
        return msgspec.structs.replace(_differences(name, policy, model), double=True)


def _differences(name: str, policy: Any, model: Any) -> Outcome:
    groups = groups_of_row()
    row = [item for group in groups for item in group]
    expected = torch.cat([alone(model, item) for item in row])
    mix = torch.linspace(-1, 1, len(expected), dtype=expected.dtype)
    torch.autograd.backward(expected @ mix)
    packed = packed_logprobs(policy, row)
    torch.autograd.backward(packed.to(mix.dtype) @ mix)
    own = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    trained = policy.trained_parameters()
    squares = sum(float((_gradient(trained[n]) - gradient).square().sum()) for n, gradient in own.items())
    norm = sum(float(gradient.square().sum()) for gradient in own.values())
    before = of_sequences(policy, row)
    after = of_sequences(policy, [item for group in reversed(groups) for item in reversed(group)])
    return Outcome(
        name,
        logprobs=float((packed - expected).detach().abs().max()),
        gradient=(squares / norm) ** 0.5,
        swapped=max(float((before[sequence] - after[sequence]).abs().max()) for sequence in before),
    )


def groups_of_row() -> list[list[PreparedSample]]:
    """The groups of ``GROUPS``, with random tokens that stand for characters."""
    source = random.Random(1)
    groups = []
    for number, (prompt, completions) in enumerate(GROUPS):
        shared = [source.randrange(4, 28) for _ in range(prompt)]
        items = []
        for index, count in enumerate(completions):
            sample = TrainingSample(
                id=TrajectoryId(prompt_id=f"p{number}", group_id=number, sample=index),
                token_ids=token_array(shared + [source.randrange(4, 28) for _ in range(count)]),
                loss_mask=b"\0" * prompt + b"\1" * count,
                behavior_logprobs=float_array([0.0] * (prompt + count)),
                reward=0.0,
                oldest_version=0,
                newest_version=0,
            )
            items.append(PreparedSample(sample))
        groups.append(items)
    return groups


def own_model(directory: Path) -> Any:
    """The published class in transformers, on its own eager attention, in float32."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, name)
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def alone(model: Any, item: PreparedSample) -> Tensor:
    """Logprobs of the trained tokens of one sequence, by transformers' own forward."""
    tokens = torch.tensor(list(item.sample.token_ids))
    logprobs = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    trained = torch.tensor(list(item.sample.loss_mask[1:])) != 0
    selected: Tensor = logprobs.gather(1, tokens[1:, None])[:, 0][trained]
    return selected


def packed_logprobs(policy: Any, row: Sequence[PreparedSample]) -> Tensor:
    """Logprobs of the trained tokens of a row, by the trainer's policy."""
    batch = pack(row, 0, CPU)
    return token_logprobs(policy.head(policy(batch)), batch.targets_N)[0]


@torch.no_grad()
def of_sequences(policy: Any, row: Sequence[PreparedSample]) -> dict[str, Tensor]:
    """Logprobs of each sequence of a row."""
    parts = torch.split(packed_logprobs(policy, row), [sum(item.sample.loss_mask) for item in row])
    return dict(zip([item.name for item in row], parts, strict=True))


def exported(directory: Path, destination: Path, *, factor: float) -> int:
    """Export the model with its trained weights times ``factor``, load it in transformers, and return how many tensors
    are not what they should be: all as they were, or those as they were that are not trained."""
    policy = load_policy(str(directory), CPU)
    weights = FullWeights(policy.trained_parameters(), policy.entries, policy.float32_parameters())
    weights.masters.load(weights.masters.full() * factor)
    published = weights.full_published()
    save_hugging_face(destination, published, directory)
    own_model(destination)
    before, after = (load_file(folder / "model.safetensors") for folder in (directory, destination))
    kept = [name for name in before if factor == 1.0 or name not in published]
    same = [name for name in kept if name in after and _is_same(before[name], after[name])]
    return len(kept) - len(same) + len(after.keys() - before.keys())


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


def _gradient(parameter: Any) -> Tensor:
    gradient: Tensor | None = parameter.grad
    return torch.zeros_like(parameter) if gradient is None else gradient


@contextmanager
def in_float64() -> Iterator[None]:
    """Let norms and softmaxes, which ask for float32 by name, compute in float64."""
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        yield

"""Do the engines hold, bit for bit, what the trainer published? Compares at every version of a run.

    python benchmarks/weights_bit_equal.py --steps 100
    python benchmarks/weights_bit_equal.py --steps 10 --set training.ranks=4 --set training.advanced.replicas=2

The two sides share no code. vLLM hashes its live parameters: with ``weights.advanced.audit_interval = 1`` the
controller asks every engine for ``compute_weight_checksums`` after every version, and writes the answers to
``audits.jsonl``. This script hashes the Hugging Face directory that the trainer exported at that version, fused and
padded as vLLM does it. Every parameter is asserted non-empty: one that vLLM's CPU backend packed hashes as the empty
tensor."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from training_run import DEMO_RECIPE, TrainingRun, training_run

FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Projections that vLLM keeps in one parameter, with their order in it."""

VOCABULARY_PADDING = 64
"""vLLM pads the rows of an embedding with zeros to a multiple of this."""

EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()
RANK_PREFIX = re.compile(r"^dp\d+:pp\d+:pcp\d+:tp\d+:")


def runtime_parameters(exported: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Checkpoint tensors (published bits) to the parameters of a vLLM Qwen2, in ``dtype``, by vLLM's names."""
    parts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in exported.items():
        pieces = name.split(".")
        fused, order = FUSED.get(pieces[-2], (pieces[-2], 0))
        if name == "lm_head.weight" and "model.embed_tokens.weight" in exported:
            continue  # tied: vLLM has one parameter
        if name == "model.embed_tokens.weight":
            missing = -len(tensor) % VOCABULARY_PADDING
            tensor = torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])])
        parts[".".join([*pieces[:-2], fused, pieces[-1]])][order] = tensor
    return {name: torch.cat([piece[i] for i in sorted(piece)]).to(dtype) for name, piece in parts.items()}


def digest(tensor: torch.Tensor) -> str:
    """vLLM's rule: SHA-256 of the parameter's bytes in row-major order."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def expected_checksums(model: Path, dtype: torch.dtype) -> dict[str, str]:
    """Checksums of an engine of ``dtype`` that holds the published (bfloat16) bits of ``model``."""
    exported: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        exported.update({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()})
    return {name: digest(tensor) for name, tensor in runtime_parameters(exported, dtype).items()}


def differences(held: dict[str, str], expected: dict[str, str]) -> list[str]:
    """What is wrong with the checksums of one engine; empty when it holds exactly ``expected``."""
    held = {RANK_PREFIX.sub("", name): checksum for name, checksum in held.items()}
    faults = [f"{name}: empty on the engine" for name, checksum in held.items() if checksum == EMPTY_DIGEST]
    faults += [f"{name}: only on the engine" for name in held.keys() - expected.keys()]
    faults += [f"{name}: missing on the engine" for name in expected.keys() - held.keys()]
    return faults + [f"{name}: differs" for name in held.keys() & expected.keys() if held[name] != expected[name]]


def audited_checksums(run: TrainingRun) -> Iterator[tuple[int, str, dict[str, str]]]:
    """(policy version, engine, checksums by runtime name) of every line of ``audits.jsonl``."""
    for audit in run.lines("audits.jsonl"):
        for engine, checksums in audit["checksums"].items():
            yield audit["policy_version"], engine, checksums


def exported_model(run: TrainingRun, policy_version: int) -> Path:
    """The Hugging Face directory of the checkpoint that was written at ``policy_version``."""
    if run.directory is None:
        raise FileNotFoundError("the run wrote no run directory")
    checkpoint = run.directory / "checkpoints" / f"step-{policy_version:06d}"
    return next(path.parent for path in checkpoint.rglob("config.json"))


def compare_every_version(run: TrainingRun, dtype: torch.dtype) -> tuple[set[int], list[str]]:
    """The versions that were compared (version 0 has no checkpoint), and every fault found."""
    compared, faults = set(), []
    for version, engine, held in audited_checksums(run):
        if version > 0:
            found = differences(held, expected_checksums(exported_model(run, version), dtype))
            faults += [f"version {version}, {engine}: {fault}" for fault in found]
            compared.add(version)
    return compared, faults


def main() -> int:
    """Run, compare, report; exit code 1 when any parameter of any version differs."""
    arguments = argparse.ArgumentParser(description="Compare engine and trainer weights at every version.")
    arguments.add_argument("--recipe", type=Path, default=DEMO_RECIPE)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--engine-dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--timeout-s", type=float, default=1800.0)
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="an override of the recipe")
    options = arguments.parse_args()
    overrides: dict[str, object] = {
        "run.steps": options.steps,
        "engines.dtype": options.engine_dtype,
        "weights.advanced.audit_interval": 1,
        "checkpoint.every": 1,
        "checkpoint.keep": options.steps + 1,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
    }
    overrides |= {key: msgspec.json.decode(value) for key, _, value in (one.partition("=") for one in options.set)}
    with training_run(options.recipe, overrides) as run:
        run.wait(timeout_s=options.timeout_s)
        compared, faults = compare_every_version(run, getattr(torch, options.engine_dtype))
        mismatch = [line["policy/mismatch_abs_mean"] for line in run.lines("metrics.jsonl") if line["kind"] == "step"]
    for fault in faults[:20]:
        print(fault)
    complete = len(compared) == options.steps and not faults
    print(f"mismatch of engine and trainer: {min(mismatch):.1e} to {max(mismatch):.1e} nats")
    print(f"{len(compared)} versions compared, {len(faults)} faults -> {'passed' if complete else 'FAILED'}")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())

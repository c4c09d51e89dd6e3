"""What is wrong with a run that was killed and went on: judged by the witnesses' files, not by the product's word."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import deserialize

from campaigns.chaos.chaos_plan import Cell
from campaigns.chaos.chaos_records import Record

BEHIND = {"synchronous": 0, "tail_batching": 5, "continuous": 4}
"""Batches of prompts that may be drawn and not trained yet: in flight, or deferred to a long round."""


CALLS_AGAIN = 2
"""Calls that may be made again at one shot: of the moment between the return of a tool and its record."""


class Verdict(msgspec.Struct, kw_only=True):
    """``lost``, ``twice``: prompts. ``called_again``: calls of tools. ``other_rounding``: steps trained again on the
    same samples to other weights.
    ``faults``: sentences; empty when all is well."""

    steps: int = 0
    groups: int = 0
    scored: int = 0
    scored_again: int = 0
    retrained: int = 0
    other_rounding: int = 0
    commits: int = 0
    calls: int = 0
    called_again: int = 0
    lost: int = 0
    twice: int = 0
    faults: list[str] = []


class _Step(msgspec.Struct):
    groups: dict[int, list[list[Any]]]
    state_hash: int | None
    line: int


def judge(
    cell: Cell,
    records: Sequence[Record],
    run_directory: Path,
    drawn: Sequence[str],
    prompts_per_batch: int,
    *,
    streams: bool = False,
) -> Verdict:
    """``records``: the witnesses' lines in the order in which they were written. ``drawn``: ids of the training prompts
    in the order in which a run of this seed draws them. ``streams``: batches are so large that rows of them are trained
    as groups come, in an order that is not made again: then weights may differ in their rounding."""
    verdict = Verdict(faults=[])
    lineages = [_lineage(records, f"trainer-{rank}", verdict) for rank in range(cell.ranks)]
    if not streams and verdict.other_rounding:
        verdict.faults.append(f"{verdict.other_rounding} live steps that were trained again have other weights")
    final = min((max(lineage, default=0) for lineage in lineages), default=0)
    verdict.steps = final
    trained: Counter[str] = Counter()
    in_groups: dict[tuple[str, int, int, int], int] = {}
    scored = {(r["prompt"], r["digest"]): r["reward"] for r in records if r["kind"] == "scored"}
    for version in range(1, final + 1):
        found = [lineage.get(version) for lineage in lineages]
        if missing := [rank for rank, step in enumerate(found) if step is None]:
            verdict.faults.append(f"step {version} was never trained by rank {missing[0]}, later ones were")
            continue
        members = [member for step in found if step is not None for group in step.groups.values() for member in group]
        _judge_members(version, members, scored, in_groups, verdict)
        for prompt in {member[0] for member in members}:
            trained[prompt] += 1
    due = drawn[: max(0, final - BEHIND[cell.rounds]) * prompts_per_batch]
    _judge_prompts(trained, drawn, due, verdict)
    verdict.groups = sum(trained.values())
    verdict.scored = sum(r["kind"] == "scored" for r in records)
    verdict.scored_again = verdict.scored - len(scored)
    called = [(r["trajectory"], r["turn"]) for r in records if r["kind"] == "called"]
    verdict.calls, verdict.called_again = len(called), len(called) - len(set(called))
    if verdict.called_again > CALLS_AGAIN * len(cell.shots):
        verdict.faults.append(f"{verdict.called_again} calls of tools were made again")
    verdict.commits = sum(r["kind"] == "commit done" for r in records)
    untaught = sum(record.get("untaught", 0) for record in records if record["kind"] == "train_group")
    if cell.teacher and untaught:
        verdict.faults.append(f"{untaught} trajectories were trained without the logprobs of the teacher")
    verdict.faults += _wrong_weights(cell, run_directory)
    verdict.faults += _wrong_steps(run_directory, final)
    return verdict


def _lineage(records: Sequence[Record], rank: str, verdict: Verdict) -> dict[int, _Step]:
    """What this rank trained for each version, of the life of it that counts: the last one that made the version."""
    lineage: dict[int, _Step] = {}
    open_batches: dict[int, dict[int, list[list[Any]]]] = {}
    pid, live = 0, 0
    for number, record in enumerate(records):
        if record["kind"] == "commit done":
            live = max(live, record["version"])
        if record["role"] != rank:
            continue
        if record["pid"] != pid:
            pid, open_batches = record["pid"], {}
        if record["kind"] == "train_group":
            open_batches.setdefault(record["batch"], {})[record["group"]] = record["ids"]
        elif record["kind"] == "close_batch done":
            version = record["version"]
            step = _Step(open_batches.pop(record["batch_id"], {}), record.get("state_hash"), number)
            if before := lineage.get(version):
                verdict.retrained += 1
                if version <= live and _members(step) != _members(before):
                    verdict.faults.append(f"step {version} was live, and {rank} trained it again on other trajectories")
                elif version <= live and step.state_hash != before.state_hash:
                    verdict.other_rounding += 1
            lineage = {v: s for v, s in lineage.items() if v < version} | {version: step}
    return lineage


def _members(step: _Step) -> set[tuple[Any, ...]]:
    return {tuple(member) for group in step.groups.values() for member in group}


def _judge_members(
    version: int,
    members: Sequence[list[Any]],
    scored: dict[tuple[str, str], float],
    in_groups: dict[tuple[str, int, int, int], int],
    verdict: Verdict,
) -> None:
    """Each trajectory is trained once, with the reward that the function returned for just these tokens."""
    for prompt, group, sample, attempt, digest, reward in members:
        before = in_groups.setdefault((prompt, group, sample, attempt), version)
        if before != version:
            verdict.faults.append(f"trajectory {prompt}/{group}/{sample} is trained in step {before} and in {version}")
        returned = scored.get((prompt, digest))
        if returned is None:
            verdict.faults.append(f"step {version} trains a completion of {prompt} that was never scored")
        elif abs(returned - reward) > 1e-9:
            verdict.faults.append(
                f"step {version} trains reward {reward} of {prompt}; the function returned {returned}"
            )


def _judge_prompts(trained: Counter[str], drawn: Sequence[str], due: Sequence[str], verdict: Verdict) -> None:
    """Every prompt is trained as often as it is drawn; none is left behind while later ones are trained."""
    known = Counter(drawn)
    twice = [prompt for prompt, times in trained.items() if times > known[prompt] > 0]
    lost = list((Counter(due) - trained).elements())
    foreign = set(trained) - set(drawn)
    verdict.twice, verdict.lost = len(twice), len(lost)
    if twice:
        verdict.faults.append(f"{len(twice)} prompts were trained twice, such as {twice[0]}")
    if lost:
        places = [drawn.index(prompt) for prompt in lost[:5]]
        verdict.faults.append(
            f"{len(lost)} prompts were lost of {len(due)} that were due, such as {lost[0]} (drawn as {places})"
        )
    if foreign:
        verdict.faults.append(f"{len(foreign)} prompts that are not in the file were trained")


def _wrong_weights(cell: Cell, run_directory: Path) -> Iterable[str]:
    """Engines agree on every version, and simulated ones hold what the checkpoints of it say."""
    path = run_directory / "audits.jsonl"
    audits = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    by_version: dict[int, dict[str, str]] = {}
    for audit in audits:
        held = {json.dumps(checksums, sort_keys=True) for checksums in audit["checksums"].values()}
        version = audit.get("policy_version", -1)
        if len(held) > 1:
            yield f"engines hold different weights as version {version}"
        for checksums in audit["checksums"].values():
            by_version[version] = checksums
    if not audits:
        yield "no audit of the weights was written"
    if cell.engines != "simulated":
        return
    for exported in sorted((run_directory / "checkpoints").glob("step-*/hf/model.safetensors")):
        version = int(exported.parent.parent.name.removeprefix("step-"))
        wanted = _digests(exported)
        live = by_version.get(version)
        if live is not None and {name: wanted.get(name) for name in live} != live:
            yield f"engines do not hold what the checkpoint of version {version} says"


def _digests(file: Path) -> dict[str, str]:
    """SHA-256 of every tensor's bytes."""
    tensors = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    return {name: hashlib.sha256(tensor["data"]).hexdigest() for name, tensor in tensors}


def _wrong_steps(run_directory: Path, final: int) -> Iterable[str]:
    """``metrics.jsonl`` tells of every step; of one that was trained again perhaps twice, and of none that was not."""
    path = run_directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []
    told = [line["step"] for line in lines if line["kind"] == "step"]
    if unknown := [step for step in told if step > final]:
        yield f"metrics.jsonl tells of step {unknown[0]}; the last that counts is {final}"
    if missing := sorted(set(range(1, final)) - set(told)):
        yield f"metrics.jsonl lacks steps {missing[:5]}"

"""The judge of the chaos runs (``campaigns/chaos/chaos_oracle.py``) sees each of the faults that it is there to see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaigns.chaos.chaos_oracle import Verdict, judge
from campaigns.chaos.chaos_plan import MUST_RESUME, Cell, Phase, plan

CELL = Cell(number=0, engines="vllm", seed=0, rounds="synchronous", engine_count=2, ranks=1, shots=())
Lines = list[dict[str, Any]]
DRAWN = [f"p{number}" for number in range(100)]
REWARDS = {prompt: number / 100 for number, prompt in enumerate(DRAWN)}


def step(version: int, prompts: list[str], *, pid: int = 1, state_hash: int = 0) -> Lines:
    """What the witnesses write of one step of two samples a prompt."""
    common = {"pid": pid, "role": "trainer-0", "t": 0.0, "born": 0.0}
    lines: Lines = []
    for number, prompt in enumerate(prompts):
        members = [
            [prompt, 10 * version + number, sample, 0, f"{prompt}-{sample}", REWARDS[prompt]] for sample in (0, 1)
        ]
        lines += [
            {"kind": "scored", "role": "reward", "prompt": p, "digest": d, "reward": r} for p, *_, d, r in members
        ]
        group = {"kind": "train_group", "batch": version - 1, "group": 10 * version + number, "ids": members}
        lines.append(common | group)
    lines.append(
        common | {"kind": "close_batch done", "version": version, "batch_id": version - 1, "state_hash": state_hash}
    )
    return [*lines, {"kind": "commit done", "role": "engine-0", "version": version}]


def verdict_of(lines: Lines, folder: Path, audits: int = 0, steps: int = 3) -> Verdict:
    checksums = {"engine-0": {"w": "a"}, "engine-1": {"w": "b" if audits else "a"}}
    (folder / "audits.jsonl").write_text(json.dumps({"policy_version": 1, "checksums": checksums}) + "\n")
    told = (json.dumps({"kind": "step", "step": number}) + "\n" for number in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(told))
    return judge(CELL, lines, folder, DRAWN, 2)


GOOD = [step(1, ["p0", "p1"]), step(2, ["p2", "p3"]), step(3, ["p4", "p5"])]


def joined(*steps: Lines) -> Lines:
    return [line for lines in steps for line in lines]


def test_good_runs_and_equal_repeats_of_steps_have_no_fault(tmp_path: Path) -> None:
    """The oracle finds no fault in a good run, nor in one that trained a step again with the same result."""
    verdict = verdict_of(joined(*GOOD), tmp_path)
    assert (verdict.faults, verdict.steps, verdict.groups, verdict.lost, verdict.twice) == ([], 3, 6, 0, 0)
    again = verdict_of(joined(GOOD[0], GOOD[1], step(2, ["p2", "p3"], pid=2), GOOD[2]), tmp_path)
    assert (again.faults, again.retrained) == ([], 1)


def with_reward(lines: Lines, reward: float) -> Lines:
    lines = json.loads(json.dumps(lines))
    next(line for line in lines if line["kind"] == "train_group")["ids"][0][5] = reward
    return lines


BAD: dict[str, tuple[Callable[[], Lines], str]] = {
    "lost": (lambda: joined(GOOD[0], step(2, ["p2", "p6"]), GOOD[2]), "1 prompts were lost of 6 that were due"),
    "twice": (lambda: joined(GOOD[0], step(2, ["p2", "p0"]), GOOD[2]), "1 prompts were trained twice"),
    "no step": (lambda: joined(GOOD[0], GOOD[2]), "step 2 was never trained"),
    "invented": (lambda: joined(with_reward(GOOD[0], 0.5), *GOOD[1:]), "the function returned 0.0"),
    "unscored": (
        lambda: [line for line in joined(*GOOD) if line.get("digest") != "p2-0"],
        "a completion of p2 that was never scored",
    ),
    "other batch": (
        lambda: joined(GOOD[0], step(2, ["p2", "p9"]), step(2, ["p2", "p3"], pid=2), GOOD[2]),
        "step 2 was live, and trainer-0 trained it again on other trajectories",
    ),
    "other weights": (
        lambda: joined(GOOD[0], GOOD[1], step(2, ["p2", "p3"], pid=2, state_hash=9), GOOD[2]),
        "1 live steps that were trained again have other weights",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_each_fault_is_seen(fault: str, tmp_path: Path) -> None:
    lines, sentence = BAD[fault]
    assert any(sentence in found for found in verdict_of(lines(), tmp_path).faults)


def test_wrong_weights_and_untold_steps_are_seen(tmp_path: Path) -> None:
    assert "engines hold different weights as version 1" in verdict_of(joined(*GOOD), tmp_path, audits=1).faults
    assert verdict_of(joined(*GOOD), tmp_path, steps=4).faults == [
        "metrics.jsonl tells of step 4; the last that counts is 3"
    ]


def test_a_plan_is_the_same_again_and_aims_at_everything() -> None:
    cells = plan("simulated", 270, 0)
    assert cells == plan("simulated", 270, 0) != plan("simulated", 270, 1)
    shots = [shot for cell in cells for shot in cell.shots]
    assert len(shots) == 270 and {shot.phase for shot in shots} == set(Phase)
    assert {"controller", "engine-1", "trainer-1", "reward-0/python", *MUST_RESUME} < {
        victim for shot in shots for victim in shot.victims
    }
    assert sum(len(shot.victims) > 1 for shot in shots) > 20

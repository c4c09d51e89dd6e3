"""Does the gain come that ``streamrl what-if`` forecasts? It is asked about a run, and what it recommends is run.

    python benchmarks/what_if_against_real.py --out cells

Records a synchronous, a raced and a continuous run with simulated engines (no model decodes: what is compared is the
loop around them, in real time), each twice at the same time. Asks ``what-if`` about one of them, then runs what it
recommends beside the recorded recipe, so that both have the same machine as the record had, and prints the gain in
trained tokens a second beside the forecast. Passes where all are within ``--within`` of it, or the forecast said that
it could not know. A run that is in the folder already is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from training_run import DEMO_RECIPE, training_run

from streamrl.simulate.recording import TRACE_FILE, load_recording

WARM_UP_STEPS = 5
REWARD = "async def reward(completion):\n    return len(completion) % 7 / 6\n"
RECORDED: dict[str, dict[str, object]] = {
    "synchronous": {},
    "raced": {"rollout.rounds": "tail_batching", "tail_batching.prompt_oversampling": 1.25},
    "continuous": {"rollout.rounds": "continuous", "rollout.max_staleness": 2},
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``forecast``: gain, None where it cannot be known. Trained tokens a second: ``recorded``, of the record and of
    the same recipe beside it; ``tokens_s``, of what is recommended, and ``beside`` it of the recorded recipe."""

    record: str
    arm: str
    arms: int
    mismatch: float
    forecast: float | None
    recorded: tuple[float, float]
    tokens_s: float
    beside: float

    @property
    def gain(self) -> float:
        """Measured."""
        return self.tokens_s / self.beside - 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare the gains that what-if forecasts with measured ones.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--records", nargs="+", choices=list(RECORDED), default=list(RECORDED))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=8, help="of a batch, of 8 completions each")
    parser.add_argument("--max-staleness", type=int, help="that what-if may use (default: that of the record)")
    parser.add_argument("--within", type=float, default=0.1, help="difference that passes")
    return parser.parse_args()


def settings(options: argparse.Namespace, changed: Mapping[str, object]) -> dict[str, object]:
    """Of a run with simulated engines and a reward that costs nothing."""
    reward = options.out / "reward.py"
    reward.write_text(REWARD)
    return {
        "engines.kind": "simulated",
        "rewards.0.function": f"{reward.resolve()}:reward",
        "rollout.prompts_per_batch": options.prompts,
        "run.steps": options.steps,
        "run.seed": options.seed,
        "evaluation.prompts": "",
        "training.advanced.threads": 1,
        **changed,
    }


def recorded(folder: Path, chosen: Mapping[str, object]) -> float:
    """Run, and keep trace and recipe. Returns trained tokens a second after the warm-up."""
    if not (folder / TRACE_FILE).is_file():
        with training_run(DEMO_RECIPE, chosen) as run:
            run.wait(timeout_s=600)
            assert run.directory is not None
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("recipe.toml", TRACE_FILE):
                shutil.copy(run.directory / name, folder)
    steps = load_recording(folder).steps[WARM_UP_STEPS:]
    return sum(line.trained_tokens for line in steps) / sum(line.step_s for line in steps)


def together(*runs: tuple[Path, Mapping[str, object]]) -> tuple[float, float]:
    """What two runs train a second at the same time."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda run: recorded(*run), runs)
    return first, second


def overrides(fragment: str) -> Iterator[tuple[str, object]]:
    """Every key of a recipe's TOML by its dotted path."""
    for section, keys in tomllib.loads(fragment).items():
        for key, value in keys.items():
            inner = value.items() if key == "advanced" else [("", value)]
            yield from ((f"{section}.{key}.{name}".rstrip("."), found) for name, found in inner)


def compared(options: argparse.Namespace, name: str) -> Outcome:
    """Record, ask, run both."""
    folder = options.out / name
    chosen = settings(options, RECORDED[name])
    before = together((folder, chosen), (options.out / f"{name}-twin", chosen))
    command = [sys.executable, "-m", "streamrl", "what-if", str(folder), "--json"]
    if options.max_staleness is not None:
        command += ["--max-staleness", str(options.max_staleness)]
    told: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (folder / "advice.json").write_text(json.dumps(told, indent=1))
    best = told["recommended"]
    arm = chosen | dict(overrides(best["recipe"]))
    measured = together((options.out / f"{name}-arm", arm), (options.out / f"{name}-again", chosen))
    return Outcome(
        record=name,
        arm=best["name"],
        arms=sum(tried["figures"] is not None for tried in told["tried"]),
        mismatch=told["mismatch"],
        forecast=told["gain"],
        recorded=before,
        tokens_s=measured[0],
        beside=measured[1],
    )


def main() -> int:
    """Compare each record; exit code 1 where a forecast that said it knew is too far off."""
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    print("| record | arms | mismatch | recommended | forecast | measured | tokens/s: record, arm, beside |")
    print("|" + "---|" * 7)
    for name in options.records:
        one = compared(options, name)
        failed |= one.forecast is not None and abs(one.forecast - one.gain) > options.within
        forecast = "cannot know" if one.forecast is None else f"{one.forecast:+.1%}"
        print(
            f"| {name} | {one.arms} | {one.mismatch:+.1%} | {one.arm} | {forecast} | {one.gain:+.1%} "
            f"| {one.recorded[0]:.0f} ({one.recorded[1]:.0f}), {one.tokens_s:.0f}, {one.beside:.0f} |",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

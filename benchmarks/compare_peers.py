"""streamrl beside TRL's GRPOTrainer and a plain PyTorch loop, in one run on this machine.

    python benchmarks/compare_peers.py --peer-scripts ../shared/baseline --trl-python TRL_VENV/bin/python \\
        --steps 40 --repeats 2 --threads 2 --out peers.json

Same model, task, prompts, batch (32 x 8, cap 448), optimizer, steps and threads; the systems take turns, so that a
change of the machine's load meets all of them. Writes every run to ``--out`` and a Markdown table beside it. With
``--throughput`` the model may be random (``make_random_model.py``): the reward is then the parity of the completion's
length, and nothing is evaluated.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec
from peer_systems import SYSTEMS, Job, Outcome

GIB = 2**30
DEMO_MODEL = Path(__file__).parents[1] / "examples" / "sort" / "model"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare streamrl with TRL and a plain loop.")
    parser.add_argument("--peer-scripts", type=Path, required=True, help="folder with grpo.py, trl_grpo.py, tasks.py")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable), help="an interpreter that has trl")
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompts-per-batch", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cores", type=lambda text: tuple(map(int, text.split(","))), default=(), help="such as 0,1")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--target", type=float, default=0.53, help="accuracy whose time is reported")
    parser.add_argument("--trl-micro-batch", type=int, default=0, help="samples (0: the whole batch at once)")
    parser.add_argument("--throughput", action="store_true", help="parity reward, no evaluation")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="for each run")
    parser.add_argument("--out", type=Path, default=Path("peers.json"))
    return parser.parse_args()


def job_of(options: argparse.Namespace, repeat: int) -> Job:
    """What every system is given in one repeat: repeats differ in their seed."""
    return Job(
        model=options.model,
        steps=options.steps,
        prompts_per_batch=options.prompts_per_batch,
        group_size=options.group_size,
        learning_rate=options.learning_rate,
        threads=options.threads,
        seed=repeat,
        evaluate_every=options.evaluate_every,
        target=options.target,
        timeout_s=options.timeout_s,
        peer_scripts=options.peer_scripts,
        trl_python=options.trl_python,
        trl_micro_batch=options.trl_micro_batch,
        cores=options.cores,
        coin=options.throughput,
    )


def run_all(options: argparse.Namespace) -> list[Outcome]:
    """Every system in turn, ``repeats`` times; a system that fails is reported and left out of later repeats."""
    outcomes: list[Outcome] = []
    systems = list(options.systems)
    for repeat in range(options.repeats):
        for system in list(systems):
            print(f"repeat {repeat + 1}/{options.repeats}: {system} ...", flush=True)
            with tempfile.TemporaryDirectory(prefix="streamrl-peers-") as folder:
                try:
                    outcome = SYSTEMS[system](job_of(options, repeat), repeat, Path(folder))
                except Exception as error:  # noqa: BLE001 - one system's failure must not lose the others' results
                    print(f"  {system} FAILED and is left out from here on: {error}", flush=True)
                    systems.remove(system)
                    continue
            outcomes.append(outcome)
            print(f"  {outcome.completions_per_s:.1f} completions/s in {outcome.seconds:.1f} s", flush=True)
            options.out.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=1))
    return outcomes


def comparison_table(outcomes: list[Outcome], target: float) -> str:
    """One row a system: medians over repeats, and streamrl's factor over it in completions a second."""
    runs: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        runs[outcome.system].append(outcome)
    rates = {system: median(run.completions_per_s for run in of_system) for system, of_system in runs.items()}
    ours = rates.get("streamrl")
    lines = [
        f"| system | runs | completions/s | range | tokens/s | streamrl is | to accuracy {target} | peak PSS |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for system, of_system in runs.items():
        spread = [run.completions_per_s for run in of_system]
        factor = f"{ours / rates[system]:.2f} x" if ours else "-"
        times = [run.time_to_target_s for run in of_system if run.time_to_target_s is not None]
        reached = f"{median(times):.0f} s ({len(times)} of {len(of_system)} runs)" if times else "not reached"
        lines.append(
            f"| {system} | {len(of_system)} | {rates[system]:.1f} | {min(spread):.1f} to {max(spread):.1f} "
            f"| {median(run.tokens_per_s for run in of_system):.0f} | {factor} | {reached} "
            f"| {max(run.peak_pss_bytes for run in of_system) / GIB:.2f} GiB |"
        )
    return "\n".join(lines)


def breakdown_table(outcomes: list[Outcome], steps: int) -> str:
    """Where a step's time goes in streamrl (they overlap: rollout and training run at once), median over repeats."""
    ours = [outcome.phases for outcome in outcomes if outcome.system == "streamrl"]
    if not ours:
        return ""
    lines = ["| streamrl, mean of a step | |", "|---|---|"]
    for name in ours[0]:
        value = median(phases.get(name, 0.0) for phases in ours)
        lines.append(
            f"| `{name}` | {value:.2f} |" if name.startswith("util/") else f"| `{name}` | {value / steps:.3f} s |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run, write, print."""
    options = parse_arguments()
    outcomes = run_all(options)
    if not outcomes:
        return 1
    report = f"{comparison_table(outcomes, options.target)}\n\n{breakdown_table(outcomes, options.steps)}\n"
    options.out.with_suffix(".md").write_text(report)
    print(f"\n{report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

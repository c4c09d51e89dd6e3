"""What decisions of the pure core cost, in processor time of one core (so that a busy machine matters little).

    python benchmarks/control_costs.py                  # every section
    python benchmarks/control_costs.py --only sizing

``buffer``: events a second (admitted, scored, dropped, batched, trained, a trajectory each) with 10,000 trajectories in
flight. The issue asks for 50,000.
``events``: what the control core takes for an event with 10,000 trajectories in flight, under every kind of rounds,
driven by simulated engines, which do not count. The issue allows 100 us. An event that launches a whole round is one
too, and is the worst: it makes an action for each of 1,250 groups.
``sizing``: one decision of straggler-aware group sizing, with steps of ``--groups`` groups of the largest size. The
issue allows 1 ms for 128 groups of 32."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import fmean, median, quantiles
from typing import Any

import msgspec

from streamrl.base.types import DropReason, FinishReason
from streamrl.buffers.rollout_buffer import Group, Member, PromptRef, RolloutBuffer
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.policies.group_sizing import make_group_sizer
from streamrl.control.run_state import GroupLengths
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import GroupSizing, LengthSorted, RoundKind, SizingKind, StalePolicy, TailBatching
from streamrl.simulate.fleet import PRESETS, FleetEngines
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.simulation import Simulation

Section = Callable[[argparse.Namespace], list[str]]

BATCH_GROUPS, GROUP_SIZE = 1250, 8
"""10,000 trajectories in flight."""
SAGC = GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8), budget=0.5)
KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {"rounds": RoundKind.SYNCHRONOUS},
    "continuous": {"rounds": RoundKind.CONTINUOUS, "max_staleness": 1},
    "tail_batching": {"rounds": RoundKind.TAIL_BATCHING},
    "tail_batching of both": {
        "rounds": RoundKind.TAIL_BATCHING,
        "tail_batching": TailBatching(response_oversampling=1.25),
    },
    "length_sorted": {"rounds": RoundKind.LENGTH_SORTED},
    "length_sorted, partial": {
        "rounds": RoundKind.LENGTH_SORTED,
        "length_sorted": LengthSorted(partial=True),
        "max_staleness": 3,
    },
    "auto": {"rounds": RoundKind.AUTO},
    "synchronous, sagc": {"rounds": RoundKind.SYNCHRONOUS, "group_sizing": SAGC},
    "tail_batching, sagc": {"rounds": RoundKind.TAIL_BATCHING, "group_sizing": SAGC},
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What decisions of the pure core cost.")
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each kind of rounds (events)")
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 128])
    return parser.parse_args()


def cost_line(name: str, seconds: list[float]) -> str:
    """Median and 99th percentile of the processor seconds, in milliseconds."""
    return f"{name}: median {1e3 * median(seconds):.3f} ms, P99 {1e3 * quantiles(seconds, n=100)[98]:.3f} ms"


def sampled_groups(number: int, size: int, rng: random.Random) -> list[GroupLengths]:
    """Lognormal lengths around 400 tokens, spread 0.5 between prompts and 0.4 inside, cut at 1,600."""
    groups = []
    for _ in range(number):
        middle = rng.lognormvariate(6, 0.5)
        lengths = [max(1, int(middle * rng.lognormvariate(0, 0.4))) for _ in range(size)]
        groups.append(
            GroupLengths(
                lengths=tuple(min(length, 1600) for length in lengths),
                truncated=tuple(length >= 1600 for length in lengths),
            )
        )
    return groups


def sizing_costs(options: argparse.Namespace) -> list[str]:
    """Straggler-aware sizing: all of what a decision does, from lengths to figures."""
    lines = []
    for number in options.groups:
        rng = random.Random(0)
        settings = GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8, 16, 32), budget=0.3)
        sizer = make_group_sizer(settings, fixed_size=32, seed=0, steps=1000)
        seconds = []
        for _ in range(options.repeats):
            groups = sampled_groups(number, 32, rng)
            began = time.process_time_ns()
            sizer.observe(groups)
            seconds.append((time.process_time_ns() - began) / 1e9)
        lines.append(cost_line(f"sizing decision, {number} groups of 32, sizes 4 to 32", seconds))
    return lines


def event_costs(options: argparse.Namespace) -> list[str]:
    """Every kind of rounds, ``--steps`` optimizer steps each."""
    return [f"an event, {name}: {cost_of_events(changes, options.steps)}" for name, changes in KINDS.items()]


def cost_of_events(changes: dict[str, Any], steps: int) -> str:
    """Of one run's ``Control.handle``, the simulated world around it left out."""
    defaults: dict[str, Any] = {
        "steps": steps,
        "batch_groups": BATCH_GROUPS,
        "group_size": GROUP_SIZE,
        "max_staleness": 0,
        "when_stale": StalePolicy.WAIT,
        "dynamic_sampling": False,
        "max_failed_share": 1.0,
        "failure_window": 8,
    }
    settings = ControlSettings(**{**defaults, **changes})
    model = msgspec.structs.replace(PRESETS["rollpacker-14b-16k"], engines=FleetEngines(count=160, prompt_tokens=128))
    simulation = Simulation(settings, model, ModelledLengths(model.lengths, 0))
    core, handle = simulation.core, simulation.core.handle
    seconds: list[float] = []
    most = 0

    def timed(event: ControlEvent) -> list[ControlAction]:
        nonlocal most
        began = time.process_time_ns()
        actions = handle(event)
        seconds.append((time.process_time_ns() - began) / 1e9)
        buffer = core.state.buffer
        most = max(most, buffer.issued - buffer.trained - sum(buffer.dropped.values()))
        return actions

    core.handle = timed  # type: ignore[method-assign]
    simulation.run()
    return (
        f"mean {1e6 * fmean(seconds):.0f} us, median {1e6 * median(seconds):.0f} us, "
        f"P99 {1e6 * quantiles(seconds, n=100)[98]:.0f} us, worst {1e3 * max(seconds):.1f} ms, "
        f"of {len(seconds):,} with up to {most:,} trajectories in flight"
    )


def buffer_costs(options: argparse.Namespace) -> list[str]:
    """A buffer that is kept at 10,000 trajectories: the oldest group ends, a tenth dropped, and one is admitted."""
    buffer, events = RolloutBuffer(), 0

    def admit(group: int) -> int:
        version = group // 1000
        members = {sample: Member(oldest_version=version) for sample in range(GROUP_SIZE)}
        buffer.admit(
            Group(
                group_id=group,
                prompt=PromptRef(prompt_id=f"p{group}"),
                launch_version=version,
                oldest_version=version,
                round_kind="",
                members=members,
                open=GROUP_SIZE,
                size=GROUP_SIZE,
                keep=GROUP_SIZE,
                weight=GROUP_SIZE,
            )
        )
        return GROUP_SIZE

    for group in range(BATCH_GROUPS):
        admit(group)
    began = time.process_time_ns()
    for group in range(options.repeats * 100):
        oldest = buffer.untrained[group]
        for trajectory in oldest.ids:
            scored = Member(oldest_version=group // 1000, finish_reason=FinishReason.STOP, reward=0.5, tokens=400)
            buffer.score(trajectory, scored)
        if group % 10:
            buffer.batch(oldest)
            buffer.train()
            events += 3 * GROUP_SIZE
        else:
            buffer.drop_group(oldest, DropReason.ZERO_VARIANCE)
            events += 2 * GROUP_SIZE
        events += admit(BATCH_GROUPS + group)
    seconds = (time.process_time_ns() - began) / 1e9
    assert buffer.accounting().in_flight == BATCH_GROUPS * GROUP_SIZE
    return [f"buffer, {BATCH_GROUPS * GROUP_SIZE:,} in flight: {events / seconds:,.0f} events a second of {events:,}"]


SECTIONS: dict[str, Section] = {"buffer": buffer_costs, "events": event_costs, "sizing": sizing_costs}


def main() -> None:
    """Print the sections that were asked for."""
    options = parse_arguments()
    for name in options.only:
        print("\n".join(SECTIONS[name](options)), flush=True)


if __name__ == "__main__":
    main()

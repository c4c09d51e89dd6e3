"""What control and weights cost as engines and hosts grow, at RollPacker's 14B, 16k lengths, and a plot of it.

    python benchmarks/many_hosts.py [--engines 8 64 256 1000] [--steps 1] [--out docs/images/many_hosts.svg]

Control: processor time that the real control core and the real router take for a trained completion, with 64 requests
an engine, driven by simulated engines, which do not count. Weights: simulated, on links of 10 Gbit/s."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from simulated_papers import ROLLPACKER_14B, race

from streamrl.simulate.fleet import FleetEngines
from streamrl.simulate.host_model import HostsModel
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.simulation import Simulation

SIZES = {"1 % changed (0.11 GB)": 0.11e9, "all of it (29.5 GB)": 29.5e9}
HOSTS = (1, 2, 4, 8, 16, 32, 64, 128)
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
Lines = dict[str, list[tuple[float, float]]]


def control_us(engines: int, eta: float, steps: int) -> float:
    """Microseconds of the processor for a completion."""
    model = msgspec.structs.replace(ROLLPACKER_14B, engines=FleetEngines(count=engines, prompt_tokens=128))
    rules = msgspec.structs.replace(race(eta, eta), batch_groups=engines * 8, steps=steps)
    simulation = Simulation(rules, model, ModelledLengths(model.lengths, 0))
    spent = 0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal spent
            began = time.process_time_ns()
            try:
                return call(*arguments)
            finally:
                spent += time.process_time_ns() - began

        return wrapped

    simulation.core.handle = timed(simulation.core.handle)  # type: ignore[method-assign]
    router = simulation.rollout._router
    for name in ("choose", "opened", "answered", "closed"):
        setattr(router, name, timed(getattr(router, name)))
    completions = simulation.run().trajectories
    return spent / 1e3 / completions


def plot(panels: dict[str, Lines]) -> str:
    """Panels beside each other, both axes logarithmic, as SVG. A title reads "x axis: y axis"."""
    drawn = []
    for left, (title, lines) in zip((70, 500), panels.items(), strict=True):
        points = [point for line in lines.values() for point in line]
        ends = [(math.log(min(axis)), math.log(max(axis))) for axis in zip(*points, strict=True)]
        (x0, x1), (y0, y1) = ends

        def at(
            x: float, y: float, left: int = left, x0: float = x0, x1: float = x1, y0: float = y0, y1: float = y1
        ) -> tuple[float, float]:
            across, up = (math.log(x) - x0) / (x1 - x0), (math.log(y) - y0) / (y1 - y0 or 1)
            return left + 330 * across, 290 - 220 * up

        drawn.append(f'<text x="{left}" y="24" font-weight="bold">{title}</text>')
        drawn.append(f'<path d="M{left} 60V296H{left + 335}" fill="none" stroke="#888"/>')
        drawn += [
            f'<text x="{at(x, math.exp(y0))[0]:.0f}" y="312" text-anchor="middle">{x:g}</text>'
            for x in sorted({x for x, _ in points})
        ]
        drawn += [
            f'<text x="{left - 6}" y="{at(math.exp(x0), y)[1] + 4:.0f}" text-anchor="end">{y:g}</text>'
            for y in (10**k * m for k in range(-2, 5) for m in (1, 2, 5))
            if math.exp(y0) <= y <= math.exp(y1)
        ]
        for number, (name, line) in enumerate(lines.items()):
            path, colour = " ".join(f"{x:.0f},{y:.0f}" for x, y in (at(*point) for point in line)), COLOURS[number]
            drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            drawn.append(f'<text x="{left + 12}" y="{70 + 15 * number}" fill="{colour}">{name}</text>')
    style = 'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 325" font-family="sans-serif" font-size="12"'
    return f'<svg {style}><rect width="860" height="325" fill="#fff"/>{"".join(drawn)}</svg>\n'


def main() -> None:
    """Print the figures, and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    control: Lines = {"synchronous": [], "race 1.25 / 1.25": []}
    for engines in options.engines:
        for eta, (name, line) in zip((1.0, 1.25), control.items(), strict=True):
            steps = options.steps * max(1, 256 // engines)
            line.append((engines, control_us(engines, eta, steps)))
            print(f"{engines} engines, {name}: {line[-1][1]:.1f} us a completion", flush=True)
    weights: Lines = {}
    for size, push_bytes in SIZES.items():
        for way in ("direct", "relay"):
            models = [(hosts, HostsModel(count=hosts, weights=way, push_bytes=push_bytes)) for hosts in HOSTS]
            weights[f"{size}, {way}"] = line = [(hosts, model.push_s(range(hosts))) for hosts, model in models]
            print(f"{size}, {way}:", ", ".join(f"{hosts} hosts {seconds:.3g} s" for hosts, seconds in line), flush=True)
    if options.out is not None:
        options.out.write_text(
            plot({"engines: CPU µs of control a completion": control, "hosts: seconds until all have it": weights})
        )


if __name__ == "__main__":
    main()

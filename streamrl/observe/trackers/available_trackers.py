"""Trackers by name: the shipped trackers with the packages that they need, and the trackers of plug-ins. The preflight
checks of a run and ``streamrl sync`` call ``tracker_problems``, a follower calls ``make_tracker`` in its process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import NamedTuple
from urllib.parse import parse_qsl

from streamrl.base.errors import StreamRLError
from streamrl.base.host_addresses import wrong_port
from streamrl.base.types import TextsByName
from streamrl.observe.trackers.tracker import Tracker

GROUP = "streamrl.trackers"


class _Shipped(NamedTuple):
    """A tracker of streamrl. ``place``: module in this package, and class. ``packages``: least version of each needed
    package. ``pip``: argument of pip that installs them."""

    place: str
    packages: TextsByName
    pip: str


SHIPPED = {
    "tensorboard": _Shipped("tensorboard:TensorBoard", {"tensorboardX": "2.6.5"}, "streamrl[tensorboard]"),
    "wandb": _Shipped("wandb:Wandb", {"wandb": "0.31"}, "streamrl[wandb]"),
    "trackio": _Shipped("trackio:Trackio", {"trackio": "0.43", "pandas": "2.2"}, "streamrl[trackio]"),
    "prometheus": _Shipped("prometheus:Prometheus", {"prometheus-client": "0.22"}, "streamrl[prometheus]"),
}


def name_and_options(spec: str) -> tuple[str, TextsByName]:
    """Split an entry of ``metrics.report_to``, such as ``prometheus?port=9500``, into the name and the options."""
    name, _, options = spec.partition("?")
    return name, dict(parse_qsl(options))


def make_tracker(name: str) -> Tracker:
    """Return a new tracker, not opened. Raises ``StreamRLError`` where it or its package is not installed."""
    for problem in tracker_problems([name]):
        raise StreamRLError(problem)
    if name in SHIPPED:
        module, _, kind = SHIPPED[name].place.partition(":")
        shipped: Tracker = getattr(import_module(f"streamrl.observe.trackers.{module}"), kind)()
        return shipped
    plug_in: Tracker = _plug_ins()[name].load()()
    return plug_in


def tracker_problems(report_to: Sequence[str], project: str = "", tags: Sequence[str] = ()) -> Iterator[str]:
    """Yield a problem for each tracker of ``metrics.report_to`` that cannot be used on this machine, with its remedy,
    and for a ``project`` or ``tags`` of a run that it would refuse. No tracker is imported."""
    names = [name_and_options(spec)[0] for spec in report_to]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"{name} is there twice: remove one"
        elif name in SHIPPED:
            yield from _package_problems(name, SHIPPED[name])
        elif name not in _plug_ins():
            trackers = ", ".join([*SHIPPED, *_plug_ins()])
            remedy = f"take one of {trackers}, or install a plug-in (entry point group {GROUP})"
            yield f'there is no tracker "{name}": {remedy}'
    for name, options in map(name_and_options, report_to):
        if name == "prometheus" and (problem := wrong_port(options.get("port", "0"))):
            yield f"{name}?port={problem}"
    if "wandb" in names:
        yield from _refused_by_wandb(os.environ.get("WANDB_PROJECT") or project, tags)


def _refused_by_wandb(project: str, tags: Sequence[str]) -> Iterator[str]:
    """The limits of ``wandb.Settings``, which takes seconds to import."""
    if not re.fullmatch(r"[^/\\#?%:]{0,128}", project):
        yield f"wandb takes no project {project!r:.140} (run.project): at most 128 characters, none of / \\ # ? % :"
    for tag in tags:
        if not 1 <= len(tag) <= 64:
            yield f"wandb takes no tag {tag!r:.80} of {len(tag)} characters (run.tags): write 1 to 64"


def _package_problems(name: str, shipped: _Shipped) -> Iterator[str]:
    for package, least_version in shipped.packages.items():
        try:
            installed_version = version(package)
        except PackageNotFoundError:
            yield f'{name} needs {package}, which is not installed: pip install "{shipped.pip}"'
            continue
        if _numbers(installed_version) < _numbers(least_version):
            needed = f"{name} needs {package} {least_version} or later"
            yield f'{needed}, {installed_version} is installed: pip install -U "{shipped.pip}"'


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _plug_ins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}

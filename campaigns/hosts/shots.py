"""Shots at a run over hosts: what each kind does, and what must be true at once."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from functools import partial

import msgspec

from campaigns.hosts.hosts_run import HostsRun, left_on, named, wait_until
from campaigns.hosts.lab import Host, end

LEASE_S = 10.0
MARGIN_S = 2.0
RAY_PATIENCE_S = 40.0
"""After how long Ray takes a node that does not answer for dead, at most."""
SEEN_S = 1.0
"""How late this process may see that something is gone."""


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """``at``: ``head``, or ``engine``, ``rank``: a host besides the head that has one (the run moves them)."""

    kind: str
    at: str
    seconds: float = 0.0
    ways: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [self.kind, self.at, *self.ways, f"{self.seconds:g} s" if self.seconds else ""]
        return " ".join(word for word in words if word)


class Hit(msgspec.Struct, kw_only=True):
    """``ended``: the run is over by this and is to be resumed. ``empty_s``: when the host, or all, had no process of
    the run any more. ``missed``: there was no such process. ``from_s``: from when on the run is to work again."""

    from_s: float = 0.0
    ended: bool = False
    missed: bool = False
    empty_s: float | None = None
    faults: list[str] = []


PROCESSES = {
    "engine": ("streamrl.launch engine",),
    "rank": ("streamrl.launch trainer",),
    "controller": ("streamrl.launch controller",),
    "reward": ("streamrl.launch reward",),
    "daemon": ("ray::RayDaemon",),
    "lease": ("streamrl.processes.cluster.lease",),
    "driver": ("-m streamrl ", "--cluster"),
    "raylet": ("raylet/raylet",),
    "gcs": ("gcs_server",),
}
WIRES = {
    "cut": ("cut 1",),
    "loss": ("loss 0.05",),
    "delay": ("delay 0.1",),
    "rate": ("rate 20e6",),
    "far": ("delay 0.1", "loss 0.03"),
    "large": ("largest 1400",),
}
HEAD = "engine 0 -, rank 0 -, controller 0 -, reward 0 -, driver 0 -, daemon 0 -, head 0 -, gcs 0 -, two 0 -"
EACH = """daemon 0, raylet 0, host 0, host 15, lease 0, stop 5, stop 15, engine 0, rank 0, loss 10, delay 10, rate 10,
cut 5, cut 5 out, cut 5 in, cut 15, cut 15 out, cut 15 in, cut 20 out, cut 20 in, cut 180 out, cut 180 in, stop 60,
far 30, large 20, moved 0, full 20"""
"""Kinds, seconds and ways of shots at the head, and of those at a host with an engine and at one with a rank."""


def aim(run: HostsRun, at: str) -> Host:
    """The host that is meant; where there is none, one with anything of the run."""
    head, *others = run.hosts
    if at == "head":
        return head
    order = sorted(others, key=lambda host: (not host.processes(*PROCESSES[at]), not left_on(host)))
    return order[0]


def fire(run: HostsRun, shot: Shot) -> Hit:
    """Carry out a shot. Returns when its fault is over."""
    host = aim(run, shot.at)
    special: dict[str, Callable[[HostsRun, Host, Shot], Hit]] = {
        "stop": _stop,
        "host": _kill_host,
        "moved": _kill_host,
        "full": _fill_disk,
        "two": _run_another,
        "raylet": _kill_raylet,
        "gcs": _end_cluster,
        "head": _end_cluster,
        "driver": _kill_driver,
    }
    if shot.kind in WIRES:
        return _while(run, shot, host, partial(_impair, host, shot), host.heal)
    if shot.kind in special:
        return special[shot.kind](run, host, shot)
    wait_until(lambda: bool(aim(run, shot.at).processes(*PROCESSES[shot.kind])), 30.0)
    began = time.monotonic()
    victims = aim(run, shot.at).processes(*PROCESSES[shot.kind])
    end(victims)
    return Hit(from_s=began, missed=not victims)


def _impair(host: Host, shot: Shot) -> None:
    for what in WIRES[shot.kind]:
        host.impair(what, *shot.ways)


def _fill_disk(run: HostsRun, host: Host, shot: Shot) -> Hit:
    """The disk of temporary files is full for some time. A run goes on, or ends with the words and can be resumed."""
    host.fill_disk()
    time.sleep(shot.seconds)
    host.free_disk()
    return Hit(from_s=time.monotonic())


def _run_another(run: HostsRun, host: Host, shot: Shot) -> Hit:
    """Another run on the same cluster, which is drained as soon as it has worked."""
    other = HostsRun(run.ray, run.folder.with_name(f"other-{time.monotonic_ns()}"))
    began = time.monotonic()
    other.train()
    hit = Hit()
    if other.works_after(began) is None:
        hit.faults.append(f"the other run did not start: {other.said()}")
    end(other.driver_processes(), signal.SIGTERM)
    code = other.exit_code(90.0)
    if code != 0:
        hit.faults.append(f"the other run ended with {code}: {other.said()}")
    hit.faults += [f"the other run: {fault}" for fault in other.faults()]
    hit.from_s = time.monotonic()
    return hit


def _stop(run: HostsRun, host: Host, shot: Shot) -> Hit:
    """SIGSTOP of a daemon, for less or more than its lease."""
    daemons = host.processes(*PROCESSES["daemon"])
    return _while(run, shot, host, partial(end, daemons, signal.SIGSTOP), partial(end, daemons, signal.SIGCONT))


def _while(run: HostsRun, shot: Shot, host: Host, begin: Callable[[], None], over: Callable[[], None]) -> Hit:
    """A fault that lasts: where it is longer than the lease, the host has no process of the run in time."""
    before, began = _of_agent(host), time.monotonic()
    begin()
    ends_lease = shot.seconds > LEASE_S and shot.kind not in ("far", "large")
    hit = _gone([host], began, before) if ends_lease else Hit()
    time.sleep(max(began + shot.seconds - time.monotonic(), 0.0))
    over()
    if (
        shot.seconds > RAY_PATIENCE_S
    ):  # Ray has given the node up and ends it; the program of a launcher starts it again
        wait_until(lambda: not host.processes(*PROCESSES["raylet"]), RAY_PATIENCE_S)
        if not host.processes(*PROCESSES["raylet"]):
            run.ray.start([host])
    hit.from_s = time.monotonic()
    return hit


def _kill_host(run: HostsRun, host: Host, shot: Shot) -> Hit:
    """The host is gone, and another life of it joins, at another address where it is ``moved``."""
    host.kill()
    if shot.kind == "moved":
        host.move()
    time.sleep(shot.seconds)
    host.boot()
    run.ray.start([host])
    return Hit(from_s=time.monotonic())


def _kill_raylet(run: HostsRun, host: Host, shot: Shot) -> Hit:
    before, began = _of_agent(host), time.monotonic()
    end(host.processes(*PROCESSES["raylet"]))
    hit = _gone([host], began, before)
    end([process for process in host.processes("ray") if process not in left_on(host)])
    run.ray.start([host])
    hit.from_s = time.monotonic()
    return hit


def _kill_driver(run: HostsRun, host: Host, shot: Shot) -> Hit:
    began = time.monotonic()
    end(run.driver_processes())
    return _gone(run.hosts, began, ended=True)


def _end_cluster(run: HostsRun, host: Host, shot: Shot) -> Hit:
    """The head is gone: the host with all that runs there, or Ray's store alone, of which the run learns late."""
    others, began = run.hosts[1:], time.monotonic()
    if shot.kind == "gcs":
        end(host.processes(*PROCESSES["gcs"]))
        run.exit_code(120.0)
        began = time.monotonic()
        hit = _gone(run.hosts, began, ended=True)
        host.kill()
    else:
        host.kill()
        hit = _gone(others, began, ended=True)
    host.boot()
    for one in others:
        one.kill()
        one.boot()
    run.ray.start()
    return hit


def _of_agent(host: Host) -> set[int]:
    """Processes that a daemon and its lease are to end."""
    return {process.pid for kind in ("engine", "rank", "daemon") for process in host.processes(*PROCESSES[kind])}


def _gone(hosts: list[Host], began: float, of: set[int] | None = None, *, ended: bool = False) -> Hit:
    """Wait until none of these processes lives (None: no process of a run), a lease and its margin at most."""

    def none() -> bool:
        living = {process.pid for host in hosts for process in left_on(host)}
        return not (living if of is None else living & of)

    if wait_until(none, began + LEASE_S + MARGIN_S + SEEN_S - time.monotonic()):
        return Hit(ended=ended, empty_s=round(time.monotonic() - began, 1))
    return Hit(ended=ended, faults=[f"{LEASE_S + MARGIN_S:g} s later there is still {named(hosts)}"])


def plan(count: int, seed: int, kinds: list[str]) -> list[Shot]:
    """``count`` shots, of every kind in turns (or of ``kinds``), in an order of ``seed``."""
    words = [spec.split() for spec in (*HEAD.split(","), *(f"{spec} at" for spec in EACH.split(",")))]
    every = [
        Shot(kind=kind, at=at, seconds=float(seconds), ways=tuple(ways))
        for kind, seconds, *ways, where in words
        for at in (("engine", "rank") if where == "at" else ("head",))
    ]
    chosen = [shot for shot in every if not kinds or shot.kind in kinds]
    chosen = [shot for shot in chosen if {shot.kind, shot.at} != {"engine", "rank"}]
    order, shots = random.Random(seed), list[Shot]()
    while len(shots) < count:
        order.shuffle(chosen)
        shots += chosen
    return shots[:count]

"""Hosts of a simulated fleet during a simulation: joins, losses, and pushes of weights to the present hosts.
``simulation`` makes the object; events of the queue call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from streamrl.base.errors import StreamRLError
from streamrl.simulate.host_model import HostsModel
from streamrl.simulate.rollout import SimulatedRollout
from streamrl.simulate.stages import EventQueue


class SimulatedHosts:
    """The hosts of ``rollout``: the present ones, the time of a push to them, and the requests of lost hosts. With
    ``model.count`` 0 there are no hosts, and a push takes no time.

    ``present``: numbers of the present hosts;
    ``losses``, ``joins``: number of hosts lost and joined since the start;
    ``moved``: number of requests submitted elsewhere;
    ``pushes``: number of pushes;
    ``transfer_s``: seconds of all transfers."""

    def __init__(self, model: HostsModel, rollout: SimulatedRollout, queue: EventQueue, seed: int) -> None:
        self.model = model
        self.present = set(range(model.count))
        self.losses = 0
        self.joins = 0
        self.moved = 0
        self.pushes = 0
        self.transfer_s = 0.0
        self._rollout = rollout
        self._queue = queue
        self._serving = set(self.present)
        self._random = Random(f"hosts {seed}")
        self._push_ends = 0.0
        if not model.count:
            return
        rollout.absent = self.absent_engines
        rollout.choose_serving()
        handlers: Mapping[str, Callable[[int], None]] = {"join": self._join, "loss": self._lose}
        for change in model.changes:
            queue.add(change.at_s, partial(handlers[change.kind], change.host))
        if model.loss_every_s:
            for host in self.present:
                self._lose_later(host)

    def absent_engines(self, engines: int) -> set[int]:
        """Numbers of the engines whose host does not serve. ``engines``: number of engines on the first hosts."""
        absent_hosts = set(range(self.model.total)) - self._serving
        return {engine for host in absent_hosts for engine in self.model.engines_of(host, engines)}

    def push_s(self, other_s: float) -> float:
        """Begin a push, which takes ``other_s`` in addition to its transfer. Returns the seconds of the transfer."""
        if not self.model.count:
            return 0.0
        seconds = self.model.push_s(self.present)
        self.pushes += 1
        self.transfer_s += seconds
        self._push_ends = self._queue.now + seconds + other_s
        return seconds

    def _lose_later(self, host: int) -> None:
        self._queue.call_after(self._random.expovariate(1 / self.model.loss_every_s), partial(self._lose, host))

    def _lose(self, host: int) -> None:
        self.losses += 1
        self.present.discard(host)
        model = self.model
        rollout = self._rollout
        if host in self._serving:
            rollout.halt(model.engines_of(host, rollout.in_use))
        self._queue.call_after(model.notice_s, partial(self._notice_loss, host))
        if model.rejoin_s:
            self._queue.call_after(model.rejoin_s, partial(self._join, host))

    def _notice_loss(self, host: int) -> None:
        if host not in self.present and host in self._serving:
            self._leave(host)

    def _leave(self, host: int) -> None:
        """Submit the requests of a lost host elsewhere."""
        self._serving.discard(host)
        rollout = self._rollout
        rollout.choose_serving()
        join_follows = any(change.kind == "join" and change.at_s > self._queue.now for change in self.model.changes)
        if not rollout.serving and not (join_follows or self.model.rejoin_s or self.present):
            raise StreamRLError(
                f"the last host of the simulated fleet was lost at {self._queue.now:.0f} s and none joins: "
                "give hosts.changes a join, or hosts.rejoin_s"
            )
        self.moved += rollout.leave(self.model.engines_of(host, rollout.in_use), keeps_tokens=self.model.keeps_tokens)

    def _join(self, host: int) -> None:
        if host in self._serving:  # the host returns before its loss was noticed
            self._leave(host)
        self.present.add(host)
        seconds = self.model.start_s + self.model.join_s(host, alone=len(self.present) == 1)
        self._queue.call_after(seconds, partial(self._serve, host))

    def _serve(self, host: int) -> None:
        """Let the engines of a host that has joined serve, unless it is lost again."""
        if host not in self.present:
            return
        if self._queue.now < self._push_ends:  # a push is under way, whose version the host needs too
            self._queue.add(self._push_ends, partial(self._serve, host))
            return
        self.joins += 1
        self._serving.add(host)
        self._rollout.choose_serving()
        self._rollout.restart(self.model.engines_of(host, self._rollout.in_use))
        if self.model.loss_every_s:
            self._lose_later(host)

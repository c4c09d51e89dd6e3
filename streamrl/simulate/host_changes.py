"""Hosts that join and are lost in a simulated cluster, and pushes of weights to those that are there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

from streamrl.base.errors import StreamRLError
from streamrl.simulate.hosts import HostsModel
from streamrl.simulate.rollout import SimulatedRollout
from streamrl.simulate.stages import EventQueue


class SimulatedHosts:
    """The hosts of ``rollout``: which are there, what a push takes to them, and where requests of one that is
    lost go on. Of ``model.count`` 0 there are none, and a push takes nothing.

    ``losses``, ``joins``, ``moved``: hosts, and requests that were submitted elsewhere, since the start;
    ``transfer_s``: of all ``pushes``."""

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
        self._random = random.Random(f"hosts {seed}")
        self._push_ends = 0.0
        if not model.count:
            return
        rollout.absent = self.absent_engines
        rollout.choose_serving()
        happens: Mapping[str, Callable[[int], None]] = {"join": self._join, "loss": self._lose}
        for one in model.changes:
            queue.add(one.at_s, partial(happens[one.kind], one.host))
        if model.loss_every_s:
            for host in self.present:
                self._lose_later(host)

    def absent_engines(self, engines: int) -> set[int]:
        """Numbers of the engines whose host does not serve, of ``engines`` on the first hosts."""
        absent = set(range(self.model.most)) - self._serving
        return {engine for host in absent for engine in self.model.engines_of(host, engines)}

    def push_s(self, others_s: float) -> float:
        """A version is published, whose push takes ``others_s`` beside the transfer. Returns the transfer's seconds."""
        if not self.model.count:
            return 0.0
        seconds = self.model.push_s(self.present)
        self.pushes = self.pushes + 1
        self.transfer_s = self.transfer_s + seconds
        self._push_ends = self._queue.now + seconds + others_s
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
        self._queue.call_after(model.notice_s, partial(self._noticed, host))
        if model.rejoin_s:
            self._queue.call_after(model.rejoin_s, partial(self._join, host))

    def _noticed(self, host: int) -> None:
        if host not in self.present and host in self._serving:
            self._leave(host)

    def _leave(self, host: int) -> None:
        self._serving.discard(host)
        rollout = self._rollout
        rollout.choose_serving()
        joins = any(one.kind == "join" and one.at_s > self._queue.now for one in self.model.changes)
        if not rollout.serving and not (joins or self.model.rejoin_s or self.present):
            raise StreamRLError(
                f"the last host of the simulated cluster was lost at {self._queue.now:.0f} s and none joins: "
                "give hosts.changes a join, or hosts.rejoin_s"
            )
        self.moved += rollout.leave(self.model.engines_of(host, rollout.in_use), keeps_tokens=self.model.keeps_tokens)

    def _join(self, host: int) -> None:
        if host in self._serving:  # back before its loss was noticed
            self._leave(host)
        self.present.add(host)
        seconds = self.model.start_s + self.model.join_s(host, alone=len(self.present) == 1)
        self._queue.call_after(seconds, partial(self._ready, host))

    def _ready(self, host: int) -> None:
        if host not in self.present:
            return
        if self._queue.now < self._push_ends:  # it gets the version that is on its way, too
            self._queue.add(self._push_ends, partial(self._ready, host))
            return
        self.joins += 1
        self._serving.add(host)
        self._rollout.choose_serving()
        self._rollout.restart(self.model.engines_of(host, self._rollout.in_use))
        if self.model.loss_every_s:
            self._lose_later(host)

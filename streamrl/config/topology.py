"""Who the processes of a run are and where their streams live. Computed from the recipe, never set."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from streamrl.config.recipe import Launch, Recipe, TransportKind


class Role(StrEnum):
    """What a process of the run is."""

    CONTROLLER = "controller"
    ENGINE = "engine"
    TRAINER = "trainer"
    REWARD = "reward"


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process: ``engine-0``, ``trainer-1``, ... ``local``: the supervisor starts it."""

    role: Role
    index: int
    local: bool = True

    @property
    def name(self) -> str:
        """Its name in logs, errors and metrics."""
        return self.role.value if self.role is Role.CONTROLLER else f"{self.role.value}-{self.index}"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Processes and endpoints of one run. The controller binds every stream; ranks bind their weight endpoint."""

    processes: tuple[ProcessPlan, ...]
    endpoints: dict[str, str]

    def endpoint(self, process: str, stream: str) -> str:
        """Endpoint of ``stream`` of ``process``, e.g. ``("engine-0", "orders")``."""
        return self.endpoints[f"{process}.{stream}"]


STREAMS = {
    Role.CONTROLLER: ("steps",),
    Role.ENGINE: ("orders", "completions"),
    Role.TRAINER: ("batches", "reports", "weights"),
    Role.REWARD: ("orders", "results"),
}
RENDEZVOUS = "trainer.rendezvous"


def plan_topology(recipe: Recipe, socket_directory: Path) -> Topology:
    """Processes of ``recipe``; ipc endpoints are files in ``socket_directory`` (short: a socket path has 107 bytes)."""
    engines_local = recipe.transport.engines is Launch.LOCAL
    training_local = recipe.transport.training is Launch.LOCAL
    processes = [ProcessPlan(role=Role.CONTROLLER, index=0)]
    processes += [ProcessPlan(role=Role.REWARD, index=i) for i in range(recipe.reward_limits.workers)]
    processes += [ProcessPlan(role=Role.ENGINE, index=i, local=engines_local) for i in range(recipe.engines.count)]
    processes += [ProcessPlan(role=Role.TRAINER, index=i, local=training_local) for i in range(recipe.training.ranks)]
    names = [f"{p.name}.{s}" for p in processes for s in STREAMS.get(p.role, ())]
    tcp = recipe.transport.kind is TransportKind.TCP
    endpoints = {}
    for offset, name in enumerate(names):
        # Reward workers and the controller are always children of this run, so they never need a port.
        if tcp and name.startswith((Role.ENGINE.value, Role.TRAINER.value)):
            endpoints[name] = f"tcp://{recipe.transport.host}:{recipe.transport.port + offset}"
        else:
            endpoints[name] = f"ipc://{socket_directory / name}"
    endpoints[RENDEZVOUS] = f"tcp://{recipe.transport.host}:{recipe.transport.port + len(names)}" if tcp else ""
    return Topology(processes=tuple(processes), endpoints=endpoints)

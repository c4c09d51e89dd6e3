"""Processes of a run and the endpoints of their streams. Computed from the recipe, never set."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.recipe.sections import STAGES, Engines, EngineShape, LaunchedBy, Recipe, TransportKind

TOPOLOGY_FILE = "topology.json"
JOURNAL_DIRECTORY = "journal"
"""In the directory of a run."""


class Role(StrEnum):
    """Kind of a process of the run."""

    CONTROLLER = "controller"
    ENGINE = "engine"
    TRAINER = "trainer"
    REWARD = "reward"
    ENVIRONMENT = "environment"
    JUDGE = "judge"


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process: ``engine-0``, ``trainer-1``, ... ``local``: the supervisor starts it; ``starts_inactive``: only when
    its set of engines serves. ``restarts``: how often it is started again when it died. ``gpus``: its
    own, as ``CUDA_VISIBLE_DEVICES`` names them (empty: it was given none); ``gpu_memory_utilization``: of each, for an
    engine. ``host``: of a cluster, by its name (empty: the host of the run); ``address``: of that host, for others."""

    role: Role
    index: int
    local: bool = True
    starts_inactive: bool = False
    restarts: int = 0
    gpus: tuple[str, ...] = ()
    gpu_memory_utilization: float = 0.0
    host: str = ""
    address: str = ""

    @property
    def name(self) -> str:
        """Name of the process in logs, errors and metrics."""
        return self.role.value if self.role is Role.CONTROLLER else f"{self.role.value}-{self.index}"


class PreparedSet(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` engines, from number ``first`` on, of ``tensor_parallel_size`` workers. ``kv_tokens``: of one engine
    (0: what fits); ``rounds``: kinds of rounds that it always serves; ``args``: of vLLM."""

    first: int = 0
    count: int
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    kv_tokens: int = 0
    cores: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    args: dict[str, Any] = {}

    @property
    def workers(self) -> int:
        """Processes of each engine that compute, with a GPU each where there are GPUs: tensor parallel ranks of each
        pipeline stage."""
        stages = self.args.get(STAGES)  # of another type: a rule refuses it
        return self.tensor_parallel_size * (stages if isinstance(stages, int) and stages > 0 else 1)

    @property
    def name(self) -> str:
        """``2x1``: two engines of one worker."""
        return f"{self.count}x{self.workers}"

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of its engines."""
        return tuple(f"engine-{index}" for index in range(self.first, self.first + self.count))

    @property
    def capacity(self) -> float:
        """Tokens that all caches hold together; infinite where ``kv_tokens`` is 0."""
        return float(self.count * self.kv_tokens) if self.kv_tokens else math.inf


class ProcessPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a host of a cluster: see ``ProcessPlan``."""

    host: str
    address: str
    gpus: tuple[str, ...] = ()


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Places of the engines and trainer ranks of a run on a cluster, by name. ``address``: of the controller's host;
    ``ports``: free ones of each host, by its address. ``epoch``: number of this start of the run's processes."""

    address: str
    by_name: dict[str, ProcessPlace]
    ports: dict[str, tuple[int, ...]]
    epoch: int = 0


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Processes and endpoints of one run. The controller binds every stream; ranks bind their weight endpoint, and on a
    cluster engines one at which others get weights from them. ``min_serving``: with fewer engines that can be had the
    run ends. ``epoch``: processes of different ones do not talk to each other."""

    processes: tuple[ProcessPlan, ...]
    endpoints: dict[str, str]
    min_serving: int = 1
    epoch: int = 0

    def endpoint(self, process: str, stream: str) -> str:
        """Endpoint of ``stream`` of ``process``, e.g. ``("engine-0", "orders")``."""
        return self.endpoints[f"{process}.{stream}"]


STREAMS = {
    Role.CONTROLLER: ("steps",),
    Role.ENGINE: ("orders", "completions"),
    Role.TRAINER: ("batches", "reports", "weights"),
    Role.REWARD: ("orders", "results"),
    Role.ENVIRONMENT: ("orders", "events"),
    Role.JUDGE: ("orders", "reports"),
}
JUDGE = "judge-0"
"""The run's own judge, where the recipe names a model for it."""
RENDEZVOUS = "trainer.rendezvous"
RENDEZVOUS_FILE = "rendezvous"
"""In the directory of the sockets: where ranks of one host meet. Ranks that are started again need a new one."""


def prepared_sets(recipe: Recipe) -> tuple[PreparedSet, ...]:
    """The sets of engines of ``recipe``, the one that begins first; usually it is the only one."""
    engines = recipe.engines
    first = 0
    shapes: tuple[Engines | EngineShape, ...] = (engines, *engines.sets)
    sets = []
    for shape in shapes:
        sets.append(
            PreparedSet(
                first=first,
                count=shape.count,
                tensor_parallel_size=shape.tensor_parallel_size,
                max_num_seqs=shape.max_num_seqs or -(-engines.max_num_seqs * engines.count // shape.count),
                kv_tokens=shape.kv_tokens,
                cores=shape.cores,
                rounds=shape.rounds,
                args=engines.args | shape.args,
            )
        )
        first += shape.count
    return tuple(sets)


def expected_kv_tokens(known: int, workers: int, of: int, weight_tokens: float) -> int:
    """Tokens that the KV cache of an engine of ``workers`` holds, from the ``known`` room of one ``of`` so many workers
    on devices of the same memory (0: no limit is known).

    ``weight_tokens``: tokens whose KV takes as much memory as the weights. A device has room for
    ``(known + weight_tokens) / of`` tokens of both; weights are stored once for each engine."""
    if not known:
        return 0
    return max(int((known + weight_tokens) / of * workers - weight_tokens), 1)


def set_of_engine(recipe: Recipe, index: int) -> PreparedSet:
    """The set that engine ``index`` belongs to. Raises ``IndexError`` for one that is not in the recipe."""
    for one in prepared_sets(recipe):
        if one.first <= index < one.first + one.count:
            return one
    raise IndexError(f"engine-{index} is not in this recipe")


def rank_host(recipe: Recipe, rank: int) -> str:
    """Address of the host of trainer rank ``rank``, where it serves its weights; ranks meet at that of rank 0."""
    hosts = recipe.transport.training_hosts or (recipe.transport.host,)
    return hosts[rank * len(hosts) // recipe.training.ranks]


def port_range(ports: str) -> range:
    """The ports of ``FIRST-LAST``. Raises ``ValueError`` for anything else."""
    first, dash, last = ports.partition("-")
    if not dash or not 1024 <= int(first) <= int(last) <= 65535:
        raise ValueError(ports)
    return range(int(first), int(last) + 1)


def plan_topology(recipe: Recipe, socket_directory: Path, places: Places | None = None) -> Topology:
    """Processes of ``recipe``; ipc endpoints are files in ``socket_directory`` (short: a socket path has 107 bytes).
    ``places``: on a cluster. Raises ``StreamRLError`` where a host has too few free ports."""
    processes = [_placed(plan, places) for plan in _plans(recipe)]
    endpoints = _endpoints(recipe, processes, socket_directory) if places is None else {}
    if places is not None:
        endpoints = _endpoints_on_cluster(processes, places, socket_directory)
    epoch = places.epoch if places else 0
    return Topology(
        processes=tuple(processes), endpoints=endpoints, min_serving=recipe.engines.min_serving, epoch=epoch
    )


def _plans(recipe: Recipe) -> list[ProcessPlan]:
    engines_local = recipe.transport.engines is LaunchedBy.LOCAL
    training_local = recipe.transport.training is LaunchedBy.LOCAL
    core = recipe.core_restarts
    processes = [ProcessPlan(role=Role.CONTROLLER, index=0, restarts=core)]
    processes += [
        ProcessPlan(role=Role.REWARD, index=i, restarts=recipe.run.restarts)
        for i in range(recipe.reward_limits.workers)
    ]
    processes += [
        ProcessPlan(role=Role.ENVIRONMENT, index=i, restarts=recipe.run.restarts)
        for i in range(recipe.environment.workers if recipe.environment.given else 0)
    ]
    last = prepared_sets(recipe)[-1]
    processes += [
        ProcessPlan(
            role=Role.ENGINE,
            index=i,
            local=engines_local,
            starts_inactive=i >= recipe.engines.count,
            restarts=recipe.engines.restarts,
        )
        for i in range(last.first + last.count)
    ]
    processes += [
        ProcessPlan(role=Role.TRAINER, index=i, local=training_local, restarts=core)
        for i in range(recipe.training.ranks)
    ]
    if recipe.judge.model:
        processes.append(ProcessPlan(role=Role.JUDGE, index=0, restarts=recipe.judge.restarts))
    return processes


def _placed(plan: ProcessPlan, places: Places | None) -> ProcessPlan:
    place = places.by_name.get(plan.name) if places else None
    return msgspec.structs.replace(plan, **msgspec.structs.asdict(place)) if place else plan


def _endpoints(recipe: Recipe, processes: list[ProcessPlan], socket_directory: Path) -> dict[str, str]:
    """Return the endpoints of a run whose hosts the recipe names; ports are counted over all of them."""
    streams = [(p, s) for p in processes for s in STREAMS[p.role]]
    tcp = recipe.transport.kind is TransportKind.TCP
    endpoints = {}
    for port, (process, stream) in enumerate(streams, recipe.transport.port):
        name = f"{process.name}.{stream}"
        # Workers of user code, the judge and the controller are always children of this run, so they never need a port.
        if tcp and process.role in (Role.ENGINE, Role.TRAINER):
            host = rank_host(recipe, process.index) if stream == "weights" else recipe.transport.host
            endpoints[name] = f"tcp://{host}:{port}"
        else:
            endpoints[name] = f"ipc://{socket_directory / name}"
    meeting = f"tcp://{rank_host(recipe, 0)}:{recipe.transport.port + len(streams)}"
    endpoints[RENDEZVOUS] = meeting if tcp else ""
    return endpoints


def _endpoints_on_cluster(processes: list[ProcessPlan], places: Places, socket_directory: Path) -> dict[str, str]:
    free = {address: iter(ports) for address, ports in places.ports.items()}

    def at(address: str) -> str:
        try:
            return f"tcp://{address}:{next(free[address])}"
        except StopIteration:
            raise StreamRLError(
                f"cluster.advanced.ports: {address} has {len(places.ports[address])} free ports in that range, which "
                "are too few for this run: widen it, or end other runs"
            ) from None

    endpoints = {}
    for process in processes:
        for stream in STREAMS[process.role]:
            name = f"{process.name}.{stream}"
            address = process.address if stream == "weights" else places.address
            endpoints[name] = at(address) if process.host else f"ipc://{socket_directory / name}"
        if process.role is Role.ENGINE and process.host:
            endpoints[f"{process.name}.weights"] = at(process.address)
    first = next(process for process in processes if process.role is Role.TRAINER)
    return endpoints | {RENDEZVOUS: at(first.address)}


def local_engine(topology: Topology, name: str) -> ProcessPlan:
    """An engine that the supervisor starts. Raises ``StreamRLError`` for another name."""
    engines = {p.name: p for p in topology.processes if p.role is Role.ENGINE and p.local}
    if name not in engines:
        raise StreamRLError(f"{name} is no engine of this host; it has {', '.join(engines) or 'none'}")
    return engines[name]


def judge_socket(topology: Topology) -> Path | None:
    """Return the socket of the run's own judge, for this user on this host only; None: there is no judge."""
    orders = topology.endpoints.get(f"{JUDGE}.orders")
    return Path(orders.removeprefix("ipc://")).with_name(f"{JUDGE}.http") if orders else None


def rewards_endpoint(topology: Topology) -> str:
    """Endpoint at which the controller receives changes of the rewards. Beside its own stream, which never leaves the
    host."""
    return f"{topology.endpoint(Role.CONTROLLER.value, 'steps')}.rewards"


def read_topology(run_directory: Path) -> Topology:
    """Read the topology that the supervisor of the run wrote. Raises ``StreamRLError`` where there is none, or another
    file."""
    try:
        return msgspec.json.decode((run_directory / TOPOLOGY_FILE).read_bytes(), type=Topology)
    except (OSError, *UNDECODABLE) as error:
        raise StreamRLError(
            f"{run_directory} is not the directory of a run ({TOPOLOGY_FILE}: {error}): give one, such as runs/latest"
        ) from error


def metrics_endpoint(recipe: Recipe, topology: Topology) -> str:
    """Endpoint of the published metrics: as the recipe says, or beside the run's own sockets."""
    return recipe.metrics.endpoint or f"{topology.endpoint(Role.CONTROLLER.value, 'steps')}.metrics"


def control_socket(topology: Topology) -> Path:
    """Path of the socket that takes commands to the run, from this user on this host."""
    return Path(topology.endpoint(Role.CONTROLLER.value, "steps").removeprefix("ipc://")).with_name("control")

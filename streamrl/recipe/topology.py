"""Processes of a run and the endpoints of their streams, computed from the recipe. The supervisor plans them
(``plan_topology``) and writes them to ``topology.json`` in the run's directory, from which all processes of the run and
the commands about it read them."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path

from msgspec import Struct, json
from msgspec.structs import asdict, replace

from streamrl.base.errors import UNDECODABLE, InputError, StreamRLError
from streamrl.base.host_addresses import at_port
from streamrl.base.types import JsonObject, Texts, TextsByName
from streamrl.recipe.sections import PIPELINE_PARALLEL, Engines, EngineShape, Recipe, TransportKind
from streamrl.recipe.served_models import ServedModel

TOPOLOGY_FILE = "topology.json"
"""File of the topology in the directory of a run."""
JOURNAL_DIRECTORY = "journal"
"""Directory of the journal in the directory of a run."""


class Role(StrEnum):
    """Kind of a process of the run."""

    CONTROLLER = "controller"
    ENGINE = "engine"
    TRAINER = "trainer"
    REWARD = "reward"
    ENVIRONMENT = "environment"
    JUDGE = "judge"
    TEACHER = "teacher"


class ProcessPlan(Struct, frozen=True, kw_only=True):
    """One process, such as ``engine-0`` or ``trainer-1``.

    ``index``: number among the processes of its role;
    ``starts_inactive``: whether it is started by order of the controller, when its set of engines serves, or when the
    ranks that it shares a GPU with have loaded their state;
    ``restarts``: number of restarts after a death;
    ``gpus``: GPUs of the process, as ``CUDA_VISIBLE_DEVICES`` names them (empty: none);
    ``gpu_memory_utilization``: share of each GPU for an engine;
    ``keeps_weights``: whether the weights of an engine stay on its GPU while it sleeps;
    ``host``: name of its host on a cluster (empty: the host of the run);
    ``address``: address of this host for other hosts."""

    role: Role
    index: int
    starts_inactive: bool = False
    restarts: int = 0
    gpus: Texts = ()
    gpu_memory_utilization: float = 0.0
    keeps_weights: bool = False
    host: str = ""
    address: str = ""

    @property
    def name(self) -> str:
        """Name of the process in logs, errors and metrics."""
        if self.role is Role.CONTROLLER:
            return self.role.value
        return f"{self.role.value}-{self.index}"


class PreparedSet(Struct, frozen=True, kw_only=True):
    """A set of engines (``engines``, or one of ``engines.sets``).

    ``first``: number of its first engine;
    ``count``: number of engines;
    ``tensor_parallel_size``: tensor parallel ranks of each engine;
    ``max_num_seqs``: requests that an engine runs at once;
    ``kv_tokens``: tokens in the KV cache of an engine (0: as many as fit);
    ``cores``: cores of each engine on a CPU;
    ``rounds``: kinds of rounds that the set always serves;
    ``args``: arguments of vLLM."""

    first: int = 0
    count: int
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    kv_tokens: int = 0
    cores: Texts = ()
    rounds: Texts = ()
    args: JsonObject = {}

    @property
    def workers(self) -> int:
        """Number of computing processes of each engine, with one GPU each: tensor parallel size times
        pipeline parallel size."""
        pipeline_size = self.args.get(PIPELINE_PARALLEL)
        if not isinstance(pipeline_size, int) or pipeline_size <= 0:  # not set, or another type, which a rule refuses
            return self.tensor_parallel_size
        return self.tensor_parallel_size * pipeline_size

    @property
    def name(self) -> str:
        """Name of the set, such as ``2x1`` for two engines with one worker each."""
        return f"{self.count}x{self.workers}"

    @property
    def engines(self) -> Texts:
        """Names of the engines."""
        return tuple(f"engine-{index}" for index in range(self.first, self.first + self.count))

    @property
    def capacity(self) -> float:
        """Tokens in the KV caches of all engines together; infinite where ``kv_tokens`` is 0."""
        return float(self.count * self.kv_tokens) if self.kv_tokens else math.inf


class ProcessPlace(Struct, frozen=True, kw_only=True):
    """Place of a process on a cluster, with the fields of ``ProcessPlan``."""

    host: str
    address: str
    gpus: Texts = ()


class Places(Struct, frozen=True, kw_only=True):
    """Places of the engines and trainer ranks of a run on a cluster. Made by ``processes.cluster``.

    ``address``: address of the controller's host;
    ``by_name``: place of each process, by its name;
    ``ports``: free ports of each host, by its address;
    ``epoch``: number of this start of the run's processes."""

    address: str
    by_name: dict[str, ProcessPlace]
    ports: dict[str, tuple[int, ...]]
    epoch: int = 0


class Topology(Struct, frozen=True, kw_only=True):
    """Processes and endpoints of one run. The controller binds every stream; ranks bind their weight endpoint, and
    engines on a cluster bind an endpoint at which other engines get weights.

    ``endpoints``: ZeroMQ endpoint of each stream, by ``PROCESS.STREAM``;
    ``min_serving``: least number of engines; with fewer the run ends;
    ``epoch``: number of the start of the processes; those of different starts refuse each other."""

    processes: tuple[ProcessPlan, ...]
    endpoints: TextsByName
    min_serving: int = 1
    epoch: int = 0

    def endpoint(self, process: str, stream: str) -> str:
        """Return the endpoint of a stream, such as that of ``("engine-0", "orders")``."""
        return self.endpoints[f"{process}.{stream}"]


STREAMS = {
    Role.CONTROLLER: ("steps",),
    Role.ENGINE: ("orders", "completions"),
    Role.TRAINER: ("batches", "reports", "weights"),
    Role.REWARD: ("orders", "results"),
    Role.ENVIRONMENT: ("orders", "events"),
    Role.JUDGE: ("orders", "reports"),
    Role.TEACHER: ("orders", "reports"),
}
"""Streams of a process, by its role."""
RENDEZVOUS = "trainer.rendezvous"
"""Name of the endpoint at which trainer ranks of several hosts meet."""
RENDEZVOUS_FILE = "rendezvous"
"""File in the directory of the sockets at which trainer ranks of one host meet. Restarted ranks need a new file."""


def prepared_sets(recipe: Recipe) -> tuple[PreparedSet, ...]:
    """Return the sets of engines of ``recipe``, first the one that serves at the start."""
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


def expected_kv_tokens(kv_tokens: int, workers: int, of: int, weight_tokens: float) -> int:
    """Return the expected tokens in the KV cache of an engine with ``workers`` workers; 0: unknown.

    ``kv_tokens``: tokens in the KV cache of an engine with ``of`` workers on the same devices (0: unknown);
    ``weight_tokens``: tokens whose KV cache takes as much memory as the weights.

    A device has room for ``(kv_tokens + weight_tokens) / of`` tokens; each engine stores the weights once."""
    if not kv_tokens:
        return 0
    return max(int((kv_tokens + weight_tokens) / of * workers - weight_tokens), 1)


def set_of_engine(recipe: Recipe, index: int) -> PreparedSet:
    """Return the set of engine ``index``. Raises ``IndexError`` for an engine that is not in the recipe."""
    for engine_set in prepared_sets(recipe):
        if engine_set.first <= index < engine_set.first + engine_set.count:
            return engine_set
    raise IndexError(f"engine-{index} is not in this recipe")


def port_range(ports: str) -> range:
    """Return the ports of ``FIRST-LAST``. Raises ``ValueError`` for another text."""
    first, dash, last = ports.partition("-")
    if not dash or not 1024 <= int(first) <= int(last) <= 65535:
        raise ValueError(ports)
    return range(int(first), int(last) + 1)


def plan_topology(recipe: Recipe, socket_directory: Path, places: Places | None = None) -> Topology:
    """Plan the processes and endpoints of ``recipe``. Raises ``StreamRLError`` where a host has too few free ports.

    ``socket_directory``: directory of the ipc endpoints (a short path: a socket path has 107 bytes);
    ``places``: places of the processes on a cluster (None: no cluster)."""
    processes = _plans(recipe)
    if places is None:
        epoch = 0
        endpoints = _endpoints(recipe, processes, socket_directory)
    else:
        epoch = places.epoch
        processes = [_on_cluster(plan, places) for plan in processes]
        endpoints = _endpoints_on_cluster(processes, places, socket_directory)
    return Topology(
        processes=tuple(processes), endpoints=endpoints, min_serving=recipe.engines.min_serving, epoch=epoch
    )


def _plans(recipe: Recipe) -> list[ProcessPlan]:
    core_restarts = recipe.core_restarts
    processes = [ProcessPlan(role=Role.CONTROLLER, index=0, restarts=core_restarts)]
    processes += [
        ProcessPlan(role=Role.REWARD, index=index, restarts=recipe.run.restarts)
        for index in range(recipe.reward_limits.workers)
    ]
    if recipe.environment.configured:
        processes += [
            ProcessPlan(role=Role.ENVIRONMENT, index=index, restarts=recipe.run.restarts)
            for index in range(recipe.environment.workers)
        ]
    last_set = prepared_sets(recipe)[-1]
    processes += [
        ProcessPlan(
            role=Role.ENGINE,
            index=index,
            starts_inactive=recipe.in_turns or index >= recipe.engines.count,
            restarts=recipe.engines.restarts,
        )
        for index in range(last_set.first + last_set.count)
    ]
    processes += [
        ProcessPlan(role=Role.TRAINER, index=index, restarts=core_restarts) for index in range(recipe.training.ranks)
    ]
    for role, served_model in served_models(recipe).items():
        processes.append(ProcessPlan(role=role, index=0, restarts=served_model.restarts))
    return processes


def served_models(recipe: Recipe) -> dict[Role, ServedModel]:
    """Models beside the policy that this run serves, by the role of their process, which is also the name of their
    section."""
    sections = {Role.JUDGE: recipe.judge, Role.TEACHER: recipe.teacher}
    return {role: section for role, section in sections.items() if section.is_own}


def served_name(role: Role) -> str:
    """Name of the process that serves the model of ``role``."""
    return f"{role.value}-0"


def _on_cluster(plan: ProcessPlan, places: Places) -> ProcessPlan:
    """``plan`` with its place, where it has one."""
    place = places.by_name.get(plan.name)
    if place is None:
        return plan
    return replace(plan, **asdict(place))


def _endpoints(recipe: Recipe, processes: list[ProcessPlan], socket_directory: Path) -> TextsByName:
    """Return the endpoints of a run outside of a cluster. The n-th stream of the run has the n-th port."""
    streams = [(process, stream) for process in processes for stream in STREAMS[process.role]]
    tcp = recipe.transport.kind is TransportKind.TCP
    endpoints = {}
    for port, (process, stream) in enumerate(streams, recipe.transport.port):
        name = f"{process.name}.{stream}"
        # Workers of user code, served models and the controller are on the host of the run, so they need no port.
        if tcp and process.role in (Role.ENGINE, Role.TRAINER):
            endpoints[name] = f"tcp://{recipe.transport.host}:{port}"
        else:
            endpoints[name] = f"ipc://{socket_directory / name}"
    endpoints[RENDEZVOUS] = ""
    if tcp:
        endpoints[RENDEZVOUS] = f"tcp://{recipe.transport.host}:{recipe.transport.port + len(streams)}"
    return endpoints


def _endpoints_on_cluster(processes: list[ProcessPlan], places: Places, socket_directory: Path) -> TextsByName:
    """Return the endpoints of a run on a cluster, at free ports of its hosts."""
    free_ports = {address: iter(ports) for address, ports in places.ports.items()}

    def endpoint_at(address: str) -> str:
        try:
            return f"tcp://{at_port(address, next(free_ports[address]))}"
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
            endpoints[name] = endpoint_at(address) if process.host else f"ipc://{socket_directory / name}"
        if process.role is Role.ENGINE and process.host:
            endpoints[f"{process.name}.weights"] = endpoint_at(process.address)
    first_rank = next(process for process in processes if process.role is Role.TRAINER)
    return endpoints | {RENDEZVOUS: endpoint_at(first_rank.address)}


def planned_engine(topology: Topology, name: str) -> ProcessPlan:
    """Return the plan of an engine. Raises ``StreamRLError`` for a name that no engine has."""
    engines = {process.name: process for process in topology.processes if process.role is Role.ENGINE}
    if name not in engines:
        raise StreamRLError(f"{name} is no engine of this run; it has {', '.join(engines)}")
    return engines[name]


def model_socket(topology: Topology, role: Role) -> Path | None:
    """Return the socket of the model that the run serves as ``role``, for this user on this host only; None: the run
    serves none."""
    name = served_name(role)
    orders = topology.endpoints.get(f"{name}.orders")
    if not orders:
        return None
    return Path(orders.removeprefix("ipc://")).with_name(f"{name}.http")


def rewards_endpoint(topology: Topology) -> str:
    """Return the endpoint at which the controller receives changes of the rewards: beside its ``steps`` stream, which
    never leaves the host."""
    return f"{topology.endpoint(Role.CONTROLLER.value, 'steps')}.rewards"


def read_topology(run_directory: Path) -> Topology:
    """Read the topology of a run from its directory. Raises ``StreamRLError`` where there is no such file, or another
    one."""
    try:
        return json.decode((run_directory / TOPOLOGY_FILE).read_bytes(), type=Topology)
    except (OSError, *UNDECODABLE) as error:
        raise InputError(f"{run_directory} is not the directory of a run: name one, such as runs/latest") from error


def metrics_endpoint(recipe: Recipe, topology: Topology) -> str:
    """Return the endpoint of the published metrics: the recipe's, or one beside the sockets of the run."""
    return recipe.metrics.endpoint or f"{topology.endpoint(Role.CONTROLLER.value, 'steps')}.metrics"


def control_socket(topology: Topology) -> Path:
    """Return the path of the socket for commands to the run, from this user on this host."""
    return Path(topology.endpoint(Role.CONTROLLER.value, "steps").removeprefix("ipc://")).with_name("control")

"""Messages between the supervisor of a run (``remote_host``) and the daemons of its hosts (``host_daemon``).

Orders are numbered: a daemon carries out each order once, in order. Every request repeats the orders that were not
acknowledged: after a lost answer no order is lost or carried out twice."""

from __future__ import annotations

from msgspec import Struct

from streamrl.base.types import TextsByName
from streamrl.engines.vllm.visible_gpus import Gpu
from streamrl.recipe.topology import ProcessPlan


class StartProcess(Struct, frozen=True, tag=True):
    """Start a process. ``number``: number of this start in the run, by which other orders name the process."""

    number: int
    plan: ProcessPlan
    resumes: bool


class SignalProcess(Struct, frozen=True, tag=True):
    """Send a signal to a process, unless it has ended."""

    number: int
    signal: int


class EndLeftBehind(Struct, frozen=True, tag=True):
    """Kill the processes that a process left behind, and every orphan of the run on this host."""

    number: int


class EndAll(Struct, frozen=True, tag=True):
    """Kill every process of the run on this host."""


DaemonOrder = StartProcess | SignalProcess | EndLeftBehind | EndAll


class DaemonSetup(Struct, frozen=True, kw_only=True):
    """Setup of a daemon. ``digest``: hash of the run's ``recipe.toml``, which the daemon must see; ``variables``:
    variables that its processes get from the run; ``ports``: allowed ports (``cluster.ports``); the daemon holds
    ``port_count`` of them; ``interface``: network interface whose address is used in place of ``address``, unless
    empty."""

    run_directory: str
    digest: str
    epoch: int
    lease_s: float
    ports: str
    port_count: int
    interface: str
    address: str
    variables: TextsByName


class HostFacts(Struct, frozen=True, kw_only=True):
    """Facts of a host, from its daemon. ``sees_run``: whether the host has the run's directory; ``packages``: versions
    of the packages that train and sample; ``ports``: free ports, locked for the run; ``nice``: niceness of the daemon,
    which its processes inherit; ``memory_monitor``: whether Ray ends processes of this host where its memory is nearly
    full; ``problem``: reason for which this host cannot serve, or empty."""

    name: str
    address: str
    sees_run: bool
    packages: TextsByName
    gpus: tuple[Gpu, ...]
    ports: tuple[int, ...]
    nice: int
    memory_monitor: bool = False
    problem: str = ""


class DaemonRequest(Struct, frozen=True, kw_only=True):
    """One request of the run. ``orders``: orders that were not acknowledged, the first of them number ``first``. Each
    request renews the lease."""

    epoch: int
    first: int
    orders: tuple[DaemonOrder, ...]


class ProcessState(Struct, frozen=True, kw_only=True):
    """State of a process. ``exit_code``: None while the process runs; ``reason``: content of its exit file, written
    ``reason_age_s`` seconds ago; ``failure``: error of a process that could not be started."""

    pid: int
    exit_code: int | None = None
    reason: bytes = b""
    reason_age_s: float = 0.0
    failure: str = ""


class DaemonAnswer(Struct, frozen=True, kw_only=True):
    """Answer to a request. ``orders_done``: number of orders that were carried out since the daemon began;
    ``processes``: states by number of the start; ``survivors``: pids that survived SIGKILL of the last order that
    killed; ``refusal``: reason for which no order was carried out, or empty."""

    orders_done: int
    processes: dict[int, ProcessState] = {}
    survivors: tuple[int, ...] = ()
    refusal: str = ""

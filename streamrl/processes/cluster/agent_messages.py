"""Messages between the run and the agents of its hosts. Orders are numbered: an agent carries out each once, in order,
and every request repeats those that were not acknowledged, so that a lost answer loses and repeats nothing."""

from __future__ import annotations

import msgspec

from streamrl.engines.vllm.gpus import Gpu
from streamrl.recipe.topology import ProcessPlan


class StartProcess(msgspec.Struct, frozen=True, tag=True):
    """Start a process. ``number``: of this start in the run, by which other orders name the process."""

    number: int
    plan: ProcessPlan
    resumes: bool


class SignalProcess(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a process, unless it has ended."""

    number: int
    signal: int


class EndLeftBehind(msgspec.Struct, frozen=True, tag=True):
    """Kill what a process left, and every process of the run on this host that belongs to no other."""

    number: int


class EndAll(msgspec.Struct, frozen=True, tag=True):
    """Kill every process of the run on this host."""


AgentOrder = StartProcess | SignalProcess | EndLeftBehind | EndAll


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Begin of an agent. ``digest``: of the run's ``recipe.toml``, which the agent must see; ``environment``: variables
    that its processes get from the run; ``ports``: as ``cluster.ports``, of which it takes ``port_count``."""

    run_directory: str
    digest: str
    epoch: int
    lease_s: float
    ports: str
    port_count: int
    interface: str
    address: str
    environment: dict[str, str]


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a host, from its agent. ``sees_run``: the run's directory is the same there; ``packages``: versions of
    what trains and samples; ``ports``: free ones, held for the run; ``nice``: niceness of the agent, which its
    processes inherit; ``problem``: a reason for which this host cannot serve."""

    name: str
    address: str
    sees_run: bool
    packages: dict[str, str]
    gpus: tuple[Gpu, ...]
    ports: tuple[int, ...]
    nice: int
    problem: str = ""


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the run. ``orders``: from number ``first`` on. Each request renews the lease."""

    epoch: int
    first: int
    orders: tuple[AgentOrder, ...]


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a process. ``exit_code`` None: it runs. ``reason``: the file that it left behind about its end, with
    ``reason_age_s``, seconds since the process wrote it. ``failure``: it could not be started."""

    pid: int
    exit_code: int | None = None
    reason: bytes = b""
    reason_age_s: float = 0.0
    failure: str = ""


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request. ``done``: number of orders that were carried out; ``processes``: by number of their start;
    ``survivors``: pids that survived SIGKILL, of the last order that killed; ``refusal``: nothing was done, and why."""

    done: int
    processes: dict[int, ProcessState] = {}
    survivors: tuple[int, ...] = ()
    refusal: str = ""

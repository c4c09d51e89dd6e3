"""The launcher of a run on a cluster: it starts processes on hosts, and replaces hosts that are lost.

``open_launcher`` makes it for the supervisor, in the process of the command. The supervisor decides as on one
host. The controller, rewards, environments and the judge run below the supervisor; engines and trainer ranks run below
the daemons of their hosts (``remote_host``). The processes of a lost host are reported as killed. Their successors are
started on a host that the run does not use yet, or wait until one joins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from logging import getLogger
from os import environ
from pathlib import Path
from time import monotonic
from typing import Protocol

from anyio import CancelScope, Lock, create_task_group, sleep
from anyio.abc import TaskGroup
from msgspec import Struct, json
from msgspec.structs import replace

from streamrl.base.atomic_files import write_atomic, write_durable
from streamrl.base.errors import RecipeError
from streamrl.base.host_addresses import at_port
from streamrl.base.types import Texts
from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.processes.cluster.daemon_messages import DaemonSetup, EndAll, EndLeftBehind, HostFacts, StartProcess
from streamrl.processes.cluster.failed_joins import FailedJoins
from streamrl.processes.cluster.host_assignment import GpuNeed, HostRoom, assign, gpu_need, on_fewer_ranks
from streamrl.processes.cluster.host_daemon import packages_here
from streamrl.processes.cluster.remote_host import DaemonLink, RemoteHost, RemoteProcess
from streamrl.processes.cluster.this_host import MEMORY_MONITOR
from streamrl.processes.launcher import ChildProcess, NoHost
from streamrl.processes.local_launcher import LocalLauncher
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import (
    JOURNAL_DIRECTORY,
    STREAMS,
    TOPOLOGY_FILE,
    Places,
    ProcessPlace,
    ProcessPlan,
    Role,
    Topology,
    plan_topology,
)

log = getLogger(__name__)

LOOK_S = 2.0
"""How often the cluster is asked for hosts while one is missing."""
ROOM_S = 60.0
"""How long a run that has lost a host of trainer ranks waits for room for them."""
EPOCH_FILE = "epoch"
PASSED_ON = (
    *("VLLM_", "FLASH_ATTENTION_", "FLASHINFER_", "TRITON_", "LMCACHE_"),
    *("NCCL_", "GLOO_", "UCX_", "FI_", "NVSHMEM_"),
    *("TORCH", "PYTORCH_", "CUDA_LAUNCH", "CUDA_DEVICE_MAX", "CUDA_MODULE", "CUBLAS_", "CUDNN_", "NVIDIA_TF32"),
    *("OMP_", "MKL_", "KMP_", "MALLOC_", "TOKENIZERS_"),
    *("STREAMRL_", "PYTHONPATH", "PYTHONHASHSEED", "HF_HOME", "HF_HUB_CACHE"),
)
"""Beginnings of the variables that processes on other hosts get from the run's environment: all that vLLM copies to the
hosts of an engine, but secrets, and those by which the same code computes or communicates otherwise."""


class HostOffer(Struct, frozen=True, kw_only=True):
    """A host of the cluster. ``gpus``: number of free GPUs; ``is_run_host``: whether the supervisor runs on it."""

    name: str
    address: str
    gpus: int
    is_run_host: bool = False


class Hosts(Protocol):
    """A cluster that has hosts, and starts daemons on them."""

    async def offers(self) -> list[HostOffer]:
        """Return the hosts that are alive, the run's own first. Raises ``StreamRLError``."""

    async def start_daemons(
        self, gpus: Mapping[HostOffer, int], setup: Callable[[HostOffer], DaemonSetup]
    ) -> list[tuple[DaemonLink, HostFacts]]:
        """Start a daemon on each host of ``gpus``, with its number of GPUs; start all daemons or none.
        Returns them in the order of ``gpus``. Raises ``StreamRLError``."""


SaveRecipe = Callable[[Path, Recipe], None]
"""Writes the recipe with which the run in a directory goes on: with fewer ranks, or other hosts for them."""


class ClusterLauncher:
    """Starts the processes of ``recipe`` on ``hosts``, and processes without a host by ``local``. Made by
    ``cluster_launcher``. ``need``: GPUs of an engine and of a rank; ``save``: writes the recipe of a run that goes on
    with fewer ranks; ``on_join``: callback for a host that has joined a run that had lost one."""

    def __init__(
        self,
        recipe: Recipe,
        run_directory: Path,
        sockets: Path,
        hosts: Hosts,
        local: LocalLauncher,
        need: GpuNeed,
        save: SaveRecipe,
    ) -> None:
        self.on_join: Callable[[], None] = lambda: None
        self.hosts: dict[str, RemoteHost] = {}
        self._recipe = recipe
        self._run_directory = run_directory
        self._sockets = sockets
        self._cluster = hosts
        self._local = local
        self._need = need
        self._save = save
        self._topology: Topology | None = None
        self._places: dict[str, ProcessPlace] = {}
        self._epoch = _next_epoch(run_directory)
        self._starts = 0
        self._looking = Lock()
        self._failed_joins = FailedJoins()
        self._run_host: HostFacts | None = None
        self._placing = False
        self._nursery: TaskGroup

    # ---- a launcher ------------------------------------------------------------------------------

    def open(self) -> None:
        """Adopt orphans of the run on this host."""
        self._local.open()

    def close(self) -> None:
        """Stop adopting orphans."""
        self._local.close()

    async def place(self, topology: Topology) -> Topology:
        """Give each engine and rank a host that is not lost, with free ports of this host. Waits a minute for a host
        to join where there is no room, then goes on with fewer ranks. Raises ``RecipeError`` where there is room for
        no rank."""
        self._placing = True  # a host that joins meanwhile starts nothing: the supervisor starts all afterwards
        try:
            self._places = await self._assigned()
        finally:
            self._placing = False
        run_host = self._run_host
        assert run_host is not None
        ports = {run_host.address: run_host.ports}  # its daemon may be lost: the controller is there all the same
        ports |= {host.facts.address: host.facts.ports for host in self.hosts.values()}
        epoch = _next_epoch(self._run_directory)
        places = Places(address=run_host.address, by_name=self._places, ports=ports, epoch=epoch)
        new_topology = plan_topology(self._recipe, self._sockets, places)
        earlier_plans = {plan.name: plan for plan in topology.processes}
        processes = [plan if plan.host else earlier_plans[plan.name] for plan in new_topology.processes]
        self._topology = replace(new_topology, processes=tuple(processes))
        return self._topology

    async def _assigned(self) -> dict[str, ProcessPlace]:
        """Places on the hosts that are not lost, once there is room for engines and ranks."""
        began_s = monotonic()
        while True:
            living = [host.facts for host in self.hosts.values() if not host.lost]
            rooms = [HostRoom(name=facts.name, address=facts.address, gpus=gpu_names(facts)) for facts in living]
            try:
                return self._assign(rooms, may_lose_ranks=monotonic() > began_s + ROOM_S)
            except RecipeError:
                if monotonic() > began_s + ROOM_S:
                    raise
            await self._look()
            await sleep(LOOK_S)

    def _assign(self, rooms: Sequence[HostRoom], *, may_lose_ranks: bool) -> dict[str, ProcessPlace]:
        """Assign places on ``rooms`` for a run that has begun, also on fewer hosts than ``cluster.hosts``."""
        on_any_hosts = replace(self._recipe, cluster=replace(self._recipe.cluster, hosts=0))
        try:
            return assign(on_any_hosts, rooms, self._need)
        except RecipeError:
            fewer = on_fewer_ranks(self._recipe, rooms, self._need) if may_lose_ranks else None
            if fewer is None:
                raise
        log.warning("the run goes on with %d of %d ranks", fewer.training.ranks, self._recipe.training.ranks)
        self._recipe = fewer
        self._save(self._run_directory, fewer)
        return assign(fewer, rooms, self._need)

    def start(self, plan: ProcessPlan, *, resumes: bool = False) -> ChildProcess:
        """Start one process. Raises ``NoHost`` where its host is lost, and ``OSError``."""
        if not plan.host:
            return self._local.start(plan, resumes=resumes)
        plan = self._plan_of(plan.name)
        host = self.hosts[plan.host]
        if host.lost:
            raise NoHost(f"{host.lost}; no other host has room for {plan.name}")
        self._starts += 1
        log_file = self._run_directory / "logs" / f"{plan.name}.log"
        log_start = log_file.stat().st_size if log_file.is_file() else 0
        host.order(StartProcess(self._starts, plan, resumes))
        return ChildProcess(plan, RemoteProcess(host, self._starts), log_file, log_start)

    async def end_left_behind(self, child: ChildProcess) -> list[int]:
        """Kill the processes that ``child`` left on its host."""
        if not isinstance(child.process, RemoteProcess):
            return await self._local.end_left_behind(child)
        host = child.process.host
        await host.carried_out(host.order(EndLeftBehind(child.process.number)))
        return list(host.survivors)

    async def end_all(self) -> list[int]:
        """Kill every process of the run on every host. Waits for a host that does not answer until its lease is over:
        its processes are gone then."""
        orders = [(host, host.order(EndAll())) for host in self.hosts.values()]
        survivors = await self._local.end_all()
        for host, order in orders:
            await host.carried_out(order)
            if not host.lost:
                survivors += host.survivors
        return survivors

    # ---- hosts -----------------------------------------------------------------------------------

    async def run(self, nursery: TaskGroup) -> None:
        """Start daemons on the hosts that the run needs, and watch these hosts in ``nursery``. Raises ``StreamRLError``
        where there are too few hosts, or one cannot serve."""
        self._nursery = nursery
        offers = await self._cluster.offers()
        rooms = _rooms(offers)
        resumes = (self._run_directory / JOURNAL_DIRECTORY).is_dir()
        places = self._assign(rooms, may_lose_ranks=True) if resumes else assign(self._recipe, rooms, self._need)
        hosts_in_use = {place.host for place in places.values()}
        run_offers = [offer for offer in offers if offer.is_run_host or offer.name in hosts_in_use]
        await self._begin_on({offer: _gpus_on(offer.name, places) for offer in run_offers})
        nursery.start_soon(self._watch)

    async def _begin_on(self, gpus: Mapping[HostOffer, int]) -> None:
        """Start daemons on the hosts of ``gpus``, with so many GPUs each. Raises ``RecipeError`` where a host cannot
        serve: then all these daemons are released."""
        daemons = await self._cluster.start_daemons(gpus, self._setup_of)
        problems = []
        for (_, facts), count in zip(daemons, gpus.values(), strict=True):
            problems += host_problems(facts, count)
        if problems:
            for link, _ in daemons:
                await link.release()
            raise RecipeError(*problems)
        for (link, facts), offer in zip(daemons, gpus, strict=True):
            if offer.is_run_host:
                self._run_host = facts
            host = RemoteHost(facts, link, self._run_directory, epoch=self._epoch, lease_s=self._recipe.cluster.lease_s)
            self.hosts[facts.name] = host
            if facts.nice:
                log.warning(
                    "processes on %s run at niceness %d: start Ray with RAY_worker_niceness=0", host.name, facts.nice
                )
            if facts.memory_monitor:
                log.warning(
                    "Ray ends all that runs on %s where 95 %% of its memory are in use: start Ray with %s=0",
                    host.name,
                    MEMORY_MONITOR,
                )
            self._nursery.start_soon(host.run)

    async def _watch(self) -> None:
        """Look for a host to join while one is lost."""
        while True:
            await sleep(LOOK_S)
            if any(host.lost for host in self.hosts.values()):
                await self._look()

    async def _look(self) -> None:
        """Start daemons on hosts that can replace lost ones."""
        async with self._looking:  # ``_watch`` and an assignment both call this: a host joins once
            lost_hosts = [host for host in self.hosts.values() if host.lost]
            offers: list[HostOffer] = []
            with self._failed_joins.joining(""):
                for offer in await self._cluster.offers():
                    serving_host = self.hosts.get(offer.name)
                    if serving_host is None or serving_host.lost:
                        offers.append(offer)
            self._failed_joins.forget_others({"", *(offer.name for offer in offers)})
            for host in lost_hosts:
                if self.hosts.get(host.name) is not host:  # a new daemon on this host replaces another lost host
                    continue
                needed_gpus = _gpus_on(host.name, self._places)
                hosts_in_use = {place.host for place in self._places.values()}
                # The host itself if it is back, or one on which nothing was placed. Hosts that failed come last.
                candidates = [offer for offer in offers if offer.name == host.name]
                if host.name in hosts_in_use:
                    candidates += [offer for offer in offers if offer.name not in hosts_in_use]
                candidates = [offer for offer in candidates if offer.gpus >= needed_gpus]
                candidates = [offer for offer in candidates if self._failed_joins.may_try(offer.name)]
                if not candidates:
                    continue
                successor = min(candidates, key=lambda offer: offer.name in self._failed_joins.by_host)
                offers.remove(successor)
                with self._failed_joins.joining(successor.name):
                    await host.link.release()
                    await self._begin_on({successor: needed_gpus})
                    self._replace(host, self.hosts[successor.name])

    def _replace(self, lost: RemoteHost, joined: RemoteHost) -> None:
        """Move the places on ``lost`` to ``joined``, which may be the same host with a new daemon."""
        if lost.name == joined.name:
            log.warning("%s joined again, at %s", joined.name, joined.facts.address)
        else:
            log.warning("%s joined in place of %s", joined.name, lost.name)
            del self.hosts[lost.name]
        # A host that is back may have another address (a pod), and Ray may give it other GPUs: what is at the earlier
        # address now is a stranger. Sets of engines run alternately on the same GPUs: a GPU may be in several places.
        lost_gpus = {gpu for place in self._places.values() if place.host == lost.name for gpu in place.gpus}
        successor_of = dict(zip(_in_order(lost_gpus), gpu_names(joined.facts), strict=False))
        address = joined.facts.address
        for name, place in self._places.items():
            if place.host == lost.name:
                gpus = tuple(successor_of[gpu] for gpu in place.gpus)
                self._places[name] = replace(place, host=joined.name, address=address, gpus=gpus)
        self._write_topology(joined.facts)
        if not self._placing:
            self.on_join()

    def _write_topology(self, joined: HostFacts) -> None:
        """Write the new places of engines on ``joined`` into the topology, for processes that are started later."""
        if self._topology is None:
            return
        ports = iter(reversed(joined.ports))
        endpoints = dict(self._topology.endpoints)
        plans = []
        for plan in self._topology.processes:
            place = self._places.get(plan.name)
            if plan.role is Role.ENGINE and place is not None and place.host == joined.name:
                plan = replace(plan, host=place.host, address=place.address, gpus=place.gpus)
                endpoints.pop(f"{plan.name}.weights", None)
                port = next(ports, None)
                if port is not None:  # without a port other engines get their weights from the trainer
                    endpoints[f"{plan.name}.weights"] = f"tcp://{at_port(place.address, port)}"
            plans.append(plan)
        self._topology = replace(self._topology, processes=tuple(plans), endpoints=endpoints)
        write_atomic(self._run_directory / TOPOLOGY_FILE, json.encode(self._topology))

    def _plan_of(self, name: str) -> ProcessPlan:
        assert self._topology is not None
        return next(plan for plan in self._topology.processes if plan.name == name)

    def _setup_of(self, offer: HostOffer) -> DaemonSetup:
        cluster = self._recipe.cluster
        plans = plan_topology(self._recipe, self._sockets).processes
        daemon_plans = [plan for plan in plans if plan.role in (Role.ENGINE, Role.TRAINER)]
        return DaemonSetup(
            run_directory=str(self._run_directory),
            digest=sha256((self._run_directory / "recipe.toml").read_bytes()).hexdigest(),
            epoch=self._epoch,
            lease_s=cluster.lease_s,
            ports=cluster.ports,
            port_count=sum(len(STREAMS[plan.role]) + 1 for plan in daemon_plans) + 1,
            interface=cluster.interface,
            address=offer.address,
            variables={name: value for name, value in environ.items() if name.startswith(PASSED_ON)},
        )

    async def release(self) -> None:
        """End all daemons."""
        async with create_task_group() as releasing:
            for host in self.hosts.values():
                host.lose("the run has ended")
                releasing.start_soon(host.link.release)


@asynccontextmanager
async def cluster_launcher(
    recipe: Recipe, run_directory: Path, sockets: Path, hosts: Hosts, local: LocalLauncher, save: SaveRecipe
) -> AsyncIterator[ClusterLauncher]:
    """Open a launcher with daemons on the hosts that ``recipe`` needs. Raises ``StreamRLError`` where there are too few
    hosts, or one cannot serve."""
    need = gpu_need(recipe, installed_device())
    launcher = ClusterLauncher(recipe, run_directory, sockets, hosts, local, need, save)
    async with create_task_group() as nursery:
        try:
            await launcher.run(nursery)
            yield launcher
        finally:
            nursery.cancel_scope.cancel()
            with CancelScope(shield=True):
                await launcher.release()


def gpu_names(facts: HostFacts) -> Texts:
    """Names of the GPUs that the run has on a host, in one order for all processes."""
    return _in_order(gpu.name for gpu in facts.gpus)


def _in_order(gpus: Iterable[str]) -> Texts:
    """Names of GPUs, numbers in the order of numbers."""
    return tuple(sorted(gpus, key=lambda name: (len(name), name)))


def host_problems(facts: HostFacts, gpus: int = 0) -> list[str]:
    """List the reasons for which a host, where Ray reserved ``gpus`` GPUs, cannot serve this run; each a sentence."""
    problems = []
    if facts.problem:
        problems.append(f"{facts.name}: {facts.problem}")
    if len(facts.gpus) < gpus:
        problems.append(
            f"{facts.name} shows {len(facts.gpus)} of the {gpus} GPUs that Ray gave: look at nvidia-smi there"
        )
    if not facts.sees_run:
        problems.append(
            f"{facts.name} does not see this run's directory: set run.directory to one that all hosts share"
        )
    own_packages = packages_here()
    for name in own_packages | facts.packages:
        version = facts.packages.get(name, "(none)")
        own_version = own_packages.get(name, "(none)")
        if version != own_version:
            problems.append(
                f"{facts.name} has {name} {version}, this host has {own_version}: install the same on all hosts"
            )
    return problems


def assignment_lines(recipe: Recipe, offers: Sequence[HostOffer]) -> list[str]:
    """One line a host, with the processes that it would get. Raises ``RecipeError`` with the arithmetic where there is
    no room."""
    places = assign(recipe, _rooms(offers), gpu_need(recipe, installed_device()))
    lines = []
    for offer in offers:
        names = [name for name, place in places.items() if place.host == offer.name]
        if offer.is_run_host:
            names.insert(0, "controller")
        lines.append(host_line(offer.name, offer.address, names or ["a spare"]))
    return lines


def host_line(name: str, address: str, processes: Iterable[str]) -> str:
    """A line for people: a host and its processes."""
    return f"  {name:<16} {address:<16} {', '.join(processes)}"


def _rooms(offers: Sequence[HostOffer]) -> list[HostRoom]:
    """Rooms of hosts before their daemons name the GPUs: GPUs have numbers as names."""
    return [
        HostRoom(name=offer.name, address=offer.address, gpus=tuple(map(str, range(offer.gpus)))) for offer in offers
    ]


def _gpus_on(host: str, places: Mapping[str, ProcessPlace]) -> int:
    """Number of the GPUs that ``places`` need on ``host``."""
    return len({gpu for place in places.values() if place.host == host for gpu in place.gpus})


def _next_epoch(run_directory: Path) -> int:
    """Number this start of the run's daemons or processes: daemons and processes of an earlier start are refused."""
    file = run_directory / EPOCH_FILE
    epoch = int(file.read_text() or 0) + 1 if file.is_file() else 1
    write_durable(file, str(epoch).encode())
    return epoch

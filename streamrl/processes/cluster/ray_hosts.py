"""The hosts of a Ray cluster. Ray lists hosts, reserves GPUs and starts a daemon on each host; streams and weights do
not pass through Ray.

``opened`` connects to Ray in the process of the command (``ray_hosts``); ``RayDaemon`` runs on each host, in a worker
of Ray. Daemons belong to the process of the command: Ray ends them with it. ``runtime_env`` carries only variables:
code, model and data are on every host, or on a file system that all hosts see."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from logging import getLogger
from os import environ
from signal import SIGTERM
from types import ModuleType
from typing import Any

import anyio
from anyio import CancelScope, current_time, fail_after, move_on_after, to_thread
from msgspec import msgpack
from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.base.host_addresses import bare_host, wrong_port
from streamrl.base.run_process import redirected
from streamrl.base.types import JsonObject
from streamrl.processes.cluster.cluster_launcher import HostOffer
from streamrl.processes.cluster.daemon_messages import DaemonRequest, DaemonSetup, HostFacts
from streamrl.processes.cluster.host_daemon import HostDaemon
from streamrl.processes.cluster.remote_host import DaemonGone, DaemonLink
from streamrl.recipe.sections import Cluster, Transport, TransportSecurity

log = getLogger(__name__)

PROBE_S = 3.0
START_S = 60.0
"""How long the daemons of a run may take to start, on hosts that are alive."""
_NAMESPACE = "streamrl"


class RayDaemon:
    """The actor that Ray starts on a host. Its methods run in one thread, which starts all processes on this host."""

    def __init__(self, setup: bytes, name: str) -> None:
        self._setup = msgpack.decode(setup, type=DaemonSetup)
        self._name = name
        self._daemon: HostDaemon | None = None

    async def facts(self) -> bytes:
        """Encoded ``HostFacts``. The first call begins the lease."""
        if self._daemon is None:
            self._daemon = HostDaemon(self._setup, name=self._name)
        return msgpack.encode(self._daemon.facts())

    async def answer(self, request: bytes) -> bytes:
        """Encoded ``DaemonAnswer`` to an encoded ``DaemonRequest``."""
        assert self._daemon is not None
        return msgpack.encode(await self._daemon.answer(msgpack.decode(request, type=DaemonRequest)))

    async def close(self) -> None:
        """End all processes of the run on this host."""
        if self._daemon is not None:
            await self._daemon.close()


class RayLink(DaemonLink):
    """Calls of an actor. ``group``: placement group that holds the run's resources on the host."""

    def __init__(self, ray: ModuleType, actor: Any, group: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._group = group

    async def ask(self, request: bytes) -> bytes:
        """Answer of the daemon."""
        answer = await self._call(self._actor.answer.remote(request))
        assert isinstance(answer, bytes)
        return answer

    async def facts(self) -> HostFacts:
        """Facts of the host. Raises the errors of ``ask``."""
        return msgpack.decode(await self._call(self._actor.facts.remote()), type=HostFacts)

    async def release(self) -> None:
        """End the daemon with all processes below it."""
        with suppress(DaemonGone, OSError), move_on_after(10.0):
            await self._call(self._actor.close.remote())
        await to_thread.run_sync(self.give_back)

    def give_back(self) -> None:
        """Kill the daemon and remove its placement group. Idempotent. Blocks while Ray's head does not answer."""
        from ray.util.placement_group import remove_placement_group

        with suppress(self._ray.exceptions.RayError, RuntimeError, ValueError):  # the cluster may be gone
            self._ray.kill(self._actor)
            remove_placement_group(self._group)

    async def _call(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return await asyncio.wrap_future(reference.future())
        except errors.ActorUnavailableError as error:  # the actor lives, and may answer later
            raise OSError(_first_line(error)) from error
        except errors.RayError as error:
            raise DaemonGone(_first_line(error)) from error


class RayHosts:
    """Hosts of the cluster to which ``ray`` is connected. Made by ``ray_hosts``."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self._run_node: str = ray.get_runtime_context().get_node_id()

    async def offers(self) -> list[HostOffer]:
        """Return the hosts that are alive, the run's own first. The newest raylet of a host counts."""
        try:
            nodes: list[JsonObject] = await to_thread.run_sync(self._ray.nodes)
            free = await to_thread.run_sync(_free_gpus)
        except (self._ray.exceptions.RayError, RuntimeError, ValueError) as error:
            raise RecipeError(f"cluster: Ray's head does not answer now: {_first_line(error)}") from error
        alive = {node["NodeManagerAddress"]: node for node in nodes if node["Alive"]}
        offers = [
            HostOffer(
                name=node["NodeManagerHostname"],
                address=address,
                gpus=free.get(node["NodeID"], 0),
                is_run_host=node["NodeID"] == self._run_node,
            )
            for address, node in alive.items()
            if await _answers(address, node["NodeManagerPort"])
        ]
        return sorted(_with_unique_names(offers), key=lambda offer: (not offer.is_run_host, offer.name))

    async def start_daemons(
        self, gpus: Mapping[HostOffer, int], setup: Callable[[HostOffer], DaemonSetup]
    ) -> list[tuple[DaemonLink, HostFacts]]:
        """Start a daemon on each host of ``gpus``, with its number of GPUs; start all daemons or none."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # One group a host: the GPUs of a lost host can be freed while the other hosts keep theirs.
        bundles = []
        for offer, count in gpus.items():
            bundle = {f"node:{offer.address}": 0.001}
            if count:
                bundle["GPU"] = float(count)
            bundles.append(bundle)
        groups = await to_thread.run_sync(lambda: [placement_group([bundle]) for bundle in bundles])
        began_s = current_time()
        are_ready = [await to_thread.run_sync(partial(group.wait, _remaining_start_s(began_s))) for group in groups]
        if not all(are_ready):
            await to_thread.run_sync(lambda: [remove_placement_group(group) for group in groups])
            requested = ", ".join(f"{offer.name}: {count} GPUs" for offer, count in gpus.items())
            raise RecipeError(
                f"Ray did not give this run its hosts within {START_S:g} s ({requested}): see `ray status`"
            )
        variables = {}
        if python_path := environ.get("PYTHONPATH"):
            variables["PYTHONPATH"] = python_path
        Actor = self._ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=100)(RayDaemon)
        links = [
            RayLink(
                self._ray,
                Actor.options(
                    num_gpus=count,
                    # A daemon without GPUs, and all processes below it, see none: Ray would let it see all of the host.
                    runtime_env={"env_vars": variables if count else variables | {"CUDA_VISIBLE_DEVICES": ""}},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group),
                ).remote(msgpack.encode(setup(offer)), offer.name),
                group,
            )
            for group, (offer, count) in zip(groups, gpus.items(), strict=True)
        ]
        try:
            with fail_after(START_S):
                facts = [await link.facts() for link in links]
        except (DaemonGone, OSError) as error:
            for link in links:
                await to_thread.run_sync(link.give_back)
            raise RecipeError(f"a daemon could not be started: {str(error) or 'it took too long'}") from error
        return list(zip(links, facts, strict=True))


@asynccontextmanager
async def ray_hosts(cluster: Cluster, transport: Transport) -> AsyncIterator[RayHosts]:
    """Connect to the cluster of a recipe. Raises ``RecipeError`` where Ray is not installed, no head answers, its
    version of Ray or Python is another, or it admits everybody who reaches its ports."""
    # Before Ray is imported: with a wrong token Ray would try for 20 s.
    environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    try:
        import ray
    except ImportError:
        raise RecipeError(
            'cluster.kind = "ray": Ray is not installed: `pip install "streamrl[ray]"` on every host'
        ) from None
    host, _, port = cluster.address.rpartition(":")
    if cluster.address != "auto" and (not host or wrong_port(port)):
        raise RecipeError(f'cluster.address = "{cluster.address}": write HOST:PORT of Ray\'s head, or "auto"')
    if host and not await _answers(bare_host(host), int(port)):
        raise RecipeError(
            f"cluster.address = {cluster.address}: nobody answers there within {PROBE_S:g} s: start Ray "
            "(`ray start --head --port PORT`), or name the address of its head"
        )
    if environ.get("RAY_AUTH_MODE") != "token" and transport.security is not TransportSecurity.NONE:
        raise RecipeError(
            "cluster: Ray runs code of everybody who reaches its ports: start it with RAY_AUTH_MODE=token and "
            'RAY_AUTH_TOKEN_PATH, on all hosts and here; or allow it by transport.advanced.security = "none"'
        )
    getLogger("ray").setLevel(logging.CRITICAL)
    connect = partial(ray.init, address=cluster.address, namespace=_NAMESPACE, log_to_driver=False)
    ray_messages = ""
    try:
        with tempfile.TemporaryFile() as stderr_file:
            try:
                with redirected(2, stderr_file.fileno()):  # Ray's own code repeats its errors many times
                    # In a thread, where Ray does not install a handler of SIGTERM.
                    await to_thread.run_sync(partial(connect, configure_logging=False))
                    _restore_signals()
            finally:
                stderr_file.seek(0)
                ray_messages = stderr_file.read().decode(errors="replace")
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        reason = _first_line(error)
        if "InvalidAuthToken" in ray_messages:
            reason = (
                "the cluster does not take the token of RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN): give it this one's"
            )
        raise RecipeError(f"cluster.address = {cluster.address}: {reason}") from error
    hosts = RayHosts(ray)
    try:
        yield hosts
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(ray.shutdown)
            _restore_signals()


def _restore_signals() -> None:
    """Install Python's handler of SIGTERM again. Ray's own code replaces it at a connection and sets it to the default
    at the end of a connection: then SIGTERM would end this process, in place of a drain."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGTERM, signal.getsignal(SIGTERM))


def _remaining_start_s(began_s: float) -> float:
    return max(START_S - (current_time() - began_s), 0.1)


def _free_gpus() -> dict[str, int]:
    from ray._private.state import available_resources_per_node

    return {node: int(resources.get("GPU", 0)) for node, resources in available_resources_per_node().items()}


async def _answers(host: str, port: int) -> bool:
    """Return whether a server accepts a connection within ``PROBE_S``: Ray itself would try for minutes."""
    with suppress(OSError), move_on_after(PROBE_S):
        stream = await anyio.connect_tcp(host, port)
        await stream.aclose()
        return True
    return False


def _with_unique_names(offers: list[HostOffer]) -> list[HostOffer]:
    """Append the address to each name that several hosts have."""
    names = [offer.name for offer in offers]
    return [
        replace(offer, name=f"{offer.name}-{offer.address}") if names.count(offer.name) > 1 else offer
        for offer in offers
    ]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first_line = next(iter(lines), "")
    return f"{type(error).__name__}: {first_line}"

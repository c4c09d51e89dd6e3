"""Rules of ``[transport]`` and ``[cluster]``: sockets that other hosts reach need keys, unless the recipe turns
security off. The command and the controller warn about a run without keys, and publish it as a metric."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_network
from urllib.parse import parse_qsl

from streamrl.base.host_addresses import host_of, is_loopback, is_public, is_wildcard
from streamrl.base.types import Metrics
from streamrl.recipe.rules.rule import Broken, Problem, rule
from streamrl.recipe.sections import ClusterKind, Recipe, TransportKind, TransportSecurity
from streamrl.recipe.topology import port_range

_REMEDY = (
    "make keys with `streamrl keys DIRECTORY` and set transport.keys to it, set {field} to a loopback address, "
    'or (every host that reaches it then can change the run) transport.security = "none"'
)


@rule("cluster")
def cluster_starts_processes(recipe: Recipe) -> Broken:
    """On a cluster the run itself starts its engines and ranks, with enough hosts, and valid ports and networks."""
    cluster = recipe.cluster
    try:
        port_range(cluster.ports)
    except ValueError:
        yield Problem("cluster.ports", f'"{cluster.ports}" is no range of ports: write FIRST-LAST, such as "5700-5899"')
    if "/" in cluster.interface:
        try:
            ip_network(cluster.interface)
        except ValueError as error:
            yield Problem("cluster.interface", f'"{cluster.interface}" is no network ({error}): write 10.1.0.0/16')
    if cluster.kind is ClusterKind.LOCAL:
        return
    fewest_hosts = max(cluster.trainer_hosts, cluster.engine_hosts)
    if cluster.trainer_hosts > recipe.training.ranks:
        text = f"{cluster.trainer_hosts} hosts for {recipe.training.ranks} ranks: set so many or fewer"
        yield Problem("cluster.trainer_hosts", text)
    if cluster.engine_hosts > recipe.engines.count:
        text = f"{cluster.engine_hosts} hosts for {recipe.engines.count} engines: set so many or fewer"
        yield Problem("cluster.engine_hosts", text)
    if 0 < cluster.hosts < fewest_hosts:
        text = f"{cluster.hosts}, and {fewest_hosts} are asked for beside it: set {fewest_hosts} or more"
        yield Problem("cluster.hosts", text)


@rule("transport")
def hosts_are_named(recipe: Recipe) -> Broken:
    """A bound host must be an address to which the others can connect, and private: trainer ranks do not authenticate
    each other."""
    for field, host in _bound(recipe):
        if is_wildcard(host):
            yield Problem(
                field,
                f'"{host}" is every interface: name the address of one private interface, to which the others connect',
            )
        elif is_public(host) and recipe.transport.security is not TransportSecurity.NONE:
            yield Problem(
                field,
                f'"{host}" is a public address, and trainer ranks (gloo, NCCL) do not authenticate each other: '
                "name a private interface, or a tunnel between the hosts",
            )


def _bound(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (field, address) of each host that processes of the run bind."""
    if recipe.transport.kind is TransportKind.TCP:
        yield "transport.host", recipe.transport.host


@rule("transport", "metrics.endpoint")
def nothing_leaves_without_keys(recipe: Recipe) -> Broken:
    """Sockets that other hosts reach need keys, or ``transport.security = "none"``."""
    transport = recipe.transport
    if transport.security is TransportSecurity.NONE:
        if transport.keys:
            yield Problem(
                "transport.keys",
                f'"{transport.keys}" has no effect with transport.security = "none": remove one of the two',
            )
        return
    if transport.keys:
        return
    for field, address in open_to_others(recipe):
        yield Problem(field, f'"{address}" can be reached from other hosts: {_REMEDY.format(field=field)}')


def open_to_others(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (field, value) of every address in the recipe that other hosts reach."""
    endpoint = recipe.metrics.endpoint
    for field, host in _bound(recipe):
        if not is_loopback(host) and not is_wildcard(host):
            yield field, host
    if re.fullmatch(r"tcp://[^:]+:\d+", endpoint) and not is_loopback(host_of(endpoint)):
        yield "metrics.endpoint", endpoint


def transport_metrics(recipe: Recipe) -> Metrics:
    """Return the metrics of the transport, the same for every step."""
    return {"health/insecure_transport": float(bool(insecure_notice(recipe)))}


def insecure_notice(recipe: Recipe) -> str:
    """Return a line for each way in which sockets are open to other hosts without keys; empty: there is none."""
    notices = []
    addresses = ", ".join(f"{field} = {value}" for field, value in open_to_others(recipe))
    if addresses and recipe.transport.security is TransportSecurity.NONE:
        notices.append(
            f"INSECURE: {addresses} without keys: every host that reaches it reads the run and changes its weights "
            '(transport.advanced.security = "none"); `streamrl keys DIRECTORY` makes keys'
        )
    environment = recipe.environment
    if environment.has_agent and not is_loopback(environment.agent_host):
        notices.append(
            f"INSECURE: environment.advanced.agent_host = {environment.agent_host}: agents send keys and chats to it "
            "without encryption, and every host on the way may read them and ask the model"
        )
    for tracker in recipe.metrics.report_to:
        name, _, options = tracker.partition("?")
        address = dict(parse_qsl(options)).get("address", "127.0.0.1")
        if name == "prometheus" and not is_loopback(address):
            notices.append(
                f"INSECURE: metrics.report_to = {tracker}: every host that reaches it reads the metrics of the run; "
                "without address only this host does"
            )
    return "\n".join(notices)

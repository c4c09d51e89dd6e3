"""Rules about who may reach the sockets of a run: nothing leaves this host without keys, unless the recipe says so."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network

from streamrl.base.hosts import host_of, is_loopback, is_public, is_wildcard
from streamrl.recipe.rules.rule import Broken, Problem, rule
from streamrl.recipe.sections import ClusterKind, LaunchedBy, Recipe, TransportKind, TransportSecurity
from streamrl.recipe.topology import port_range

_REMEDY = (
    "make keys with `streamrl keys DIRECTORY` and set transport.keys to it, set {field} to a loopback address, "
    'or (every host that reaches it then can change the run) transport.security = "none"'
)


@rule("transport")
def external_needs_tcp(recipe: Recipe) -> Broken:
    """A process that a person starts must be able to reach the run."""
    if recipe.transport.kind is TransportKind.TCP:
        return
    for name in ("engines", "training"):
        if getattr(recipe.transport, name) is LaunchedBy.EXTERNAL:
            yield Problem(
                f"transport.{name}",
                '"external" needs endpoints that another process can reach: set transport.kind = "tcp"',
            )


@rule("transport", "training.ranks")
def hosts_of_ranks(recipe: Recipe) -> Broken:
    """Hosts of trainer ranks are for ranks that a person starts, equally many on each host."""
    hosts = recipe.transport.training_hosts
    if hosts and recipe.transport.training is not LaunchedBy.EXTERNAL:
        text = (
            f'{len(hosts)} hosts, but this run starts the ranks here: set transport.training = "external" or no hosts'
        )
        yield Problem("transport.training_hosts", text)
    elif hosts and recipe.training.ranks % len(hosts):
        text = f"{len(hosts)} hosts for {recipe.training.ranks} ranks: name so many that each has equally many ranks"
        yield Problem("transport.training_hosts", text)


@rule("cluster", "transport")
def cluster_starts_processes(recipe: Recipe) -> Broken:
    """On a cluster the run starts its engines and ranks, at addresses that it chooses."""
    cluster = recipe.cluster
    transport = recipe.transport
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
    for name in ("engines", "training"):
        if getattr(transport, name) is LaunchedBy.EXTERNAL:
            yield Problem(f"transport.{name}", f'"external" does not fit cluster.kind = "{cluster.kind}": leave it out')
    wanted = max(cluster.trainer_hosts, cluster.engine_hosts)
    if cluster.trainer_hosts > recipe.training.ranks:
        text = f"{cluster.trainer_hosts} hosts for {recipe.training.ranks} ranks: set so many or fewer"
        yield Problem("cluster.trainer_hosts", text)
    if cluster.engine_hosts > recipe.engines.count:
        text = f"{cluster.engine_hosts} hosts for {recipe.engines.count} engines: set so many or fewer"
        yield Problem("cluster.engine_hosts", text)
    if 0 < cluster.hosts < wanted:
        yield Problem("cluster.hosts", f"{cluster.hosts}, and {wanted} are asked for beside it: set {wanted} or more")


@rule("transport")
def hosts_are_named(recipe: Recipe) -> Broken:
    """Peers connect to the host that is bound; trainer ranks meet there without any authentication."""
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
    """(field, address) of each host that processes of this run bind."""
    if recipe.transport.kind is TransportKind.TCP:
        yield "transport.host", recipe.transport.host
        yield from (("transport.training_hosts", host) for host in recipe.transport.training_hosts)


@rule("transport", "metrics.endpoint")
def nothing_leaves_without_keys(recipe: Recipe) -> Broken:
    """Sockets that other hosts reach are authenticated and encrypted, or said not to be."""
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
    for field, reached in open_to_others(recipe):
        yield Problem(field, f'"{reached}" can be reached from other hosts: {_REMEDY.format(field=field)}')


def open_to_others(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(field, value) of every address in the recipe that is not for this host alone."""
    endpoint = recipe.metrics.endpoint
    yield from (one for one in _bound(recipe) if not is_loopback(one[1]) and not is_wildcard(one[1]))
    if endpoint.startswith("tcp://") and not is_loopback(host_of(endpoint)):
        yield "metrics.endpoint", endpoint


def transport_metrics(recipe: Recipe) -> dict[str, float]:
    """Metrics of the transport, of every step."""
    return {"health/insecure_transport": float(bool(insecure_notice(recipe)))}


def insecure_notice(recipe: Recipe) -> str:
    """Return the warning of a run whose sockets are open to other hosts without keys; empty: they are not."""
    if recipe.transport.security is not TransportSecurity.NONE:
        return ""
    reached = ", ".join(f"{field} = {value}" for field, value in open_to_others(recipe))
    return (
        reached
        and f"INSECURE: {reached} without keys: every host that reaches it reads the run and changes its weights "
        '(transport.advanced.security = "none"); `streamrl keys DIRECTORY` makes keys'
    )

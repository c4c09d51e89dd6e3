"""S2, S14: what a recipe may open to other hosts, as a matrix; and what is said of a run that is open to all."""

from __future__ import annotations

import pytest
from builders.recipe import small_recipe

from streamrl.base.host_addresses import host_of, is_loopback, is_public, is_wildcard
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.rules.transport_rules import insecure_notice, transport_metrics
from streamrl.recipe.sections import Metrics, Recipe, Transport, TransportKind, TransportSecurity

CURVE, NONE = TransportSecurity.CURVE, TransportSecurity.NONE


def recipe(host: str = "127.0.0.1", metrics: str = "", **transport: object) -> Recipe:
    kind = transport.pop("kind", TransportKind.TCP)
    made = Transport(kind=kind, host=host, **transport)  # type: ignore[arg-type]
    return small_recipe(transport=made, metrics=Metrics(endpoint=metrics))


def refused(given: Recipe) -> set[str]:
    return {path for path, _ in broken_rules(given) if path.startswith(("transport", "metrics"))}


@pytest.mark.parametrize(
    ("host", "keys", "security", "fields"),
    [
        ("127.0.0.1", "", CURVE, set()),
        ("localhost", "", CURVE, set()),
        ("127.9.9.9", "", CURVE, set()),
        ("10.0.0.1", "", CURVE, {"transport.host"}),
        ("10.0.0.1", "/keys", CURVE, set()),
        ("10.0.0.1", "", NONE, set()),
        ("10.0.0.1", "/keys", NONE, {"transport.keys"}),
        ("node-7", "", CURVE, {"transport.host"}),
        ("node-7", "/keys", CURVE, set()),
        ("0.0.0.0", "/keys", CURVE, {"transport.host"}),
        ("*", "", NONE, {"transport.host"}),
        ("8.8.8.8", "/keys", CURVE, {"transport.host"}),
        ("8.8.8.8", "", NONE, set()),
        ("localhost.attacker.example", "", CURVE, {"transport.host"}),
    ],
)
def test_streams_that_leave_the_host_need_keys(
    host: str, keys: str, security: TransportSecurity, fields: set[str]
) -> None:
    assert refused(recipe(host, keys=keys, security=security)) == fields
    # Over ipc there is no host.
    assert refused(recipe(host, kind=TransportKind.IPC, keys="")) == set()


@pytest.mark.parametrize(
    ("endpoint", "keys", "security", "open_to_others"),
    [
        ("ipc:///tmp/m", "", CURVE, False),
        ("tcp://127.0.0.1:5690", "", CURVE, False),
        ("tcp://0.0.0.0:5690", "", CURVE, True),
        ("tcp://*:5690", "", CURVE, True),
        ("tcp://10.0.0.1:5690", "", CURVE, True),
        ("tcp://0.0.0.0:5690", "/keys", CURVE, False),
        ("tcp://0.0.0.0:5690", "", NONE, False),
    ],
)
def test_metrics_that_leave_the_host_need_keys(
    endpoint: str, keys: str, security: TransportSecurity, open_to_others: bool
) -> None:
    given = recipe(metrics=endpoint, kind=TransportKind.IPC, keys=keys, security=security)
    assert refused(given) == ({"metrics.endpoint"} if open_to_others else set())


def test_the_remedy_is_in_the_message() -> None:
    ((_, text),) = [found for found in broken_rules(recipe("10.0.0.1")) if found[0] == "transport.host"]
    assert "streamrl keys DIRECTORY" in text and 'transport.advanced.security = "none"' in text


def test_an_open_run_says_so_at_each_start_and_in_its_metrics() -> None:
    open_run = recipe("10.0.0.1", "tcp://0.0.0.0:5690", security=NONE)
    notice = insecure_notice(open_run)
    assert notice.startswith("INSECURE: transport.host = 10.0.0.1, metrics.endpoint = tcp://0.0.0.0:5690 without keys")
    assert transport_metrics(open_run) == {"health/insecure_transport": 1.0}
    for closed in (recipe(), recipe(security=NONE), recipe("10.0.0.1", keys="/keys")):
        assert insecure_notice(closed) == "" and transport_metrics(closed) == {"health/insecure_transport": 0.0}


@pytest.mark.parametrize(
    ("tracker", "is_open"),
    [("prometheus", False), ("prometheus?address=0.0.0.0", True), ("prometheus?port=9500&address=127.0.0.1", False)],
)
def test_metrics_that_other_hosts_may_scrape_are_said_to_be_open(tracker: str, is_open: bool) -> None:
    run = small_recipe(metrics=Metrics(report_to=(tracker,)))
    assert (f"INSECURE: metrics.report_to = {tracker}" in insecure_notice(run)) == is_open


def test_hosts() -> None:
    assert [is_loopback(h) for h in ("::1", "[::1]", "127.0.0.1", "localhost")] == [True] * 4
    assert [is_loopback(h) for h in ("", "*", "0.0.0.0", "::", "127.0.0.1.nip.io", "::ffff:10.0.0.1")] == [False] * 6
    assert is_wildcard("[::]") and is_public("8.8.8.8") and not is_public("10.0.0.1") and not is_public("node")
    assert host_of("tcp://10.0.0.5:0;127.0.0.1:5555") == "127.0.0.1" and host_of("ipc://127.0.0.1:1") == ""

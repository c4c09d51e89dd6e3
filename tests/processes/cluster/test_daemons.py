"""Daemons, their leases, and the launcher over them: real daemons with real processes, hosts of one machine."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
from builders.processes import lives, until
from forks.starts import own_children

from streamrl.base.errors import InputError, RecipeError
from streamrl.base.run_events import StartEngine, StopEngine
from streamrl.engines.vllm.visible_gpus import Gpu
from streamrl.processes.cluster import cluster_launcher as launcher_module
from streamrl.processes.cluster import failed_joins, host_daemon, remote_host
from streamrl.processes.cluster.cluster_launcher import ClusterLauncher, cluster_launcher
from streamrl.processes.cluster.daemon_messages import (
    DaemonOrder,
    DaemonRequest,
    DaemonSetup,
    EndAll,
    EndLeftBehind,
    HostFacts,
    SignalProcess,
    StartProcess,
)
from streamrl.processes.cluster.host_assignment import GpuNeed
from streamrl.processes.cluster.host_daemon import HostDaemon
from streamrl.processes.cluster.this_host import free_ports
from streamrl.processes.engine_orders import EngineOrders
from streamrl.processes.exit_reason import read_reason
from streamrl.processes.local_launcher import LocalLauncher
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import ProcessPlace, ProcessPlan, Role, plan_topology, read_topology
from tests.processes.cluster.loopback_hosts import STAND_IN, LoopbackHosts, PipeLink

ENGINE = ProcessPlan(role=Role.ENGINE, index=0)
LEASE_S = 3.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory of a run of stand-ins that serve."""
    directory = tmp_path / "run"
    for folder in ("behaviour", "pids", "temporary", "logs", "exit"):
        (directory / folder).mkdir(parents=True)
    for name in ("controller", "reward-0", "engine-0", "engine-1", "trainer-0"):
        (directory / "behaviour" / name).write_text("serve")
    (directory / "recipe.toml").write_text("")
    return directory


def setup_of(run: Path, **changes: object) -> DaemonSetup:
    setup = DaemonSetup(
        run_directory=str(run),
        digest=hashlib.sha256(b"").hexdigest(),
        epoch=1,
        lease_s=60,
        ports="5700-5899",
        port_count=3,
        interface="",
        address="127.0.0.1",
        variables={},
    )
    return msgspec.structs.replace(setup, **changes)


@contextlib.asynccontextmanager
async def daemon_of(setup: DaemonSetup) -> AsyncIterator[HostDaemon]:
    daemon = HostDaemon(setup, name="h1", entry=(str(STAND_IN),))
    try:
        yield daemon
    finally:
        await daemon.close()


def asked(first: int, *orders: DaemonOrder, epoch: int = 1) -> DaemonRequest:
    return DaemonRequest(epoch=epoch, first=first, orders=orders)


async def test_a_repeated_request_repeats_nothing(run: Path) -> None:
    async with daemon_of(setup_of(run)) as daemon:
        start = StartProcess(1, ENGINE, False)
        pids = {(await daemon.answer(asked(0, start))).processes[1].pid for _ in range(3)}
        await until((run / "pids" / "engine-0.0").exists)
        answer = await daemon.answer(asked(0, start, SignalProcess(1, signal.SIGKILL)))
        assert answer.orders_done == 2
        while answer.processes[1].exit_code is None:
            answer = await daemon.answer(asked(1, SignalProcess(1, signal.SIGKILL)))
        assert (len(pids), answer.orders_done, answer.processes[1].exit_code) == (1, 2, -signal.SIGKILL)
        assert [path.name for path in (run / "pids").glob("engine-0.*")] == ["engine-0.0"]


@pytest.mark.started
async def test_a_lease_that_is_killed_is_replaced(run: Path) -> None:
    def leases() -> list[psutil.Process]:
        found = [one for one in own_children() if lives(one.pid)]
        return [one for one in found if "streamrl.processes.cluster.lease" in one.cmdline()]

    async with daemon_of(setup_of(run)) as daemon:
        await daemon.answer(asked(0))
        (killed,) = leases()
        killed.kill()
        await until(lambda: not lives(killed.pid))
        await daemon.answer(asked(0))
        assert [one.pid for one in leases()] not in ([], [killed.pid])


async def test_an_order_of_another_start_of_the_run_is_refused(run: Path) -> None:
    async with daemon_of(setup_of(run)) as daemon:
        answer = await daemon.answer(asked(0, StartProcess(1, ENGINE, False), epoch=2))
        assert answer.refusal == "this daemon is of start 1 of the run, the order of 2"
        assert not answer.processes


async def test_exit_reasons_and_failed_starts_are_reported(run: Path) -> None:
    """The reason of an exit is reported to the supervisor, and so is a failure to start."""
    (run / "behaviour" / "engine-0").write_text("raise")
    (run / "go").touch()
    async with daemon_of(setup_of(run)) as daemon:
        await daemon.answer(asked(0, StartProcess(1, ENGINE, False)))
        with anyio.fail_after(300):
            while (state := (await daemon.answer(asked(1))).processes[1]).exit_code is None:
                await anyio.sleep(0.05)
        reason = remote_host.read_exit_reason(state.reason)
        assert (state.exit_code, reason and reason.message) == (1, "ValueError: the loss is not finite")
        assert 0 <= state.reason_age_s < 60
        (run / "logs").rename(run / "no logs")
        state = (await daemon.answer(asked(1, StartProcess(2, ENGINE, False)))).processes[2]
        assert state.exit_code == 1 and "engine-0.log" in state.failure
        (run / "exit" / "engine-0.json").unlink()
        (run / "exit" / "engine-0.json").mkdir()  # as a file system that fails now
        assert (await daemon.answer(asked(2))).processes[1].reason  # it was read once
        assert read_reason(run, "engine-0") is None


async def test_what_a_process_left_is_ended(run: Path) -> None:
    (run / "behaviour" / "engine-0").write_text("orphan")
    async with daemon_of(setup_of(run)) as daemon:
        await daemon.answer(asked(0, StartProcess(1, ENGINE, False)))
        await until((run / "pids" / "engine-0.0").exists)
        pids = [int(path.read_text()) for path in (run / "pids").glob("grandchild-?")]
        assert len(pids) == 2 and all(map(lives, pids))
        answer = await daemon.answer(asked(1, SignalProcess(1, signal.SIGKILL), EndLeftBehind(1)))
        assert not any(map(lives, pids)) and not answer.survivors
        assert (await daemon.answer(asked(3, EndAll()))).orders_done == 4


async def test_an_engine_outlives_the_threads_of_an_idle_pool(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies with the thread that started it, and a pool ends its idle threads."""
    pool: list[int] = []

    def works(seconds: float) -> None:
        pool.append(threading.get_native_id())
        time.sleep(seconds)

    async with daemon_of(setup_of(run)) as daemon:
        pid = (await daemon.answer(asked(0, StartProcess(1, ENGINE, False)))).processes[1].pid
        await until((run / "pids" / "engine-0.0").exists)
        async with anyio.create_task_group() as tasks:
            for seconds in (0.0, 0.3, 0.6):  # each in a thread of its own, of which the last one is taken next
                tasks.start_soon(anyio.to_thread.run_sync, works, seconds)
                await anyio.sleep(0.1)
        monkeypatch.setattr("anyio._backends._asyncio.WorkerThread.MAX_IDLE_TIME", 0)
        await anyio.to_thread.run_sync(works, 0.0)
        with anyio.fail_after(60):
            await until(lambda: sum(Path(f"/proc/self/task/{one}").exists() for one in set(pool)) <= 1)
        await anyio.sleep(0.2)
        assert lives(pid)
        await daemon.answer(asked(1, EndAll()))


async def test_facts_of_a_host(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        daemon_of(setup_of(run)) as daemon,
        daemon_of(setup_of(run, digest="another", interface="10.254.0.0/16")) as b,
    ):
        facts, other = daemon.facts(), b.facts()
        assert facts.sees_run and not facts.problem and len(facts.ports) == 3 and facts.memory_monitor
        assert not other.sees_run and "cluster.advanced.interface = 10.254.0.0/16" in other.problem
        assert len(launcher_module.host_problems(other)) == 2
        assert launcher_module.host_problems(facts) == []
        older = msgspec.structs.replace(facts, packages=facts.packages | {"torch": "1.0"})
        assert "h1 has torch 1.0, this host has" in launcher_module.host_problems(older)[0]

        def lost() -> None:
            raise InputError("GPU 3: its driver answers 'GPU is lost'")

        monkeypatch.setattr(host_daemon, "visible_gpus", lost)
        assert any("GPU 3: its driver" in problem for problem in launcher_module.host_problems(daemon.facts()))


def test_a_port_is_given_to_one_run_only() -> None:
    taken, locks = free_ports("127.0.0.1", range(5750, 5760), 4)
    others, more = free_ports("127.0.0.1", range(5750, 5760), 4)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", others[0]))
        for lock in more:
            lock.close()
        again, last = free_ports("127.0.0.1", range(5750, 5760), 9)
    assert len(taken) == 4 and not set(taken) & {*others, *again} and others[0] not in again
    for lock in [*locks, *last]:
        lock.close()


# ---- the launcher ------------------------------------------------------------------------------------


def recipe(run: Path, **changes: object) -> Recipe:
    return load_recipe(
        {
            "model": {"path": "m"},
            "prompts": {"train": "p.jsonl"},
            "rewards": [{"function": "exact_match"}],
            "run": {"directory": str(run.parent)},
            "engines": {"count": 2},
            "cluster": {"kind": "ray", "advanced": {"lease_s": LEASE_S, **changes}},
        }
    )


@contextlib.asynccontextmanager
async def running(run: Path, hosts: LoopbackHosts, one: Recipe) -> AsyncIterator[tuple[Supervisor, ClusterLauncher]]:
    """A supervised run of stand-ins, all of which have started."""
    sockets = run.parent / "streamrl-sockets"
    sockets.mkdir()
    local = LocalLauncher((sys.executable, str(STAND_IN)), run, sockets)
    async with cluster_launcher(one, run, sockets, hosts, local, lambda *_: None) as launcher:
        supervisor = Supervisor(plan_topology(one, sockets), run, sockets, launcher=launcher)
        launcher.on_join = EngineOrders(supervisor).start_retired
        async with supervisor:
            with anyio.fail_after(300):
                await until(lambda: len(list((run / "pids").glob("*.0"))) == len(supervisor.topology.processes))
            yield supervisor, launcher


def pid_of(run: Path, name: str, start: int = 0) -> int:
    return int((run / "pids" / f"{name}.{start}").read_text())


async def test_processes_run_on_their_hosts_and_end_with_the_run(run: Path) -> None:
    hosts = LoopbackHosts(run.parent, ["h0", "h1", "h2", "h3"])
    async with running(run, hosts, recipe(run, engine_hosts=2)) as (supervisor, _):
        topology = read_topology(run)
        placed = {plan.name: plan.host for plan in topology.processes}
        assert placed == {"controller": "", "reward-0": "", "engine-0": "h1", "engine-1": "h2", "trainer-0": "h0"}
        assert hosts.started == ["h0", "h1", "h2"]  # h3 is a spare
        assert topology.endpoint("trainer-0", "weights").startswith("tcp://127.0.0.10:")
        assert topology.endpoint("engine-1", "orders").startswith("tcp://127.0.0.10:")  # the controller's
        assert topology.endpoint("engine-1", "weights").startswith("tcp://127.0.0.12:")
        daemons = [link.process.pid for link in hosts.links.values()]
        assert psutil.Process(pid_of(run, "engine-1")).ppid() == hosts.links["h2"].process.pid
        supervisor.request_drain()
        with anyio.fail_after(300):
            await supervisor.watch()
    pids = [int(path.read_text()) for path in (run / "pids").iterdir()]
    with anyio.fail_after(60):
        await until(lambda: not any(map(lives, [*pids, *daemons])))


@pytest.mark.long
@pytest.mark.parametrize("end", ["daemon", "stop", "cut"])
async def test_an_engine_of_a_lost_host_is_started_on_one_that_joins(
    run: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = LoopbackHosts(run.parent, ["h0", "h1"], blind=["h2"])
    one = recipe(run)
    async with running(run, hosts, one) as (supervisor, launcher), anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        before, daemon, began_s = pid_of(run, "engine-0"), hosts.links["h1"].process, time.monotonic()
        hosts.names = ["h0"]  # else it joins again by itself, where the launcher looks for hosts in time
        if end == "daemon":
            daemon.kill()
        elif end == "stop":
            hosts.links["h1"].stop()
        else:
            hosts.links["h1"].cut = True
        with anyio.fail_after(300):
            await until(lambda: not lives(before) and not lives(daemon.pid))
            ended_s = time.monotonic() - began_s
            await until(lambda: len(supervisor.retired) == 2)
            assert "no other host has room for engine-0" in caplog.text
            hosts.names = ["h0", "h2", "h3"]  # the first of which cannot serve
            for _ in range(2):  # as the watch and a placement that waits do
                tasks.start_soon(launcher._look)
            await until((run / "pids" / "engine-0.1").exists)
            await until((run / "pids" / "engine-1.1").exists)
        # Whatever the run knows: the host ends its processes by itself when its lease is over.
        assert ended_s < (2 if end == "daemon" else LEASE_S + 5), ended_s
        assert psutil.Process(pid_of(run, "engine-0", 1)).ppid() == hosts.links["h3"].process.pid
        placed = {plan.name: plan.host for plan in read_topology(run).processes if plan.role is Role.ENGINE}
        assert set(placed.values()) == {"h3"}
        assert hosts.started.count("h3") == 1
        supervisor.request_drain()
    assert "h3 joined in place of h1" in caplog.text


async def test_engines_of_a_host_are_where_its_new_daemon_says(run: Path) -> None:
    """A host that is back at another address (a pod): nothing names the earlier one, which is a stranger's by now."""
    hosts = LoopbackHosts(run.parent, ["h0", "h1"])
    async with running(run, hosts, recipe(run)) as (supervisor, _), anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        assert "127.0.0.11" in (run / "topology.json").read_text()
        hosts.addresses["h1"] = "127.0.0.99"
        hosts.links["h1"].process.kill()
        with anyio.fail_after(60):
            await until((run / "pids" / "engine-0.1").exists)
        topology = read_topology(run)
        addresses = {plan.address for plan in topology.processes if plan.role is Role.ENGINE}
        assert addresses == {"127.0.0.99"} and "127.0.0.11:" not in str(topology.endpoints)
        assert topology.endpoint("engine-0", "weights").startswith("tcp://127.0.0.99:")
        supervisor.request_drain()


def test_engines_of_a_host_have_the_gpus_of_its_new_daemon(run: Path) -> None:
    local, need = LocalLauncher((), run, run.parent), GpuNeed(engine=1, rank=0)
    launcher = ClusterLauncher(recipe(run), run, run.parent, LoopbackHosts(run, []), local, need, lambda *_: None)

    def host_with(*gpus: str) -> remote_host.RemoteHost:
        shown = tuple(Gpu(name, 0) for name in gpus)
        facts = HostFacts(name="h1", address="a", sees_run=True, packages={}, gpus=shown, ports=(), nice=0)
        return remote_host.RemoteHost(facts, PipeLink(None), run, epoch=1, lease_s=1.0)  # type: ignore[arg-type]

    launcher._places = {
        f"engine-{one}": ProcessPlace(host="h1", address="b", gpus=(gpu,)) for one, gpu in enumerate("92")
    }
    launcher.hosts["h1"] = host_with("10", "3")
    launcher._replace(host_with("9", "2"), launcher.hosts["h1"])
    assert {name: place.gpus for name, place in launcher._places.items()} == {"engine-0": ("10",), "engine-1": ("3",)}


async def test_a_host_that_cannot_serve_is_tried_ever_more_rarely(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is printed once. A host that was away meanwhile may have been mended, and is tried at once."""
    monkeypatch.setattr(launcher_module, "LOOK_S", 0.1)
    monkeypatch.setattr(failed_joins, "FIRST_PAUSE_S", 0.2)
    hosts = LoopbackHosts(run.parent, ["h0", "h1"])
    async with running(run, hosts, recipe(run)) as (supervisor, launcher), anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        hosts.blind.add("h1")
        hosts.links["h1"].process.kill()
        with anyio.fail_after(60):
            failures = launcher._failed_joins
            await until(lambda: "h1" in failures.by_host and failures.by_host["h1"].pause_s == 0.8)
            assert not failures.may_try("h1") and failures.may_try("h2")
            assert caplog.text.count("no host has joined: ") == 1
            failures.by_host["h1"] = msgspec.structs.replace(failures.by_host["h1"], retry_s=math.inf)
            hosts.blind.clear()
            hosts.names = ["h0"]
            await until(lambda: "h1" not in failures.by_host)
            hosts.names = ["h0", "h1"]
            await until((run / "pids" / "engine-0.1").exists)
        supervisor.request_drain()


@pytest.mark.long
async def test_two_hosts_that_are_back_have_their_own_engines(run: Path) -> None:
    """Two lost hosts that are back have their own engines, also where one fails at first."""
    hosts = LoopbackHosts(run.parent, ["h0", "h1", "h2"])
    async with running(run, hosts, recipe(run, engine_hosts=2)) as (supervisor, _), anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        hosts.names, hosts.blind = ["h0"], {"h1"}
        for name in ("h1", "h2"):
            hosts.links[name].process.kill()
        with anyio.fail_after(60):
            await until(lambda: len(supervisor.retired) == 2)
            hosts.names = ["h0", "h1", "h2"]
            await until((run / "pids" / "engine-1.1").exists)
            await until(lambda: hosts.started.count("h1") > 2)
            hosts.blind.clear()
            await until((run / "pids" / "engine-0.1").exists)
        placed = {plan.name: plan.host for plan in read_topology(run).processes if plan.role is Role.ENGINE}
        assert placed == {"engine-0": "h1", "engine-1": "h2"}
        supervisor.request_drain()


@pytest.mark.long
async def test_a_joining_host_starts_the_requested_engine(run: Path) -> None:
    """Of the engines of a lost host, the requested one is started when a host joins."""
    hosts = LoopbackHosts(run.parent, ["h0", "h1"])
    async with running(run, hosts, recipe(run)) as (supervisor, launcher), anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        orders = EngineOrders(supervisor)
        launcher.on_join = orders.start_retired
        hosts.names = ["h0"]
        hosts.links["h1"].process.kill()
        with anyio.fail_after(60):
            await until(lambda: len(supervisor.retired) == 2)
            for order in (StopEngine(engine="engine-0"), StopEngine(engine="engine-1"), StartEngine(engine="engine-1")):
                await orders.handle(order)
            assert supervisor.retired == ["engine-1"]
            hosts.names = ["h0", "h2"]
            await until((run / "pids" / "engine-1.1").exists)
        assert not (run / "pids" / "engine-0.1").exists()
        supervisor.request_drain()


@pytest.mark.long
async def test_a_host_back_early_has_each_engine_once(run: Path) -> None:
    """A host that is back before the cluster missed it has each engine once."""
    hosts = LoopbackHosts(run.parent, ["h0", "h1"])
    async with running(run, hosts, recipe(run)) as (supervisor, _), anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        daemon = hosts.links["h1"]
        daemon.cut = True
        most = 0
        with anyio.fail_after(300):
            while not (run / "pids" / "engine-0.1").exists():
                pids = [int(path.read_text()) for path in (run / "pids").glob("engine-0.*")]
                most = max(most, sum(map(lives, pids)))
                daemon.cut = not daemon.released  # heals when the run has given it up, and has said so in vain
                await anyio.sleep(0.01)
        assert most == 1 and not lives(pid_of(run, "engine-0")) and not lives(daemon.process.pid)
        assert hosts.started.count("h1") == 2
        supervisor.request_drain()


@pytest.mark.long
async def test_a_rank_of_a_lost_host_resumes_the_run(run: Path) -> None:
    """A lost host with a rank has the run resumed on the hosts that are left."""
    hosts = LoopbackHosts(run.parent, ["h0", "h1"])
    one = recipe(run, trainer_hosts=1, engine_hosts=1)
    hosts.names = ["h1", "h0"]  # the rank is away from the controller
    async with running(run, hosts, one) as (supervisor, _), anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        epoch = read_topology(run).epoch
        lost = next(plan.host for plan in read_topology(run).processes if plan.name == "trainer-0")
        hosts.names.remove(lost)
        hosts.links[lost].process.kill()
        with anyio.fail_after(300):
            await until((run / "pids" / "trainer-0.1").exists)
        after = read_topology(run)
        assert after.epoch > epoch
        assert {plan.host for plan in after.processes if plan.host} == {"h0", "h1"} - {lost}
        supervisor.request_drain()


@pytest.mark.long
async def test_a_run_ended_while_waiting_starts_nothing(run: Path) -> None:
    """A run that is ended while it waits for a host starts nothing any more."""
    hosts = LoopbackHosts(run.parent, ["h1", "h0"])  # the rank is away from the controller
    async with (
        running(run, hosts, recipe(run, engine_hosts=2)) as (supervisor, launcher),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(supervisor.watch)
        hosts.names = ["h0"]
        hosts.links["h1"].process.kill()
        with anyio.fail_after(60):
            await until(lambda: launcher._placing)
            await supervisor.kill(0)
            hosts.names = ["h0", "h2"]
            await until(lambda: not launcher._placing)
        await anyio.sleep(0.5)
        assert set(supervisor.starts.values()) == {1}


async def test_what_changes_torch_is_passed_on_to_other_hosts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "a", "NCCL_IB_HCA": "mlx5"}
    chosen |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "OMP_NUM_THREADS": "4", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for name, value in (chosen | {"HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "3"}).items():
        monkeypatch.setenv(name, value)
    hosts = LoopbackHosts(run.parent, ["h0"])
    local, need = LocalLauncher((), run, run.parent), GpuNeed(engine=0, rank=0)
    launcher = ClusterLauncher(recipe(run), run, run.parent, hosts, local, need, lambda *_: None)
    given = launcher._setup_of((await hosts.offers())[0]).variables
    assert chosen.items() <= given.items() and not {"HF_TOKEN", "CUDA_VISIBLE_DEVICES"} & given.keys()


async def test_hosts_without_the_run_or_its_gpus_are_refused(run: Path) -> None:
    """A host that does not see the run or its GPUs is refused before a process starts."""
    one = recipe(run)
    hosts = LoopbackHosts(run.parent, ["h0", "h1"], blind=["h0", "h1"])
    hosts.gpus = 2
    local, need = LocalLauncher((), run, run.parent), GpuNeed(engine=1, rank=0)
    launcher = ClusterLauncher(one, run, run.parent, hosts, local, need, lambda *_: None)
    async with anyio.create_task_group() as nursery:
        with pytest.raises(RecipeError, match=r"h1 does not see this run's directory: set run\.directory") as refused:
            await launcher.run(nursery)
        assert "h1 shows 0 of the 2 GPUs that Ray gave: look at nvidia-smi there" in str(refused.value)
        nursery.cancel_scope.cancel()
    with anyio.fail_after(60):
        await until(lambda: not any(lives(link.process.pid) for link in hosts.links.values()))


@pytest.mark.long
async def test_a_file_system_that_hangs_costs_no_host(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = LoopbackHosts(run.parent, ["h0", "h1"])
    async with running(run, hosts, recipe(run)) as (supervisor, launcher), anyio.create_task_group() as tasks:
        monkeypatch.setattr(supervisor._logs, "shorten", lambda: time.sleep(LEASE_S + remote_host.MARGIN_S + 1.0))
        supervisor._logs._due_s = began_s = time.monotonic()
        tasks.start_soon(supervisor.watch)
        with anyio.fail_after(60):
            await until(lambda: time.monotonic() > began_s + LEASE_S + remote_host.MARGIN_S + 1.0)
        await anyio.sleep(1.0)
        assert not launcher.hosts["h1"].lost
        supervisor.request_drain()


@pytest.mark.long
async def test_a_late_answer_is_no_loss(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    hosts = LoopbackHosts(run.parent, ["h0", "h1"])
    async with running(run, hosts, recipe(run)) as (supervisor, launcher):
        hosts.links["h1"].cut = True
        await until(lambda: "h1 does not answer" in caplog.text)
        hosts.links["h1"].cut = False
        await until(lambda: "h1 answers again" in caplog.text)
        assert not launcher.hosts["h1"].lost and supervisor.children["engine-0"].running

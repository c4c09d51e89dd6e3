"""``python -m streamrl.cli.submit.cluster_host``: the program of one host of a cluster, until the run ends.

Slurm, Kubernetes or ssh starts it. It starts Ray in a temporary folder of its own. On the first host (rank 0) it runs
the command behind ``--`` once all hosts are in the cluster, and ends with that command; on other hosts it ends when the
head is gone. Then it ends all processes below it. SIGUSR1 drains the run; so does the first SIGTERM, and the second
ends it. With ``--lease`` orders come on stdin, and the end of stdin, or its silence, ends the run: the connection of
``streamrl launch ssh`` is gone."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from streamrl.base.atomic_files import write_atomic
from streamrl.base.host_addresses import at_port, bare_host
from streamrl.base.run_process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    end_session,
    set_process_option,
    signal_name,
    start_session,
)
from streamrl.base.types import TextsByName
from streamrl.cli.submit.ray_start import RAY_PORT, ray_arguments, variables_with_ray
from streamrl.processes.cluster.this_host import address_on, raise_file_limit

TICK_S = 0.25
PROBE_S = 2.0
GONE_S = 60.0
"""How long a host waits for the head, as Ray itself does (gcs_rpc_server_reconnect_timeout_s)."""
END_S = 20.0
RAY_END_S = 3.0
"""How long Ray may take to end by itself; Slurm kills what it ends after 30 s by default."""
LONGEST_PAUSE_S = 60.0
"""Longest pause before Ray is started again on a host."""
LEASE_S = 75.0
"""Silence on stdin after which the connection counts as gone: ssh ends it before, 60 s after an answer."""
_LONGEST_FOLDER = 28  # Ray adds 79 bytes to it in paths of sockets, which have at most 107


class HostFailed(Exception):
    """This host cannot take part: the text says why."""


class Host:
    """Ray and the run on this host. ``token``: a file; where it is not there, the first host makes it."""

    def __init__(self, options: argparse.Namespace, token: Path, head: str) -> None:
        self._options = options
        self._token = token
        self._is_head = options.rank == 0
        # Another host finds its address when the head answers: before, the name of the head may be unknown.
        self._address = ""
        if self._is_head:
            self._address = own_address(options.interface, options.peer)
        self._at = at_port(self._address or head, options.port)
        short = next(p for p in (tempfile.gettempdir(), "/tmp") if len(p) <= _LONGEST_FOLDER or p == "/tmp")
        self._temporary = Path(tempfile.mkdtemp(prefix="streamrl-", dir=short))  # for this user alone
        self._orders = _Orders(options.lease)
        self._ray: subprocess.Popen[bytes] | None = None
        self._joined = False
        self._work: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Return the exit code of the run, or 0 on another host. Raises ``HostFailed``."""
        try:
            deadline_s = time.monotonic() + self._options.start_s
            if self._is_head and self._options.pid is not None:
                self._options.pid.write_text(str(os.getpid()))
            variables = variables_with_ray(os.environ, self._shared_token(deadline_s))
            if not self._is_head:
                self._await(partial(answers, self._at), deadline_s, f"no head of Ray answers at {self._at}")
                self._address = own_address(self._options.interface, bare_host(self._at.rpartition(":")[0]))
            arguments = ray_arguments(
                head=self._is_head,
                at=self._at,
                address=self._address,
                temporary=self._temporary / "r",  # Ray opens its folder to all users: they would replace its sockets
                gpus=self._options.gpus,
            )
            role = " (head)" if self._is_head else f", of {self._at}"
            say(f"starting Ray at {self._address}{role}")
            self._start_ray(arguments, variables)
            if not self._is_head:
                pause_s = TICK_S
                while not self._wait_for_end(deadline_s):
                    self._kill_below()  # with two raylets on this host its GPUs would count twice
                    until_s = time.monotonic() + pause_s
                    while time.monotonic() < until_s and not self._orders.endings:
                        self._orders.wait(TICK_S)
                    pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
                    self._start_ray(arguments, variables)
                return 0
            self._await(partial(answers, self._at), deadline_s, "Ray did not start")
            left_s = str(max(1, round(deadline_s - time.monotonic())))
            nodes = str(self._options.nodes)
            waiting = [sys.executable, "-m", "streamrl.cli.submit.ray_nodes", self._at, nodes, left_s]
            if self._finish(waiting, variables, needs_all=True) != 0:
                if self._orders.endings or self._orders.drains or self._orders.failures:
                    raise HostFailed("ended before the run began")
                raise HostFailed(f"Ray did not have its {nodes} hosts within {self._options.start_s:g} s: see above")
            code = self._finish(self._run_command(), variables)
            if self._options.pid is not None:
                self._options.pid.with_name("code").write_text(str(code))
            return code
        finally:
            self._end()

    def _start_ray(self, arguments: Sequence[str], variables: TextsByName) -> None:
        if shutil.which(arguments[0]) is None:
            raise HostFailed('ray is not on the PATH: `pip install "streamrl[ray]"`, or see --setup')
        with (self._temporary / "ray.out").open("wb") as output:
            self._ray = _start(arguments, variables, signal.SIGTERM, stdout=output)

    def _run_command(self) -> list[str]:
        """The command of the options; where an earlier start of this job began a run, the command that resumes that
        run."""
        words = [word.replace("{cluster}", self._at) for word in self._options.command]
        if not self._options.begun:
            return words
        earlier = Path(self._options.begun)
        earlier_recipes = sorted(earlier.parent.glob(f"{earlier.name}-2*/recipe.toml"))
        if not earlier_recipes:
            return words
        say(f"going on with {earlier_recipes[-1].parent}")
        return ["python", "-m", "streamrl", "resume", str(earlier_recipes[-1].parent), "--cluster", self._at]

    def _shared_token(self, deadline_s: float) -> Path:
        if self._is_head and not self._token.exists():
            self._token.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._token.parent, delete=False) as file:  # mode 600
                file.write(secrets.token_hex(32))
            os.rename(file.name, self._token)
        missing = f"the first host wrote no {self._token}: do hosts share that folder?"
        self._await(self._token.exists, deadline_s, missing)
        status = self._token.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise HostFailed(f"{self._token} is not a file of this user alone (mode 600): remove it, and start again")
        return self._token

    def _await(self, condition: Callable[[], bool], deadline_s: float, failure: str) -> None:
        while not condition():
            if self._orders.endings or (self._ray is not None and self._ray.poll() is not None):
                raise HostFailed(self._why_ray_ended())
            if time.monotonic() > deadline_s:
                raise HostFailed(f"{failure} within {self._options.start_s:g} s{self._last_lines()}")
            self._orders.wait(TICK_S)

    def _wait_for_end(self, deadline_s: float) -> bool:
        """Wait until the head is gone or this host has to end. Returns False where Ray ended here and is to be started
        again: it was too slow to start, or had lost the head, which answers. Raises ``HostFailed`` where Ray never
        joined the head and, with a lease, where the head is gone: when a run ends as it should, the launcher's order
        comes before that."""
        assert self._ray is not None
        answered_s = probed_s = time.monotonic()
        while (now_s := time.monotonic()) - answered_s <= GONE_S:
            has_ended = self._ray.poll() is not None
            if self._orders.endings and (has_ended or not self._options.linger):
                return True
            if has_ended or now_s - probed_s >= PROBE_S:
                probed_s = now_s
                if answers(self._at):
                    answered_s = now_s
                elif not self._options.lease and not self._token.exists():
                    return True  # the first host removes its token at the end
            if has_ended and answered_s == now_s:
                output = self._output()
                self._joined = self._joined or "Ray runtime started" in output
                is_slow = "timed out during startup" in output and now_s < deadline_s
                if not is_slow and not self._joined:
                    raise HostFailed(self._why_ray_ended())
                say(f"{self._why_ray_ended()}\nstarting Ray again")
                return False
            self._orders.wait(TICK_S)
        if self._options.lease:
            raise HostFailed(f"Ray's head at {self._at} has not answered for {GONE_S:g} s: is it there, and reachable?")
        return True

    def _finish(self, command: Sequence[str], variables: TextsByName, *, needs_all: bool = False) -> int:
        """Run a command of the first host, pass orders on to it, and return its exit code. ``needs_all``: whether the
        failure of another host ends the command."""
        assert self._ray is not None
        sent_signals = 0
        sent_s = 0.0
        ray_ended = False
        self._work = _start(command, variables, signal.SIGKILL, stderr=None)
        while (code := self._work.poll()) is None:
            self._orders.wait(TICK_S)
            # Requests to drain count once: Slurm sends one when time is up, also to a run that drains already.
            requested = self._orders.endings + min(1, self._orders.drains)
            if needs_all:
                requested += self._orders.failures
            if self._ray.poll() is not None and not ray_ended:
                ray_ended = True
                say(self._why_ray_ended())
            if ray_ended:
                requested = 2
            now_s = time.monotonic()
            if sent_signals < min(2, requested) and now_s > sent_s + TICK_S:  # two signals at once would count as one
                self._work.send_signal(signal.SIGINT)  # Ray takes SIGTERM for itself in programs that use it
                sent_signals += 1
                sent_s = now_s
            elif sent_signals == 2 and now_s > sent_s + 2 * END_S:  # the lease of a host that does not answer is over
                self._work.kill()
        return code if code >= 0 else 128 - code

    def _why_ray_ended(self) -> str:
        if self._orders.endings:
            return "ended before the run began"
        code = self._ray.poll() if self._ray is not None else None
        ending = signal_name(-code) if code is not None and code < 0 else f"exit code {code}"
        return f"Ray ended ({ending}){self._last_lines()}"

    def _output(self) -> str:
        with suppress(OSError):
            return (self._temporary / "ray.out").read_text(errors="replace").strip()
        return ""

    def _last_lines(self) -> str:
        return "".join(f"\n  {line}" for line in self._output().splitlines()[-8:])

    def _end(self) -> None:
        """End Ray, then all other processes below this one; remove the files of this process."""
        for process, seconds in ((self._work, END_S), (self._ray, RAY_END_S)):
            if process is not None and process.poll() is None:
                process.terminate()
                end_session(process, seconds)
        self._kill_below()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._is_head:
            self._token.unlink(missing_ok=True)

    @staticmethod
    def _kill_below() -> None:
        deadline_s = time.monotonic() + END_S
        while (processes := psutil.Process().children(recursive=True)) and time.monotonic() < deadline_s:
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.05)


class _Orders:
    """Orders to this host, by signals and, with a lease, by lines on stdin.

    ``drains``: number of requests to drain.
    ``endings``: number of requests to end; after two, the run is not drained but killed.
    ``failures``: number of other hosts that failed."""

    def __init__(self, lease: bool) -> None:
        self.drains = 0
        self.endings = 0
        self.failures = 0
        self._heard_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._lease = lease
        if lease:
            os.set_blocking(0, False)
            self._selector.register(0, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until an order comes on stdin."""
        if not self._lease:
            time.sleep(seconds)
            return
        if self._selector.select(seconds):
            data = os.read(0, 4096)
            self._heard_s = time.monotonic()
            self.drains += data.count(b"d")
            self.endings += 2 * data.count(b"e")
            self.failures += data.count(b"f")
            self._lease = bool(data)
        if not self._lease or time.monotonic() - self._heard_s > LEASE_S:
            if not self.endings:
                say("streamrl launch is gone, or its connection: ending")
            self._lease = False
            self.endings += 2

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGUSR1:
            self.drains += 1
        else:
            self.endings += 1


def own_address(interface: str, peer: str) -> str:
    """Address of this host on ``interface`` (a name, or CIDR), or the address from which it reaches ``peer``. Raises
    ``HostFailed``."""
    if interface:
        if address := address_on(interface):
            return address
        raise HostFailed(f"no address of this host is in cluster.advanced.interface = {interface!r}: correct it")
    targets = [peer] if peer else ["192.0.2.1", socket.gethostname()]  # 192.0.2.0/24 is reserved for documentation
    for target in targets:
        with suppress(OSError):
            for answer in sorted(socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)):  # IPv4 first
                with suppress(OSError), socket.socket(answer[0], socket.SOCK_DGRAM) as probe:
                    probe.connect(answer[4])  # UDP: nothing is sent
                    return str(probe.getsockname()[0])
    raise HostFailed(f"no way from here to {peer or 'itself'}: name the network by cluster.advanced.interface")


def answers(at: str) -> bool:
    """Return whether something accepts connections at HOST:PORT."""
    host, _, port = at.rpartition(":")
    with suppress(OSError), socket.create_connection((bare_host(host), int(port)), timeout=PROBE_S):
        return True
    return False


def say(text: str) -> None:
    """Print a line of this host."""
    with suppress(OSError):  # nobody reads it any more
        print(f"{socket.gethostname()}: {text}", flush=True)


def _start(
    command: Sequence[str], variables: TextsByName, dies_by: signal.Signals, **outputs: Any
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own. It ends with this process (``dies_by``), which has one thread."""
    return start_session(command, env=variables, preexec_fn=partial(_tie, dies_by), **outputs)


def _tie(dies_by: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell starts with &
    set_process_option(PR_SET_PDEATHSIG, dies_by)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m streamrl.cli.submit.cluster_host", description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="of this host; 0: Ray's head, and the command")
    parser.add_argument("--nodes", type=int, required=True, help="hosts that the command waits for")
    parser.add_argument("--head", default="", help="address of the first host, for the others")
    parser.add_argument("--peer", default="", help="for the first host: one of the others")
    parser.add_argument("--port", type=int, default=RAY_PORT, help="of Ray's head")
    parser.add_argument("--token", default="", help="file, on a file system of all hosts; made by the first host")
    parser.add_argument("--pid", type=Path, help="file for the process of the first host, and `code` beside it")
    parser.add_argument("--gpus", type=int, help="of this host (default: Ray finds them)")
    parser.add_argument("--interface", default="", help="network of this host's address")
    parser.add_argument("--start-s", type=float, default=300.0, help="how long hosts may take to start")
    parser.add_argument("--begun", default="", help="RUNS/NAME: resume a run of that name in place of the command")
    parser.add_argument("--linger", action="store_true", help="SIGTERM: wait for the first host to end")
    parser.add_argument("--lease", action="store_true", help="take token, head and orders from stdin, and end with it")
    parser.add_argument("command", nargs="*", help="{cluster} stands for HOST:PORT")
    return parser.parse_args(arguments)


def _first_line() -> bytes:
    """Read a line of stdin, and not a byte more."""
    line = b""
    while not line.endswith(b"\n") and (more := os.read(0, 1)):
        line += more
    return line


def main(arguments: Sequence[str]) -> int:
    """Run this host. Returns the exit code."""
    options = _options(arguments)
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    raise_file_limit()
    private = Path(tempfile.mkdtemp(prefix="streamrl-token-")) if options.lease else None
    try:
        token = Path(options.token)
        head = options.head
        if private is not None:
            if not (line := _first_line()).startswith(b"{"):  # other hosts could not be reached
                return 1
            connection_facts = json.loads(line)
            token = private / "token"
            head = connection_facts["head"]
            options.peer = options.peer or head
            write_atomic(token, connection_facts["token"].encode())
            os.environ.update(connection_facts["variables"])
        return Host(options, token, head).run()
    except HostFailed as failure:
        say(str(failure))
        return 1
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

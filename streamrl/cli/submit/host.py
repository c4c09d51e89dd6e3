"""``python -m streamrl.cli.submit.host``: the program of one host of a cluster, until the run ends.

It starts Ray in a temporary folder of its own, on the first host (rank 0) also the command behind ``--``, once all
hosts are there; it ends with that command, on other hosts when the head is gone. Then it ends all that is below it.
SIGUSR1 drains the run; so does the first SIGTERM, and the second ends it. With ``--lease`` orders come on stdin, and
its end or silence ends the run: the connection of ``streamrl launch ssh`` is gone."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from streamrl.base.run_process import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, set_process_option, signal_name
from streamrl.cli.submit.ray_start import RAY_PORT, ray_arguments, ray_environment
from streamrl.processes.cluster.this_host import address_on, raise_file_limit

TICK_S = 0.25
PROBE_S = 2.0
GONE_S = 10.0
END_S = 20.0
RAY_END_S = 3.0
"""How long Ray may take to end by itself; Slurm kills what it ends after 30 s by default."""
RAY_START_S = 30.0
"""How long `ray start` waits for what it started, and says then that it "timed out during startup"."""
LEASE_S = 15.0
"""Silence on stdin after which the connection counts as gone."""
_LONGEST_FOLDER = 30  # Ray adds 77 bytes to it in paths of sockets, which have at most 107


class HostFailed(Exception):
    """This host cannot take part: the text says why."""


class Host:
    """Ray and the run on this host. ``token``: a file; where it is not there, the first host makes it."""

    def __init__(self, options: argparse.Namespace, token: Path, head: str) -> None:
        self._options = options
        self._token = token
        self._is_head = options.rank == 0
        # Of another host only when the head answers: before, the head's name may be unknown.
        self._own = own_address(options.interface, options.peer) if self._is_head else ""
        self._at = f"{self._own or head}:{options.port}"
        short = next(p for p in (tempfile.gettempdir(), "/tmp") if len(p) <= _LONGEST_FOLDER or p == "/tmp")
        self._temporary = Path(tempfile.mkdtemp(prefix="streamrl-", dir=short))
        self._orders = _Orders(options.lease)
        self._ray: subprocess.Popen[bytes] | None = None
        self._work: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Return the exit code of the run, or 0 on another host. Raises ``HostFailed``."""
        try:
            deadline_s = time.monotonic() + self._options.start_s
            if self._is_head and self._options.pid is not None:
                self._options.pid.write_text(str(os.getpid()))
            environment = ray_environment(os.environ, self._shared_token(deadline_s))
            if not self._is_head:
                self._await(partial(answers, self._at), deadline_s, f"no head of Ray answers at {self._at}")
                self._own = own_address(self._options.interface, self._at.rpartition(":")[0])
            arguments = ray_arguments(
                head=self._is_head, at=self._at, own=self._own, temporary=self._temporary, gpus=self._options.gpus
            )
            say(f"starting Ray at {self._own}" + (" (head)" if self._is_head else f", of {self._at}"))
            self._start_ray(arguments, environment)
            if not self._is_head:
                while not self._served(deadline_s):
                    say(f"Ray gave up after its {RAY_START_S:g} s; starting it again")
                    self._kill_below()  # with two raylets on this host its GPUs would count twice
                    self._start_ray(arguments, environment)
                return 0
            self._await(partial(answers, self._at), deadline_s, "Ray did not start")
            left_s = str(max(1, round(deadline_s - time.monotonic())))
            nodes = str(self._options.nodes)
            waiting = [sys.executable, "-m", "streamrl.cli.submit.ray_nodes", self._at, nodes, left_s]
            if self._finish(waiting, environment, needs_all=True) != 0:
                if self._orders.endings or self._orders.drains or self._orders.failures:
                    raise HostFailed("ended before the run began")
                raise HostFailed(f"Ray did not have its {nodes} hosts within {self._options.start_s:g} s: see above")
            code = self._finish(self._run_command(), environment)
            if self._options.pid is not None:
                self._options.pid.with_name("code").write_text(str(code))
            return code
        finally:
            self._end()

    def _start_ray(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        if shutil.which(arguments[0]) is None:
            raise HostFailed('ray is not on the PATH: `pip install "streamrl[ray]"`, or see --setup')
        with (self._temporary / "ray.out").open("wb") as output:
            self._ray = _start(arguments, environment, signal.SIGTERM, output.fileno())

    def _run_command(self) -> list[str]:
        """The command that was given; where a run of this job was begun before, the one that goes on with it."""
        words = [word.replace("{cluster}", self._at) for word in self._options.command]
        begun = Path(self._options.begun) if self._options.begun else None
        found = sorted(begun.parent.glob(f"{begun.name}-2*/recipe.toml")) if begun else []
        if not found:
            return words
        say(f"going on with {found[-1].parent}")
        return ["python", "-m", "streamrl", "resume", str(found[-1].parent), "--cluster", self._at]

    def _shared_token(self, deadline_s: float) -> Path:
        if self._is_head and not self._token.exists():
            self._token.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._token.parent, delete=False) as file:  # mode 600
                file.write(secrets.token_hex(32))
            os.rename(file.name, self._token)
        missing = f"the first host wrote no {self._token}: do hosts share that folder?"
        self._await(self._token.exists, deadline_s, missing)
        return self._token

    def _await(self, there: Callable[[], bool], deadline_s: float, failure: str) -> None:
        while not there():
            if self._orders.endings or (self._ray is not None and self._ray.poll() is not None):
                raise HostFailed(self._why_ray_ended())
            if time.monotonic() > deadline_s:
                raise HostFailed(f"{failure} within {self._options.start_s:g} s{self._last_lines()}")
            self._orders.wait(TICK_S)

    def _served(self, deadline_s: float) -> bool:
        """Wait until the head is gone or this host has to end. Returns False where Ray was too slow to start. Raises
        ``HostFailed`` where Ray fails here and, with a lease, where the head is gone: when a run ends as it should, the
        launcher's order comes before that."""
        assert self._ray is not None
        answered_s = probed_s = time.monotonic()
        while (now_s := time.monotonic()) - answered_s <= GONE_S:
            has_ended = self._ray.poll() is not None
            if self._orders.endings and (has_ended or not self._options.linger):
                return True
            if has_ended or now_s - probed_s >= PROBE_S:
                probed_s = now_s
                answered_s = now_s if answers(self._at) else answered_s
            if has_ended and answered_s == now_s:
                if "timed out during startup" in self._last_lines() and now_s < deadline_s:
                    return False
                raise HostFailed(self._why_ray_ended())
            self._orders.wait(TICK_S)
        if self._options.lease:
            raise HostFailed(f"Ray's head at {self._at} has not answered for {GONE_S:g} s: is it there, and reachable?")
        return True

    def _finish(self, command: Sequence[str], environment: dict[str, str], *, needs_all: bool = False) -> int:
        """Exit code of a command of the first host, to which orders are passed on. ``needs_all``: it ends, too, where
        another host has failed."""
        assert self._ray is not None
        sent = 0
        sent_s = 0.0
        ray_ended = False
        self._work = _start(command, environment, signal.SIGKILL)
        while (code := self._work.poll()) is None:
            self._orders.wait(TICK_S)
            # A second request to drain asks for nothing new: Slurm sends one when time is up, whatever was before.
            wanted = min(2, self._orders.endings + bool(self._orders.drains) + (needs_all and self._orders.failures))
            if self._ray.poll() is not None and not ray_ended:
                ray_ended = True
                say(self._why_ray_ended())
            now_s = time.monotonic()
            if sent < (2 if ray_ended else wanted) and now_s > sent_s + TICK_S:  # two at once would be taken for one
                self._work.send_signal(signal.SIGINT)  # Ray takes SIGTERM for itself in programs that use it
                sent = sent + 1
                sent_s = now_s
            elif sent == 2 and now_s > sent_s + 2 * END_S:  # the lease of a host that does not answer is over
                self._work.kill()
        return code if code >= 0 else 128 - code

    def _why_ray_ended(self) -> str:
        if self._orders.endings:
            return "ended before the run began"
        code = self._ray.poll() if self._ray is not None else None
        ending = signal_name(-code) if code is not None and code < 0 else f"exit code {code}"
        return f"Ray ended ({ending}){self._last_lines()}"

    def _last_lines(self) -> str:
        with suppress(OSError):
            lines = (self._temporary / "ray.out").read_text(errors="replace").strip().splitlines()[-8:]
            return "".join(f"\n  {line}" for line in lines)
        return ""

    def _end(self) -> None:
        """End Ray, then everything that is left below this process; remove what was written."""
        for process, seconds in ((self._work, END_S), (self._ray, RAY_END_S)):
            if process is not None and process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
        self._kill_below()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if self._is_head:
            self._token.unlink(missing_ok=True)

    @staticmethod
    def _kill_below() -> None:
        deadline_s = time.monotonic() + END_S
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline_s:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.05)


class _Orders:
    """Orders to this host, by signals and, with a lease, by lines on stdin. ``endings``: two end at once; ``failures``:
    of other hosts."""

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
        """Wait so long, or shorter where something was asked for."""
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
    """Address of this host on ``interface`` (a name, or CIDR), or the one from which it reaches ``peer``. Raises
    ``HostFailed``."""
    if interface:
        if found := address_on(interface):
            return found
        raise HostFailed(f"no address of this host is in cluster.advanced.interface = {interface!r}: correct it")
    for target in (peer,) if peer else ("192.0.2.1", socket.gethostname()):  # a network that is nobody's
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # of UDP: nothing is sent
            return str(probe.getsockname()[0])
    raise HostFailed(f"no way from here to {peer or 'itself'}: name the network by cluster.advanced.interface")


def answers(at: str) -> bool:
    """Return whether something accepts connections at HOST:PORT."""
    host, _, port = at.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=PROBE_S):
        return True
    return False


def say(text: str) -> None:
    """Print a line of this host."""
    with suppress(OSError):  # nobody reads it any more
        print(f"{socket.gethostname()}: {text}", flush=True)


def _start(
    command: Sequence[str], environment: dict[str, str], dies_by: signal.Signals, output: int | None = None
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that no signal of a terminal or a step reaches it; it ends with this process, which
    has one thread."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        preexec_fn=partial(_tie, dies_by),
    )


def _tie(dies_by: signal.Signals) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell starts with &
    set_process_option(PR_SET_PDEATHSIG, dies_by)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m streamrl.cli.submit.host", description=__doc__)
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
            given = json.loads(line)
            token = private / "token"
            head = given["head"]
            options.peer = options.peer or head
            token.write_text(given["token"])
        return Host(options, token, head).run()
    except HostFailed as failure:
        say(str(failure))
        return 1
    finally:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

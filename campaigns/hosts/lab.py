"""A laboratory of hosts on one Linux machine: namespaces of network, pids, mounts, names and ipc, and wires that fail.

A host has an address of its own, its own /dev/shm and its own folder for temporary files; it sees the machine's files
otherwise, and no network but the laboratory's. Needs root, iproute2 and util-linux."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from campaigns.hosts import wire

INIT = """
import signal, os
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
while True:
    signal.sigtimedwait([signal.SIGCHLD], 0.5)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
"""
"""The first process of a host, which reaps: a namespace of pids dies with it."""
DISK_MIB = 2048
"""Size of the folder for temporary files of a host."""
Command = Sequence[object]


def why_not() -> str:
    """Reason for which there can be no laboratory here; empty: there can."""
    if os.geteuid() != 0:
        return "not root"
    tried = subprocess.run(["unshare", "-n", "-m", "-p", "-u", "-i", "--fork", "true"], capture_output=True)
    if tried.returncode or not Path("/dev/net/tun").exists() or not shutil.which("ip"):
        return f"no namespaces, iproute2 or TUN here {tried.stderr.decode(errors='replace')}"
    return ""


class Host:
    """One host of a laboratory, named ``h0``, ``h1``, ..."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab, self.number = lab, number
        self.name, self.address, self.port = f"h{number}", f"{lab.subnet}.{number + 1}", f"v{number}"
        self.moves = 0
        self._wire: subprocess.Popen[bytes] | None = None
        self.boot()

    def boot(self) -> None:
        """Begin a life of this host."""
        tmp = self.lab.tmp
        disk = f"mount -t tmpfs -o size={DISK_MIB}m tmpfs {tmp}"
        mounts = f"mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && {disk}"
        line = f"{mounts} && hostname {self.name} && exec {sys.executable} -S -c '{INIT}'"
        flags = ("-n", "-m", "-p", "-u", "-i", "--fork", "--kill-child", "--propagation", "private")
        self._unshare = subprocess.Popen(
            ["unshare", *flags, "bash", "-c", line], start_new_session=True, stderr=subprocess.DEVNULL
        )
        while not (found := psutil.Process(self._unshare.pid).children()) or "-S" not in found[0].cmdline():
            if self._unshare.poll() is not None:
                raise RuntimeError(f"{self.name} has not begun")
            time.sleep(0.01)
        self.init = found[0]
        self.space = os.stat(f"/proc/{self.init.pid}/ns/pid").st_ino
        # The same at each boot: other hosts remember it.
        peer = f"peer name eth0 address 02:00:00:00:00:{self.number:02x} netns {self.init.pid}"
        self._ip("link", "add", self.port, "type", "veth", *peer.split())
        self._ip("link", "set", self.port, "master", "br0", "up")
        for command in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run("nsenter", "-t", self.init.pid, "-n", "ip", *command.split())

    def kill(self) -> None:
        """End this life of the host, with everything that runs there."""
        self.heal()
        self.init.kill()
        self._unshare.wait()
        with suppress(subprocess.CalledProcessError):
            self._ip("link", "del", self.port)  # the kernel removes it, too, a moment later

    def move(self) -> None:
        """Have another address from the next boot on."""
        self.moves += 1
        self.address = f"{self.lab.subnet}.{self.number + 1 + 20 * self.moves}"

    def fill_disk(self) -> None:
        """Leave no byte in the folder for temporary files."""
        with suppress(RuntimeError):  # dd fails as soon as the disk is full
            self.run(["dd", "if=/dev/zero", f"of={self.lab.tmp}/filled", "bs=1M"])

    def free_disk(self) -> None:
        """Remove what fills the disk."""
        self.run(["rm", "-f", f"{self.lab.tmp}/filled"])

    def popen(self, command: Command, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[bytes]:
        """Start a command here, in the working directory of the caller, with ``env`` in addition."""
        enter = ("nsenter", "-t", self.init.pid, "-n", "-m", "-p", "-u", "-i", "--", "env", "-C", os.getcwd())
        variables = os.environ | {"TMPDIR": str(self.lab.tmp)} | dict(env or {})
        return subprocess.Popen([*map(str, (*enter, *command))], env=variables, **more)

    def run(self, command: Command, env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> str:
        """Output of a command here. Raises ``RuntimeError`` with it where it fails or does not end."""
        process = self.popen(command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            output = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            end(psutil.Process(process.pid).children(recursive=True))
            output = process.communicate()[0].decode(errors="replace")
        if process.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(map(str, command))}: {process.returncode}: {output}")
        return output

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living processes of this host with all ``words`` in their command lines, by its namespace of pids."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):
                if process.pid != self.init.pid and os.stat(f"/proc/{process.pid}/ns/pid").st_ino == self.space:
                    line = command_of(process)
                    found += [process] if line and all(word in line for word in words) else []
        return found

    def impair(self, what: str, *ways: str) -> None:
        """Set a fault of the wire (``wire``) in these directions, or in both."""
        process = self._with_wire()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(f"{way} {what}\n" for way in ways or ("out", "in")).encode())
        process.stdin.flush()
        process.stdout.readline()

    def heal(self) -> None:
        """Have a wire without faults again."""
        if self._wire is None:
            return
        process, self._wire = self._wire, None
        process.communicate()
        with suppress(subprocess.CalledProcessError):
            self._ip("link", "set", self.port, "master", "br0")

    def _with_wire(self) -> subprocess.Popen[bytes]:
        if self._wire is None:
            tap = f"t{self.number}"
            self._ip("link", "set", self.port, "nomaster", "promisc", "on")
            line = ("ip", "netns", "exec", self.lab.bridge, sys.executable, wire.__file__, self.port, tap)
            self._wire = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._wire.stdout is not None
            self._wire.stdout.readline()
            self._ip("link", "set", tap, "master", "br0", "up")
        return self._wire

    def _ip(self, *arguments: str) -> None:
        _run("ip", "-n", self.lab.bridge, *arguments)


class Lab:
    """Hosts and the bridge between them. Made by ``laboratory``."""

    def __init__(self, name: str, subnet: str, count: int) -> None:
        self.bridge, self.subnet = f"{name}-sw", subnet
        self.folder = Path("/tmp") / f"{name}-lab"
        self.tmp = self.folder / "t"  # short: the path of a socket has 107 bytes
        shutil.rmtree(self.folder, ignore_errors=True)
        self.tmp.mkdir(parents=True)
        subprocess.run(["ip", "netns", "del", self.bridge], capture_output=True)
        _run("ip", "netns", "add", self.bridge)
        _run("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.bridge, "link", "set", "br0", "up")
        self.hosts = [Host(self, number) for number in range(count)]

    def close(self) -> None:
        """End all hosts with everything that runs there."""
        for host in self.hosts:
            host.kill()
        _run("ip", "netns", "del", self.bridge)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def laboratory(name: str, *, count: int = 3, subnet: str = "10.81.0") -> Iterator[Lab]:
    """A laboratory of ``count`` hosts; of several at one time each has its own ``name`` (at most 8 letters)."""
    lab = Lab(name, subnet, count)
    try:
        yield lab
    finally:
        lab.close()


def command_of(process: psutil.Process) -> str:
    """Command line of a process; empty: it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def end(processes: Sequence[psutil.Process], with_signal: int = signal.SIGKILL) -> None:
    """Send a signal to those that live."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(with_signal)


def _run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True)

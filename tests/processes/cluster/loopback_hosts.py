"""Hosts of a cluster without Ray: real daemons, each a process of its own with a loopback address and a temporary
folder of its own. What is between the run and a daemon can be cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from streamrl.processes.cluster.cluster_launcher import HostOffer
from streamrl.processes.cluster.daemon_messages import DaemonSetup, HostFacts
from streamrl.processes.cluster.remote_host import DaemonGone, DaemonLink

STAND_IN = Path(__file__).parents[1] / "stand_in.py"


class PipeLink(DaemonLink):
    """A daemon at the other end of two pipes. ``cut``: nothing arrives."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.cut = False
        self.released = False
        self._one = anyio.Lock()

    async def ask(self, request: bytes) -> bytes:
        if self.cut:
            await anyio.sleep_forever()
        async with self._one:
            with anyio.CancelScope(shield=True):
                return bytes.fromhex(await anyio.to_thread.run_sync(self._exchange, request.hex()))

    def _exchange(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
            if answer := self.process.stdout.readline():
                return answer
        raise DaemonGone("its pipe is closed")

    async def release(self) -> None:
        if not self.released and not self.cut and self.process.poll() is None:
            assert self.process.stdin is not None
            with suppress(OSError):
                self.process.stdin.write("close\n")
                self.process.stdin.flush()
        self.released = True
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with anyio.CancelScope(shield=True), anyio.move_on_after(10.0):  # as of Ray's
            await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)


class LoopbackHosts:
    """``names``: of the hosts that are there. ``blind``: of those that do not see the run's directory. ``gpus``: that
    each is said to have. ``addresses``: of hosts that have another one than by their number."""

    def __init__(self, root: Path, names: Iterable[str], blind: Iterable[str] = ()) -> None:
        self.names = list(names)
        self.blind = set(blind)
        self.gpus = 0
        self.addresses: dict[str, str] = {}
        self.links: dict[str, PipeLink] = {}
        self.started: list[str] = []
        self._root = root

    async def offers(self) -> list[HostOffer]:
        return [
            HostOffer(
                name=name,
                address=self.addresses.get(name, f"127.0.0.{10 + int(name[1:])}"),
                gpus=self.gpus,
                is_run_host=name == "h0",
            )
            for name in self.names
        ]

    async def start_daemons(
        self, gpus: Mapping[HostOffer, int], setup: Callable[[HostOffer], DaemonSetup]
    ) -> list[tuple[DaemonLink, HostFacts]]:
        started: list[tuple[DaemonLink, HostFacts]] = []
        for offer in gpus:
            temporary = self._root / f"{offer.name}-tmp"
            temporary.mkdir(exist_ok=True)
            process = subprocess.Popen(  # noqa: ASYNC220 - it only forks
                [sys.executable, str(Path(__file__).with_name("daemon_process.py")), str(STAND_IN), offer.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TMPDIR": str(temporary)},
            )
            link = self.links[offer.name] = PipeLink(process)
            asked = setup(offer)
            if offer.name in self.blind:
                asked = msgspec.structs.replace(asked, run_directory="/nowhere")
            facts = await link.ask(msgspec.msgpack.encode(asked))
            started.append((link, msgspec.msgpack.decode(facts, type=HostFacts)))
            self.started.append(offer.name)
        return started

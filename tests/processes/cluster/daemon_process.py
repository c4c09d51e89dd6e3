"""A daemon in a process of its own, for tests: ``daemon_process.py ENTRY``. The first line of stdin is its setup, each
other a request; each line of stdout is an answer. All as hex of msgpack."""

from __future__ import annotations

import sys

import anyio
import msgspec

from streamrl.processes.cluster.daemon_messages import DaemonRequest, DaemonSetup
from streamrl.processes.cluster.host_daemon import HostDaemon


async def main() -> None:
    lines = anyio.wrap_file(sys.stdin)
    daemon = HostDaemon(_decode(await lines.readline(), DaemonSetup), name=sys.argv[2], entry=(sys.argv[1],))
    print(msgspec.msgpack.encode(daemon.facts()).hex(), flush=True)
    while line := await lines.readline():
        if line.strip() == "close":
            await daemon.close()
            return
        print(msgspec.msgpack.encode(await daemon.answer(_decode(line, DaemonRequest))).hex(), flush=True)
    await anyio.sleep_forever()  # the run is gone: the lease ends this process


def _decode(line: str, kind: type) -> object:
    return msgspec.msgpack.decode(bytes.fromhex(line), type=kind)


anyio.run(main)  # type: ignore[arg-type]

"""An agent in a process of its own, for tests: ``agent_process.py ENTRY``. The first line of stdin is its setup, each
other a request; each line of stdout is an answer. All as hex of msgpack."""

from __future__ import annotations

import sys

import anyio
import msgspec

from streamrl.processes.cluster.agent import Agent
from streamrl.processes.cluster.agent_messages import AgentRequest, AgentSetup


async def main() -> None:
    lines = anyio.wrap_file(sys.stdin)
    agent = Agent(_decode(await lines.readline(), AgentSetup), name=sys.argv[2], entry=(sys.argv[1],))
    print(msgspec.msgpack.encode(agent.facts()).hex(), flush=True)
    while line := await lines.readline():
        if line.strip() == "close":
            await agent.close()
            return
        print(msgspec.msgpack.encode(await agent.answer(_decode(line, AgentRequest))).hex(), flush=True)
    await anyio.sleep_forever()  # the run is gone: the lease ends this process


def _decode(line: str, kind: type) -> object:
    return msgspec.msgpack.decode(bytes.fromhex(line), type=kind)


anyio.run(main)  # type: ignore[arg-type]

"""A process that writes a journal until it is killed or the disk fails: ``writer_process.py DIRECTORY SEED [RECORDS]``.

Its output: ``opened LAST`` once what it found is as it was written, then the number of each record that is durable, at
last ``failed MESSAGE`` or ``done``."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import anyio

from streamrl.base.concurrent_calls import first_error
from streamrl.run.journal.journal_file import JournalFile
from streamrl.run.journal.log_errors import JournalFailed

BASE = b"state after "


def payload_of(number: int) -> bytes:
    """Record ``number``, in every process: its number, and bytes that follow from it."""
    return b"%d " % number + random.Random(number).randbytes(number * 7919 % 3001)


def last_of(records: Iterable[bytes]) -> int:
    """Number of the last record. Every record since the base is there, in order, as it was written."""
    last = 0
    for record in records:
        if record.startswith(BASE):
            last = int(record.removeprefix(BASE))
        else:
            last += 1
            assert record == payload_of(last), f"record {last} is wrong"
    return last


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


async def write(directory: Path, rng: random.Random, records: int) -> None:
    journal = JournalFile(directory)
    last = last_of(journal.initial_content.records())
    say(f"opened {last}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.run)
        if not journal.initial_content.segments:
            journal.begin_segment([BASE + b"0"])
        while last < records:
            await journal.room()
            for _ in range(rng.randrange(1, 8)):
                last += 1
                sequence = journal.append(payload_of(last))
            if rng.random() < 0.2:
                sequence = journal.begin_segment([BASE + b"%d" % last])
            await journal.durable(sequence)
            say(str(last))
        tasks.cancel_scope.cancel()
    await journal.close()


def main() -> None:
    directory, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    records = int(sys.argv[3]) if len(sys.argv) > 3 else 10**9
    said, code = "done", 0
    try:
        anyio.run(write, directory, rng, records)
    except* JournalFailed as failures:
        said, code = f"failed {first_error(failures)}", 3  # Python 3.11.2 would wrap an exit from here in a group
    say(said)
    sys.exit(code)


if __name__ == "__main__":
    main()
